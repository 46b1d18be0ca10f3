//! What survives a restart: restoring the persisted passes, rebasing, and telling the periodic snapshot what changed.

use super::list::OfQueue;
use super::records::{DIRTY, FRESH};
use super::tree::NIL;
use super::view::DirtyEntry;
use super::{Full, QueueId, QueueState, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

impl Sched<'_> {
    /// A persisted row of key_state. What the board already knows of the key from before the load is younger, and goes
    /// before it; what it learnt while loading (rows, charges) is added to it.
    #[allow(clippy::too_many_arguments)]
    pub fn restore(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        pass: Ticks,
        last_start: Ticks,
        now: i64,
    ) -> Result<(), Full> {
        let record = self.queue_slot(queue);
        if record == NIL {
            return Ok(());
        }
        let known = self.find_entry(record, priority, key);
        let slot = self.entry_or_new(record, priority, key, now)?;
        if known != NIL && !self.entries.get(slot).is(FRESH) {
            return Ok(());
        }
        self.with_node(slot, |node, entries| {
            let member = entries.get(slot).member;
            let since = member.pass.minus(node.clock()).max(Ticks::ZERO);
            let entry = entries.get_mut(slot);
            entry.set(FRESH, false);
            entry.member.last_start = last_start;
            node.set_pass(entries, slot, pass.plus(since));
        });
        Ok(())
    }

    /// Ends a load: infers each tier's clock from the restored keys, starts every tier at clock 0, and sets the queue
    /// [`QueueState::Loaded`]. O(the queue's keys).
    ///
    /// A claim sets the clock to its own start, so the clock was at the latest start of all keys, unless that was a charge
    /// out of lag order; and never past the pass of a key with work. A key without a persisted row was at the clock.
    pub fn finish_load(&mut self, queue: QueueId) {
        let slot = self.queue_slot(queue);
        if slot == NIL {
            return;
        }
        for (index, priority) in Priority::ALL.into_iter().enumerate() {
            let clock = self.clock(queue, priority);
            let mut inferred = self.infer_clock(slot, index, NIL);
            for group in self.groups_of(slot, index) {
                inferred |= self.infer_clock(slot, index, group);
            }
            if inferred {
                for group in self.groups_of(slot, index) {
                    self.shift(group, clock);
                }
                self.start_at_zero(slot, priority);
            }
        }
        self.set_queue_state(queue, QueueState::Loaded);
    }

    /// Infers the clock of one group, or of the keys that stand in the tier itself, and starts it at 0. False if nothing
    /// has been restored. The passes of groups are not persisted: after a restart all are level.
    fn infer_clock(&mut self, queue: u32, tier: usize, group: u32) -> bool {
        let mut latest_start = None;
        let mut smallest_pass = None;
        let mut before = None;
        self.each_of_node(queue, tier, group, |sched, slot| {
            before = before.or(Some(sched.node_of(slot).clock()));
            let entry = sched.entries.get(slot);
            if !entry.is(FRESH) {
                latest_start = latest_start.max(Some(entry.member.last_start));
                if entry.member.is_eligible() {
                    let pass = entry.member.pass;
                    smallest_pass =
                        Some(smallest_pass.map_or(pass, |other: Ticks| other.min(pass)));
                }
            }
        });
        let before = before.unwrap_or(Ticks::ZERO);
        let Some(latest_start) = latest_start else {
            self.each_of_node(queue, tier, group, |sched, entry| {
                sched.entries.get_mut(entry).set(FRESH, false);
            });
            return false;
        };
        let clock = smallest_pass.map_or(latest_start, |pass| pass.min(latest_start));
        self.each_of_node(queue, tier, group, |sched, entry| {
            let record = sched.entries.get_mut(entry);
            let origin = if record.is(FRESH) { before } else { clock };
            record.set(FRESH, false);
            let mut pass = record.member.pass.minus(origin);
            if record.member.is_eligible() {
                pass = pass.max(Ticks::ZERO);
            }
            record.member.last_start = record.member.last_start.minus(origin);
            sched.with_node(entry, |node, entries| node.set_pass(entries, entry, pass));
        });
        self.set_keys_clock(group, Ticks::ZERO);
        true
    }

    /// Sets the clock of a group's keys; nothing if there is no group.
    fn set_keys_clock(&mut self, group: u32, clock: Ticks) {
        if group != NIL {
            let entry = self.entries.get_mut(group);
            let mut keys = entry.keys();
            keys.set_clock(clock);
            entry.set_keys(keys);
        }
    }

    /// Starts virtual time anew at 0 once a clock is large, so that no pass ever overflows: that of the tier, and that of
    /// the group of `entry`. No difference between any two times changes. O(the queue's keys), once in 2^60 ticks.
    pub(super) fn rebase_if_needed(&mut self, queue: QueueId, priority: Priority, entry: u32) {
        let slot = self.queue_slot(queue);
        let Some(tier) = self.queues.get(slot).tiers.get(priority.index()) else {
            return;
        };
        let clock = tier.node.clock();
        if clock >= Ticks::REBASE_AT {
            self.each_of_node(slot, priority.index(), NIL, |sched, entry| {
                sched.shift(entry, clock)
            });
            for group in self.groups_of(slot, priority.index()) {
                self.shift(group, clock);
            }
            self.start_at_zero(slot, priority);
            self.counters(queue).rebases += 1;
        }
        let group = self.entries.get(entry).group;
        let clock = self.entries.get(group).keys().clock();
        if group != NIL && clock >= Ticks::REBASE_AT {
            self.each_of_node(slot, priority.index(), group, |sched, entry| {
                sched.shift(entry, clock);
                sched.mark_dirty_slot(entry);
            });
            self.set_keys_clock(group, Ticks::ZERO);
            self.counters(queue).rebases += 1;
        }
    }

    /// In place: the same shift for all leaves the order as it is.
    fn shift(&mut self, slot: u32, clock: Ticks) {
        let member = &mut self.entries.get_mut(slot).member;
        member.pass = member.pass.minus(clock);
        member.last_start = member.last_start.minus(clock);
    }

    fn start_at_zero(&mut self, slot: u32, priority: Priority) {
        if let Some(tier) = self.queues.get_mut(slot).tiers.get_mut(priority.index()) {
            tier.node.set_clock(Ticks::ZERO);
            tier.rewrite = 1;
        }
        self.each_of_tier(slot, priority.index(), |sched, entry| {
            sched.mark_dirty_slot(entry)
        });
    }

    /// Calls `visit` for each key of one group, or with [`NIL`] of those that stand in the tier itself; as the next one.
    fn each_of_node(
        &mut self,
        queue: u32,
        tier: usize,
        group: u32,
        mut visit: impl FnMut(&mut Self, u32),
    ) {
        self.each_of_tier(queue, tier, |sched, slot| {
            if sched.entries.get(slot).group == group {
                visit(sched, slot);
            }
        });
    }

    /// Calls `visit` for each entry of a tier. It may move the entry it is called for to the list's front, not others.
    fn each_of_tier(&mut self, queue: u32, tier: usize, mut visit: impl FnMut(&mut Self, u32)) {
        let mut slot = self.queues.get(queue).entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            let next = entry.siblings.next;
            if usize::from(entry.tier) == tier {
                visit(self, slot);
            }
            slot = next;
        }
    }

    /// Notes that an entry differs from its persisted row: dirty entries stand first in the queue's list.
    pub(super) fn mark_dirty_slot(&mut self, slot: u32) {
        let entry = self.entries.get_mut(slot);
        if slot == NIL || entry.is(DIRTY) {
            return;
        }
        entry.set(DIRTY, true);
        let queue = self.queues.get_mut(self.tenants.get(entry.tenant).queue);
        queue.dirty_count += 1;
        queue.entries.remove::<OfQueue>(&mut self.entries, slot);
        queue.entries.push_front::<OfQueue>(&mut self.entries, slot);
    }

    /// Takes up to `max` entries that have changed since they were last taken. The caller persists them, or hands
    /// them back to [`Sched::mark_dirty`] if that fails.
    pub fn take_dirty(&mut self, queue: QueueId, out: &mut Vec<DirtyEntry>, max: usize) {
        let queue = self.queue_slot(queue);
        for _ in 0..max {
            let slot = self.queues.get(queue).entries.first;
            let entry = *self.entries.get(slot);
            if queue == NIL || slot == NIL || !entry.is(DIRTY) {
                return;
            }
            if let Some(&priority) = Priority::ALL.get(usize::from(entry.tier)) {
                let key = self.key_text(entry.tenant).into_owned();
                let (pass, last_start) = (entry.member.pass, entry.member.last_start);
                out.push(DirtyEntry {
                    priority,
                    key,
                    pass,
                    last_start,
                });
            }
            self.entries.get_mut(slot).set(DIRTY, false);
            let record = self.queues.get_mut(queue);
            record.dirty_count -= 1;
            record.entries.remove::<OfQueue>(&mut self.entries, slot);
            record.entries.push_back::<OfQueue>(&mut self.entries, slot);
        }
    }

    /// Entries that could not be persisted after all.
    pub fn mark_dirty(&mut self, queue: QueueId, entries: &[DirtyEntry]) {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return;
        }
        for entry in entries {
            let slot = self.find_entry(queue, entry.priority, &entry.key);
            self.mark_dirty_slot(slot);
        }
    }

    /// Whether all persisted rows of a tier are out of date, because it was rebased or forgotten: the caller deletes
    /// them before it writes the dirty entries, all of them being among those. Asking clears the flag.
    pub fn take_rewrite(&mut self, queue: QueueId, priority: Priority) -> bool {
        let slot = self.queue_slot(queue);
        match self.queues.get_mut(slot).tiers.get_mut(priority.index()) {
            Some(tier) => std::mem::take(&mut tier.rewrite) != 0,
            None => false,
        }
    }

    /// Sets the flag again, if the rows could not be rewritten after all. O(the queue's keys).
    pub fn mark_rewrite(&mut self, queue: QueueId, priority: Priority) {
        let slot = self.queue_slot(queue);
        if slot == NIL {
            return;
        }
        if let Some(tier) = self.queues.get_mut(slot).tiers.get_mut(priority.index()) {
            tier.rewrite = 1;
        }
        self.each_of_tier(slot, priority.index(), |sched, entry| {
            sched.mark_dirty_slot(entry)
        });
    }
}
