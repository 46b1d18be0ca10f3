//! What a transaction does to the board, and when.
//!
//! A claim charges its key at once, so that concurrent claims see it, and is taken back if the transaction or the
//! savepoint aborts (rule 5). Everything else waits for the commit: enqueued rows join the board when others can see
//! them, and so do refunds, corrections, running counts and weights.
//!
//! The callbacks must not fail: an error after the commit record would take the whole server down. So they only
//! touch memory that is already there, catch every panic, and leave a board that they could not finish poisoned.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::notes::{NOTES_A_HOLD, Notes};
use super::on_commit::{OnCommit, QueueRef, Wake, apply, wake};
use super::refused::Refused;
use super::seen::SeenPlaces;
use super::wait::{self, Line};
use super::{find_queue, shmem};
use crate::errors::Error;
use crate::names::Priority;
use crate::sfq::{Accounted, Charge, DirtyEntry, Pick, QueueId, QueueState, Row};

type SubId = pg_sys::SubTransactionId;

/// Something that was taken from the board to be written into a table.
pub enum Written {
    /// Tiers of a queue whose snapshot is written anew, and keys that have changed.
    Passes {
        queue: QueueId,
        anew: Vec<Priority>,
        changed: Rc<Vec<DirtyEntry>>,
    },
    /// A refused change, for the audit.
    Refused(Box<Refused>),
}

#[derive(Default)]
struct Effects {
    /// The pick whose outcome is not known yet.
    picking: Option<Pick>,
    claims: Vec<(SubId, Charge)>,
    charges: Vec<(SubId, Accounted)>,
    notes: Notes,
    on_commit: Vec<(SubId, OnCommit)>,
    /// The queue that this session is loading.
    loading: Option<QueueRef>,
    /// Queues that this session has loaded after it had emptied a table of which it did not see what it had held, by the
    /// (sub)transaction of the TRUNCATE.
    to_reload: Vec<(SubId, QueueRef)>,
    /// What it has taken over, or looked at after changes of its own: to be looked at again if it aborts.
    seen: SeenPlaces,
    /// What this transaction writes of the board into the tables: to be written another time if it aborts.
    written: Vec<Written>,
    /// The waiting line that this session stands in.
    waiting: Option<Line>,
}

thread_local! {
    static EFFECTS: RefCell<Effects> = RefCell::new(Effects::default());
}

fn current_subtransaction() -> SubId {
    // SAFETY: reads a counter of this backend's transaction state.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// Now, in microseconds as Postgres counts them.
pub fn now() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// Registers the callbacks; once in each process.
pub fn register() {
    // SAFETY: the callbacks are static functions with the signature that Postgres wants.
    unsafe {
        pg_sys::RegisterXactCallback(Some(at_transaction_end), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(at_savepoint_end), std::ptr::null_mut());
    }
}

/// Remembers a pick until its outcome is known.
pub fn picked(pick: &Pick) {
    let sub = current_subtransaction();
    EFFECTS.with_borrow_mut(|e| {
        e.claims.reserve(1);
        e.picking = Some(*pick);
        e.seen.lane(sub, pick);
    });
}

/// The pick's outcome is on the board; with a charge, it has become a claim.
pub fn settled(charge: Option<&Charge>) {
    EFFECTS.with_borrow_mut(|e| e.picking = None);
    if let Some(charge) = charge {
        claimed(charge);
    }
}

/// Remembers a claim, kept or undone when the transaction ends.
pub fn claimed(charge: &Charge) {
    let sub = current_subtransaction();
    EFFECTS.with_borrow_mut(|e| e.claims.push((sub, *charge)));
}

/// Remembers a charge by hand, undone if the transaction aborts.
pub fn charged(charge: Accounted) {
    let sub = current_subtransaction();
    EFFECTS.with_borrow_mut(|e| e.charges.push((sub, charge)));
}

/// Has the board told at commit.
pub fn on_commit(effect: OnCommit) {
    let sub = current_subtransaction();
    EFFECTS.with_borrow_mut(|e| e.on_commit.push((sub, effect)));
}

/// Notes that a pending row stands in a lane, for the board at commit. Notes survive the abort of their savepoint: a lane
/// without rows closes by itself.
pub fn note(scope: u64, queue: &str, priority: Priority, key: &str, band: u8, row: Row) {
    EFFECTS.with_borrow_mut(|e| e.notes.add(scope, queue, priority, key, band, row));
}

/// Puts this transaction's own notes for a queue on the board before it commits, so that it can claim what it has
/// enqueued. They are put there again at commit, when others can see the rows.
pub fn note_early(queue: QueueId, name: &QueueRef) {
    EFFECTS.with_borrow(|e| e.notes.put_early(queue, name, now()));
}

/// Whether this transaction has done something that the board learns of, or may have to undo, when it ends.
pub fn are_pending() -> bool {
    EFFECTS.with_borrow(|e| !e.is_empty())
}

/// Marks that this session loads a queue.
pub fn loading(queue: QueueRef) {
    EFFECTS.with_borrow_mut(|e| e.loading = Some(queue));
}

/// Marks that the load has come to its end. What a TRUNCATE of this transaction has hidden from it comes back if the
/// transaction aborts; then the queue is loaded again.
pub fn loaded() {
    EFFECTS.with_borrow_mut(|e| {
        let Some(queue) = e.loading.take() else {
            return;
        };
        let emptied = e
            .on_commit
            .iter()
            .filter(|(_, effect)| effect.is_truncate());
        e.to_reload
            .extend(emptied.map(|(sub, _)| (*sub, queue.clone())));
    });
}

/// Marks that this transaction takes over the expired leases or ended pins of a queue.
pub fn reaping(queue: QueueRef) {
    let sub = current_subtransaction();
    EFFECTS.with_borrow_mut(|e| e.seen.reaping(sub, queue));
}

/// Puts right the last [`reaping`]: there was nothing to put back, as far as this transaction sees.
pub fn reaped_nothing() {
    EFFECTS.with_borrow_mut(|e| e.seen.reaped_nothing());
}

/// Has what was taken from the board given back to it if this transaction aborts.
pub fn writing(written: Written) {
    EFFECTS.with_borrow_mut(|e| e.written.push(written));
}

/// Marks that this session stands in a waiting line (or that it no longer does).
pub fn waiting(line: Option<Line>) {
    EFFECTS.with_borrow_mut(|e| e.waiting = line);
}

impl Effects {
    fn is_empty(&self) -> bool {
        self.picking.is_none()
            && self.claims.is_empty()
            && self.charges.is_empty()
            && self.notes.is_empty()
            && self.on_commit.is_empty()
            && self.loading.is_none()
            && self.to_reload.is_empty()
            && self.seen.is_empty()
            && self.written.is_empty()
            && self.waiting.is_none()
    }

    /// The transaction has committed, and others can see its rows.
    fn commit(&mut self) {
        let now = now();
        let mut wakes = Vec::new();
        if !(self.claims.is_empty() && self.on_commit.is_empty()) {
            shmem::with(|sched| {
                for (_, claim) in self.claims.drain(..) {
                    sched.kept(&claim, now);
                }
                for (_, effect) in self.on_commit.drain(..) {
                    apply(sched, effect, now, &mut wakes);
                }
            });
        }
        self.charges.clear();
        self.seen.clear();
        self.to_reload.clear();
        self.written.clear();
        self.notes.put(now, &mut wakes);
        wake(&wakes);
    }

    /// The transaction, or the savepoint `sub` with all that was done in it, has aborted.
    fn abort(&mut self, sub: Option<SubId>) {
        let now = now();
        let is_gone = |s: &SubId| sub.is_none_or(|sub| *s == sub);
        let mut wakes = Vec::new();
        shmem::with(|sched| {
            if let Some(pick) = self.picking.take() {
                sched.retract(&pick, now);
                wakes.push(Wake::One(pick.queue));
            }
            // Backwards, so that each undo meets the board that its claim left.
            for (_, claim) in self.claims.iter().rev().filter(|(s, _)| is_gone(s)) {
                sched.undo(claim, now);
                wakes.push(Wake::One(claim.queue));
            }
            for (_, charge) in self.charges.iter().rev().filter(|(s, _)| is_gone(s)) {
                sched.undo_charge(charge);
            }
            self.seen.abort(sub, sched, now, &mut wakes);
            let hidden = self.to_reload.iter().filter(|(s, _)| is_gone(s));
            for queue in self.loading.iter().chain(hidden.map(|(_, queue)| queue)) {
                if let Some(queue) = find_queue(sched, queue) {
                    sched.set_queue_state(queue, QueueState::Unloaded);
                }
            }
        });
        self.loading = None;
        self.to_reload.retain(|(s, _)| !is_gone(s));
        self.claims.retain(|(s, _)| !is_gone(s));
        self.charges.retain(|(s, _)| !is_gone(s));
        self.on_commit.retain(|(s, _)| !is_gone(s));
        if sub.is_none() {
            self.notes.clear();
            self.written.drain(..).for_each(Written::give_back);
        }
        // A wake-up that reached this session and found it gone goes on to the next in line.
        if let Some(line) = self.waiting.take() {
            shmem::count_waiting(line, -1);
            match line {
                Some(queue) => wakes.push(Wake::One(queue)),
                None => wait::wake_any(),
            }
        }
        wake(&wakes);
    }

    /// A savepoint was released: what was done in it now belongs to its parent.
    fn release(&mut self, sub: SubId, parent: SubId) {
        let claims = self.claims.iter_mut().map(|(s, _)| s);
        let charges = self.charges.iter_mut().map(|(s, _)| s);
        let on_commit = self.on_commit.iter_mut().map(|(s, _)| s);
        let to_reload = self.to_reload.iter_mut().map(|(s, _)| s);
        for s in claims.chain(charges).chain(to_reload).chain(on_commit) {
            if *s == sub {
                *s = parent;
            }
        }
        self.seen.pass_on(sub, parent);
    }
}

impl Written {
    /// Its transaction has aborted.
    fn give_back(self) {
        match self {
            Written::Passes {
                queue,
                anew,
                changed,
            } => {
                for changed in changed.chunks(NOTES_A_HOLD) {
                    shmem::with(|sched| sched.mark_dirty(queue, changed));
                }
                shmem::with(|sched| {
                    for priority in anew {
                        sched.mark_rewrite(queue, priority);
                    }
                });
            }
            Written::Refused(refused) => shmem::refuse(&refused),
        }
    }
}

/// Runs a callback so that nothing can escape from it.
fn shielded(f: impl FnOnce(&mut Effects)) {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        EFFECTS.with(|e| {
            if let Ok(mut e) = e.try_borrow_mut() {
                f(&mut e);
            }
        });
    }));
    if outcome.is_err() {
        // The board is marked as poisoned and will be loaded again; what this transaction remembers is void.
        EFFECTS.with(|e| {
            if let Ok(mut e) = e.try_borrow_mut() {
                *e = Effects::default();
            }
        });
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn at_transaction_end(
    event: pg_sys::XactEvent::Type,
    _arg: *mut std::ffi::c_void,
) {
    let idle = EFFECTS.with(|e| e.try_borrow().map(|e| e.is_empty()).unwrap_or(false));
    if idle {
        return;
    }
    use pg_sys::XactEvent::*;
    match event {
        XACT_EVENT_COMMIT => shielded(Effects::commit),
        XACT_EVENT_ABORT => shielded(|e| e.abort(None)),
        // The only event at which an error is allowed: nothing is prepared yet.
        XACT_EVENT_PRE_PREPARE => {
            // What only hastens the sweep may be lost: it finds the rows, the pins and the leases.
            let lost = |effect: &OnCommit| {
                !matches!(
                    effect,
                    OnCommit::UnpinDue { .. } | OnCommit::LeaseDue { .. }
                )
            };
            let acted = EFFECTS.with_borrow(|e| {
                !(e.claims.is_empty() && e.charges.is_empty())
                    || e.on_commit.iter().any(|(_, effect)| lost(effect))
            });
            if acted {
                Error::Prepare.raise();
            }
        }
        // The sweep finds the rows once the transaction is committed.
        XACT_EVENT_PREPARE => shielded(|e| {
            e.notes.clear();
            e.on_commit.clear();
            e.seen.clear();
        }),
        _ => {}
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn at_savepoint_end(
    event: pg_sys::SubXactEvent::Type,
    sub: SubId,
    parent: SubId,
    _arg: *mut std::ffi::c_void,
) {
    let idle = EFFECTS.with(|e| e.try_borrow().map(|e| e.is_empty()).unwrap_or(false));
    if idle {
        return;
    }
    use pg_sys::SubXactEvent::*;
    match event {
        SUBXACT_EVENT_COMMIT_SUB => shielded(|e| e.release(sub, parent)),
        SUBXACT_EVENT_ABORT_SUB => shielded(|e| {
            e.abort(Some(sub));
            e.seen.pass_on(sub, parent);
        }),
        _ => {}
    }
}
