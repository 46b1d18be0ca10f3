//! Rule 9: groups of keys, each with a pass, a clock and a weight of its own.

use super::{Model, Tier, step};

impl Model {
    /// The part of a key before its first separator.
    pub fn group(&self, key: &str) -> String {
        match self.policy.separator {
            Some(separator) => key.split(separator).next().unwrap_or_default().into(),
            None => key.into(),
        }
    }

    /// The same of the key's group; `None` without groups.
    pub fn group_lag(&self, priority: u8, key: &str) -> Option<i128> {
        let pass = *self.group_passes.get(&(priority, self.group(key)))?;
        Some((pass - self.clock(priority)).max(0))
    }

    /// Sets the lag of a key's group.
    pub fn set_group_lag(&mut self, priority: u8, key: &str, lag: i128) {
        let pass = self.clock(priority) + lag;
        self.group_passes.insert((priority, self.group(key)), pass);
    }

    /// The clock that a key's pass is measured by.
    pub(super) fn node_clock(&self, priority: u8, key: &str) -> i128 {
        let group = (priority, self.group(key));
        self.group_clocks
            .get(&group)
            .copied()
            .unwrap_or(self.clock(priority))
    }

    pub(super) fn group_step(&self, key: &str, cost: f64) -> i128 {
        match self.policy.separator {
            Some(_) => step(cost, self.weight(&self.group(key), None)),
            None => 0,
        }
    }

    pub(super) fn add_to_group(&mut self, priority: u8, key: &str, step: i128) {
        let group = (priority, self.group(key));
        if let Some(pass) = self.group_passes.get_mut(&group) {
            *pass += step;
        }
    }

    /// The separator changes: groups start level; keys keep their distance to the clock they were measured by.
    pub(super) fn regroup(&mut self, separator: Option<char>) {
        let lags: Vec<((Tier, String), i128)> = self
            .passes
            .iter()
            .map(|((tier, key), pass)| ((*tier, key.clone()), pass - self.node_clock(*tier, key)))
            .collect();
        self.group_passes.clear();
        self.group_clocks.clear();
        self.eligible_groups.clear();
        self.eligible.clear();
        self.policy.separator = separator;
        for ((tier, key), lag) in lags {
            let clock = self.clock(tier);
            self.passes.insert((tier, key.clone()), clock + lag);
            self.touch(tier, &key);
        }
    }
}
