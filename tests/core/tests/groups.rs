//! Rule 9: where a group's name ends.

use harvest_fair_core_tests::harness::{Shop, count};
use harvest_fair_core_tests::sfq::Policy;

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
