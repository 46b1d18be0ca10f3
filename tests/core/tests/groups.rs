//! Rule 9: where a group's name ends.

use harvest_fair_core_tests::harness::{Shop, count};
use harvest_fair_core_tests::names::FairnessKey;
use harvest_fair_core_tests::sfq::{Order, Policy};

#[test]
fn a_group_ends_at_the_first_separator() {
    let mut shop = Shop::with(Policy {
        separator: Some('/'),
        ..Policy::default()
    });
    // One customer with two departments, and one without.
    for name in ["acme/a/1", "acme/b/1", "other/1"] {
        shop.enqueue(name, 40);
    }
    let served = shop.keys(40, 1);
    for (name, share) in [("acme/a/1", 10), ("acme/b/1", 10), ("other/1", 20)] {
        assert!(
            count(&served, name).abs_diff(share) <= 1,
            "{name}: {served:?}"
        );
    }
}

#[test]
fn a_key_that_is_named_like_a_group_is_counted_again_like_any_other() {
    let mut shop = Shop::new(64);
    let (queue, now) = (shop.queue, shop.now);
    let grouped = Policy {
        separator: Some('/'),
        ..Policy::default()
    };
    shop.board.sched().set_policy(queue, &grouped, now);
    shop.enqueue("acme/1", 2);
    let key = FairnessKey::parse("acme").unwrap();
    let mut sched = shop.board.sched();
    sched.set_running(queue, &key, 3);
    let seen = sched.running_count(queue, &key);
    assert!(sched.recount(queue, &key, seen, 0), "{seen:?}");
    assert_eq!(sched.running(queue, &key), 0);
}

#[test]
fn a_count_from_the_table_adds_what_is_under_way() {
    let mut shop = Shop::new(64);
    let (queue, now) = (shop.queue, shop.now);
    shop.enqueue("a", 3);
    let key = FairnessKey::parse("a").unwrap();
    let mut sched = shop.board.sched();
    let pick = sched.pick(queue, now, Order::Fair, &[]).unwrap();
    assert_eq!(sched.running(queue, &key), 1);
    // The table shows what other claims have committed.
    sched.count_running(queue, &key, 2);
    assert_eq!(sched.running(queue, &key), 3);
    assert_eq!(sched.running_keys(queue), ["a"]);
    sched.retract(&pick, now);
    assert_eq!(sched.running(queue, &key), 2);
}
