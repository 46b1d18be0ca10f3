//! A copy of what can be claimed of one queue, made under the board's lock, for a preview to claim from.

use super::arena::{Shape, bytes_needed};
use super::claim::Board;
use super::lane::Lane;
use super::records::Tier;
use super::tree::NIL;
use super::{Error, QueueId, Sched};
use crate::names::{FairnessKey, Priority, QueueName};

/// Keys copied beyond those that a preview of so many rows can reach, for keys that turn out to have no rows.
pub(super) const SPARE: usize = 64;

/// Memory for a copy.
#[derive(Default)]
pub struct CopyBuffer(Vec<u8>);

/// What can be claimed of one queue at an instant, copied out of its board.
pub struct Copied<'a> {
    pub sched: Sched<'a>,
    pub queue: QueueId,
    /// Whether a tier has keys that were not copied.
    cut: [bool; Priority::COUNT],
}

impl Board for Copied<'_> {
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R {
        act(&mut self.sched)
    }
}

impl Copied<'_> {
    /// Whether claims have used up all that was copied of a tier, so that a key which was left out might be next.
    pub(super) fn is_exhausted(&self) -> bool {
        let queue = self.sched.queues.get(self.sched.queue_slot(self.queue));
        let mut untouched = [false; Priority::COUNT];
        let mut slot = queue.entries.first;
        while slot != NIL {
            let entry = self.sched.entries.get(slot);
            if let Some(untouched) = untouched.get_mut(usize::from(entry.tier)) {
                *untouched |= entry.in_flight == 0 && entry.lanes.iter().any(Lane::is_open);
            }
            slot = entry.siblings.next;
        }
        self.cut
            .iter()
            .zip(untouched)
            .any(|(&cut, untouched)| cut && !untouched)
    }
}

impl Sched<'_> {
    /// Copies what can be claimed of a queue, as of the last [`Sched::advance`]: of each tier the first `limit` keys in the
    /// order, and all that are behind the clock. `room`: key slots to spare, for overrides of other keys.
    pub fn extract<'b>(
        &self,
        queue: QueueId,
        limit: usize,
        room: usize,
        buffer: &'b mut CopyBuffer,
    ) -> Result<Copied<'b>, Error> {
        let record = self.queue_slot(queue);
        let source = self.queues.get(record);
        // Of a group, any key may be next.
        let limit = match source.policy.separator {
            0 => limit,
            _ => usize::MAX,
        };
        let mut cut = [false; Priority::COUNT];
        let mut keys: u32 = 0;
        for (tier, cut) in source.tiers.iter().zip(&mut cut) {
            let (count, all) = self.reach(tier, limit);
            keys = keys.saturating_add(count).min(source.eligible);
            *cut = !all;
        }
        if source.policy.separator != 0 {
            // As many groups at the most.
            keys = source.eligible.saturating_mul(2);
        }
        let keys = keys.saturating_add(u32::try_from(room).unwrap_or(u32::MAX));
        let shape = Shape::roomy(1, keys);
        let bytes = bytes_needed(shape).saturating_add(align_of::<u64>());
        buffer.0.clear();
        buffer.0.resize(bytes, 0);
        let start = buffer.0.as_ptr().align_offset(align_of::<u64>());
        let region = buffer.0.get_mut(start..).unwrap_or_default();
        let mut copied = Copied {
            sched: Sched::init_shaped(region, shape)?,
            queue: QueueId {
                slot: NIL,
                stamp: 0,
            },
            cut,
        };
        let name = std::str::from_utf8(source.name()).map(QueueName::parse);
        let Ok(Ok(name)) = name else {
            return Ok(copied);
        };
        let Ok(queue) = copied.sched.open_queue(source.scope, &name) else {
            return Ok(copied);
        };
        copied.queue = queue;
        let target = copied.sched.queues.get_mut(queue.slot);
        target.policy = source.policy;
        target.bucket = source.bucket;
        target.latest = source.latest;
        target.state = source.state;
        for (tier, target) in source.tiers.iter().zip(&mut target.tiers) {
            target.node.set_clock(tier.node.clock());
        }
        for (tier, priority) in source.tiers.iter().zip(Priority::ALL) {
            let (count, _) = self.reach(tier, limit);
            let mut left = count;
            self.each_eligible(record, priority, |slot| {
                if left > 0 {
                    copied.adopt(self, priority, slot);
                }
                left = left.saturating_sub(1);
                left > 0
            });
        }
        Ok(copied)
    }

    /// How many keys of a tier are to be copied, and whether those are all.
    fn reach(&self, tier: &Tier, limit: usize) -> (u32, bool) {
        if limit == usize::MAX {
            return (u32::MAX, true);
        }
        let (mut count, mut behind): (u32, u32) = (0, 0);
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            // All of these start at the clock, so any of them may be next, whatever their number.
            let is_behind = self.entries.get(slot).member.pass < tier.node.clock();
            if !is_behind && (count - behind) as usize >= limit {
                return (count, false);
            }
            count += 1;
            behind += u32::from(is_behind);
            slot = tier.node.next(&self.entries, slot);
        }
        (count, true)
    }
}

impl Copied<'_> {
    fn adopt(&mut self, source: &Sched<'_>, priority: Priority, slot: u32) {
        let entry = source.entries.get(slot);
        let key = source.key_text(entry.tenant);
        let (queue, latest) = (self.queue.slot, source.latest_of(entry.tenant));
        let Ok(copy) = self.sched.entry_or_new(queue, priority, &key, latest) else {
            return;
        };
        self.adopt_tenant(source, entry.tenant, self.sched.entries.get(copy).tenant);
        let target = self.sched.entries.get_mut(copy);
        target.lanes = entry.lanes;
        target.front = entry.front;
        self.stand_alone(entry.group, copy);
        self.adopt_group(source, entry.group, copy);
        self.sched.with_node(copy, |node, entries| {
            node.adopt(entries, copy, &entry.member);
        });
        self.sched.count_eligible(copy, 1);
        self.sched.settle_idle(copy, latest);
    }

    /// Copies what a claim aside from the order of a row of this key would meet, or a row that is put back: the key in all
    /// tiers, and its group in this one. What is eligible has been copied with the others; a key that the board does not know
    /// stays unknown.
    pub(super) fn adopt_key(
        &mut self,
        source: &Sched<'_>,
        from: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
    ) {
        let record = source.queue_slot(from);
        for priority in Priority::ALL {
            self.adopt_sleeping(source, priority, source.find_entry(record, priority, key));
        }
        let tenant = source.find_tenant(record, key);
        if tenant != NIL
            && !source.tenants.get(tenant).has_entries()
            && let Ok(own) = self.sched.tenant_or_new(self.queue.slot, key)
        {
            self.adopt_tenant(source, tenant, own);
        }
        let group = source.group_named(record, priority, key);
        if group != NIL && self.sched.group_named(self.queue.slot, priority, key) == NIL {
            // A group is there as long as it has keys.
            let mut slot = source.queues.get(record).entries.first;
            while slot != NIL && source.entries.get(slot).group != group {
                slot = source.entries.get(slot).siblings.next;
            }
            self.adopt_sleeping(source, priority, slot);
        }
    }

    /// Copies an entry that is not eligible, if there is one.
    fn adopt_sleeping(&mut self, source: &Sched<'_>, priority: Priority, slot: u32) {
        let entry = source.entries.get(slot);
        if slot == NIL || entry.member.is_eligible() {
            return;
        }
        let key = source.key_text(entry.tenant);
        let (queue, latest) = (self.queue.slot, source.latest_of(entry.tenant));
        if self.sched.find_entry(queue, priority, &key) != NIL {
            return;
        }
        let Ok(copy) = self.sched.entry_or_new(queue, priority, &key, latest) else {
            return;
        };
        self.adopt_tenant(source, entry.tenant, self.sched.entries.get(copy).tenant);
        self.stand_alone(entry.group, copy);
        self.adopt_group(source, entry.group, copy);
        let target = self.sched.entries.get_mut(copy);
        target.lanes = entry.lanes;
        target.front = entry.front;
        target.member.pass = entry.member.pass;
        target.member.last_start = entry.member.last_start;
        self.sched.refresh(copy, latest);
    }

    /// Gives a copied key's record what the one in the source holds.
    fn adopt_tenant(&mut self, source: &Sched<'_>, from: u32, own: u32) {
        let tenant = source.tenants.get(from);
        let record = self.sched.tenants.get_mut(own);
        record.weight = tenant.weight;
        record.bucket = tenant.bucket;
        record.average = tenant.average;
        record.own_weight = tenant.own_weight;
        record.running = tenant.running;
    }

    /// An entry for whose group there was no slot stands in its tier by itself, in the copy too.
    fn stand_alone(&mut self, group: u32, copy: u32) {
        if group == NIL && self.sched.entries.get(copy).group != NIL {
            self.sched.leave_group(copy);
        }
    }

    /// Gives the group of a copied entry the state of the one in the source, once.
    fn adopt_group(&mut self, source: &Sched<'_>, group: u32, copy: u32) {
        let own = self.sched.entries.get(copy).group;
        if own == NIL || group == NIL {
            return;
        }
        let theirs = source.entries.get(group);
        let target = self.sched.entries.get_mut(own);
        if !target.keys().is_empty() {
            return;
        }
        let mut keys = target.keys();
        keys.set_clock(theirs.keys().clock());
        target.set_keys(keys);
        target.member.pass = theirs.member.pass;
        target.member.last_start = theirs.member.last_start;
        let weight = source.tenants.get(theirs.tenant).weight;
        let tenant = target.tenant;
        self.sched.tenants.get_mut(tenant).weight = weight;
    }
}
