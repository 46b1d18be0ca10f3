//! Groups (rule 9): when a queue has a separator, a tier orders groups, and each group the keys in it, by the same rules.
//!
//! A group takes a slot among the entries. It is a member of its tier's node, and where an entry keeps its lanes it keeps
//! the node of its keys. Its name is the key record of that name, which also holds its weight; that record's place in the
//! tier is the key of the same name if there is one, which knows its group, else the group itself. A key for whose group
//! there was no slot stands in the tier by itself.

use super::arena::Pool;
use super::lane::Lane;
use super::node::{Head, Node, Rank};
use super::records::{Entry, GROUP, QueueRec};
use super::tree::NIL;
use super::view::GroupView;
use super::{EntryId, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

/// How many keys are looked at for a group's rank. Beyond that the group is taken to be first of its pass, which costs a
/// look at its first key.
const HOPES: usize = 16;

/// The part of a key before its first separator.
pub(super) fn group_name(key: &[u8], separator: u32) -> &[u8] {
    let Some(separator) = char::from_u32(separator).filter(|_| separator != 0) else {
        return key;
    };
    let mut bytes = [0; 4];
    let separator = separator.encode_utf8(&mut bytes).as_bytes();
    let end = key
        .windows(separator.len())
        .position(|window| window == separator);
    key.get(..end.unwrap_or(key.len())).unwrap_or(key)
}

impl Sched<'_> {
    /// The node that an entry is a member of: its group's, else its tier's.
    pub(super) fn node_of(&self, slot: u32) -> Node {
        let entry = self.entries.get(slot);
        if entry.group != NIL {
            return self.entries.get(entry.group).keys();
        }
        let queue = self.queues.get(self.tenants.get(entry.tenant).queue);
        let tier = queue.tiers.get(usize::from(entry.tier));
        tier.map_or_else(Node::default, |tier| tier.node)
    }

    /// Acts on the node that an entry is a member of. What becomes of a group thereby shows in its tier.
    pub(super) fn with_node<R: Default>(
        &mut self,
        slot: u32,
        act: impl FnOnce(&mut Node, &mut Pool<'_, Entry>) -> R,
    ) -> R {
        let group = self.entries.get(slot).group;
        if group == NIL {
            return self.with_tier(slot, act);
        }
        let mut keys = self.entries.get(group).keys();
        let result = act(&mut keys, &mut self.entries);
        self.entries.get_mut(group).set_keys(keys);
        let first = keys.first(&self.entries);
        let head = Head {
            rank: self.hopeful_rank(&keys),
            due: keys.oldest(&self.entries),
        };
        self.with_tier(slot, |tier, entries| {
            let eligible = entries.get(group).member.is_eligible();
            match (eligible, first != NIL) {
                (false, true) => tier.join(entries, group, head),
                (true, true) => tier.rerank(entries, group, head),
                (true, false) => tier.leave(entries, group),
                (false, false) => {}
            }
        });
        result
    }

    /// The smallest rank that the first row of a group may turn out to have. A key whose head is inexact may have no row
    /// at all, and then another one is the group's first: so long as it has not been looked at, all that stand up to the
    /// first exact one may be it.
    pub(super) fn hopeful_rank(&self, keys: &Node) -> Rank {
        let mut rank = Rank::LAST;
        let mut slot = keys.first(&self.entries);
        for _ in 0..HOPES {
            let entry = self.entries.get(slot);
            if slot == NIL {
                return rank;
            }
            rank = rank.min(entry.member.rank);
            if entry.member.pass >= keys.clock() && entry.has_exact_front() {
                return rank;
            }
            slot = keys.next(&self.entries, slot);
        }
        Rank::FIRST
    }

    /// Acts on the node of an entry's tier.
    pub(super) fn with_tier<R: Default>(
        &mut self,
        slot: u32,
        act: impl FnOnce(&mut Node, &mut Pool<'_, Entry>) -> R,
    ) -> R {
        let entry = self.entries.get(slot);
        let queue = self.queues.get_mut(self.tenants.get(entry.tenant).queue);
        match queue.tiers.get_mut(usize::from(entry.tier)) {
            Some(tier) => act(&mut tier.node, &mut self.entries),
            None => R::default(),
        }
    }

    /// Acts on the tier's node if the entry is in a group: with the group's slot.
    pub(super) fn with_group<R>(
        &mut self,
        slot: u32,
        act: impl FnOnce(&mut Node, &mut Pool<'_, Entry>, u32) -> R,
    ) -> Option<R> {
        let group = self.entries.get(slot).group;
        if group == NIL {
            return None;
        }
        self.with_tier(slot, |tier, entries| Some(act(tier, entries, group)))
    }

    /// The weight of an entry's group: the override of the group's name, else 1.
    pub(super) fn group_weight(&self, slot: u32) -> f64 {
        let group = self.entries.get(self.entries.get(slot).group);
        self.weight_in_force(group.tenant, None)
    }

    /// What a charge of `cost` comes to for the entry's group; zero if it has none.
    pub(super) fn group_step(&self, slot: u32, cost: f64) -> Ticks {
        if self.entries.get(slot).group == NIL {
            Ticks::ZERO
        } else {
            Ticks::step(cost, self.group_weight(slot))
        }
    }

    /// The group of a key in a tier, or [`NIL`].
    fn find_group(&self, queue: u32, tier: u8, name: &FairnessKey<'_>) -> u32 {
        let tenant = self.tenants.get(self.find_tenant(queue, name));
        let slot = tenant
            .entries
            .get(usize::from(tier))
            .copied()
            .unwrap_or(NIL);
        let entry = self.entries.get(slot);
        if entry.is(GROUP) { slot } else { entry.group }
    }

    /// The group in a tier that a key unknown there would join; [`NIL`] if there is none.
    pub(super) fn group_to_join(
        &self,
        queue: u32,
        priority: Priority,
        key: &FairnessKey<'_>,
    ) -> u32 {
        let separator = self.queues.get(queue).policy.separator;
        if separator == 0 {
            return NIL;
        }
        let name = FairnessKey::trusted(group_name(key.as_bytes(), separator));
        self.find_group(queue, priority.index() as u8, &name)
    }

    /// Puts an entry that is not eligible into its group, which is made if need be. Without a slot for it the entry
    /// stays in the tier by itself.
    pub(super) fn join_group(&mut self, slot: u32) {
        let entry = *self.entries.get(slot);
        let queue = self.tenants.get(entry.tenant).queue;
        let separator = self.queues.get(queue).policy.separator;
        if separator == 0 || slot == NIL || entry.group != NIL {
            return;
        }
        let key = self.key_text(entry.tenant).into_owned();
        let name = FairnessKey::trusted(group_name(key.as_bytes(), separator));
        let mut group = self.find_group(queue, entry.tier, &name);
        if group == NIL {
            // The key of the group's name must find its group, so it comes along.
            let namesake = self.find_tenant(queue, &name);
            let places = self.tenants.get(namesake).entries;
            let namesake = *places.get(usize::from(entry.tier)).unwrap_or(&NIL);
            if self.entries.get(namesake).member.is_eligible() {
                return;
            }
            group = self.new_group(queue, entry.tier, &name);
            if group != NIL && namesake != NIL && namesake != slot {
                self.enter_group(namesake, group);
            }
        }
        if group != NIL {
            self.enter_group(slot, group);
        }
    }

    fn enter_group(&mut self, slot: u32, group: u32) {
        self.entries.get_mut(group).in_flight += 1;
        self.entries.get_mut(slot).group = group;
    }

    fn new_group(&mut self, queue: u32, tier: u8, name: &FairnessKey<'_>) -> u32 {
        let group = self.header.free_entries.take(&mut self.entries);
        if group == NIL {
            return NIL;
        }
        let Ok(tenant) = self.tenant_or_new(queue, name) else {
            self.header.free_entries.give_back(&mut self.entries, group);
            return NIL;
        };
        let stamp = self.next_stamp();
        let clock = self
            .queues
            .get(queue)
            .tiers
            .get(usize::from(tier))
            .map_or(Ticks::ZERO, |tier| tier.node.clock());
        let entry = self.entries.get_mut(group);
        entry.stamp = stamp;
        entry.tenant = tenant;
        entry.tier = tier;
        entry.set(GROUP, true);
        entry.member.pass = clock;
        let mut keys = Node::default();
        keys.set_clock(clock);
        entry.set_keys(keys);
        let places = &mut self.tenants.get_mut(tenant).entries;
        if let Some(place) = places.get_mut(usize::from(tier))
            && *place == NIL
        {
            *place = group;
        }
        group
    }

    /// Takes an entry that is not eligible out of its group, which goes with its last key.
    pub(super) fn leave_group(&mut self, slot: u32) {
        let group = std::mem::take(&mut self.entries.get_mut(slot).group);
        if group == NIL {
            return;
        }
        let entry = self.entries.get_mut(group);
        entry.in_flight = entry.in_flight.saturating_sub(1);
        if entry.in_flight > 0 {
            return;
        }
        let (tenant, tier) = (entry.tenant, usize::from(entry.tier));
        if let Some(place) = self.tenants.get_mut(tenant).entries.get_mut(tier)
            && *place == group
        {
            *place = NIL;
        }
        self.header.free_entries.give_back(&mut self.entries, group);
        self.release_tenant(tenant);
    }

    /// The separator of a queue changes: every key finds its place anew. Groups start at the tier's clock; the keys of one
    /// group keep their order. O(the queue's keys).
    pub(super) fn regroup(&mut self, queue: u32, separator: u32) {
        let mut slots: Vec<(u32, EntryId)> = Vec::new();
        let mut slot = self.queues.get(queue).entries.first;
        while slot != NIL {
            slots.push((slot, self.entry_id(slot)));
            slot = self.entries.get(slot).siblings.next;
        }
        for &(slot, _) in &slots {
            if self.entries.get(slot).member.is_eligible() {
                self.leave_node(slot);
            }
        }
        for &(slot, _) in &slots {
            let from = self.node_of(slot).clock();
            self.leave_group(slot);
            let to = self.node_of(slot).clock();
            let member = &mut self.entries.get_mut(slot).member;
            member.pass = member.pass.minus(from).plus(to);
            member.last_start = member.last_start.minus(from).plus(to);
        }
        self.queues.get_mut(queue).policy.separator = separator;
        for (slot, id) in slots {
            if self.entry_slot(id) == slot {
                // A new group's clock is the tier's, so the pass means the same there.
                self.join_group(slot);
                self.mark_dirty_slot(slot);
            }
        }
        for tier in &mut self.queues.get_mut(queue).tiers {
            tier.rewrite = 1;
        }
    }

    /// The group of an entry, as an observer sees it.
    pub(super) fn group_view(&self, queue: &QueueRec, slot: u32) -> Option<GroupView<'_>> {
        let group = self.entries.get(slot).group;
        if group == NIL {
            return None;
        }
        let entry = self.entries.get(group);
        let node = &queue.tiers.get(usize::from(entry.tier))?.node;
        let start = if entry.member.is_eligible() {
            node.start_of(&entry.member)
        } else {
            entry.member.pass
        };
        Some(GroupView {
            name: self.key_text(entry.tenant),
            weight: self.group_weight(slot),
            pass: entry.member.pass,
            clock: node.clock(),
            lag: start.minus(node.clock()),
        })
    }

    /// The groups of a tier. O(the queue's keys).
    pub(super) fn groups_of(&self, queue: u32, tier: usize) -> Vec<u32> {
        let mut groups = Vec::new();
        let mut slot = self.queues.get(queue).entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            if entry.group != NIL && usize::from(entry.tier) == tier {
                groups.push(entry.group);
            }
            slot = entry.siblings.next;
        }
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Calls `visit` for each eligible key of a tier, in the order of the groups and of the keys in each, until it says no.
    pub(super) fn each_eligible(
        &self,
        queue: u32,
        priority: Priority,
        mut visit: impl FnMut(u32) -> bool,
    ) {
        let Some(tier) = self.queues.get(queue).tiers.get(priority.index()) else {
            return;
        };
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            if self.entries.get(slot).is(GROUP) {
                let keys = self.entries.get(slot).keys();
                let mut key = keys.first(&self.entries);
                while key != NIL {
                    if !visit(key) {
                        return;
                    }
                    key = keys.next(&self.entries, key);
                }
            } else if !visit(slot) {
                return;
            }
            slot = tier.node.next(&self.entries, slot);
        }
    }
}

impl Entry {
    /// Whether the lane in front has been looked at: its head is a row, as far as the board has been told.
    pub(super) fn has_exact_front(&self) -> bool {
        let front = self.lanes.get(usize::from(self.front));
        front.is_some_and(Lane::is_exact)
    }

    /// The node of a group's keys.
    pub(super) fn keys(&self) -> Node {
        let [Lane { cursor, head, .. }, _] = &self.lanes;
        Node::from_words([cursor.due, cursor.id, head.due])
    }

    pub(super) fn set_keys(&mut self, node: Node) {
        let [Lane { cursor, head, .. }, _] = &mut self.lanes;
        [cursor.due, cursor.id, head.due] = node.to_words();
    }
}
