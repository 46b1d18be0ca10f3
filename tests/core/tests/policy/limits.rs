//! Rates, caps, and what comes of a key that was held back by them.

use harvest_fair_core_tests::harness::{SECOND, Shop, cases, count, key, priority, row};
use harvest_fair_core_tests::sfq::{Policy, Refused, Waiting};
use proptest::prelude::*;

use crate::{keys_of, run, waiting_for};

#[test]
fn a_key_is_served_at_its_rate_times_its_weight() {
    let mut shop = Shop::with(Policy {
        key_rate_limit: Some(10.0),
        ..Policy::default()
    });
    shop.weigh("b", 2.0);
    shop.enqueue("a", 300);
    shop.enqueue("b", 300);
    let burst = keys_of(&run(&mut shop, 0));
    assert_eq!((count(&burst, "a"), count(&burst, "b")), (10, 20));
    shop.now = 1 << 40;
    let until = shop.now + 10 * SECOND;
    let served = keys_of(&run(&mut shop, until));
    assert!(
        (98..=102).contains(&count(&served, "a")),
        "{}",
        count(&served, "a")
    );
    assert!(
        (196..=204).contains(&count(&served, "b")),
        "{}",
        count(&served, "b")
    );
}

#[test]
fn tasks_of_limited_keys_take_as_long_as_their_rate_says() {
    let mut shop = Shop::with(Policy {
        key_rate_limit: Some(10.0),
        ..Policy::default()
    });
    for name in ["a", "b", "c"] {
        shop.enqueue(name, 100);
    }
    let began = shop.now;
    let served = run(&mut shop, began + 60 * SECOND);
    assert_eq!(served.len(), 300);
    let took = served.last().map_or(0, |(at, _)| at - began);
    assert!(
        (9 * SECOND - 100_000..=11 * SECOND).contains(&took),
        "{took}"
    );
}

#[test]
fn the_tighter_limit_counts_and_a_limited_key_does_not_hold_up_a_later_priority() {
    let mut shop = Shop::with(Policy {
        rate_limit: Some(3.0),
        key_rate_limit: Some(1.0),
        ..Policy::default()
    });
    for (name, tier) in [("one", 1), ("two", 2)] {
        for _ in 0..50 {
            shop.add(name, tier, 0, 0, None);
        }
    }
    assert_eq!(keys_of(&run(&mut shop, 0)), ["one", "two"]);
    shop.now = 1 << 40;
    let seen = waiting_for(&mut shop);
    assert_eq!(seen[&(1, "one".into())], Some(Waiting::Rate));
    let until = shop.now + 10 * SECOND;
    let served = keys_of(&run(&mut shop, until));
    assert_eq!((count(&served, "one"), count(&served, "two")), (10, 10));
    shop.configure(Policy {
        rate_limit: Some(2.0),
        key_rate_limit: Some(100.0),
        ..Policy::default()
    });
    let until = shop.now + 10 * SECOND;
    let served = run(&mut shop, until).len();
    assert!((20..=22).contains(&served), "{served}");
}

#[test]
fn a_returned_token_is_usable_at_once() {
    let mut shop = Shop::with(Policy {
        rate_limit: Some(1.0),
        key_rate_limit: Some(1.0),
        ..Policy::default()
    });
    shop.enqueue("a", 3);
    for _ in 0..5 {
        let served = shop.claim_open(3);
        assert_eq!(served.len(), 1);
        shop.abort(&served);
    }
    assert_eq!(shop.claim(3).len(), 1);
    let queue = shop.queue;
    let mut sched = shop.board.sched();
    sched.refund(queue, priority(3), &key("a"), 1.0, None);
    assert!(sched.has_eligible(queue));
    assert_eq!(shop.claim(3).len(), 1);
}

#[test]
fn a_capped_key_admits_none_until_it_is_below_its_cap() {
    let cap = |cap| Policy {
        key_max_running: Some(cap),
        ..Policy::default()
    };
    let mut shop = Shop::with(cap(3));
    shop.enqueue("a", 20);
    shop.add("a", 1, 0, 0, None);
    assert_eq!(shop.claim(10).len(), 3);
    assert_eq!(waiting_for(&mut shop)[&(3, "a".into())], Some(Waiting::Cap));
    shop.configure(cap(1));
    for left in [2, 1] {
        shop.end("a", 1);
        assert!(shop.claim(1).is_empty(), "{left} still run");
    }
    shop.end("a", 1);
    assert_eq!(shop.claim(10).len(), 1);
    let (queue, now) = (shop.queue, shop.now);
    let refused =
        shop.board
            .sched()
            .claim_aside(queue, priority(3), &key("a"), 0, row(1, 1_000), now);
    assert_eq!(refused.err(), Some(Refused::Capped));
    shop.configure(Policy::default());
    assert_eq!(shop.claim(100).len(), 17);
}

#[test]
fn a_key_that_was_held_back_comes_back_without_credit_and_without_a_burst() {
    let mut shop = Shop::with(Policy {
        key_max_running: Some(100),
        ..Policy::default()
    });
    shop.enqueue("held", 300);
    shop.enqueue("other", 300);
    shop.keys(10, 1);
    shop.configure(Policy {
        key_max_running: Some(0),
        ..Policy::default()
    });
    for _ in 0..100 {
        shop.end("other", 1);
    }
    shop.configure(Policy {
        key_max_running: Some(5),
        ..Policy::default()
    });
    for _ in 0..60 {
        let served = shop.keys(1, 1);
        if served == ["other"] {
            shop.end("other", 1);
        }
    }
    for _ in 0..5 {
        shop.end("held", 1);
    }
    shop.configure(Policy::default());
    let served = shop.keys(20, 1);
    assert!(count(&served, "held").abs_diff(10) <= 1, "{served:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(100), ..ProptestConfig::default() })]

    #[test]
    fn no_interval_sees_more_claims_than_its_bucket_holds(
        rate in 1u8..20, waits in proptest::collection::vec(0..400_000i64, 1..150), aborts in any::<u64>(),
    ) {
        let rate = f64::from(rate) * 0.7;
        let mut shop = Shop::with(Policy { key_rate_limit: Some(rate), ..Policy::default() });
        shop.enqueue("a", 400);
        let mut times = Vec::new();
        for (i, wait) in waits.iter().enumerate() {
            shop.now += wait;
            let served = shop.claim_open(1 + i % 3);
            if aborts >> (i % 64) & 1 == 1 {
                shop.abort(&served);
            } else {
                times.extend(served.iter().map(|_| shop.now));
                shop.commit(&served);
            }
        }
        for (i, from) in times.iter().enumerate() {
            for (j, to) in times.iter().enumerate().skip(i) {
                let most = rate.max(1.0) + (to - from) as f64 * rate / SECOND as f64;
                prop_assert!((j - i + 1) as f64 <= most + 1e-6, "{} from {from} to {to}", j - i + 1);
            }
        }
    }
}
