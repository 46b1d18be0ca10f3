//! Taking back: expired leases and ended pins, by the janitor or at once by a claim that meets them.

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::catalog::column;
use super::statements as sql;
use super::table::{TaskTable, Tid, TupleLock};
use super::timestamp;
use crate::board::{self, OnCommit, QueueRef, effects, stored_priority};
use crate::names::Priority;
use crate::sfq::{QueueId, Row};
use crate::spi::{self, Statement};

/// Rows taken back in one go; the rest follows at the next claim.
const BATCH: usize = 500;
/// When to look again at a row that somebody else holds (µs).
const HELD_RECHECK: i64 = 100_000;

/// An array of row addresses.
pub fn tids(tids: &[Tid]) -> Option<pg_sys::Datum> {
    let mut elements: Vec<pg_sys::Datum> = tids
        .iter()
        .map(|tid| pg_sys::Datum::from(std::ptr::from_ref(tid)))
        .collect();
    // SAFETY: each element points to a TID that lives through the call, which copies; length and alignment are TID's.
    unsafe {
        let array = pg_sys::construct_array(
            elements.as_mut_ptr(),
            elements.len() as i32,
            pg_sys::TIDOID,
            size_of::<Tid>() as i32,
            false,
            pg_sys::TYPALIGN_SHORT as std::ffi::c_char,
        );
        Some(pg_sys::Datum::from(array))
    }
}

/// Takes back what has run out on a queue by `now`. Costs nothing while nothing has. True if rows were put back.
pub fn reap(table: &TaskTable, queue: QueueId, name: &QueueRef, now: i64) -> bool {
    let (leases, pins) = board::with(|sched| {
        let due = (sched.lease_due(queue) <= now, sched.unpin_due(queue) <= now);
        // Taken over by this transaction; set anew from what is found, or when it aborts.
        if due.0 {
            sched.set_lease_due(queue, i64::MAX);
        }
        if due.1 {
            sched.set_unpin_due(queue, i64::MAX);
        }
        due
    });
    if !leases && !pins {
        return false;
    }
    effects::reaping(name.clone());
    let mut reaped = false;
    if leases {
        let (expired, next) = table.expired_leases(&name.name, now, BATCH);
        let locked = lock(table, &expired);
        // What somebody else holds is about to be settled, and else looked at again.
        let again = (locked.len() < expired.len()).then_some(now.saturating_add(HELD_RECHECK));
        reaped |= put_back(&locked, &sql::REAP, &[Some(timestamp(now))]);
        if !locked.is_empty() {
            effects::on_commit(OnCommit::Expired {
                queue: name.clone(),
                leases: locked.len(),
            });
        }
        if let Some(at) = again.or(next) {
            board::with(|sched| sched.note_lease_due(queue, at));
        }
    }
    if pins {
        let mut ended = Vec::new();
        let mut next: Option<i64> = None;
        table.pins(&name.name, |tid, until| {
            if until <= now && ended.len() < BATCH {
                ended.push(tid);
            } else {
                next = Some(next.map_or(until, |n| n.min(until)));
            }
        });
        let locked = lock(table, &ended);
        let again = (locked.len() < ended.len()).then_some(now.saturating_add(HELD_RECHECK));
        reaped |= put_back(&locked, &sql::UNPIN, &[]);
        if let Some(at) = again.or(next) {
            board::with(|sched| sched.note_unpin_due(queue, at));
        }
    }
    if !reaped {
        // Nothing was taken over: an abort needs no second look.
        effects::reaped_nothing();
    }
    reaped
}

/// A row that [`reap`] would put back.
pub struct PutBack {
    pub tid: Tid,
    pub row: Row,
    pub priority: Priority,
    pub key: String,
    pub band: u8,
    /// The worker that it would still be pinned to.
    pub pinned_to: Option<String>,
}

/// What [`reap`] would put back at `now`, without doing it.
pub fn foresee(table: &TaskTable, queue: QueueId, name: &QueueRef, now: i64) -> Vec<PutBack> {
    let (leases, pins) =
        board::with(|sched| (sched.lease_due(queue) <= now, sched.unpin_due(queue) <= now));
    let mut back = Vec::new();
    let put_back = |tid: Tid, band: u8| {
        let ended = pins
            && table
                .micros(column::STICKY_UNTIL)
                .is_some_and(|at| at <= now);
        PutBack {
            tid,
            row: table.row(),
            priority: stored_priority(table.get(column::PRIORITY).unwrap_or(3)),
            key: table.get(column::FAIRNESS_KEY).unwrap_or_default(),
            band,
            pinned_to: table.get(column::STICKY_WORKER).filter(|_| !ended),
        }
    };
    if leases {
        let mut seen = 0;
        table.leases(&name.name, |row| {
            let ended = row.micros(column::LEASE_UNTIL).is_some_and(|at| at <= now);
            if !ended || seen == BATCH {
                return false;
            }
            seen += 1;
            let attempts = (
                row.get::<i32>(column::ATTEMPT),
                row.get::<i32>(column::MAX_ATTEMPTS),
            );
            if attempts.0 < attempts.1 {
                back.push(put_back(row.tid(), 0));
            }
            true
        });
    }
    if pins {
        let mut seen = 0;
        table.pins(&name.name, |tid, until| {
            if until <= now && seen < BATCH {
                seen += 1;
                let band = u8::from(table.get(column::NEW_START).unwrap_or(false));
                back.push(put_back(tid, band));
            }
        });
    }
    back
}

/// Locks those of the rows that nobody holds.
pub fn lock(table: &TaskTable, rows: &[Tid]) -> Vec<Tid> {
    rows.iter()
        .filter_map(|tid| match table.lock_or_skip(*tid) {
            TupleLock::Locked(tid) => Some(tid),
            TupleLock::Held | TupleLock::Gone => None,
        })
        .collect()
}

/// Updates locked rows; the row trigger notes them for the board.
fn put_back(rows: &[Tid], statement: &'static Statement, more: &[spi::Arg]) -> bool {
    if rows.is_empty() {
        return false;
    }
    let args: Vec<spi::Arg> = std::iter::once(tids(rows))
        .chain(more.iter().copied())
        .collect();
    spi::connect(|spi| {
        spi.run(statement, &args);
    });
    // SAFETY: makes the updated rows visible to the probes of this same call.
    unsafe { pg_sys::CommandCounterIncrement() };
    true
}

/// A datum of a row address that lives as long as `tid`.
pub fn tid(tid: &Tid) -> Option<pg_sys::Datum> {
    Some(pg_sys::Datum::from(std::ptr::from_ref(tid)))
}

/// The arguments' text.
pub fn text(value: Option<&str>) -> spi::Arg {
    value.and_then(|v| v.into_datum())
}
