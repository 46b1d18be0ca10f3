//! What the keeper of a board needs besides claims: rows claimed aside from the order, what a sweep has found, and
//! resets after the tables were emptied.

use super::aging;
use super::pick::{Charge, LaneRef};
use super::records::{GROUP, IDLE};
use super::tree::NIL;
use super::wake::rank_of;
use super::{Accounted, QueueId, QueueState, Refused, Row, RowPos, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

/// How many tasks of a key run, as the board believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningCount {
    pub running: i32,
    /// Grows with each change.
    pub changes: u16,
    /// A claim of the key is under way: counted here, not yet visible in the table.
    pub in_flight: bool,
}

/// A lane that the board believes to hold rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenLane {
    pub lane: LaneRef,
    generation: u32,
}

impl QueueId {
    /// Its number on the board, from 0.
    pub fn index(self) -> usize {
        self.slot.saturating_sub(1) as usize
    }

    /// Tells it apart from the other queues that have had, or will have, this number.
    pub fn stamp(self) -> u32 {
        self.stamp
    }
}

impl Sched<'_> {
    /// A row is claimed aside from the fair order (it was pinned, or asked for by its id): its key joins and is charged,
    /// the clock does not move (rule 3). The charge is kept or undone like that of a pick. Refused to a key at its cap or
    /// without a token, and in a paused queue.
    #[allow(clippy::too_many_arguments)]
    pub fn claim_aside(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
        row: Row,
        now: i64,
    ) -> Result<(Accounted, Charge), Refused> {
        if let Some(refused) = self.refused(queue, key, now) {
            return Err(refused);
        }
        let tenant = self.find_tenant(self.queue_slot(queue), key);
        let cost = self.cost_of(tenant);
        let accounted = self.charge_key(queue, priority, key, cost, row.weight, now)?;
        let slot = self.entry_slot(accounted.entry);
        if slot != NIL {
            let entry = self.entries.get_mut(slot);
            entry.in_flight += 1;
            let tenant = entry.tenant;
            self.start_running(tenant, row.weight, now);
            self.refresh(slot, now);
            self.regate(tenant, now);
        }
        let charge = Charge {
            epoch: accounted.epoch,
            queue,
            entry: accounted.entry,
            band: band.min(1),
            row,
            step: accounted.step,
            group_step: accounted.group_step,
            cost,
            at: now,
        };
        Ok((accounted, charge))
    }

    /// As [`Sched::claim_aside`], for a row of band 0.
    pub fn take_aside(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        row: Row,
        now: i64,
    ) -> Result<(Accounted, Charge), Refused> {
        self.claim_aside(queue, priority, key, 0, row, now)
    }

    /// Where a row stands among those that are claimed aside from the fair order: the smallest goes first (rule 2).
    pub fn turn_of(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
        pos: RowPos,
        now: i64,
    ) -> impl Ord + use<> {
        let policy = self.queues.get(self.queue_slot(queue)).policy;
        let steps = match policy.aging {
            0 => 0,
            aging => aging::steps(pos.due, now, aging),
        };
        let passes = self.passes_of(queue, priority, key);
        let rank = rank_of(pos, band, policy.handicap);
        (i64::from(priority.get()) - steps, priority, passes, rank)
    }

    /// The pass that a key would be charged at now: its own, or the clock if it is behind or unknown. Of a key in a group, the
    /// group's, then its own within.
    pub fn passes_of(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
    ) -> [Ticks; 2] {
        let clock = self.clock(queue, priority);
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return [clock, Ticks::ZERO];
        }
        let slot = self.find_entry(queue, priority, key);
        let group = match slot {
            NIL => self.group_to_join(queue, priority, key),
            slot => self.entries.get(slot).group,
        };
        let pass = |slot: u32, clock| match slot {
            NIL => clock,
            slot => self.entries.get(slot).member.pass.max(clock),
        };
        match group {
            NIL => [pass(slot, clock), Ticks::ZERO],
            group => {
                let within = self.entries.get(group).keys().clock();
                [pass(group, clock), pass(slot, within)]
            }
        }
    }

    /// Whether the board does not know of a pending row at `pos`: the lane is closed, its cursor has passed the place, or it
    /// sleeps until a later row comes due. Then the lane's generation (0 for an unknown key), which tells whether anything has
    /// become visible since.
    pub fn missed(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
        pos: RowPos,
    ) -> Option<u32> {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return None;
        }
        let slot = self.find_entry(queue, priority, key);
        if slot == NIL {
            return Some(0);
        }
        let lane = self.entries.get(slot).lanes.get(usize::from(band.min(1)))?;
        let asleep = pos < lane.head && !lane.head.is_due(self.queues.get(queue).latest);
        (!lane.is_open() || pos < lane.cursor || asleep).then_some(lane.generation)
    }

    /// The open lanes of a queue, but for those of keys with a claim under way. O(the queue's keys).
    pub fn open_lanes(&self, queue: QueueId) -> Vec<OpenLane> {
        let mut open = Vec::new();
        let mut slot = self.queues.get(self.queue_slot(queue)).entries.first;
        while slot != NIL {
            let record = self.entries.get(slot);
            let entry = self.entry_id(slot);
            for (band, lane) in (0u8..).zip(&record.lanes) {
                if lane.is_open() && record.in_flight == 0 {
                    open.push(OpenLane {
                        lane: LaneRef { entry, band },
                        generation: lane.generation,
                    });
                }
            }
            slot = record.siblings.next;
        }
        open
    }

    /// The lane of a key that the board knows.
    pub fn lane_of(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
    ) -> Option<LaneRef> {
        let slot = match self.queue_slot(queue) {
            NIL => NIL,
            queue => self.find_entry(queue, priority, key),
        };
        (slot != NIL).then(|| LaneRef {
            entry: self.entry_id(slot),
            band: band.min(1),
        })
    }

    /// Closes a lane of which no row was seen since [`Sched::open_lanes`] named it: its rows were deleted behind the board's
    /// back. Not if one has become visible since, or a claim is under way. True if it closed.
    pub fn close_unseen(&mut self, open: &OpenLane, now: i64) -> bool {
        let slot = self.entry_slot(open.lane.entry);
        if slot == NIL || self.entries.get(slot).in_flight > 0 {
            return false;
        }
        let lane = self.lane_mut(slot, open.lane.band);
        let closed = lane.is_some_and(|lane| lane.close_unseen(open.generation));
        if closed {
            self.refresh(slot, now);
        }
        closed
    }

    /// Whether a key that is new to the board would find room.
    pub fn has_room(&self) -> bool {
        let usage = self.usage();
        usage.idle > 0 || (usage.entries < usage.max_keys && usage.keys < usage.max_keys)
    }

    /// Drops a loaded queue in which no key has anything to do, if `may_go` lets it. What the board forgets with it can be
    /// loaded again. False if there is none. O(queues and their keys).
    pub fn evict_queue(&mut self, may_go: impl Fn(QueueId) -> bool) -> bool {
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            let id = QueueId {
                slot,
                stamp: queue.stamp,
            };
            if queue.stamp == 0 || queue.queue_state() != QueueState::Loaded || !may_go(id) {
                continue;
            }
            let mut entry = queue.entries.first;
            while entry != NIL && self.entries.get(entry).is(IDLE) {
                entry = self.entries.get(entry).siblings.next;
            }
            if entry == NIL {
                self.drop_queue(id);
                return true;
            }
        }
        false
    }

    /// The running count of a key, to be compared with the table.
    pub fn running_count(&self, queue: QueueId, key: &FairnessKey<'_>) -> RunningCount {
        let tenant = match self.queue_slot(queue) {
            NIL => NIL,
            queue => self.find_tenant(queue, key),
        };
        let in_flight = self.in_flight_of(tenant) > 0;
        let tenant = self.tenants.get(tenant);
        RunningCount {
            running: tenant.running,
            changes: tenant.running_changes,
            in_flight,
        }
    }

    /// The claims of a key that are under way.
    pub(super) fn in_flight_of(&self, tenant: u32) -> u32 {
        let entries = self.tenants.get(tenant).entries.iter();
        let entries = entries.map(|slot| self.entries.get(*slot));
        // A group that stands in the place of the key of its name counts its keys there.
        let own = entries.filter(|entry| !entry.is(GROUP));
        own.map(|entry| entry.in_flight).sum()
    }

    /// Sets a running count that has been read from the table, where the claims that are under way do not show.
    pub fn count_running(&mut self, queue: QueueId, key: &FairnessKey<'_>, in_table: i32) {
        let slot = self.queue_slot(queue);
        if slot != NIL {
            let in_flight = self.in_flight_of(self.find_tenant(slot, key));
            self.set_running(queue, key, in_table.saturating_add_unsigned(in_flight));
        }
    }

    /// The keys in a queue's tiers that run something, as the board believes. O(the queue's keys).
    pub fn running_keys(&self, queue: QueueId) -> Vec<String> {
        let mut running = Vec::new();
        let mut slot = self.queues.get(self.queue_slot(queue)).entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            let tenant = self.tenants.get(entry.tenant);
            if tenant.running != 0 {
                running.push(self.key_text(entry.tenant).as_str().to_owned());
            }
            slot = entry.siblings.next;
        }
        running
    }

    /// Sets a running count that has been read from the table, unless it has changed since `seen` or may just be about
    /// to. True if it was set.
    pub fn recount(
        &mut self,
        queue: QueueId,
        key: &FairnessKey<'_>,
        seen: RunningCount,
        running: i32,
    ) -> bool {
        let unchanged = !seen.in_flight && self.running_count(queue, key) == seen;
        if unchanged {
            self.set_running(queue, key, running);
        }
        unchanged
    }

    /// No task of the scope runs any more: they were truncated.
    pub fn clear_running(&mut self, scope: u64) {
        self.each_tenant_of(scope, |sched, tenant| {
            sched.tenants.get_mut(tenant).set_running(0);
            sched.regate(tenant, sched.latest_of(tenant));
        });
    }

    /// No key of the scope has an override any more: they were truncated.
    pub fn clear_overrides(&mut self, scope: u64) {
        self.each_tenant_of(scope, |sched, tenant| {
            let latest = sched.latest_of(tenant);
            sched.settle_key(tenant, latest);
            sched.tenants.get_mut(tenant).weight = f64::NAN;
            sched.regate(tenant, latest);
        });
    }

    /// O(all keys).
    fn each_tenant_of(&mut self, scope: u64, mut visit: impl FnMut(&mut Self, u32)) {
        for slot in self.tenants.slots(&self.header.free_tenants) {
            let tenant = self.tenants.get(slot);
            if tenant.queue != NIL && self.queues.get(tenant.queue).scope == scope {
                visit(self, slot);
                self.release_tenant(slot);
            }
        }
    }
}
