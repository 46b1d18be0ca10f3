//! Caps: a key never runs more tasks than `key_max_running`, at any instant, however its tasks end.

use harvest_fair_server_tests::{
    Cluster, claim, claim_one, complete, count, enqueue, flood, one, running,
};

use crate::policy_support::{claim_by_id, configure, flood_at, release, waiting_for};
use crate::support::{await_claim, claims, execute, in_time, state, unattended, woken_by};

#[test]
fn a_key_at_its_cap_is_passed_over_and_admitted_again_when_a_task_ends() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    let first = claim(&mut client, "q", "w", 10);
    assert_eq!((count(&first, "A"), count(&first, "B")), (2, 2));
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
    let of_a: Vec<_> = first.iter().filter(|task| task.key == "A").collect();
    assert!(complete(&mut client, of_a[0]));
    assert_eq!(claim_one(&mut client, "q").key, "A");
    assert!(claim(&mut client, "q", "w", 10).is_empty());
    assert!(release(&mut client, of_a[1]));
    assert_eq!(claim_one(&mut client, "q").key, "A");
    let of_b = first.iter().find(|task| task.key == "B").unwrap();
    execute(
        &mut client,
        &format!(
            "SELECT fair_fail({}, {}, 'x', '1 hour')",
            of_b.id, of_b.lease
        ),
    );
    assert_eq!(claim_one(&mut client, "q").key, "B");
    assert!(claim(&mut client, "q", "w", 10).is_empty());
}

#[test]
fn a_cap_counts_the_running_tasks_of_all_priorities() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 3}"#);
    for priority in 1..=5 {
        flood_at(&mut client, "q", "A", priority, 2);
    }
    flood_at(&mut client, "q", "B", 5, 1);
    let priorities: Vec<(String, i16)> = claim(&mut client, "q", "w", 10)
        .into_iter()
        .map(|task| (task.key, task.priority))
        .collect();
    let a = |priority| ("A".to_owned(), priority);
    assert_eq!(priorities, [a(1), a(1), a(2), ("B".to_owned(), 5)]);
}

#[test]
fn an_open_transaction_holds_its_place_under_the_cap_and_an_abort_gives_it_back() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    let mut open = client.transaction().unwrap();
    assert_eq!(claim(&mut open, "q", "w", 5).len(), 2);
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    open.rollback().unwrap();
    let mut open = other.transaction().unwrap();
    let mut savepoint = open.transaction().unwrap();
    assert_eq!(claim(&mut savepoint, "q", "w", 1).len(), 1);
    savepoint.rollback().unwrap();
    assert_eq!(claim(&mut open, "q", "w", 5).len(), 2);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    open.commit().unwrap();
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(state(&mut client, "q", "A").running, 2);
}

#[test]
fn a_completion_frees_its_place_only_when_it_commits() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    let task = claim_one(&mut client, "q");
    let mut open = client.transaction().unwrap();
    assert!(complete(&mut open, &task));
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    open.rollback().unwrap();
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    assert!(complete(&mut client, &task));
    assert_eq!(claim(&mut other, "q", "w", 5).len(), 1);
}

#[test]
fn a_cap_lowered_below_the_running_count_admits_none_until_it_is_below() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "1 hour");
    let mut tasks = claim(&mut client, "q", "w", 5);
    configure(&mut client, "q", r#"{"key_max_running": 3}"#);
    for left in [4, 3] {
        assert!(complete(&mut client, &tasks.remove(0)));
        assert!(
            claim(&mut client, "q", "w", 5).is_empty(),
            "{left} are running"
        );
    }
    assert!(complete(&mut client, &tasks.remove(0)));
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    configure(&mut client, "q", r#"{"key_max_running": 5}"#);
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
    configure(&mut client, "q", r#"{"key_max_running": null}"#);
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 12);
}

#[test]
fn a_cap_of_zero_admits_none() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 0}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
}

#[test]
fn neither_pins_nor_ids_pass_a_cap() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    let pinned: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w', sticky_for => '1 hour')",
        &[],
    );
    let plain = enqueue(&mut client, "q", Some("A"));
    let task = claim_one(&mut client, "q");
    assert_eq!(task.id, pinned);
    assert!(claim_by_id(&mut client, plain, "w").is_empty());
    assert!(complete(&mut client, &task));
    assert_eq!(claim_by_id(&mut client, plain, "w").len(), 1);
    let again: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w', sticky_for => '1 hour')",
        &[],
    );
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert!(claim_by_id(&mut client, again, "w").is_empty());
}

#[test]
fn a_key_that_was_capped_comes_back_with_no_credit_and_no_burst() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let first = claim(&mut client, "q", "w", 2);
    let blocked = first.iter().find(|task| task.key == "A").unwrap();
    let mut of_b = first.iter().find(|task| task.key == "B").unwrap().clone();
    for _ in 0..40 {
        assert!(complete(&mut client, &of_b));
        of_b = claim_one(&mut client, "q");
        assert_eq!(of_b.key, "B");
    }
    configure(&mut client, "q", r#"{"key_max_running": null}"#);
    assert!(complete(&mut client, blocked));
    let after = claims(&mut client, "q", 40, 1);
    assert!(
        count(&after, "A").abs_diff(20) <= 1,
        "{} of 40",
        count(&after, "A")
    );
}

#[test]
fn a_thousand_capped_keys_cost_the_others_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', 'capped ' || k, now() - interval '2 hours' FROM generate_series(1, 1000) k, generate_series(1, 10)",
    );
    assert_eq!(claim(&mut client, "q", "w", 1000).len(), 1000);
    flood(&mut client, "q", "free", 400, "1 hour");
    // Buffers touched, as they do not depend on how busy the machine is.
    let claim_and_complete =
        "SELECT count(fair_complete(id, lease)) FROM fair_claim('q'::text, 'w', 1)";
    let touched = |client: &mut postgres::Client| -> i64 {
        for _ in 0..20 {
            execute(client, claim_and_complete);
        }
        let plan: serde_json::Value = one(
            client,
            &format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {claim_and_complete}"),
            &[],
        );
        plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
            + plan[0]["Plan"]["Shared Read Blocks"].as_i64().unwrap()
    };
    let beside_capped = touched(&mut client);
    configure(&mut client, "alone", r#"{"key_max_running": 1}"#);
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET queue = 'alone' WHERE fairness_key = 'free' AND state = 'pending' AND id % 2 = 0",
    );
    let mut alone = db.connect();
    let in_alone = claim_and_complete.replace("'q'", "'alone'");
    for _ in 0..20 {
        execute(&mut alone, &in_alone);
    }
    let plan: serde_json::Value = one(
        &mut alone,
        &format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {in_alone}"),
        &[],
    );
    let alone = plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
        + plan[0]["Plan"]["Shared Read Blocks"].as_i64().unwrap();
    assert!(
        beside_capped <= alone * 2 + 20,
        "{beside_capped} buffers beside 1,000 capped keys, {alone} alone"
    );
}

#[test]
fn rows_deleted_or_changed_by_hand_give_their_place_back() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    flood(&mut client, "q", "A", 20, "1 hour");
    let tasks = claim(&mut client, "q", "w", 5);
    assert_eq!(tasks.len(), 2);
    execute(
        &mut client,
        &format!("DELETE FROM harvest_fair.task WHERE id = {}", tasks[0].id),
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET state = 'completed', finished_at = now() WHERE id = {}",
            tasks[1].id
        ),
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    assert_eq!(running(&mut client, "q"), 2);
}

#[test]
fn a_worker_that_waits_for_a_capped_key_wakes_when_a_task_ends() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    let task = claim_one(&mut client, "q");
    woken_by(&db, "w", |client| assert!(complete(client, &task)));
}

#[test]
fn an_expired_lease_gives_its_place_back() {
    // A worker that waits leaves it to the janitor to take back what it could not have itself.
    let db = Cluster::shared().database();
    let mut client = db.connect();
    in_time(|lease| {
        configure(
            &mut client,
            "q",
            &format!(r#"{{"key_max_running": 1, "lease": "{lease}"}}"#),
        );
        flood(&mut client, "q", "A", 3, "1 hour");
        let task = claim_one(&mut client, "q");
        let early = claim(&mut client, "q", "w", 1);
        if one(
            &mut client,
            "SELECT clock_timestamp() > $1",
            &[&task.lease_until],
        ) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(early.is_empty());
        Some(())
    });
    assert_eq!(await_claim(&mut client, "q", "w", 5).len(), 1);
    assert_eq!(running(&mut client, "q"), 1);
}
