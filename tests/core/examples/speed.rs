//! How long the core holds the board's lock: `cargo run --release -p harvest_fair_core_tests --example speed`.

use std::time::Instant;

use harvest_fair_core_tests::harness::{MemoryBoard, key, priority};
use harvest_fair_core_tests::sfq::{Board, CopyBuffer, Next, Order, Policy, Row, RowPos};

const ROUNDS: u32 = 200_000;

/// Nanoseconds of one round, on average.
fn time(rounds: u32, mut round: impl FnMut(u32)) -> f64 {
    let started = Instant::now();
    for i in 0..rounds {
        round(i);
    }
    started.elapsed().as_nanos() as f64 / f64::from(rounds)
}

fn main() {
    println!(
        "{:>8} {:>18} {:>22} {:>18}",
        "keys", "note (ns)", "pick and charge (ns)", "outcome (ns)"
    );
    for keys in [1, 100, 1_000, 16_384, 100_000] {
        let mut board = MemoryBoard::new(16, keys);
        let queue = board.open("q");
        let names: Vec<String> = (0..keys).map(|i| format!("customer-{i}")).collect();
        let note = time(keys, |i| {
            let row = Row {
                pos: RowPos::new(i64::from(i % 97), i64::from(i)),
                weight: None,
            };
            let name = key(&names[i as usize]);
            board
                .with(|sched| sched.note(queue, priority(3), &name, 0, row, 1_000))
                .expect("room");
        });
        let weights = [None, Some(0.5), Some(2.0), Some(7.0)];
        let mut outcome = 0.0;
        let pick = time(ROUNDS, |i| {
            let pick = board
                .with(|sched| sched.pick(queue, 1_000, Order::Fair, &[]))
                .expect("a key");
            let started = Instant::now();
            let pos = RowPos::new(pick.expect.due, pick.expect.id + 1);
            let next = Row {
                pos,
                weight: weights[(i % 4) as usize],
            };
            board.with(|sched| {
                sched.confirm(&pick, true, Next::Row(next), 1_000);
                sched.kept(&pick.charge(next), 1_000);
            });
            outcome += started.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
        });
        println!(
            "{keys:>8} {note:>18.0} {:>22.0} {outcome:>18.0}",
            pick - outcome
        );
    }
    held_back();
    copies();
}

/// What a pick costs beside keys with work that are at their cap.
fn held_back() {
    println!("{:>8} {:>26}", "capped", "pick and retract (ns)");
    for capped in [0, 1_000, 16_384, 100_000] {
        let mut board = MemoryBoard::new(16, capped + 100);
        let queue = board.open("q");
        let policy = Policy {
            key_max_running: Some(1),
            ..Policy::default()
        };
        let mut sched = board.sched();
        sched.set_policy(queue, &policy, 1_000);
        for i in 0..capped + 100 {
            let name = format!("customer-{i}");
            let row = Row {
                pos: RowPos::new(0, i64::from(i)),
                weight: None,
            };
            sched
                .note(queue, priority(3), &key(&name), 0, row, 1_000)
                .expect("room");
            if i < capped {
                sched.set_running(queue, &key(&name), 1);
            }
        }
        let pick = time(ROUNDS, |_| {
            board.with(|sched| {
                let pick = sched
                    .pick(queue, 1_000, Order::Fair, &[])
                    .expect("a key that is not capped");
                sched.retract(&pick, 1_000);
            });
        });
        println!("{capped:>8} {pick:>26.0}");
    }
}

/// How long a preview holds the board's lock.
fn copies() {
    println!(
        "{:>8} {:>18} {:>18}",
        "keys", "copy 100 (us)", "copy all (us)"
    );
    for keys in [1_000, 16_384, 100_000] {
        let mut board = MemoryBoard::new(16, keys);
        let queue = board.open("q");
        for i in 0..keys {
            let name = format!("customer-{i}");
            let row = Row {
                pos: RowPos::new(0, i64::from(i)),
                weight: None,
            };
            board
                .with(|sched| sched.note(queue, priority(3), &key(&name), 0, row, 1_000))
                .expect("room");
        }
        let mut buffer = CopyBuffer::default();
        let mut copy = |limit: usize| {
            time(20, |_| {
                board.with(|sched| {
                    let copied = sched.extract(queue, limit, 0, &mut buffer);
                    assert!(copied.is_ok());
                });
            }) / 1_000.0
        };
        println!("{keys:>8} {:>18.0} {:>18.0}", copy(100), copy(usize::MAX));
    }
}
