//! Claims as a backend makes them, with a pause before each look at what others could change.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use harvest_fair_core_tests::harness::Owner;
use harvest_fair_core_tests::sfq::{
    Board, Charge, Lane, Locked, Memory, Order, Pick, Row, RowPos, Rows, Sched, claim,
};
use harvest_fair_core_tests::stage::{Cue, Dice, Script};

use crate::world::World;

/// One claimer: pauses before each look at the world.
struct Claimer<'w, 'c> {
    world: &'w Mutex<World>,
    cue: &'c Cue,
    owner: Owner,
    dice: Dice,
    /// One in so many looks fails; one in as many unwinds.
    fails: usize,
    memory: Memory<i64>,
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
        // Lost if the call fails, as a backend's is.
        let mut memory = std::mem::take(&mut self.memory);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut board = SharedBoard {
                world: self.world,
                cue: self.cue,
            };
            let order = Order::Fair;
            claim(
                &mut board,
                self,
                &mut memory,
                queue,
                order,
                n,
                now,
                &mut claimed,
            )?;
            Ok::<_, &str>(memory)
        }));
        let failed = match outcome {
            Ok(Ok(memory)) => {
                self.memory = memory;
                false
            }
            Ok(Err(_)) => true,
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
                world.table.mark_claimed(claimed.handle);
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
                    world.finish(claimed.handle);
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
    type Handle = i64;

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Self::Handle)>,
    ) -> Result<bool, Self::Error> {
        self.cue.pause();
        self.fail()?;
        // Small fetches, so that lanes are looked at in pieces.
        let want = want.min(1 + self.dice.roll(4));
        let world = self.world.lock().unwrap();
        Ok(world.table.probe(self.owner, lane, from, want, out))
    }

    fn lock(
        &mut self,
        lane: &Lane,
        row: &Row,
        handle: &Self::Handle,
    ) -> Result<Locked, Self::Error> {
        self.cue.pause();
        self.fail()?;
        let table = &mut self.world.lock().unwrap().table;
        Ok(table.lock_pending(self.owner, lane, *handle, row.pos))
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

pub fn claimer<'w>(
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
            memory: Memory::default(),
            picking: None,
            charges: Vec::new(),
            log,
        };
        for _ in 0..transactions {
            claimer.transact(aborts);
        }
    })
}
