//! The scheduling rules written down as plainly as they can be said, over plain lists: the oracle of `workloads`.
//! It shares no code with the extension, and looks at every task for every pick.

use std::collections::{BTreeMap, HashMap};

const TICKS: f64 = 1e6;
const HANDICAP_MICROS: i64 = 30_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Pending,
    Running,
    Done,
}

#[derive(Clone, Debug)]
pub struct Task {
    pub key: String,
    pub priority: i16,
    pub weight: Option<f64>,
    pub new_start: bool,
    /// scheduled_at, in microseconds.
    pub due: i64,
    pub is_due: bool,
    pub state: State,
    /// What the last claim was charged, in ticks.
    pub step: i64,
}

impl Task {
    fn order(&self) -> i64 {
        self.due + if self.new_start { HANDICAP_MICROS } else { 0 }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Key {
    pass: i64,
    eligible: bool,
}

/// What a claim should return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    pub id: i64,
    pub weight: f64,
    pub lag: f64,
}

/// One queue.
#[derive(Default)]
pub struct Queue {
    pub tasks: BTreeMap<i64, Task>,
    pub overrides: HashMap<String, f64>,
    keys: HashMap<(i16, String), Key>,
    clocks: HashMap<i16, i64>,
}

impl Queue {
    fn claimable(&self, priority: i16) -> impl Iterator<Item = (&i64, &Task)> {
        self.tasks.iter().filter(move |(_, task)| {
            task.priority == priority && task.state == State::Pending && task.is_due
        })
    }

    fn clock(&self, priority: i16) -> i64 {
        self.clocks.get(&priority).copied().unwrap_or(0)
    }

    /// Rule 1: a key that becomes eligible starts at the clock at least.
    fn join(&mut self, priority: i16) {
        let clock = self.clock(priority);
        let with_work: Vec<String> = self
            .claimable(priority)
            .map(|(_, task)| task.key.clone())
            .collect();
        for ((of, name), key) in &mut self.keys {
            if *of == priority && !with_work.contains(name) {
                key.eligible = false;
            }
        }
        for name in with_work {
            let key = self.keys.entry((priority, name)).or_default();
            if !key.eligible {
                key.pass = key.pass.max(clock);
                key.eligible = true;
            }
        }
    }

    /// To be called after every change: keys that it gave work to join now, not when somebody claims.
    pub fn notice(&mut self) {
        for priority in 1..=5 {
            self.join(priority);
        }
    }

    fn weight(&self, task: &Task) -> f64 {
        if task.key.is_empty() {
            return 1.0;
        }
        self.overrides
            .get(&task.key)
            .copied()
            .or(task.weight)
            .unwrap_or(1.0)
    }

    fn step(cost: f64, weight: f64) -> i64 {
        ((cost * TICKS / weight).round() as i64).max(1)
    }

    /// Rules 2 to 4.
    pub fn claim(&mut self) -> Option<Pick> {
        let priority = (1..=5).find(|priority| self.claimable(*priority).next().is_some())?;
        self.join(priority);
        let pass_of = |task: &Task| self.keys[&(priority, task.key.clone())].pass;
        let (id, task) = self
            .claimable(priority)
            .min_by_key(|(id, task)| (pass_of(task), task.order(), **id))?;
        let (id, weight, pass) = (*id, self.weight(task), pass_of(task));
        let smallest = self
            .claimable(priority)
            .map(|(_, task)| pass_of(task))
            .min()?;
        let clock = self.clock(priority).max(smallest);
        self.clocks.insert(priority, clock);
        let step = Queue::step(1.0, weight);
        let task = self.tasks.get_mut(&id)?;
        task.state = State::Running;
        task.step = step;
        let key = (priority, task.key.clone());
        self.keys.get_mut(&key)?.pass += step;
        Some(Pick {
            id,
            weight,
            lag: (pass - clock) as f64 / TICKS,
        })
    }

    /// Rule 5.
    fn take_back(&mut self, priority: i16, name: &str, step: i64) {
        let clock = self.clock(priority);
        let key = self.keys.entry((priority, name.to_owned())).or_default();
        key.pass = (key.pass - step).max(clock);
    }

    /// The transaction of a claim has aborted.
    pub fn abort(&mut self, picks: &[Pick]) {
        for pick in picks.iter().rev() {
            self.release(pick.id);
        }
    }

    /// The worker gives the task back.
    pub fn release(&mut self, id: i64) {
        let Some(task) = self.tasks.get_mut(&id) else {
            return;
        };
        task.state = State::Pending;
        let (priority, key, step) = (task.priority, task.key.clone(), task.step);
        self.take_back(priority, &key, step);
    }

    /// Rule 6: the worker has completed the task and reports its real cost.
    pub fn complete(&mut self, id: i64, cost: f64) {
        let Some(task) = self.tasks.get_mut(&id) else {
            return;
        };
        task.state = State::Done;
        let task = task.clone();
        let difference = cost - 1.0;
        if difference == 0.0 {
            return;
        }
        let step = Queue::step(difference.abs(), self.weight(&task));
        if difference < 0.0 {
            self.take_back(task.priority, &task.key, step);
        } else {
            self.keys.entry((task.priority, task.key)).or_default().pass += step;
        }
    }

    /// The pass of each key that has claimable work, in units, by priority and key; and the clock of its tier.
    pub fn passes(&mut self) -> Vec<(i16, String, f64, f64)> {
        self.notice();
        let mut passes: Vec<_> = self
            .keys
            .iter()
            .filter(|(_, key)| key.eligible)
            .map(|((priority, name), key)| {
                (
                    *priority,
                    name.clone(),
                    key.pass as f64 / TICKS,
                    self.clock(*priority) as f64 / TICKS,
                )
            })
            .collect();
        passes.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        passes
    }
}
