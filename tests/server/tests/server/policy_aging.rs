//! Ageing: a waiting task rises by one priority for each `priority_aging` that it is due.

use std::time::Instant;

use harvest_fair_server_tests::{Cluster, PATIENCE, claim, claim_one, flood, keys_of, one};
use postgres::GenericClient;

use crate::policy_support::{configure, preview, preview_then_claim};
use crate::support::{claims, execute, state};

/// Enqueues a task of `key` that has been due for `seconds`.
#[track_caller]
fn due_for(client: &mut impl GenericClient, key: &str, priority: i32, seconds: f64) -> i64 {
    one(
        client,
        "SELECT fair_enqueue('q', fairness_key => $1, priority => $2, scheduled_at => now() - $3 * interval '1 s')",
        &[&key, &priority, &seconds],
    )
}

#[test]
fn without_ageing_a_low_priority_waits_however_old() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    due_for(&mut client, "old", 5, 1e6);
    due_for(&mut client, "urgent", 1, 0.0);
    assert_eq!(keys_of(&claims(&mut client, "q", 2, 1)), ["urgent", "old"]);
}

#[test]
fn a_task_overtakes_when_its_age_is_worth_more_than_the_difference() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"priority_aging": "100 s"}"#);
    // Four steps make it equal to the urgent one, and the base priority decides; five put it first.
    due_for(&mut client, "four steps", 5, 450.0);
    due_for(&mut client, "urgent", 1, 0.0);
    let five_steps = due_for(&mut client, "five steps", 5, 550.0);
    let lines = preview(&mut client, "q", "w", 3, "");
    assert_eq!(lines[0].id, five_steps);
    assert_eq!(lines[0].reason, "aged from priority 5");
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 3);
    let keys: Vec<&str> = lines.iter().map(|line| line.key.as_str()).collect();
    assert_eq!(keys, ["five steps", "urgent", "four steps"]);
}

#[test]
fn the_order_is_that_of_effective_priority_base_priority_and_due_time_below_one_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"priority_aging": 100}"#);
    // A key for each, so that lag decides nothing; ages half a step from where the priority changes.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         SELECT 'q', 'k' || i, 1 + i % 5, now() - (i * 37 % 20 * 100 + 30 + i % 40) * interval '1 s'
         FROM generate_series(1, 200) i",
    );
    let expected: Vec<i64> = client
        .query(
            "SELECT id FROM harvest_fair.task
             ORDER BY priority - floor(extract(epoch FROM now() - scheduled_at) / 100), priority, scheduled_at, id",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let mut came: Vec<i64> = Vec::new();
    for n in [1, 1, 1, 50, 147] {
        came.extend(claim(&mut client, "q", "w", n).iter().map(|task| task.id));
    }
    assert_eq!(came, expected);
}

#[test]
fn ageing_counts_for_the_backlog_at_the_next_claim_and_ends_with_its_reset() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    for _ in 0..3 {
        due_for(&mut client, "old", 4, 1000.0);
        due_for(&mut client, "urgent", 1, 1.0);
    }
    assert_eq!(claim_one(&mut client, "q").key, "urgent");
    configure(&mut admin, "q", r#"{"priority_aging": 60}"#);
    assert_eq!(claim_one(&mut client, "q").key, "old");
    configure(&mut admin, "q", r#"{"priority_aging": null}"#);
    assert_eq!(claim_one(&mut client, "q").key, "urgent");
    configure(&mut admin, "q", r#"{"priority_aging": 60}"#);
    assert_eq!(
        keys_of(&claim(&mut client, "q", "w", 9)),
        ["old", "old", "urgent"]
    );
}

#[test]
fn an_aged_claim_charges_its_key_and_never_moves_a_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"priority_aging": 100}"#);
    for key in ["A", "B"] {
        for _ in 0..10 {
            due_for(&mut client, key, 3, 10.0);
        }
    }
    claims(&mut client, "q", 4, 1);
    // C is deep in debt, but its tasks are far older than the others'.
    execute(&mut client, "SELECT fair_charge('q', 'C', 10)");
    for _ in 0..3 {
        due_for(&mut client, "C", 3, 250.0);
    }
    let before = state(&mut client, "q", "C");
    assert_eq!(keys_of(&claims(&mut client, "q", 3, 1)), ["C", "C", "C"]);
    let after = state(&mut client, "q", "C");
    assert_eq!((after.clock, after.pass), (before.clock, before.pass + 3.0));
    // Those who had to let it pass go on in their order.
    assert_eq!(
        keys_of(&claims(&mut client, "q", 4, 1)),
        ["A", "B", "A", "B"]
    );
}

#[test]
fn among_tasks_of_the_same_effective_and_base_priority_lag_decides() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"priority_aging": "1 day"}"#);
    flood(&mut client, "q", "flood", 100, "1 hour");
    claims(&mut client, "q", 10, 1);
    flood(&mut client, "q", "newcomer", 10, "1 minute");
    let next = claims(&mut client, "q", 10, 1);
    assert_eq!(
        keys_of(&next)
            .iter()
            .filter(|key| **key == "newcomer")
            .count(),
        5
    );
}

#[test]
fn under_a_steady_flood_of_urgent_tasks_the_lowest_priority_is_served_in_time() {
    const STEP: f64 = 0.3;
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        &format!(r#"{{"priority_aging": {STEP}}}"#),
    );
    let old = due_for(&mut client, "old", 5, 0.0);
    let start = Instant::now();
    loop {
        due_for(&mut client, "urgent", 1, 0.0);
        if claim_one(&mut client, "q").id == old {
            break;
        }
        let waited = start.elapsed();
        assert!(waited < PATIENCE, "not served in {waited:?}");
    }
    // At the instant of each claim, as the table has it: equal after four steps, first after five. On a busy machine an
    // urgent one may have aged a step itself, and then the old one must have aged one more.
    let steps = format!(
        "SELECT max(taken.old - taken.urgent) FILTER (WHERE key = 'urgent')::float8,
                max(taken.old - taken.urgent) FILTER (WHERE key = 'old')::float8
         FROM (SELECT claimed.fairness_key AS key,
                      floor(extract(epoch FROM claimed.started_at - old.scheduled_at) / {STEP}) AS old,
                      floor(extract(epoch FROM claimed.started_at - urgent.scheduled_at) / {STEP}) AS urgent
               FROM harvest_fair.task claimed, harvest_fair.task old, harvest_fair.task urgent
               WHERE claimed.state = 'running' AND old.id = $1 AND urgent.fairness_key = 'urgent'
                 AND CASE claimed.id WHEN $1 THEN urgent.state = 'pending' ELSE urgent.id = claimed.id END) taken"
    );
    let row = client.query_one(&steps, &[&old]).unwrap();
    let (urgent, old): (Option<f64>, f64) = (row.get(0), row.get(1));
    assert!(
        urgent.is_none_or(|steps| steps < 5.0),
        "an urgent one was taken when the old one was {urgent:?} steps older"
    );
    assert!(
        old >= 5.0,
        "the old one was taken when it was {old} steps older"
    );
}

#[test]
fn the_shortest_ageing_and_the_oldest_rows_do_no_harm() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"priority_aging": 0.000001, "new_start_handicap": 4e12}"#,
    );
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at, new_start) VALUES
            ('q', 'ever', 5, '-infinity', false), ('q', 'ever new', 4, '-infinity', true), ('q', 'old', 3, '4000-01-01 BC', true),
            ('q', 'today', 1, now() - interval '1 s', true), ('q', 'never', 1, 'infinity', true)",
    );
    preview_then_claim(&mut client, "q", "w", 1);
    let mut taken = claims(&mut client, "q", 4, 1);
    taken.extend(claim(&mut client, "q", "w", 9));
    assert_eq!(keys_of(&taken).last(), Some(&"today"));
    assert_eq!(taken.len(), 3);
    let reloads: i64 = one(
        &mut client,
        "SELECT max(reloads)::bigint FROM harvest_fair.stats",
        &[],
    );
    assert_eq!(reloads, 0);
}

#[test]
fn ageing_goes_before_the_shares_of_groups() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"priority_aging": 100, "group_separator": "/"}"#,
    );
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         SELECT 'q', 'g' || i % 3 || '/k' || i % 7, 1 + i % 5, now() - (i * 100 + (i % 5) * 100 + 50) * interval '1 s'
         FROM generate_series(1, 100) i ORDER BY random()",
    );
    // Each task has an effective priority of its own.
    let expected: Vec<i64> = client
        .query(
            "SELECT id FROM harvest_fair.task
             ORDER BY priority - floor(extract(epoch FROM now() - scheduled_at) / 100)",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let mut came: Vec<i64> = claims(&mut client, "q", 5, 1)
        .iter()
        .map(|task| task.id)
        .collect();
    came.extend(claim(&mut client, "q", "w", 100).iter().map(|task| task.id));
    assert_eq!(came, expected);
}

#[test]
fn age_goes_before_the_handicap_of_a_new_start() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"priority_aging": 100, "new_start_handicap": 1000}"#,
    );
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, new_start, scheduled_at, payload) VALUES
            ('q', 'A', true, now() - interval '550 s', '1'),
            ('q', 'A', false, now() - interval '150 s', '3'),
            ('q', 'B', false, now() - interval '350 s', '2')",
    );
    let order: Vec<_> = claims(&mut client, "q", 3, 1)
        .into_iter()
        .map(|task| task.payload)
        .collect();
    assert_eq!(order, [1, 2, 3]);
}
