//! Rules 5 and 6: what is given back when a claim came to nothing, and corrected when the real cost is known. Neither
//! moves a clock, nor takes a pass below it.

use super::{Claim, Model, State, step};

impl Model {
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

    /// Undoes a charge from outside.
    pub fn undo_charge(&mut self, claim: &Claim) {
        self.take_off(claim.priority, &claim.key, claim.step, claim.group_step);
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
}
