//! The example workers do what their README promises.
//!
//! Python finds psycopg in HF_PSYCOPG, a folder for PYTHONPATH. Node.js finds pg in HF_NODE, a folder with node_modules;
//! without it there is no Node.js here, and its tests say so and pass.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, Shutdown, holds_within, one, pending, running, wait_until,
};
use postgres::Client;

use crate::support::{at_best, brisk, brisk_options, execute, task_field};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");

#[derive(Clone, Copy, Debug)]
enum Language {
    Python,
    Rust,
    Node,
}

impl Language {
    const ALL: [Language; 3] = [Language::Python, Language::Rust, Language::Node];

    /// The command that starts the worker; None where there is no Node.js.
    fn command(self) -> Option<Command> {
        match self {
            Language::Python => {
                let mut python = Command::new("python3");
                python.arg(Path::new(EXAMPLES).join("python/worker.py"));
                if let Some(psycopg) = std::env::var_os("HF_PSYCOPG") {
                    python.env("PYTHONPATH", psycopg);
                }
                Some(python)
            }
            Language::Rust => Some(Command::new(env!("CARGO_BIN_EXE_example_worker"))),
            Language::Node => {
                let Some(folder) = std::env::var_os("HF_NODE") else {
                    println!("HF_NODE is not set: the worker for Node.js is not tested here");
                    return None;
                };
                // A module looks for others in the folders above its own.
                let worker = Path::new(&folder).join(format!("{}.mjs", std::process::id()));
                std::fs::copy(Path::new(EXAMPLES).join("node/worker.js"), &worker)
                    .expect("the worker can be copied to its modules");
                let mut node = Command::new("node");
                node.arg(worker);
                Some(node)
            }
        }
    }
}

/// A worker process. Killed with this value; what it said is printed when the test fails.
struct Worker(Child);

impl Worker {
    /// Starts a worker on the queue `q`.
    fn start(language: Language, db: &Database) -> Option<Worker> {
        let url = format!(
            "host={} port=5432 user=postgres dbname={}",
            db.cluster().socket_dir().display(),
            db.name()
        );
        let url = match language {
            // It knows URLs only; a socket's folder is a parameter of them.
            Language::Node => format!(
                "postgresql://postgres@/{}?host={}",
                db.name(),
                db.cluster().socket_dir().display()
            ),
            _ => url,
        };
        let child = language
            .command()?
            .arg("q")
            .env("DATABASE_URL", url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{language:?}: {error}"));
        Some(Worker(child))
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([name, &self.0.id().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {name}");
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().expect("a child can be asked").is_some()
    }

    /// Waits until it has ended.
    #[track_caller]
    fn end(&mut self, within: Duration) -> ExitStatus {
        let ended = holds_within(within, || self.has_ended());
        assert!(ended, "the worker did not end within {within:?}");
        self.0.wait().expect("its status is known")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if std::thread::panicking() {
            let mut said = String::new();
            let stderr = self.0.stderr.as_mut().expect("its errors are a pipe");
            let _ = stderr.read_to_string(&mut said);
            eprintln!("--- the worker said\n{said}---");
        }
    }
}

fn enqueue(client: &mut Client, payload: &str) -> i64 {
    one(
        client,
        "SELECT fair_enqueue('q', $1::text::jsonb, fairness_key => 'A', max_attempts => 2)",
        &[&payload],
    )
}

#[track_caller]
fn wait_for_task(client: &mut Client, id: i64, expected: &str) {
    let what = format!("task {id} is {expected}");
    let holds = |client: &mut Client| {
        task_field(client, id, "state || ' ' || attempt").as_deref() == Some(expected)
    };
    wait_until(&what, PATIENCE, || holds(client));
}

fn wait_until_it_waits(client: &mut Client) {
    wait_until("the worker waits for a task", PATIENCE, || {
        one(
            client,
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()
             AND wait_event_type = 'Extension' AND query LIKE '%fair_claim%' AND backend_type = 'client backend'",
            &[],
        )
    });
}

fn set_lease(client: &mut Client, seconds: u32) {
    execute(
        client,
        &format!(r#"SELECT fair_configure('q', '{{"lease": {seconds}}}')"#),
    );
}

fn it_completes_with_the_cost_and_fails_with_the_error(language: Language) {
    let db = brisk().database();
    let mut client = db.connect();
    let Some(_worker) = Worker::start(language, &db) else {
        return;
    };
    let costly = enqueue(&mut client, r#"{"seconds": 1.5}"#);
    wait_for_task(&mut client, costly, "completed 1");
    let charged = "SELECT pass - last_start FROM fair_state('q')";
    assert_eq!(one::<f64>(&mut client, charged, &[]), 1.5);
    let plain = enqueue(&mut client, "{}");
    let broken = enqueue(&mut client, r#"{"error": "mailbox full"}"#);
    wait_for_task(&mut client, plain, "completed 1");
    wait_for_task(&mut client, broken, "failed 2");
    assert_eq!(
        task_field(&mut client, broken, "last_error").as_deref(),
        Some("mailbox full")
    );
}

fn told_to_stop_it_keeps_its_lease_finishes_its_task_and_takes_no_other(language: Language) {
    let db = brisk().database();
    let mut client = db.connect();
    // The lease is a third of the task's length. A worker that was kept waiting for as long has lost it.
    let mut leases = [1, 4, 12, 30].into_iter();
    at_best(|| {
        let lease = leases.next().unwrap();
        execute(&mut client, "DELETE FROM harvest_fair.task");
        set_lease(&mut client, lease);
        let id = enqueue(&mut client, &format!(r#"{{"seconds": {}}}"#, 3 * lease));
        let Some(mut worker) = Worker::start(language, &db) else {
            return Ok(());
        };
        wait_until("the task runs", PATIENCE, || {
            task_field(&mut client, id, "state").as_deref() != Some("pending")
        });
        enqueue(&mut client, "{}");
        worker.signal("-TERM");
        assert!(worker.end(PATIENCE * 3).success());
        let end = task_field(&mut client, id, "state || ' ' || attempt").unwrap();
        let left = pending(&mut client, "q");
        if (end.as_str(), left) == ("completed 1", 1) {
            return Ok(());
        }
        Err(format!(
            "with a lease of {lease} s: {end}, and {left} left for others"
        ))
    });
}

fn told_to_stop_while_it_waits_it_ends_at_once(language: Language) {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    at_best(|| {
        let Some(mut worker) = Worker::start(language, &db) else {
            return Ok(());
        };
        wait_until_it_waits(&mut client);
        let told = Instant::now();
        worker.signal("-TERM");
        assert!(worker.end(PATIENCE).success());
        // Its wait would last 20 seconds.
        let taken = told.elapsed();
        if taken < Duration::from_secs(10) {
            return Ok(());
        }
        Err(format!("it took {taken:?}"))
    });
    enqueue(&mut client, "{}");
    assert_eq!(
        (pending(&mut client, "q"), running(&mut client, "q")),
        (1, 0)
    );
}

fn killed_half_way_its_task_comes_back_to_another(language: Language) {
    let db = brisk().database();
    let mut client = db.connect();
    set_lease(&mut client, 2);
    let id: i64 = one(
        &mut client,
        r#"SELECT fair_enqueue('q', '{"seconds": 600}', max_attempts => 1000)"#,
        &[],
    );
    let Some(mut first) = Worker::start(language, &db) else {
        return;
    };
    let worker = "CASE state WHEN 'running' THEN worker END";
    wait_until("it has the task", PATIENCE, || {
        task_field(&mut client, id, worker).is_some()
    });
    first.signal("-KILL");
    assert!(!first.end(PATIENCE).success());
    let name = task_field(&mut client, id, "worker");
    let _second = Worker::start(language, &db);
    wait_until("another has the task", PATIENCE, || {
        let now = task_field(&mut client, id, worker);
        now.is_some() && now != name
    });
    let attempt = task_field(&mut client, id, "attempt").unwrap();
    assert!(attempt.parse::<i32>().unwrap() >= 2, "attempt {attempt}");
}

macro_rules! in_each_language {
    ($($test:ident)*) => {$(
        mod $test {
            #[test]
            fn python() { super::$test(super::Language::Python); }
            #[test]
            fn rust() { super::$test(super::Language::Rust); }
            #[test]
            fn node() { super::$test(super::Language::Node); }
        }
    )*};
}

in_each_language! {
    it_completes_with_the_cost_and_fails_with_the_error
    told_to_stop_it_keeps_its_lease_finishes_its_task_and_takes_no_other
    told_to_stop_while_it_waits_it_ends_at_once
    killed_half_way_its_task_comes_back_to_another
}

#[test]
fn a_restart_of_the_server_is_survived_by_a_worker_that_works_and_one_that_waits() {
    let cluster = Cluster::start(brisk_options());
    // A database for each, where it is alone.
    let workers: Vec<_> = Language::ALL
        .into_iter()
        .filter_map(|language| {
            let db = cluster.database();
            Worker::start(language, &db).map(|worker| (db, worker))
        })
        .collect();
    for (db, _) in &workers {
        wait_until_it_waits(&mut db.connect());
    }
    // All work at once, whatever their start has taken.
    let mut all: Vec<_> = workers
        .into_iter()
        .map(|(db, worker)| {
            let id = enqueue(&mut db.connect(), r#"{"seconds": 5}"#);
            (db, worker, id)
        })
        .collect();
    for (db, _, id) in &all {
        wait_for_task(&mut db.connect(), *id, "running 1");
    }
    cluster.restart(Shutdown::Fast);
    for (db, _, id) in &all {
        wait_for_task(&mut db.connect(), *id, "completed 1");
        wait_until_it_waits(&mut db.connect());
    }
    cluster.restart(Shutdown::Fast);
    for (db, worker, _) in &mut all {
        let mut client = db.connect();
        let id = enqueue(&mut client, "{}");
        wait_for_task(&mut client, id, "completed 1");
        worker.signal("-TERM");
        assert!(worker.end(PATIENCE).success());
    }
}
