//! Those who enqueue, and those who meddle.

use std::sync::Mutex;

use harvest_fair_core_tests::harness::{key, priority};
use harvest_fair_core_tests::stage::{Cue, Dice, Script};

use crate::world::{KEYS, World};

pub fn producer(world: &Mutex<World>, seed: u64, commits: usize) -> Script<'_> {
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
            for &id in &ids {
                world.lock().unwrap().show(id);
            }
            for id in ids {
                cue.pause();
                let mut world = world.lock().unwrap();
                // Claimed in between, by whoever saw it earlier: the note is late, and harmless.
                if let Some(stored) = world.table.rows.get(&id) {
                    let (name, row) = (stored.key.clone(), world.table.row(id));
                    world.note(&name, row);
                }
            }
        }
    })
}

/// Locks rows for a while, for no reason of ours; deletes some, postpones some, claims some by id.
pub fn stranger(world: &Mutex<World>, seed: u64, visits: usize) -> Script<'_> {
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
                        let stored = world.table.rows.get_mut(&id).expect("a locked row");
                        stored.due = due;
                        stored.lock = None;
                        (stored.key.clone(), world.table.row(id))
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
