//! Caps and rate limits: which keys and queues are held back though they have rows that are due. A key that is held back
//! leaves the orders of all its tiers, so it costs the others nothing, and joins again by rule 1: without credit.

use super::bucket::Bucket;
use super::records::{GROUP, QueueRec, Tenant};
use super::tree::NIL;
use super::{QueueId, Refused, Sched};
use crate::names::FairnessKey;

/// Whether a key may be claimed, as far as its cap and its rate go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    Capped,
    /// No token before then.
    Limited(i64),
}

/// Tokens per second of one key; NaN if it is not limited.
fn key_rate(queue: &QueueRec, tenant: &Tenant) -> f64 {
    let weight = if tenant.key_len == 0 {
        1.0
    } else if !tenant.weight.is_nan() {
        tenant.weight
    } else if !tenant.own_weight.is_nan() {
        f64::from(tenant.own_weight)
    } else {
        1.0
    };
    queue.policy.key_rate_limit * weight
}

/// The gate of a key as of the last time its bucket was settled.
pub(super) fn gate_of(queue: &QueueRec, tenant: &Tenant) -> Gate {
    let cap = queue.policy.key_max_running;
    if cap >= 0 && i64::from(tenant.running) >= cap {
        return Gate::Capped;
    }
    let rate = key_rate(queue, tenant);
    if !rate.is_nan() && !tenant.bucket.has_token() {
        return Gate::Limited(tenant.bucket.ready_at(rate));
    }
    Gate::Open
}

impl QueueRec {
    /// Nothing can be claimed before then, whatever its keys have; `i64::MIN` if it is open.
    pub(super) fn closed_until(&self) -> i64 {
        if self.policy.paused != 0 {
            i64::MAX
        } else if self.policy.rate_limit.is_nan() || self.bucket.has_token() {
            i64::MIN
        } else {
            self.bucket.ready_at(self.policy.rate_limit)
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.closed_until() == i64::MIN
    }

    fn may_hold_keys_back(&self) -> bool {
        self.policy.key_max_running >= 0 || !self.policy.key_rate_limit.is_nan()
    }
}

impl Sched<'_> {
    /// Brings the queue's tokens up to date.
    pub(super) fn settle_queue(&mut self, queue: u32, now: i64) {
        let queue = self.queues.get_mut(queue);
        queue.latest = now;
        queue.bucket.settle(queue.policy.rate_limit, now);
    }

    /// Brings a key's tokens up to date, and says whether it may be claimed.
    pub(super) fn settle_key(&mut self, tenant: u32, now: i64) -> Gate {
        let tenant = self.tenants.get_mut(tenant);
        let queue = self.queues.get(tenant.queue);
        if !queue.may_hold_keys_back() {
            return Gate::Open;
        }
        tenant.bucket.settle(key_rate(queue, tenant), now);
        gate_of(queue, tenant)
    }

    /// A row of the key begins to run: it counts against the cap, and takes a token of the queue and one of the key.
    /// The caller regates.
    pub(super) fn start_running(&mut self, tenant: u32, own_weight: Option<f64>, now: i64) {
        self.settle_key(tenant, now);
        let tenant = self.tenants.get_mut(tenant);
        let queue = self.queues.get_mut(tenant.queue);
        tenant.set_running(tenant.running.saturating_add(1));
        tenant.own_weight = own_weight.unwrap_or(1.0) as f32;
        tenant.bucket.take(key_rate(queue, tenant));
        queue.bucket.take(queue.policy.rate_limit);
    }

    /// It does not run after all: the queue has its token back at once.
    pub(super) fn stop_running(&mut self, tenant: u32, now: i64) {
        let record = self.tenants.get_mut(tenant);
        record.set_running(record.running.saturating_sub(1).max(0));
        let queue = record.queue;
        self.return_queue_token(queue, now);
        self.regate(tenant, now);
    }

    pub(super) fn return_queue_token(&mut self, queue: u32, now: i64) {
        let queue = self.queues.get_mut(queue);
        queue.bucket.settle(queue.policy.rate_limit, now);
        queue.bucket.give_back(queue.policy.rate_limit);
    }

    /// The key has its token back at once.
    pub(super) fn return_key_token(&mut self, tenant: u32, now: i64) {
        let record = self.tenants.get_mut(tenant);
        let rate = key_rate(self.queues.get(record.queue), record);
        record.bucket.settle(rate, now);
        record.bucket.give_back(rate);
        self.regate(tenant, now);
    }

    /// A key's running count or tokens have changed: its entries leave the orders or join them. They are five at most.
    pub(super) fn regate(&mut self, tenant: u32, now: i64) {
        let record = self.tenants.get(tenant);
        if !self.queues.get(record.queue).may_hold_keys_back() {
            return;
        }
        for slot in record.entries {
            if slot != NIL && !self.entries.get(slot).is(GROUP) {
                self.refresh(slot, now);
            }
        }
    }

    /// The latest time that the queue of a key knows of, for calls that tell none.
    pub(super) fn latest_of(&self, tenant: u32) -> i64 {
        self.queues.get(self.tenants.get(tenant).queue).latest
    }

    /// Settles the tokens of all keys that have entries, since the rate is about to change. O(the queue's keys).
    pub(super) fn settle_all(&mut self, queue: u32, now: i64) {
        self.settle_queue(queue, now);
        let mut slot = self.queues.get(queue).entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            let (tenant, next) = (entry.tenant, entry.siblings.next);
            self.settle_key(tenant, now);
            slot = next;
        }
    }

    /// Buckets of a limit that no longer holds are full when it next does. O(the queue's keys).
    pub(super) fn fill_unlimited(&mut self, queue: u32) {
        let record = self.queues.get_mut(queue);
        if record.policy.rate_limit.is_nan() {
            record.bucket = Bucket::FULL;
        }
        if !record.policy.key_rate_limit.is_nan() {
            return;
        }
        let mut slot = record.entries.first;
        while slot != NIL {
            let entry = self.entries.get(slot);
            self.tenants.get_mut(entry.tenant).bucket = Bucket::FULL;
            slot = entry.siblings.next;
        }
    }

    /// Why a row of the key could not be claimed now, aside from the order; `None` if it could.
    pub fn refused(&mut self, queue: QueueId, key: &FairnessKey<'_>, now: i64) -> Option<Refused> {
        let slot = self.queue_slot(queue);
        if slot == NIL {
            return Some(Refused::Full);
        }
        self.settle_queue(slot, now);
        let record = self.queues.get(slot);
        if record.policy.paused != 0 {
            return Some(Refused::Paused);
        }
        let tenant = self.find_tenant(slot, key);
        let gate = if tenant == NIL {
            match record.policy.key_max_running {
                0 => Gate::Capped,
                _ => Gate::Open,
            }
        } else {
            self.settle_key(tenant, now)
        };
        match gate {
            Gate::Capped => Some(Refused::Capped),
            Gate::Limited(_) => Some(Refused::Limited),
            Gate::Open if !self.queues.get(slot).is_open() => Some(Refused::Limited),
            Gate::Open => None,
        }
    }
}
