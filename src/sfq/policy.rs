//! The settings of a queue that bend its order. A change acts at the next pick, on the whole backlog.

use super::records::DEFAULT_HANDICAP;
use super::tree::NIL;
use super::{QueueId, Sched};

/// The settings of one queue. [`Policy::default`] is that of a queue of which nothing has been set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Most running tasks of one key; 0 admits none.
    pub key_max_running: Option<u32>,
    /// Claims per second of the whole queue.
    pub rate_limit: Option<f64>,
    /// Claims per second of a key of weight 1; a key's rate is this times its weight.
    pub key_rate_limit: Option<f64>,
    /// How long a row waits for each step of its effective priority, in microseconds; 0 or less: it does not age.
    pub aging: i64,
    /// How far `new_start` rows stand back, in microseconds.
    pub handicap: i64,
    /// Nothing can be picked.
    pub paused: bool,
    /// What separates the group of a key from the rest of it (rule 9).
    pub separator: Option<char>,
    /// A claim charges the key's average run time in seconds, not 1.
    pub by_seconds: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            key_max_running: None,
            rate_limit: None,
            key_rate_limit: None,
            aging: 0,
            handicap: DEFAULT_HANDICAP,
            paused: false,
            separator: None,
            by_seconds: false,
        }
    }
}

/// [`Policy`] as it stands in the byte region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PolicyRec {
    pub handicap: i64,
    pub aging: i64,
    /// NaN: none.
    pub rate_limit: f64,
    /// NaN: none.
    pub key_rate_limit: f64,
    /// -1: none.
    pub key_max_running: i64,
    /// 0: none.
    pub separator: u32,
    pub paused: u8,
    pub by_seconds: u8,
    pub pad: u16,
}

impl PolicyRec {
    pub const DEFAULT: PolicyRec = PolicyRec {
        handicap: DEFAULT_HANDICAP,
        aging: 0,
        rate_limit: f64::NAN,
        key_rate_limit: f64::NAN,
        key_max_running: -1,
        separator: 0,
        paused: 0,
        by_seconds: 0,
        pad: 0,
    };

    fn new(policy: &Policy) -> Self {
        PolicyRec {
            handicap: policy.handicap,
            aging: policy.aging.max(0),
            rate_limit: rate(policy.rate_limit),
            key_rate_limit: rate(policy.key_rate_limit),
            key_max_running: policy.key_max_running.map_or(-1, i64::from),
            separator: policy.separator.map_or(0, u32::from),
            paused: u8::from(policy.paused),
            by_seconds: u8::from(policy.by_seconds),
            pad: 0,
        }
    }

    fn policy(&self) -> Policy {
        let some = |rate: f64| (!rate.is_nan()).then_some(rate);
        Policy {
            key_max_running: u32::try_from(self.key_max_running).ok(),
            rate_limit: some(self.rate_limit),
            key_rate_limit: some(self.key_rate_limit),
            aging: self.aging,
            handicap: self.handicap,
            paused: self.paused != 0,
            separator: char::from_u32(self.separator).filter(|_| self.separator != 0),
            by_seconds: self.by_seconds != 0,
        }
    }
}

/// A rate that is no number is none; one below zero counts as zero.
fn rate(limit: Option<f64>) -> f64 {
    limit.map_or(f64::NAN, |limit| {
        if limit.is_nan() {
            limit
        } else {
            limit.max(0.0)
        }
    })
}

impl Sched<'_> {
    /// Sets all settings of a queue. O(its keys), unless nothing has changed.
    pub fn set_policy(&mut self, queue: QueueId, policy: &Policy, now: i64) {
        let slot = self.queue_slot(queue);
        let old = self.queues.get(slot).policy.policy();
        if slot == NIL || old == *policy {
            return;
        }
        self.settle_all(slot, now);
        let new = PolicyRec::new(policy);
        if new.separator != self.queues.get(slot).policy.separator {
            self.regroup(slot, new.separator);
        }
        self.queues.get_mut(slot).policy = new;
        self.fill_unlimited(slot);
        self.refresh_all(slot, now);
    }

    /// The settings of a queue.
    pub fn policy(&self, queue: QueueId) -> Policy {
        self.queues.get(self.queue_slot(queue)).policy.policy()
    }

    /// Nothing can be picked from a paused queue.
    pub fn set_paused(&mut self, queue: QueueId, paused: bool) {
        let slot = self.queue_slot(queue);
        self.queues.get_mut(slot).policy.paused = u8::from(paused);
    }

    pub fn is_paused(&self, queue: QueueId) -> bool {
        self.queues.get(self.queue_slot(queue)).policy.paused != 0
    }

    /// How far `new_start` rows stand back, in microseconds. O(its keys).
    pub fn set_handicap(&mut self, queue: QueueId, micros: i64, now: i64) {
        let policy = Policy {
            handicap: micros,
            ..self.policy(queue)
        };
        self.set_policy(queue, &policy, now);
    }

    /// Looks at every entry of a queue anew. O(its keys).
    pub(super) fn refresh_all(&mut self, queue: u32, now: i64) {
        let mut entry = self.queues.get(queue).entries.first;
        while entry != NIL {
            let next = self.entries.get(entry).siblings.next;
            self.refresh(entry, now);
            entry = next;
        }
    }
}
