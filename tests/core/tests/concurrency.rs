//! Several claimers at once, interleaved at random at every point where one could see what another did: producers whose
//! commits and notes come apart, strangers who lock rows, aborts, errors and unwinding in the middle of a claim.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use harvest_fair_core_tests::harness::{MemoryBoard, Owner, Stored, Table, key, priority};
use harvest_fair_core_tests::model::{Model, State, Task};
use harvest_fair_core_tests::sfq::{
    Board, Charge, Lane, Locked, Order, Pick, QueueId, Row, RowPos, Rows, Sched, claim,
};
use harvest_fair_core_tests::stage::{Cue, Dice, Script, perform};

const KEYS: [&str; 4] = ["", "a", "b", "c"];

struct World {
    board: MemoryBoard,
    queue: QueueId,
    table: Table,
    now: i64,
    next_id: i64,
    /// Tasks whose claim has committed.
    done: BTreeSet<i64>,
    enqueued: usize,
    /// Rows that a stranger deleted.
    deleted: usize,
}

impl World {
    fn new() -> Self {
        let mut board = MemoryBoard::new(1, 64);
        let queue = board.open("q");
        World {
            board,
            queue,
            table: Table::default(),
            now: 1_000,
            next_id: 1,
            done: BTreeSet::new(),
            enqueued: 0,
            deleted: 0,
        }
    }

    fn insert(&mut self, name: &str, due: i64, weight: Option<f64>) -> i64 {
        let id = self.next_id;
        self.next_id += 1;
        self.enqueued += 1;
        let stored = Stored {
            priority: priority(3),
            key: name.into(),
            band: 0,
            due,
            weight,
            visible: false,
            lock: None,
            claimed: false,
        };
        self.table.rows.insert(id, stored);
        id
    }

    /// What a commit's callback does with an enqueued, or moved, row.
    fn note(&mut self, name: &str, row: Row) {
        let mut sched = self.board.sched();
        sched
            .note(self.queue, priority(3), &key(name), 0, row, self.now)
            .expect("room");
    }

    fn finish(&mut self, id: i64) {
        assert!(
            self.table.rows.remove(&id).is_some(),
            "task {id} is no longer there"
        );
        assert!(self.done.insert(id), "task {id} was claimed twice");
    }

    fn free_row(&self, dice: &mut Dice) -> Option<i64> {
        let free = |(&id, row): (&i64, &Stored)| (row.visible && row.lock.is_none()).then_some(id);
        let ids: Vec<i64> = self.table.rows.iter().filter_map(free).collect();
        dice.pick(&ids).copied()
    }
}

/// One claimer: pauses before each look at the world.
struct Claimer<'w, 'c> {
    world: &'w Mutex<World>,
    cue: &'c Cue,
    owner: Owner,
    dice: Dice,
    /// One in so many looks fails; one in as many unwinds.
    fails: usize,
    picking: Option<Pick>,
    charges: Vec<Charge>,
    /// Everybody's charged picks, in the order in which they were made.
    log: &'w Mutex<Vec<i64>>,
}

/// What unwinds from a failing look at the rows, as a Postgres error does.
struct Unwound;

impl Claimer<'_, '_> {
    fn fail(&mut self) -> Result<(), &'static str> {
        if self.fails > 0 && self.dice.one_in(self.fails) {
            if self.dice.one_in(2) {
                resume_unwind(Box::new(Unwound));
            }
            return Err("cancelled");
        }
        Ok(())
    }

    /// One transaction: some claims, then commit or abort.
    fn transact(&mut self, aborts: usize) {
        let n = 1 + self.dice.roll(4);
        let (queue, now) = {
            let world = self.world.lock().unwrap();
            (world.queue, world.now)
        };
        let mut claimed = Vec::new();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut board = SharedBoard {
                world: self.world,
                cue: self.cue,
            };
            claim(&mut board, self, queue, Order::Fair, n, now, &mut claimed)
        }));
        let failed = match outcome {
            Ok(outcome) => outcome.is_err(),
            Err(panic) => {
                if !panic.is::<Unwound>() {
                    resume_unwind(panic);
                }
                true
            }
        };
        if !failed {
            let mut world = self.world.lock().unwrap();
            for claimed in &claimed {
                world.table.mark_claimed(claimed.handle.0);
            }
        }
        for _ in 0..self.dice.roll(6) {
            self.cue.pause();
        }
        if failed || (aborts > 0 && self.dice.one_in(aborts)) {
            self.cue.pause();
            self.world.lock().unwrap().table.release_all(self.owner);
            // Others see the rows as free before the board hears of it.
            self.cue.pause();
            let mut world = self.world.lock().unwrap();
            let mut sched = world.board.sched();
            if let Some(pick) = self.picking.take() {
                sched.retract(&pick, now);
            }
            for charge in self.charges.drain(..).rev() {
                sched.undo(&charge, now);
            }
        } else {
            assert_eq!(claimed.len(), self.charges.len());
            self.cue.pause();
            {
                let mut world = self.world.lock().unwrap();
                for claimed in &claimed {
                    world.finish(claimed.handle.0);
                }
            }
            self.cue.pause();
            let mut world = self.world.lock().unwrap();
            for charge in self.charges.drain(..) {
                world.board.sched().kept(&charge, now);
            }
        }
    }
}

struct SharedBoard<'w, 'c> {
    world: &'w Mutex<World>,
    cue: &'c Cue,
}

impl Board for SharedBoard<'_, '_> {
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R {
        self.cue.pause();
        let mut world = self.world.lock().unwrap();
        act(&mut world.board.sched())
    }
}

impl Rows for Claimer<'_, '_> {
    type Error = &'static str;
    type Handle = (i64, RowPos);

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Self::Handle)>,
    ) -> Result<bool, Self::Error> {
        self.cue.pause();
        self.fail()?;
        let mut seen = Vec::new();
        // Small fetches, so that lanes are looked at in pieces.
        let want = want.min(1 + self.dice.roll(4));
        let world = self.world.lock().unwrap();
        let end = world.table.probe(self.owner, lane, from, want, &mut seen);
        out.extend(seen.into_iter().map(|(row, id)| (row, (id, row.pos))));
        Ok(end)
    }

    fn lock(&mut self, handle: &Self::Handle) -> Result<Locked, Self::Error> {
        self.cue.pause();
        self.fail()?;
        Ok(self
            .world
            .lock()
            .unwrap()
            .table
            .lock(self.owner, handle.0, handle.1))
    }

    fn picked(&mut self, pick: &Pick) {
        assert!(self.picking.is_none(), "the pick before has no outcome");
        self.picking = Some(*pick);
        if pick.exact {
            self.log.lock().unwrap().push(pick.expect.id);
        }
    }

    fn settled(&mut self, charge: Option<Charge>) {
        assert!(self.picking.take().is_some(), "an outcome without a pick");
        self.charges.extend(charge);
    }
}

fn claimer<'w>(
    world: &'w Mutex<World>,
    log: &'w Mutex<Vec<i64>>,
    owner: Owner,
    seed: u64,
    transactions: usize,
    fails: usize,
    aborts: usize,
) -> Script<'w> {
    Box::new(move |cue| {
        let dice = Dice::new(seed);
        let mut claimer = Claimer {
            world,
            cue,
            owner,
            dice,
            fails,
            picking: None,
            charges: Vec::new(),
            log,
        };
        for _ in 0..transactions {
            claimer.transact(aborts);
        }
    })
}

fn producer(world: &Mutex<World>, seed: u64, commits: usize) -> Script<'_> {
    Box::new(move |cue| {
        let mut dice = Dice::new(seed);
        for _ in 0..commits {
            cue.pause();
            let mut ids = Vec::new();
            for _ in 0..=dice.roll(3) {
                let mut world = world.lock().unwrap();
                let name = dice.pick(&KEYS).copied().unwrap_or_default();
                let due = world.now + dice.roll(40) as i64 - 30;
                ids.push(world.insert(name, due, None));
            }
            for _ in 0..dice.roll(8) {
                cue.pause();
            }
            // The commit, and only then the notes.
            for id in &ids {
                let mut world = world.lock().unwrap();
                world.table.rows.get_mut(id).expect("an own row").visible = true;
            }
            for id in ids {
                cue.pause();
                let mut world = world.lock().unwrap();
                // Claimed in between, by whoever saw it earlier: the note is late, and harmless.
                if let Some(row) = world.table.rows.get(&id) {
                    let (name, due) = (row.key.clone(), row.due);
                    world.note(
                        &name,
                        Row {
                            pos: RowPos::new(due, id),
                            weight: None,
                        },
                    );
                }
            }
        }
    })
}

/// Locks rows for a while, for no reason of ours; deletes some, postpones some, claims some by id.
fn stranger(world: &Mutex<World>, seed: u64, visits: usize) -> Script<'_> {
    Box::new(move |cue| {
        let mut dice = Dice::new(seed);
        let owner = 1_000;
        for _ in 0..visits {
            cue.pause();
            let id = {
                let mut world = world.lock().unwrap();
                world.now += dice.roll(4) as i64;
                let Some(id) = world.free_row(&mut dice) else {
                    continue;
                };
                world.table.rows.get_mut(&id).expect("a free row").lock = Some(owner);
                id
            };
            for _ in 0..dice.roll(12) {
                cue.pause();
            }
            match dice.roll(6) {
                0 => {
                    let mut world = world.lock().unwrap();
                    world.table.rows.remove(&id);
                    world.deleted += 1;
                }
                1 => {
                    let (name, row) = {
                        let mut world = world.lock().unwrap();
                        let due = world.now + dice.roll(20) as i64 - 10;
                        let row = world.table.rows.get_mut(&id).expect("a locked row");
                        row.due = due;
                        row.lock = None;
                        (
                            row.key.clone(),
                            Row {
                                pos: RowPos::new(due, id),
                                weight: None,
                            },
                        )
                    };
                    cue.pause();
                    world.lock().unwrap().note(&name, row);
                }
                2 => claim_by_id(world, cue, &mut dice, id),
                // Nobody tells the board that the lock is gone.
                _ => world.lock().unwrap().table.release_all(owner),
            }
        }
    })
}

fn claim_by_id(world: &Mutex<World>, cue: &Cue, dice: &mut Dice, id: i64) {
    let (charge, now) = {
        let mut world = world.lock().unwrap();
        let (row, now, queue) = (world.table.row(id), world.now, world.queue);
        let name = world.table.rows[&id].key.clone();
        let mut sched = world.board.sched();
        let taken = sched.take_aside(queue, priority(3), &key(&name), row, now);
        (taken.expect("room").1, now)
    };
    for _ in 0..dice.roll(5) {
        cue.pause();
    }
    if dice.one_in(2) {
        world.lock().unwrap().finish(id);
        cue.pause();
        world.lock().unwrap().board.sched().kept(&charge, now);
    } else {
        world.lock().unwrap().table.give_back(id);
        cue.pause();
        world.lock().unwrap().board.sched().undo(&charge, now);
    }
}

/// How many performances of each kind.
fn rounds(default: u64) -> std::ops::Range<u64> {
    let first = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let count = std::env::var("ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(default);
    first.map_or(0..count, |seed| seed..seed + 1)
}

/// Runs `act` for each seed, and says which one failed.
fn for_each_seed(default: u64, act: impl Fn(u64)) {
    for seed in rounds(default) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| act(seed))) {
            eprintln!("failed with SEED={seed}");
            resume_unwind(panic);
        }
    }
}

/// Claims whatever is left, and checks that everything enqueued was claimed exactly once or deleted.
fn drain(world: Mutex<World>) {
    let mut world = world.into_inner().unwrap();
    world.now += 1_000;
    let (queue, now) = (world.queue, world.now);
    for row in world.table.rows.values() {
        assert!(row.lock.is_none(), "somebody still holds a lock");
    }
    let mut rows = harvest_fair_core_tests::harness::Session::new(&mut world.table, 0);
    let mut claimed = Vec::new();
    claim(
        &mut world.board,
        &mut rows,
        queue,
        Order::Fair,
        10_000,
        now,
        &mut claimed,
    )
    .unwrap();
    for claimed in claimed {
        world.board.sched().kept(&claimed.charge, now);
        world.finish(claimed.handle.0);
    }
    assert!(world.table.rows.is_empty(), "lost: {:?}", world.table.rows);
    assert_eq!(world.done.len() + world.deleted, world.enqueued);
    let sched = world.board.sched();
    sched.check().unwrap();
    sched.entries(queue, |entry| {
        assert_eq!(entry.in_flight, 0, "{:?} keeps claims in flight", entry.key);
        assert_eq!(sched.running(queue, &entry.key), entry.running);
    });
}

#[test]
fn no_task_is_lost_or_claimed_twice_in_any_interleaving() {
    for_each_seed(1_500, |seed| {
        let mut dice = Dice::new(seed);
        let world = Mutex::new(World::new());
        let log = Mutex::new(Vec::new());
        let mut scripts = Vec::new();
        for owner in 0..2 + dice.roll(4) {
            let fails = [0, 10, 40][dice.roll(3)];
            let aborts = [0, 2, 5][dice.roll(3)];
            let seed = seed * 100 + owner as u64;
            scripts.push(claimer(
                &world,
                &log,
                owner as Owner,
                seed,
                12,
                fails,
                aborts,
            ));
        }
        for extra in 0..1 + dice.roll(3) {
            scripts.push(producer(&world, seed * 100 + 50 + extra as u64, 8));
        }
        if dice.one_in(2) {
            scripts.push(stranger(&world, seed * 100 + 99, 10));
        }
        perform(&mut dice, scripts, || {
            world.lock().unwrap().board.sched().check().unwrap();
        });
        drain(world);
    });
}

/// Tasks of several keys, some of them few, with weights of their own.
fn backlog(world: &mut World, model: &mut Model, dice: &mut Dice) {
    for (name, weight) in [("", 1.0), ("a", 1.0), ("b", 4.0), ("c", 0.5)] {
        let few = dice.one_in(3);
        for _ in 0..if few { 1 + dice.roll(3) } else { 40 } {
            let due = world.now - dice.roll(50) as i64;
            let id = world.insert(name, due, Some(weight));
            world.table.rows.get_mut(&id).expect("the new row").visible = true;
            world.note(
                name,
                Row {
                    pos: RowPos::new(due, id),
                    weight: Some(weight),
                },
            );
            let task = Task {
                id,
                priority: 3,
                key: name.into(),
                band: 0,
                due,
                weight: Some(weight),
                state: State::Pending,
            };
            model.enqueue(task, world.now);
        }
    }
}

#[test]
fn concurrent_claimers_are_charged_in_the_order_of_a_single_one() {
    for_each_seed(300, |seed| {
        let mut dice = Dice::new(seed);
        let world = Mutex::new(World::new());
        let log = Mutex::new(Vec::new());
        let mut model = Model::default();
        backlog(&mut world.lock().unwrap(), &mut model, &mut dice);
        let scripts = (0..[1, 2, 8, 16][dice.roll(4)])
            .map(|owner| claimer(&world, &log, owner, seed * 100 + u64::from(owner), 6, 0, 0))
            .collect();
        perform(&mut dice, scripts, || {});
        let now = world.lock().unwrap().now;
        for id in log.into_inner().unwrap() {
            let expected = model.claim(now).expect("the model has as many");
            assert_eq!(id, expected.id);
        }
        drain(world);
    });
}

#[test]
fn transactions_held_open_do_not_disturb_the_shares_of_any_number_of_claimers() {
    for claimers in [1, 2, 8, 16] {
        let world = Mutex::new(World::new());
        let log = Mutex::new(Vec::new());
        for (name, weight) in [("a", 1.0), ("b", 1.0), ("c", 4.0)] {
            let mut world = world.lock().unwrap();
            for _ in 0..600 {
                let due = world.now - 1;
                let id = world.insert(name, due, Some(weight));
                world.table.rows.get_mut(&id).expect("the new row").visible = true;
                world.note(
                    name,
                    Row {
                        pos: RowPos::new(due, id),
                        weight: Some(weight),
                    },
                );
            }
        }
        let scripts = (0..claimers)
            .map(|owner| claimer(&world, &log, owner, u64::from(owner) + 7, 400, 0, 0))
            .collect();
        let keys: Vec<String> = world
            .lock()
            .unwrap()
            .table
            .rows
            .values()
            .map(|row| row.key.clone())
            .collect();
        let mut dice = Dice::new(u64::from(claimers));
        perform(&mut dice, scripts, || {});
        let log = log.into_inner().unwrap();
        let share = |name| {
            log.iter()
                .take(600)
                .filter(|id| keys[**id as usize - 1] == name)
                .count()
        };
        assert_eq!(
            (share("a"), share("b"), share("c")),
            (100, 100, 400),
            "{claimers} claimers"
        );
    }
}
