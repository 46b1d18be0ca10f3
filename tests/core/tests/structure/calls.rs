//! Any calls in any order.

use harvest_fair_core_tests::harness::{LONG_KEY, MemoryBoard, cases, key, priority, row};
use harvest_fair_core_tests::names::QueueName;
use harvest_fair_core_tests::sfq::{LaneRef, Next, Order, Pick, QueueId, Ticks};
use proptest::prelude::*;

/// One call of the API, its arguments still to be made of numbers.
type Call = (u8, i64, i64, u8);

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3_000), ..ProptestConfig::default() })]

    /// Any calls in any order, with outcomes that contradict each other, ids that are stale and times at the ends of time.
    #[test]
    fn nothing_panics_and_the_structure_stays_whole(
        calls in proptest::collection::vec(
            (
                0..32u8,
                prop_oneof![4 => -5..50i64, 1 => Just(i64::MIN), 1 => Just(i64::MAX), 1 => any::<i64>()],
                prop_oneof![4 => 0..20i64, 1 => any::<i64>()],
                any::<u8>(),
            ),
            1..80,
        ),
    ) {
        let mut board = MemoryBoard::new(2, 4);
        let mut queues = vec![board.open("q")];
        let mut picks: Vec<Pick> = Vec::new();
        for call in calls {
            one_call(&mut board, &mut queues, &mut picks, call);
        }
    }
}

fn one_call(board: &mut MemoryBoard, queues: &mut Vec<QueueId>, picks: &mut Vec<Pick>, call: Call) {
    let (what, time, number, choice) = call;
    let names = ["", "a", "b", LONG_KEY, &LONG_KEY[1..], "e"];
    let name = key(names[usize::from(choice) % names.len()]);
    let tier = priority(1 + choice % 5);
    let queue = queues[usize::from(choice / 7) % queues.len()];
    let pick = (!picks.is_empty()).then(|| picks[usize::from(choice / 3) % picks.len()]);
    let other = row(time, number);
    let next = [Next::Unknown, Next::End, Next::Row(other)][usize::from(choice) % 3];
    let clean = choice % 2 == 0;
    let cost = f64::from_bits((number as u64).rotate_left(52) ^ time as u64);
    let mut sched = board.sched();
    match (what, pick) {
        (0..6, _) => {
            let _ = sched.note(queue, tier, &name, choice % 3, other, time.min(40));
        }
        (6..12, _) => {
            let order = if choice % 5 == 0 {
                Order::Due
            } else {
                Order::Fair
            };
            let excluded: Vec<LaneRef> = picks.iter().take(2).map(Pick::lane).collect();
            picks.extend(sched.pick(queue, time, order, if clean { &excluded } else { &[] }));
        }
        (12..14, Some(pick)) => sched.confirm(&pick, clean, next, time),
        (14, Some(pick)) => sched.found(&pick, clean, other, time),
        (15, Some(pick)) => sched.close(&pick, time),
        (16, Some(pick)) => sched.hold(&pick, other.pos, next, time),
        (17, Some(pick)) => sched.retract(&pick, time),
        (18, Some(pick)) => sched.kept(&pick.charge(other), time),
        (19, Some(pick)) => sched.undo(&pick.charge(other), time),
        (20, _) => {
            let charged = sched.charge(queue, tier, &name, cost, Some(cost), time);
            if let (Ok(charged), true) = (charged, clean) {
                sched.undo_charge(&charged);
            }
        }
        (21, _) => sched.refund(queue, tier, &name, cost, None),
        (22, _) => sched.correct_cost(queue, tier, &name, cost, Some(-1.0)),
        (23, _) => sched.running_delta(queue, &name, number as i32, time),
        (24, _) => {
            let (pass, start) = (Ticks::new(time), Ticks::new(number));
            let _ = sched.restore(queue, tier, &name, pass, start, time);
        }
        (25, _) => sched.finish_load(queue),
        (26, _) => {
            sched.forget(queue, time, number, clean, &mut Vec::new());
        }
        (27, _) => sched.set_handicap(queue, number, time),
        (28, _) => {
            let mut dirty = Vec::new();
            sched.take_dirty(queue, &mut dirty, usize::from(choice));
            sched.mark_dirty(queue, &dirty);
            sched.take_rewrite(queue, tier);
        }
        (29, _) if choice > 200 => {
            sched.drop_scope(1);
            let name = QueueName::parse("q").unwrap();
            queues.extend(sched.open_queue(1, &name));
        }
        (30, _) if choice > 240 => {
            sched.wipe();
            let name = QueueName::parse("q").unwrap();
            queues.extend(sched.open_queue(1, &name));
        }
        (_, _) => sched.advance(queue, time),
    }
    sched.entries(queue, |_| {});
    sched
        .check()
        .unwrap_or_else(|fault| panic!("after {call:?}: {fault}"));
}
