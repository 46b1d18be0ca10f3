//! Measures harvest_fair against what one would use instead, in one run, and writes bench/RESULTS.md with its pictures.
//!
//! `--quick` does the same with tiny sizes, judges nothing, and leaves the results in .cache/. Names of questions as further
//! arguments run only those, also into .cache/.

mod chart;
mod contenders;
mod place;
mod processes;
mod questions;
mod race;
mod report;
mod sizes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use harvest_fair_server_tests::{Cluster, Environment, Options};

use contenders::{Fetched, RIVALS};
use questions::{Bench, QUESTIONS};
use report::Run;

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("The benchmark failed: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let chosen: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| *argument != "--quick")
        .collect();
    if let Some(unknown) = chosen
        .iter()
        .find(|name| QUESTIONS.iter().all(|(known, _)| known != *name))
    {
        let known: Vec<&str> = QUESTIONS.iter().map(|(name, _)| *name).collect();
        return Err(format!("no question {unknown}: there are {}", known.join(", ")).into());
    }
    let sizes = if quick { &sizes::QUICK } else { &sizes::FULL };
    let fetched = Fetched::find();
    for rival in RIVALS {
        if !fetched.has(rival) {
            println!("  {} could not be fetched: left out", rival.name());
        }
    }

    let began = Instant::now();
    let load = processes::load();
    let cluster = Cluster::start(options());
    let mut client = cluster.connect();
    // The server starts with a setting that it does not understand, and ignores it.
    client.batch_execute("LOAD 'harvest_fair'")?;
    let lease: String = client
        .query_one("SHOW harvest_fair.default_lease", &[])?
        .get(0);
    if lease != LEASE {
        return Err(format!("leases last {lease} instead of {LEASE}").into());
    }
    let server = client
        .query_one("SELECT 'PostgreSQL ' || current_setting('server_version') || ', shared_buffers ' || current_setting('shared_buffers')", &[])?
        .get(0);
    let bench = Bench {
        cluster: &cluster,
        fetched: &fetched,
        sizes,
    };
    let mut answers = Vec::new();
    for (name, question) in QUESTIONS {
        if !chosen.is_empty() && !chosen.contains(&name) {
            continue;
        }
        let start = Instant::now();
        for answer in question(&bench).map_err(|error| format!("{name}: {}", explain(&error)))? {
            println!("  {}", answer.title);
            for finding in &answer.findings {
                println!("    {}", finding.sentence());
            }
            answers.push(answer);
        }
        println!("    ({name} took {:.0} s)", start.elapsed().as_secs_f64());
    }
    drop(cluster);

    let run = Run {
        quick,
        machine: format!("{}; load average {load} at the start", processes::machine()),
        server,
        minutes: began.elapsed().as_secs_f64() / 60.0,
    };
    let home = home();
    let cache = cache();
    let directory = if quick || !chosen.is_empty() {
        cache.clone()
    } else {
        home.clone()
    };
    let reasons = std::fs::read_to_string(home.join("reasons.md")).unwrap_or_default();
    report::write(
        &directory,
        &cache.join("raw"),
        &run,
        &answers,
        &fetched,
        &reasons,
    )?;
    println!("The results: {}", directory.join("RESULTS.md").display());
    Ok(())
}

/// So long that no lease runs out meanwhile: a claim that takes expired ones back is slower, and that is not the question.
const LEASE: &str = "1d";

fn options() -> Options {
    Options::new()
        .set("synchronous_commit", "off")
        .set("autovacuum", "off")
        .set("jit", "off")
        .set("shared_buffers", "1GB")
        .set("maintenance_work_mem", "256MB")
        .set("max_wal_size", "16GB")
        .set("checkpoint_timeout", "1h")
        .set("max_connections", 1_100)
        .set("harvest_fair.max_keys", 131_072)
        .set("harvest_fair.default_lease", LEASE)
}

/// bench/, seen from where cargo or the user runs this.
fn home() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .filter(|directory| directory.is_dir())
        .unwrap_or_else(|| PathBuf::from("."))
}

/// Where results stay that are not to be kept.
fn cache() -> PathBuf {
    match std::env::var_os("HF_CACHE") {
        Some(cache) => Path::new(&cache).join("bench"),
        None => Environment::get().base().join("bench"),
    }
}

/// An error with what the server said about it.
fn explain(error: &Error) -> String {
    let Some(error) = error.downcast_ref::<postgres::Error>() else {
        return error.to_string();
    };
    match error.as_db_error() {
        Some(server) => format!(
            "{}: {} ({}) {}",
            server.severity(),
            server.message(),
            server.code().code(),
            server.detail().unwrap_or_default()
        ),
        None => {
            let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
            format!("{error}{}", cause.unwrap_or_default())
        }
    }
}
