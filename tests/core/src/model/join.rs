//! Rules 1 and 8: a key that becomes eligible joins at the clock or where it left; one that has been idle for long is
//! forgotten.

use std::collections::BTreeSet;

use super::{Model, State, Tier};

impl Model {
    /// Notices who has become eligible, and who is no longer.
    pub fn settle(&mut self, now: i64) {
        let eligible: BTreeSet<(Tier, String)> = self
            .tasks
            .values()
            .filter(|task| task.is_due(now) && self.key_held_back(&task.key, now).is_none())
            .map(|task| (task.priority, task.key.clone()))
            .collect();
        for (priority, key) in eligible.difference(&self.eligible.clone()) {
            self.join(*priority, key);
        }
        self.eligible = eligible;
        if self.policy.separator.is_some() {
            let groups: BTreeSet<(Tier, String)> = self
                .eligible
                .iter()
                .map(|(priority, key)| (*priority, self.group(key)))
                .collect();
            for group in groups.difference(&self.eligible_groups.clone()) {
                self.join_group(group);
            }
            self.eligible_groups = groups;
        }
    }

    fn join(&mut self, priority: u8, key: &str) {
        self.touch(priority, key);
        let clock = self.node_clock(priority, key);
        let pass = self.touch(priority, key);
        *pass = (*pass).max(clock);
    }

    fn join_group(&mut self, group: &(Tier, String)) {
        let clock = self.clock(group.0);
        if let Some(pass) = self.group_passes.get_mut(group) {
            *pass = (*pass).max(clock);
        }
    }

    /// A key joins though it has no row: it had one, and nobody has noticed yet that it is gone.
    pub fn join_in_error(&mut self, priority: u8, key: &str) {
        self.join(priority, key);
        self.join_group(&(priority, self.group(key)));
    }

    /// The pass of a key; a new one starts at the clock, and so does a new group.
    pub(super) fn touch(&mut self, priority: u8, key: &str) -> &mut i128 {
        if self.policy.separator.is_some() {
            let (group, clock) = ((priority, self.group(key)), self.clock(priority));
            self.group_passes.entry(group.clone()).or_insert(clock);
            self.group_clocks.entry(group).or_insert(clock);
        }
        let clock = self.node_clock(priority, key);
        self.passes
            .entry((priority, key.to_string()))
            .or_insert(clock)
    }

    /// Rule 8, for a key that the caller knows to have been idle for long enough. True if nothing speaks against it.
    pub fn forget(&mut self, priority: u8, key: &str) -> bool {
        let has_work = self.tasks.values().any(|task| {
            task.key == key && (task.priority == priority || task.state == State::Running)
        });
        let known = self.passes.remove(&(priority, key.to_string())).is_some();
        let group = self.group(key);
        let has_mates = self
            .passes
            .keys()
            .any(|(tier, key)| *tier == priority && self.group(key) == group);
        if !has_mates {
            self.group_passes.remove(&(priority, group.clone()));
            self.group_clocks.remove(&(priority, group));
        }
        known && !has_work
    }

    /// Rule 8, second half: tiers that know no key start again at clock 0.
    pub fn reset_empty_tiers(&mut self) {
        let passes = &self.passes;
        self.clocks
            .retain(|tier, _| passes.keys().any(|(priority, _)| priority == tier));
    }

    /// What is known of keys without rows, overrides or passes is forgotten, tokens included.
    pub fn forget_strangers(&mut self) {
        let known: BTreeSet<String> = self
            .passes
            .keys()
            .map(|(_, key)| key.clone())
            .chain(self.overrides.keys().cloned())
            .chain(self.tasks.values().map(|task| task.key.clone()))
            .collect();
        self.key_tokens.retain(|key, _| known.contains(key));
        self.own_weights.retain(|key, _| known.contains(key));
    }
}
