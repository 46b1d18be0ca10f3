//! What a transaction has told the board of what it saw with its own changes in it. If it aborts, that was never so, and
//! is looked at again.

use pgrx::pg_sys;

use super::find_queue;
use super::on_commit::{QueueRef, Wake};
use crate::sfq::{Pick, Sched};

type SubId = pg_sys::SubTransactionId;

/// Something that the board was told of.
pub enum Place {
    /// A lane, from the pick's cursor on.
    Lane(Pick),
    /// The expired leases and ended pins of a queue.
    Reaping(QueueRef),
}

struct Seen {
    sub: SubId,
    /// Whether this subtransaction may have made the changes; else its parents have, and theirs is the end that counts. (A
    /// claim that waits ends a subtransaction after each look.)
    changed: bool,
    place: Place,
}

/// All of a transaction, in the order in which it saw them.
#[derive(Default)]
pub struct SeenPlaces(Vec<Seen>);

/// Whether this transaction has changed anything, so that it may see the tables otherwise than other sessions do.
pub fn has_changes() -> bool {
    // SAFETY: reads this backend's transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// Whether the innermost subtransaction itself has.
fn has_own_changes() -> bool {
    // SAFETY: reads this backend's transaction state.
    unsafe { pg_sys::GetCurrentTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

impl SeenPlaces {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The lane of a pick is about to be looked at.
    pub fn lane(&mut self, sub: SubId, pick: &Pick) {
        if has_changes() {
            self.0.push(Seen {
                sub,
                changed: has_own_changes(),
                place: Place::Lane(*pick),
            });
        }
    }

    /// Leases and pins of a queue are taken over.
    pub fn reaping(&mut self, sub: SubId, queue: QueueRef) {
        self.0.push(Seen {
            sub,
            changed: true,
            place: Place::Reaping(queue),
        });
    }

    /// At the last [`SeenPlaces::reaping`] there was nothing to put back, as far as this transaction sees.
    pub fn reaped_nothing(&mut self) {
        match self.0.last_mut() {
            Some(seen) if has_changes() => seen.changed = has_own_changes(),
            _ => drop(self.0.pop()),
        }
    }

    /// The transaction, or the subtransaction `sub`, has aborted.
    pub fn abort(
        &mut self,
        sub: Option<SubId>,
        sched: &mut Sched,
        now: i64,
        wakes: &mut Vec<Wake>,
    ) {
        // At the end of all there are no parents left whose changes could still stand.
        let is_void = |seen: &Seen| sub.is_none_or(|sub| seen.sub == sub && seen.changed);
        for seen in self.0.iter().filter(|seen| is_void(seen)) {
            match &seen.place {
                Place::Lane(pick) => {
                    sched.look_again(pick, now);
                    wakes.push(Wake::One(pick.queue));
                }
                Place::Reaping(queue) => {
                    if let Some(queue) = find_queue(sched, queue) {
                        sched.note_lease_due(queue, now);
                        sched.note_unpin_due(queue, now);
                    }
                }
            }
        }
        self.0.retain(|seen| !is_void(seen));
    }

    /// A subtransaction has ended: what is left of it is its parent's, who may have made the changes.
    pub fn pass_on(&mut self, sub: SubId, parent: SubId) {
        for seen in self.0.iter_mut().filter(|seen| seen.sub == sub) {
            (seen.sub, seen.changed) = (parent, true);
        }
    }
}
