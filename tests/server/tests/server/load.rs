//! The board is shared, so a queue is loaded as other sessions see it: what the loading transaction has changed and not
//! committed, or what its old snapshot shows, must not get there.

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, Shutdown, claim, complete, enqueue, flood, one, wait_until,
};
use postgres::Client;

use crate::policy_support::{configure, waiting_for};
use crate::support::{brisk_options, execute, state};

/// Two sessions, and a queue with tasks of `a` that nobody has loaded.
fn unloaded(db: &Database) -> (Client, Client) {
    let mut client = db.connect();
    flood(&mut client, "q", "a", 6, "1 hour");
    (client, db.connect())
}

#[test]
fn settings_that_are_rolled_back_leave_no_trace_in_a_queue_that_was_loaded_meanwhile() {
    let db = Cluster::shared().database();
    for load in [
        "SELECT FROM fair_claim('q', 'w')",
        "SELECT FROM fair_preview('q', 'w', 1)",
        "SELECT FROM fair_state('q')",
        "SELECT FROM fair_lag('q')",
    ] {
        for (begin, end) in [
            ("BEGIN", "ROLLBACK"),
            ("BEGIN; SAVEPOINT s", "ROLLBACK TO s; COMMIT"),
        ] {
            let (mut client, mut other) = unloaded(&db);
            execute(&mut client, begin);
            execute(&mut client, "SELECT fair_pause('q')");
            execute(&mut client, load);
            execute(&mut client, end);
            let claimed = claim(&mut other, "q", "w", 1);
            assert_eq!(claimed.len(), 1, "{begin}; {load}; {end}");
            execute(
                &mut client,
                "DROP EXTENSION harvest_fair CASCADE; CREATE EXTENSION harvest_fair",
            );
        }
    }
}

#[test]
fn a_resume_that_is_rolled_back_leaves_a_queue_paused_that_was_loaded_meanwhile() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let (mut client, _) = unloaded(&db);
    execute(&mut client, "SELECT fair_pause('q')");
    cluster.restart(Shutdown::Fast);
    let (mut client, mut other) = (db.connect(), db.connect());
    execute(
        &mut client,
        "BEGIN; SELECT fair_resume('q'); SELECT fair_lag('q'); ROLLBACK",
    );
    assert!(claim(&mut other, "q", "w", 1).is_empty());
    assert_eq!(waiting_for(&mut other, "q", "a"), "paused");
}

#[test]
fn an_uncommitted_weight_rules_nobody_and_goes_with_its_transaction() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = unloaded(&db);
    execute(
        &mut client,
        "BEGIN; SELECT fair_set_weight('q', 'a', 4); SELECT fair_lag('q')",
    );
    assert_eq!(state(&mut other, "q", "a").weight, 1.0);
    execute(&mut client, "ROLLBACK");
    assert_eq!(state(&mut other, "q", "a").weight, 1.0);
    execute(
        &mut client,
        "BEGIN; SELECT fair_set_weight('q', 'a', 4); SELECT fair_lag('q'); COMMIT",
    );
    assert_eq!(state(&mut other, "q", "a").weight, 4.0);
}

#[test]
fn a_cap_holds_for_a_worker_whose_first_transaction_after_a_restart_completes_and_claims() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let (mut client, _) = unloaded(&db);
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    let running = claim(&mut client, "q", "w", 5);
    assert_eq!(running.len(), 2);
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    execute(&mut client, "BEGIN");
    assert!(complete(&mut client, &running[0]));
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    execute(&mut client, "COMMIT");
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
}

#[test]
fn an_old_snapshot_does_not_bring_old_settings_onto_the_board() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = unloaded(&db);
    execute(
        &mut client,
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM harvest_fair.task",
    );
    execute(&mut other, "SELECT fair_pause('q')");
    execute(&mut client, "SELECT fair_state('q'); COMMIT");
    assert!(claim(&mut other, "q", "w", 1).is_empty());
    assert_eq!(waiting_for(&mut other, "q", "a"), "paused");
}

#[test]
fn rows_and_settings_that_come_back_by_a_rollback_count_although_the_load_did_not_see_them() {
    let db = Cluster::shared().database();
    for hide in [
        "DELETE FROM harvest_fair.task; DELETE FROM harvest_fair.queue",
        "TRUNCATE harvest_fair.task; TRUNCATE harvest_fair.queue",
    ] {
        let (mut client, mut other) = unloaded(&db);
        configure(&mut client, "q", r#"{"key_max_running": 2}"#);
        execute(
            &mut client,
            &format!("BEGIN; {hide}; SELECT fair_lag('q'); ROLLBACK"),
        );
        assert_eq!(claim(&mut other, "q", "w", 5).len(), 2, "{hide}");
        execute(
            &mut client,
            "DROP EXTENSION harvest_fair CASCADE; CREATE EXTENSION harvest_fair",
        );
    }
}

#[test]
fn a_cap_counts_the_claims_under_way_when_a_queue_is_loaded_again() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.sweep_interval", "1h"));
    let db = cluster.database();
    let (mut client, _) = unloaded(&db);
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    cluster.restart(Shutdown::Fast);
    let (mut client, mut other, mut third) = (db.connect(), db.connect(), db.connect());
    execute(
        &mut client,
        "BEGIN; TRUNCATE harvest_fair.weight; SELECT FROM fair_lag('q')",
    );
    execute(&mut other, "BEGIN");
    assert_eq!(claim(&mut other, "q", "w", 5).len(), 1);
    // The load did not see what the table held, so the next claim loads again.
    execute(&mut client, "ROLLBACK");
    assert!(claim(&mut third, "q", "w", 5).is_empty());
    execute(&mut other, "COMMIT");
    assert!(claim(&mut third, "q", "w", 5).is_empty());
    assert_eq!(state(&mut third, "q", "a").running, 2);
}

#[test]
fn tasks_that_are_completed_while_a_queue_is_loaded_are_not_counted_as_running() {
    const RUNNING: i64 = 60_000;
    let cluster = Cluster::start(
        brisk_options()
            .set("harvest_fair.sweep_interval", "1h")
            .set("harvest_fair.retention", "-1"),
    );
    let db = cluster.database();
    let (mut client, _) = unloaded(&db);
    execute(
        &mut client,
        &format!(
            "INSERT INTO harvest_fair.task (queue, fairness_key, state, lease, lease_until)
             SELECT 'q', 'a', 'running', 1, now() + interval '1 hour' FROM generate_series(1, {RUNNING})"
        ),
    );
    cluster.restart(Shutdown::Fast);
    let (mut client, mut other) = (db.connect(), db.connect());
    let first = "SELECT min(id) FROM harvest_fair.task WHERE state = 'running'";
    let first: i64 = one(&mut client, first, &[]);
    let completing = std::thread::spawn(move || {
        for id in first..first + 300 {
            let done = "SELECT fair_complete($1::bigint, 1::bigint)";
            assert!(one::<bool>(&mut other, done, &[&id]));
        }
    });
    execute(&mut client, "SELECT FROM fair_lag('q')");
    completing.join().expect("all are completed");
    let on_board = state(&mut client, "q", "a").running;
    // A commit that falls in with the instant of the count may be counted or not.
    assert!(on_board.abs_diff(RUNNING - 300) <= 1, "{on_board}");
}

#[test]
fn a_task_that_is_referred_to_is_kept_and_keeps_nobody_else() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.retention", "0"));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE TABLE result (task_id bigint REFERENCES harvest_fair.task (id))",
    );
    let kept = enqueue(&mut client, "q", Some("a"));
    execute(&mut client, &format!("INSERT INTO result VALUES ({kept})"));
    for _ in 0..3 {
        enqueue(&mut client, "q", Some("a"));
    }
    enqueue(&mut client, "r", Some("a"));
    let janitor = janitor_of(&mut client);
    for queue in ["q", "r"] {
        for task in claim(&mut client, queue, "w", 5) {
            assert!(complete(&mut client, &task));
        }
    }
    wait_until("all others are deleted", PATIENCE, || {
        one::<i64>(&mut client, "SELECT count(*) FROM harvest_fair.task", &[]) == 1
    });
    // Three more sweeps, each of which meets it again.
    for _ in 0..3 {
        let id = enqueue(&mut client, "r", Some("a"));
        for task in claim(&mut client, "r", "w", 5) {
            assert!(complete(&mut client, &task));
        }
        wait_until("the next one is deleted", PATIENCE, || {
            let left = "SELECT count(*) FROM harvest_fair.task WHERE id = $1";
            one::<i64>(&mut client, left, &[&id]) == 0
        });
    }
    let left: i64 = one(&mut client, "SELECT max(id) FROM harvest_fair.task", &[]);
    assert_eq!(left, kept);
    assert_eq!(janitor_of(&mut client), janitor, "the same janitor");
    let log = cluster.log();
    let warnings = log.matches("cannot be deleted: 1").count();
    assert_eq!(warnings, 1, "{log}");
    execute(&mut client, "DROP TABLE result");
    wait_until("it is deleted too", PATIENCE, || {
        one::<i64>(&mut client, "SELECT count(*) FROM harvest_fair.task", &[]) == 0
    });
}

fn janitor_of(client: &mut Client) -> i32 {
    let pid = "SELECT coalesce(max(pid), 0) FROM pg_stat_activity WHERE backend_type = 'harvest_fair janitor'";
    let mut found = 0;
    wait_until("the janitor runs", PATIENCE, || {
        found = one(client, pid, &[]);
        found != 0
    });
    found
}

#[test]
fn a_duty_of_the_janitor_that_fails_keeps_it_from_no_other() {
    let cluster = Cluster::start(
        brisk_options()
            .set("harvest_fair.default_lease", "100ms")
            .set("harvest_fair.flush_interval", "1s"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 5, "1 hour");
    execute(
        &mut client,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN IF OLD.state = 'running' AND NEW.state = 'pending' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION refuse()",
    );
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    let janitor = janitor_of(&mut client);
    wait_until("the janitor says what it cannot do", PATIENCE, || {
        cluster
            .log()
            .contains("task 1 of queue \"q\" cannot be taken back: not this one")
    });
    wait_until("passes are saved all the same", PATIENCE, || {
        one::<i64>(
            &mut client,
            "SELECT count(*) FROM harvest_fair.key_state WHERE pass > 0",
            &[],
        ) == 1
    });
    assert_eq!(janitor_of(&mut client), janitor, "the same janitor");
    execute(&mut client, "DROP TRIGGER refuse ON harvest_fair.task");
    wait_until("the task is taken back", PATIENCE, || {
        one::<i64>(
            &mut client,
            "SELECT count(*) FROM harvest_fair.task WHERE state = 'pending'",
            &[],
        ) == 5
    });
}
