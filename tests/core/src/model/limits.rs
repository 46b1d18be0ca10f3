//! Caps, rate limits and the pause: which keys are held back though their rows are due.

use super::{Model, Task, UNIT};

/// The settings that hold rows back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policy {
    pub cap: Option<u32>,
    pub rate: Option<f64>,
    pub key_rate: Option<f64>,
    pub paused: bool,
    /// Microseconds to the priority step; 0: rows do not age.
    pub aging: i64,
    pub separator: Option<char>,
}

/// A token bucket; nothing is counted while there is no limit, or while it is full.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tokens {
    /// How many there were, and when.
    left: Option<(f64, i64)>,
}

impl Tokens {
    fn at(&self, rate: f64, now: i64) -> f64 {
        let full = rate.max(1.0);
        self.left.map_or(full, |(tokens, then)| {
            (tokens + (now - then) as f64 * rate / UNIT).min(full)
        })
    }

    fn are_out(&self, rate: Option<f64>, now: i64) -> bool {
        rate.is_some_and(|rate| self.at(rate, now) < 1.0 - 1e-9)
    }

    fn add(&mut self, rate: Option<f64>, tokens: f64, now: i64) {
        self.left = rate.and_then(|rate| {
            let left = (self.at(rate, now) + tokens).max(0.0);
            (left < rate.max(1.0)).then_some((left, now))
        });
    }
}

/// Why a key whose rows are due cannot be claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBack {
    Paused,
    Cap,
    Rate,
}

/// A row's own weight as the rate of its key goes by it: in single precision.
pub(super) fn single(weight: Option<f64>) -> f64 {
    f64::from(weight.unwrap_or(1.0) as f32)
}

impl Model {
    /// The settings change; tokens of a limit that goes are forgotten.
    pub fn set_policy(&mut self, policy: Policy, now: i64) {
        self.tokens.add(self.policy.rate, 0.0, now);
        self.tokens.left = self.tokens.left.filter(|_| policy.rate.is_some());
        self.settle_keys(now);
        if policy.key_rate.is_none() {
            self.key_tokens.clear();
        }
        if policy.separator != self.policy.separator {
            self.regroup(policy.separator);
        }
        self.policy = policy;
        self.settle(now);
    }

    /// An override changes: until now, tokens came in at the old rate.
    pub fn set_override(&mut self, key: &str, weight: Option<f64>, now: i64) {
        self.settle_keys(now);
        match weight {
            Some(weight) => self.overrides.insert(key.into(), weight),
            None => self.overrides.remove(key),
        };
        self.settle(now);
    }

    /// Why rows of the key cannot be claimed though they are due.
    pub fn held_back(&self, key: &str, now: i64) -> Option<HeldBack> {
        if self.policy.paused {
            return Some(HeldBack::Paused);
        }
        self.key_held_back(key, now).or(self
            .tokens
            .are_out(self.policy.rate, now)
            .then_some(HeldBack::Rate))
    }

    /// The same, of what holds back the key alone and not its whole queue.
    pub fn key_held_back(&self, key: &str, now: i64) -> Option<HeldBack> {
        let cap = self.policy.cap;
        if cap.is_some_and(|cap| self.running(key) >= cap as usize) {
            return Some(HeldBack::Cap);
        }
        let tokens = self.key_tokens.get(key).copied().unwrap_or_default();
        let out = tokens.are_out(self.key_rate(key), now);
        out.then_some(HeldBack::Rate)
    }

    fn key_rate(&self, key: &str) -> Option<f64> {
        let own = self.own_weights.get(key).copied();
        self.policy
            .key_rate
            .map(|rate| rate * self.weight(key, own))
    }

    fn settle_keys(&mut self, now: i64) {
        for key in self.key_tokens.keys().cloned().collect::<Vec<_>>() {
            self.add_tokens(&key, 0.0, now);
        }
    }

    fn add_tokens(&mut self, key: &str, tokens: f64, now: i64) {
        let rate = self.key_rate(key);
        self.key_tokens
            .entry(key.into())
            .or_default()
            .add(rate, tokens, now);
    }

    /// A row begins to run, in or out of order.
    pub(super) fn start(&mut self, task: &Task, now: i64) {
        self.tokens.add(self.policy.rate, -1.0, now);
        self.add_tokens(&task.key, 0.0, now);
        self.own_weights
            .insert(task.key.clone(), single(task.weight));
        self.add_tokens(&task.key, -1.0, now);
    }

    pub(super) fn give_tokens_back(&mut self, key: &str, now: i64) {
        self.tokens.add(self.policy.rate, 1.0, now);
        self.add_tokens(key, 1.0, now);
    }
}
