//! Several claimers at once, interleaved at random at every point where one could see what another did: producers whose
//! commits and notes come apart, strangers who lock rows, aborts, errors and unwinding in the middle of a claim.

mod claimer;
mod others;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use harvest_fair_core_tests::harness::Owner;
use harvest_fair_core_tests::model::{Model, State, Task};
use harvest_fair_core_tests::stage::{Dice, perform};

use claimer::claimer;
use others::{producer, stranger};
use world::World;

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
        world.into_inner().unwrap().drain();
    });
}

/// Tasks of several keys, some of them few, with weights of their own.
fn backlog(world: &mut World, model: &mut Model, dice: &mut Dice) {
    for (name, weight) in [("", 1.0), ("a", 1.0), ("b", 4.0), ("c", 0.5)] {
        let few = dice.one_in(3);
        for _ in 0..if few { 1 + dice.roll(3) } else { 40 } {
            let due = world.now - dice.roll(50) as i64;
            let id = world.put(name, due, Some(weight));
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
        world.into_inner().unwrap().drain();
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
                world.put(name, due, Some(weight));
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
