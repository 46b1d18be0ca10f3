//! Pins: tasks that wait for one worker.

use std::time::SystemTime;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Options, PATIENCE, Shutdown, claim, complete, count, enqueue,
    expect_error, flood, keys_of, one, wait_until,
};
use postgres::{Client, GenericClient};

use crate::policy_support::{
    claim_by_id, configure, flood_at, preview, preview_then_claim, release,
};
use crate::support::{await_claim, claims, execute, in_time, state, unattended, woken_by};

/// Enqueues a task of `key` that waits for `worker`, for good where `length` is "".
#[track_caller]
fn pin(
    client: &mut impl GenericClient,
    key: &str,
    priority: i32,
    worker: &str,
    length: &str,
) -> i64 {
    one(
        client,
        "SELECT fair_enqueue('q', fairness_key => $1, priority => $2, sticky_worker => $3,
                             sticky_for => nullif($4::text, '')::interval)",
        &[&key, &priority, &worker, &length],
    )
}

/// When a task's pin ends. Asked before anybody claims: whatever takes the pin away, early or in time, takes this along.
#[track_caller]
fn end_of_pin(client: &mut Client, id: i64) -> Option<SystemTime> {
    one(
        client,
        "SELECT sticky_until FROM harvest_fair.task WHERE id = $1",
        &[&id],
    )
}

/// Whether that moment is over by the server's clock.
#[track_caller]
fn is_over(client: &mut Client, end: Option<SystemTime>) -> bool {
    one(
        client,
        "SELECT coalesce(clock_timestamp() > $1, true)",
        &[&end],
    )
}

/// A task of A whose pin to `me` has ended by now, but had not ended yet when `other` was refused it as `refused` tells.
#[track_caller]
fn pinned_until_now(client: &mut Client, refused: impl Fn(&mut Client, i64) -> bool) -> i64 {
    let (pinned, end) = in_time(|length| {
        let id = pin(client, "A", 3, "me", length);
        let end = end_of_pin(client, id);
        let refused = refused(client, id);
        if is_over(client, end) {
            execute(
                client,
                &format!("DELETE FROM harvest_fair.task WHERE id = {id}"),
            );
            return None;
        }
        assert!(refused, "handed out before its pin of {length} has ended");
        Some((id, end))
    });
    wait_until("the pin ends", PATIENCE, || is_over(client, end));
    pinned
}

/// How many seconds after the moment in the table `pin` a task was claimed.
#[track_caller]
fn claimed_after_pin(client: &mut Client, task: &ClaimedTask) -> f64 {
    one(
        client,
        "SELECT extract(epoch FROM started_at - until)::float8 FROM harvest_fair.task, pin WHERE id = $1",
        &[&task.id],
    )
}

#[test]
fn a_pinned_task_is_the_first_of_its_worker_before_every_other() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood_at(&mut client, "q", "urgent", 1, 5);
    let pinned = pin(&mut client, "pinned", 5, "me", "1 hour");
    assert_eq!(claim(&mut client, "q", "me", 1)[0].id, pinned);
    assert_eq!(claim(&mut client, "q", "me", 1)[0].key, "urgent");
}

#[test]
fn nobody_else_gets_a_pinned_task_in_any_way() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let pinned = pin(&mut client, "A", 1, "me", "1 hour");
    let for_good = pin(&mut client, "A", 1, "me", "");
    let plain = enqueue(&mut client, "q", Some("B"));
    let taken = claim(&mut client, "q", "other", 5);
    assert_eq!(
        taken.iter().map(|task| task.id).collect::<Vec<_>>(),
        [plain]
    );
    for id in [pinned, for_good] {
        assert!(claim_by_id(&mut client, id, "other").is_empty());
    }
    assert_eq!(claim_by_id(&mut client, pinned, "me").len(), 1);
    assert_eq!(claim(&mut client, "q", "me", 5)[0].id, for_good);
}

#[test]
fn a_batch_of_pinned_tasks_is_what_single_claims_would_have_been() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "A", "A", "B", "B"] {
        pin(&mut client, key, 3, "me", "1 hour");
    }
    flood(&mut client, "q", "C", 3, "-1 s");
    // A preview is what a batch would be.
    let batch: Vec<i64> = preview(&mut client, "q", "me", 5, "")
        .iter()
        .map(|line| line.id)
        .collect();
    let single: Vec<i64> = (0..5)
        .map(|_| claim(&mut client, "q", "me", 1)[0].id)
        .collect();
    assert_eq!(batch, single);
}

#[test]
fn a_pinned_claim_charges_its_key_and_never_moves_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 20, "1 hour");
    }
    claims(&mut client, "q", 4, 1);
    for _ in 0..3 {
        pin(&mut client, "A", 3, "me", "1 hour");
    }
    let before = (state(&mut client, "q", "A"), state(&mut client, "q", "B"));
    assert_eq!(count(&claim(&mut client, "q", "me", 3), "A"), 3);
    let after = (state(&mut client, "q", "A"), state(&mut client, "q", "B"));
    assert_eq!(after.0.pass, before.0.pass + 3.0);
    assert_eq!(
        (after.0.clock, after.1.pass),
        (before.0.clock, before.1.pass)
    );
    // B catches up.
    assert_eq!(keys_of(&claims(&mut client, "q", 3, 1)), ["B", "B", "B"]);
}

#[test]
fn a_pin_that_has_ended_is_ordinary_at_the_very_next_claim() {
    let db = unattended().database();
    let mut client = db.connect();
    claim(&mut client, "q", "other", 1);
    for round in 0..8 {
        let younger = pin(&mut client, "B", 3, "me", "");
        let pinned = pinned_until_now(&mut client, |client, _| {
            claim(client, "q", "other", 5).is_empty()
        });
        let taken = claim(&mut client, "q", "other", 5);
        assert_eq!(
            taken.iter().map(|task| task.id).collect::<Vec<_>>(),
            [pinned],
            "round {round}"
        );
        assert_eq!(claim_by_id(&mut client, younger, "me").len(), 1);
    }
}

#[test]
fn an_ended_pin_puts_its_task_back_into_the_order_without_precedence() {
    let db = unattended().database();
    let mut client = db.connect();
    let pinned = pin(&mut client, "A", 3, "me", "100 ms");
    let end = end_of_pin(&mut client, pinned);
    flood_at(&mut client, "q", "B", 1, 1);
    wait_until("the pin ends", PATIENCE, || is_over(&mut client, end));
    let taken = claim(&mut client, "q", "me", 2);
    assert_eq!(keys_of(&taken), ["B", "A"]);
}

#[test]
fn a_worker_that_waits_wakes_when_a_pin_ends() {
    let db = unattended().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE TABLE pin AS SELECT clock_timestamp() + interval '700 ms' AS until;
         INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, sticky_until)
         SELECT 'q', 'A', 'me', until FROM pin",
    );
    let taken = await_claim(&mut client, "q", "other", 1);
    assert_eq!(taken.len(), 1);
    let after = claimed_after_pin(&mut client, &taken[0]);
    assert!(after >= 0.0, "{after} s after the pin's end");
}

#[test]
fn a_waiting_worker_wakes_for_a_task_that_is_pinned_to_it() {
    let db = unattended().database();
    let mut pinned = 0;
    let task = woken_by(&db, "me", |client| {
        pinned = pin(client, "A", 3, "me", "1 hour");
    });
    assert_eq!(task.id, pinned);
}

#[test]
fn a_pin_without_a_worker_or_with_a_length_below_zero_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_error(
        &mut client,
        "SELECT fair_enqueue('q', sticky_for => '1 s')",
        "22023",
        "sticky_worker",
        "worker",
    );
    expect_error(
        &mut client,
        "SELECT fair_enqueue('q', sticky_worker => 'w', sticky_for => '-1 s')",
        "22023",
        "sticky_for",
        "",
    );
    expect_error(
        &mut client,
        "SELECT fair_enqueue('q', sticky_worker => ' ')",
        "22023",
        "worker",
        "",
    );
}

#[test]
fn a_pin_that_had_ended_before_it_was_written_is_none() {
    // A janitor that ends the pin at this instant would hold the row.
    let db = unattended().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, sticky_until)
         VALUES ('q', 'A', 'me', now() - interval '1 s')",
    );
    assert_eq!(keys_of(&claim(&mut client, "q", "other", 5)), ["A"]);
}

#[test]
fn a_pin_that_is_set_or_cleared_by_hand_counts_at_the_next_claim() {
    let db = unattended().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_worker = 'me', sticky_until = now() + interval '1 hour'",
    );
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_worker = NULL, sticky_until = NULL",
    );
    assert_eq!(claim(&mut client, "q", "other", 5)[0].id, id);
    let id = pin(&mut client, "A", 3, "me", "1 hour");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_until = now() - interval '1 s' WHERE state = 'pending'",
    );
    assert_eq!(claim(&mut client, "q", "other", 5)[0].id, id);
    let id = pin(&mut client, "A", 3, "me", "1 hour");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET sticky_worker = 'you' WHERE state = 'pending'",
    );
    assert!(claim(&mut client, "q", "me", 5).is_empty());
    assert_eq!(claim(&mut client, "q", "you", 5)[0].id, id);
}

#[test]
fn a_pinned_task_of_the_future_wakes_its_worker_when_it_is_due() {
    let db = unattended().database();
    let mut client = db.connect();
    let id = in_time(|window| {
        let id: i64 = one(
            &mut client,
            "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() + $1::text::interval,
                                 sticky_worker => 'me', sticky_for => '1 hour')",
            &[&window],
        );
        let early = claim(&mut client, "q", "me", 1);
        let is_due = "SELECT scheduled_at < clock_timestamp() FROM harvest_fair.task WHERE id = $1";
        if one(&mut client, is_due, &[&id]) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(early.is_empty());
        Some(id)
    });
    assert_eq!(await_claim(&mut client, "q", "me", 1)[0].id, id);
    let early = "SELECT started_at < scheduled_at FROM harvest_fair.task WHERE id = $1";
    assert!(!one::<bool>(&mut client, early, &[&id]));
}

#[test]
fn pins_outlive_a_crash() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let (short, long) = in_time(|length| {
        let mut client = db.connect();
        let short = pin(&mut client, "A", 3, "me", length);
        let end = end_of_pin(&mut client, short);
        let long = pin(&mut client, "B", 3, "me", "1 hour");
        cluster.restart(Shutdown::Immediate);
        let mut client = db.connect();
        let early = claim(&mut client, "q", "other", 5);
        if is_over(&mut client, end) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(early.is_empty(), "{early:?}");
        Some((short, long))
    });
    let mut client = db.connect();
    assert_eq!(await_claim(&mut client, "q", "other", 5)[0].id, short);
    assert!(claim(&mut client, "q", "other", 5).is_empty());
    assert_eq!(claim(&mut client, "q", "me", 5)[0].id, long);
}

#[test]
fn a_task_whose_pin_has_ended_can_be_claimed_by_id_by_anyone() {
    let db = unattended().database();
    let mut client = db.connect();
    let pinned = pinned_until_now(&mut client, |client, id| {
        claim_by_id(client, id, "other").is_empty()
    });
    assert_eq!(claim_by_id(&mut client, pinned, "other").len(), 1);
    assert!(claim(&mut client, "q", "me", 5).is_empty());
}

#[test]
fn a_pinned_task_that_is_given_back_still_waits_for_its_worker() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let pinned = pin(&mut client, "A", 3, "me", "1 hour");
    let task = claim(&mut client, "q", "me", 1).remove(0);
    assert!(release(&mut client, &task));
    assert!(claim(&mut client, "q", "other", 1).is_empty());
    let mut transaction = client.transaction().unwrap();
    assert_eq!(claim(&mut transaction, "q", "me", 1)[0].id, pinned);
    transaction.rollback().unwrap();
    assert!(claim(&mut client, "q", "other", 1).is_empty());
    assert_eq!(claim(&mut client, "q", "me", 1)[0].id, pinned);
}

#[test]
fn pinned_tasks_come_by_priority_then_lag_then_due_time() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    // The key that is deep in debt has the older task.
    for _ in 0..3 {
        enqueue(&mut client, "q", Some("indebted"));
    }
    enqueue(&mut client, "q", Some("level"));
    flood(&mut client, "q", "level", 5, "-1 hour");
    for task in claim(&mut client, "q", "other", 4) {
        assert!(complete(&mut client, &task));
    }
    let low = pin(&mut client, "level", 4, "me", "1 hour");
    let of_indebted = pin(&mut client, "indebted", 3, "me", "1 hour");
    let of_level = pin(&mut client, "level", 3, "me", "1 hour");
    let of_new = pin(&mut client, "new", 2, "me", "1 hour");
    let ids: Vec<i64> = (0..4)
        .map(|_| claim(&mut client, "q", "me", 1)[0].id)
        .collect();
    assert_eq!(ids, [of_new, of_level, of_indebted, low]);
}

#[test]
fn pinned_tasks_age_and_new_starts_among_them_stand_back() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"priority_aging": "1 min"}"#);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, sticky_worker, new_start, scheduled_at) VALUES
             ('q', 'urgent', 2, 'me', false, now() - interval '10 s'),
             ('q', 'new', 2, 'me', true, now() - interval '20 s'),
             ('q', 'old', 5, 'me', false, now() - interval '10 min')",
    );
    let (_, tasks) = preview_then_claim(&mut client, "q", "me", 3);
    assert_eq!(keys_of(&tasks), ["old", "urgent", "new"]);
}

#[test]
fn a_pinned_task_whose_worker_dies_goes_to_others_once_its_pin_has_ended() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"lease": 0.2}"#);
    execute(
        &mut client,
        "CREATE TABLE pin AS SELECT clock_timestamp() + interval '1500 ms' AS until",
    );
    let id = pin(&mut client, "A", 3, "me", "1500 ms");
    assert_eq!(claim(&mut client, "q", "me", 1)[0].id, id);
    // The lease runs out long before the pin does.
    let taken = await_claim(&mut client, "q", "other", 1);
    assert_eq!(taken[0].id, id);
    let after = claimed_after_pin(&mut client, &taken[0]);
    assert!(after >= 0.0, "{after} s after the pin's end");
}

#[test]
fn a_retried_task_still_waits_for_its_worker() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = pin(&mut client, "A", 3, "me", "1 hour");
    let task = claim(&mut client, "q", "me", 1).remove(0);
    execute(
        &mut client,
        &format!(
            "SELECT fair_fail({}, {}, 'x', '100 ms')",
            task.id, task.lease
        ),
    );
    assert_eq!(await_claim(&mut client, "q", "me", 1)[0].id, id);
    execute(
        &mut client,
        "SELECT fair_release(id, lease) FROM harvest_fair.task",
    );
    assert!(claim(&mut client, "q", "other", 1).is_empty());
}
