//! `harvest_fair.check()`: where the board and the tables differ.
//!
//! Each look compares a copy of the board with what the tables hold a moment later, so it meets what is under way: rows
//! that a claim has taken and not yet committed, commits of which the board has not been told. What such a look finds is
//! looked at again, and only what stays exactly as it was is a difference. Nothing of ours is locked meanwhile.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::broken;
use super::differences::{Difference, look};
use crate::board::{effects, shmem};
use crate::errors::Error;
use crate::janitor;
use crate::tasks::claim::check_primary;
use crate::tasks::table::TaskTable;

const FUNCTION: &str = "harvest_fair.check";
/// How often something must look different.
const LOOKS: usize = 3;
/// Time between two looks: longer than a session that has committed takes to tell the board.
const PAUSE: Duration = Duration::from_millis(50);

/// `harvest_fair.check()`.
#[pg_extern(sql = false)]
fn check() -> Result<
    TableIterator<
        'static,
        (
            name!(queue, Option<String>),
            name!(priority, Option<i16>),
            name!(fairness_key, Option<String>),
            name!(what, String),
            name!(on_board, Option<String>),
            name!(in_table, Option<String>),
        ),
    >,
    ErrorReport,
> {
    let rows = differences()?.into_iter().map(|found| {
        (
            found.queue,
            found.priority,
            found.key,
            found.what,
            found.on_board,
            found.in_table,
        )
    });
    Ok(TableIterator::new(rows))
}

fn differences() -> Result<Vec<Difference>, Error> {
    check_primary(FUNCTION)?;
    // This session sees its own changes, which the board does not know of until they are committed.
    if effects::are_pending() {
        return Err(Error::Uncommitted { function: FUNCTION });
    }
    let table = TaskTable::open()?;
    janitor::ensure_running(&table.catalog);
    let mut memory = shmem::snapshot_memory().ok_or(Error::NoMemory {
        keys: shmem::max_keys(),
    })?;
    let mut found = look(&table, &mut memory);
    for _ in 1..LOOKS {
        if found.is_empty() {
            break;
        }
        pause();
        let again: HashSet<Difference> = look(&table, &mut memory).into_iter().collect();
        found.retain(|difference| again.contains(difference));
    }
    // What stands in the table needs no second look.
    found.extend(broken::look(&table));
    found.sort();
    Ok(found)
}

fn pause() {
    let until = Instant::now() + PAUSE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        // At least the millisecond that a latch can tell.
        janitor::sleep(left.max(Duration::from_millis(1)));
        pgrx::check_for_interrupts!();
    }
}
