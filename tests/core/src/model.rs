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
}

impl Claim {
    pub fn lag(&self) -> i128 {
        self.start - self.clock
    }
}

type Tier = u8;

/// One queue.
#[derive(Clone, Debug)]
pub struct Model {
    pub tasks: BTreeMap<i64, Task>,
    pub overrides: BTreeMap<String, f64>,
    /// Microseconds that a `new_start` row stands back.
    pub handicap: i64,
    /// False: plain priority and due order, nothing charged.
    pub fair: bool,
    passes: BTreeMap<(Tier, String), i128>,
    eligible: BTreeSet<(Tier, String)>,
    clocks: BTreeMap<Tier, i128>,
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
        }
    }
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
        Some((pass - self.clock(priority)).max(0))
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
        self.tasks.insert(task.id, task);
        self.settle(now);
    }

    fn touch(&mut self, priority: u8, key: &str) -> &mut i128 {
        let clock = self.clock(priority);
        self.passes
            .entry((priority, key.to_string()))
            .or_insert(clock)
    }

    /// Rule 1: notices who has become eligible, and who is no longer.
    pub fn settle(&mut self, now: i64) {
        let mut eligible = BTreeSet::new();
        for task in self.tasks.values() {
            if task.state == State::Pending && task.due <= now && task.due != i64::MAX {
                eligible.insert((task.priority, task.key.clone()));
            }
        }
        for (priority, key) in eligible.difference(&self.eligible.clone()) {
            let clock = self.clock(*priority);
            let pass = self.touch(*priority, key);
            *pass = (*pass).max(clock);
        }
        self.eligible = eligible;
    }

    /// A key joins though it has no row: it had one, and nobody has noticed yet that it is gone.
    pub fn join_in_error(&mut self, priority: u8, key: &str) {
        let clock = self.clock(priority);
        let pass = self.touch(priority, key);
        *pass = (*pass).max(clock);
    }

    /// Rules 2 to 4.
    pub fn claim(&mut self, now: i64) -> Option<Claim> {
        self.settle(now);
        let mut rows: Vec<&Task> = self
            .tasks
            .values()
            .filter(|task| task.state == State::Pending && task.due <= now && task.due != i64::MAX)
            .collect();
        if self.fair {
            rows.sort_by_key(|task| {
                let pass = self.passes[&(task.priority, task.key.clone())];
                let behind = i64::from(task.band) * self.handicap;
                (
                    task.priority,
                    pass,
                    task.due.saturating_add(behind),
                    task.id,
                )
            });
        } else {
            rows.sort_by_key(|task| (task.priority, task.due, task.id));
        }
        let task = (*rows.first()?).clone();
        self.rebase(task.priority);
        let mut claim = Claim {
            id: task.id,
            priority: task.priority,
            start: self.passes[&(task.priority, task.key.clone())],
            clock: self.clock(task.priority),
            step: 0,
            key: task.key.clone(),
        };
        if self.fair {
            let smallest = self
                .eligible
                .iter()
                .filter(|(priority, _)| *priority == task.priority)
                .map(|name| self.passes[name])
                .min()?;
            claim.clock = claim.clock.max(smallest);
            claim.step = step(1.0, self.weight(&task.key, task.weight));
            self.clocks.insert(task.priority, claim.clock);
            *self.touch(task.priority, &task.key) += claim.step;
        }
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
            self.take_off(claim.priority, &claim.key, claim.step);
        }
        if let Some(task) = self.tasks.get_mut(&claim.id) {
            task.state = State::Pending;
        }
        self.settle(now);
    }

    fn take_off(&mut self, priority: u8, key: &str, step: i128) {
        let clock = self.clock(priority);
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
        self.take_off(task.priority, &task.key, step(1.0, weight));
        self.settle(now);
    }

    /// Rule 6: the task is done, and cost this much.
    pub fn complete(&mut self, id: i64, cost: Option<f64>) {
        let Some(task) = self.tasks.remove(&id) else {
            return;
        };
        let Some(cost) = cost else { return };
        let weight = self.weight(&task.key, task.weight);
        let delta = cost - 1.0;
        if delta > 0.0 {
            *self.touch(task.priority, &task.key) += step(delta, weight);
        } else if delta < 0.0 {
            self.take_off(task.priority, &task.key, step(-delta, weight));
        }
    }

    /// A charge from outside: the key joins and is charged, the clock stays.
    pub fn charge(&mut self, priority: u8, key: &str, cost: f64) -> Claim {
        let clock = self.clock(priority);
        let step = step(cost, self.weight(key, None));
        let pass = self.touch(priority, key);
        let start = (*pass).max(clock);
        *pass = start + step;
        Claim {
            id: 0,
            priority,
            key: key.to_string(),
            start,
            clock,
            step,
        }
    }

    /// Undoes a charge from outside.
    pub fn undo_charge(&mut self, claim: &Claim) {
        self.take_off(claim.priority, &claim.key, claim.step);
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
        self.passes.remove(&(priority, key.to_string())).is_some() && !has_work
    }

    /// Rule 8, second half: tiers that know no key start again at clock 0.
    pub fn reset_empty_tiers(&mut self) {
        let passes = &self.passes;
        self.clocks
            .retain(|tier, _| passes.keys().any(|(priority, _)| priority == tier));
    }
}
