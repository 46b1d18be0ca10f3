//! Faults that public job queues really had, as far as the core alone can show the right answer; and the reference
//! sequence.

use harvest_fair_core_tests::harness::{SECOND, Shop, count, ids, key, passes_on};
use harvest_fair_core_tests::sfq::{Order, Ticks};

#[test]
fn the_reference_sequence() {
    let mut shop = Shop::default();
    shop.weigh("k1", 1.0);
    shop.weigh("k2", 2.0);
    shop.weigh("k4", 4.0);
    let t0 = shop.now - 10 * SECOND;
    for i in 0..15 {
        for (j, name) in ["k1", "k2", "k4", ""].into_iter().enumerate() {
            shop.add(name, 3, 0, t0 + (4 * i + j as i64) * 10_000, None);
        }
    }
    let keys = shop.keys(60, 1);
    let expected = [
        "k1", "k2", "k4", "", "k4", "k2", "k4", "k4", "k1", "", "k2", "k4", "k4", "k2", "k4", "k4",
        "k1", "",
    ];
    assert_eq!(keys[..expected.len()], expected);
    let queue = shop.queue;
    let passes = passes_on(&shop.board.sched(), queue);
    let expected = [("", 15.0), ("k1", 15.0), ("k2", 7.5), ("k4", 3.75)];
    assert_eq!(
        passes,
        expected.map(|(name, pass)| (name.to_string(), pass))
    );
    assert_eq!(shop.clock(3).units(), 14.0);
}

#[test]
fn a_flood_of_older_rows_does_not_delay_a_newcomer() {
    let mut shop = Shop::default();
    shop.enqueue("a", 200);
    shop.claim(1);
    shop.now += SECOND;
    shop.enqueue("b", 1);
    let keys = shop.keys(2, 1);
    assert_eq!(count(&keys, "b"), 1);
}

#[test]
fn case_7_shares_do_not_depend_on_the_size_of_the_call() {
    for n in [1, 2, 3] {
        let mut shop = Shop::default();
        shop.weigh("a", 3.0);
        shop.weigh("b", 1.0);
        shop.enqueue("a", 500);
        shop.enqueue("b", 500);
        let keys = shop.keys(400 / n + 1, n);
        assert_eq!(count(&keys[..400], "a"), 300);
    }
    let mut shop = Shop::default();
    for (name, weight) in [("a", 5.0), ("b", 3.0), ("c", 1.0)] {
        shop.weigh(name, weight);
        shop.enqueue(name, 300);
    }
    let keys = shop.keys(90, 4);
    assert_eq!(
        (count(&keys, "a"), count(&keys, "b"), count(&keys, "c")),
        (200, 120, 40)
    );
}

#[test]
fn case_9_thousands_of_equal_keys_are_served_once_each_in_order_of_arrival() {
    let mut shop = Shop::new(5_000);
    let added: Vec<i64> = (0..5_000)
        .map(|i| shop.add(&format!("k{i}"), 3, 0, shop.now - 1, None))
        .collect();
    assert_eq!(ids(&shop.claim(5_000)), added);
}

#[test]
fn case_10_weights_that_do_not_divide_and_weights_far_apart() {
    let mut shop = Shop::default();
    shop.weigh("a", 600.0);
    shop.weigh("b", 1000.0);
    shop.enqueue("a", 800);
    shop.enqueue("b", 800);
    let keys = shop.keys(800, 1);
    assert_eq!((count(&keys, "a"), count(&keys, "b")), (300, 500));

    let mut shop = Shop::default();
    shop.weigh("light", 0.001);
    shop.weigh("heavy", 1000.0);
    shop.enqueue("light", 10);
    shop.enqueue("heavy", 300);
    let mut clock = shop.clock(3);
    let keys: Vec<String> = (0..300)
        .map(|i| {
            let served = shop.claim(1).remove(0);
            assert!(i < 2 || served.clock > clock, "virtual time stands still");
            clock = served.clock;
            served.key.as_str().to_string()
        })
        .collect();
    assert_eq!(count(&keys, "light"), 1);
}

#[test]
fn case_11_a_key_below_its_share_gets_its_share_but_no_burst() {
    let mut shop = Shop::default();
    shop.enqueue("a", 2_000);
    for _ in 0..20 {
        shop.enqueue("b", 1);
        shop.keys(50, 1);
    }
    shop.enqueue("b", 500);
    let keys = shop.keys(400, 1);
    for window in keys.windows(10) {
        let share = count(window, "b");
        assert!((4..=6).contains(&share), "{window:?}");
    }
}

#[test]
fn case_14_a_new_weight_acts_on_the_whole_backlog_at_once() {
    let mut shop = Shop::default();
    shop.enqueue("a", 1_000);
    shop.enqueue("b", 1_000);
    shop.keys(50, 1);
    shop.weigh("a", 9.0);
    let keys = shop.keys(100, 1);
    assert!(
        (88..=92).contains(&count(&keys, "a")),
        "{}",
        count(&keys, "a")
    );
}

#[test]
fn case_16_a_future_row_does_not_hide_a_due_one_of_the_same_key() {
    let mut shop = Shop::default();
    shop.add("a", 3, 0, shop.now + 3_600 * SECOND, None);
    let due = shop.add("a", 3, 0, shop.now - 1, None);
    assert_eq!(ids(&shop.claim(10)), [due]);
    shop.now += 3_600 * SECOND;
    assert_eq!(shop.claim(10).len(), 1);
}

#[test]
fn case_23_claims_at_another_priority_leave_the_shares_alone() {
    let mut shop = Shop::default();
    for _ in 0..100 {
        shop.add("b", 3, 0, shop.now - 2 * SECOND, None);
        shop.add("c", 3, 0, shop.now - SECOND, None);
    }
    let mut keys = Vec::new();
    for i in 0..200 {
        if i % 2 == 0 {
            shop.add("a", 1, 0, shop.now - 1, None);
        }
        keys.extend(shop.keys(1, 1));
    }
    assert_eq!(
        (count(&keys, "a"), count(&keys, "b"), count(&keys, "c")),
        (100, 50, 50)
    );
}

#[test]
fn case_24_charges_stay_exact_when_the_clock_is_large() {
    let mut shop = Shop::at_clock(1 << 44);
    shop.weigh("light", 0.001);
    shop.weigh("heavy", 1000.0);
    shop.enqueue("light", 3);
    let light = shop.claim(2);
    shop.enqueue("heavy", 50);
    let heavy = shop.claim(50);
    for served in light.iter().chain(&heavy) {
        let weight = if served.key.as_str() == "light" {
            0.001
        } else {
            1000.0
        };
        assert_eq!(served.charge.step, Ticks::step(1.0, weight));
    }
    for pair in heavy.windows(2) {
        assert_eq!(pair[1].start.minus(pair[0].start).get(), 1_000);
    }
}

#[test]
fn with_fairness_off_order_is_by_due_time_and_nothing_is_charged() {
    let mut shop = Shop::default();
    for i in 0..199 {
        shop.add("a", 3, 0, shop.now - 1_000 + i, None);
    }
    shop.add("b", 3, 0, shop.now - 1, None);
    let served = shop.claim_in(Order::Due, 200);
    assert_eq!(
        served.iter().position(|served| served.key == key("b")),
        Some(199)
    );
    assert!(
        served
            .iter()
            .all(|served| served.charged == 0.0 && served.charge.step == Ticks::ZERO)
    );
    assert_eq!(shop.clock(3), Ticks::ZERO);
}
