//! A claim sees what its own transaction has changed. If that is rolled back, it has seen what never was, and the board must
//! not believe it: on a server without a janitor, so that nobody else puts it right.

use harvest_fair_server_tests::{
    PATIENCE, claim, claim_one, claim_waiting, enqueue, flood, one, wait_until,
};
use postgres::Client;

use crate::support::{drain, execute, stat, unattended, wait_for_expiry};

/// Whatever hides pending tasks from the session that does it.
const CHANGES: [&str; 9] = [
    "UPDATE harvest_fair.task SET scheduled_at = now() + interval '1 hour'",
    "UPDATE harvest_fair.task SET fairness_key = 'other', scheduled_at = now() + interval '1 hour'",
    "UPDATE harvest_fair.task SET queue = 'other'",
    "UPDATE harvest_fair.task SET sticky_worker = 'somebody', sticky_until = now() + interval '1 hour'",
    "UPDATE harvest_fair.task SET state = 'cancelled'",
    "UPDATE harvest_fair.task SET state = 'running', lease_until = now() + interval '1 hour'",
    "SELECT fair_cancel(id) FROM harvest_fair.task",
    "DELETE FROM harvest_fair.task",
    "TRUNCATE harvest_fair.task",
];

const WAYS: [(&str, &str); 4] = [
    ("BEGIN", "ROLLBACK"),
    ("BEGIN; SAVEPOINT s", "ROLLBACK TO s; COMMIT"),
    // What was seen in a savepoint goes with the changes that were made before it,
    (
        "BEGIN; SAVEPOINT s; SAVEPOINT looked",
        "RELEASE looked; ROLLBACK TO s; COMMIT",
    ),
    // and also if it has ended badly itself.
    (
        "BEGIN; SAVEPOINT s; SAVEPOINT looked",
        "ROLLBACK TO looked; ROLLBACK TO s; COMMIT",
    ),
];

/// Three tasks of `A`, hidden for a while; then all three can be claimed at once.
fn hide_and_bring_back(client: &mut Client, other: &mut Client, change: &str, way: (&str, &str)) {
    flood(client, "q", "A", 3, "1 hour");
    // The change is made in the outer savepoint, the look taken in the inner one.
    let (begin, inner) = way
        .0
        .split_once("; SAVEPOINT looked")
        .map_or((way.0, ""), |(begin, _)| (begin, "SAVEPOINT looked"));
    execute(client, begin);
    execute(client, change);
    execute(client, inner);
    // The rows are held, and the lane is kept awake for them.
    if !change.starts_with("TRUNCATE") {
        assert!(claim(other, "q", "w", 3).is_empty());
    }
    assert!(claim(client, "q", "w", 3).is_empty(), "{change}");
    execute(client, way.1);
    let what = format!("{change}, {way:?}");
    assert_eq!(claim(other, "q", "w", 3).len(), 3, "{what}");
    execute(client, "TRUNCATE harvest_fair.task");
}

#[test]
fn tasks_that_a_rolled_back_change_has_hidden_are_claimed_at_once() {
    let db = unattended().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    for change in CHANGES {
        for way in WAYS {
            hide_and_bring_back(&mut client, &mut other, change, way);
        }
    }
}

#[test]
fn a_worker_that_waits_is_woken_when_a_change_that_hid_its_tasks_is_rolled_back() {
    let db = unattended().database();
    let (mut client, mut waiting) = (db.connect(), db.connect());
    let id = enqueue(&mut client, "q", Some("A"));
    execute(&mut client, "BEGIN; DELETE FROM harvest_fair.task");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    let worker = std::thread::spawn(move || claim_waiting(&mut waiting, "q", "w", 1, "60 s"));
    let mut witness = db.connect();
    wait_until("the worker waits", PATIENCE, || {
        stat(&mut witness, "q", "waiting") == 1
    });
    execute(&mut client, "ROLLBACK");
    let tasks = worker.join().unwrap();
    assert_eq!(tasks.iter().map(|task| task.id).collect::<Vec<_>>(), [id]);
}

#[test]
fn a_claim_that_waits_after_changes_of_its_own_transaction_sleeps() {
    let db = unattended().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 3, "1 hour");
    execute(&mut client, "BEGIN; DELETE FROM harvest_fair.task");
    let before = stat(&mut client, "q", "empty_claims");
    assert!(claim_waiting(&mut client, "q", "w", 1, "1 s").is_empty());
    let rounds = stat(&mut client, "q", "empty_claims") - before;
    assert!(
        rounds <= 5,
        "{rounds} rounds while there was nothing new to see"
    );
    execute(&mut client, "ROLLBACK");
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 3);
}

#[test]
fn a_lease_whose_extension_is_rolled_back_is_taken_over_when_it_ends() {
    let db = unattended().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '300 ms'");
    enqueue(&mut client, "q", Some("A"));
    let lost = claim_one(&mut client, "q");
    wait_for_expiry(&mut client, &lost);
    for way in WAYS {
        execute(&mut client, way.0);
        execute(
            &mut client,
            "UPDATE harvest_fair.task SET lease_until = now() + interval '1 hour'",
        );
        assert!(claim(&mut client, "q", "w", 1).is_empty());
        execute(&mut client, way.1);
        let mut transaction = client.transaction().unwrap();
        assert_eq!(claim_one(&mut transaction, "q").id, lost.id, "{way:?}");
        transaction.rollback().unwrap();
    }
}

/// What may happen to rows that a session has fetched and not claimed yet.
const MEANWHILE: [&str; 9] = [
    "DELETE FROM harvest_fair.task WHERE state = 'pending' AND id % 3 = 0",
    "UPDATE harvest_fair.task SET payload = '[1]' WHERE state = 'pending'",
    "UPDATE harvest_fair.task SET fairness_key = 'B' WHERE state = 'pending' AND id % 3 = 0",
    "UPDATE harvest_fair.task SET scheduled_at = scheduled_at - interval '1 s' WHERE state = 'pending' AND id % 3 = 0",
    "UPDATE harvest_fair.task SET priority = 2 WHERE state = 'pending' AND id % 3 = 0",
    "UPDATE harvest_fair.task SET state = 'completed' WHERE state = 'pending' AND id % 3 = 0",
    "SELECT fair_claim_by_id(id, 'other') FROM harvest_fair.task WHERE state = 'pending' AND id % 3 = 0",
    "VACUUM FULL harvest_fair.task",
    // Other rows come to stand where the fetched ones stood.
    "CREATE TEMP TABLE kept AS SELECT * FROM harvest_fair.task ORDER BY id DESC; TRUNCATE harvest_fair.task; \
     INSERT INTO harvest_fair.task SELECT * FROM kept; DROP TABLE kept",
];

#[test]
fn rows_that_a_session_has_fetched_before_are_claimed_as_they_are_now() {
    let db = unattended().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    for meanwhile in MEANWHILE {
        execute(&mut client, "TRUNCATE harvest_fair.task");
        flood(&mut client, "q", "A", 60, "1 hour");
        // Claim by claim, more rows are fetched ahead.
        for _ in 0..20 {
            claim_one(&mut client, "q");
        }
        for part in meanwhile.split("; ") {
            dba.batch_execute(part).unwrap();
        }
        let left = dba
            .query(
                "SELECT id FROM harvest_fair.task WHERE state = 'pending' ORDER BY priority, scheduled_at, id",
                &[],
            )
            .unwrap();
        let mut left: Vec<i64> = left.iter().map(|row| row.get(0)).collect();
        assert!(!left.is_empty());
        let mut claimed: Vec<i64> = drain(&mut client, "q", 1)
            .iter()
            .map(|task| task.id)
            .collect();
        if meanwhile.contains("'B'") {
            left.sort();
            claimed.sort();
        }
        assert_eq!(claimed, left, "{meanwhile}");
    }
}

#[test]
fn rows_cut_off_the_table_by_a_vacuum_are_passed_over() {
    let db = unattended().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 2_000, "1 hour");
    for _ in 0..40 {
        claim_one(&mut client, "q");
    }
    execute(&mut dba, "DELETE FROM harvest_fair.task");
    execute(&mut dba, "VACUUM (TRUNCATE on) harvest_fair.task");
    let size: i64 = one(
        &mut dba,
        "SELECT pg_relation_size('harvest_fair.task')",
        &[],
    );
    assert_eq!(size, 0);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    let id = enqueue(&mut client, "q", Some("A"));
    assert_eq!(claim_one(&mut client, "q").id, id);
}
