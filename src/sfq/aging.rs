//! Ageing (rule 2): the longer a row has been due, the nearer it comes to the front, one priority step at a time. Each
//! member of a tier's order knows the oldest row of its subtree, so that the first one in lag order among those that are
//! old enough is found in O(log K).

use super::Sched;
use super::lane::RowPos;
use super::node::{Members, Node};
use super::pick::{Choice, LaneRef, Search};
use super::records::GROUP;
use super::tree::NIL;
use crate::names::Priority;

impl Node {
    /// Since when the oldest row of all eligible members is due; `i64::MAX` if there is none, or rows do not age.
    pub fn oldest(&self, members: &impl Members) -> i64 {
        oldest_of(members, self.order.root())
    }

    /// The first member in lag order that has a row due since `limit` or longer, or [`NIL`].
    pub fn first_older(&self, members: &impl Members, limit: i64) -> u32 {
        first_under(members, self.order.root(), limit)
    }

    /// The one after `slot`.
    pub fn next_older(&self, members: &impl Members, slot: u32, limit: i64) -> u32 {
        let under = first_under(members, members.member(slot).links.right, limit);
        if under != NIL {
            return under;
        }
        let mut child = slot;
        let mut at = members.member(slot).links.parent;
        while at != NIL {
            let member = members.member(at);
            if member.links.left == child {
                if member.due <= limit {
                    return at;
                }
                let under = first_under(members, member.links.right, limit);
                if under != NIL {
                    return under;
                }
            }
            child = at;
            at = member.links.parent;
        }
        NIL
    }

    /// Since when the oldest of the rows that are due only after `limit` is due. Costs O(log K) for each member that
    /// has an older one, which all have been looked at and found unusable.
    fn oldest_beyond(&self, members: &impl Members, limit: i64) -> i64 {
        let mut best = i64::MAX;
        beyond_under(members, self.order.root(), limit, &mut best);
        best
    }
}

fn oldest_of(members: &impl Members, slot: u32) -> i64 {
    if slot == NIL {
        i64::MAX
    } else {
        members.member(slot).oldest
    }
}

fn first_under(members: &impl Members, root: u32, limit: i64) -> u32 {
    let mut at = root;
    while at != NIL && members.member(at).oldest <= limit {
        let member = members.member(at);
        if member.links.left != NIL && members.member(member.links.left).oldest <= limit {
            at = member.links.left;
        } else if member.due <= limit {
            return at;
        } else {
            at = member.links.right;
        }
    }
    NIL
}

fn beyond_under(members: &impl Members, slot: u32, limit: i64, best: &mut i64) {
    if oldest_of(members, slot) >= *best {
        return;
    }
    let member = members.member(slot);
    if member.due > limit {
        *best = (*best).min(member.due);
    }
    beyond_under(members, member.links.left, limit, best);
    beyond_under(members, member.links.right, limit, best);
}

/// What a search over all tiers came to.
pub(super) enum Aged {
    /// A tier, a lane in it, and whether it is out of lag order.
    Lane(Priority, u32, u8, bool),
    Early(u32),
    Nothing,
}

/// How many steps a row has come nearer that is due since `due`.
pub(super) fn steps(due: i64, now: i64, aging: i64) -> i64 {
    now.saturating_sub(due).max(0) / aging.max(1)
}

impl Sched<'_> {
    /// The first usable lane in the order (effective priority, priority, pass, claim-order due, id).
    pub(super) fn choose_aged(&self, queue: u32, now: i64, excluded: &[LaneRef]) -> Aged {
        let record = self.queues.get(queue);
        let aging = record.policy.aging;
        // Since when the oldest usable row of each tier is due, as far as is known.
        let mut levels = [i64::MAX; Priority::COUNT];
        for (tier, level) in record.tiers.iter().zip(&mut levels) {
            *level = tier.node.oldest(&self.entries);
        }
        loop {
            let nearest = (0..Priority::COUNT)
                .zip(levels)
                .filter(|(_, level)| *level != i64::MAX)
                .min_by_key(|(tier, level)| (*tier as i64 - steps(*level, now, aging), *tier));
            let Some((index, level)) = nearest else {
                return Aged::Nothing;
            };
            let Some(&priority) = Priority::ALL.get(index) else {
                return Aged::Nothing;
            };
            let limit = now.saturating_sub(steps(level, now, aging).saturating_mul(aging));
            match self.choose_in(queue, priority, limit, now, excluded) {
                Choice::Lane(slot, band) => {
                    return match self.is_out_of_order(queue, index, slot, now, excluded) {
                        Ok(aged) => Aged::Lane(priority, slot, band, aged),
                        Err(early) => Aged::Early(early),
                    };
                }
                Choice::Early(slot) => return Aged::Early(slot),
                Choice::Nothing => {
                    levels[index] = self.next_level(queue, index, limit, now, excluded);
                }
            }
        }
    }

    /// Whether a key is chosen although keys of lower priorities, or with smaller passes, could be; or an entry whose
    /// head is not due after all.
    fn is_out_of_order(
        &self,
        queue: u32,
        index: usize,
        slot: u32,
        now: i64,
        excluded: &[LaneRef],
    ) -> Result<bool, u32> {
        for (tier, priority) in Priority::ALL.into_iter().enumerate().take(index + 1) {
            match self.choose_in(queue, priority, i64::MAX, now, excluded) {
                Choice::Lane(first, _) if tier == index => {
                    return self.is_behind(queue, index, first, slot, now, excluded);
                }
                Choice::Lane(..) => return Ok(true),
                Choice::Early(early) => return Err(early),
                Choice::Nothing => {}
            }
        }
        Ok(false)
    }

    /// Whether `slot` starts after `first`, the first of its tier, or its group does; or after the first of its group.
    fn is_behind(
        &self,
        queue: u32,
        index: usize,
        first: u32,
        slot: u32,
        now: i64,
        excluded: &[LaneRef],
    ) -> Result<bool, u32> {
        let record = self.queues.get(queue);
        let Some(tier) = record.tiers.get(index) else {
            return Ok(false);
        };
        let start = |slot: u32| {
            let group = self.entries.get(slot).group;
            let member = if group == NIL { slot } else { group };
            tier.node.start_of(&self.entries.get(member).member)
        };
        if start(first) < start(slot) {
            return Ok(true);
        }
        if self.entries.get(slot).group == NIL {
            return Ok(false);
        }
        let keys = self.node_of(slot);
        let search = Search {
            limit: i64::MAX,
            now,
            excluded,
            handicap: record.policy.handicap,
        };
        let smallest = self.first_usable(&keys, &search)?;
        let own = keys.start_of(&self.entries.get(slot).member);
        Ok(smallest.is_some_and(|(smallest, ..)| smallest < own))
    }

    /// Since when the oldest usable row of a tier is due, after those due since `limit` have all been found unusable.
    fn next_level(
        &self,
        queue: u32,
        index: usize,
        limit: i64,
        now: i64,
        excluded: &[LaneRef],
    ) -> i64 {
        let tier = self.queues.get(queue).tiers.get(index);
        tier.map_or(i64::MAX, |tier| {
            self.next_level_in(&tier.node, limit, now, excluded)
        })
    }

    fn next_level_in(&self, node: &Node, limit: i64, now: i64, excluded: &[LaneRef]) -> i64 {
        let mut next = node.oldest_beyond(&self.entries, limit);
        let mut slot = node.first_older(&self.entries, limit);
        while slot != NIL {
            let entry = self.entries.get(slot);
            if entry.is(GROUP) {
                next = next.min(self.next_level_in(&entry.keys(), limit, now, excluded));
            } else {
                for (band, lane) in (0u8..).zip(&entry.lanes) {
                    let RowPos { due, .. } = lane.head;
                    let usable = lane.is_open() && lane.head.is_due(now) && due > limit;
                    if usable && !self.is_in(excluded, slot, band) {
                        next = next.min(due);
                    }
                }
            }
            slot = node.next_older(&self.entries, slot, limit);
        }
        next
    }
}
