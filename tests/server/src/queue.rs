//! The calls of producers and workers.

use std::time::SystemTime;

use postgres::types::{FromSqlOwned, ToSql};
use postgres::{GenericClient, Row};
use serde_json::Value;

/// One row of `fair_claim`.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimedTask {
    pub id: i64,
    pub queue: String,
    pub key: String,
    pub priority: i16,
    pub payload: Value,
    pub attempt: i32,
    pub lease: i64,
    pub lease_until: SystemTime,
    /// None for `infinity`, which no claim ever returns, and `-infinity`, which it may.
    pub scheduled_at: Option<SystemTime>,
    pub parent_id: Option<i64>,
    pub weight: f64,
    pub lag: f64,
}

const COLUMNS: &str = "id, queue, fairness_key, priority, payload, attempt, lease, lease_until, \
     CASE WHEN isfinite(scheduled_at) THEN scheduled_at END, parent_id, weight, lag";

impl ClaimedTask {
    fn of(row: &Row) -> ClaimedTask {
        ClaimedTask {
            id: row.get(0),
            queue: row.get(1),
            key: row.get(2),
            priority: row.get(3),
            payload: row.get(4),
            attempt: row.get(5),
            lease: row.get(6),
            lease_until: row.get(7),
            scheduled_at: row.get(8),
            parent_id: row.get(9),
            weight: row.get(10),
            lag: row.get(11),
        }
    }
}

/// Enqueues a task of `key` that is due now; `None` is the default key.
#[track_caller]
pub fn enqueue(client: &mut impl GenericClient, queue: &str, key: Option<&str>) -> i64 {
    one(
        client,
        "SELECT fair_enqueue($1, fairness_key => $2)",
        &[&queue, &key],
    )
}

/// Inserts `n` tasks of `key` by one plain INSERT: due one after another, 1 ms apart, the last of them `ago` ago.
#[track_caller]
pub fn flood(client: &mut impl GenericClient, queue: &str, key: &str, n: i64, ago: &str) {
    client
        .execute(
            "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
             SELECT $1, $2, now() - $4::text::interval - ($3 - i) * interval '1 ms' FROM generate_series(1, $3::bigint) i",
            &[&queue, &key, &n, &ago],
        )
        .unwrap_or_else(|error| panic!("flood: {error:?}"));
}

/// One call of `fair_claim`, in pick order.
#[track_caller]
pub fn claim(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    max_tasks: i32,
) -> Vec<ClaimedTask> {
    try_claim(client, queue, worker, max_tasks).unwrap_or_else(|error| panic!("claim: {error:?}"))
}

/// Like [`claim`], for claims that are meant to be interrupted.
pub fn try_claim(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    max_tasks: i32,
) -> Result<Vec<ClaimedTask>, postgres::Error> {
    let rows = client.query(
        &format!("SELECT {COLUMNS} FROM fair_claim($1::text, $2, $3)"),
        &[&queue, &worker, &max_tasks],
    )?;
    Ok(rows.iter().map(ClaimedTask::of).collect())
}

/// One call of `fair_claim` that waits up to `wait` (an interval) for work.
#[track_caller]
pub fn claim_waiting(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    max_tasks: i32,
    wait: &str,
) -> Vec<ClaimedTask> {
    try_claim_waiting(client, queue, worker, max_tasks, wait)
        .unwrap_or_else(|error| panic!("claim with wait: {error:?}"))
}

/// Like [`claim_waiting`], for waits that are meant to be interrupted.
pub fn try_claim_waiting(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    max_tasks: i32,
    wait: &str,
) -> Result<Vec<ClaimedTask>, postgres::Error> {
    let rows = client.query(
        &format!("SELECT {COLUMNS} FROM fair_claim($1::text, $2, $3, $4::text::interval)"),
        &[&queue, &worker, &max_tasks, &wait],
    )?;
    Ok(rows.iter().map(ClaimedTask::of).collect())
}

/// The one task that a claim of 1 returns.
#[track_caller]
pub fn claim_one(client: &mut impl GenericClient, queue: &str) -> ClaimedTask {
    let mut tasks = claim(client, queue, "w", 1);
    assert_eq!(tasks.len(), 1, "a claim of 1 on {queue} returned {tasks:?}");
    tasks.remove(0)
}

/// Completes a claimed task; false when its lease was lost.
#[track_caller]
pub fn complete(client: &mut impl GenericClient, task: &ClaimedTask) -> bool {
    one(
        client,
        "SELECT fair_complete($1::bigint, $2::bigint)",
        &[&task.id, &task.lease],
    )
}

/// The fairness keys of claimed tasks, in order.
pub fn keys_of(tasks: &[ClaimedTask]) -> Vec<&str> {
    tasks.iter().map(|task| task.key.as_str()).collect()
}

/// How many of the tasks are of this key.
pub fn count(tasks: &[ClaimedTask], key: &str) -> usize {
    tasks.iter().filter(|task| task.key == key).count()
}

#[track_caller]
pub fn pending(client: &mut impl GenericClient, queue: &str) -> i64 {
    in_state(client, queue, "pending")
}

#[track_caller]
pub fn running(client: &mut impl GenericClient, queue: &str) -> i64 {
    in_state(client, queue, "running")
}

#[track_caller]
fn in_state(client: &mut impl GenericClient, queue: &str, state: &str) -> i64 {
    one(
        client,
        "SELECT count(*) FROM harvest_fair.task WHERE queue = $1 AND state::text = $2",
        &[&queue, &state],
    )
}

/// The first column of the one row that a query returns.
#[track_caller]
pub fn one<T: FromSqlOwned>(
    client: &mut impl GenericClient,
    sql: &str,
    params: &[&(dyn ToSql + Sync)],
) -> T {
    client
        .query_one(sql, params)
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}
