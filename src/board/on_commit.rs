//! What the board is told when a transaction commits.

use super::{find_queue, shmem, stored_key, wait};
use crate::names::{Priority, Weight};
use crate::sfq::{Outcome, Policy, QueueId, QueueState, Sched};

/// The board's address of a queue: database and table, and its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueRef {
    pub scope: u64,
    pub name: String,
}

/// What is due to the board when the transaction commits.
pub enum OnCommit {
    /// Rule 5 for a released task.
    Refund {
        queue: QueueRef,
        priority: Priority,
        key: String,
        cost: f64,
        weight: Option<f64>,
    },
    /// Rule 6: the reported cost less the charged one.
    Correct {
        queue: QueueRef,
        priority: Priority,
        key: String,
        delta: f64,
        weight: Option<f64>,
    },
    /// A task of the key has left (or, by hand, entered) the state running.
    Running {
        queue: QueueRef,
        key: String,
        delta: i32,
        outcome: Option<Outcome>,
    },
    /// Tasks of these keys, one each, have left the state running: completed.
    Completed { queue: QueueRef, keys: Vec<String> },
    /// A weight override was set or cleared.
    Override {
        queue: QueueRef,
        key: String,
        weight: Option<f64>,
    },
    /// A lease of the queue ends then.
    LeaseDue { queue: QueueRef, at: i64 },
    /// So many leases of the queue have run out, and their tasks were taken back.
    Expired { queue: QueueRef, leases: usize },
    /// A pin of the queue ends then, or (at the far end of time) there are pinned rows.
    UnpinDue { queue: QueueRef, at: i64 },
    /// Every task is gone (TRUNCATE waits for all claims, so none is in flight).
    TasksTruncated { scope: u64 },
    /// The settings of a queue have changed.
    Settings {
        queue: QueueRef,
        settings: Box<BoardSettings>,
    },
    /// All settings are gone.
    SettingsTruncated { scope: u64 },
    /// The run time of a completed task, for queues that charge by seconds.
    Measured {
        queue: QueueRef,
        key: String,
        seconds: f64,
    },
    /// Every override is gone.
    WeightsTruncated { scope: u64 },
}

impl OnCommit {
    /// Whether it tells of a table that this transaction has emptied.
    pub fn is_truncate(&self) -> bool {
        matches!(
            self,
            OnCommit::TasksTruncated { .. }
                | OnCommit::SettingsTruncated { .. }
                | OnCommit::WeightsTruncated { .. }
        )
    }
}

/// What the board knows of a queue's settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BoardSettings {
    /// The scheduler's share.
    pub policy: Policy,
    /// Length of a lease (µs), if it is not the default.
    pub lease: Option<i64>,
    /// The weight with which the queue is drawn, if it is not 1.
    pub queue_weight: Option<f64>,
}

impl BoardSettings {
    /// What is in force on the board.
    pub fn of(sched: &Sched, queue: QueueId) -> BoardSettings {
        let extras = shmem::extras(queue);
        BoardSettings {
            policy: sched.policy(queue),
            lease: extras.own_lease(),
            queue_weight: extras.own_queue_weight(),
        }
    }

    /// Puts them on the board; from the next claim on they hold for the whole backlog.
    pub fn put(&self, sched: &mut Sched, queue: QueueId, now: i64) {
        sched.set_policy(queue, &self.policy, now);
        shmem::extras(queue).set(self.lease, self.queue_weight, now);
    }
}

/// Whom to wake once the lock is free.
pub enum Wake {
    One(QueueId),
    All(QueueId),
}

/// Wakes them.
pub fn wake(wakes: &[Wake]) {
    // Whoever lines up from now on finds on the board what these wake-ups are about.
    if wakes.is_empty() || !shmem::anyone_waiting() {
        return;
    }
    for wake in wakes {
        match wake {
            Wake::One(queue) => wait::wake_one(*queue),
            Wake::All(queue) => wait::wake_all(*queue),
        }
    }
}

/// The queue on the board, unless nobody has loaded it: then the tables tell everything when somebody does.
pub fn find_live(sched: &Sched, queue: &QueueRef) -> Option<QueueId> {
    find_queue(sched, queue).filter(|q| sched.queue_state(*q) != Some(QueueState::Unloaded))
}

/// Tasks of a key have entered the state running, or left it.
fn running(
    sched: &mut Sched,
    queue: QueueId,
    key: &str,
    delta: i32,
    outcome: Option<Outcome>,
    now: i64,
    wakes: &mut Vec<Wake>,
) {
    let key = stored_key(key);
    // First, since a key that runs nothing more may be forgotten.
    if let Some(outcome) = outcome {
        sched.ended(queue, &key, outcome);
    }
    sched.running_delta(queue, &key, delta, now);
    if sched.has_eligible(queue) {
        wakes.push(Wake::One(queue));
    }
}

/// Tells the board of one effect; adds whom to wake.
pub fn apply(sched: &mut Sched, effect: OnCommit, now: i64, wakes: &mut Vec<Wake>) {
    match effect {
        OnCommit::Refund {
            queue,
            priority,
            key,
            cost,
            weight,
        } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.refund(queue, priority, &stored_key(&key), cost, weight);
            }
        }
        OnCommit::Correct {
            queue,
            priority,
            key,
            delta,
            weight,
        } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.correct_cost(queue, priority, &stored_key(&key), delta, weight);
            }
        }
        OnCommit::Running {
            queue,
            key,
            delta,
            outcome,
        } => {
            if let Some(queue) = find_live(sched, &queue) {
                running(sched, queue, &key, delta, outcome, now, wakes);
            }
        }
        OnCommit::Completed { queue, keys } => {
            if let Some(queue) = find_live(sched, &queue) {
                for key in &keys {
                    running(sched, queue, key, -1, Some(Outcome::Completed), now, wakes);
                }
            }
        }
        OnCommit::Override { queue, key, weight } => {
            if let Some(queue) = find_live(sched, &queue) {
                // No room on the board: the sweep tries again, since the table has it.
                let weight = weight.and_then(|w| Weight::new(w).ok());
                let _ = sched.set_override(queue, &stored_key(&key), weight);
            }
        }
        OnCommit::LeaseDue { queue, at } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.note_lease_due(queue, at);
            }
        }
        OnCommit::Expired { queue, leases } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.counters(queue).expired_leases += leases as u64;
            }
        }
        OnCommit::UnpinDue { queue, at } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.note_unpin_due(queue, at);
                shmem::extras(queue).count_pins();
                wakes.push(Wake::All(queue));
            }
        }
        OnCommit::TasksTruncated { scope } => sched.clear_running(scope),
        OnCommit::Settings { queue, settings } => {
            if let Some(queue) = find_live(sched, &queue) {
                settings.put(sched, queue, now);
                wakes.push(Wake::All(queue));
            }
        }
        OnCommit::SettingsTruncated { scope } => {
            let mut queues = Vec::new();
            sched.queues(|queue| {
                if queue.scope == scope {
                    queues.push(queue.id);
                }
            });
            for queue in queues {
                BoardSettings::default().put(sched, queue, now);
                wakes.push(Wake::All(queue));
            }
        }
        OnCommit::Measured {
            queue,
            key,
            seconds,
        } => {
            if let Some(queue) = find_live(sched, &queue) {
                sched.measured(queue, &stored_key(&key), seconds);
            }
        }
        OnCommit::WeightsTruncated { scope } => sched.clear_overrides(scope),
    }
}
