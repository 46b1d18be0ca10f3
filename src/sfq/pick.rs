//! Pick the next lane: a node is searched in the order of its passes, and the key whose lane comes first is charged.
//!
//! Only a pick whose expected row is *exact* charges the key and moves the clock. An inexact pick is a question: it
//! tells the claimer where to look, and [`Sched::found`] makes the answer the lane's head, to be picked by whoever comes
//! next. Were it charged, then retracted, the clock could meanwhile pass the key by, and the key would lose that charge.

use super::aging::Aged;
use super::bucket::Bucket;
use super::lane::{Lane, Row, RowPos, Taken};
use super::node::{Charged, Node, Rank};
use super::records::{Entry, GROUP, Tenant};
use super::tree::NIL;
use super::wake::{rank_of, survey};
use super::{EntryId, QueueId, Sched, Ticks};
use crate::names::Priority;

/// How rows are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Rules 2 to 4.
    Fair,
    /// Fairness is off: by (priority, due, id), keys ignored, nothing charged, no clock moved. O(eligible keys).
    Due,
}

/// A lane that a pick passes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneRef {
    pub entry: EntryId,
    pub band: u8,
}

/// What a claimer is to try, and what was charged for it.
#[derive(Clone, Copy, Debug)]
pub struct Pick {
    pub epoch: u64,
    pub queue: QueueId,
    pub entry: EntryId,
    pub priority: Priority,
    pub band: u8,
    /// The row to lock if `exact`; else no row lies between `cursor` and this place.
    pub expect: RowPos,
    pub exact: bool,
    /// Where to begin to look, inclusive.
    pub cursor: RowPos,
    /// Of the lane at the time of the pick, which is before any snapshot the claimer takes.
    pub generation: u32,
    /// As often had rows become visible before remembered ones.
    pub reorders: u32,
    /// The key's pass before the charge.
    pub start: Ticks,
    /// What was charged; zero if nothing.
    pub step: Ticks,
    /// The cost that was charged; zero if nothing.
    pub cost: f64,
    /// Chosen for its age, out of lag order: the clock has not moved.
    pub aged: bool,
    /// The tier's clock after the pick.
    pub clock: Ticks,
    /// `start - clock`.
    pub lag: Ticks,
    /// The weight in force.
    pub weight: f64,
    /// When it was picked.
    pub at: i64,
    pub(super) charged: Option<Charged>,
    pub(super) group_charged: Option<Charged>,
    pub(super) taken: Taken,
    /// The key's tokens before and after, and the weight that its rate went by.
    pub(super) tokens: [Bucket; 2],
    pub(super) own_weight_before: f32,
}

impl Pick {
    pub fn lane(&self) -> LaneRef {
        LaneRef {
            entry: self.entry,
            band: self.band,
        }
    }

    /// What a confirmed pick of `row` has to remember until its transaction ends.
    pub fn charge(&self, row: Row) -> Charge {
        Charge {
            epoch: self.epoch,
            queue: self.queue,
            entry: self.entry,
            band: self.band,
            row,
            step: self.step,
            group_step: self
                .group_charged
                .map_or(Ticks::ZERO, |charged| charged.step),
            cost: self.cost,
            at: self.at,
        }
    }
}

/// A claim whose transaction has not ended.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    pub epoch: u64,
    pub queue: QueueId,
    pub entry: EntryId,
    pub band: u8,
    pub row: Row,
    pub step: Ticks,
    /// What the key's group was charged; zero if it has none.
    pub group_step: Ticks,
    /// The cost that was charged.
    pub cost: f64,
    /// When it was claimed.
    pub at: i64,
}

impl Charge {
    /// What the key was served: where nothing is charged, each claim counts for 1.
    pub(super) fn served(&self) -> f64 {
        if self.step == Ticks::ZERO {
            1.0
        } else {
            self.cost
        }
    }
}

/// What a search for the next lane came to.
pub(super) enum Choice {
    Lane(u32, u8),
    /// The clock on the wall has gone back since this entry woke.
    Early(u32),
    Nothing,
}

/// What is looked for in a node.
pub(super) struct Search<'a> {
    /// Since when a row must be due at least; `i64::MAX`: any row.
    pub limit: i64,
    pub now: i64,
    pub excluded: &'a [LaneRef],
    pub handicap: i64,
}

/// Start, rank, entry and band of a lane.
pub(super) type Found = (Ticks, Rank, u32, u8);

impl Sched<'_> {
    /// Wakes what is due, chooses the next lane of the queue, moves the clock and charges the key. `excluded` lanes are passed
    /// over, which costs O(their number) for each of them that stands before the chosen one.
    pub fn pick(
        &mut self,
        queue: QueueId,
        now: i64,
        order: Order,
        excluded: &[LaneRef],
    ) -> Option<Pick> {
        let slot = self.queue_slot(queue);
        if slot == NIL {
            return None;
        }
        self.advance(queue, now);
        if !self.queues.get(slot).is_open() {
            return None;
        }
        if order == Order::Fair && self.queues.get(slot).policy.aging > 0 {
            loop {
                match self.choose_aged(slot, now, excluded) {
                    Aged::Lane(priority, entry, band, aged) => {
                        return self.take(queue, priority, entry, band, now, order, aged);
                    }
                    Aged::Early(entry) => self.refresh(entry, now),
                    Aged::Nothing => return None,
                }
            }
        }
        for priority in Priority::ALL {
            loop {
                let choice = match order {
                    Order::Fair => self.choose_in(slot, priority, i64::MAX, now, excluded),
                    Order::Due => self.choose_due(slot, priority, now, excluded),
                };
                match choice {
                    Choice::Lane(entry, band) => {
                        return self.take(queue, priority, entry, band, now, order, false);
                    }
                    Choice::Early(entry) => self.refresh(entry, now),
                    Choice::Nothing => break,
                }
            }
        }
        None
    }

    /// The first usable lane in the order (pass, claim-order due, id) of those whose head is due since `limit` or longer.
    /// With groups: in the order of their passes, then of the passes within.
    pub(super) fn choose_in(
        &self,
        queue: u32,
        priority: Priority,
        limit: i64,
        now: i64,
        excluded: &[LaneRef],
    ) -> Choice {
        let queue = self.queues.get(queue);
        let Some(tier) = queue.tiers.get(priority.index()) else {
            return Choice::Nothing;
        };
        let search = Search {
            limit,
            now,
            excluded,
            handicap: queue.policy.handicap,
        };
        match self.first_usable(&tier.node, &search) {
            Ok(found) => found.map_or(Choice::Nothing, |(_, _, slot, band)| {
                Choice::Lane(slot, band)
            }),
            Err(early) => Choice::Early(early),
        }
    }

    /// As [`Sched::choose_in`], in one node; an error is an entry whose head is not due after all.
    pub(super) fn first_usable(
        &self,
        node: &Node,
        search: &Search<'_>,
    ) -> Result<Option<Found>, u32> {
        let limit = search.limit;
        let clock = node.clock();
        let mut best: Option<Found> = None;
        let mut slot = match limit {
            i64::MAX => node.first(&self.entries),
            _ => node.first_older(&self.entries, limit),
        };
        while slot != NIL {
            let entry = self.entries.get(slot);
            let (start, pass) = (node.start_of(&entry.member), entry.member.pass);
            // A group's rank goes by its first keys, which a limit or an exclusion may pass over.
            let ranked = !entry.is(GROUP) || limit == i64::MAX && search.excluded.is_empty();
            if let Some((smallest, rank, ..)) = best
                // Entries stand in the order of pass and front lane, except that all passes behind the clock count as
                // the clock. So none that follows can be before this one.
                && (smallest < start || ranked && pass >= clock && rank < entry.member.rank)
            {
                break;
            }
            if entry.is(GROUP) {
                if let Some((_, rank, key, band)) = self.first_usable(&entry.keys(), search)? {
                    let lane = self.entries.get(key).lanes.get(usize::from(band));
                    // A head that nobody has looked at may be none, and then the group has another first row.
                    let rank = match lane.is_some_and(Lane::is_exact) {
                        true => rank,
                        false if ranked => rank.min(entry.member.rank),
                        false => Rank::FIRST,
                    };
                    let candidate = (start, rank, key, band);
                    best = Some(best.map_or(candidate, |other| candidate.min(other)));
                }
            } else {
                if !is_due(entry, entry.front, search.now) {
                    return Err(slot);
                }
                for (band, lane) in (0u8..).zip(&entry.lanes) {
                    let head = lane.head;
                    let due = lane.is_open() && head.is_due(search.now) && head.due <= limit;
                    if due && !self.is_in(search.excluded, slot, band) {
                        let candidate = (start, rank_of(head, band, search.handicap), slot, band);
                        best = Some(best.map_or(candidate, |other| candidate.min(other)));
                    }
                }
            }
            if ranked
                && pass >= clock
                && best.is_some_and(|(_, rank, ..)| rank == entry.member.rank)
            {
                break;
            }
            slot = match limit {
                i64::MAX => node.next(&self.entries, slot),
                _ => node.next_older(&self.entries, slot, limit),
            };
        }
        Ok(best)
    }

    /// The usable lane whose head is first by (due, id).
    fn choose_due(&self, queue: u32, priority: Priority, now: i64, excluded: &[LaneRef]) -> Choice {
        let mut best: Option<(RowPos, u32, u8)> = None;
        self.each_eligible(queue, priority, |slot| {
            for (band, lane) in (0u8..).zip(&self.entries.get(slot).lanes) {
                if lane.is_open() && lane.head.is_due(now) && !self.is_in(excluded, slot, band) {
                    let candidate = (lane.head, slot, band);
                    best = Some(best.map_or(candidate, |other| candidate.min(other)));
                }
            }
            true
        });
        best.map_or(Choice::Nothing, |(_, slot, band)| Choice::Lane(slot, band))
    }

    pub(super) fn is_in(&self, lanes: &[LaneRef], slot: u32, band: u8) -> bool {
        !lanes.is_empty()
            && lanes.contains(&LaneRef {
                entry: self.entry_id(slot),
                band,
            })
    }

    #[allow(clippy::too_many_arguments)]
    fn take(
        &mut self,
        queue: QueueId,
        priority: Priority,
        slot: u32,
        band: u8,
        now: i64,
        order: Order,
        aged: bool,
    ) -> Option<Pick> {
        self.rebase_if_needed(queue, priority, slot);
        let taken = self.lane_mut(slot, band)?.take();
        let tenant = self.entries.get(slot).tenant;
        let weight = self.weight_in_force(tenant, taken.own_weight());
        let cost = self.cost_of(tenant);
        let policy = self.queues.get(queue.slot).policy;
        let entry = self.entries.get_mut(slot);
        entry.in_flight += 1;
        let head = survey(entry, &policy, now)
            .front
            .map_or(entry.member.head(), |(head, _)| head);
        let start = self.node_of(slot).start_of(&self.entries.get(slot).member);
        let (mut charged, mut group_charged) = (None, None);
        if taken.exact() && order == Order::Fair {
            let group_step = self.group_step(slot, cost);
            group_charged = self.with_group(slot, |tier, entries, group| {
                if aged {
                    tier.charge(entries, group, group_step)
                } else {
                    let head = entries.get(group).member.head();
                    tier.claim(entries, group, group_step, head)
                }
            });
            let step = Ticks::step(cost, weight);
            charged = self.with_node(slot, |node, entries| {
                Some(if aged {
                    node.charge(entries, slot, step)
                } else {
                    node.claim(entries, slot, step, head)
                })
            });
        }
        let clock = self.node_of(slot).clock();
        if charged.is_some() {
            self.mark_dirty_slot(slot);
        }
        self.refresh(slot, now);
        self.settle_key(tenant, now);
        let Tenant {
            own_weight: own_weight_before,
            bucket: tokens_before,
            ..
        } = *self.tenants.get(tenant);
        if taken.exact() {
            self.start_running(tenant, taken.own_weight(), now);
        }
        let tokens = [tokens_before, self.tenants.get(tenant).bucket];
        if taken.exact() {
            self.regate(tenant, now);
        }
        Some(Pick {
            epoch: self.epoch(),
            queue,
            entry: self.entry_id(slot),
            priority,
            band,
            expect: taken.expect(),
            exact: taken.exact(),
            cursor: taken.cursor(),
            generation: taken.generation(),
            reorders: taken.reorders(),
            start,
            step: charged.map_or(Ticks::ZERO, |charged| charged.step),
            cost: if charged.is_some() { cost } else { 0.0 },
            aged: aged && charged.is_some(),
            clock,
            lag: start.minus(clock),
            weight,
            at: now,
            charged,
            group_charged,
            taken,
            tokens,
            own_weight_before,
        })
    }
}

fn is_due(entry: &Entry, band: u8, now: i64) -> bool {
    entry
        .lanes
        .get(usize::from(band))
        .is_some_and(|lane| lane.is_open() && lane.head.is_due(now))
}
