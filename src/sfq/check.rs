//! The check of all invariants, which the tests run after every step.

use super::Sched;
use super::gate::{Gate, gate_of};
use super::group::group_name;
use super::lane::Lane;
use super::records::{DIRTY, GROUP, IDLE, QueueRec, TIMED};
use super::text::chunks_for;
use super::tree::NIL;
use crate::names::Priority;

impl Sched<'_> {
    /// Every invariant of the whole structure. O(everything); for tests and for doubt.
    pub fn check(&self) -> Result<(), String> {
        let mut entries = 0;
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            if queue.stamp != 0 {
                entries += self
                    .check_queue(slot, queue)
                    .map_err(|fault| format!("queue {slot}: {fault}"))?;
            }
        }
        equal("entries in use", entries, self.header.free_entries.in_use)?;
        self.check_idle()?;
        self.check_tenants()
    }

    pub(super) fn check_queue(&self, slot: u32, queue: &QueueRec) -> Result<u32, String> {
        let (mut count, mut dirty, mut timed) = (0, 0, 0);
        let mut in_tier = [(0, 0, 0); Priority::COUNT];
        let (mut at, mut before) = (queue.entries.first, NIL);
        while at != NIL {
            let entry = self.entries.get(at);
            let tenant = self.tenants.get(entry.tenant);
            let of_tenant = tenant.entries.get(usize::from(entry.tier)).copied();
            if entry.siblings.prev != before || tenant.queue != slot || of_tenant != Some(at) {
                return Err(format!("entry {at} is linked wrongly"));
            }
            if entry.is(DIRTY) && dirty != count {
                return Err(format!("dirty entry {at} stands behind a clean one"));
            }
            self.check_entry(at)
                .map_err(|fault| format!("entry {at}: {fault}"))?;
            count += 1;
            dirty += u32::from(entry.is(DIRTY));
            timed += u32::from(entry.is(TIMED));
            if let Some((all, direct, eligible)) = in_tier.get_mut(usize::from(entry.tier)) {
                *all += 1;
                *direct += u32::from(entry.member.is_eligible() && entry.group == NIL);
                *eligible += u32::from(entry.member.is_eligible());
            }
            before = at;
            at = entry.siblings.next;
        }
        equal("last entry", queue.entries.last, before)?;
        equal("entries", queue.entry_count, count)?;
        equal("dirty entries", queue.dirty_count, dirty)?;
        equal("timers", queue.timers.len(), timed)?;
        queue.timers.check(&self.entries)?;
        let (mut of_queue, mut groups) = (0, 0);
        for (index, (tier, (all, direct, eligible))) in queue.tiers.iter().zip(in_tier).enumerate()
        {
            equal("entries of a tier", tier.entries, all)?;
            tier.node.check(&self.entries)?;
            let mut members = direct;
            for group in self.groups_of(slot, index) {
                groups += 1;
                members += self
                    .check_group(queue, group)
                    .map_err(|fault| format!("group {group}: {fault}"))?;
            }
            equal("members of a tier", tier.node.len(), members)?;
            of_queue += eligible;
        }
        equal("eligible entries", queue.eligible, of_queue)?;
        count += groups;
        Ok(count)
    }

    /// 1 if the group is eligible, else 0.
    fn check_group(&self, queue: &QueueRec, group: u32) -> Result<u32, String> {
        let entry = self.entries.get(group);
        let keys = entry.keys();
        keys.check(&self.entries)?;
        let (mut count, mut eligible, mut at) = (0, 0, queue.entries.first);
        while at != NIL {
            let key = self.entries.get(at);
            if key.group == group {
                count += 1;
                eligible += u32::from(key.member.is_eligible());
                let name = self.key_text(key.tenant);
                let name = group_name(name.as_bytes(), queue.policy.separator);
                let of_group = self.key_text(entry.tenant);
                if key.tier != entry.tier || name != of_group.as_bytes() {
                    return Err(format!("entry {at} belongs elsewhere"));
                }
            }
            at = key.siblings.next;
        }
        equal("keys", entry.in_flight, count)?;
        equal("eligible keys", keys.len(), eligible)?;
        if entry.member.is_eligible() == keys.is_empty() || !entry.is(GROUP) {
            return Err("eligible without keys, or the other way round".into());
        }
        let head = entry.member.head();
        let expected = (self.hopeful_rank(&keys), keys.oldest(&self.entries));
        if !keys.is_empty() && (head.rank, head.due) != expected {
            return Err("does not stand where its first keys do".into());
        }
        Ok(u32::from(entry.member.is_eligible()))
    }

    fn check_entry(&self, slot: u32) -> Result<(), String> {
        let entry = self.entries.get(slot);
        for lane in entry.lanes.iter().filter(|lane| lane.is_open()) {
            if lane.head < lane.cursor {
                return Err(format!(
                    "head {:?} is before cursor {:?}",
                    lane.head, lane.cursor
                ));
            }
        }
        let front = entry.lanes.get(usize::from(entry.front));
        if entry.member.is_eligible() && !front.is_some_and(Lane::is_open) {
            return Err("eligible without an open lane".into());
        }
        if entry.is(IDLE) == entry.has_work() {
            return Err("idle with work, or neither".into());
        }
        if !entry.is(IDLE) && entry.is(TIMED) != (entry.wake != i64::MAX) {
            return Err("timer and wake-up time differ".into());
        }
        let sleeps = entry
            .lanes
            .iter()
            .any(|lane| lane.is_open() && lane.head.due != i64::MAX);
        let tenant = self.tenants.get(entry.tenant);
        let gate = gate_of(self.queues.get(tenant.queue), tenant);
        let asleep = entry.is(TIMED) || matches!(gate, Gate::Capped | Gate::Limited(i64::MAX));
        if sleeps && !asleep && !entry.member.is_eligible() {
            return Err("has open lanes but is neither eligible nor asleep".into());
        }
        if entry.member.is_eligible() && gate != Gate::Open {
            return Err(format!("eligible, but held back: {gate:?}"));
        }
        Ok(())
    }

    fn check_idle(&self) -> Result<(), String> {
        let (mut count, mut at) = (0, self.header.idle.first);
        while at != NIL {
            let entry = self.entries.get(at);
            if !entry.is(IDLE) {
                return Err(format!(
                    "entry {at} stands in the idle list but is not idle"
                ));
            }
            count += 1;
            if count > self.header.idle_count {
                break;
            }
            at = entry.timer.right;
        }
        equal("idle entries", self.header.idle_count, count)
    }

    fn check_tenants(&self) -> Result<(), String> {
        let (mut used, mut chained, mut chunks) = (0, 0, 0);
        for slot in self.tenants.slots(&self.header.free_tenants) {
            let tenant = self.tenants.get(slot);
            if tenant.queue == NIL {
                continue;
            }
            used += 1;
            let parts = chunks_for(tenant.key_len.into());
            if self.chunks_of(tenant) != parts {
                return Err(format!("the key of record {slot} is cut off"));
            }
            chunks += parts as u32;
            if !tenant.has_entries() && tenant.weight.is_nan() && tenant.running == 0 {
                return Err(format!("key record {slot} is kept for nothing"));
            }
        }
        for &head in self.tenant_heads.iter() {
            let mut at = head;
            while at != NIL && chained <= used {
                chained += 1;
                at = self.tenants.get(at).chain;
            }
        }
        equal("chunks in use", self.header.free_chunks.in_use, chunks)?;
        equal("key records in use", self.header.free_tenants.in_use, used)?;
        equal("key records in hash chains", chained, used)
    }
}

fn equal(what: &str, stored: u32, counted: u32) -> Result<(), String> {
    if stored == counted {
        Ok(())
    } else {
        Err(format!("{what}: {stored} stored, {counted} counted"))
    }
}
