//! Replays three months of a real machine's jobs against a private server, once with harvest_fair.fairness off and once on, and
//! shows what that did to the users' waits.

mod comparison;
mod log;
mod measure;
mod progress;
mod replay;
mod report;
mod table;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Cluster, Options};

use comparison::{Both, Comparison};
use log::{Job, Scale};

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

const WORKERS: usize = 16;
/// In which the whole log is submitted.
const LENGTH: Duration = Duration::from_secs(35);
/// The share of the workers' time that is asked for over the whole log.
const LOAD: f64 = 0.7;
/// In seconds of the log.
const LONGEST_RUN: u32 = 3_600;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nThe demo failed: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let jobs = log::nasa()?;
    let scale = Scale::fit(&jobs, LENGTH, WORKERS, LOAD, LONGEST_RUN);
    introduce(&jobs, &scale);

    let began = Instant::now();
    let cluster = Cluster::start(Options::default());
    println!(
        "  a private Postgres is up after {:.1} s",
        began.elapsed().as_secs_f64()
    );

    // Each in a database of its own, so that the second finds nothing that the first has left.
    let off = replay::replay(&cluster.database(), &jobs, &scale, WORKERS, false)?;
    let on = replay::replay(&cluster.database(), &jobs, &scale, WORKERS, true)?;
    drop(cluster);

    let comparison = Comparison::of(Both {
        off: &off.served,
        on: &on.served,
    });
    println!("\n{}", table::of(&comparison));
    println!(
        "Beyond its run time a task kept its worker for {} with fairness off and {} with fairness on, on average.\n",
        text::ms(off.overhead.as_secs_f64() * 1e3),
        text::ms(on.overhead.as_secs_f64() * 1e3)
    );
    let late = off.producer_late.max(on.producer_late);
    if late > Duration::from_millis(250) {
        println!(
            "This machine was short of breath: the producer was up to {} behind the log.\n",
            text::ms(late.as_secs_f64() * 1e3)
        );
    }
    println!("{}\n", comparison.sentence());

    let path = report_path();
    let page = report::page(&comparison, &scale, WORKERS);
    std::fs::write(&path, page)
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("The picture: {}", path.display());
    Ok(())
}

fn introduce(jobs: &[Job], scale: &Scale) {
    let users: std::collections::HashSet<_> = jobs.iter().map(|job| job.user).collect();
    let days = scale.load_by_day(jobs, WORKERS);
    let overloaded = days.iter().filter(|load| **load > 1.0).count();
    println!(
        "{} jobs that {} users gave the iPSC/860 of NASA Ames from October to December 1993, replayed twice by {WORKERS} workers.",
        text::count(jobs.len()),
        users.len()
    );
    println!(
        "  a second is {} of 1993; run times are cut at {} and stretched {:.1}-fold, to {:.0} ms on average,",
        text::log_time(scale.speed),
        text::log_time(f64::from(scale.longest_run)),
        scale.stretch,
        jobs.iter()
            .map(|job| scale.run(job).as_secs_f64() * 1e3)
            .sum::<f64>()
            / jobs.len() as f64,
    );
    println!(
        "  so that {:.0}% of the workers' time is asked for, but more than they have on {overloaded} of {} days, up to {:.1}-fold",
        LOAD * 100.0,
        days.len(),
        days.iter().copied().fold(0.0, f64::max),
    );
}

/// `demo/report.html`, seen from where cargo or the user runs this.
fn report_path() -> PathBuf {
    let demo = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let demo = demo
        .filter(|dir| dir.is_dir())
        .unwrap_or_else(|| PathBuf::from("."));
    demo.join(Path::new("report.html"))
}

/// An error with everything that the server said about it.
fn explain(error: &Error) -> String {
    let Some(error) = error.downcast_ref::<postgres::Error>() else {
        return error.to_string();
    };
    let Some(server) = error.as_db_error() else {
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
        return format!("{error}{}", cause.unwrap_or_default());
    };
    let mut text = format!(
        "{}: {} ({})",
        server.severity(),
        server.message(),
        server.code().code()
    );
    for (word, more) in [
        ("DETAIL", server.detail()),
        ("HINT", server.hint()),
        ("CONTEXT", server.where_()),
    ] {
        if let Some(more) = more {
            text.push_str(&format!("\n  {word}: {more}"));
        }
    }
    text
}
