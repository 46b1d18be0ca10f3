//! Leases: how long they last, what ends them, and what becomes of the tasks.

use std::collections::HashSet;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, PATIENCE, claim, claim_one, complete, count, enqueue, flood, one,
    pending, pid_of, running, wait_until,
};
use postgres::Client;

use crate::policy_support::release;
use crate::support::{
    assert_between, assert_near, await_claim, brisk, brisk_options, claims, clock, execute, fail,
    has_expired, in_time, state, task_field, unattended, wait_for_expiry,
};

const SHORT_LEASE: &str = "SET harvest_fair.default_lease = '1 s'";

/// When the lease ends now, in seconds since 1970.
fn extend(client: &mut Client, task: &ClaimedTask, lease_for: Option<&str>) -> Option<f64> {
    one(
        client,
        "SELECT extract(epoch FROM fair_extend($1::bigint, $2::bigint, $3::text::interval))::float8",
        &[&task.id, &task.lease, &lease_for],
    )
}

#[test]
fn a_wrong_lease_settles_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let mut task = claim_one(&mut client, "q");
    task.lease += 1;
    assert!(!complete(&mut client, &task));
    assert!(!release(&mut client, &task));
    assert_eq!(fail(&mut client, &task, None), None);
    assert_eq!(extend(&mut client, &task, None), None);
    assert_eq!(running(&mut client, "q"), 1);
    task.lease -= 1;
    assert!(complete(&mut client, &task));
    task.id += 1000;
    assert!(!complete(&mut client, &task), "a task that does not exist");
}

#[test]
fn a_lease_that_expired_fences_its_worker_out_for_good() {
    let db = unattended().database();
    let mut client = db.connect_with(SHORT_LEASE);
    enqueue(&mut client, "q", Some("A"));
    let old = claim_one(&mut client, "q");
    wait_for_expiry(&mut client, &old);
    execute(&mut client, "RESET harvest_fair.default_lease");
    let new = claim_one(&mut client, "q");
    assert_eq!(new.id, old.id);
    assert_ne!(new.lease, old.lease);
    assert_eq!(new.attempt, 2);
    assert!(!complete(&mut client, &old));
    assert!(!release(&mut client, &old));
    assert_eq!(fail(&mut client, &old, None), None);
    assert_eq!(extend(&mut client, &old, None), None);
    assert!(complete(&mut client, &new));
}

#[test]
fn lease_numbers_never_repeat_for_a_task() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", None);
    let mut leases = HashSet::new();
    for _ in 0..5 {
        let task = claim_one(&mut client, "q");
        assert!(leases.insert(task.lease), "lease {} came twice", task.lease);
        assert!(release(&mut client, &task));
    }
    execute(
        &mut client,
        &format!("UPDATE harvest_fair.task SET state = 'cancelled' WHERE id = {id}"),
    );
    assert!(one::<bool>(&mut client, "SELECT fair_retry($1)", &[&id]));
    assert!(leases.insert(claim_one(&mut client, "q").lease));
}

#[test]
fn an_expired_lease_is_found_at_once_by_the_next_claim() {
    let db = unattended().database();
    let mut client = db.connect();
    let tasks = in_time(|length| {
        flood(&mut client, "q", "A", 3, "1 hour");
        execute(
            &mut client,
            &format!("SET harvest_fair.default_lease = '{length}'"),
        );
        let tasks = claim(&mut client, "q", "gone", 3);
        assert_eq!(tasks.len(), 3);
        let early = claim(&mut client, "q", "w", 3);
        if has_expired(&mut client, &tasks[2]) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(early.is_empty(), "before the lease of {length} has run out");
        Some(tasks)
    });
    wait_for_expiry(&mut client, &tasks[2]);
    assert_eq!(claim(&mut client, "q", "w", 3).len(), 3);
}

#[test]
fn the_janitor_puts_expired_leases_back_without_any_claim() {
    let db = brisk().database();
    let mut client = db.connect_with(SHORT_LEASE);
    enqueue(&mut client, "q", None);
    claim_one(&mut client, "q");
    wait_until("the task is pending again", PATIENCE, || {
        pending(&mut client, "q") == 1
    });
    // Its transaction is seen a moment before the board knows of it.
    let task = await_claim(&mut client, "q", "w", 1).remove(0);
    assert_eq!(task.attempt, 2);
}

#[test]
fn an_expired_last_attempt_fails_and_says_why() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SHORT_LEASE);
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', max_attempts => 1)",
        &[],
    );
    let task = claim_one(&mut client, "q");
    wait_for_expiry(&mut client, &task);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    wait_until("the task has failed", PATIENCE, || {
        task_field(&mut client, id, "state || ': ' || last_error").as_deref()
            == Some("failed: lease expired")
    });
    assert!(one::<bool>(
        &mut client,
        "SELECT finished_at IS NOT NULL FROM harvest_fair.task",
        &[]
    ));
}

#[test]
fn expired_tasks_come_back_through_the_same_order_as_new_ones() {
    let db = unattended().database();
    let mut client = db.connect_with(SHORT_LEASE);
    flood(&mut client, "q", "A", 50, "1 hour");
    let lost = claim(&mut client, "q", "w", 50);
    assert_eq!(lost.len(), 50);
    wait_for_expiry(&mut client, &lost[49]);
    execute(&mut client, "RESET harvest_fair.default_lease");
    flood(&mut client, "q", "B", 50, "1 s");
    let tasks = claims(&mut client, "q", 20, 1);
    assert_near(count(&tasks, "A"), 10, 1, "claims of A");
    assert_near(count(&tasks, "B"), 10, 1, "claims of B");
}

#[test]
fn a_lease_is_extended_from_now_on() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    for (lease_for, seconds) in [(None, 60.0), (Some("10 min"), 600.0)] {
        let before = clock(&mut client);
        let until = extend(&mut client, &task, lease_for).unwrap();
        let after = clock(&mut client);
        assert_between(until - seconds, before, after, "the lease counts from");
        let stored: f64 = one(
            &mut client,
            "SELECT extract(epoch FROM lease_until)::float8 FROM harvest_fair.task",
            &[],
        );
        assert_eq!(stored, until);
    }
}

#[test]
fn an_extended_lease_outlives_its_first_end() {
    let db = unattended().database();
    let mut client = db.connect();
    let task = in_time(|length| {
        execute(
            &mut client,
            &format!("SET harvest_fair.default_lease = '{length}'"),
        );
        enqueue(&mut client, "q", None);
        let task = claim_one(&mut client, "q");
        let extended = extend(&mut client, &task, Some("1 hour")).is_some();
        if has_expired(&mut client, &task) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(extended);
        Some(task)
    });
    wait_for_expiry(&mut client, &task);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert!(complete(&mut client, &task));
}

#[test]
fn a_claim_tells_when_its_lease_ends() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '90 s'");
    enqueue(&mut client, "q", None);
    let before = clock(&mut client);
    let until: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM lease_until)::float8 FROM fair_claim('q', 'w')",
        &[],
    );
    let after = clock(&mut client);
    assert_between(until - 90.0, before, after, "the lease counts from");
}

#[test]
fn a_worker_killed_after_its_claim_frees_its_place_once() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with(SHORT_LEASE);
    flood(&mut client, "q", "A", 2, "1 hour");
    let old = claim_one(&mut client, "q");
    let witness = db.connect();
    cluster.kill_9(pid_of(&mut client));
    cluster.wait_for_recovery(witness);
    let mut client = db.connect();
    wait_for_expiry(&mut client, &old);
    // The janitor may be at it, and hold the row for a moment.
    let again = await_claim(&mut client, "q", "w", 1).remove(0);
    assert_eq!((again.id, again.attempt), (old.id, 2));
    assert_eq!(state(&mut client, "q", "A").running, 1);
    assert!(!complete(&mut client, &old));
    assert!(complete(&mut client, &again));
    assert!(!complete(&mut client, &again));
    assert_eq!(state(&mut client, "q", "A").running, 0);
    claim_one(&mut client, "q");
    assert_eq!(state(&mut client, "q", "A").running, 1);
}
