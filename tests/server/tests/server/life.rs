//! A claimed task's life: leases, completion, failure, release, and back again.

use std::collections::HashSet;
use std::time::Duration;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, claim, claim_one, complete, count, enqueue, flood, one, pending, running,
    wait_until,
};
use postgres::Client;

use crate::support::{assert_near, brisk, claims, drain, execute, state, task_field};

const SECOND_LEASE: &str = "SET harvest_fair.default_lease = '1 s'";

fn fail(client: &mut Client, task: &ClaimedTask, retry_in: Option<&str>) -> Option<String> {
    one(
        client,
        "SELECT fair_fail($1::bigint, $2::bigint, 'it broke', $3::text::interval)::text",
        &[&task.id, &task.lease, &retry_in],
    )
}

fn release(client: &mut Client, task: &ClaimedTask) -> bool {
    one(
        client,
        "SELECT fair_release($1::bigint, $2::bigint)",
        &[&task.id, &task.lease],
    )
}

/// Seconds by which the lease was extended, from now.
fn extend(client: &mut Client, task: &ClaimedTask, lease_for: Option<&str>) -> Option<f64> {
    one(
        client,
        "SELECT extract(epoch FROM fair_extend($1::bigint, $2::bigint, $3::text::interval) - now())::float8",
        &[&task.id, &task.lease, &lease_for],
    )
}

/// Takes a task's lease away as a stalled worker would lose it.
fn wait_for_expiry(client: &mut Client, task: &ClaimedTask) {
    wait_until("the lease has run out", Duration::from_secs(10), || {
        one(
            client,
            "SELECT coalesce(clock_timestamp() > lease_until, true) FROM harvest_fair.task WHERE id = $1",
            &[&task.id],
        )
    });
}

#[test]
fn a_claimed_task_runs_until_it_is_completed_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    let task = claim_one(&mut client, "q");
    assert_eq!(
        task_field(
            &mut client,
            id,
            "concat_ws('|', state, attempt, worker, lease, charged, started_at IS NOT NULL)"
        ),
        Some(format!("running|1|w|{}|1|t", task.lease))
    );
    assert_eq!(state(&mut client, "q", "A").running, 1);
    assert!(complete(&mut client, &task));
    assert!(!complete(&mut client, &task), "completed twice");
    assert_eq!(
        task_field(&mut client, id, "state || ' ' || (finished_at IS NOT NULL)").unwrap(),
        "completed true"
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
}

#[test]
fn the_running_count_of_a_key_follows_its_tasks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 6, "1 hour");
    let tasks = claim(&mut client, "q", "w", 5);
    assert_eq!(state(&mut client, "q", "A").running, 5);
    assert!(complete(&mut client, &tasks[0]));
    assert_eq!(state(&mut client, "q", "A").running, 4);
    assert!(release(&mut client, &tasks[1]));
    assert_eq!(state(&mut client, "q", "A").running, 3);
    fail(&mut client, &tasks[2], Some("1 hour"));
    assert_eq!(state(&mut client, "q", "A").running, 2);
    let mut transaction = client.transaction().unwrap();
    assert!(complete(&mut transaction, &tasks[3]));
    transaction.rollback().unwrap();
    assert_eq!(state(&mut client, "q", "A").running, 2);
    execute(
        &mut client,
        "DELETE FROM harvest_fair.task WHERE state = 'running'",
    );
    assert_eq!(state(&mut client, "q", "A").running, 0);
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
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SECOND_LEASE);
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
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SECOND_LEASE);
    flood(&mut client, "q", "A", 3, "1 hour");
    let tasks = claim(&mut client, "q", "gone", 3);
    assert_eq!(tasks.len(), 3);
    assert!(claim(&mut client, "q", "w", 3).is_empty());
    wait_for_expiry(&mut client, &tasks[2]);
    assert_eq!(claim(&mut client, "q", "w", 3).len(), 3);
}

#[test]
fn the_janitor_puts_expired_leases_back_without_any_claim() {
    let db = brisk().database();
    let mut client = db.connect_with(SECOND_LEASE);
    enqueue(&mut client, "q", None);
    claim_one(&mut client, "q");
    wait_until("the task is pending again", Duration::from_secs(15), || {
        pending(&mut client, "q") == 1
    });
    let task = claim_one(&mut client, "q");
    assert_eq!(task.attempt, 2);
}

#[test]
fn an_expired_last_attempt_fails_and_says_why() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SECOND_LEASE);
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', max_attempts => 1)",
        &[],
    );
    let task = claim_one(&mut client, "q");
    wait_for_expiry(&mut client, &task);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    wait_until("the task has failed", Duration::from_secs(25), || {
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
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SECOND_LEASE);
    flood(&mut client, "q", "A", 50, "1 hour");
    let lost = claims(&mut client, "q", 10, 5);
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
    let by_default = extend(&mut client, &task, None).unwrap();
    assert!((59.0..61.0).contains(&by_default), "{by_default}");
    let by_request = extend(&mut client, &task, Some("10 min")).unwrap();
    assert!((599.0..601.0).contains(&by_request), "{by_request}");
    let stored: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM lease_until - now())::float8 FROM harvest_fair.task",
        &[],
    );
    assert!((590.0..601.0).contains(&stored), "{stored}");
}

#[test]
fn an_extended_lease_outlives_its_first_end() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with(SECOND_LEASE);
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    assert!(extend(&mut client, &task, Some("1 hour")).is_some());
    execute(&mut client, "SELECT pg_sleep(1.1)");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert!(complete(&mut client, &task));
}

#[test]
fn a_claim_tells_when_its_lease_ends() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '90 s'");
    enqueue(&mut client, "q", None);
    let told: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM lease_until - now())::float8 FROM fair_claim('q', 'w')",
        &[],
    );
    assert!((89.0..91.0).contains(&told), "{told}");
}

#[test]
fn a_failure_waits_twice_as_long_each_time_up_to_an_hour() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', max_attempts => 100)",
        &[],
    );
    for attempts_before in [0, 1, 2, 3, 6, 11, 12, 20, 62, 70] {
        execute(
            &mut client,
            &format!(
                "UPDATE harvest_fair.task SET state = 'pending', scheduled_at = now(), attempt = {attempts_before} WHERE id = {id}"
            ),
        );
        let task = claim_one(&mut client, "q");
        assert_eq!(task.attempt, attempts_before + 1);
        assert_eq!(fail(&mut client, &task, None).as_deref(), Some("pending"));
        let wait: f64 = one(
            &mut client,
            "SELECT extract(epoch FROM scheduled_at - now())::float8 FROM harvest_fair.task",
            &[],
        );
        let nominal = 2f64.powi(attempts_before.min(20)).min(3600.0);
        assert!(
            (nominal * 0.4..=nominal * 1.6).contains(&wait),
            "failure {} waits {wait} s, nominally {nominal} s",
            attempts_before + 1
        );
    }
    assert_eq!(
        task_field(&mut client, id, "last_error").as_deref(),
        Some("it broke")
    );
}

#[test]
fn failures_of_one_moment_do_not_come_back_at_one_moment() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "1 hour");
    let mut transaction = client.transaction().unwrap();
    for task in claim(&mut transaction, "q", "w", 20) {
        transaction
            .execute(
                "SELECT fair_fail($1::bigint, $2::bigint, 'down')",
                &[&task.id, &task.lease],
            )
            .unwrap();
    }
    transaction.commit().unwrap();
    let moments: i64 = one(
        &mut client,
        "SELECT count(DISTINCT scheduled_at) FROM harvest_fair.task WHERE scheduled_at > now()",
        &[],
    );
    assert!(
        moments >= 15,
        "only {moments} different moments for 20 failures"
    );
}

#[test]
fn a_failure_comes_back_when_the_worker_says() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    assert_eq!(
        fail(&mut client, &task, Some("2 hours")).as_deref(),
        Some("pending")
    );
    let wait: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM scheduled_at - now())::float8 FROM harvest_fair.task",
        &[],
    );
    assert!((7195.0..7201.0).contains(&wait), "{wait}");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET scheduled_at = now()",
    );
    let task = claim_one(&mut client, "q");
    assert_eq!(
        fail(&mut client, &task, Some("0")).as_deref(),
        Some("pending")
    );
    assert_eq!(claim_one(&mut client, "q").attempt, 3);
}

#[test]
fn the_last_failure_is_final() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', max_attempts => 2)",
        &[],
    );
    let task = claim_one(&mut client, "q");
    assert_eq!(
        fail(&mut client, &task, Some("0")).as_deref(),
        Some("pending")
    );
    let task = claim_one(&mut client, "q");
    assert_eq!(
        fail(&mut client, &task, Some("0")).as_deref(),
        Some("failed")
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert_eq!(
        task_field(
            &mut client,
            id,
            "last_error || ' ' || attempt || ' ' || (finished_at IS NOT NULL)"
        )
        .unwrap(),
        "it broke 2 true"
    );
}

#[test]
fn a_released_task_charges_nothing_and_spends_no_attempt() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 0.25)");
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 hour");
    claims(&mut client, "q", 3, 1);
    let before = (
        state(&mut client, "q", "A").pass,
        state(&mut client, "q", "B").pass,
    );
    let tasks = claims(&mut client, "q", 3, 1);
    assert_ne!(
        before.1,
        state(&mut client, "q", "B").pass,
        "the claims charged nothing"
    );
    for task in tasks.iter().rev() {
        assert!(release(&mut client, task));
        assert_eq!(
            task_field(&mut client, task.id, "concat_ws('|', state, attempt)").unwrap(),
            "pending|0"
        );
    }
    let clock = state(&mut client, "q", "A").clock;
    assert_eq!(state(&mut client, "q", "A").pass, before.0.max(clock));
    assert_eq!(state(&mut client, "q", "B").pass, before.1.max(clock));
    assert_eq!(claim_one(&mut client, "q").attempt, 1);
}

#[test]
fn a_reported_cost_corrects_the_charge() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "dear", 50, "1 hour");
    flood(&mut client, "q", "cheap", 50, "1 hour");
    let tasks = claims(&mut client, "q", 2, 1);
    let dear = tasks.iter().find(|task| task.key == "dear").unwrap();
    let before = state(&mut client, "q", "dear");
    let done: bool = one(
        &mut client,
        "SELECT fair_complete($1::bigint, $2::bigint, 11)",
        &[&dear.id, &dear.lease],
    );
    assert!(done);
    let after = state(&mut client, "q", "dear");
    assert_eq!(after.pass, before.pass + 10.0);
    assert_eq!(after.clock, before.clock);
    // Ten claims' worth was charged, so the other key goes ten times before its next turn.
    let next = claims(&mut client, "q", 10, 1);
    assert_near(count(&next, "cheap"), 10, 1, "claims of the other key");
}

#[test]
fn a_cost_below_the_charge_never_takes_a_key_below_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 hour");
    let tasks = claims(&mut client, "q", 6, 1);
    for task in &tasks {
        let _: bool = one(
            &mut client,
            "SELECT fair_complete($1::bigint, $2::bigint, 0)",
            &[&task.id, &task.lease],
        );
    }
    for key in ["A", "B"] {
        let state = state(&mut client, "q", key);
        assert!(state.pass >= state.clock && state.lag >= 0.0, "{state:?}");
    }
}

#[test]
fn only_pending_tasks_can_be_cancelled() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", None);
    let cancel =
        |client: &mut Client, id: i64| -> bool { one(client, "SELECT fair_cancel($1)", &[&id]) };
    assert!(cancel(&mut client, id));
    assert!(!cancel(&mut client, id), "cancelled twice");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert_eq!(
        task_field(&mut client, id, "state").as_deref(),
        Some("cancelled")
    );
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    assert!(!cancel(&mut client, task.id), "cancelled while it ran");
    assert!(complete(&mut client, &task));
    assert!(
        !cancel(&mut client, 4711),
        "cancelled a task that does not exist"
    );
}

#[test]
fn a_cancelled_head_lets_the_next_row_of_its_key_through() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let ids: Vec<i64> = (0..3)
        .map(|_| enqueue(&mut client, "q", Some("A")))
        .collect();
    assert!(one::<bool>(
        &mut client,
        "SELECT fair_cancel($1)",
        &[&ids[0]]
    ));
    assert_eq!(claim_one(&mut client, "q").id, ids[1]);
    // A row that was gone is not charged for.
    assert_eq!(state(&mut client, "q", "A").pass, 1.0);
}

#[test]
fn failed_and_cancelled_tasks_can_be_retried_with_fresh_attempts() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let retry =
        |client: &mut Client, id: i64| -> bool { one(client, "SELECT fair_retry($1)", &[&id]) };
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', max_attempts => 1)",
        &[],
    );
    assert!(!retry(&mut client, id), "retried while pending");
    let task = claim_one(&mut client, "q");
    assert!(!retry(&mut client, id), "retried while running");
    assert_eq!(fail(&mut client, &task, None).as_deref(), Some("failed"));
    assert!(retry(&mut client, id));
    let task = claim_one(&mut client, "q");
    assert_eq!(task.attempt, 1);
    assert!(complete(&mut client, &task));
    assert!(!retry(&mut client, id), "retried when completed");
    let id = enqueue(&mut client, "q", None);
    assert!(one::<bool>(&mut client, "SELECT fair_cancel($1)", &[&id]));
    assert!(retry(&mut client, id));
    assert_eq!(claim_one(&mut client, "q").id, id);
}

#[test]
fn arrays_settle_what_is_still_held_and_say_which() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 8, "1 hour");
    let tasks = claim(&mut client, "q", "w", 8);
    let settled = |client: &mut Client, function: &str, tasks: &[ClaimedTask]| -> Vec<i64> {
        let ids: Vec<i64> = tasks.iter().map(|task| task.id).collect();
        let leases: Vec<i64> = tasks.iter().map(|task| task.lease).collect();
        let mut settled: Vec<i64> = client
            .query(
                &format!("SELECT * FROM {function}($1::bigint[], $2::bigint[])"),
                &[&ids, &leases],
            )
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        settled.sort_unstable();
        settled
    };
    assert!(complete(&mut client, &tasks[1]));
    let mut batch = tasks[..4].to_vec();
    batch[2].lease += 1;
    assert_eq!(
        settled(&mut client, "fair_complete", &batch),
        [tasks[0].id, tasks[3].id]
    );
    assert_eq!(
        settled(&mut client, "fair_release", &tasks[2..6]),
        [tasks[2].id, tasks[4].id, tasks[5].id]
    );
    assert_eq!(settled(&mut client, "fair_release", &[]), [] as [i64; 0]);
    assert_eq!(
        (running(&mut client, "q"), pending(&mut client, "q")),
        (2, 3)
    );
    assert_eq!(state(&mut client, "q", "A").running, 2);
    assert_eq!(drain(&mut client, "q", 10).len(), 3);
}

#[test]
fn a_worker_killed_after_its_claim_frees_its_place_once() {
    let cluster = Cluster::start(crate::support::brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with(SECOND_LEASE);
    flood(&mut client, "q", "A", 2, "1 hour");
    let old = claim_one(&mut client, "q");
    let witness = db.connect();
    cluster.kill_9(harvest_fair_server_tests::pid_of(&mut client));
    cluster.wait_for_recovery(witness);
    let mut client = db.connect();
    wait_for_expiry(&mut client, &old);
    let again = claim_one(&mut client, "q");
    assert_eq!((again.id, again.attempt), (old.id, 2));
    assert_eq!(state(&mut client, "q", "A").running, 1);
    assert!(!complete(&mut client, &old));
    assert!(complete(&mut client, &again));
    assert!(!complete(&mut client, &again));
    assert_eq!(state(&mut client, "q", "A").running, 0);
    claim_one(&mut client, "q");
    assert_eq!(state(&mut client, "q", "A").running, 1);
}
