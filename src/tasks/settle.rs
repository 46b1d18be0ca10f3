//! Settling: what a worker says of a task whose lease it holds.
//!
//! The task is found by its id and its newest version locked, waiting for whoever holds it; then lease and state are
//! looked at again. So a lease that has passed to another worker can settle nothing.

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::catalog::column;
use super::reap::{text, tid, tids};
use super::statements as sql;
use super::table::{TaskTable, Tid, TupleLock};
use super::write::{Writer, show_changes};
use super::{claim::check_transaction, shown, timestamp};
use crate::board::{self, OnCommit, QueueRef, effects, now, shmem, stored_priority};
use crate::config;
use crate::errors::Error;
use crate::names::{Cost, Priority};
use crate::spi;

const MICROS_PER_S: i64 = 1_000_000;
/// First and longest delay before a failed task is tried again.
const BACKOFF_FIRST: i64 = MICROS_PER_S;
const BACKOFF_LONGEST: i64 = 3_600 * MICROS_PER_S;
/// The delay is spread by so much of itself to both sides, lest tasks that failed together come back together.
const BACKOFF_JITTER: f64 = 0.1;

/// How a failed task goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterFailure {
    Pending,
    Failed,
}

/// Whom a running task was charged to.
struct Account {
    queue: QueueRef,
    key: String,
    priority: Priority,
    weight: Option<f64>,
    charged: Option<f64>,
    started_at: Option<i64>,
}

/// A task locked by this transaction.
struct Task {
    tid: Tid,
    account: Account,
    attempt: i32,
    max_attempts: i32,
}

impl Task {
    /// Finds and locks a task, if `wanted` still holds for its newest version.
    fn lock(table: &TaskTable, id: i64, wanted: impl Fn(&TaskTable) -> bool) -> Option<Task> {
        if !table.find(id) || !wanted(table) {
            return None;
        }
        let TupleLock::Locked(tid) = table.lock_newest(table.tid()) else {
            return None;
        };
        if table.get::<i64>(column::ID) != Some(id) || !wanted(table) {
            return None;
        }
        Some(Task {
            tid,
            account: Account {
                queue: QueueRef {
                    scope: table.catalog.scope(),
                    name: table.get(column::QUEUE).unwrap_or_default(),
                },
                key: table.get(column::FAIRNESS_KEY).unwrap_or_default(),
                priority: stored_priority(table.get(column::PRIORITY).unwrap_or(3)),
                weight: table.get(column::WEIGHT),
                charged: table.get(column::CHARGED),
                started_at: table.micros(column::STARTED_AT),
            },
            attempt: table.get(column::ATTEMPT).unwrap_or(0),
            max_attempts: table.get(column::MAX_ATTEMPTS).unwrap_or(1),
        })
    }

    /// A running task under this very lease.
    fn held(table: &TaskTable, id: i64, lease: i64) -> Option<Task> {
        let running = table.catalog.running;
        Task::lock(table, id, |row| {
            row.get::<pg_sys::Oid>(column::STATE) == Some(running)
                && row.get::<i64>(column::LEASE) == Some(lease)
        })
    }
}

impl Account {
    /// How long a lease of its queue is.
    fn lease(&self) -> i64 {
        board::with(|sched| board::find_queue(sched, &self.queue))
            .map_or_else(config::default_lease, |queue| shmem::extras(queue).lease())
    }

    /// Corrects the charge at commit (rule 6): by the reported cost, or where the queue charges by seconds, by the time
    /// that the task has run. A task that was claimed without fairness has nothing to correct.
    fn correct(&self, cost: Option<f64>, by_seconds: bool, now: i64) {
        let Some(charged) = self.charged else { return };
        let ran = || {
            self.started_at
                .map(|at| now.saturating_sub(at).max(0) as f64 / MICROS_PER_S as f64)
        };
        let Some(cost) = cost.or_else(|| if by_seconds { ran() } else { None }) else {
            return;
        };
        let (queue, key) = (self.queue.clone(), self.key.clone());
        if by_seconds {
            effects::on_commit(OnCommit::Measured {
                queue: queue.clone(),
                key: key.clone(),
                seconds: cost,
            });
        }
        if cost != charged {
            let (priority, weight) = (self.priority, self.weight);
            effects::on_commit(OnCommit::Correct {
                queue,
                priority,
                key,
                delta: cost - charged,
                weight,
            });
        }
    }
}

/// Whether a queue charges by the seconds that its tasks run.
fn charges_by_seconds(queue: &QueueRef) -> bool {
    board::with(|sched| {
        board::find_queue(sched, queue).is_some_and(|queue| sched.policy(queue).by_seconds)
    })
}

/// Locks the tasks whose leases are held, in the order of their ids (two sessions that settle the same tasks must not
/// wait for each other), and returns each with its place in the call. `locked` is called while the table's slot holds one.
fn held(
    table: &TaskTable,
    ids: &[i64],
    leases: &[i64],
    mut locked: impl FnMut(),
) -> Vec<(usize, Task)> {
    let mut places: Vec<usize> = (0..ids.len()).collect();
    places.sort_by_key(|i| ids[*i]);
    places.dedup_by_key(|i| (ids[*i], leases[*i]));
    let mut tasks: Vec<(usize, Task)> = places
        .into_iter()
        .filter_map(|i| {
            pgrx::check_for_interrupts!();
            let task = Task::held(table, ids[i], leases[i])?;
            locked();
            Some((i, task))
        })
        .collect();
    tasks.sort_by_key(|(i, _)| *i);
    tasks
}

fn update(statement: &'static spi::Statement, args: &[spi::Arg]) {
    spi::connect(|spi| {
        spi.run(statement, args);
    });
}

/// Completes tasks; a cost corrects what their keys were charged (rule 6). Returns the ids that were settled.
pub fn complete(ids: &[i64], leases: &[i64], costs: &[Option<f64>]) -> Result<Vec<i64>, Error> {
    check_transaction("fair_complete")?;
    for cost in costs.iter().flatten() {
        Cost::reported(*cost).map_err(|broken| Error::Name {
            value: cost.to_string(),
            broken,
        })?;
    }
    let table = TaskTable::open()?;
    let writer = Writer::open(
        &table,
        [
            column::STATE,
            column::FINISHED_AT,
            column::LEASE_UNTIL,
            column::NEW_START,
        ],
    );
    let now = now();
    let tasks = held(&table, ids, leases, || {
        if let Some(writer) = &writer {
            // Must say the same as the statement.
            writer.write([
                table.catalog.completed.into_datum(),
                Some(timestamp(now)),
                None,
                false.into_datum(),
            ]);
        }
    });
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    for of_queue in tasks.chunk_by(|(_, a), (_, b)| a.account.queue == b.account.queue) {
        let queue = &of_queue[0].1.account.queue;
        let by_seconds = charges_by_seconds(queue);
        for (i, task) in of_queue {
            let cost = costs.get(*i).copied().flatten();
            task.account.correct(cost, by_seconds, now);
        }
        if writer.is_some() {
            // What the row trigger would say.
            let keys = of_queue.iter().map(|(_, task)| task.account.key.clone());
            effects::on_commit(OnCommit::Completed {
                queue: queue.clone(),
                keys: keys.collect(),
            });
        }
    }
    if writer.is_some() {
        show_changes();
    } else {
        let rows: Vec<Tid> = tasks.iter().map(|(_, task)| task.tid).collect();
        update(&sql::COMPLETE, &[tids(&rows), Some(timestamp(now))]);
    }
    Ok(tasks.iter().map(|(i, _)| ids[*i]).collect())
}

/// Gives tasks back: pending again, charge undone (rule 5), attempt not counted. Returns the ids that were settled.
pub fn release(ids: &[i64], leases: &[i64]) -> Result<Vec<i64>, Error> {
    check_transaction("fair_release")?;
    let table = TaskTable::open()?;
    let tasks = held(&table, ids, leases, || {});
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    for (_, task) in &tasks {
        let account = &task.account;
        if let Some(cost) = account.charged {
            effects::on_commit(OnCommit::Refund {
                queue: account.queue.clone(),
                priority: account.priority,
                key: account.key.clone(),
                cost,
                weight: account.weight,
            });
        }
    }
    let rows: Vec<Tid> = tasks.iter().map(|(_, task)| task.tid).collect();
    update(&sql::RELEASE, &[tids(&rows)]);
    Ok(tasks.iter().map(|(i, _)| ids[*i]).collect())
}

/// Reports a failure; `retry_in` (µs) replaces the backoff.
pub fn fail(
    id: i64,
    lease: i64,
    error: Option<&str>,
    retry_in: Option<i64>,
) -> Result<Option<AfterFailure>, Error> {
    check_transaction("fair_fail")?;
    let table = TaskTable::open()?;
    let Some(task) = Task::held(&table, id, lease) else {
        return Ok(None);
    };
    let now = now();
    let by_seconds = charges_by_seconds(&task.account.queue);
    task.account.correct(None, by_seconds, now);
    if task.attempt >= task.max_attempts {
        update(
            &sql::FAIL,
            &[tid(&task.tid), Some(timestamp(now)), text(error)],
        );
        return Ok(Some(AfterFailure::Failed));
    }
    let delay = retry_in.unwrap_or_else(|| backoff(task.attempt));
    update(
        &sql::RETRY_LATER,
        &[
            tid(&task.tid),
            Some(timestamp(now.saturating_add(delay))),
            text(error),
        ],
    );
    Ok(Some(AfterFailure::Pending))
}

/// The delay before the next attempt: 1 s after the first, doubling to 1 h, with jitter.
fn backoff(attempt: i32) -> i64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let doublings = attempt.saturating_sub(1).clamp(0, 20);
    let delay = (BACKOFF_FIRST << doublings).min(BACKOFF_LONGEST) as f64;
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    ((delay * (1.0 - BACKOFF_JITTER + 2.0 * BACKOFF_JITTER * random)) as i64).min(BACKOFF_LONGEST)
}

/// Moves the end of a lease to `lease_for` (µs) from now, and returns it.
pub fn extend(id: i64, lease: i64, lease_for: Option<i64>) -> Result<Option<i64>, Error> {
    check_transaction("fair_extend")?;
    let table = TaskTable::open()?;
    let Some(task) = Task::held(&table, id, lease) else {
        return Ok(None);
    };
    let until = shown(now().saturating_add(lease_for.unwrap_or_else(|| task.account.lease())));
    update(&sql::EXTEND, &[tid(&task.tid), Some(timestamp(until))]);
    Ok(Some(until))
}

/// Cancels a pending task.
pub fn cancel(id: i64) -> Result<bool, Error> {
    check_transaction("fair_cancel")?;
    let table = TaskTable::open()?;
    let pending = table.catalog.pending;
    let task = Task::lock(&table, id, |row| {
        row.get::<pg_sys::Oid>(column::STATE) == Some(pending)
    });
    let Some(task) = task else { return Ok(false) };
    update(&sql::CANCEL, &[tid(&task.tid), Some(timestamp(now()))]);
    Ok(true)
}

/// Makes a failed or cancelled task pending again, its attempts reset.
pub fn retry(id: i64) -> Result<bool, Error> {
    check_transaction("fair_retry")?;
    let table = TaskTable::open()?;
    let over = [table.catalog.failed, table.catalog.cancelled];
    let task = Task::lock(&table, id, |row| {
        row.get::<pg_sys::Oid>(column::STATE)
            .is_some_and(|s| over.contains(&s))
    });
    let Some(task) = task else { return Ok(false) };
    update(&sql::RETRY, &[tid(&task.tid), Some(timestamp(now()))]);
    Ok(true)
}
