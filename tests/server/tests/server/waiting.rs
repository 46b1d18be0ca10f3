//! Workers that wait for work. How fast they wake is measured in the other binary; here is that they do, and how else
//! a wait can end.

use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, Options, PATIENCE, Shutdown, claim_one, claim_waiting, enqueue,
    flood, one, pid_of, sqlstate_of, try_claim_waiting, wait_until,
};
use postgres::{CancelToken, Client, NoTls};

use crate::support::{execute, states};

type Waited = Result<Vec<ClaimedTask>, postgres::Error>;

struct Waiter {
    pid: i32,
    token: CancelToken,
    thread: thread::JoinHandle<(Waited, Duration)>,
}

impl Waiter {
    fn end(self) -> (Waited, Duration) {
        self.thread.join().expect("the waiting thread ends")
    }

    fn tasks(self) -> Vec<ClaimedTask> {
        self.end().0.expect("the wait is not interrupted")
    }
}

/// Waits for one task on a connection of its own; returns once it is asleep.
fn start_waiting(db: &Database, wait: &'static str, setup: &str) -> Waiter {
    let mut client = db.connect_with(setup);
    let (pid, token) = (pid_of(&mut client), client.cancel_token());
    let thread = thread::spawn(move || {
        let start = Instant::now();
        let result = try_claim_waiting(&mut client, "q", "waiter", 1, wait);
        (result, start.elapsed())
    });
    let mut watcher = db.connect();
    wait_until("the worker sleeps", PATIENCE, || {
        is_asleep(&mut watcher, pid)
    });
    Waiter { pid, token, thread }
}

/// Whether a backend sleeps in a wait of ours. A condition variable of an extension shows as wait event type Extension
/// (or IPC), never as Lock, LWLock or Client.
fn is_asleep(watcher: &mut Client, pid: i32) -> bool {
    one(
        watcher,
        "SELECT coalesce((SELECT state = 'active' AND wait_event_type IN ('Extension', 'IPC')
                          FROM pg_stat_activity WHERE pid = $1), false)",
        &[&pid],
    )
}

#[test]
fn a_waiting_worker_gets_the_task_that_is_enqueued() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    let id = enqueue(&mut client, "q", Some("A"));
    let tasks = waiter.tasks();
    assert_eq!(tasks.len(), 1);
    assert_eq!(tasks[0].id, id);
}

#[test]
fn a_plain_insert_wakes_a_waiting_worker_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    flood(&mut client, "q", "A", 1, "1 s");
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn a_wait_without_work_returns_nothing_when_it_is_over() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let start = Instant::now();
    assert!(claim_waiting(&mut client, "q", "w", 5, "300 ms").is_empty());
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(300),
        "gave up after {waited:?}"
    );
    assert!(waited < Duration::from_secs(5), "gave up after {waited:?}");
}

#[test]
fn a_wait_with_work_returns_at_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let start = Instant::now();
    assert_eq!(claim_waiting(&mut client, "q", "w", 5, "60 s").len(), 1);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(claim_waiting(&mut client, "q", "w", 5, "0").is_empty());
}

#[test]
fn an_enqueue_elsewhere_wakes_nobody_up_for_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "1 s", "");
    enqueue(&mut client, "other", None);
    let (result, waited) = waiter.end();
    assert!(result.unwrap().is_empty());
    assert!(waited >= Duration::from_secs(1), "gave up after {waited:?}");
    assert_eq!(claim_one(&mut client, "other").queue, "other");
}

#[test]
fn a_rolled_back_enqueue_does_not_end_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    execute(
        &mut client,
        "BEGIN; SELECT fair_enqueue('q', fairness_key => 'gone'); ROLLBACK",
    );
    enqueue(&mut client, "q", Some("kept"));
    assert_eq!(waiter.tasks()[0].key, "kept");
}

#[test]
fn one_task_goes_to_one_of_the_workers_that_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiters: Vec<Waiter> = (0..4).map(|_| start_waiting(&db, "2 s", "")).collect();
    enqueue(&mut client, "q", None);
    let got: Vec<usize> = waiters
        .into_iter()
        .map(|waiter| waiter.tasks().len())
        .collect();
    assert_eq!(got.iter().sum::<usize>(), 1, "{got:?}");
}

#[test]
fn as_many_tasks_as_workers_wake_them_all() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiters: Vec<Waiter> = (0..4).map(|_| start_waiting(&db, "60 s", "")).collect();
    flood(&mut client, "q", "A", 4, "1 s");
    for waiter in waiters {
        assert_eq!(waiter.tasks().len(), 1);
    }
}

#[test]
fn a_row_that_becomes_due_ends_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', scheduled_at => now() + interval '800 ms')",
    );
    let waiter = start_waiting(&db, "60 s", "");
    let (result, waited) = waiter.end();
    assert_eq!(result.unwrap().len(), 1);
    assert!(waited < PATIENCE, "{waited:?}");
}

#[test]
fn a_row_that_is_brought_forward_ends_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', scheduled_at => now() + interval '1 day')",
    );
    let waiter = start_waiting(&db, "60 s", "");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET scheduled_at = now()",
    );
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn a_task_given_back_ends_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for give_back in [
        "fair_release(id, lease)::text",
        "fair_fail(id, lease, 'no', '0')::text",
    ] {
        enqueue(&mut client, "q", None);
        let task = claim_one(&mut client, "q");
        let waiter = start_waiting(&db, "60 s", "");
        execute(
            &mut client,
            &format!(
                "SELECT {give_back} FROM harvest_fair.task WHERE id = {}",
                task.id
            ),
        );
        assert_eq!(waiter.tasks()[0].id, task.id);
    }
}

#[test]
fn a_claim_that_is_rolled_back_ends_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let mut transaction = client.transaction().unwrap();
    let task = claim_one(&mut transaction, "q");
    let waiter = start_waiting(&db, "60 s", "");
    transaction.rollback().unwrap();
    assert_eq!(waiter.tasks()[0].id, task.id);
}

#[test]
fn a_lock_that_is_given_up_ends_a_wait_at_the_latest_with_the_next_sweep() {
    let db = crate::support::brisk().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let mut transaction = client.transaction().unwrap();
    transaction
        .batch_execute("SELECT FROM harvest_fair.task FOR UPDATE")
        .unwrap();
    let waiter = start_waiting(&db, "60 s", "");
    transaction.rollback().unwrap();
    let (result, waited) = waiter.end();
    assert_eq!(result.unwrap().len(), 1);
    assert!(waited < Duration::from_secs(15), "{waited:?}");
}

#[test]
fn an_expired_lease_ends_a_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '1500 ms'");
    enqueue(&mut client, "q", None);
    let lost = claim_one(&mut client, "q");
    let waiter = start_waiting(&db, "60 s", "");
    let (result, waited) = waiter.end();
    assert_eq!(result.unwrap()[0].id, lost.id);
    // Sooner than the next of the janitor's usual rounds could be expected.
    assert!(waited < Duration::from_secs(6), "{waited:?}");
}

#[test]
fn a_waiting_worker_can_be_cancelled() {
    let db = Cluster::shared().database();
    let waiter = start_waiting(&db, "60 s", "");
    waiter.token.cancel_query(NoTls).unwrap();
    let (result, waited) = waiter.end();
    assert_eq!(sqlstate_of(&result.unwrap_err()), "57014");
    assert!(waited < PATIENCE);
}

#[test]
fn a_waiting_worker_obeys_statement_timeout() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET statement_timeout = '300 ms'");
    let error = try_claim_waiting(&mut client, "q", "w", 1, "60 s").unwrap_err();
    assert_eq!(sqlstate_of(&error), "57014");
    // The connection is as good as before.
    execute(&mut client, "SET statement_timeout = 0");
    enqueue(&mut client, "q", None);
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_waiting_worker_can_be_terminated() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    let gone: bool = one(
        &mut client,
        "SELECT pg_terminate_backend($1, 10000)",
        &[&waiter.pid],
    );
    assert!(gone, "the backend is still there after 10 s");
    assert!(waiter.end().0.is_err());
    enqueue(&mut client, "q", None);
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_fast_shutdown_does_not_wait_for_waiting_workers() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let waiter = start_waiting(&db, "10 min", "");
    let start = Instant::now();
    cluster.stop(Shutdown::Fast);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    assert!(waiter.end().0.is_err());
    cluster.start_server();
}

#[test]
fn an_array_of_queues_can_be_waited_for() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut worker = db.connect();
    let pid = pid_of(&mut worker);
    let waiting = thread::spawn(move || {
        worker
            .query(
                "SELECT queue FROM fair_claim(ARRAY['one', 'two'], 'w', 1, '60 s')",
                &[],
            )
            .map(|rows| rows.iter().map(|row| row.get(0)).collect::<Vec<String>>())
    });
    wait_until("the worker sleeps", PATIENCE, || {
        is_asleep(&mut client, pid)
    });
    enqueue(&mut client, "two", None);
    assert_eq!(waiting.join().unwrap().unwrap(), ["two"]);
}

#[test]
fn a_wait_inside_a_transaction_sees_what_others_commit_meanwhile() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "BEGIN");
    enqueue(&mut client, "q", Some("A"));
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn an_aborted_wait_leaves_no_waiter_behind() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    let waiting = |client: &mut Client| -> i64 {
        one(
            client,
            "SELECT coalesce(sum(waiting), 0)::bigint FROM harvest_fair.stats WHERE queue = 'q'",
            &[],
        )
    };
    assert_eq!(waiting(&mut client), 1);
    waiter.token.cancel_query(NoTls).unwrap();
    assert!(waiter.end().0.is_err());
    wait_until("nobody waits", PATIENCE, || waiting(&mut client) == 0);
    assert!(states(&mut client, "q").is_empty());
}

#[test]
fn the_extension_can_be_dropped_under_a_waiting_worker() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "60 s", "");
    let start = Instant::now();
    execute(
        &mut client,
        "DROP EXTENSION harvest_fair; DROP SCHEMA IF EXISTS harvest_fair",
    );
    let dropped = start.elapsed();
    let (_, waited) = waiter.end();
    assert!(dropped < PATIENCE, "the drop waited {dropped:?}");
    assert!(
        waited < PATIENCE,
        "the worker waited {waited:?} for a queue that was gone"
    );
}

#[test]
fn a_worker_sleeps_though_the_lease_of_a_completed_task_has_run_out() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, "SET harvest_fair.default_lease = '100 ms'");
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    execute(
        &mut client,
        &format!("SELECT fair_complete({}, {})", task.id, task.lease),
    );
    let empty = |client: &mut Client| -> i64 {
        one(
            client,
            "SELECT empty_claims FROM harvest_fair.stats WHERE queue = 'q'",
            &[],
        )
    };
    let before = empty(&mut client);
    assert!(claim_waiting(&mut client, "q", "w", 1, "1 s").is_empty());
    let tries = empty(&mut client) - before;
    assert!(tries < 20, "{tries} tries in one second of waiting");
}
