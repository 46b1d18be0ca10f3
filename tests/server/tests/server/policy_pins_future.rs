//! Pins and time: pinned tasks that are due later, pins that never end, and pinned tasks of which the board is not told.

use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, Shutdown, claim, claim_waiting, complete, enqueue, one, pid_of,
    wait_until,
};
use postgres::Client;

use crate::policy_support::configure;
use crate::support::{brisk, brisk_options, differences, execute};

const SOON: Duration = Duration::from_secs(10);

/// Inserts a task pinned to `me`.
fn pin(client: &mut Client, scheduled_at: &str, sticky_until: &str) -> i64 {
    one(
        client,
        &format!(
            "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, scheduled_at, sticky_until)
             VALUES ('q', 'a', 'me', {scheduled_at}, {sticky_until}) RETURNING id"
        ),
        &[],
    )
}

/// How long `me` waits for one task, told for a minute at most.
fn wait_for_one(client: &mut Client) -> (i64, Duration) {
    let start = Instant::now();
    let tasks = claim_waiting(client, "q", "me", 1, "60 s");
    assert_eq!(tasks.len(), 1, "after {:?}", start.elapsed());
    (tasks[0].id, start.elapsed())
}

/// Runs `act` while `me` sleeps in a claim that waits; returns the task that ended the wait, and when.
fn while_waiting(db: &Database, act: impl FnOnce(&mut Client)) -> (i64, Duration) {
    let (mut worker, mut client) = (db.connect(), db.connect());
    let pid = pid_of(&mut worker);
    let waiting = thread::spawn(move || wait_for_one(&mut worker));
    wait_until("the worker sleeps", PATIENCE, || {
        one(
            &mut client,
            "SELECT wait_event_type IN ('Extension', 'IPC') IS TRUE FROM pg_stat_activity WHERE pid = $1",
            &[&pid],
        )
    });
    act(&mut client);
    waiting.join().expect("the waiting thread ends")
}

#[test]
fn a_pinned_task_ends_the_wait_of_its_worker_when_it_is_due() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for until in ["now() + interval '1 hour'", "NULL", "'infinity'"] {
        let id = pin(&mut client, "now() + interval '1 s'", until);
        let (got, waited) = wait_for_one(&mut client);
        assert_eq!(got, id);
        assert!(waited < SOON, "pinned until {until}: {waited:?}");
    }
}

#[test]
fn the_next_of_several_pinned_tasks_ends_the_wait() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    pin(&mut client, "now() + interval '1 hour'", "NULL");
    let next = pin(&mut client, "now() + interval '1 s'", "NULL");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, priority)
         VALUES ('q', 'a', 'other', 1)",
    );
    let (got, waited) = wait_for_one(&mut client);
    assert_eq!(got, next);
    assert!(waited < SOON, "{waited:?}");
}

#[test]
fn a_pinned_task_that_is_enqueued_or_brought_forward_for_later_ends_a_wait_when_it_is_due() {
    let db = Cluster::shared().database();
    let (_, waited) = while_waiting(&db, |client| {
        pin(client, "now() + interval '1 s'", "NULL");
    });
    assert!(waited < SOON, "{waited:?}");
    let mut client = db.connect();
    let id = pin(&mut client, "now() + interval '1 hour'", "NULL");
    let (got, waited) = while_waiting(&db, |client| {
        execute(
            client,
            "UPDATE harvest_fair.task SET scheduled_at = now() + interval '1 s' WHERE state = 'pending'",
        );
    });
    assert_eq!(got, id);
    assert!(waited < SOON, "{waited:?}");
}

#[test]
fn a_pin_until_infinity_is_one_for_good() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    let first = pin(&mut client, "now()", "'infinity'");
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    assert_eq!(claim(&mut client, "q", "me", 5)[0].id, first);
    let second = pin(&mut client, "now()", "'infinity'");
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    assert_eq!(claim(&mut client, "q", "me", 5)[0].id, second);
    let moved = pin(&mut client, "now()", "now() + interval '1 hour'");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_until = 'infinity' WHERE state = 'pending'",
    );
    assert_eq!(differences(&mut client), [""; 0]);
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    assert_eq!(claim(&mut client, "q", "me", 5)[0].id, moved);
}

#[test]
fn a_pin_that_is_cut_short_ends_when_it_says() {
    let db = brisk().database();
    let mut client = db.connect();
    let id = pin(&mut client, "now()", "'infinity'");
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_until = now() + interval '1 s'",
    );
    let start = Instant::now();
    let tasks = claim_waiting(&mut client, "q", "other", 1, "60 s");
    assert_eq!(tasks[0].id, id);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

#[test]
fn a_pinned_task_of_a_prepared_transaction_ends_the_wait_of_its_worker_within_a_sweep() {
    let db = brisk().database();
    for nobody_else in [true, false] {
        if !nobody_else {
            let mut client = db.connect();
            execute(
                &mut client,
                "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker) VALUES ('q', 'a', 'other')",
            );
        }
        let name = db.name().to_owned();
        let (_, waited) = while_waiting(&db, |client| {
            execute(client, "BEGIN");
            pin(client, "now()", "NULL");
            execute(client, &format!("PREPARE TRANSACTION '{name}'"));
            execute(client, &format!("COMMIT PREPARED '{name}'"));
        });
        assert!(waited < 2 * SOON, "{waited:?}");
    }
}

#[test]
fn a_pinned_task_whose_key_is_held_back_ends_the_wait_when_the_key_is_not() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    let running = enqueue(&mut client, "q", Some("a"));
    let running = {
        let tasks = claim(&mut client, "q", "other", 1);
        assert_eq!(tasks[0].id, running);
        tasks[0].clone()
    };
    let id = pin(&mut client, "now()", "NULL");
    execute(&mut client, "BEGIN");
    assert!(claim(&mut client, "q", "me", 1).is_empty());
    let wrote = "SELECT pg_current_xact_id_if_assigned() IS NOT NULL";
    assert!(!one::<bool>(&mut client, wrote, &[]), "a claim of nothing");
    execute(&mut client, "COMMIT");
    let (got, waited) = while_waiting(&db, |client| {
        assert!(complete(client, &running));
    });
    assert_eq!(got, id);
    assert!(waited < SOON, "after a cap: {waited:?}");
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": null, "key_rate_limit": 0.5}"#,
    );
    let first = pin(&mut client, "now()", "NULL");
    let second = pin(&mut client, "now()", "NULL");
    assert_eq!(wait_for_one(&mut client).0, first);
    let (got, waited) = wait_for_one(&mut client);
    assert_eq!(got, second);
    assert!(waited < SOON, "for a token: {waited:?}");
}
