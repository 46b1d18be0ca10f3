//! The board's own life: full, shared by databases, dropped and made again. What of it outlives a restart stands in
//! `restarts`.

use std::collections::HashSet;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Options, PATIENCE, claim, claim_one, complete, count, enqueue,
    expect_refusal, flood, holds_within, one, pending, sqlstate_of, try_claim, wait_until,
};
use postgres::Client;

use crate::support::{
    assert_all_different, assert_near, brisk, brisk_options, claims, drain, execute, stat, states,
};

const DROP: &str = "DROP EXTENSION harvest_fair; DROP SCHEMA IF EXISTS harvest_fair";

/// Claims and completes until `n` tasks came; what a full board has no room for comes with later sweeps.
fn drain_patiently(client: &mut Client, queue: &str, n: usize, batch: i32) -> Vec<ClaimedTask> {
    let mut all = Vec::new();
    let all_came = holds_within(PATIENCE * 2, || {
        let tasks = claim(client, queue, "w", batch);
        for task in &tasks {
            assert!(complete(client, task));
        }
        all.extend(tasks);
        all.len() >= n
    });
    assert!(all_came, "only {} of {n} tasks came", all.len());
    all
}

#[test]
fn a_full_board_loses_nothing_and_says_so_once() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 64)
            .set("harvest_fair.sweep_interval", "500ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key)
         SELECT 'q', 'k' || i % 1000 FROM generate_series(1, 2000) i",
    );
    let tasks = drain_patiently(&mut client, "q", 2000, 20);
    assert_eq!(tasks.len(), 2000);
    assert_all_different(&tasks);
    let keys: HashSet<&str> = tasks.iter().map(|task| task.key.as_str()).collect();
    assert_eq!(keys.len(), 1000);
    assert!(stat(&mut client, "q", "full_rejections") > 0);
    let log = cluster.log();
    let warnings: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("WARNING") && line.contains("no room"))
        .collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(
        log.lines()
            .any(|line| line.contains("HINT") && line.contains("harvest_fair.max_keys")),
        "no hint to raise max_keys"
    );
}

#[test]
fn a_full_board_takes_new_keys_as_soon_as_old_ones_have_no_work() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.max_keys", 64));
    let db = cluster.database();
    let mut client = db.connect();
    for round in 0..20 {
        execute(
            &mut client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key)
                 SELECT 'q', 'round {round} key ' || i FROM generate_series(1, 50) i"
            ),
        );
        let tasks = drain(&mut client, "q", 25);
        assert_eq!(tasks.len(), 50, "round {round}");
        for task in &tasks {
            assert!(complete(&mut client, task));
        }
    }
    assert_eq!(stat(&mut client, "q", "full_rejections"), 0);
}

#[test]
fn a_key_that_runs_something_is_no_free_one() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 16)
            .set("harvest_fair.sweep_interval", "1h"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i FROM generate_series(1, 16) i",
    );
    let tasks = drain(&mut client, "q", 16);
    assert_eq!(tasks.len(), 16);
    for (ended, task) in tasks.iter().enumerate() {
        assert_eq!(stat(&mut client, "q", "free_keys"), ended as i64);
        if ended == 0 {
            let charge = "SELECT fair_charge('q', 'new')";
            let refusal = expect_refusal(&mut client, charge);
            assert_eq!(refusal.sqlstate, "53400", "{refusal:?}");
        }
        assert!(complete(&mut client, task));
    }
    assert_eq!(stat(&mut client, "q", "free_keys"), 16);
    for new in 0..16 {
        execute(
            &mut client,
            &format!("SELECT fair_charge('q', 'new {new}')"),
        );
    }
}

#[test]
fn more_queues_than_the_board_has_room_for_are_refused_or_served_but_never_lost() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.max_queues", 8));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q' || i, 'A' FROM generate_series(1, 20) i",
    );
    let (mut served, mut refused) = (0, 0);
    for i in 1..=20 {
        match client.query(&format!("SELECT id FROM fair_claim('q{i}', 'w', 1)"), &[]) {
            Ok(rows) => served += rows.len(),
            Err(error) => {
                let error = error.as_db_error().unwrap();
                assert_ne!(error.code().code(), "XX000", "{error:?}");
                assert!(
                    error.hint().unwrap_or_default().contains("max_queues"),
                    "{error:?}"
                );
                refused += 1;
            }
        }
    }
    let left: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.task WHERE state = 'pending'",
        &[],
    );
    assert_eq!(served as i64 + left, 20);
    assert!(served >= 8, "{served} served, {refused} refused");
}

#[test]
fn queues_that_are_done_make_room_for_others() {
    let cluster = Cluster::start(
        brisk_options()
            .set("harvest_fair.max_queues", 8)
            .set("harvest_fair.prune_after", "1s"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    for day in 0..40 {
        let queue = format!("day {day}");
        enqueue(&mut client, &queue, Some("A"));
        let mut tasks = Vec::new();
        wait_until("there is room for the queue", PATIENCE, || {
            match try_claim(&mut client, &queue, "w", 1) {
                Ok(found) => tasks = found,
                Err(error) => assert_eq!(sqlstate_of(&error), "53400", "{error:?}"),
            }
            !tasks.is_empty()
        });
        assert!(complete(&mut client, &tasks[0]));
    }
}

#[test]
fn two_databases_do_not_see_each_others_queues() {
    let cluster = Cluster::shared();
    let (left, right) = (cluster.database(), cluster.database());
    let (mut left, mut right) = (left.connect(), right.connect());
    execute(&mut left, "SELECT fair_set_weight('q', 'A', 9)");
    for client in [&mut left, &mut right] {
        flood(client, "q", "A", 50, "1 hour");
        flood(client, "q", "B", 50, "1 hour");
    }
    let mut of_left = Vec::new();
    let mut of_right = Vec::new();
    for _ in 0..40 {
        of_left.push(claim_one(&mut left, "q"));
        of_right.push(claim_one(&mut right, "q"));
    }
    assert_near(count(&of_left, "A"), 36, 1, "claims at weight 9");
    assert_near(count(&of_right, "A"), 20, 1, "claims at equal weights");
    assert_eq!(
        (pending(&mut left, "q"), pending(&mut right, "q")),
        (60, 60)
    );
}

#[test]
fn a_re_created_extension_starts_clean_also_for_open_sessions() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    execute(&mut client, "SELECT fair_set_weight('q', 'A', 0.01)");
    flood(&mut client, "q", "A", 20, "1 hour");
    flood(&mut client, "q", "old", 20, "1 hour");
    claims(&mut client, "q", 10, 1);
    execute(&mut admin, DROP);
    assert!(
        client
            .batch_execute("SELECT fair_claim('q', 'w', 1)")
            .is_err()
    );
    execute(&mut admin, "CREATE EXTENSION harvest_fair");
    assert!(states(&mut client, "q").is_empty());
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    flood(&mut client, "q", "A", 20, "1 hour");
    flood(&mut client, "q", "B", 20, "1 hour");
    let tasks = drain(&mut client, "q", 1);
    assert_eq!(tasks.len(), 40);
    assert_near(
        count(&tasks[..20], "A"),
        10,
        1,
        "claims of A, whose weight is gone",
    );
}

#[test]
fn a_rolled_back_create_and_a_rolled_back_drop_leave_things_as_they_were() {
    let db = Cluster::shared().empty_database();
    let mut client = db.connect();
    execute(
        &mut client,
        "BEGIN; CREATE EXTENSION harvest_fair; SELECT fair_enqueue('q'); SELECT fair_claim('q', 'w', 1); ROLLBACK",
    );
    execute(&mut client, "CREATE EXTENSION harvest_fair");
    flood(&mut client, "q", "A", 10, "1 hour");
    claims(&mut client, "q", 3, 1);
    execute(&mut client, "BEGIN; DROP EXTENSION harvest_fair; ROLLBACK");
    assert_eq!(drain(&mut client, "q", 2).len(), 7);
}

#[test]
fn the_extension_can_live_in_a_schema_of_its_own() {
    let db = Cluster::shared().empty_database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE SCHEMA fair; CREATE EXTENSION harvest_fair SCHEMA fair; SELECT fair.fair_enqueue('q', fairness_key => 'A')",
    );
    let claimed: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair.fair_claim('q', 'w')",
        &[],
    );
    assert_eq!(claimed, 1);
}

#[test]
fn a_squatted_schema_makes_create_extension_fail() {
    let db = Cluster::shared().empty_database();
    let mut client = db.connect_with("CREATE SCHEMA harvest_fair");
    let refusal = expect_refusal(&mut client, "CREATE EXTENSION harvest_fair");
    assert_eq!(refusal.sqlstate, "42P06", "{refusal:?}");
}

#[test]
fn a_database_with_a_janitor_at_work_can_be_dropped() {
    let cluster = brisk();
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 100, "1 hour");
    claims(&mut client, "q", 5, 2);
    wait_until("the janitor has been there", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) > 0 FROM harvest_fair.key_state",
            &[],
        )
    });
    drop(client);
    let mut admin = cluster.connect();
    // Postgres itself waits no more than five seconds for others to leave: too little on a machine that stands still.
    wait_until("the janitor gives way", PATIENCE, || {
        admin
            .batch_execute(&format!("DROP DATABASE {}", db.name()))
            .is_ok()
    });
}

#[test]
fn an_extension_with_a_janitor_at_work_can_be_dropped_again_and_again() {
    let db = brisk().database();
    let mut client = db.connect();
    // Long enough for any round of a janitor.
    execute(&mut client, "SET lock_timeout = '1 min'");
    for round in 0..5 {
        flood(&mut client, "q", "A", 20, "1 hour");
        assert_eq!(claims(&mut client, "q", 2, 5).len(), 10, "round {round}");
        execute(&mut client, DROP);
        execute(&mut client, "CREATE EXTENSION harvest_fair");
    }
    assert!(claim(&mut client, "q", "w", 1).is_empty());
}

#[test]
fn a_database_can_serve_as_a_template() {
    let cluster = Cluster::shared();
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    claim_one(&mut client, "q");
    drop(client);
    let copy = format!("{}_copy", db.name());
    let mut admin = cluster.connect();
    let copied = holds_within(PATIENCE, || {
        admin
            .batch_execute(&format!("CREATE DATABASE {copy} TEMPLATE {}", db.name()))
            .is_ok()
    });
    assert!(copied, "the janitor keeps the database in use");
    let mut client = cluster.connect_db(&copy);
    assert_eq!(drain(&mut client, "q", 2).len(), 4);
    assert_eq!(drain(&mut db.connect(), "q", 2).len(), 4);
    drop(client);
    execute(&mut admin, &format!("DROP DATABASE {copy} WITH (FORCE)"));
}
