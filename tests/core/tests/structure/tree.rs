//! The ordered set is an ordered set.

use std::collections::BTreeSet;

use harvest_fair_core_tests::harness::cases;
use harvest_fair_core_tests::sfq::tree::{Links, NIL, Nodes, Tree};
use proptest::prelude::*;

/// Records of a tree: key and links.
struct Records(Vec<(i8, Links)>);

#[derive(Default)]
struct ByKey;

impl Nodes<ByKey> for Records {
    type Key = i8;

    fn key(&self, slot: u32) -> i8 {
        self.0[slot as usize].0
    }

    fn links(&self, slot: u32) -> &Links {
        &self.0[slot as usize].1
    }

    fn links_mut(&mut self, slot: u32) -> &mut Links {
        &mut self.0[slot as usize].1
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(500), ..ProptestConfig::default() })]

    #[test]
    fn the_ordered_set_is_an_ordered_set(
        changes in proptest::collection::vec((1..60u32, any::<i8>()), 1..300),
    ) {
        let mut records = Records(vec![(0, Links::default()); 60]);
        let mut tree = Tree::<ByKey>::default();
        let mut expected = BTreeSet::new();
        for (slot, new) in changes {
            let old = records.0[slot as usize].0;
            if expected.remove(&(old, slot)) {
                tree.remove(&mut records, slot);
            }
            // Half of the changes move a record, the others take it out.
            if new % 2 == 0 {
                records.0[slot as usize].0 = new;
                tree.insert(&mut records, slot);
                expected.insert((new, slot));
            }
            tree.check(&records).map_err(TestCaseError::fail)?;
            let mut order = Vec::new();
            let mut at = tree.first(&records);
            while at != NIL {
                order.push((records.key(at), at));
                at = tree.next(&records, at);
            }
            prop_assert_eq!(&order, &expected.iter().copied().collect::<Vec<_>>());
        }
    }
}
