//! The keys of a queue, and a key's entry in each tier: find, create, evict, forget.

use std::hash::{DefaultHasher, Hasher};

use super::list::{Idle, OfQueue};
use super::records::{DIRTY, Entry, FRESH, GROUP, IDLE, TIMED};
use super::tree::NIL;
use super::{EntryId, Full, QueueId, QueueState, Sched, Ticks, chain_of};
use crate::names::{FairnessKey, Priority};

/// How many of the longest idle entries are looked at for one without debt, before one with debt is evicted.
const EVICTION_CHOICE: usize = 16;
/// How many are looked at for one whose eviction frees its key's record too.
const EVICTION_REACH: usize = 1024;

/// What is missing on a full board.
#[derive(Clone, Copy)]
enum Room {
    /// A slot for a key in a tier.
    Entry,
    /// A key's record: one whose key has nothing else to remember.
    Key,
    /// Such a record of a long key.
    Text,
}

impl Sched<'_> {
    fn key_hash(&self, queue: u32, key: &[u8]) -> u32 {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.header.seed);
        hasher.write_u32(queue);
        hasher.write(key);
        hasher.finish() as u32
    }

    /// The slot of an entry id, [`NIL`] if it is stale.
    pub(super) fn entry_slot(&self, entry: EntryId) -> u32 {
        let stamp = self.entries.get(entry.slot).stamp;
        if stamp == entry.stamp && stamp != 0 {
            entry.slot
        } else {
            NIL
        }
    }

    pub(super) fn entry_id(&self, slot: u32) -> EntryId {
        EntryId {
            slot,
            stamp: self.entries.get(slot).stamp,
        }
    }

    pub(super) fn find_tenant(&self, queue: u32, key: &FairnessKey<'_>) -> u32 {
        let hash = self.key_hash(queue, key.as_bytes());
        let index = (u64::from(hash) * self.tenant_heads.len() as u64) >> 32;
        let mut slot = self
            .tenant_heads
            .get(index as usize)
            .copied()
            .unwrap_or(NIL);
        while slot != NIL {
            let tenant = self.tenants.get(slot);
            if tenant.hash == hash && tenant.queue == queue && self.has_key(tenant, key.as_bytes())
            {
                break;
            }
            slot = tenant.chain;
        }
        slot
    }

    pub(super) fn find_entry(&self, queue: u32, priority: Priority, key: &FairnessKey<'_>) -> u32 {
        let tenant = self.tenants.get(self.find_tenant(queue, key));
        let slot = tenant.entries.get(priority.index()).copied().unwrap_or(NIL);
        if self.entries.get(slot).is(GROUP) {
            NIL
        } else {
            slot
        }
    }

    /// Finds the key's record, or creates it, evicting idle entries if need be.
    pub(super) fn tenant_or_new(&mut self, queue: u32, key: &FairnessKey<'_>) -> Result<u32, Full> {
        let found = self.find_tenant(queue, key);
        if found != NIL {
            return Ok(found);
        }
        let mut slot = self.header.free_tenants.take(&mut self.tenants);
        if slot == NIL && self.evict(Room::Key) {
            slot = self.header.free_tenants.take(&mut self.tenants);
        }
        let written = match slot {
            NIL => Err(Full::Keys),
            slot => self.write_key(slot, key.as_bytes()),
        };
        if let Err(full) = written {
            if slot != NIL {
                self.header.free_tenants.give_back(&mut self.tenants, slot);
            }
            self.queues.get_mut(queue).counters.full_rejections += 1;
            return Err(full);
        }
        let hash = self.key_hash(queue, key.as_bytes());
        let tenant = self.tenants.get_mut(slot);
        tenant.queue = queue;
        tenant.hash = hash;
        if let Some(head) = chain_of(self.tenant_heads, hash) {
            tenant.chain = std::mem::replace(head, slot);
        }
        Ok(slot)
    }

    /// Finds the key's entry in a tier, or creates it: idle, at pass V.
    pub(super) fn entry_or_new(
        &mut self,
        queue: u32,
        priority: Priority,
        key: &FairnessKey<'_>,
        now: i64,
    ) -> Result<u32, Full> {
        let found = self.find_entry(queue, priority, key);
        if found != NIL {
            return Ok(found);
        }
        // The slot comes before the key's record: making room may evict entries, and with them records.
        let needs_record = self.find_tenant(queue, key) == NIL
            && self.header.free_tenants.in_use == self.tenants.capacity();
        let mut slot = self.header.free_entries.take(&mut self.entries);
        let room = if needs_record { Room::Key } else { Room::Entry };
        if slot == NIL && self.evict(room) {
            slot = self.header.free_entries.take(&mut self.entries);
        }
        if slot == NIL {
            self.queues.get_mut(queue).counters.full_rejections += 1;
            return Err(Full::Keys);
        }
        let tenant = match self.tenant_or_new(queue, key) {
            Ok(tenant) => tenant,
            Err(full) => {
                self.header.free_entries.give_back(&mut self.entries, slot);
                return Err(full);
            }
        };
        let stamp = self.next_stamp();
        let record = self.queues.get_mut(queue);
        let fresh = record.queue_state() != QueueState::Loaded;
        let entry = self.entries.get_mut(slot);
        entry.tenant = tenant;
        entry.stamp = stamp;
        entry.tier = priority.index() as u8;
        entry.set(FRESH, fresh);
        if let Some(tier) = record.tiers.get_mut(priority.index()) {
            tier.entries += 1;
        }
        record.entry_count += 1;
        record.entries.push_back::<OfQueue>(&mut self.entries, slot);
        // While the group of this name, if there is one, still stands in the place that the key takes.
        self.join_group(slot);
        self.entries.get_mut(slot).member.pass = self.node_of(slot).clock();
        if let Some(place) = self
            .tenants
            .get_mut(tenant)
            .entries
            .get_mut(priority.index())
        {
            *place = slot;
        }
        self.settle_idle(slot, now);
        Ok(slot)
    }

    /// Puts the entry into the idle list or takes it out, as its work demands.
    pub(super) fn settle_idle(&mut self, slot: u32, now: i64) {
        let entry = self.entries.get_mut(slot);
        let idle = !entry.has_work();
        if idle == entry.is(IDLE) {
            return;
        }
        entry.set(IDLE, idle);
        if idle {
            entry.wake = now;
            self.header.idle_count += 1;
            self.header.idle.push_back::<Idle>(&mut self.entries, slot);
        } else {
            entry.wake = i64::MAX;
            self.header.idle_count -= 1;
            self.header.idle.remove::<Idle>(&mut self.entries, slot);
        }
    }

    /// An idle entry's key was still running something until now.
    pub(super) fn renew_idle(&mut self, slot: u32, now: i64) {
        let entry = self.entries.get_mut(slot);
        if entry.is(IDLE) {
            entry.wake = entry.wake.max(now);
            self.header.idle.remove::<Idle>(&mut self.entries, slot);
            self.header.idle.push_back::<Idle>(&mut self.entries, slot);
        }
    }

    /// Makes room for the text of a long key.
    pub(super) fn evict_long_key(&mut self) -> bool {
        self.evict(Room::Text)
    }

    /// Makes room by dropping an idle entry: the longest idle one without debt among the first few, else the longest
    /// idle one.
    fn evict(&mut self, room: Room) -> bool {
        let mut fallback = NIL;
        let mut chosen = NIL;
        let mut slot = self.header.idle.first;
        for seen in 0..EVICTION_REACH {
            if slot == NIL || (seen >= EVICTION_CHOICE && fallback != NIL) {
                break;
            }
            let entry = self.entries.get(slot);
            if self.makes(room, entry) {
                if entry.member.pass <= self.node_of(slot).clock() {
                    chosen = slot;
                    break;
                }
                if fallback == NIL {
                    fallback = slot;
                }
            }
            slot = entry.timer.right;
        }
        let victim = if chosen != NIL { chosen } else { fallback };
        if victim == NIL {
            return false;
        }
        let queue = self.tenants.get(self.entries.get(victim).tenant).queue;
        self.queues.get_mut(queue).counters.evictions += 1;
        self.free_entry(victim);
        true
    }

    /// Keys new to the board that could still come, by eviction at the most. A key that runs something keeps its record,
    /// though its entries may be idle. O(idle entries).
    pub fn free_keys(&self) -> u32 {
        let (mut idle, mut whole) = (0u32, 0u32);
        let mut slot = self.header.idle.first;
        while slot != NIL && idle < self.header.idle_count {
            let entry = self.entries.get(slot);
            idle += 1;
            whole += u32::from(self.is_all_of_its_key(entry));
            slot = entry.timer.right;
        }
        let free = |in_use: u32, evictable: u32| {
            let unused = self.header.max_keys.saturating_sub(in_use);
            unused.saturating_add(evictable)
        };
        let entries = free(self.header.free_entries.in_use, idle);
        entries.min(free(self.header.free_tenants.in_use, whole))
    }

    /// Whether dropping an entry would make such room.
    fn makes(&self, room: Room, entry: &Entry) -> bool {
        match room {
            Room::Entry => true,
            Room::Key => self.is_all_of_its_key(entry),
            Room::Text => {
                self.tenants.get(entry.tenant).more != NIL && self.is_all_of_its_key(entry)
            }
        }
    }

    fn is_all_of_its_key(&self, entry: &Entry) -> bool {
        let tenant = self.tenants.get(entry.tenant);
        let entries = tenant.entries.iter().filter(|&&slot| slot != NIL).count();
        // A group of the key's name that has other keys keeps the record.
        let group = self.entries.get(entry.group);
        let named = entry.group != NIL && group.tenant == entry.tenant && group.in_flight > 1;
        entries == 1 && !named && tenant.weight.is_nan() && tenant.running == 0
    }

    /// Takes an entry out of everything it stands in, and its key's record with it if nothing else needs that.
    pub(super) fn free_entry(&mut self, slot: u32) {
        let entry = *self.entries.get(slot);
        if entry.member.is_eligible() {
            self.leave_node(slot);
        }
        let queue = self.queues.get_mut(self.tenants.get(entry.tenant).queue);
        if let Some(tier) = queue.tiers.get_mut(usize::from(entry.tier)) {
            tier.entries -= 1;
        }
        if entry.is(TIMED) {
            queue.timers.remove(&mut self.entries, slot);
        }
        if entry.is(IDLE) {
            self.header.idle_count -= 1;
            self.header.idle.remove::<Idle>(&mut self.entries, slot);
        }
        queue.entries.remove::<OfQueue>(&mut self.entries, slot);
        queue.entry_count -= 1;
        if entry.is(DIRTY) {
            queue.dirty_count -= 1;
        }
        let tenant = self.tenants.get_mut(entry.tenant);
        if let Some(place) = tenant.entries.get_mut(usize::from(entry.tier)) {
            let group = self.entries.get(entry.group);
            let named = entry.group != NIL && group.tenant == entry.tenant;
            *place = if named { entry.group } else { NIL };
        }
        self.leave_group(slot);
        self.header.free_entries.give_back(&mut self.entries, slot);
        self.release_tenant(entry.tenant);
    }

    /// Frees a key's record if it has nothing to remember: no entry, no override, nothing running.
    pub(super) fn release_tenant(&mut self, slot: u32) {
        let tenant = self.tenants.get(slot);
        if tenant.queue == NIL
            || tenant.has_entries()
            || !tenant.weight.is_nan()
            || tenant.running != 0
        {
            return;
        }
        self.free_tenant(slot);
    }

    fn free_tenant(&mut self, slot: u32) {
        let (hash, next) = (self.tenants.get(slot).hash, self.tenants.get(slot).chain);
        if let Some(head) = chain_of(self.tenant_heads, hash) {
            if *head == slot {
                *head = next;
            } else {
                let mut at = *head;
                while at != NIL && self.tenants.get(at).chain != slot {
                    at = self.tenants.get(at).chain;
                }
                self.tenants.get_mut(at).chain = next;
            }
        }
        self.free_text(slot);
        self.header.free_tenants.give_back(&mut self.tenants, slot);
    }

    /// Frees what is left of a queue whose entries have been freed: overrides and running counts. O(key slots).
    pub(super) fn free_tenants_of(&mut self, queue: u32) {
        for slot in self.tenants.slots(&self.header.free_tenants) {
            let tenant = self.tenants.get(slot);
            if tenant.queue == queue {
                self.free_tenant(slot);
            }
        }
    }

    /// Rule 8: drops the keys that have had nothing pending or running for `idle_for` microseconds, in debt or not, and
    /// says which. A tier that has none left starts again at clock 0. With `preview` nothing is dropped. O(the queue's keys).
    pub fn forget(
        &mut self,
        queue: QueueId,
        now: i64,
        idle_for: i64,
        preview: bool,
        gone: &mut Vec<(Priority, FairnessKey<'static>)>,
    ) -> u64 {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return 0;
        }
        let mut count = 0;
        let mut slot = self.queues.get(queue).entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            let next = entry.siblings.next;
            let tenant = self.tenants.get(entry.tenant);
            let expired = entry.wake.saturating_add(idle_for.max(0)) <= now;
            if entry.is(IDLE) && tenant.running == 0 && expired {
                count += 1;
                if let Some(&priority) = Priority::ALL.get(usize::from(entry.tier)) {
                    gone.push((priority, self.key_text(entry.tenant).into_owned()));
                }
                if !preview {
                    self.free_entry(slot);
                }
            }
            slot = next;
        }
        if !preview {
            for tier in &mut self.queues.get_mut(queue).tiers {
                if tier.entries == 0 && tier.node.clock() != Ticks::ZERO {
                    tier.node.set_clock(Ticks::ZERO);
                    tier.rewrite = 1;
                }
            }
        }
        count
    }
}
