//! The structures under the rules: the ordered set, the slots, eviction, forgetting, restarts, and that nothing panics.

use std::collections::BTreeSet;

use harvest_fair_core_tests::harness::{MemoryBoard, Shop, key, priority};
use harvest_fair_core_tests::names::QueueName;
use harvest_fair_core_tests::sfq::tree::{Links, NIL, Nodes, Tree};
use harvest_fair_core_tests::sfq::{
    Error, Full, LaneRef, Next, Order, Pick, QueueId, QueueState, Row, RowPos, Sched, Ticks,
};
use proptest::prelude::*;

/// Records of a tree: key and links.
struct Records(Vec<(i8, Links)>);

#[derive(Default)]
struct ByKey;

impl Nodes<ByKey> for Records {
    type Key = i8;

    fn key(&self, slot: u32) -> i8 {
        self.0[slot as usize].0
    }

    fn links(&self, slot: u32) -> &Links {
        &self.0[slot as usize].1
    }

    fn links_mut(&mut self, slot: u32) -> &mut Links {
        &mut self.0[slot as usize].1
    }
}

fn row(due: i64, id: i64) -> Row {
    Row {
        pos: RowPos::new(due, id),
        weight: None,
    }
}

/// Picks, and confirms with nothing after: the only row of its key.
fn claim_only_row(sched: &mut Sched<'_>, queue: QueueId, now: i64) -> Option<Pick> {
    let pick = sched.pick(queue, now, Order::Fair, &[])?;
    sched.confirm(&pick, true, Next::End, now);
    sched.kept(&pick.charge(row(pick.expect.due, pick.expect.id)), now);
    Some(pick)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_ordered_set_is_an_ordered_set(
        changes in proptest::collection::vec((1..60u32, any::<i8>()), 1..300),
    ) {
        let mut records = Records(vec![(0, Links::default()); 60]);
        let mut tree = Tree::<ByKey>::default();
        let mut expected = BTreeSet::new();
        for (slot, new) in changes {
            let old = records.0[slot as usize].0;
            if expected.remove(&(old, slot)) {
                tree.remove(&mut records, slot);
            }
            // Half of the changes move a record, the others take it out.
            if new % 2 == 0 {
                records.0[slot as usize].0 = new;
                tree.insert(&mut records, slot);
                expected.insert((new, slot));
            }
            tree.check(&records).map_err(TestCaseError::fail)?;
            let mut order = Vec::new();
            let mut at = tree.first(&records);
            while at != NIL {
                order.push((records.key(at), at));
                at = tree.next(&records, at);
            }
            prop_assert_eq!(&order, &expected.iter().copied().collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_region_is_refused_unless_it_is_large_enough_aligned_and_set_up() {
    let bytes = Sched::bytes_needed(4, 100);
    let mut region = vec![0u8; bytes + 16];
    let start = region.as_ptr().align_offset(8);
    let too_small = Sched::init(&mut region[start..start + bytes - 1], 4, 100).err();
    assert_eq!(too_small, Some(Error::TooSmall));
    let misaligned = Sched::init(&mut region[start + 1..], 4, 100).err();
    assert_eq!(misaligned, Some(Error::Misaligned));
    let not_set_up = Sched::attach(&mut region[start..]).err();
    assert_eq!(not_set_up, Some(Error::NotInitialised));
    assert!(Sched::init(&mut region[start..], 4, 100).is_ok());
    assert!(Sched::attach(&mut region[start..start + bytes]).is_ok());
}

#[test]
fn a_key_costs_at_most_544_bytes() {
    let grown = Sched::bytes_needed(1, 2_000) - Sched::bytes_needed(1, 1_000);
    assert_eq!(grown, 1_000 * Sched::bytes_per_key());
    assert!(Sched::bytes_per_key() <= 544);
}

#[test]
fn a_full_board_gives_up_idle_keys_but_never_one_with_work() {
    let mut board = MemoryBoard::new(1, 3);
    let queue = board.open("q");
    let tier = priority(3);
    let mut sched = board.sched();
    for (id, name) in (1..).zip(["a", "b", "c"]) {
        sched
            .note(queue, tier, &key(name), 0, row(0, id), 10)
            .unwrap();
    }
    assert_eq!(
        sched.note(queue, tier, &key("d"), 0, row(0, 4), 10),
        Err(Full::Keys)
    );
    assert_eq!(sched.counters(queue).full_rejections, 1);
    // A claim in flight is work, too.
    let pick = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    sched.confirm(&pick, true, Next::End, 10);
    assert_eq!(
        sched.note(queue, tier, &key("d"), 0, row(0, 4), 10),
        Err(Full::Keys)
    );
    sched.kept(&pick.charge(row(0, 1)), 10);
    // It still runs, so its count must stay, and with it the record that another key would need.
    assert!(
        sched
            .note(queue, tier, &key("d"), 0, row(0, 4), 10)
            .is_err()
    );
    assert_eq!(sched.counters(queue).evictions, 0);
    sched.running_delta(queue, &key("a"), -1, 10);
    assert!(sched.note(queue, tier, &key("d"), 0, row(0, 4), 10).is_ok());
    assert_eq!(sched.counters(queue).evictions, 1);
    let mut left = Vec::new();
    sched.entries(queue, |entry| left.push(entry.key.as_str().to_string()));
    left.sort();
    assert_eq!(left, ["b", "c", "d"]);
    sched.check().unwrap();
}

#[test]
fn a_key_without_debt_is_evicted_before_one_with() {
    let mut shop = Shop::new(3);
    shop.enqueue("debtor", 1);
    shop.claim(1);
    shop.enqueue("a", 2);
    shop.claim(2);
    // The debtor was idle first, but owes its claim; "a" has been overtaken by the clock.
    shop.enqueue("b", 3);
    let (queue, now) = (shop.queue, shop.now);
    let mut sched = shop.board.sched();
    for name in ["debtor", "a"] {
        sched.set_running(queue, &key(name), 0);
    }
    sched.correct_cost(queue, priority(3), &key("debtor"), 5.0, None);
    sched.correct_cost(queue, priority(3), &key("a"), -2.0, None);
    sched
        .note(queue, priority(3), &key("new"), 0, row(0, 99), now)
        .unwrap();
    let mut left = Vec::new();
    sched.entries(queue, |entry| left.push(entry.key.as_str().to_string()));
    left.sort();
    assert_eq!(left, ["b", "debtor", "new"]);
}

#[test]
fn idle_keys_are_forgotten_in_time_and_an_idle_tier_starts_anew() {
    let mut shop = Shop::default();
    shop.enqueue("a", 3);
    shop.enqueue("b", 2);
    shop.claim(4);
    let (queue, hour) = (shop.queue, 3_600_000_000);
    let forget = |shop: &mut Shop, preview| {
        let mut gone = Vec::new();
        let count = shop
            .board
            .sched()
            .forget(queue, shop.now, hour, preview, &mut gone);
        assert_eq!(count as usize, gone.len());
        gone.len()
    };
    assert_eq!(forget(&mut shop, false), 0);
    shop.now += hour;
    // "b" has nothing pending, but two tasks run.
    assert_eq!(forget(&mut shop, false), 0);
    let now = shop.now;
    shop.board.sched().running_delta(queue, &key("b"), -2, now);
    shop.now += hour - 1;
    assert_eq!(forget(&mut shop, false), 0);
    shop.now += 1;
    assert_eq!(forget(&mut shop, true), 1);
    assert_eq!(forget(&mut shop, false), 1);
    assert!(shop.clock(3) > Ticks::ZERO);
    shop.claim(1);
    let now = shop.now;
    shop.board.sched().running_delta(queue, &key("a"), -3, now);
    shop.now += hour;
    assert_eq!(forget(&mut shop, false), 1);
    assert_eq!(shop.clock(3), Ticks::ZERO);
    assert!(shop.board.sched().take_rewrite(queue, priority(3)));
    assert_eq!(shop.board.sched().usage().keys, 0);
    shop.board.sched().check().unwrap();
}

/// A queue in which somebody holds the only row of `held` while claims of `other` carry the clock to 1.
fn held_back() -> (Shop, i64) {
    let mut shop = Shop::default();
    let id = shop.add("held", 3, 0, shop.now - 10, None);
    shop.table.rows.get_mut(&id).expect("the new row").lock = Some(99);
    shop.enqueue("other", 3);
    assert_eq!(shop.keys(2, 1), ["other", "other"]);
    assert_eq!(shop.clock(3).units(), 1.0);
    (shop, id)
}

#[test]
fn a_key_whose_rows_others_hold_does_not_stop_the_clock_and_comes_back_at_it() {
    let (mut shop, id) = held_back();
    shop.add("newcomer", 3, 0, shop.now - 20, None);
    shop.table.give_back(id);
    let served = shop.claim(3);
    let keys: Vec<&str> = served.iter().map(|served| served.key.as_str()).collect();
    // Both start at the clock, so the row that has been due for longer goes first.
    assert_eq!(keys, ["newcomer", "held", "other"]);
    assert_eq!(served[1].start.units(), 1.0);
}

#[test]
fn a_row_that_becomes_claimable_ends_the_time_in_which_a_key_was_held_back() {
    let (mut shop, _) = held_back();
    shop.enqueue("held", 1);
    let queue = shop.queue;
    let mut sched = shop.board.sched();
    sched.correct_cost(queue, priority(3), &key("held"), 0.5, None);
    sched.entries(queue, |entry| {
        if entry.key == key("held") {
            assert_eq!(entry.pass.units(), 1.5);
        }
    });
}

#[test]
fn the_cursor_does_not_pass_a_held_row() {
    let mut board = MemoryBoard::new(1, 4);
    let queue = board.open("q");
    let mut sched = board.sched();
    for id in [1, 5] {
        sched
            .note(queue, priority(3), &key("a"), 0, row(0, id), 10)
            .unwrap();
    }
    let first = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    // Something stood before row 1, and somebody held it.
    sched.confirm(&first, false, Next::Row(row(0, 5)), 10);
    let second = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    assert_eq!(
        (second.cursor, second.expect),
        (first.cursor, row(0, 5).pos)
    );
    sched.hold(&second, row(0, 5).pos, Next::Row(row(0, 9)), 10);
    let third = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    assert_eq!((third.cursor, third.expect), (first.cursor, row(0, 9).pos));
    // The next look meets no held row.
    sched.confirm(&third, true, Next::Unknown, 10);
    let fourth = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    assert_eq!((fourth.cursor, fourth.exact), (row(0, 10).pos, false));
}

#[test]
fn what_is_given_back_never_takes_a_pass_below_the_clock() {
    let mut shop = Shop::default();
    shop.enqueue("a", 1);
    shop.enqueue("b", 4);
    shop.claim(5);
    let (queue, clock) = (shop.queue, shop.clock(3));
    assert_eq!(clock.units(), 3.0);
    let mut sched = shop.board.sched();
    // "a" is idle and behind the clock, "b" a claim ahead of it; then both are three units dearer.
    for name in ["a", "b"] {
        sched.correct_cost(queue, priority(3), &key(name), 3.0, None);
    }
    sched.correct_cost(queue, priority(3), &key("a"), -50.0, None);
    sched.refund(queue, priority(3), &key("b"), 50.0, None);
    let charged = sched
        .charge(queue, priority(3), &key("c"), 2.0, None, shop.now)
        .unwrap();
    assert_eq!(charged.start, clock);
    sched.undo_charge(&charged);
    sched.entries(queue, |entry| {
        assert_eq!(entry.pass, clock, "{:?}", entry.key)
    });
}

#[test]
fn a_restart_restores_lags_from_the_snapshot() {
    let mut shop = Shop::default();
    shop.weigh("b", 4.0);
    shop.enqueue("a", 40);
    shop.enqueue("b", 40);
    shop.claim(33);
    let queue = shop.queue;
    let mut snapshot = Vec::new();
    shop.board.sched().take_dirty(queue, &mut snapshot, 1);
    shop.board.sched().take_dirty(queue, &mut snapshot, 100);
    assert_eq!(snapshot.len(), 2);
    let mut again = Vec::new();
    shop.board.sched().take_dirty(queue, &mut again, 100);
    assert!(again.is_empty());
    shop.board.sched().mark_dirty(queue, &snapshot);
    shop.board.sched().take_dirty(queue, &mut again, 100);
    assert_eq!(again.len(), 2);

    let mut after = Shop::default();
    let (queue, now) = (after.queue, after.now);
    after
        .board
        .sched()
        .set_queue_state(queue, QueueState::Loading);
    // Rows, one of them of a key that was never charged, are found before, between and after the persisted passes.
    after.weigh("b", 4.0);
    after.enqueue("a", 40);
    after.enqueue("new", 1);
    for saved in &snapshot {
        let mut sched = after.board.sched();
        sched
            .restore(
                queue,
                saved.priority,
                &saved.key,
                saved.pass,
                saved.last_start,
                now,
            )
            .unwrap();
    }
    after.enqueue("b", 40);
    let charged = after
        .board
        .sched()
        .charge(queue, priority(3), &key("busy"), 5.0, None, now);
    assert!(charged.is_ok());
    after.board.sched().finish_load(queue);
    after.board.sched().entries(queue, |entry| {
        if entry.key == key("busy") {
            assert_eq!(entry.lag.units(), 5.0, "a charge made while loading");
        }
    });
    after.board.sched().check().unwrap();
    assert_eq!(
        after.board.sched().queue_state(queue),
        Some(QueueState::Loaded)
    );
    assert!(after.board.sched().take_rewrite(queue, priority(3)));
    assert_eq!(after.clock(3), Ticks::ZERO);
    let clock = shop.clock(3);
    let before: Vec<_> = shop
        .waiting()
        .into_iter()
        .map(|(name, pass)| (name, pass.minus(clock)))
        .collect();
    for (name, pass) in after.waiting() {
        let lag = before
            .iter()
            .find(|(other, _)| *other == name)
            .map(|(_, lag)| *lag);
        assert_eq!(pass, lag.unwrap_or(Ticks::ZERO), "{name}");
    }
    assert_eq!(after.keys(1, 1), ["new"]);
    assert_eq!(after.keys(10, 1), shop.keys(10, 1));
}

#[test]
fn a_tier_starts_anew_at_zero_before_its_clock_could_overflow() {
    let mut shop = Shop::at_clock(1 << 60);
    shop.weigh("light", 0.001);
    shop.enqueue("light", 1);
    shop.enqueue("a", 2);
    let served = shop.claim(3);
    let starts: Vec<f64> = served.iter().map(|served| served.start.units()).collect();
    assert_eq!(starts, [0.0, 0.0, 1.0]);
    assert_eq!(shop.clock(3).units(), 1.0);
    let queue = shop.queue;
    assert!(shop.board.sched().take_rewrite(queue, priority(3)));
    let mut snapshot = Vec::new();
    shop.board.sched().take_dirty(queue, &mut snapshot, 100);
    // "warm-up", which carried the clock there, is one claim ahead of where the clock was.
    let mut lags: Vec<(&str, f64)> = snapshot
        .iter()
        .map(|saved| (saved.key.as_str(), saved.pass.units()))
        .collect();
    lags.sort_by(|a, b| a.0.cmp(b.0));
    assert_eq!(lags, [("a", 2.0), ("light", 1_000.0), ("warm-up", 1.0)]);
}

#[test]
fn scopes_are_dropped_whole_and_stale_ids_answer_nothing() {
    let mut board = MemoryBoard::new(4, 8);
    let name = QueueName::parse("q").unwrap();
    let mut sched = board.sched();
    let mine = sched.open_queue(1, &name).unwrap();
    let other = sched.open_queue(2, &name).unwrap();
    assert_ne!(mine, other);
    for queue in [mine, other] {
        sched
            .note(queue, priority(3), &key("a"), 0, row(0, 1), 10)
            .unwrap();
    }
    let pick = sched.pick(mine, 10, Order::Fair, &[]).unwrap();
    sched.drop_scope(1);
    sched.check().unwrap();
    assert_eq!(sched.find_queue(1, &name), None);
    assert_eq!(sched.find_queue(2, &name), Some(other));
    assert_eq!(sched.usage().queues, 1);
    assert_eq!(sched.usage().keys, 1);
    // The slots are used again, and the old pick must not touch their new holders.
    let again = sched.open_queue(1, &name).unwrap();
    sched
        .note(again, priority(3), &key("b"), 0, row(0, 1), 10)
        .unwrap();
    sched.retract(&pick, 10);
    sched.undo(&pick.charge(row(0, 1)), 10);
    sched.confirm(&pick, true, Next::End, 10);
    assert!(sched.queue_state(mine).is_none());
    assert!(sched.pick(mine, 10, Order::Fair, &[]).is_none());
    assert!(sched.key_of(&pick).is_none());
    sched.check().unwrap();
    assert_eq!(
        claim_only_row(&mut sched, again, 10).map(|pick| pick.step),
        Some(pick.step)
    );

    let epoch = sched.epoch();
    let pick = sched.pick(other, 10, Order::Fair, &[]).unwrap();
    sched.wipe();
    assert_eq!(sched.epoch(), epoch + 1);
    assert_eq!(sched.usage().queues, 0);
    sched.kept(&pick.charge(row(0, 1)), 10);
    sched.check().unwrap();
}

#[test]
fn a_paused_queue_gives_nothing() {
    let mut shop = Shop::default();
    shop.enqueue("a", 1);
    let queue = shop.queue;
    shop.board.sched().set_paused(queue, true);
    assert!(shop.claim(1).is_empty());
    assert!(!shop.board.sched().has_eligible(queue));
    shop.board.sched().set_paused(queue, false);
    assert!(shop.board.sched().has_eligible(queue));
    assert_eq!(shop.claim(1).len(), 1);
}

#[test]
fn a_sleeping_key_wakes_when_its_first_row_comes_due() {
    let mut shop = Shop::default();
    let first = shop.now + 50;
    shop.add("a", 3, 0, first + 50, None);
    shop.add("a", 3, 1, first, None);
    shop.add("b", 3, 0, i64::MAX, None);
    let queue = shop.queue;
    assert_eq!(shop.board.sched().next_timer(queue), Some(first));
    assert!(shop.claim(9).is_empty());
    shop.now = first;
    assert_eq!(shop.claim(9).len(), 1);
    assert_eq!(shop.board.sched().next_timer(queue), Some(first + 50));
    shop.now = i64::MAX;
    assert_eq!(shop.claim(9).len(), 1, "infinity never comes");
    assert_eq!(shop.board.sched().next_timer(queue), None);
}

#[test]
fn a_claim_that_finds_the_clock_set_back_waits_for_it() {
    let mut shop = Shop::default();
    shop.now += 100;
    shop.enqueue("a", 1);
    shop.now -= 100;
    assert!(shop.claim(1).is_empty());
    shop.now += 100;
    assert_eq!(shop.claim(1).len(), 1);
}

#[test]
fn a_new_handicap_moves_the_rows_that_stand_back() {
    let mut shop = Shop::default();
    let second = 1_000_000;
    let back = shop.add("a", 3, 1, shop.now - 20 * second, None);
    let ordinary = shop.add("a", 3, 0, shop.now - second, None);
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().set_handicap(queue, 5 * second, now);
    let ids: Vec<i64> = shop.claim(2).iter().map(|served| served.handle.0).collect();
    assert_eq!(ids, [back, ordinary]);
}

/// One call of the API, its arguments still to be made of numbers.
type Call = (u8, i64, i64, u8);

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

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
    let names = ["", "a", "b", "c", "d", "e"];
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
