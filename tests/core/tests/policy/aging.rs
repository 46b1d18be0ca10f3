//! Waiting rows come nearer by priority.

use harvest_fair_core_tests::harness::{SECOND, Shop, ids};
use harvest_fair_core_tests::sfq::Policy;

#[test]
fn a_row_comes_one_priority_nearer_with_each_step_of_age() {
    let mut shop = Shop::with(Policy {
        aging: 10 * SECOND,
        ..Policy::default()
    });
    let now = shop.now;
    // Effective priorities 5, 2, 1 (base 3), 1 (base 1) and 0.
    let added: Vec<i64> = [(5, 9), (4, 20), (3, 25), (1, 5), (5, 50)]
        .into_iter()
        .enumerate()
        .map(|(i, (tier, age))| shop.add(&format!("k{i}"), tier, 0, now - age * SECOND, None))
        .collect();
    let served = shop.claim(10);
    let expected = [added[4], added[3], added[2], added[1], added[0]];
    assert_eq!(ids(&served), expected);
    let aged: Vec<bool> = served.iter().map(|served| served.aged).collect();
    assert_eq!(aged, [true, false, false, false, false]);
}

#[test]
fn an_aged_claim_charges_its_key_and_leaves_the_clock() {
    let mut shop = Shop::with(Policy {
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
