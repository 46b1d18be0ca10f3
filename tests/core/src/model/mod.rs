//! The scheduling rules of DESIGN.md section 3, written as naively as they can be: one list of tasks, one map of keys,
//! everything sorted anew at each claim. It is the oracle for the core.
//!
//! | file | rules |
//! | --- | --- |
//! | `join` | 1 and 8: who is eligible, and who is forgotten |
//! | `claim` | 2 to 4: pick, clock, charge |
//! | `give_back` | 5 and 6: undo and correct |
//! | `groups` | 9: groups |
//! | `limits` | caps, rate limits, pauses |

mod claim;
mod give_back;
mod groups;
mod join;
mod limits;

use std::collections::{BTreeMap, BTreeSet};

pub use claim::{Claim, Seen};
pub use limits::{HeldBack, Policy};

use limits::{Tokens, single};

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

impl Task {
    /// Pending, and its time has come; infinity never comes.
    fn is_due(&self, now: i64) -> bool {
        self.state == State::Pending && self.due <= now && self.due != i64::MAX
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

    /// Sets a key's lag.
    pub fn set_lag(&mut self, priority: u8, key: &str, lag: i128) {
        let pass = self.node_clock(priority, key) + lag;
        self.passes.insert((priority, key.into()), pass);
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

    pub fn running(&self, key: &str) -> usize {
        let of_key = |task: &&Task| task.key == key && task.state == State::Running;
        self.tasks.values().filter(of_key).count()
    }

    pub fn has_due_row(&self, priority: u8, key: &str, now: i64) -> bool {
        self.tasks
            .values()
            .any(|task| (task.priority, task.key.as_str()) == (priority, key) && task.is_due(now))
    }

    pub fn enqueue(&mut self, task: Task, now: i64) {
        self.touch(task.priority, &task.key);
        self.own_weights
            .entry(task.key.clone())
            .or_insert(single(task.weight));
        self.tasks.insert(task.id, task);
        self.settle(now);
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
}
