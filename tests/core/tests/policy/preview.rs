//! A preview is what the next claims would be.

use harvest_fair_core_tests::harness::{Shop, count, ids, key};
use harvest_fair_core_tests::names::{FairnessKey, Weight};

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
        let foreseen = shop.preview(n, &[]);
        let claimed = shop.claim(n);
        assert_eq!(ids(&foreseen), ids(&claimed));
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
    let seen = shop.preview(40, &weights);
    let of_a = seen
        .iter()
        .filter(|served| served.key.as_str() == "a")
        .count();
    assert_eq!(of_a, 30);
    assert_eq!(count(&shop.keys(40, 1), "a"), 20);
}
