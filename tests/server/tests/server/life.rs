//! A claimed task's life: completion, failure, release, and back again. What its lease does stands in `leases`.

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, PATIENCE, claim, claim_one, complete, count, enqueue, flood, one,
    pending, pid_of, running, wait_until,
};
use postgres::Client;

use crate::policy_support::release;
use crate::support::{
    assert_between, assert_near, claims, clock, drain, execute, fail, state, task_field,
};

/// When the one task is due, in seconds since 1970.
fn due(client: &mut Client) -> f64 {
    one(
        client,
        "SELECT extract(epoch FROM scheduled_at)::float8 FROM harvest_fair.task",
        &[],
    )
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
fn a_completion_waits_for_whoever_holds_the_task_and_goes_by_what_is_then() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    for (change, completed) in [
        ("payload = '[]'", true),
        ("lease = lease + 1", false),
        ("state = 'pending'", false),
    ] {
        enqueue(&mut client, "q", Some("A"));
        let task = claim_one(&mut client, "q");
        let mut holder = client.transaction().unwrap();
        holder
            .execute(
                &format!("UPDATE harvest_fair.task SET {change} WHERE id = $1"),
                &[&task.id],
            )
            .unwrap();
        let pid = pid_of(&mut other);
        let completion = std::thread::scope(|scope| {
            let completion = scope.spawn(|| complete(&mut other, &task));
            wait_until("the completion waits", PATIENCE, || {
                one(
                    &mut holder,
                    "SELECT wait_event_type IS NOT DISTINCT FROM 'Lock' FROM pg_stat_activity WHERE pid = $1",
                    &[&pid],
                )
            });
            holder.commit().unwrap();
            completion.join().unwrap()
        });
        assert_eq!(completion, completed, "{change}");
        execute(&mut client, "TRUNCATE harvest_fair.task");
    }
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
        let before = clock(&mut client);
        assert_eq!(fail(&mut client, &task, None).as_deref(), Some("pending"));
        let (due, after) = (due(&mut client), clock(&mut client));
        let nominal = 2f64.powi(attempts_before.min(20)).min(3600.0);
        assert_between(
            due,
            before + nominal * 0.4,
            after + nominal * 1.6,
            &format!("failure {} comes back", attempts_before + 1),
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
        "SELECT count(DISTINCT scheduled_at) FROM harvest_fair.task WHERE last_error = 'down'",
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
    let before = clock(&mut client);
    assert_eq!(
        fail(&mut client, &task, Some("2 hours")).as_deref(),
        Some("pending")
    );
    let (due, after) = (due(&mut client), clock(&mut client));
    assert_between(due - 7200.0, before, after, "two hours count from");
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
