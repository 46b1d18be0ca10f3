//! What a queue's settings do, with the figures that are promised for them.

use std::collections::BTreeMap;

use harvest_fair_core_tests::harness::{Session, Shop, count, key, priority};
use harvest_fair_core_tests::names::{FairnessKey, Weight};
use harvest_fair_core_tests::sfq::{Order, Policy, Refused, Row, RowPos, Waiting, preview};
use proptest::prelude::*;

const SECOND: i64 = 1_000_000;

fn configured(policy: Policy) -> Shop {
    let mut shop = Shop::new(1_024);
    configure(&mut shop, policy);
    shop
}

fn configure(shop: &mut Shop, policy: Policy) {
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().set_policy(queue, &policy, now);
}

/// A task of the key is done.
fn complete(shop: &mut Shop, name: &str) {
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().running_delta(queue, &key(name), -1, now);
}

/// Claims whatever can be claimed, waking by the queue's timers only, until `until`. Keys in order, with the times.
fn run(shop: &mut Shop, until: i64) -> Vec<(i64, String)> {
    let mut log = Vec::new();
    loop {
        while let Some(served) = shop.claim(1).pop() {
            log.push((shop.now, served.key.as_str().to_string()));
        }
        let queue = shop.queue;
        match shop.board.sched().next_timer(queue) {
            Some(at) if at <= until => {
                assert!(at > shop.now, "a timer in the past");
                shop.now = at;
            }
            _ => {
                shop.now = until;
                return log;
            }
        }
    }
}

fn keys_of(log: &[(i64, String)]) -> Vec<String> {
    log.iter().map(|(_, key)| key.clone()).collect()
}

fn waiting_for(shop: &mut Shop) -> BTreeMap<(u8, String), Option<Waiting>> {
    let (queue, now) = (shop.queue, shop.now);
    let mut seen = BTreeMap::new();
    let mut sched = shop.board.sched();
    sched.advance(queue, now);
    sched.entries(queue, |entry| {
        let name = (entry.priority.get(), entry.key.as_str().to_string());
        seen.insert(name, entry.waiting_for);
    });
    seen
}

#[test]
fn a_key_is_served_at_its_rate_times_its_weight() {
    let mut shop = configured(Policy {
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
    let mut shop = configured(Policy {
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
    let mut shop = configured(Policy {
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
    configure(
        &mut shop,
        Policy {
            rate_limit: Some(2.0),
            key_rate_limit: Some(100.0),
            ..Policy::default()
        },
    );
    let until = shop.now + 10 * SECOND;
    let served = run(&mut shop, until).len();
    assert!((20..=22).contains(&served), "{served}");
}

#[test]
fn a_returned_token_is_usable_at_once() {
    let mut shop = configured(Policy {
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
    let mut shop = configured(cap(3));
    shop.enqueue("a", 20);
    shop.add("a", 1, 0, 0, None);
    assert_eq!(shop.claim(10).len(), 3);
    assert_eq!(waiting_for(&mut shop)[&(3, "a".into())], Some(Waiting::Cap));
    configure(&mut shop, cap(1));
    for left in [2, 1] {
        complete(&mut shop, "a");
        assert!(shop.claim(1).is_empty(), "{left} still run");
    }
    complete(&mut shop, "a");
    assert_eq!(shop.claim(10).len(), 1);
    let row = Row {
        pos: RowPos::new(1, 1_000),
        weight: None,
    };
    let (queue, now) = (shop.queue, shop.now);
    let refused = shop
        .board
        .sched()
        .claim_aside(queue, priority(3), &key("a"), 0, row, now);
    assert_eq!(refused.err(), Some(Refused::Capped));
    configure(&mut shop, Policy::default());
    assert_eq!(shop.claim(100).len(), 17);
}

#[test]
fn a_key_that_was_held_back_comes_back_without_credit_and_without_a_burst() {
    let mut shop = configured(Policy {
        key_max_running: Some(100),
        ..Policy::default()
    });
    shop.enqueue("held", 300);
    shop.enqueue("other", 300);
    shop.keys(10, 1);
    configure(
        &mut shop,
        Policy {
            key_max_running: Some(0),
            ..Policy::default()
        },
    );
    for _ in 0..100 {
        complete(&mut shop, "other");
    }
    configure(
        &mut shop,
        Policy {
            key_max_running: Some(5),
            ..Policy::default()
        },
    );
    for _ in 0..60 {
        let served = shop.keys(1, 1);
        if served == ["other"] {
            complete(&mut shop, "other");
        }
    }
    for _ in 0..5 {
        complete(&mut shop, "held");
    }
    configure(&mut shop, Policy::default());
    let served = shop.keys(20, 1);
    assert!(count(&served, "held").abs_diff(10) <= 1, "{served:?}");
}

#[test]
fn worker_time_is_shared_when_a_queue_charges_by_seconds() {
    let mut shop = configured(Policy {
        by_seconds: true,
        ..Policy::default()
    });
    shop.enqueue("long", 400);
    shop.enqueue("short", 3_000);
    let mut workers: [Option<(i64, String, f64)>; 8] = Default::default();
    let mut worked = BTreeMap::<String, i64>::new();
    let queue = shop.queue;
    for now in 0..600 {
        for worker in &mut workers {
            if let Some((until, name, charged)) = worker.take() {
                if until > now {
                    *worker = Some((until, name, charged));
                    continue;
                }
                let took = if name == "long" { 34.0 } else { 1.0 };
                let mut sched = shop.board.sched();
                sched.correct_cost(queue, priority(3), &key(&name), took - charged, None);
                sched.measured(queue, &key(&name), took);
                complete(&mut shop, &name);
            }
            if let Some(served) = shop.claim(1).pop() {
                let name = served.key.as_str().to_string();
                let took = if name == "long" { 34 } else { 1 };
                *worked.entry(name.clone()).or_default() += took;
                *worker = Some((now + took, name, served.charged));
            }
        }
    }
    let share = worked["long"] as f64 / (worked["long"] + worked["short"]) as f64;
    assert!((0.45..=0.55).contains(&share), "{share}: {worked:?}");
}

#[test]
fn a_preview_of_many_keys_is_what_is_then_claimed() {
    let mut shop = Shop::new(1_024);
    for i in 0..400 {
        for _ in 0..1 + i % 3 {
            shop.add(&format!("k{i}"), 3, 0, i, Some(1.0 + (i % 5) as f64));
        }
    }
    shop.claim(150);
    // Rows of which the board does not know that they are gone.
    let gone: Vec<i64> = shop
        .table
        .rows
        .keys()
        .copied()
        .filter(|id| id % 3 != 0)
        .collect();
    for id in gone {
        shop.table.rows.remove(&id);
    }
    for n in [1, 10, 200] {
        let mut table = shop.table.clone();
        let mut rows = Session::new(&mut table, 7);
        let mut seen = Vec::new();
        let (queue, now) = (shop.queue, shop.now);
        preview(
            &mut shop.board,
            &mut rows,
            queue,
            Order::Fair,
            n,
            now,
            &[],
            (0, &mut |_, _| 0),
            &mut seen,
        )
        .unwrap();
        let claimed = shop.claim(n);
        let ids = |served: &[harvest_fair_core_tests::harness::Served]| {
            served
                .iter()
                .map(|served| served.handle.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(&seen), ids(&claimed));
        assert!(!claimed.is_empty());
    }
}

#[test]
fn a_preview_takes_hypothetical_weights_and_changes_nothing() {
    let mut shop = Shop::default();
    shop.enqueue("a", 100);
    shop.enqueue("b", 100);
    let weights: [(FairnessKey<'_>, Option<Weight>); 2] = [
        (key("a"), Weight::new(3.0).ok()),
        (key("unknown"), Weight::new(2.0).ok()),
    ];
    let (queue, now) = (shop.queue, shop.now);
    let mut table = shop.table.clone();
    let mut rows = Session::new(&mut table, 7);
    let mut seen = Vec::new();
    preview(
        &mut shop.board,
        &mut rows,
        queue,
        Order::Fair,
        40,
        now,
        &weights,
        (0, &mut |_, _| 0),
        &mut seen,
    )
    .unwrap();
    let of_a = seen
        .iter()
        .filter(|served| served.key.as_str() == "a")
        .count();
    assert_eq!(of_a, 30);
    assert_eq!(count(&shop.keys(40, 1), "a"), 20);
}

fn grouped() -> Policy {
    Policy {
        separator: Some('/'),
        ..Policy::default()
    }
}

/// Claims `v/x` gets of 1,000, with a newcomer `a/i` at every claim.
fn victim_share(policy: Policy) -> usize {
    let mut shop = Shop::new(4_096);
    configure(&mut shop, policy);
    shop.enqueue("v/x", 1_000);
    let mut share = 0;
    for i in 0..1_000 {
        shop.enqueue(&format!("a/{i}"), 1);
        share += count(&shop.keys(1, 1), "v/x");
    }
    share
}

#[test]
fn a_customer_who_invents_keys_gets_one_customers_share() {
    let share = victim_share(grouped());
    assert!(share.abs_diff(500) <= 2, "{share}");
    let share = victim_share(Policy::default());
    assert!(share <= 5, "{share}");
}

#[test]
fn groups_share_by_their_weights_and_keys_within_them_by_theirs() {
    let mut shop = configured(grouped());
    for (name, weight) in [("a", 3.0), ("v", 1.0), ("a/p", 2.0), ("a/q", 1.0)] {
        shop.weigh(name, weight);
    }
    for name in ["a/p", "a/q", "v/x"] {
        shop.enqueue(name, 400);
    }
    let served = shop.keys(400, 1);
    for (name, share) in [("a/p", 200), ("a/q", 100), ("v/x", 100)] {
        assert!(count(&served, name).abs_diff(share) <= 2, "{name}");
    }
}

#[test]
fn a_key_that_is_new_to_its_group_stands_where_the_group_does() {
    let mut shop = configured(grouped());
    for name in ["a/x", "b/x"] {
        shop.enqueue(name, 9);
    }
    shop.weigh("a", 0.1);
    let queue = shop.queue;
    assert_eq!(shop.keys(2, 1), ["a/x", "b/x"]);
    let mut pass_of = |name| shop.board.sched().pass_of(queue, priority(3), &key(name));
    assert_eq!(pass_of("a/x"), pass_of("a/new"));
    assert!(pass_of("a/new") > pass_of("b/new"));
    assert!(pass_of("b/new") > pass_of("c/new"));
}

#[test]
fn the_separator_may_change_with_a_backlog() {
    let mut shop = Shop::default();
    let names = ["a", "a/x", "a/y", "b/x", "c:d/x", "", "/z"];
    for name in names {
        shop.enqueue(name, 30);
    }
    let mut served = shop.keys(20, 1);
    for separator in [Some('/'), Some(':'), None, Some('/'), Some('€'), None] {
        let policy = Policy {
            separator,
            ..Policy::default()
        };
        configure(&mut shop, policy);
        shop.board.sched().check().unwrap();
        served.extend(shop.keys(20, 1));
        shop.board.sched().check().unwrap();
    }
    served.extend(shop.keys(500, 1));
    for name in names {
        assert_eq!(count(&served, name), 30, "{name:?}");
    }
}

#[test]
fn two_groups_never_differ_by_more_than_a_claim_of_each() {
    let mut shop = configured(grouped());
    for name in ["a/1", "a/2", "a/3", "b/1", "c"] {
        shop.enqueue(name, 100);
    }
    let served = shop.keys(120, 1);
    for n in 0..=served.len() {
        let of = |group: &str| {
            served[..n]
                .iter()
                .filter(|key| key.starts_with(group))
                .count()
        };
        for (one, other) in [("a", "b"), ("b", "c"), ("a", "c")] {
            assert!(
                of(one).abs_diff(of(other)) <= 1,
                "{one} and {other} after {n}"
            );
        }
    }
}

#[test]
fn a_row_comes_one_priority_nearer_with_each_step_of_age() {
    let mut shop = configured(Policy {
        aging: 10 * SECOND,
        ..Policy::default()
    });
    let now = shop.now;
    // Effective priorities 5, 2, 1 (base 3), 1 (base 1) and 0.
    let ids: Vec<i64> = [(5, 9), (4, 20), (3, 25), (1, 5), (5, 50)]
        .into_iter()
        .enumerate()
        .map(|(i, (tier, age))| shop.add(&format!("k{i}"), tier, 0, now - age * SECOND, None))
        .collect();
    let served = shop.claim(10);
    let order: Vec<i64> = served.iter().map(|served| served.handle.0).collect();
    assert_eq!(order, [ids[4], ids[3], ids[2], ids[1], ids[0]]);
    let aged: Vec<bool> = served.iter().map(|served| served.aged).collect();
    assert_eq!(aged, [true, false, false, false, false]);
}

#[test]
fn an_aged_claim_charges_its_key_and_leaves_the_clock() {
    let mut shop = configured(Policy {
        aging: 10 * SECOND,
        ..Policy::default()
    });
    shop.enqueue("busy", 20);
    shop.enqueue("other", 20);
    shop.keys(10, 1);
    let clock = shop.clock(3);
    let now = shop.now;
    shop.add("busy", 3, 0, now - 15 * SECOND, None);
    shop.add("busy", 3, 0, now - 15 * SECOND, None);
    let served = shop.claim(2);
    assert!(served.iter().all(|served| served.key.as_str() == "busy"));
    assert_eq!(served.iter().filter(|served| served.aged).count(), 1);
    assert!(shop.clock(3) <= clock.plus(served[0].charge.step));
    // What it had early it waits for now.
    assert_eq!(shop.keys(2, 1), ["other", "other"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn no_interval_sees_more_claims_than_its_bucket_holds(
        rate in 1u8..20, waits in proptest::collection::vec(0..400_000i64, 1..150), aborts in any::<u64>(),
    ) {
        let rate = f64::from(rate) * 0.7;
        let mut shop = configured(Policy { key_rate_limit: Some(rate), ..Policy::default() });
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
