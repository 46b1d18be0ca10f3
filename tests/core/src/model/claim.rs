//! Rules 2 to 4: which row is next, where the clock goes, and what the key is charged.

use std::collections::BTreeSet;

use super::{HeldBack, Model, REBASE_AT, State, Task, Tier, step};

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

impl Model {
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
            .filter(|task| task.is_due(now) && self.held_back(&task.key, now).is_none())
            .collect();
        if self.fair {
            rows = self.in_fair_order(rows, now);
        } else {
            rows.sort_by_key(|task| (task.priority, task.due, task.id));
        }
        // Of groups level with the first, the one that the claimer took to be first.
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
            self.move_clock(&mut claim, seen)?;
            // Rule 4.
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

    /// Rule 2: those of the nearest priority, by pass, due time and id; with groups, the first of each by its group's pass.
    fn in_fair_order<'a>(&self, mut rows: Vec<&'a Task>, now: i64) -> Vec<&'a Task> {
        // Effective priority, then base priority.
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
        let nearest = rows.iter().map(|task| urgency(task)).min();
        rows.retain(|task| Some(urgency(task)) == nearest);
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
        rows
    }

    /// Rule 3: the clock goes to the smallest pass, unless the claim is out of lag order.
    fn move_clock(&mut self, claim: &mut Claim, seen: &Seen) -> Option<()> {
        let group = (claim.priority, self.group(&claim.key));
        let mates = self.eligible.iter().filter(|(priority, key)| {
            *priority == claim.priority
                && (self.policy.separator.is_none() || self.group(key) == group.1)
        });
        let smallest = mates.map(|name| self.passes[name]).min()?;
        let groups = self.eligible_groups.iter();
        let smallest_group = groups
            .filter(|(priority, _)| *priority == claim.priority)
            .map(|name| self.group_passes[name])
            .min();
        let earlier = |(priority, _): &(Tier, String)| *priority < claim.priority;
        let aged = claim.start > smallest
            || smallest_group.is_some_and(|smallest| self.group_passes[&group] > smallest)
            || self.eligible.iter().any(earlier);
        claim.aged = seen.aged.unwrap_or(aged);
        if !claim.aged {
            claim.clock = claim.clock.max(smallest);
            match smallest_group {
                Some(smallest) if self.policy.separator.is_some() => {
                    self.group_clocks.insert(group, claim.clock);
                    let clock = self.clock(claim.priority).max(smallest);
                    self.clocks.insert(claim.priority, clock);
                }
                _ => {
                    self.clocks.insert(claim.priority, claim.clock);
                }
            }
        }
        Some(())
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
}
