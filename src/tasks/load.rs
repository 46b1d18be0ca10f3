//! Loading: what the board knows of a queue, read from the tables.

use std::collections::HashMap;
use std::time::Instant;

use pgrx::pg_sys;

use super::statements as sql;
use super::table::TaskTable;
use crate::board::BoardSettings;
use crate::board::{self, QueueRef, effects, now, shmem, stored_key, stored_priority};
use crate::errors::Error;
use crate::names::{QueueName, Weight};
use crate::policy::queues::as_others_see;
use crate::policy::settings::Settings;
use crate::sfq::{QueueId, QueueState, Ticks};
use crate::spi;

use pgrx::IntoDatum;

/// Keys restored under one hold of the lock.
const KEYS_A_HOLD: usize = 256;

/// The queue on the board, loaded: by this session if nobody has done it yet.
pub fn ensure_loaded(table: &TaskTable, name: &str) -> Result<QueueId, Error> {
    let scope = table.catalog.scope();
    let parsed = QueueName::parse(name).map_err(|broken| Error::Name {
        value: name.to_owned(),
        broken,
    })?;
    loop {
        let opened = board::with(|sched| {
            let queue = match sched.open_queue(scope, &parsed) {
                // A queue in which nothing is left to do gives its place up, unless somebody waits for its next task.
                Err(_) if sched.evict_queue(|queue| shmem::waiting(Some(queue)) == 0) => {
                    sched.open_queue(scope, &parsed)?
                }
                opened => opened?,
            };
            let state = sched.queue_state(queue);
            if state == Some(QueueState::Unloaded) {
                // Marked before anything is read: what commits from now on joins by itself.
                sched.set_queue_state(queue, QueueState::Loading);
            }
            Ok::<_, crate::sfq::Full>((queue, state))
        });
        let Ok((queue, state)) = opened else {
            return Err(Error::TooManyQueues {
                queue: name.to_owned(),
                max: crate::config::max_queues(),
            });
        };
        match state {
            Some(QueueState::Loaded) => return Ok(queue),
            Some(QueueState::Loading) => wait_for_loader(queue),
            _ => {
                load(
                    table,
                    queue,
                    QueueRef {
                        scope,
                        name: name.to_owned(),
                    },
                );
                return Ok(queue);
            }
        }
    }
}

fn wait_for_loader(queue: QueueId) {
    // SAFETY: the condition variable lies in shared memory; interrupts are served inside the sleep.
    unsafe { pg_sys::ConditionVariablePrepareToSleep(shmem::loading()) };
    while board::with(|sched| sched.queue_state(queue)) == Some(QueueState::Loading) {
        // SAFETY: as above.
        unsafe { pg_sys::ConditionVariableSleep(shmem::loading(), pg_sys::PG_WAIT_EXTENSION) };
    }
    // SAFETY: leaves the condition variable.
    unsafe { pg_sys::ConditionVariableCancelSleep() };
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
    // SAFETY: wakes the sessions that wait for this load.
    unsafe { pg_sys::ConditionVariableBroadcast(shmem::loading()) };
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

/// The overrides of a queue as they stand in the table.
pub fn read_overrides(queue: &str) -> Vec<(String, f64)> {
    spi::connect(|spi| {
        let rows = spi.run_as_others(&sql::OVERRIDES, &[queue.into_datum()]);
        (0..rows.len())
            .filter_map(|i| Some((rows.get(i, 1)?, rows.get(i, 2)?)))
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
    let mut counts = HashMap::<String, i32>::new();
    table.running(name, |key| *counts.entry(key.to_owned()).or_default() += 1);
    let counts: Vec<_> = counts.into_iter().collect();
    for chunk in counts.chunks(KEYS_A_HOLD) {
        board::with(|sched| {
            for (key, count) in chunk {
                sched.set_running(queue, &stored_key(key), *count);
            }
        });
    }
}

/// Tells the board when the queue's next lease and pin end.
pub fn schedule_reaping(table: &TaskTable, queue: QueueId, name: &str) {
    let known = board::with(|sched| sched.unpin_due(queue));
    let (_, next_lease) = table.expired_leases(name, i64::MIN, 0);
    let mut next_pin = None;
    table.pins(name, |_, until| {
        next_pin = Some(next_pin.map_or(until, |n: i64| n.min(until)));
    });
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
}
