//! The structures under the rules: the ordered set, the region and its slots, and what is given back to them.

mod calls;
mod memory;
mod rows;
mod tally;
mod text;
mod tree;

use harvest_fair_core_tests::harness::{MemoryBoard, Shop, key, passes_on, priority, row};
use harvest_fair_core_tests::names::QueueName;
use harvest_fair_core_tests::sfq::{Error, Next, Order, Pick, QueueId, Sched};

/// Picks, and confirms with nothing after: the only row of its key.
fn claim_only_row(sched: &mut Sched<'_>, queue: QueueId, now: i64) -> Option<Pick> {
    let pick = sched.pick(queue, now, Order::Fair, &[])?;
    sched.confirm(&pick, true, Next::End, now);
    sched.kept(&pick.charge(row(pick.expect.due, pick.expect.id)), now);
    Some(pick)
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
fn a_key_costs_at_most_512_bytes() {
    let grown = Sched::bytes_needed(1, 2_000) - Sched::bytes_needed(1, 1_000);
    assert_eq!(grown, 1_000 * Sched::bytes_per_key());
    assert!(Sched::bytes_per_key() <= 512);
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
    let at_clock = ["a", "b", "c"].map(|name| (name.to_string(), 3.0));
    assert_eq!(passes_on(&sched, queue), at_clock);
}
