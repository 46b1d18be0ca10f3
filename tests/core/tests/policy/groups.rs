//! Rule 9: groups share as keys do, and the keys of a group share what it gets.

use harvest_fair_core_tests::harness::{Shop, count, key, priority};
use harvest_fair_core_tests::sfq::Policy;

fn grouped() -> Policy {
    Policy {
        separator: Some('/'),
        ..Policy::default()
    }
}

/// Claims `v/x` gets of 1,000, with a newcomer `a/i` at every claim.
fn victim_share(policy: Policy) -> usize {
    let mut shop = Shop::new(4_096);
    shop.configure(policy);
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
    let mut shop = Shop::with(grouped());
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
    let mut shop = Shop::with(grouped());
    for name in ["a/x", "b/x"] {
        shop.enqueue(name, 9);
    }
    shop.weigh("a", 0.1);
    let queue = shop.queue;
    assert_eq!(shop.keys(2, 1), ["a/x", "b/x"]);
    let mut passes_of = |name| shop.board.sched().passes_of(queue, priority(3), &key(name));
    let ([group, served], [same, new]) = (passes_of("a/x"), passes_of("a/new"));
    assert_eq!(group, same);
    assert!(served > new, "within the group");
    assert!(passes_of("a/new") > passes_of("b/new"));
    assert!(passes_of("b/new") > passes_of("c/new"));
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
        shop.configure(policy);
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
    let mut shop = Shop::with(grouped());
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
