//! Pick the next lane, and what came of it. A pick happens under the board's lock; then the claimer, holding no lock,
//! looks at the lane's rows and tries to lock the one it was told to expect; then it reports exactly one outcome:
//!
//! | the claimer | reports |
//! | --- | --- |
//! | locked the expected row | [`Sched::confirm`], and when its transaction ends [`Sched::kept`] or [`Sched::undo`] |
//! | saw another row first | [`Sched::found`] |
//! | saw no row at all | [`Sched::close`] |
//! | could not lock the expected row | [`Sched::hold`] |
//! | lost the row in between, or failed | [`Sched::retract`] |
//!
//! Only a pick whose expected row is *exact* charges the key and moves the clock. An inexact pick is a question: it
//! tells the claimer where to look, and `found` makes the answer the lane's head, to be picked by whoever comes next.
//! Were it charged, then retracted, the clock could meanwhile pass the key by, and the key would lose that charge.

use super::arena::Pool;
use super::lane::{Lane, Next, Row, RowPos, Taken};
use super::node::{Charged, Node, Rank};
use super::records::Entry;
use super::tree::NIL;
use super::wake::{rank_of, survey};
use super::{EntryId, QueueId, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

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
    /// The key's pass before the charge.
    pub start: Ticks,
    /// What was charged; zero if nothing.
    pub step: Ticks,
    /// The tier's clock after the pick.
    pub clock: Ticks,
    /// `start - clock`.
    pub lag: Ticks,
    /// The weight in force.
    pub weight: f64,
    charged: Option<Charged>,
    taken: Taken,
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
}

/// What a search for the next lane came to.
enum Choice {
    Lane(u32, u8),
    /// The clock on the wall has gone back since this entry woke.
    Early(u32),
    Nothing,
}

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
        if slot == NIL || self.is_paused(queue) {
            return None;
        }
        self.advance(queue, now);
        for priority in Priority::ALL {
            loop {
                let choice = match order {
                    Order::Fair => self.choose_fair(slot, priority, now, excluded),
                    Order::Due => self.choose_due(slot, priority, now, excluded),
                };
                match choice {
                    Choice::Lane(entry, band) => {
                        return self.take(queue, priority, entry, band, now, order);
                    }
                    Choice::Early(entry) => self.refresh(entry, now),
                    Choice::Nothing => break,
                }
            }
        }
        None
    }

    /// The first usable lane in the order (pass, claim-order due, id).
    fn choose_fair(
        &self,
        queue: u32,
        priority: Priority,
        now: i64,
        excluded: &[LaneRef],
    ) -> Choice {
        let queue = self.queues.get(queue);
        let Some(tier) = queue.tiers.get(priority.index()) else {
            return Choice::Nothing;
        };
        let mut best: Option<(Ticks, Rank, u32, u8)> = None;
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            let entry = self.entries.get(slot);
            let start = tier.node.start_of(&entry.member);
            if best.is_some_and(|(smallest, ..)| smallest < start) {
                break;
            }
            if !is_due(entry, entry.front, now) {
                return Choice::Early(slot);
            }
            for (band, lane) in (0u8..).zip(&entry.lanes) {
                if lane.is_open() && lane.head.is_due(now) && !self.is_in(excluded, slot, band) {
                    let candidate = (start, rank_of(lane.head, band, queue.handicap), slot, band);
                    best = Some(best.map_or(candidate, |other| candidate.min(other)));
                }
            }
            // Entries stand in the order of pass and front lane, so none that follows can be before this one; except
            // that all passes behind the clock count as the clock.
            if entry.member.pass >= tier.node.clock() && !self.is_in(excluded, slot, entry.front) {
                break;
            }
            slot = tier.node.next(&self.entries, slot);
        }
        best.map_or(Choice::Nothing, |(_, _, slot, band)| {
            Choice::Lane(slot, band)
        })
    }

    /// The usable lane whose head is first by (due, id).
    fn choose_due(&self, queue: u32, priority: Priority, now: i64, excluded: &[LaneRef]) -> Choice {
        let queue = self.queues.get(queue);
        let Some(tier) = queue.tiers.get(priority.index()) else {
            return Choice::Nothing;
        };
        let mut best: Option<(RowPos, u32, u8)> = None;
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            for (band, lane) in (0u8..).zip(&self.entries.get(slot).lanes) {
                if lane.is_open() && lane.head.is_due(now) && !self.is_in(excluded, slot, band) {
                    let candidate = (lane.head, slot, band);
                    best = Some(best.map_or(candidate, |other| candidate.min(other)));
                }
            }
            slot = tier.node.next(&self.entries, slot);
        }
        best.map_or(Choice::Nothing, |(_, slot, band)| Choice::Lane(slot, band))
    }

    fn is_in(&self, lanes: &[LaneRef], slot: u32, band: u8) -> bool {
        !lanes.is_empty()
            && lanes.contains(&LaneRef {
                entry: self.entry_id(slot),
                band,
            })
    }

    fn take(
        &mut self,
        queue: QueueId,
        priority: Priority,
        slot: u32,
        band: u8,
        now: i64,
        order: Order,
    ) -> Option<Pick> {
        self.rebase_if_needed(queue, priority);
        let taken = self.lane_mut(slot, band)?.take();
        let weight = self.weight_in_force(self.entries.get(slot).tenant, taken.own_weight());
        let record = self.queues.get_mut(queue.slot);
        let handicap = record.handicap;
        let node = &mut record.tiers.get_mut(priority.index())?.node;
        let entry = self.entries.get_mut(slot);
        entry.in_flight += 1;
        let start = node.start_of(&entry.member);
        if taken.exact() {
            let tenant = self.tenants.get_mut(entry.tenant);
            tenant.set_running(tenant.running.saturating_add(1));
        }
        let charged = if taken.exact() && order == Order::Fair {
            let rank = survey(entry, handicap, now)
                .0
                .map_or(entry.member.rank, |(rank, _)| rank);
            Some(node.claim(&mut self.entries, slot, Ticks::step(1.0, weight), rank))
        } else {
            None
        };
        let clock = node.clock();
        if charged.is_some() {
            self.mark_dirty_slot(slot);
        }
        self.refresh(slot, now);
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
            start,
            step: charged.map_or(Ticks::ZERO, |charged| charged.step),
            clock,
            lag: start.minus(clock),
            weight,
            charged,
            taken,
        })
    }

    /// The key of a pick, for the caller to look for its rows; `None` if the pick is stale.
    pub fn key_of(&self, pick: &Pick) -> Option<FairnessKey<'_>> {
        let slot = self.live(pick.epoch, pick.entry);
        (slot != NIL)
            .then(|| FairnessKey::trusted(self.tenants.get(self.entries.get(slot).tenant).key()))
    }

    /// The expected row has been locked. `clean`: no row from `pick.cursor` on is held by somebody else. `next`:
    /// what follows it, as of the claimer's snapshot.
    pub fn confirm(&mut self, pick: &Pick, clean: bool, next: Next, now: i64) {
        self.update_lane(pick, now, |lane, taken| lane.confirm(taken, clean, next));
    }

    /// The first row that could be tried is `actual`, not the expected one; `clean` as in [`Sched::confirm`], for the
    /// rows before `actual`. What was charged is taken back.
    pub fn found(&mut self, pick: &Pick, clean: bool, actual: Row, now: i64) {
        self.take_back(pick);
        self.update_lane(pick, now, |lane, taken| lane.found(taken, clean, actual));
    }

    /// No row was seen from `pick.cursor` on. What was charged is taken back.
    pub fn close(&mut self, pick: &Pick, now: i64) {
        self.take_back(pick);
        self.update_lane(pick, now, |lane, taken| lane.close(taken));
    }

    /// The expected row is held by somebody else, so the cursor stays at it; `next` is the row after it that could
    /// be tried. What was charged is taken back.
    pub fn hold(&mut self, pick: &Pick, row: RowPos, next: Next, now: i64) {
        self.take_back(pick);
        self.update_lane(pick, now, |lane, taken| lane.hold(taken, row, next));
    }

    /// The pick came to nothing: everything is given back.
    pub fn retract(&mut self, pick: &Pick, now: i64) {
        self.take_back(pick);
        self.update_lane(pick, now, |lane, taken| lane.give_back(taken));
    }

    /// The claim's transaction has committed.
    pub fn kept(&mut self, charge: &Charge, now: i64) {
        let slot = self.live(charge.epoch, charge.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        self.counters(charge.queue).claims += 1;
        self.settle_idle(slot, now);
    }

    /// The claim's transaction, or its savepoint, has aborted (rule 5): the row is pending again.
    pub fn undo(&mut self, charge: &Charge, now: i64) {
        let slot = self.live(charge.epoch, charge.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        self.change_running(slot, -1);
        if charge.step != Ticks::ZERO {
            self.with_node(slot, |node, entries| node.undo(entries, slot, charge.step));
            self.mark_dirty_slot(slot);
            self.counters(charge.queue).refunds += 1;
        }
        self.note_row(slot, charge.band, charge.row, now);
    }

    /// The slot of an entry that a pick or charge refers to, [`NIL`] if that is stale.
    fn live(&self, epoch: u64, entry: EntryId) -> u32 {
        if epoch == self.epoch() {
            self.entry_slot(entry)
        } else {
            NIL
        }
    }

    fn land(&mut self, slot: u32) {
        let entry = self.entries.get_mut(slot);
        entry.in_flight = entry.in_flight.saturating_sub(1);
    }

    fn take_back(&mut self, pick: &Pick) {
        let slot = self.live(pick.epoch, pick.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        if pick.exact {
            self.change_running(slot, -1);
        }
        if let Some(charged) = pick.charged {
            self.with_node(slot, |node, entries| node.retract(entries, slot, &charged));
            self.mark_dirty_slot(slot);
        }
    }

    fn update_lane(&mut self, pick: &Pick, now: i64, update: impl FnOnce(&mut Lane, &Taken)) {
        let slot = self.live(pick.epoch, pick.entry);
        if let Some(lane) = self.lane_mut(slot, pick.band) {
            update(lane, &pick.taken);
            lane.stay_awake_for_held(now);
            self.refresh(slot, now);
        }
    }

    pub(super) fn with_node<R: Default>(
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

    /// Counts tasks of the entry's key that began (or, below zero, ended) to run.
    fn change_running(&mut self, slot: u32, delta: i32) {
        let tenant = self.tenants.get_mut(self.entries.get(slot).tenant);
        tenant.set_running(tenant.running.saturating_add(delta).max(0));
    }
}

fn is_due(entry: &Entry, band: u8, now: i64) -> bool {
    entry
        .lanes
        .get(usize::from(band))
        .is_some_and(|lane| lane.is_open() && lane.head.is_due(now))
}
