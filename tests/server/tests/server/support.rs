//! What several themes share.

use std::sync::OnceLock;

use harvest_fair_server_tests::{ClaimedTask, Cluster, Options, claim, one};
use postgres::Client;

/// A shared cluster whose janitor comes round every second, for what would otherwise take its usual ten.
pub fn brisk() -> &'static Cluster {
    static BRISK: OnceLock<Cluster> = OnceLock::new();
    Cluster::shared_in(&BRISK, brisk_options)
}

/// A server whose janitor never rests: whatever it does must not show.
pub fn restless() -> &'static Cluster {
    static RESTLESS: OnceLock<Cluster> = OnceLock::new();
    Cluster::shared_in(&RESTLESS, || {
        Options::new()
            .set("harvest_fair.sweep_interval", "100ms")
            .set("harvest_fair.flush_interval", "100ms")
    })
}

pub fn brisk_options() -> Options {
    Options::new()
        .set("harvest_fair.sweep_interval", "1s")
        .set("harvest_fair.flush_interval", "1s")
}

/// `times` claims of `n` each, joined in order.
#[track_caller]
pub fn claims(client: &mut Client, queue: &str, times: usize, n: i32) -> Vec<ClaimedTask> {
    (0..times)
        .flat_map(|_| claim(client, queue, "w", n))
        .collect()
}

/// Claims until nothing is left.
#[track_caller]
pub fn drain(client: &mut Client, queue: &str, n: i32) -> Vec<ClaimedTask> {
    let mut all = Vec::new();
    loop {
        let tasks = claim(client, queue, "w", n);
        if tasks.is_empty() {
            return all;
        }
        all.extend(tasks);
    }
}

#[track_caller]
pub fn execute(client: &mut Client, sql: &str) {
    client
        .batch_execute(sql)
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

#[track_caller]
pub fn assert_near(actual: usize, expected: usize, tolerance: usize, what: &str) {
    assert!(
        actual.abs_diff(expected) <= tolerance,
        "{what}: {actual}, not {expected} (within {tolerance})"
    );
}

#[track_caller]
pub fn assert_all_different(tasks: &[ClaimedTask]) {
    let mut ids: Vec<i64> = tasks.iter().map(|task| task.id).collect();
    ids.sort_unstable();
    let claimed = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), claimed, "a task was claimed twice");
}

/// What the board knows of one key at one priority.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyState {
    pub key: String,
    pub weight: f64,
    pub pass: f64,
    pub clock: f64,
    pub lag: f64,
    pub running: i64,
    pub eligible: bool,
}

/// `fair_state` of a queue, by key.
#[track_caller]
pub fn states(client: &mut Client, queue: &str) -> Vec<KeyState> {
    client
        .query(
            "SELECT fairness_key, weight, pass, clock, lag, running::bigint, eligible
             FROM fair_state($1) ORDER BY priority, fairness_key",
            &[&queue],
        )
        .unwrap_or_else(|error| panic!("fair_state: {error:?}"))
        .iter()
        .map(|row| KeyState {
            key: row.get(0),
            weight: row.get(1),
            pass: row.get(2),
            clock: row.get(3),
            lag: row.get(4),
            running: row.get(5),
            eligible: row.get(6),
        })
        .collect()
}

/// The state of one key; panics where the board does not know it.
#[track_caller]
pub fn state(client: &mut Client, queue: &str, key: &str) -> KeyState {
    let all = states(client, queue);
    all.iter()
        .find(|state| state.key == key)
        .unwrap_or_else(|| panic!("fair_state knows no {key:?}: {all:?}"))
        .clone()
}

/// What `harvest_fair.check()` finds, a line for each difference: queue, priority, key, what, on the board, in the table.
#[track_caller]
pub fn differences(client: &mut Client) -> Vec<String> {
    client
        .query(
            "SELECT concat_ws('|', queue, coalesce(priority::text, '-'), coalesce(fairness_key, '-'), what,
                              coalesce(on_board, '-'), coalesce(in_table, '-')) FROM harvest_fair.check()",
            &[],
        )
        .unwrap_or_else(|error| panic!("harvest_fair.check: {error:?}"))
        .iter()
        .map(|row| row.get(0))
        .collect()
}

/// One counter of `harvest_fair.stats`; 0 for a queue without a line.
#[track_caller]
pub fn stat(client: &mut Client, queue: &str, column: &str) -> i64 {
    one(
        client,
        &format!(
            "SELECT coalesce((SELECT {column}::bigint FROM harvest_fair.stats WHERE queue = $1), 0)"
        ),
        &[&queue],
    )
}

/// The columns of one task, as text.
#[track_caller]
pub fn task_field(client: &mut Client, id: i64, expression: &str) -> Option<String> {
    one(
        client,
        &format!("SELECT ({expression})::text FROM harvest_fair.task WHERE id = $1"),
        &[&id],
    )
}

/// Whether a session met what strikes any session now and then: it was cancelled, terminated or cut off, met a deadlock,
/// or the ROLLBACK after one of these was cancelled too.
pub fn was_struck(error: &postgres::Error) -> bool {
    error
        .code()
        .is_none_or(|code| ["57014", "57P01", "40P01", "25P02"].contains(&code.code()))
}
