//! The periodic snapshot of the board, and forgetting.

use pgrx::IntoDatum;

use crate::board::{self, now};
use crate::config;
use crate::names::Priority;
use crate::observe::state::of_scope;
use crate::policy::prune::forget_snapshot;
use crate::sfq::DirtyEntry;
use crate::spi;
use crate::tasks::statements as sql;

/// Keys written by one statement.
const BATCH: usize = 1_000;

/// Writes what has changed since the last time.
pub fn flush(scope: u64) {
    for (queue, name) in of_scope(scope) {
        for priority in Priority::ALL {
            if board::with(|sched| sched.take_rewrite(queue, priority)) {
                let args = [
                    name.as_str().into_datum(),
                    i16::from(priority.get()).into_datum(),
                ];
                spi::connect(|spi| {
                    spi.run(&sql::FORGET_TIER, &args);
                });
            }
        }
        loop {
            let mut entries: Vec<DirtyEntry> = Vec::with_capacity(BATCH);
            board::with(|sched| sched.take_dirty(queue, &mut entries, BATCH));
            if entries.is_empty() {
                break;
            }
            write(&name, &entries);
        }
    }
}

fn write(queue: &str, entries: &[DirtyEntry]) {
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

/// Forgets keys that have been idle for `harvest_fair.prune_after` (rule 8), on the board and in the snapshot.
pub fn prune(scope: u64) {
    for (queue, name) in of_scope(scope) {
        let mut gone = Vec::new();
        board::with(|sched| sched.forget(queue, now(), config::prune_after(), false, &mut gone));
        forget_snapshot(&name, &gone);
    }
}
