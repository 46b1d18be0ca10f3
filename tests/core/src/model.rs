//! The scheduling rules of DESIGN.md section 3, written as naively as they can be: one list of tasks, one map of keys,
//! everything sorted anew at each claim. It is the oracle for the core and for the extension on a live server.

use std::collections::{BTreeMap, BTreeSet};

/// Ticks to the unit.
const UNIT: f64 = 1_000_000.0;
/// A tier's clock is brought back to 0 by the first claim that finds it this far.
const REBASE_AT: i128 = 1 << 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Waiting to be claimed.
    Pending,
    /// Pending, but locked by somebody who is no claimer.
    Locked,
    Running,
}

#[derive(Clone, Debug)]
pub struct Task {
    pub id: i64,
    pub priority: u8,
    pub key: String,
    /// 1 for a `new_start` row.
    pub band: u8,
    /// scheduled_at, in microseconds.
    pub due: i64,
    pub weight: Option<f64>,
    pub state: State,
}

/// One claim: which task, and the key's and the tier's virtual times when it was charged.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    pub id: i64,
    pub priority: u8,
    pub key: String,
    pub start: i128,
    pub clock: i128,
    pub step: i128,
    /// Of its group; 0 without groups.
    pub group_step: i128,
    /// Chosen for its age, out of lag order.
    pub aged: bool,
}

impl Claim {
    pub fn lag(&self) -> i128 {
        self.start - self.clock
    }
}

/// What a claimer went by who believes in rows that others hold, or that are gone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// The row of the group that it took to be first of those with the smallest pass.
    pub tie: Option<i64>,
    /// Whether it found itself out of order.
    pub aged: Option<bool>,
}

type Tier = u8;

/// One queue.
#[derive(Clone, Debug)]
pub struct Model {
    pub tasks: BTreeMap<i64, Task>,
    pub overrides: BTreeMap<String, f64>,
    /// Microseconds that a `new_start` row stands back.
    pub handicap: i64,
    pub policy: Policy,
    /// False: plain priority and due order, nothing charged.
    pub fair: bool,
    passes: BTreeMap<(Tier, String), i128>,
    eligible: BTreeSet<(Tier, String)>,
    clocks: BTreeMap<Tier, i128>,
    group_passes: BTreeMap<(Tier, String), i128>,
    group_clocks: BTreeMap<(Tier, String), i128>,
    eligible_groups: BTreeSet<(Tier, String)>,
    tokens: Tokens,
    key_tokens: BTreeMap<String, Tokens>,
    /// The own weight of the row claimed last, else of the first one enqueued.
    own_weights: BTreeMap<String, f64>,
}

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
struct Tokens {
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

impl Default for Model {
    fn default() -> Self {
        Model {
            tasks: BTreeMap::new(),
            overrides: BTreeMap::new(),
            handicap: 30_000_000,
            fair: true,
            passes: BTreeMap::new(),
            eligible: BTreeSet::new(),
            clocks: BTreeMap::new(),
            group_passes: BTreeMap::new(),
            group_clocks: BTreeMap::new(),
            eligible_groups: BTreeSet::new(),
            policy: Policy::default(),
            tokens: Tokens::default(),
            key_tokens: BTreeMap::new(),
            own_weights: BTreeMap::new(),
        }
    }
}

/// A row's own weight as the rate of its key goes by it: in single precision.
fn single(weight: Option<f64>) -> f64 {
    f64::from(weight.unwrap_or(1.0) as f32)
}

/// `max(1, round(cost * 1e6 / weight))`.
pub fn step(cost: f64, weight: f64) -> i128 {
    ((cost * UNIT / weight).round() as i128).max(1)
}

impl Model {
    pub fn clock(&self, priority: u8) -> i128 {
        self.clocks.get(&priority).copied().unwrap_or(0)
    }

    /// `pass - clock`, not below 0: what of a pass makes a difference. `None` for a key that is unknown.
    pub fn lag(&self, priority: u8, key: &str) -> Option<i128> {
        let pass = *self.passes.get(&(priority, key.to_string()))?;
        Some((pass - self.node_clock(priority, key)).max(0))
    }

    /// The same of the key's group; `None` without groups.
    pub fn group_lag(&self, priority: u8, key: &str) -> Option<i128> {
        let pass = *self.group_passes.get(&(priority, self.group(key)))?;
        Some((pass - self.clock(priority)).max(0))
    }

    /// Sets a key's lag.
    pub fn set_lag(&mut self, priority: u8, key: &str, lag: i128) {
        let pass = self.node_clock(priority, key) + lag;
        self.passes.insert((priority, key.into()), pass);
    }

    /// Sets the lag of a key's group.
    pub fn set_group_lag(&mut self, priority: u8, key: &str, lag: i128) {
        let pass = self.clock(priority) + lag;
        self.group_passes.insert((priority, self.group(key)), pass);
    }

    /// The part of a key before its first separator.
    pub fn group(&self, key: &str) -> String {
        match self.policy.separator {
            Some(separator) => key.split(separator).next().unwrap_or_default().into(),
            None => key.into(),
        }
    }

    /// The clock that a key's pass is measured by.
    fn node_clock(&self, priority: u8, key: &str) -> i128 {
        let group = (priority, self.group(key));
        self.group_clocks
            .get(&group)
            .copied()
            .unwrap_or(self.clock(priority))
    }

    fn group_step(&self, key: &str, cost: f64) -> i128 {
        match self.policy.separator {
            Some(_) => step(cost, self.weight(&self.group(key), None)),
            None => 0,
        }
    }

    /// The separator changes: groups start level; keys keep their distance to the clock they were measured by.
    fn regroup(&mut self, separator: Option<char>) {
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

    pub fn known(&self) -> impl Iterator<Item = (u8, &str)> {
        self.passes
            .keys()
            .map(|(priority, key)| (*priority, key.as_str()))
    }

    pub fn is_eligible(&self, priority: u8, key: &str) -> bool {
        self.eligible.contains(&(priority, key.to_string()))
    }

    pub fn weight(&self, key: &str, own: Option<f64>) -> f64 {
        if key.is_empty() {
            return 1.0;
        }
        self.overrides.get(key).copied().or(own).unwrap_or(1.0)
    }

    pub fn enqueue(&mut self, task: Task, now: i64) {
        self.touch(task.priority, &task.key);
        self.own_weights
            .entry(task.key.clone())
            .or_insert(single(task.weight));
        self.tasks.insert(task.id, task);
        self.settle(now);
    }

    pub fn running(&self, key: &str) -> usize {
        let of_key = |task: &&Task| task.key == key && task.state == State::Running;
        self.tasks.values().filter(of_key).count()
    }

    fn key_rate(&self, key: &str) -> Option<f64> {
        let own = self.own_weights.get(key).copied();
        self.policy
            .key_rate
            .map(|rate| rate * self.weight(key, own))
    }

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
    fn start(&mut self, task: &Task, now: i64) {
        self.tokens.add(self.policy.rate, -1.0, now);
        self.add_tokens(&task.key, 0.0, now);
        self.own_weights
            .insert(task.key.clone(), single(task.weight));
        self.add_tokens(&task.key, -1.0, now);
    }

    fn give_tokens_back(&mut self, key: &str, now: i64) {
        self.tokens.add(self.policy.rate, 1.0, now);
        self.add_tokens(key, 1.0, now);
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

    fn key_held_back(&self, key: &str, now: i64) -> Option<HeldBack> {
        let cap = self.policy.cap;
        if cap.is_some_and(|cap| self.running(key) >= cap as usize) {
            return Some(HeldBack::Cap);
        }
        let tokens = self.key_tokens.get(key).copied().unwrap_or_default();
        let out = tokens.are_out(self.key_rate(key), now);
        out.then_some(HeldBack::Rate)
    }

    pub fn has_due_row(&self, priority: u8, key: &str, now: i64) -> bool {
        self.tasks.values().any(|task| {
            (task.priority, task.key.as_str()) == (priority, key)
                && task.state == State::Pending
                && task.due <= now
                && task.due != i64::MAX
        })
    }

    /// A row is claimed aside from the order (pinned, or by its id).
    pub fn claim_aside(&mut self, id: i64, now: i64) -> Result<Claim, HeldBack> {
        let task = self.tasks[&id].clone();
        if let Some(held_back) = self.held_back(&task.key, now) {
            return Err(held_back);
        }
        let mut claim = self.charge_at(task.priority, &task.key, 1.0, task.weight);
        claim.id = id;
        self.start(&task, now);
        if let Some(task) = self.tasks.get_mut(&id) {
            task.state = State::Running;
        }
        self.settle(now);
        Ok(claim)
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

    fn touch(&mut self, priority: u8, key: &str) -> &mut i128 {
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

    /// Rule 1: notices who has become eligible, and who is no longer.
    pub fn settle(&mut self, now: i64) {
        let mut eligible = BTreeSet::new();
        for task in self.tasks.values() {
            if task.state == State::Pending
                && task.due <= now
                && task.due != i64::MAX
                && self.key_held_back(&task.key, now).is_none()
            {
                eligible.insert((task.priority, task.key.clone()));
            }
        }
        for (priority, key) in eligible.difference(&self.eligible.clone()) {
            self.touch(*priority, key);
            let clock = self.node_clock(*priority, key);
            let pass = self.touch(*priority, key);
            *pass = (*pass).max(clock);
        }
        self.eligible = eligible;
        if self.policy.separator.is_some() {
            let groups: BTreeSet<(Tier, String)> = self
                .eligible
                .iter()
                .map(|(priority, key)| (*priority, self.group(key)))
                .collect();
            for group in groups.difference(&self.eligible_groups) {
                let clock = self.clocks.get(&group.0).copied().unwrap_or(0);
                if let Some(pass) = self.group_passes.get_mut(group) {
                    *pass = (*pass).max(clock);
                }
            }
            self.eligible_groups = groups;
        }
    }

    /// A key joins though it has no row: it had one, and nobody has noticed yet that it is gone.
    pub fn join_in_error(&mut self, priority: u8, key: &str) {
        self.touch(priority, key);
        let clock = self.node_clock(priority, key);
        let pass = self.touch(priority, key);
        *pass = (*pass).max(clock);
        let (clock, group) = (self.clock(priority), (priority, self.group(key)));
        if let Some(pass) = self.group_passes.get_mut(&group) {
            *pass = (*pass).max(clock);
        }
    }

    /// Rules 2 to 4.
    pub fn claim(&mut self, now: i64) -> Option<Claim> {
        self.claim_as(now, &Seen::default())
    }

    /// As [`Model::claim`], by a claimer who believes more than is true.
    pub fn claim_as(&mut self, now: i64, seen: &Seen) -> Option<Claim> {
        self.settle(now);
        let mut rows: Vec<&Task> = self
            .tasks
            .values()
            .filter(|task| task.state == State::Pending && task.due <= now && task.due != i64::MAX)
            .filter(|task| self.held_back(&task.key, now).is_none())
            .collect();
        if self.fair {
            let urgency = |task: &Task| {
                let steps = match self.policy.aging {
                    0 => 0,
                    aging => (now - task.due) / aging,
                };
                (i64::from(task.priority) - steps, task.priority)
            };
            let rank = |task: &Task| {
                let behind = i64::from(task.band) * self.handicap;
                (task.due.saturating_add(behind), task.id)
            };
            let pass = |task: &Task| self.passes[&(task.priority, task.key.clone())];
            let nearest = rows.iter().map(|task| urgency(task)).min()?;
            rows.retain(|task| urgency(task) == nearest);
            rows.sort_by_key(|task| (pass(task), rank(task)));
            // The first of each group; of those the one whose group has the smallest pass.
            let mut seen = BTreeSet::new();
            if self.policy.separator.is_some() {
                rows.retain(|task| seen.insert(self.group(&task.key)));
                rows.sort_by_key(|task| {
                    let group = (task.priority, self.group(&task.key));
                    (self.group_passes[&group], rank(task))
                });
            }
        } else {
            rows.sort_by_key(|task| (task.priority, task.due, task.id));
        }
        if self.policy.separator.is_some()
            && let Some(tie) = rows.iter().position(|task| seen.tie == Some(task.id))
        {
            let pass = |task: &Task| self.group_passes[&(task.priority, self.group(&task.key))];
            if pass(rows[tie]) == pass(rows[0]) {
                rows.swap(0, tie);
            }
        }
        let task = (*rows.first()?).clone();
        self.rebase(task.priority);
        let mut claim = Claim {
            id: task.id,
            priority: task.priority,
            start: self.passes[&(task.priority, task.key.clone())],
            clock: self.node_clock(task.priority, &task.key),
            step: 0,
            group_step: 0,
            aged: false,
            key: task.key.clone(),
        };
        if self.fair {
            let group = (task.priority, self.group(&task.key));
            let mates = self.eligible.iter().filter(|(priority, key)| {
                *priority == task.priority
                    && (self.policy.separator.is_none() || self.group(key) == group.1)
            });
            let smallest = mates.map(|name| self.passes[name]).min()?;
            let groups = self.eligible_groups.iter();
            let smallest_group = groups
                .filter(|(priority, _)| *priority == task.priority)
                .map(|name| self.group_passes[name])
                .min();
            let earlier = |(priority, _): &(Tier, String)| *priority < task.priority;
            claim.aged = claim.start > smallest
                || smallest_group.is_some_and(|smallest| self.group_passes[&group] > smallest)
                || self.eligible.iter().any(earlier);
            claim.aged = seen.aged.unwrap_or(claim.aged);
            if !claim.aged {
                claim.clock = claim.clock.max(smallest);
                match smallest_group {
                    Some(smallest) if self.policy.separator.is_some() => {
                        self.group_clocks.insert(group, claim.clock);
                        let clock = self.clock(task.priority).max(smallest);
                        self.clocks.insert(task.priority, clock);
                    }
                    _ => {
                        self.clocks.insert(task.priority, claim.clock);
                    }
                }
            }
            claim.group_step = self.group_step(&task.key, 1.0);
            claim.step = step(1.0, self.weight(&task.key, task.weight));
            *self.touch(task.priority, &task.key) += claim.step;
            self.add_to_group(task.priority, &task.key, claim.group_step);
        }
        self.start(&task, now);
        self.tasks.get_mut(&task.id)?.state = State::Running;
        self.settle(now);
        Some(claim)
    }

    fn rebase(&mut self, priority: u8) {
        let clock = self.clock(priority);
        if clock >= REBASE_AT {
            for ((tier, _), pass) in &mut self.passes {
                if *tier == priority {
                    *pass -= clock;
                }
            }
            self.clocks.insert(priority, 0);
        }
    }

    /// Rule 5 for a claim whose transaction aborts.
    pub fn undo(&mut self, claim: &Claim, now: i64) {
        if claim.step > 0 {
            self.take_off(claim.priority, &claim.key, claim.step, claim.group_step);
        }
        if let Some(task) = self.tasks.get_mut(&claim.id) {
            task.state = State::Pending;
        }
        self.give_tokens_back(&claim.key, now);
        self.settle(now);
    }

    fn add_to_group(&mut self, priority: u8, key: &str, step: i128) {
        let group = (priority, self.group(key));
        if let Some(pass) = self.group_passes.get_mut(&group) {
            *pass += step;
        }
    }

    fn take_off(&mut self, priority: u8, key: &str, step: i128, group_step: i128) {
        let (clock, group) = (self.clock(priority), (priority, self.group(key)));
        if let Some(pass) = self.group_passes.get_mut(&group) {
            *pass = (*pass - group_step).max(clock);
        }
        let clock = self.node_clock(priority, key);
        if let Some(pass) = self.passes.get_mut(&(priority, key.to_string())) {
            *pass = (*pass - step).max(clock);
        }
    }

    /// Rule 5 for a released task: pending again, its charge given back.
    pub fn release(&mut self, id: i64, now: i64) {
        let Some(task) = self.tasks.get_mut(&id) else {
            return;
        };
        task.state = State::Pending;
        let task = task.clone();
        self.touch(task.priority, &task.key);
        let weight = self.weight(&task.key, task.weight);
        let group_step = self.group_step(&task.key, 1.0);
        self.take_off(task.priority, &task.key, step(1.0, weight), group_step);
        self.give_tokens_back(&task.key, now);
        self.settle(now);
    }

    /// Rule 6: the task is done, and cost this much.
    ///
    /// Says by how much the key and its group were corrected, up or down.
    pub fn complete(&mut self, id: i64, cost: Option<f64>) -> Option<[i128; 2]> {
        let task = self.tasks.remove(&id)?;
        let delta = cost? - 1.0;
        let step = step(delta.abs(), self.weight(&task.key, task.weight));
        let group_step = self.group_step(&task.key, delta.abs());
        if delta > 0.0 {
            *self.touch(task.priority, &task.key) += step;
            self.add_to_group(task.priority, &task.key, group_step);
        } else if delta < 0.0 {
            self.take_off(task.priority, &task.key, step, group_step);
        }
        Some([step, group_step])
    }

    /// A charge from outside: the key joins and is charged, the clock stays.
    pub fn charge(&mut self, priority: u8, key: &str, cost: f64) -> Claim {
        self.charge_at(priority, key, cost, None)
    }

    fn charge_at(&mut self, priority: u8, key: &str, cost: f64, own: Option<f64>) -> Claim {
        self.touch(priority, key);
        let clock = self.node_clock(priority, key);
        let step = step(cost, self.weight(key, own));
        let group_step = self.group_step(key, cost);
        let pass = self.touch(priority, key);
        let start = (*pass).max(clock);
        *pass = start + step;
        let (group, tier_clock) = ((priority, self.group(key)), self.clock(priority));
        if let Some(pass) = self.group_passes.get_mut(&group) {
            *pass = (*pass).max(tier_clock) + group_step;
        }
        Claim {
            id: 0,
            priority,
            key: key.to_string(),
            start,
            clock,
            step,
            group_step,
            aged: false,
        }
    }

    /// Undoes a charge from outside.
    pub fn undo_charge(&mut self, claim: &Claim) {
        self.take_off(claim.priority, &claim.key, claim.step, claim.group_step);
    }

    pub fn remove(&mut self, id: i64, now: i64) -> Option<Task> {
        let task = self.tasks.remove(&id);
        self.settle(now);
        task
    }

    pub fn set_state(&mut self, id: i64, state: State, now: i64) {
        if let Some(task) = self.tasks.get_mut(&id) {
            task.state = state;
        }
        self.settle(now);
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
}
