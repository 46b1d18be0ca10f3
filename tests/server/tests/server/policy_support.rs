//! What the tests of the policy share.

use harvest_fair_server_tests::{ClaimedTask, claim, one};
use postgres::{Client, GenericClient};

/// The settings that a queue can have.
pub const SETTINGS: [&str; 11] = [
    "queue_weight",
    "rate_limit",
    "key_rate_limit",
    "key_max_running",
    "lease",
    "priority_aging",
    "new_start_handicap",
    "charge",
    "group_separator",
    "paused",
    "retention",
];

/// `fair_configure` of a queue.
#[track_caller]
pub fn configure(client: &mut impl GenericClient, queue: &str, settings: &str) {
    client
        .query(
            "SELECT * FROM fair_configure($1, $2::text::jsonb)",
            &[&queue, &settings],
        )
        .unwrap_or_else(|error| panic!("fair_configure {settings}: {error:?}"));
}

/// The effective value of a setting, as jsonb text ("-" where there is none), and where it comes from.
#[track_caller]
pub fn setting(client: &mut Client, queue: &str, name: &str) -> (String, String) {
    let row = client
        .query_one(
            "SELECT coalesce(value::text, '-'), source FROM fair_queue($1) WHERE setting = $2",
            &[&queue, &name],
        )
        .unwrap_or_else(|error| panic!("fair_queue: {error:?}"));
    (row.get(0), row.get(1))
}

/// What [`setting`] returns.
pub fn owned(value: &str, source: &str) -> (String, String) {
    (value.to_owned(), source.to_owned())
}

/// How many seconds the lease of a running task lasts from its claim on.
#[track_caller]
pub fn lease_of(client: &mut Client, id: i64) -> f64 {
    one(
        client,
        "SELECT extract(epoch FROM lease_until - started_at)::float8 FROM harvest_fair.task WHERE id = $1",
        &[&id],
    )
}

/// Why a key is not eligible at priority 3; "-" where `fair_state` gives no reason.
#[track_caller]
pub fn waiting_for(client: &mut Client, queue: &str, key: &str) -> String {
    one(
        client,
        "SELECT coalesce(max(waiting_for), '-') FROM fair_state($1) WHERE fairness_key = $2 AND priority = 3",
        &[&queue, &key],
    )
}

/// Adds `n` tasks of `key` at `priority`, due an hour ago, in the order of their ids.
#[track_caller]
pub fn flood_at(client: &mut impl GenericClient, queue: &str, key: &str, priority: i16, n: i64) {
    client
        .execute(
            "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
             SELECT $1, $2, $3, now() - interval '1 hour' FROM generate_series(1, $4::bigint)",
            &[&queue, &key, &priority, &n],
        )
        .unwrap_or_else(|error| panic!("flood: {error:?}"));
}

/// The claims from several queues in one call, as (id, queue).
#[track_caller]
pub fn claim_any(client: &mut Client, queues: &[&str], max_tasks: i32) -> Vec<(i64, String)> {
    client
        .query(
            "SELECT id, queue FROM fair_claim($1::text[], 'w', $2)",
            &[&queues, &max_tasks],
        )
        .unwrap_or_else(|error| panic!("fair_claim of several queues: {error:?}"))
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect()
}

/// The ids that `fair_claim_by_id` hands over: one or none.
#[track_caller]
pub fn claim_by_id(client: &mut impl GenericClient, id: i64, worker: &str) -> Vec<(i64, i64)> {
    client
        .query(
            "SELECT id, lease FROM fair_claim_by_id($1, $2)",
            &[&id, &worker],
        )
        .unwrap_or_else(|error| panic!("fair_claim_by_id: {error:?}"))
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect()
}

#[track_caller]
pub fn release(client: &mut impl GenericClient, task: &ClaimedTask) -> bool {
    one(
        client,
        "SELECT fair_release($1::bigint, $2::bigint)",
        &[&task.id, &task.lease],
    )
}

#[track_caller]
pub fn complete_at_cost(client: &mut impl GenericClient, task: &ClaimedTask, cost: f64) -> bool {
    one(
        client,
        "SELECT fair_complete($1::bigint, $2::bigint, $3::float8)",
        &[&task.id, &task.lease, &cost],
    )
}

/// One line of `fair_preview`.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreseen {
    pub position: i32,
    pub id: i64,
    pub key: String,
    pub priority: i16,
    pub lag: f64,
    pub reason: String,
}

/// `fair_preview` for a worker, under hypothetical weights where `weights` is not "".
#[track_caller]
pub fn preview(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    n: i32,
    weights: &str,
) -> Vec<Foreseen> {
    client
        .query(
            "SELECT position, id, fairness_key, priority, lag, reason
             FROM fair_preview($1, $2, $3, nullif($4::text, '')::jsonb) ORDER BY position",
            &[&queue, &worker, &n, &weights],
        )
        .unwrap_or_else(|error| panic!("fair_preview: {error:?}"))
        .iter()
        .map(|row| Foreseen {
            position: row.get(0),
            id: row.get(1),
            key: row.get(2),
            priority: row.get(3),
            lag: row.get(4),
            reason: row.get(5),
        })
        .collect()
}

/// That a preview of `n` names exactly the tasks, with key, priority and lag, that a claim of `n` then returns; gives
/// both.
#[track_caller]
pub fn preview_then_claim(
    client: &mut Client,
    queue: &str,
    worker: &str,
    n: i32,
) -> (Vec<Foreseen>, Vec<ClaimedTask>) {
    let foreseen = preview(client, queue, worker, n, "");
    let claimed = claim(client, queue, worker, n);
    let said: Vec<(i64, &str, i16, f64)> = foreseen
        .iter()
        .map(|line| (line.id, line.key.as_str(), line.priority, line.lag))
        .collect();
    let came: Vec<(i64, &str, i16, f64)> = claimed
        .iter()
        .map(|task| (task.id, task.key.as_str(), task.priority, task.lag))
        .collect();
    assert_eq!(
        said, came,
        "the preview said one thing, the claim did another"
    );
    let positions: Vec<i32> = foreseen.iter().map(|line| line.position).collect();
    assert_eq!(positions, (1..=foreseen.len() as i32).collect::<Vec<_>>());
    (foreseen, claimed)
}

/// The rows of the audit, oldest first: "action status queue key old new reason error", with - for null.
#[track_caller]
pub fn audit(client: &mut impl GenericClient) -> Vec<String> {
    client
        .query(
            "SELECT concat_ws(' ', action, status, coalesce(queue, '-'), coalesce(fairness_key, '-'),
                              coalesce(old::text, '-'), coalesce(new::text, '-'), coalesce(reason, '-'), coalesce(error, '-'))
             FROM harvest_fair.audit ORDER BY id",
            &[],
        )
        .unwrap_or_else(|error| panic!("audit: {error:?}"))
        .iter()
        .map(|row| row.get(0))
        .collect()
}
