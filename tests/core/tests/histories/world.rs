//! A queue in the core and in the model, side by side.

use std::collections::{BTreeMap, BTreeSet};

use harvest_fair_core_tests::harness::{
    MemoryBoard, SECOND, Session, Stored, Table, WEIGHTS, ids, key, priority,
};
use harvest_fair_core_tests::model::{self, HeldBack, Model, State, Task};
use harvest_fair_core_tests::names::Weight;
use harvest_fair_core_tests::sfq::{
    Charge, Memory, Order, Policy, QueueId, Refused, claim, preview,
};
use proptest::prelude::*;

use crate::ops::{KEYS, Op};

/// The owner of locks that no claimer took.
const STRANGER: u32 = 99;

pub struct World {
    pub board: MemoryBoard,
    pub queue: QueueId,
    table: Table,
    /// What each session remembers.
    memories: [Memory<i64>; 3],
    pub model: Model,
    pub now: i64,
    next_id: i64,
    /// Claims of transactions that are open.
    pub open: [Vec<(model::Claim, Charge)>; 3],
    /// Claimed, committed, not yet settled.
    running: Vec<i64>,
    locked: Vec<i64>,
    /// Keys of which a row was changed behind the board's back, and in which tier. What the board believes of them may
    /// lag behind what the model knows, so the model takes over their passes (see `compare`).
    pub doubted: BTreeSet<(u8, String)>,
    /// The same of groups: one of their keys was thought eligible although others held its rows, or they were gone.
    pub doubted_groups: BTreeSet<(u8, String)>,
    /// Keys that stood behind their clock when core and model were compared last: the board has kept them awake for rows
    /// that others hold, and does not learn when another row of theirs comes due.
    pub behind: BTreeSet<(u8, String)>,
    /// The same of groups.
    pub behind_groups: BTreeSet<(u8, String)>,
    /// The most that each key was ever charged at once.
    pub dearest: BTreeMap<String, i128>,
}

impl World {
    pub fn new() -> Self {
        let mut board = MemoryBoard::new(2, 64);
        let queue = board.open("q");
        World {
            board,
            queue,
            table: Table::default(),
            memories: Default::default(),
            model: Model::default(),
            now: 1_000_000 * SECOND,
            next_id: 1,
            open: Default::default(),
            running: Vec::new(),
            locked: Vec::new(),
            doubted: BTreeSet::new(),
            doubted_groups: BTreeSet::new(),
            behind: BTreeSet::new(),
            behind_groups: BTreeSet::new(),
            dearest: BTreeMap::new(),
        }
    }

    fn due(&self, offset: i64) -> i64 {
        self.now.saturating_add(offset)
    }

    /// A pending row enters the table, the model, and (as after a commit) the board.
    fn put(&mut self, task: Task) {
        let stored = Stored::new(task.priority, &task.key, task.band, task.due, task.weight);
        self.table.rows.insert(task.id, stored);
        self.note(&task);
        self.model.enqueue(task, self.now);
    }

    fn note(&mut self, task: &Task) {
        let row = self.table.row(task.id);
        let (tier, name) = (priority(task.priority), key(&task.key));
        let mut sched = self.board.sched();
        sched
            .note(self.queue, tier, &name, task.band, row, self.now)
            .expect("room on the board");
    }

    fn charged(&mut self, key: &str, [step, group_step]: [i128; 2]) {
        let group = self.model.group(key);
        for (name, step) in [(key.to_string(), step), (group, group_step)] {
            let dearest = self.dearest.entry(name).or_default();
            *dearest = step.max(*dearest);
        }
    }

    /// Something happens to a row behind the board's back.
    fn doubt(&mut self, id: i64) {
        let task = &self.model.tasks[&id];
        self.doubted.insert((task.priority, task.key.clone()));
    }

    fn pending(&self, nth: usize) -> Option<i64> {
        let ids: Vec<i64> = self
            .model
            .tasks
            .values()
            .filter(|task| task.state == State::Pending)
            .map(|task| task.id)
            .collect();
        (!ids.is_empty()).then(|| ids[nth % ids.len()])
    }

    /// The rows that a claim would give, found on a copy of everything.
    fn preview(
        &mut self,
        session: usize,
        n: usize,
        order: Order,
    ) -> Result<Vec<i64>, TestCaseError> {
        let mut table = self.table.clone();
        let mut rows = Session::new(&mut table, session as u32);
        let mut seen = Vec::new();
        let weights = [];
        preview(
            &mut self.board,
            &mut rows,
            self.queue,
            order,
            n,
            self.now,
            &weights,
            (0, &mut |_, _| 0),
            &mut seen,
        )
        .expect("the table never fails");
        Ok(ids(&seen))
    }

    pub fn claim(&mut self, session: usize, n: usize, fair: bool) -> Result<(), TestCaseError> {
        if self.model.policy.aging == 0 || !fair {
            return self.claim_batch(session, n, fair);
        }
        // One by one: what the board believes between two claims decides what it calls out of order.
        let foreseen = self.preview(session, n, Order::Fair)?;
        let before = self.open[session].len();
        for _ in 0..n {
            self.claim_batch(session, 1, true)?;
        }
        let claimed = self.open[session][before..].iter();
        let claimed: Vec<i64> = claimed.map(|(claim, _)| claim.id).collect();
        prop_assert_eq!(foreseen, claimed, "a batch is as many single claims");
        Ok(())
    }

    /// Whether the board believes in rows that the model knows to be gone.
    fn believes_too_much(&mut self) -> bool {
        self.model.settle(self.now);
        let mut sched = self.board.sched();
        sched.advance(self.queue, self.now);
        let mut too_much = false;
        sched.entries(self.queue, |entry| {
            let known = self
                .model
                .is_eligible(entry.priority.get(), entry.key.as_str());
            too_much |= entry.eligible && !known;
        });
        too_much
    }

    fn claim_batch(&mut self, session: usize, n: usize, fair: bool) -> Result<(), TestCaseError> {
        let in_doubt = self.believes_too_much();
        let order = if fair { Order::Fair } else { Order::Due };
        let foreseen = self.preview(session, n, order)?;
        let mut rows = Session::new(&mut self.table, session as u32);
        let mut claimed = Vec::new();
        claim(
            &mut self.board,
            &mut rows,
            &mut self.memories[session],
            self.queue,
            order,
            n,
            self.now,
            &mut claimed,
        )
        .expect("the table never fails");
        prop_assert_eq!(rows.under_way, 0);
        prop_assert_eq!(rows.remembered.len(), claimed.len());
        prop_assert_eq!(&foreseen, &ids(&claimed), "what the preview said");
        self.model.fair = fair;
        // Rows that others hold may stand first in a group, and a claimer cannot know before it tries them.
        let others = (0..)
            .zip(&self.open)
            .any(|(other, claims)| other != session && !claims.is_empty());
        // So may rows of its own that another session has met.
        let disputed = others || in_doubt || !self.doubted.is_empty();
        let expected: Vec<model::Claim> = (0..n)
            .map_while(|nth| {
                let claimed = claimed.get(nth);
                let tie = claimed.filter(|_| disputed).map(|claimed| claimed.handle);
                let aged = claimed.filter(|claimed| in_doubt && claimed.aged && n == 1);
                let seen = model::Seen {
                    tie,
                    aged: aged.map(|_| true),
                };
                self.model.claim_as(self.now, &seen)
            })
            .collect();
        let expected_ids: Vec<i64> = expected.iter().map(|claim| claim.id).collect();
        prop_assert_eq!(ids(&claimed), expected_ids, "which rows, in which order");
        for (claimed, expected) in claimed.into_iter().zip(expected) {
            prop_assert_eq!(claimed.key.as_str(), &expected.key);
            prop_assert_eq!(claimed.aged, expected.aged, "out of order");
            prop_assert_eq!(i128::from(claimed.charge.step.get()), expected.step);
            if fair {
                prop_assert_eq!(i128::from(claimed.lag.get()), expected.lag());
            }
            self.table.mark_claimed(expected.id);
            self.charged(&expected.key, [expected.step, expected.group_step]);
            self.open[session].push((expected, claimed.charge));
        }
        Ok(())
    }

    pub fn set_policy(&mut self, policy: model::Policy) {
        let settings = Policy {
            key_max_running: policy.cap,
            rate_limit: policy.rate,
            key_rate_limit: policy.key_rate,
            paused: policy.paused,
            aging: policy.aging,
            separator: policy.separator,
            ..Policy::default()
        };
        let mut sched = self.board.sched();
        sched.set_policy(self.queue, &settings, self.now);
        assert_eq!(sched.policy(self.queue), settings);
        self.model.set_policy(policy, self.now);
    }

    fn claim_aside(&mut self, session: usize, id: i64) -> Result<(), TestCaseError> {
        let task = self.model.tasks[&id].clone();
        let row = self.table.row(id);
        let (tier, name) = (priority(task.priority), key(&task.key));
        let taken = self
            .board
            .sched()
            .claim_aside(self.queue, tier, &name, task.band, row, self.now);
        match (taken, self.model.claim_aside(id, self.now)) {
            (Ok((accounted, charge)), Ok(expected)) => {
                prop_assert_eq!(i128::from(accounted.lag.get()), expected.lag());
                prop_assert_eq!(i128::from(accounted.step.get()), expected.step);
                self.table.lock(session as u32, id);
                self.table.mark_claimed(id);
                self.charged(&expected.key, [expected.step, expected.group_step]);
                self.open[session].push((expected, charge));
            }
            (Err(refused), Err(held_back)) => {
                let expected = match held_back {
                    HeldBack::Paused => Refused::Paused,
                    HeldBack::Cap => Refused::Capped,
                    HeldBack::Rate => Refused::Limited,
                };
                prop_assert_eq!(refused, expected);
            }
            (taken, expected) => prop_assert!(false, "{taken:?}, not {expected:?}"),
        }
        Ok(())
    }

    fn roll_back(&mut self, session: usize, keep: usize) {
        while self.open[session].len() > keep {
            let Some((claim, charge)) = self.open[session].pop() else {
                return;
            };
            self.table.give_back(claim.id);
            self.board.sched().undo(&charge, self.now);
            self.model.undo(&claim, self.now);
        }
    }

    pub fn commit(&mut self, session: usize) {
        for (claim, charge) in std::mem::take(&mut self.open[session]) {
            self.table.rows.remove(&claim.id);
            self.board.sched().kept(&charge, self.now);
            self.running.push(claim.id);
        }
    }

    pub fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Enqueue {
                key,
                priority,
                band,
                due,
                weight,
                count,
            } => {
                for i in 0..count {
                    let id = self.next_id;
                    self.next_id += 1;
                    let due = self.due(due).saturating_add(i64::from(i / 2) * SECOND);
                    self.put(Task {
                        id,
                        priority,
                        key: KEYS[key].into(),
                        band,
                        due,
                        weight: weight.map(|weight| WEIGHTS[weight]),
                        state: State::Pending,
                    });
                }
            }
            Op::Claim { session, n, fair } => self.claim(session, n, fair)?,
            Op::RollbackTo { session, keep } => self.roll_back(session, keep),
            Op::Commit { session } => self.commit(session),
            Op::Release { nth } => {
                if !self.running.is_empty() {
                    let id = self.running.swap_remove(nth % self.running.len());
                    let task = self.model.tasks[&id].clone();
                    let (tier, name) = (priority(task.priority), key(&task.key));
                    self.board
                        .sched()
                        .refund(self.queue, tier, &name, 1.0, task.weight);
                    self.board
                        .sched()
                        .running_delta(self.queue, &name, -1, self.now);
                    self.model.release(id, self.now);
                    self.put(Task {
                        state: State::Pending,
                        ..task
                    });
                }
            }
            Op::Complete { nth, cost } => {
                if !self.running.is_empty() {
                    let id = self.running.swap_remove(nth % self.running.len());
                    let task = self.model.tasks[&id].clone();
                    let (tier, name) = (priority(task.priority), key(&task.key));
                    let cost = cost.map(|cost| f64::from(cost) * 0.75);
                    let mut sched = self.board.sched();
                    if let Some(cost) = cost {
                        sched.correct_cost(self.queue, tier, &name, cost - 1.0, task.weight);
                    }
                    sched.running_delta(self.queue, &name, -1, self.now);
                    if let Some(steps) = self.model.complete(id, cost) {
                        self.charged(&task.key, steps);
                    }
                }
            }
            Op::Override { key: name, weight } => {
                let weight = weight.map(|weight| WEIGHTS[weight]);
                let set = weight.and_then(|weight| Weight::new(weight).ok());
                let name = KEYS[name];
                self.board
                    .sched()
                    .set_override(self.queue, &key(name), set)
                    .expect("room");
                self.model.set_override(name, weight, self.now);
            }
            Op::Aside { session, nth } => {
                if let Some(id) = self.pending(nth) {
                    self.doubt(id);
                    self.claim_aside(session, id)?;
                }
            }
            Op::Policy(policy) => {
                self.set_policy(policy);
            }
            Op::Charge {
                key: name,
                priority: tier,
                cost,
                abort,
            } => {
                let cost = f64::from(cost) * 0.5;
                let name = KEYS[name];
                let charged = self
                    .board
                    .sched()
                    .charge(self.queue, priority(tier), &key(name), cost, None, self.now)
                    .expect("room on the board");
                let expected = self.model.charge(tier, name, cost);
                self.charged(&expected.key, [expected.step, expected.group_step]);
                prop_assert_eq!(i128::from(charged.lag.get()), expected.lag());
                prop_assert_eq!(i128::from(charged.step.get()), expected.step);
                if abort {
                    self.board.sched().undo_charge(&charged);
                    self.model.undo_charge(&expected);
                }
            }
            Op::Wait { micros } => self.now += micros,
            Op::Delete { nth } => {
                if let Some(id) = self.pending(nth) {
                    self.doubt(id);
                    self.table.rows.remove(&id);
                    self.model.remove(id, self.now);
                }
            }
            Op::Postpone { nth, due } => {
                if let Some(id) = self.pending(nth) {
                    self.doubt(id);
                    let due = self.due(due);
                    if let Some(task) = self.model.remove(id, self.now) {
                        self.put(Task { due, ..task });
                    }
                }
            }
            Op::Move { nth, key, priority } => {
                if let Some(id) = self.pending(nth) {
                    self.doubt(id);
                    if let Some(task) = self.model.remove(id, self.now) {
                        self.put(Task {
                            key: KEYS[key].into(),
                            priority,
                            ..task
                        });
                    }
                }
            }
            Op::Lock { nth } => {
                if let Some(id) = self.pending(nth) {
                    self.doubt(id);
                    self.table.rows.get_mut(&id).expect("a pending row").lock = Some(STRANGER);
                    self.model.set_state(id, State::Locked, self.now);
                    self.locked.push(id);
                }
            }
            Op::Unlock => {
                for id in std::mem::take(&mut self.locked) {
                    self.table.give_back(id);
                    self.model.set_state(id, State::Pending, self.now);
                    // As the sweep would: nothing tells the board when a lock is released.
                    let task = self.model.tasks[&id].clone();
                    self.note(&task);
                }
            }
            Op::Forget { idle_for } => {
                let mut gone = Vec::new();
                self.board
                    .sched()
                    .forget(self.queue, self.now, idle_for, false, &mut gone);
                for (tier, name) in gone {
                    prop_assert!(
                        self.model.forget(tier.get(), name.as_str()),
                        "{name} was forgotten in tier {} though it has work",
                        tier.get()
                    );
                }
                self.model.reset_empty_tiers();
            }
        }
        Ok(())
    }
}
