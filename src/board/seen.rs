//! What a transaction has told the board of what it saw with its own changes in it. If it aborts, that was never so, and
//! is looked at again.

use std::collections::HashMap;

use pgrx::pg_sys;

use super::find_queue;
use super::on_commit::{QueueRef, Wake};
use crate::sfq::{LaneRef, Pick, QueueId, RowPos, Sched};

type SubId = pg_sys::SubTransactionId;

/// A lane as it was seen.
struct SeenLane {
    epoch: u64,
    queue: QueueId,
    /// The first row that picks were told to look for.
    from: RowPos,
    /// Whether the subtransaction that saw it may have made the changes; else its parents have, and theirs is the end that
    /// counts. (A claim that waits ends a subtransaction after each look.)
    changed: bool,
}

/// The leases and pins of a queue as they were seen.
struct SeenReaping {
    sub: SubId,
    changed: bool,
    queue: QueueRef,
}

/// All of a transaction.
#[derive(Default)]
pub struct SeenPlaces {
    /// Once each, however many claims a transaction makes.
    lanes: HashMap<(SubId, LaneRef), SeenLane>,
    reaping: Vec<SeenReaping>,
}

/// Whether this transaction has changed anything, so that it may see the tables otherwise than other sessions do.
fn has_changes() -> bool {
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
        self.lanes.is_empty() && self.reaping.is_empty()
    }

    pub fn clear(&mut self) {
        self.lanes.clear();
        self.reaping.clear();
    }

    /// The lane of a pick is about to be looked at.
    pub fn lane(&mut self, sub: SubId, pick: &Pick) {
        if has_changes() {
            let seen = SeenLane {
                epoch: pick.epoch,
                queue: pick.queue,
                from: pick.cursor,
                changed: has_own_changes(),
            };
            self.merge(sub, pick.lane(), seen);
        }
    }

    fn merge(&mut self, sub: SubId, lane: LaneRef, seen: SeenLane) {
        let known = self.lanes.entry((sub, lane)).or_insert(SeenLane { ..seen });
        known.from = known.from.min(seen.from);
        known.changed |= seen.changed;
    }

    /// Leases and pins of a queue are taken over.
    pub fn reaping(&mut self, sub: SubId, queue: QueueRef) {
        self.reaping.push(SeenReaping {
            sub,
            changed: true,
            queue,
        });
    }

    /// At the last [`SeenPlaces::reaping`] there was nothing to put back, as far as this transaction sees.
    pub fn reaped_nothing(&mut self) {
        match self.reaping.last_mut() {
            Some(seen) if has_changes() => seen.changed = has_own_changes(),
            _ => drop(self.reaping.pop()),
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
        let is_void = |of: SubId, changed: bool| sub.is_none_or(|sub| of == sub && changed);
        self.lanes.retain(|(of, lane), seen| {
            let void = is_void(*of, seen.changed);
            if void {
                sched.look_again(seen.epoch, *lane, seen.from, now);
                wakes.push(Wake::One(seen.queue));
            }
            !void
        });
        self.reaping.retain(|seen| {
            let void = is_void(seen.sub, seen.changed);
            if let Some(queue) = find_queue(sched, &seen.queue).filter(|_| void) {
                sched.note_lease_due(queue, now);
                sched.note_unpin_due(queue, now);
            }
            !void
        });
    }

    /// A subtransaction has ended: what is left of it is its parent's, who may have made the changes.
    pub fn pass_on(&mut self, sub: SubId, parent: SubId) {
        for seen in self.reaping.iter_mut().filter(|seen| seen.sub == sub) {
            (seen.sub, seen.changed) = (parent, true);
        }
        // A claim that waits comes by here again and again.
        self.reaping
            .dedup_by(|a, b| (a.sub, a.changed, &a.queue) == (b.sub, b.changed, &b.queue));
        let left: Vec<_> = self.lanes.extract_if(|(of, _), _| *of == sub).collect();
        for ((_, lane), seen) in left {
            let changed = true;
            self.merge(parent, lane, SeenLane { changed, ..seen });
        }
    }
}
