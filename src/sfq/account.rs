//! What is charged other than by a pick: charges from outside, refunds, corrections; and what a charge depends on: the
//! weight in force; and running counts.

use super::node::Charged;
use super::tally::Outcome;
use super::tree::NIL;
use super::{EntryId, Full, QueueId, Sched, Ticks};
use crate::names::{FairnessKey, MAX_COST, Priority, Weight};

/// How much of the difference between a task's run time and its key's average the average takes over.
const AVERAGE_STEP: f64 = 0.25;

/// The result of [`Sched::charge`].
#[derive(Clone, Copy, Debug)]
pub struct Accounted {
    pub epoch: u64,
    pub queue: QueueId,
    pub entry: EntryId,
    /// The weight in force.
    pub weight: f64,
    pub cost: f64,
    pub start: Ticks,
    /// The key's pass after the charge.
    pub pass: Ticks,
    pub step: Ticks,
    /// What its group was charged; zero if it has none.
    pub group_step: Ticks,
    pub clock: Ticks,
    /// `start - clock`.
    pub lag: Ticks,
}

impl Sched<'_> {
    /// 1 for the default key; else the queue's override for the key, else the task's own weight, else 1.
    pub(super) fn weight_in_force(&self, tenant: u32, own: Option<f64>) -> f64 {
        let tenant = self.tenants.get(tenant);
        if tenant.key_len == 0 {
            1.0
        } else if !tenant.weight.is_nan() {
            tenant.weight
        } else {
            own.unwrap_or(1.0)
        }
    }

    /// Charges a key by hand (`fair_charge`), as [`Sched::charge_key`] does.
    pub fn charge(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        cost: f64,
        own_weight: Option<f64>,
        now: i64,
    ) -> Result<Accounted, Full> {
        let accounted = self.charge_key(queue, priority, key, cost, own_weight, now)?;
        self.serve(self.entry_slot(accounted.entry), cost, now);
        Ok(accounted)
    }

    /// Counts what a key was charged, or below zero given back.
    fn serve(&mut self, slot: u32, cost: f64, now: i64) {
        let tenant = self.entries.get(slot).tenant;
        if tenant != NIL {
            self.tenants.get_mut(tenant).tally.serve(cost, now);
        }
    }

    /// A task of the key has ended so.
    pub fn ended(&mut self, queue: QueueId, key: &FairnessKey<'_>, outcome: Outcome) {
        let tenant = match self.queue_slot(queue) {
            NIL => NIL,
            queue => self.find_tenant(queue, key),
        };
        if tenant != NIL {
            self.tenants.get_mut(tenant).tally.ended(outcome);
        }
    }

    /// Charges a key whose task is claimed by other means (`fair_charge`, `fair_claim_by_id`): the key joins, that is starts
    /// at the clock at least, and is charged; the clock does not move, since the task was not chosen by lag.
    pub(super) fn charge_key(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        cost: f64,
        own_weight: Option<f64>,
        now: i64,
    ) -> Result<Accounted, Full> {
        let record = self.queue_slot(queue);
        if record == NIL {
            return Err(Full::Queues);
        }
        let slot = self.entry_or_new(record, priority, key, now)?;
        let weight = self.weight_in_force(self.entries.get(slot).tenant, own_weight);
        let step = Ticks::step(cost, weight);
        let charged: Option<Charged> =
            self.with_node(slot, |node, entries| Some(node.charge(entries, slot, step)));
        let group_step = self.group_step(slot, cost);
        self.with_group(slot, |tier, entries, group| {
            tier.charge(entries, group, group_step)
        });
        self.mark_dirty_slot(slot);
        self.renew_idle(slot, now);
        let (start, clock) = charged.map_or((Ticks::ZERO, Ticks::ZERO), |charged| {
            (charged.start, charged.clock)
        });
        Ok(Accounted {
            epoch: self.epoch(),
            queue,
            entry: self.entry_id(slot),
            weight,
            cost,
            start,
            pass: self.entries.get(slot).member.pass,
            step,
            group_step,
            clock,
            lag: start.minus(clock),
        })
    }

    /// Takes back a charge whose transaction has aborted (rule 5).
    pub fn undo_charge(&mut self, accounted: &Accounted) {
        let slot = self.entry_slot(accounted.entry);
        if slot == NIL || accounted.epoch != self.epoch() {
            return;
        }
        let latest = self.latest_of(self.entries.get(slot).tenant);
        self.serve(slot, -accounted.cost, latest);
        self.take_off(slot, accounted.step, accounted.group_step);
        self.counters(accounted.queue).refunds += 1;
    }

    /// A released task gives back its charge (rule 5) and its tokens, at the weight now in force. By name, since the claim was long ago;
    /// a key that has been forgotten has nothing to give back.
    pub fn refund(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        cost: f64,
        own_weight: Option<f64>,
    ) {
        let slot = self.entry_named(queue, priority, key);
        if slot != NIL {
            let weight = self.weight_in_force(self.entries.get(slot).tenant, own_weight);
            self.take_off(slot, Ticks::step(cost, weight), self.group_step(slot, cost));
            self.counters(queue).refunds += 1;
            let tenant = self.entries.get(slot).tenant;
            let latest = self.latest_of(tenant);
            self.serve(slot, -cost, latest);
            self.return_queue_token(self.tenants.get(tenant).queue, latest);
            self.return_key_token(tenant, latest);
        }
    }

    /// The worker has reported what a task really cost (rule 6): the difference to what was charged, above or below zero.
    pub fn correct_cost(
        &mut self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        delta_cost: f64,
        own_weight: Option<f64>,
    ) {
        let slot = self.entry_named(queue, priority, key);
        if slot == NIL || delta_cost == 0.0 || delta_cost.is_nan() {
            return;
        }
        let weight = self.weight_in_force(self.entries.get(slot).tenant, own_weight);
        let step = Ticks::step(delta_cost.abs(), weight);
        let group_step = self.group_step(slot, delta_cost.abs());
        let latest = self.latest_of(self.entries.get(slot).tenant);
        self.serve(slot, delta_cost, latest);
        if delta_cost < 0.0 {
            self.take_off(slot, step, group_step);
        } else {
            self.with_node(slot, |node, entries| node.add(entries, slot, step));
            self.with_group(slot, |tier, entries, group| {
                tier.add(entries, group, group_step)
            });
            self.mark_dirty_slot(slot);
        }
    }

    pub(super) fn take_off(&mut self, slot: u32, step: Ticks, group_step: Ticks) {
        self.with_node(slot, |node, entries| node.undo(entries, slot, step));
        self.with_group(slot, |tier, entries, group| {
            tier.undo(entries, group, group_step)
        });
        self.mark_dirty_slot(slot);
    }

    fn entry_named(&self, queue: QueueId, priority: Priority, key: &FairnessKey<'_>) -> u32 {
        match self.queue_slot(queue) {
            NIL => NIL,
            queue => self.find_entry(queue, priority, key),
        }
    }

    /// What a task of the key took to run, for the average that a claim is charged when the queue charges by seconds.
    pub fn measured(&mut self, queue: QueueId, key: &FairnessKey<'_>, seconds: f64) {
        let queue = self.queue_slot(queue);
        if queue == NIL || !(0.0..=MAX_COST).contains(&seconds) {
            return;
        }
        let tenant = self.find_tenant(queue, key);
        if tenant == NIL {
            return;
        }
        let tenant = self.tenants.get_mut(tenant);
        let average = f64::from(tenant.average);
        tenant.average = if average.is_nan() {
            seconds as f32
        } else {
            (average + (seconds - average) * AVERAGE_STEP) as f32
        };
    }

    /// What a claim of the key costs.
    pub(super) fn cost_of(&self, tenant: u32) -> f64 {
        let tenant = self.tenants.get(tenant);
        let by_seconds = self.queues.get(tenant.queue).policy.by_seconds != 0;
        if by_seconds && !tenant.average.is_nan() {
            f64::from(tenant.average)
        } else {
            1.0
        }
    }

    /// Tasks of the key that began (above zero) or ended to run, other than by pick and undo, which count for
    /// themselves. The count never falls below zero. If the board is full, a key unknown to it stays unknown.
    pub fn running_delta(&mut self, queue: QueueId, key: &FairnessKey<'_>, delta: i32, now: i64) {
        let running = self.running(queue, key).saturating_add(delta).max(0);
        self.change_running_to(queue, key, running, Some(now));
    }

    /// Sets the count, when it has been read from the table.
    pub fn set_running(&mut self, queue: QueueId, key: &FairnessKey<'_>, running: i32) {
        self.change_running_to(queue, key, running.max(0), None);
    }

    /// Tasks of the key in the state running.
    pub fn running(&self, queue: QueueId, key: &FairnessKey<'_>) -> i32 {
        match self.queue_slot(queue) {
            NIL => 0,
            queue => match self.find_tenant(queue, key) {
                NIL => 0,
                tenant => self.tenants.get(tenant).running,
            },
        }
    }

    fn change_running_to(
        &mut self,
        queue: QueueId,
        key: &FairnessKey<'_>,
        running: i32,
        now: Option<i64>,
    ) {
        let queue = self.queue_slot(queue);
        if queue == NIL || (running == 0 && self.find_tenant(queue, key) == NIL) {
            return;
        }
        let Ok(tenant) = self.tenant_or_new(queue, key) else {
            return;
        };
        self.tenants.get_mut(tenant).set_running(running);
        self.regate(tenant, now.unwrap_or(self.latest_of(tenant)));
        if let Some(now) = now {
            for slot in self.tenants.get(tenant).entries {
                if slot != NIL {
                    self.renew_idle(slot, now);
                }
            }
        }
        self.release_tenant(tenant);
    }

    /// Sets or unsets the queue's weight for a key. It holds from the next claim on, for the whole backlog.
    pub fn set_override(
        &mut self,
        queue: QueueId,
        key: &FairnessKey<'_>,
        weight: Option<Weight>,
    ) -> Result<(), Full> {
        let queue = self.queue_slot(queue);
        if queue == NIL || (weight.is_none() && self.find_tenant(queue, key) == NIL) {
            return Ok(());
        }
        let tenant = self.tenant_or_new(queue, key)?;
        let latest = self.queues.get(queue).latest;
        self.settle_key(tenant, latest);
        self.tenants.get_mut(tenant).weight = weight.map_or(f64::NAN, Weight::get);
        self.regate(tenant, latest);
        self.release_tenant(tenant);
        Ok(())
    }

    /// The queue's weight for a key, if one is set.
    pub fn override_of(&self, queue: QueueId, key: &FairnessKey<'_>) -> Option<f64> {
        let queue = self.queue_slot(queue);
        if queue == NIL {
            return None;
        }
        let tenant = self.find_tenant(queue, key);
        let weight = self.tenants.get(tenant).weight;
        (tenant != NIL && !weight.is_nan()).then_some(weight)
    }
}
