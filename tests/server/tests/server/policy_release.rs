//! A task that is given back is as it was, its `new_start` too; every other end of a claim makes it a kept one.

use harvest_fair_server_tests::{
    Cluster, Options, Shutdown, claim, claim_one, complete, one, running,
};
use postgres::Client;

use crate::policy_support::{claim_by_id, configure, release};
use crate::support::{drain, execute, state, task_field, unattended};

/// A new start of key A that has been due for so many seconds.
#[track_caller]
fn new_start(client: &mut Client, seconds: f64) -> i64 {
    one(
        client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() - $1 * interval '1 s', new_start => true)",
        &[&seconds],
    )
}

#[track_caller]
fn is_new_start(client: &mut Client, id: i64) -> bool {
    task_field(client, id, "new_start").unwrap() == "true"
}

#[test]
fn a_released_task_is_as_it_was_but_for_the_number_of_its_lease() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = new_start(&mut client, 5.0);
    let whole = "to_jsonb(task) - 'lease'";
    let before = task_field(&mut client, id, whole);
    let task = claim_one(&mut client, "q");
    assert!(release(&mut client, &task));
    assert_eq!(task_field(&mut client, id, whole), before);
    // Also by its id, and pinned.
    let by_id = claim_by_id(&mut client, id, "w");
    execute(
        &mut client,
        &format!("SELECT fair_release({id}, {})", by_id[0].1),
    );
    assert_eq!(task_field(&mut client, id, whole), before);
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_worker = 'w', sticky_until = now() + interval '1 hour'",
    );
    let before = task_field(&mut client, id, whole);
    let task = claim_one(&mut client, "q");
    assert!(release(&mut client, &task));
    assert_eq!(task_field(&mut client, id, whole), before);
}

#[test]
fn a_released_new_start_stands_back_as_before() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = new_start(&mut client, 20.0);
    let task = claim_one(&mut client, "q");
    let goes_on: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => scheduled_at + interval '20 s')
         FROM harvest_fair.task WHERE id = $1",
        &[&id],
    );
    assert!(release(&mut client, &task));
    // Twenty seconds of age do not make up for thirty of handicap.
    assert_eq!(claim_one(&mut client, "q").id, goes_on);
    assert_eq!(claim_one(&mut client, "q").id, id);
}

#[test]
fn completion_failure_and_an_expired_lease_make_the_claim_a_kept_one() {
    let db = unattended().database();
    let mut client = db.connect();
    let id = new_start(&mut client, 5.0);
    for end in [
        "fair_fail($1, $2, 'x', '0')",
        "lease",
        "fair_complete($1, $2)",
    ] {
        execute(&mut client, "UPDATE harvest_fair.task SET new_start = true");
        let task = claim_one(&mut client, "q");
        assert!(is_new_start(&mut client, id), "running, before {end}");
        if end == "lease" {
            execute(
                &mut client,
                "UPDATE harvest_fair.task SET lease_until = now() - interval '1 s'",
            );
            // A claim of something else takes it back at once.
            claim(&mut client, "q", "w", 1);
        } else {
            let call = end
                .replace("$1", &id.to_string())
                .replace("$2", &task.lease.to_string());
            execute(&mut client, &format!("SELECT {call}"));
        }
        assert!(!is_new_start(&mut client, id), "after {end}");
        if end == "lease" {
            execute(
                &mut client,
                "UPDATE harvest_fair.task SET state = 'pending'",
            );
        }
    }
}

#[test]
fn a_retry_of_a_cancelled_new_start_is_one_and_that_of_a_failed_one_is_not() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let cancelled = new_start(&mut client, 5.0);
    let task = claim_one(&mut client, "q");
    assert!(release(&mut client, &task));
    execute(
        &mut client,
        &format!("SELECT fair_cancel({cancelled}); SELECT fair_retry({cancelled})"),
    );
    assert!(is_new_start(&mut client, cancelled));
    execute(&mut client, "UPDATE harvest_fair.task SET max_attempts = 1");
    let task = claim_one(&mut client, "q");
    execute(
        &mut client,
        &format!(
            "SELECT fair_fail({}, {}, 'x'); SELECT fair_retry({})",
            task.id, task.lease, task.id
        ),
    );
    assert!(!is_new_start(&mut client, cancelled));
    assert_eq!(claim_one(&mut client, "q").id, cancelled);
}

#[test]
fn released_new_starts_are_counted_charged_and_capped_like_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    let first = new_start(&mut client, 100.0);
    new_start(&mut client, 90.0);
    for _ in 0..3 {
        let task = claim_one(&mut client, "q");
        assert_eq!(task.id, first);
        assert_eq!(state(&mut client, "q", "A").running, 1);
        assert!(claim(&mut client, "q", "w", 5).is_empty());
        assert!(release(&mut client, &task));
        let after = state(&mut client, "q", "A");
        assert_eq!((after.running, after.lag, after.eligible), (0, 0.0, true));
    }
    // A release that is rolled back is none.
    let task = claim_one(&mut client, "q");
    let mut transaction = client.transaction().unwrap();
    assert!(release(&mut transaction, &task));
    transaction.rollback().unwrap();
    assert_eq!(state(&mut client, "q", "A").running, 1);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert!(complete(&mut client, &task));
    // A claim that is rolled back leaves the new start in its lane.
    let mut transaction = client.transaction().unwrap();
    claim_one(&mut transaction, "q");
    transaction.rollback().unwrap();
    assert_eq!(drain(&mut client, "q", 5).len(), 1);
    assert_eq!(running(&mut client, "q"), 1);
    // Deleted by hand while it runs.
    execute(
        &mut client,
        "DELETE FROM harvest_fair.task WHERE state = 'running'",
    );
    assert_eq!(state(&mut client, "q", "A").running, 0);
}

#[test]
fn a_running_new_start_is_counted_after_a_crash_and_released_into_its_lane() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    let id = new_start(&mut client, 20.0);
    let task = claim_one(&mut client, "q");
    cluster.restart(Shutdown::Immediate);
    let mut client = db.connect();
    new_start(&mut client, 10.0);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(state(&mut client, "q", "A").running, 1);
    assert!(release(&mut client, &task));
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    assert_eq!(claim_one(&mut client, "q").id, id);
}
