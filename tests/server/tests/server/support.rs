//! What several themes share.

use std::sync::OnceLock;
use std::thread;
use std::time::Instant;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, LONG, Options, PATIENCE, claim, claim_waiting, holds_within,
    one, wait_until,
};
use postgres::{Client, GenericClient};

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

/// A server without a janitor: what happens there, sessions have done themselves, and nobody but the test holds a row for
/// a moment.
pub fn unattended() -> &'static Cluster {
    static UNATTENDED: OnceLock<Cluster> = OnceLock::new();
    Cluster::shared_in(&UNATTENDED, || {
        Options::new()
            .set("max_worker_processes", 0)
            // The end of a lease ends a wait, too; not before a test has lost its patience.
            .set("harvest_fair.default_lease", "1h")
    })
}

pub fn brisk_options() -> Options {
    Options::new()
        .set("harvest_fair.sweep_interval", "1s")
        .set("harvest_fair.flush_interval", "1s")
}

/// Plays rounds with a window of time that grows from round to round, until one was quick enough: a round says `None` when
/// the server's clock tells, after all that had to happen within the window, that it was over by then. So what must not
/// come yet is asserted only where it was not to come yet, however long the machine kept the test waiting in between.
#[track_caller]
pub fn in_time<T>(mut round: impl FnMut(&str) -> Option<T>) -> T {
    WINDOWS
        .iter()
        .find_map(|window| round(window))
        .unwrap_or_else(|| panic!("no round was over within its window, {WINDOWS:?}"))
}

const WINDOWS: [&str; 5] = ["200 ms", "800 ms", "4000 ms", "15000 ms", "40000 ms"];

/// Measures until a result is good enough, a few times at most. A busy machine only ever makes it worse, so that one good
/// result tells, where wrong code has none.
#[track_caller]
pub fn at_best<T>(mut measure: impl FnMut() -> Result<T, String>) -> T {
    let mut all = Vec::new();
    for _ in 0..4 {
        match measure() {
            Ok(result) => return result,
            Err(result) => {
                println!("measured again: {result}");
                all.push(result);
            }
        }
    }
    panic!("never good enough: {all:#?}");
}

/// The server's clock: seconds since 1970.
#[track_caller]
pub fn clock(client: &mut impl GenericClient) -> f64 {
    one(
        client,
        "SELECT extract(epoch FROM clock_timestamp())::float8",
        &[],
    )
}

/// That something happened between two moments of the server's clock, give or take a microsecond's rounding.
#[track_caller]
pub fn assert_between(at: f64, before: f64, after: f64, what: &str) {
    assert!(
        (before - 1e-5..=after + 1e-5).contains(&at),
        "{what} {at}, not between {before} and {after}"
    );
}

/// `fair_fail`: the state that the task has now, or None where the lease is no longer held.
#[track_caller]
pub fn fail(
    client: &mut impl GenericClient,
    task: &ClaimedTask,
    retry_in: Option<&str>,
) -> Option<String> {
    one(
        client,
        "SELECT fair_fail($1::bigint, $2::bigint, 'it broke', $3::text::interval)::text",
        &[&task.id, &task.lease, &retry_in],
    )
}

/// Tasks that a worker waits for, and that something makes claimable meanwhile: it does not sleep until its wait ends.
#[track_caller]
pub fn await_claim(
    client: &mut impl GenericClient,
    queue: &str,
    worker: &str,
    max_tasks: i32,
) -> Vec<ClaimedTask> {
    let start = Instant::now();
    let tasks = claim_waiting(client, queue, worker, max_tasks, LONG);
    let waited = start.elapsed();
    assert!(waited < PATIENCE, "waited {waited:?} for {tasks:?}");
    tasks
}

/// The task that a worker who sleeps on queue `q` gets by `change`. On an [`unattended`] server nothing else wakes it.
#[track_caller]
pub fn woken_by(db: &Database, worker: &str, change: impl FnOnce(&mut Client)) -> ClaimedTask {
    let mut client = db.connect();
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| claim_waiting(&mut db.connect(), "q", worker, 1, LONG));
        wait_until("the worker waits", PATIENCE, || {
            stat(&mut client, "q", "waiting") == 1
        });
        change(&mut client);
        if !holds_within(PATIENCE, || sleeper.is_finished()) {
            execute(
                &mut client,
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND wait_event_type = 'Extension'",
            );
            panic!("the worker sleeps on");
        }
        let mut tasks = sleeper.join().unwrap();
        assert_eq!(tasks.len(), 1);
        tasks.remove(0)
    })
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

/// A trigger of the user's own that changes nothing: with it, every update is a statement.
pub const BYSTANDER: &str = "CREATE FUNCTION bystand() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
     CREATE TRIGGER bystand BEFORE UPDATE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION bystand()";

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
    read_states(client, queue, None)
}

/// The same at one priority.
#[track_caller]
pub fn states_at(client: &mut Client, queue: &str, priority: i16) -> Vec<KeyState> {
    read_states(client, queue, Some(priority))
}

#[track_caller]
fn read_states(client: &mut Client, queue: &str, priority: Option<i16>) -> Vec<KeyState> {
    client
        .query(
            "SELECT fairness_key, weight, pass, clock, lag, running::bigint, eligible
             FROM fair_state($1) WHERE priority = coalesce($2, priority) ORDER BY priority, fairness_key",
            &[&queue, &priority],
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

/// Whether the lease that a claim told of is over by the server's clock.
pub fn has_expired(client: &mut Client, task: &ClaimedTask) -> bool {
    one(
        client,
        "SELECT clock_timestamp() > $1",
        &[&task.lease_until],
    )
}

/// Takes a task's lease away as a stalled worker would lose it.
pub fn wait_for_expiry(client: &mut Client, task: &ClaimedTask) {
    wait_until("the lease has run out", PATIENCE, || {
        has_expired(client, task)
    });
}
