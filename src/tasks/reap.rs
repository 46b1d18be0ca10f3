//! Taking back: expired leases and ended pins, by the janitor or at once by a claim that meets them.

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::catalog::column;
use super::statements as sql;
use super::table::{TaskTable, Tid, TupleLock};
use super::timestamp;
use crate::board::{self, OnCommit, QueueRef, effects, stored_priority};
use crate::errors::quoted;
use crate::names::Priority;
use crate::sfq::{QueueId, Row};
use crate::spi::{self, Statement};
use crate::subtransaction::{refusal, try_out};

/// Rows taken back in one go; the rest follows at the next claim.
const BATCH: usize = 500;
/// When to look again at a row that somebody else holds (µs).
const HELD_RECHECK: i64 = 100_000;
/// When to try a row again that a user's trigger did not let go (µs).
const REFUSED_RECHECK: i64 = 10_000_000;
/// How long it is remembered after that (µs).
const REFUSED_KEPT: i64 = 3_600_000_000;

thread_local! {
    /// Rows that could not be put back, by table and id, and when this process tries again.
    static REFUSED: RefCell<HashMap<(u64, i64), i64>> = RefCell::default();
}

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
    let mut reaped = 0;
    if leases {
        let mut ended = Ended::new(name, now);
        table.leases(&name.name, |row| {
            let until = row.micros(column::LEASE_UNTIL).unwrap_or(i64::MAX);
            ended.add(row, row.tid(), until)
        });
        let leases = ended.put_back(table, &sql::REAP, &[Some(timestamp(now))]);
        if leases > 0 {
            effects::on_commit(OnCommit::Expired {
                queue: name.clone(),
                leases,
            });
        }
        reaped += leases;
        if let Some(at) = ended.next {
            board::with(|sched| sched.note_lease_due(queue, at));
        }
    }
    if pins {
        let mut ended = Ended::new(name, now);
        table.pins(&name.name, |tid, until| {
            // Those that have ended are not the first ones.
            ended.add(table, tid, until);
        });
        reaped += ended.put_back(table, &sql::UNPIN, &[]);
        if let Some(at) = ended.next {
            board::with(|sched| sched.note_unpin_due(queue, at));
        }
    }
    if reaped == 0 {
        // Nothing was taken over: an abort needs no second look.
        effects::reaped_nothing();
    }
    reaped > 0
}

/// Rows of a queue whose lease or pin has ended.
struct Ended<'a> {
    queue: &'a QueueRef,
    now: i64,
    rows: Vec<(Tid, i64)>,
    /// When there is something to put back again.
    next: Option<i64>,
}

impl Ended<'_> {
    fn new(queue: &QueueRef, now: i64) -> Ended<'_> {
        Ended {
            queue,
            now,
            rows: Vec::new(),
            next: None,
        }
    }

    fn again(&mut self, at: i64) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// Takes the row in the table's slot, if its time has come. False if it has not, or if there is no room.
    fn add(&mut self, table: &TaskTable, tid: Tid, until: i64) -> bool {
        if until > self.now || self.rows.len() == BATCH {
            self.again(until);
            return false;
        }
        let id = table.get(column::ID).unwrap_or(i64::MAX);
        match refused_until(self.queue.scope, id).filter(|until| *until > self.now) {
            Some(until) => self.again(until),
            None => self.rows.push((tid, id)),
        }
        true
    }

    /// Updates those that nobody holds; the row trigger notes them for the board. How many.
    fn put_back(
        &mut self,
        table: &TaskTable,
        statement: &'static Statement,
        more: &[spi::Arg],
    ) -> usize {
        let found = self.rows.len();
        self.rows
            .retain_mut(|(tid, _)| match lock_one(table, *tid) {
                Some(newest) => {
                    *tid = newest;
                    true
                }
                None => false,
            });
        if self.rows.len() < found {
            // What somebody else holds is about to be settled, and else looked at again.
            self.again(self.now.saturating_add(HELD_RECHECK));
        }
        if self.rows.is_empty() {
            return 0;
        }
        let all: Vec<Tid> = self.rows.iter().map(|(tid, _)| *tid).collect();
        let mut done = all.len();
        let together = try_out(|| update(&all, statement, more)).map_err(refusal);
        if together.is_err() {
            // One row that a trigger of a user refuses must not keep the others.
            for (row, id) in std::mem::take(&mut self.rows) {
                let one = try_out(|| update(&[row], statement, more)).map_err(refusal);
                if let Err(why) = one {
                    done -= 1;
                    set_aside(self.queue, id, self.now, &why);
                    self.again(self.now.saturating_add(REFUSED_RECHECK));
                }
            }
        }
        // SAFETY: makes the updated rows visible to the probes of this same call.
        unsafe { pg_sys::CommandCounterIncrement() };
        done
    }
}

fn refused_until(scope: u64, id: i64) -> Option<i64> {
    REFUSED.with_borrow(|refused| refused.get(&(scope, id)).copied())
}

/// When the first lease of a queue ends, or is looked at again.
pub fn next_lease(table: &TaskTable, queue: &str) -> Option<i64> {
    let mut next: Option<i64> = None;
    table.leases(queue, |row| {
        let until = row.micros(column::LEASE_UNTIL).unwrap_or(i64::MAX);
        let again = again_at(row, until);
        next = Some(next.map_or(again, |next| next.min(again)));
        again > until
    });
    next
}

/// When the first pin of a queue ends, or is looked at again.
pub fn next_pin(table: &TaskTable, queue: &str) -> Option<i64> {
    let mut next: Option<i64> = None;
    table.pins(queue, |_, until| {
        let again = again_at(table, until);
        next = Some(next.map_or(again, |next| next.min(again)));
    });
    next
}

/// When to look at the row in the table's slot, whose time comes then.
fn again_at(table: &TaskTable, until: i64) -> i64 {
    let id = table.get(column::ID).unwrap_or(i64::MAX);
    refused_until(table.catalog.scope(), id).map_or(until, |at| at.max(until))
}

/// Remembers that a row cannot be put back, and says so once.
fn set_aside(queue: &QueueRef, id: i64, now: i64, why: &str) {
    let until = now.saturating_add(REFUSED_RECHECK);
    let is_new = REFUSED.with_borrow_mut(|refused| {
        // Those that nobody has met for so long have ended otherwise.
        refused.retain(|_, until| until.saturating_add(REFUSED_KEPT) > now);
        refused.insert((queue.scope, id), until).is_none()
    });
    if is_new {
        ErrorReport::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            format!(
                "task {id} of queue {} cannot be taken back: {why}",
                quoted(&queue.name)
            ),
            "harvest_fair",
        )
        .set_detail("It is tried again every 10 seconds. The other tasks go on.")
        .set_hint("Look for a trigger or constraint of yours on harvest_fair.task.")
        .report(PgLogLevel::WARNING);
    }
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

/// Locks a row, if nobody holds it.
fn lock_one(table: &TaskTable, tid: Tid) -> Option<Tid> {
    match table.lock_or_skip(tid) {
        TupleLock::Locked(tid) => Some(tid),
        TupleLock::Held | TupleLock::Gone => None,
    }
}

/// Locks those of the rows that nobody holds.
pub fn lock(table: &TaskTable, rows: &[Tid]) -> Vec<Tid> {
    rows.iter()
        .filter_map(|tid| lock_one(table, *tid))
        .collect()
}

fn update(rows: &[Tid], statement: &'static Statement, more: &[spi::Arg]) {
    let args: Vec<spi::Arg> = std::iter::once(tids(rows))
        .chain(more.iter().copied())
        .collect();
    spi::connect(|spi| {
        spi.run(statement, &args);
    });
}

/// A datum of a row address that lives as long as `tid`.
pub fn tid(tid: &Tid) -> Option<pg_sys::Datum> {
    Some(pg_sys::Datum::from(std::ptr::from_ref(tid)))
}

/// The arguments' text.
pub fn text(value: Option<&str>) -> spi::Arg {
    value.and_then(|v| v.into_datum())
}
