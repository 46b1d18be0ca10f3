//! Rows that cannot be claimed yet, or not by this claimer: held by others, not yet due, of a paused queue.

use harvest_fair_core_tests::harness::{
    MemoryBoard, SECOND, Shop, ids, key, passes_on, priority, row,
};
use harvest_fair_core_tests::sfq::{Next, Order, Sched};

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
    let passes = passes_on(&sched, queue);
    assert!(passes.contains(&("held".into(), 1.5)), "{passes:?}");
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
    let back = shop.add("a", 3, 1, shop.now - 20 * SECOND, None);
    let ordinary = shop.add("a", 3, 0, shop.now - SECOND, None);
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().set_handicap(queue, 5 * SECOND, now);
    assert_eq!(ids(&shop.claim(2)), [back, ordinary]);
}

#[test]
fn a_session_remembers_rows_while_others_are_added_behind_them() {
    let mut shop = Shop::default();
    shop.enqueue("a", 100);
    // Looks at 2, 4, ... rows, as more and more are found to be wanted.
    shop.claim(1);
    for _ in 0..80 {
        shop.now += 1;
        shop.enqueue("a", 1);
        assert_eq!(shop.claim(1).len(), 1);
    }
    assert!(shop.table.probes < 10, "{} looks", shop.table.probes);
    // A row that comes before them is no less served for it.
    let first = shop.add("a", 3, 0, 0, None);
    assert_eq!(ids(&shop.claim(1)), [first]);
}

#[test]
fn what_sessions_remember_is_known_also_after_a_pick_has_come_to_nothing() {
    let mut board = MemoryBoard::new(1, 4);
    let queue = board.open("q");
    let mut sched = board.sched();
    let note = |sched: &mut Sched<'_>, due, id| {
        sched
            .note(queue, priority(3), &key("a"), 0, row(due, id), 100)
            .unwrap();
    };
    note(&mut sched, 10, 1);
    note(&mut sched, 20, 2);
    let mine = sched.pick(queue, 100, Order::Fair, &[]).unwrap();
    // Another session sees row 2, and that somebody holds it.
    let other = sched.pick(queue, 100, Order::Fair, &[]).unwrap();
    let remembered = sched.remember(&other, 20);
    sched.retract(&other, 100);
    sched.retract(&mine, 100);
    note(&mut sched, 30, 3);
    let later = sched.pick(queue, 100, Order::Fair, &[]).unwrap();
    assert_eq!(Some(later.reorders), remembered);
    assert_eq!(
        sched.remember(&other, 30),
        None,
        "it has not looked since row 3 came"
    );
    sched.retract(&later, 100);
    note(&mut sched, 15, 4);
    let between = sched.pick(queue, 100, Order::Fair, &[]).unwrap();
    assert_ne!(Some(between.reorders), remembered);
}
