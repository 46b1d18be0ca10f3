//! Which entries are eligible now, and when the sleeping ones wake: the only place where an entry joins its tier's
//! order, leaves it or moves in it because of its lanes.

use super::gate::Gate;
use super::lane::{Lane, Row, RowPos};
use super::node::{Head, Rank};
use super::policy::PolicyRec;
use super::records::{Entry, IDLE, QueueRec, TIMED};
use super::tree::NIL;
use super::{Full, QueueId, Sched};
use crate::names::{FairnessKey, Priority};

/// What became of a noted row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// The key can be claimed now.
    pub eligible: bool,
    /// When the key's next sleeping lane wakes.
    pub wake: Option<i64>,
}

/// The place of a lane's head in claim order. `new_start` rows (band 1) stand back by the handicap.
pub(super) fn rank_of(head: RowPos, band: u8, handicap: i64) -> Rank {
    let behind = if band == 0 { 0 } else { handicap };
    Rank {
        due: head.due.saturating_add(behind),
        id: head.id,
    }
}

/// What an entry's lanes come to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Survey {
    /// The first claimable lane's head, and its band.
    pub front: Option<(Head, u8)>,
    /// When the next sleeping lane wakes; `i64::MAX`: never.
    pub wake: i64,
}

pub(super) fn survey(entry: &Entry, policy: &PolicyRec, now: i64) -> Survey {
    let mut front: Option<(Rank, u8)> = None;
    let mut due = i64::MAX;
    let mut wake = i64::MAX;
    for (band, lane) in (0u8..).zip(&entry.lanes) {
        if !lane.is_open() {
            continue;
        }
        if lane.head.is_due(now) {
            let candidate = (rank_of(lane.head, band, policy.handicap), band);
            front = Some(front.map_or(candidate, |best| best.min(candidate)));
            if policy.aging > 0 {
                due = due.min(lane.head.due);
            }
        } else {
            wake = wake.min(lane.head.due);
        }
    }
    Survey {
        front: front.map(|(rank, band)| (Head { rank, due }, band)),
        wake,
    }
}

impl Sched<'_> {
    /// Recomputes everything that depends on an entry's lanes: eligibility, place in the order, timer, idleness.
    pub(super) fn refresh(&mut self, slot: u32, now: i64) {
        if slot == NIL {
            return;
        }
        let gate = self.settle_key(self.entries.get(slot).tenant, now);
        let entry = self.entries.get(slot);
        let queue = self.queues.get_mut(self.tenants.get(entry.tenant).queue);
        let Survey { front, wake } = survey(entry, &queue.policy, now);
        let (front, wake) = match (front, gate) {
            // Nothing but the end of a task wakes a key at its cap.
            (Some(_), Gate::Capped) => (None, i64::MAX),
            (Some(_), Gate::Limited(until)) => (None, until),
            (front, _) => (front, wake),
        };
        let was_eligible = entry.member.is_eligible();

        if entry.is(TIMED) && entry.wake != wake {
            queue.timers.remove(&mut self.entries, slot);
            self.entries.get_mut(slot).set(TIMED, false);
        }
        self.settle_idle(slot, now);
        let entry = self.entries.get_mut(slot);
        let queue = self.queues.get_mut(self.tenants.get(entry.tenant).queue);
        if wake != i64::MAX && !entry.is(TIMED) {
            entry.wake = wake;
            entry.set(TIMED, true);
            queue.timers.insert(&mut self.entries, slot);
        }
        let entry = self.entries.get_mut(slot);
        if !entry.is(IDLE) {
            entry.wake = wake;
        }
        entry.front = front.map_or(0, |(_, band)| band);
        match (was_eligible, front) {
            (false, Some((head, _))) => {
                self.with_node(slot, |node, entries| node.join(entries, slot, head));
                self.count_eligible(slot, 1);
            }
            (true, Some((head, _))) => {
                // What is known of a key's head counts for the place of its group, too.
                let entry = self.entries.get(slot);
                if entry.member.head() != head || entry.group != NIL {
                    self.with_node(slot, |node, entries| node.rerank(entries, slot, head));
                }
            }
            (true, None) => self.leave_node(slot),
            (false, None) => {}
        }
    }

    /// The entry is no longer eligible.
    pub(super) fn leave_node(&mut self, slot: u32) {
        self.with_node(slot, |node, entries| node.leave(entries, slot));
        self.count_eligible(slot, -1);
    }

    pub(super) fn count_eligible(&mut self, slot: u32, by: i32) {
        let queue = self.tenants.get(self.entries.get(slot).tenant).queue;
        let queue = self.queues.get_mut(queue);
        queue.eligible = queue.eligible.saturating_add_signed(by);
    }

    pub(super) fn lane_mut(&mut self, slot: u32, band: u8) -> Option<&mut Lane> {
        if slot == NIL {
            return None;
        }
        self.entries.get_mut(slot).lanes.get_mut(usize::from(band))
    }

    /// A pending row has become visible: enqueued and committed, put back, or found by load or sweep. Noting a row
    /// twice does no harm. A band above 1 counts as 1.
    pub fn note(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
        row: Row,
        now: i64,
    ) -> Result<Noted, Full> {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return Ok(Noted {
                eligible: false,
                wake: None,
            });
        }
        let slot = self.entry_or_new(queue, priority, key, now)?;
        self.note_row(slot, band.min(1), row, now);
        self.settle_queue(queue, now);
        let entry = self.entries.get(slot);
        let mut wake = entry.wake;
        let closed = self.queues.get(queue).closed_until();
        if entry.member.is_eligible() && closed != i64::MIN {
            wake = closed;
        }
        Ok(Noted {
            eligible: entry.member.is_eligible() && closed == i64::MIN,
            wake: (wake != i64::MAX).then_some(wake),
        })
    }

    pub(super) fn note_row(&mut self, slot: u32, band: u8, row: Row, now: i64) {
        let tenant = self.tenants.get_mut(self.entries.get(slot).tenant);
        if slot != NIL && tenant.own_weight.is_nan() {
            tenant.own_weight = row.weight.unwrap_or(1.0) as f32;
        }
        if let Some(lane) = self.lane_mut(slot, band) {
            lane.note(row);
        }
        self.woken(slot, row.pos, now);
    }

    /// There may be a row at a place of the entry's lanes, where there was none before.
    pub(super) fn woken(&mut self, slot: u32, pos: RowPos, now: i64) {
        if pos.is_due(now) {
            self.wake(slot, now);
        } else {
            self.refresh(slot, now);
        }
    }

    /// A row of the entry has become claimable.
    fn wake(&mut self, slot: u32, now: i64) {
        self.with_node(slot, |node, entries| node.lift(entries, slot));
        self.with_group(slot, |tier, entries, group| tier.lift(entries, group));
        self.refresh(slot, now);
    }

    /// Wakes the keys whose rows have come due, or that have a token again. O(log K) for each.
    pub fn advance(&mut self, queue: QueueId, now: i64) {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return;
        }
        self.settle_queue(queue, now);
        loop {
            let slot = self.queues.get(queue).timers.first(&self.entries);
            if slot == NIL || self.entries.get(slot).wake > now {
                return;
            }
            self.wake(slot, now);
        }
    }

    /// When something can next be picked that cannot be picked now, as of the last [`Sched::advance`], unless something
    /// changes meanwhile: a sleeping key wakes, a key or the queue has a token again.
    pub fn next_timer(&self, queue: QueueId) -> Option<i64> {
        let queue = self.queues.get(self.queue_slot(queue));
        let slot = queue.timers.first(&self.entries);
        let closed = queue.closed_until();
        let next = if closed != i64::MIN && queue.has_members() {
            closed
        } else if slot != NIL {
            self.entries.get(slot).wake.max(closed)
        } else {
            i64::MAX
        };
        (next != i64::MAX).then_some(next)
    }

    /// How many keys are eligible, over all tiers.
    pub(super) fn eligible_keys(&self, queue: QueueId) -> usize {
        self.queues.get(self.queue_slot(queue)).eligible as usize
    }

    /// Whether anything can be picked, as of the last [`Sched::advance`].
    pub fn has_eligible(&self, queue: QueueId) -> bool {
        let queue = self.queues.get(self.queue_slot(queue));
        queue.is_open() && queue.has_members()
    }
}

impl QueueRec {
    fn has_members(&self) -> bool {
        self.tiers.iter().any(|tier| !tier.node.is_empty())
    }
}
