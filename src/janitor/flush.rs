//! The periodic snapshot of the board, and forgetting.

use std::collections::HashSet;
use std::rc::Rc;

use pgrx::IntoDatum;

use crate::board::effects::{self, Written};
use crate::board::{self, now};
use crate::config;
use crate::names::Priority;
use crate::policy::prune::forget_snapshot;
use crate::sfq::{DirtyEntry, QueueId, QueueState};
use crate::spi;
use crate::tasks::statements as sql;

/// Keys written by one statement.
const BATCH: usize = 1_000;
/// Keys taken under one hold of the lock.
const KEYS_A_HOLD: usize = 256;

/// Writes what has changed of a queue since the last time. If that fails, it is what has changed the next time.
pub fn flush(queue: QueueId, name: &str) {
    let (mut anew, mut changed) = (Vec::new(), Vec::<DirtyEntry>::new());
    // All is taken before any of it is written: claims change keys faster than they are written.
    loop {
        let before = changed.len();
        changed.reserve(KEYS_A_HOLD);
        board::with(|sched| {
            // The passes of a queue that is being loaded are not yet what they will be.
            if sched.queue_state(queue) == Some(QueueState::Loaded) {
                let tiers = Priority::ALL.into_iter();
                anew.extend(tiers.filter(|priority| sched.take_rewrite(queue, *priority)));
                sched.take_dirty(queue, &mut changed, KEYS_A_HOLD);
            }
        });
        if changed.len() - before < KEYS_A_HOLD {
            break;
        }
    }
    if anew.is_empty() && changed.is_empty() {
        return;
    }
    let changed = Rc::new(changed);
    effects::writing(Written::Passes {
        queue,
        anew: anew.clone(),
        changed: changed.clone(),
    });
    for priority in anew {
        let args = [name.into_datum(), i16::from(priority.get()).into_datum()];
        spi::connect(|spi| {
            spi.run(&sql::FORGET_TIER, &args);
        });
    }
    // A key that has changed twice meanwhile is written once.
    let mut seen = HashSet::new();
    let last = changed.iter().rev();
    let last: Vec<&DirtyEntry> = last
        .filter(|entry| seen.insert((entry.priority.get(), entry.key.as_str())))
        .collect();
    for batch in last.chunks(BATCH) {
        write(name, batch);
    }
}

fn write(queue: &str, entries: &[&DirtyEntry]) {
    let priorities: Vec<i16> = entries
        .iter()
        .map(|e| i16::from(e.priority.get()))
        .collect();
    let keys: Vec<&str> = entries.iter().map(|e| e.key.as_str()).collect();
    let passes: Vec<i64> = entries.iter().map(|e| e.pass.get()).collect();
    let starts: Vec<i64> = entries.iter().map(|e| e.last_start.get()).collect();
    let args = [
        queue.into_datum(),
        priorities.into_datum(),
        keys.into_datum(),
        passes.into_datum(),
        starts.into_datum(),
    ];
    spi::connect(|spi| {
        spi.run(&sql::FLUSH, &args);
    });
}

/// Forgets keys of a queue that have been idle for `harvest_fair.prune_after` (rule 8), on the board and in the snapshot.
pub fn prune(queue: QueueId, name: &str) {
    let mut gone = Vec::new();
    board::with(|sched| sched.forget(queue, now(), config::prune_after(), false, &mut gone));
    forget_snapshot(name, &gone);
}
