//! `harvest_fair.check()`: silent while all is well, however busy; and it finds whatever the board was not told of.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use harvest_fair_server_tests::{
    Cluster, Database, Options, PATIENCE, claim, complete, enqueue, expect_error, flood, one,
    wait_until,
};
use postgres::Client;

use crate::policy_support::release;
use crate::support::{brisk, differences, execute};

/// A server whose janitor sweeps when it starts, and then no more.
fn rarely_swept() -> Cluster {
    Cluster::start(Options::new().set("harvest_fair.sweep_interval", "1h"))
}

/// A new janitor sweeps at once.
fn sweep(client: &mut Client) {
    execute(
        client,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE backend_type = 'harvest_fair janitor' AND datname = current_database()",
    );
}

fn without_triggers(client: &mut Client, sql: &str) {
    execute(
        client,
        &format!("SET session_replication_role = replica; {sql}; RESET session_replication_role"),
    );
}

/// Five keys with ten tasks each, of which ten run.
fn busy_queue(db: &Database) -> Client {
    let mut client = db.connect();
    // Retention deletes it when the janitor's first sweep is over. No trigger, so that no janitor is there before it.
    without_triggers(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, state, finished_at)
         VALUES ('swept', '', 3, 'completed', '2000-01-01')",
    );
    for key in ["a", "b", "c", "d", "e"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    assert_eq!(claim(&mut client, "q", "w", 10).len(), 10);
    wait_until("the janitor has swept", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 0 FROM harvest_fair.task WHERE queue = 'swept'",
            &[],
        )
    });
    assert_eq!(differences(&mut client), [""; 0]);
    client
}

/// Runs `sql` without triggers and expects these differences, until the next sweep.
#[track_caller]
fn expect_until_swept(sql: &str, expected: &[&str]) {
    let cluster = rarely_swept();
    let db = cluster.database();
    let mut client = busy_queue(&db);
    without_triggers(&mut client, sql);
    let found = differences(&mut client);
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found} is not {expected}");
    }
    sweep(&mut client);
    let mut left = found;
    wait_until("the sweep has mended it", PATIENCE, || {
        left = differences(&mut client);
        left.is_empty()
    });
}

#[test]
fn it_finds_tasks_that_the_board_does_not_know_of() {
    expect_until_swept(
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         VALUES ('q', 'new', 3, now()), ('q', 'a', 3, now() - interval '1 day'), ('q', 'a', 4, now() + interval '1 day');
         INSERT INTO harvest_fair.task (queue, fairness_key, priority, sticky_worker) VALUES ('q', 'pinned', 3, 'w')",
        &[
            "q|-|-|first pin|none|for good",
            "q|3|a|pending|none before task ",
            "q|3|new|pending|unknown|task ",
            "q|4|a|pending|unknown|task ",
        ],
    );
}

#[test]
fn it_finds_running_counts_and_leases_that_the_board_does_not_know_of() {
    expect_until_swept(
        "UPDATE harvest_fair.task SET state = 'completed' WHERE state = 'running' AND fairness_key IN ('a', 'b');
         DELETE FROM harvest_fair.task WHERE fairness_key = 'b';
         UPDATE harvest_fair.task SET state = 'running', lease_until = now() + interval '20 s' WHERE fairness_key = 'c' AND state = 'pending'",
        &[
            "q|-|-|first lease|",
            "q|-|a|running|2|0",
            "q|-|b|running|2|0",
            "q|-|c|running|2|10",
        ],
    );
}

#[test]
fn it_finds_weights_and_settings_that_the_board_does_not_know_of() {
    expect_until_swept(
        r#"INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'a', 7), ('q', 'unknown', 2);
           INSERT INTO harvest_fair.queue (queue, settings)
           VALUES ('q', '{"key_max_running": 5, "lease": "2 min", "queue_weight": 0, "priority_aging": "1 min", "charge": "seconds", "group_separator": "/"}')"#,
        &[
            "q|-|-|setting charge|claims|seconds",
            "q|-|-|setting group_separator|-|/",
            "q|-|-|setting key_max_running|-|5",
            "q|-|-|setting lease|-|120 s",
            "q|-|-|setting priority_aging|-|60 s",
            "q|-|-|setting queue_weight|-|0",
            "q|-|a|weight|-|7",
            "q|-|unknown|weight|-|2",
        ],
    );
}

#[test]
fn it_finds_cleared_weights_and_settings_that_the_board_does_not_know_of() {
    let cluster = rarely_swept();
    let db = cluster.database();
    let mut client = busy_queue(&db);
    execute(
        &mut client,
        r#"SELECT fair_set_weight('q', 'a', 3); SELECT fair_configure('q', '{"rate_limit": 100, "paused": true}')"#,
    );
    assert_eq!(differences(&mut client), [""; 0]);
    without_triggers(
        &mut client,
        "DELETE FROM harvest_fair.weight; DELETE FROM harvest_fair.queue",
    );
    assert_eq!(
        differences(&mut client),
        [
            "q|-|-|setting paused|true|false",
            "q|-|-|setting rate_limit|100|-",
            "q|-|a|weight|3|-",
        ]
    );
    sweep(&mut client);
    wait_until("the sweep has mended it", PATIENCE, || {
        differences(&mut client).is_empty()
    });
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
}

#[test]
fn a_key_that_made_room_for_others_gets_its_running_count_right_too() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 64)
            .set("harvest_fair.sweep_interval", "1h"),
    );
    let db = cluster.database();
    let mut client = busy_queue(&db);
    enqueue(&mut client, "lone", Some("k"));
    assert_eq!(claim(&mut client, "lone", "w", 1).len(), 1);
    assert!(claim(&mut client, "lone", "w", 1).is_empty());
    // With the five keys of the queue these take all 64 places in the order, but only 63 of the 64 for keys.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority)
         SELECT 'q', 'k' || i, 3 FROM generate_series(1, 58) i UNION ALL SELECT 'q', 'k1', 4",
    );
    let in_order: i64 = one(&mut client, "SELECT count(*) FROM fair_state('lone')", &[]);
    assert_eq!(in_order, 0);
    without_triggers(
        &mut client,
        "DELETE FROM harvest_fair.task WHERE queue = 'lone'",
    );
    assert_eq!(differences(&mut client), ["lone|-|k|running|1|0"]);
    sweep(&mut client);
    wait_until("the sweep has mended it", PATIENCE, || {
        differences(&mut client).is_empty()
    });
}

#[test]
fn it_finds_tasks_beyond_a_cap_unless_they_ran_before_it_was_set() {
    let cluster = rarely_swept();
    let db = cluster.database();
    let mut client = busy_queue(&db);
    execute(
        &mut client,
        r#"SELECT fair_configure('q', '{"key_max_running": 1}')"#,
    );
    assert_eq!(differences(&mut client), [""; 0]);
    let mut other = db.connect();
    assert!(claim(&mut other, "q", "w", 10).is_empty());
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET state = 'running', lease_until = now() + interval '1 hour', started_at = clock_timestamp()
         WHERE id = (SELECT min(id) FROM harvest_fair.task WHERE fairness_key = 'a' AND state = 'pending')",
    );
    assert_eq!(differences(&mut client), ["q|-|a|cap|1|3 running"]);
}

#[test]
fn it_finds_keys_that_a_full_board_has_no_room_for() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 64)
            .set("harvest_fair.sweep_interval", "500ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i FROM generate_series(1, 100) i",
    );
    let mut tasks = claim(&mut client, "q", "w", 1);
    let found = differences(&mut client);
    assert!(!found.is_empty());
    for difference in &found {
        assert!(
            difference.contains("|pending|unknown|task "),
            "{difference}"
        );
    }
    wait_until("there was room for all", PATIENCE, || {
        for task in std::mem::take(&mut tasks) {
            assert!(complete(&mut client, &task));
        }
        tasks = claim(&mut client, "q", "w", 10);
        tasks.is_empty() && differences(&mut client).is_empty()
    });
}

#[test]
fn what_is_under_way_is_no_difference() {
    let cluster = rarely_swept();
    let db = cluster.database();
    let mut client = busy_queue(&db);
    let (mut worker, mut producer, mut dba) = (db.connect(), db.connect(), db.connect());
    let mut changing = dba.transaction().unwrap();
    changing
        .batch_execute(
            r#"UPDATE harvest_fair.task SET fairness_key = 'z' WHERE fairness_key = 'e' AND state = 'pending' AND id % 2 = 0;
               SELECT fair_set_weight('q', 'a', 5); SELECT fair_configure('q', '{"key_max_running": 1}')"#,
        )
        .unwrap();
    let mut claiming = worker.transaction().unwrap();
    assert_eq!(claim(&mut claiming, "q", "w", 20).len(), 20);
    let mut enqueuing = producer.transaction().unwrap();
    enqueue(&mut enqueuing, "q", Some("a"));
    enqueue(&mut enqueuing, "q", Some("new"));
    assert_eq!(differences(&mut client), [""; 0]);
    claiming.rollback().unwrap();
    assert_eq!(differences(&mut client), [""; 0]);
    changing.commit().unwrap();
    enqueuing.commit().unwrap();
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn it_finds_nothing_while_many_work() {
    let db = Cluster::shared().database();
    let (mut client, stop) = (db.connect(), AtomicBool::new(false));
    thread::scope(|scope| {
        for worker in 0..4 {
            let (db, stop) = (&db, &stop);
            scope.spawn(move || {
                let mut client = db.connect();
                for round in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    enqueue(
                        &mut client,
                        "q",
                        Some(&format!("k{}", (worker + round) % 7)),
                    );
                    let mut transaction = client.transaction().unwrap();
                    let tasks = claim(&mut transaction, "q", "w", 2);
                    if round % 5 == 0 {
                        transaction.rollback().unwrap();
                        continue;
                    }
                    transaction.commit().unwrap();
                    for task in tasks {
                        if task.id % 3 == 0 {
                            release(&mut client, &task);
                        } else {
                            complete(&mut client, &task);
                        }
                    }
                }
            });
        }
        let found: Vec<String> = (0..40).flat_map(|_| differences(&mut client)).collect();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(found, [""; 0]);
    });
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn it_refuses_to_compare_what_is_not_committed() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("BEGIN; SELECT fair_enqueue('q', fairness_key => 'a')");
    expect_error(
        &mut client,
        "SELECT * FROM harvest_fair.check()",
        "25001",
        "harvest_fair.check cannot run in a transaction that has changed tasks, weights or settings",
        "Commit it first",
    );
    execute(&mut client, "ROLLBACK");
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn a_weight_that_was_stored_against_the_rules_counts_as_not_set_and_is_no_difference() {
    let db = brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 3, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    without_triggers(
        &mut client,
        "INSERT INTO harvest_fair.weight VALUES ('q', 'a', 5000), ('q', 'b', 'NaN'), ('q', ' ', 2), ('q', 'c', 2)",
    );
    wait_until("the sweep has told the good one", PATIENCE, || {
        differences(&mut client)
            .iter()
            .all(|line| !line.contains("|c|"))
    });
    assert_eq!(differences(&mut client), [""; 0]);
    assert_eq!(claim(&mut client, "q", "w", 1)[0].weight, 1.0);
}
