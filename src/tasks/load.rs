//! Loading: what the board knows of a queue, read from the tables.

use std::collections::HashMap;
use std::time::Instant;

use pgrx::pg_sys;

use super::reap::{next_lease, next_pin};
use super::statements as sql;
use super::table::TaskTable;
use crate::board::BoardSettings;
use crate::board::{self, QueueRef, effects, now, shmem, stored_key, stored_priority};
use crate::errors::Error;
use crate::names::{FairnessKey, QueueName, Weight};
use crate::policy::queues::as_others_see;
use crate::policy::settings::Settings;
use crate::sfq::{QueueId, QueueState, Ticks};
use crate::spi;

use pgrx::IntoDatum;

/// Keys restored under one hold of the lock.
const KEYS_A_HOLD: usize = 256;

/// The queue on the board, loaded: by this session if nobody has done it yet.
pub fn ensure_loaded(table: &TaskTable, name: &str) -> Result<QueueId, Error> {
    loop {
        if let (queue, true) = try_load(table, name, false)? {
            return Ok(queue);
        }
    }
}

/// Loads a queue unless it is loaded or somebody is about to.
pub fn load_if_free(table: &TaskTable, name: &str) -> Result<(), Error> {
    try_load(table, name, true).map(|_| ())
}

/// One attempt to load a queue, if need be; `unless_busy`: not if somebody else is about to. Whether it is loaded.
fn try_load(table: &TaskTable, name: &str, unless_busy: bool) -> Result<(QueueId, bool), Error> {
    let scope = table.catalog.scope();
    let parsed = QueueName::parse(name).map_err(|broken| Error::Name {
        value: name.to_owned(),
        broken,
    })?;
    let opened = board::with(|sched| {
        let queue = match sched.open_queue(scope, &parsed) {
            // A queue in which nothing is left to do gives its place up, unless somebody waits for its next task.
            Err(_) if sched.evict_queue(|queue| shmem::waiting(Some(queue)) == 0) => {
                sched.open_queue(scope, &parsed)?
            }
            opened => opened?,
        };
        Ok::<_, crate::sfq::Full>((queue, sched.queue_state(queue)))
    });
    let Ok((queue, state)) = opened else {
        return Err(Error::TooManyQueues {
            queue: name.to_owned(),
            max: crate::config::max_queues(),
        });
    };
    if state == Some(QueueState::Loaded) {
        return Ok((queue, true));
    }
    let Some(turn) = LoadLock::acquire(queue, unless_busy) else {
        return Ok((queue, false));
    };
    let is_mine = board::with(|sched| {
        let state = sched.queue_state(queue);
        let is_mine = state.is_some_and(|state| state != QueueState::Loaded);
        if is_mine {
            // Marked before anything is read: what commits from now on joins by itself.
            sched.set_queue_state(queue, QueueState::Loading);
        }
        is_mine
    });
    if is_mine {
        let name = name.to_owned();
        load(table, queue, QueueRef { scope, name });
    }
    turn.release();
    // Another session has loaded it, or it has left the board: looked at again.
    Ok((queue, is_mine))
}

/// The turn to load a queue. A lock of Postgres' own, since a load can have to wait for somebody who waits for it: so
/// Postgres finds the deadlock, `lock_timeout` counts, and pg_locks shows who waits for whom. If the load fails, the next in
/// line has its turn: the lock goes after the abort callback has made the queue unloaded again.
struct LoadLock(pg_sys::LOCKTAG);

impl LoadLock {
    /// Told apart from the advisory locks of SQL, which have 1 or 2 there.
    const FIELD4: u16 = 3;
    const MODE: pg_sys::LOCKMODE = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;

    /// `None`, with `unless_held`, if another session has it.
    fn acquire(queue: QueueId, unless_held: bool) -> Option<LoadLock> {
        let tag = pg_sys::LOCKTAG {
            // SAFETY: set for the life of the backend once it is connected.
            locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
            locktag_field2: queue.index() as u32,
            locktag_field3: queue.stamp(),
            locktag_field4: LoadLock::FIELD4,
            locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
            locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
        };
        // SAFETY: within a transaction, which gives the lock back if `release` is not reached.
        let got = unsafe { pg_sys::LockAcquire(&tag, LoadLock::MODE, false, unless_held) };
        (got != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL).then_some(LoadLock(tag))
    }

    fn release(self) {
        // SAFETY: acquired above under the same resource owner.
        unsafe { pg_sys::LockRelease(&self.0, LoadLock::MODE, false) };
    }
}

/// Reads overrides, passes, lanes, running counts and leases of a queue, as other sessions see them: the board is shared,
/// and what this transaction has changed comes to it when it commits. An error on the way makes the queue unloaded again
/// (see the abort callback).
fn load(table: &TaskTable, queue: QueueId, name: QueueRef) {
    table.as_others_see(|| load_as_others(table, queue, name));
}

fn load_as_others(table: &TaskTable, queue: QueueId, name: QueueRef) {
    let started = Instant::now();
    effects::loading(name.clone());
    put_policy(queue, &name.name);
    let passes = read_passes(&name.name);
    let now = now();
    for chunk in passes.chunks(KEYS_A_HOLD) {
        board::with(|sched| {
            for (priority, key, pass, last_start) in chunk {
                // A key that finds no room starts again at the clock: it has lost no task.
                let (pass, last_start) = (Ticks::new(*pass), Ticks::new(*last_start));
                let _ = sched.restore(
                    queue,
                    stored_priority(*priority),
                    &stored_key(key),
                    pass,
                    last_start,
                    now,
                );
            }
        });
    }
    table.walk_lanes(&name.name, |priority, key, band, row| {
        board::with(|sched| {
            // No room on the board, which has counted it: the sweep tries again.
            let _ = sched.note(
                queue,
                stored_priority(priority),
                &stored_key(key),
                band,
                row,
                now,
            );
        });
    });
    count_running(table, queue, &name.name);
    schedule_reaping(table, queue, &name.name);
    board::with(|sched| {
        sched.finish_load(queue);
        sched.counters(queue).load_micros = started.elapsed().as_micros() as u64;
    });
    effects::loaded();
}

/// Puts settings and overrides on the board, until they are what the table holds: what somebody commits between a look at
/// the table and the board's turn has come to the board already, and would be overwritten.
fn put_policy(queue: QueueId, name: &str) {
    let read = || {
        let overrides: HashMap<String, f64> = read_overrides(name).into_iter().collect();
        (read_settings(name), overrides)
    };
    let mut known = read();
    let mut gone: Vec<String> = Vec::new();
    loop {
        let (settings, overrides) = &known;
        board::with(|sched| {
            settings.put(sched, queue, now());
            let set = overrides.iter().map(|(key, weight)| (key, Some(*weight)));
            let cleared = gone.iter().map(|key| (key, None));
            for (key, weight) in cleared.chain(set) {
                // No room on the board: the sweep tries again.
                let weight = weight.and_then(|weight| Weight::new(weight).ok());
                let _ = sched.set_override(queue, &stored_key(key), weight);
            }
        });
        let again = read();
        if again == known {
            return;
        }
        let old = std::mem::replace(&mut known, again).1.into_keys();
        gone.extend(old.filter(|key| !known.1.contains_key(key)));
        gone.retain(|key| !known.1.contains_key(key));
    }
}

/// The settings of a queue as they stand in the table. What a DBA has stored there without the trigger and against the
/// rules counts as not set: claims must go on.
pub fn read_settings(queue: &str) -> BoardSettings {
    let stored = spi::connect(|spi| as_others_see(spi, queue));
    Settings::read(&stored).unwrap_or_default().on_board()
}

/// The overrides of a queue as they stand in the table; but for those that were stored there against the rules.
pub fn read_overrides(queue: &str) -> Vec<(String, f64)> {
    spi::connect(|spi| {
        let rows = spi.run_as_others(&sql::OVERRIDES, &[queue.into_datum()]);
        (0..rows.len())
            .filter_map(|i| Some((rows.get::<String>(i, 1)?, rows.get(i, 2)?)))
            .filter(|(key, weight)| {
                FairnessKey::parse(key.as_str()).is_ok() && Weight::new(*weight).is_ok()
            })
            .collect()
    })
}

fn read_passes(queue: &str) -> Vec<(i16, String, i64, i64)> {
    spi::connect(|spi| {
        let rows = spi.run_as_others(&sql::KEY_STATES, &[queue.into_datum()]);
        (0..rows.len())
            .filter_map(|i| {
                Some((
                    rows.get(i, 1)?,
                    rows.get(i, 2)?,
                    rows.get(i, 3)?,
                    rows.get(i, 4)?,
                ))
            })
            .collect()
    })
}

/// Sets the running count of each key of the queue to what the table holds.
fn count_running(table: &TaskTable, queue: QueueId, name: &str) {
    let read = || {
        let mut counts = HashMap::<String, i32>::new();
        table.running(name, |key| *counts.entry(key.to_owned()).or_default() += 1);
        counts
    };
    let first = read();
    // What ran when the queue was loaded before, if it was, and runs no more.
    let mut gone = board::with(|sched| sched.running_keys(queue));
    gone.retain(|key| !first.contains_key(key));
    let gone = gone.into_iter().map(|key| (key, 0));
    let counts: Vec<(String, i32)> = first.into_iter().chain(gone).collect();
    for chunk in counts.chunks(KEYS_A_HOLD) {
        board::with(|sched| {
            for (key, count) in chunk {
                sched.count_running(queue, &stored_key(key), *count);
            }
        });
    }
    // Again, now that what others complete while the table is read shows in the board's counts.
    let before: Vec<i32> = board::with(|sched| {
        let running = |(key, _): &(String, i32)| sched.running(queue, &stored_key(key));
        counts.iter().map(running).collect()
    });
    let second = read();
    let counts: Vec<_> = counts.into_iter().zip(before).collect();
    for chunk in counts.chunks(KEYS_A_HOLD) {
        board::with(|sched| {
            for ((key, _), before) in chunk {
                let stored = stored_key(key);
                let since = sched.running(queue, &stored) - before;
                let count = second.get(key).copied().unwrap_or(0);
                sched.count_running(queue, &stored, count + since);
            }
        });
    }
}

/// Tells the board when the queue's next lease and pin end. Whether there are pins.
pub fn schedule_reaping(table: &TaskTable, queue: QueueId, name: &str) -> bool {
    let known = board::with(|sched| sched.unpin_due(queue));
    let next_lease = next_lease(table, name);
    let next_pin = next_pin(table, name);
    board::with(|sched| {
        if let Some(at) = next_lease {
            sched.note_lease_due(queue, at);
        }
        match next_pin {
            Some(at) => sched.note_unpin_due(queue, at),
            // The last pinned row is gone, and none has come meanwhile: claims need not look for any.
            None if sched.unpin_due(queue) == known => sched.set_unpin_due(queue, i64::MAX),
            None => {}
        }
    });
    next_pin.is_some()
}
