//! Workers that wait for work. How fast they wake is measured in the other binary; here is that they do, without help from
//! a janitor, and how else a wait can end.

use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, LONG, Options, PATIENCE, Shutdown, claim_one, claim_waiting,
    complete, enqueue, flood, holds_within, one, pid_of, sqlstate_of, try_claim_waiting,
    wait_until,
};
use postgres::{CancelToken, Client, NoTls};

use crate::support::{await_claim, brisk, execute, in_time, stat, states, unattended};

type Waited = Result<Vec<ClaimedTask>, postgres::Error>;

struct Waiter {
    start: Instant,
    pid: i32,
    token: CancelToken,
    thread: thread::JoinHandle<Waited>,
}

impl Waiter {
    fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// How the wait ends, and that it does so before long.
    #[track_caller]
    fn end(self) -> Waited {
        if !holds_within(PATIENCE, || self.is_over()) {
            let _ = self.token.cancel_query(NoTls);
            panic!("the worker sleeps on");
        }
        self.thread.join().expect("the waiting thread ends")
    }

    #[track_caller]
    fn tasks(self) -> Vec<ClaimedTask> {
        self.end().expect("the wait is not interrupted")
    }
}

/// Waits for one task, for long, on a connection of its own; returns once it is asleep.
fn start_waiting(db: &Database, setup: &str) -> Waiter {
    start_waiting_for(db, LONG, setup)
}

/// The same for a while, which may be over when this returns.
fn start_waiting_for(db: &Database, wait: &str, setup: &str) -> Waiter {
    let mut client = db.connect_with(setup);
    let (pid, token) = (pid_of(&mut client), client.cancel_token());
    let (start, wait) = (Instant::now(), wait.to_owned());
    let thread = thread::spawn(move || try_claim_waiting(&mut client, "q", "waiter", 1, &wait));
    let waiter = Waiter {
        start,
        pid,
        token,
        thread,
    };
    let mut watcher = db.connect();
    wait_until("the worker sleeps", PATIENCE, || {
        is_asleep(&mut watcher, pid) || waiter.is_over()
    });
    waiter
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
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    let id = enqueue(&mut client, "q", Some("A"));
    let tasks = waiter.tasks();
    assert_eq!(tasks.len(), 1);
    assert_eq!(tasks[0].id, id);
}

#[test]
fn a_plain_insert_wakes_a_waiting_worker_too() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    flood(&mut client, "q", "A", 1, "1 s");
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn a_wait_without_work_returns_nothing_when_it_is_over() {
    let db = unattended().database();
    let mut client = db.connect();
    let start = Instant::now();
    assert!(claim_waiting(&mut client, "q", "w", 5, "300 ms").is_empty());
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(300),
        "gave up after {waited:?}"
    );
    assert!(waited < PATIENCE, "gave up after {waited:?}");
}

#[test]
fn a_wait_with_work_returns_at_once() {
    let db = unattended().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    assert_eq!(await_claim(&mut client, "q", "w", 5).len(), 1);
    assert!(claim_waiting(&mut client, "q", "w", 5, "0").is_empty());
}

#[test]
fn an_enqueue_elsewhere_wakes_nobody_up_for_nothing() {
    let db = unattended().database();
    let mut client = db.connect();
    in_time(|window| {
        let waiter = start_waiting_for(&db, window, "");
        enqueue(&mut client, "other", None);
        // Only what the worker waited through tells something.
        let in_time = !waiter.is_over();
        let (start, end) = (waiter.start, waiter.end());
        assert!(end.unwrap().is_empty());
        let (waited, wait) = (start.elapsed(), window.trim_end_matches(" ms"));
        assert!(
            waited.as_millis() >= wait.parse().unwrap(),
            "gave up after {waited:?}"
        );
        in_time.then_some(())
    });
    assert_eq!(claim_one(&mut client, "other").queue, "other");
}

#[test]
fn a_rolled_back_enqueue_does_not_end_a_wait() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    execute(
        &mut client,
        "BEGIN; SELECT fair_enqueue('q', fairness_key => 'gone'); ROLLBACK",
    );
    enqueue(&mut client, "q", Some("kept"));
    assert_eq!(waiter.tasks()[0].key, "kept");
}

#[test]
fn one_task_goes_to_one_of_the_workers_that_wait() {
    let db = unattended().database();
    let mut client = db.connect();
    let mut waiters: Vec<Waiter> = (0..4).map(|_| start_waiting(&db, "")).collect();
    enqueue(&mut client, "q", None);
    wait_until("one of them has it", PATIENCE, || {
        waiters.iter().any(Waiter::is_over)
    });
    let (over, waiting): (Vec<_>, Vec<_>) = waiters.drain(..).partition(Waiter::is_over);
    assert_eq!(over.len(), 1);
    assert_eq!(over.into_iter().flat_map(Waiter::tasks).count(), 1);
    for waiter in waiting {
        waiter.token.cancel_query(NoTls).unwrap();
        assert_eq!(sqlstate_of(&waiter.end().unwrap_err()), "57014");
    }
}

#[test]
fn as_many_tasks_as_workers_wake_them_all() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiters: Vec<Waiter> = (0..4).map(|_| start_waiting(&db, "")).collect();
    flood(&mut client, "q", "A", 4, "1 s");
    for waiter in waiters {
        assert_eq!(waiter.tasks().len(), 1);
    }
}

#[test]
fn a_row_that_becomes_due_ends_a_wait() {
    let db = unattended().database();
    let mut client = db.connect();
    in_time(|window| {
        let id: i64 = one(
            &mut client,
            "SELECT fair_enqueue('q', scheduled_at => now() + $1::text::interval)",
            &[&window],
        );
        let waiter = start_waiting(&db, "");
        let is_due = "SELECT clock_timestamp() > scheduled_at FROM harvest_fair.task WHERE id = $1";
        let in_time = !one::<bool>(&mut client, is_due, &[&id]);
        assert_eq!(waiter.tasks()[0].id, id);
        let early = "SELECT started_at < scheduled_at FROM harvest_fair.task WHERE id = $1";
        assert!(!one::<bool>(&mut client, early, &[&id]));
        in_time.then_some(())
    });
}

#[test]
fn a_row_that_is_brought_forward_ends_a_wait() {
    let db = unattended().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', scheduled_at => now() + interval '1 day')",
    );
    let waiter = start_waiting(&db, "");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET scheduled_at = now()",
    );
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn a_task_given_back_ends_a_wait() {
    let db = unattended().database();
    let mut client = db.connect();
    for give_back in [
        "fair_release(id, lease)::text",
        "fair_fail(id, lease, 'no', '0')::text",
    ] {
        enqueue(&mut client, "q", None);
        let task = claim_one(&mut client, "q");
        let waiter = start_waiting(&db, "");
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
    let db = unattended().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let mut transaction = client.transaction().unwrap();
    let task = claim_one(&mut transaction, "q");
    let waiter = start_waiting(&db, "");
    transaction.rollback().unwrap();
    assert_eq!(waiter.tasks()[0].id, task.id);
}

#[test]
fn a_lock_that_is_given_up_ends_a_wait_at_the_latest_with_the_next_sweep() {
    let db = brisk().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let mut transaction = client.transaction().unwrap();
    transaction
        .batch_execute("SELECT FROM harvest_fair.task FOR UPDATE")
        .unwrap();
    let waiter = start_waiting(&db, "");
    transaction.rollback().unwrap();
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn an_expired_lease_ends_a_wait() {
    // Sooner than a janitor could come round: there is none.
    let db = unattended().database();
    let mut client = db.connect();
    in_time(|window| {
        execute(
            &mut client,
            &format!("SET harvest_fair.default_lease = '{window}'"),
        );
        enqueue(&mut client, "q", None);
        let lost = claim_one(&mut client, "q");
        let waiter = start_waiting(&db, "");
        let in_time = !one::<bool>(
            &mut client,
            "SELECT clock_timestamp() > $1",
            &[&lost.lease_until],
        );
        let task = waiter.tasks().remove(0);
        assert_eq!((task.id, task.attempt), (lost.id, 2));
        assert!(complete(&mut client, &task));
        in_time.then_some(())
    });
}

#[test]
fn a_waiting_worker_can_be_cancelled() {
    let db = unattended().database();
    let waiter = start_waiting(&db, "");
    waiter.token.cancel_query(NoTls).unwrap();
    assert_eq!(sqlstate_of(&waiter.end().unwrap_err()), "57014");
}

#[test]
fn a_waiting_worker_obeys_statement_timeout() {
    let db = unattended().database();
    let mut client = db.connect();
    // Of this transaction only: no later statement is to be cut off, however slow the machine.
    let mut transaction = client.transaction().unwrap();
    transaction
        .batch_execute("SET LOCAL statement_timeout = '300 ms'")
        .unwrap();
    let error = try_claim_waiting(&mut transaction, "q", "w", 1, LONG).unwrap_err();
    assert_eq!(sqlstate_of(&error), "57014");
    transaction.rollback().unwrap();
    // The connection is as good as before.
    enqueue(&mut client, "q", None);
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_waiting_worker_can_be_terminated() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    let gone: bool = one(
        &mut client,
        "SELECT pg_terminate_backend($1, 60000)",
        &[&waiter.pid],
    );
    assert!(gone, "the backend is still there after a minute");
    assert!(waiter.end().is_err());
    enqueue(&mut client, "q", None);
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_waiting_worker_whose_client_has_gone_ends_where_connections_are_checked() {
    let db = unattended().database();
    let mut client = db.connect();
    let environment = db.cluster().environment();
    let mut psql = environment
        .command(environment.program("psql"))
        .args(["-X", "-h"])
        .arg(db.cluster().socket_dir())
        .args(["-U", "postgres", "-p", "5432", "-d", db.name()])
        .args(["-c", "SET client_connection_check_interval = '100 ms'"])
        .args(["-c", "SELECT fair_claim('q', 'gone', 1, '1 hour')"])
        .spawn()
        .expect("psql can be started");
    wait_until("the worker waits", PATIENCE, || {
        stat(&mut client, "q", "waiting") == 1
    });
    psql.kill().expect("psql can be killed");
    psql.wait().expect("psql ends");
    wait_until("its session ends", PATIENCE, || {
        stat(&mut client, "q", "waiting") == 0
    });
    enqueue(&mut client, "q", None);
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_fast_shutdown_does_not_wait_for_waiting_workers() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let waiter = start_waiting(&db, "");
    // Gives up after a minute, long before the wait is over.
    cluster.stop(Shutdown::Fast);
    assert!(waiter.end().is_err());
    cluster.start_server();
}

#[test]
fn an_array_of_queues_can_be_waited_for() {
    let db = unattended().database();
    let mut client = db.connect();
    let mut worker = db.connect();
    let pid = pid_of(&mut worker);
    let waiting = thread::spawn(move || {
        worker
            .query(
                "SELECT queue FROM fair_claim(ARRAY['one', 'two'], 'w', 1, '10 min')",
                &[],
            )
            .map(|rows| rows.iter().map(|row| row.get(0)).collect::<Vec<String>>())
    });
    wait_until("the worker sleeps", PATIENCE, || {
        is_asleep(&mut client, pid)
    });
    enqueue(&mut client, "two", None);
    wait_until("the worker has woken", PATIENCE, || waiting.is_finished());
    assert_eq!(waiting.join().unwrap().unwrap(), ["two"]);
}

#[test]
fn a_wait_inside_a_transaction_sees_what_others_commit_meanwhile() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "BEGIN");
    enqueue(&mut client, "q", Some("A"));
    assert_eq!(waiter.tasks().len(), 1);
}

#[test]
fn an_aborted_wait_leaves_no_waiter_behind() {
    let db = unattended().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    let waiting = |client: &mut Client| -> i64 {
        one(
            client,
            "SELECT coalesce(sum(waiting), 0)::bigint FROM harvest_fair.stats WHERE queue = 'q'",
            &[],
        )
    };
    assert_eq!(waiting(&mut client), 1);
    waiter.token.cancel_query(NoTls).unwrap();
    assert!(waiter.end().is_err());
    wait_until("nobody waits", PATIENCE, || waiting(&mut client) == 0);
    assert!(states(&mut client, "q").is_empty());
}

#[test]
fn the_extension_can_be_dropped_under_a_waiting_worker() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let waiter = start_waiting(&db, "");
    let start = Instant::now();
    execute(
        &mut client,
        "DROP EXTENSION harvest_fair; DROP SCHEMA IF EXISTS harvest_fair",
    );
    let dropped = start.elapsed();
    assert!(dropped < PATIENCE, "the drop waited {dropped:?}");
    // It does not wait on for a queue that is gone.
    let _ = waiter.end();
}

#[test]
fn a_worker_sleeps_though_the_lease_of_a_completed_task_has_run_out() {
    let db = unattended().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    // Both at once, lest the lease runs out in between.
    execute(
        &mut client,
        "SET harvest_fair.default_lease = '100 ms';
         SELECT fair_complete(id, lease) FROM fair_claim('q', 'w')",
    );
    let before = stat(&mut client, "q", "empty_claims");
    assert!(claim_waiting(&mut client, "q", "w", 1, "1 s").is_empty());
    let tries = stat(&mut client, "q", "empty_claims") - before;
    assert!(tries < 20, "{tries} tries in one second of waiting");
}
