//! What may happen in a history.

use harvest_fair_core_tests::harness::{LONG_KEY, SECOND, WEIGHTS};
use harvest_fair_core_tests::model;
use proptest::prelude::*;

pub const KEYS: [&str; 6] = ["", "a", "b", "a/x", LONG_KEY, "b/x"];

#[derive(Clone, Debug)]
pub enum Op {
    /// Some tasks of one key, due a bit apart.
    Enqueue {
        key: usize,
        priority: u8,
        band: u8,
        due: i64,
        weight: Option<usize>,
        count: u8,
    },
    /// One call for `n` tasks in a session's transaction.
    Claim {
        session: usize,
        n: usize,
        fair: bool,
    },
    /// ROLLBACK TO SAVEPOINT: all but the first `keep` claims of the transaction.
    RollbackTo {
        session: usize,
        keep: usize,
    },
    Commit {
        session: usize,
    },
    Release {
        nth: usize,
    },
    Complete {
        nth: usize,
        cost: Option<u8>,
    },
    Override {
        key: usize,
        weight: Option<usize>,
    },
    Charge {
        key: usize,
        priority: u8,
        cost: u8,
        abort: bool,
    },
    /// Claims one row aside from the order, as if it were pinned to the session's worker.
    Aside {
        session: usize,
        nth: usize,
    },
    Policy(model::Policy),
    Wait {
        micros: i64,
    },
    Delete {
        nth: usize,
    },
    Postpone {
        nth: usize,
        due: i64,
    },
    Move {
        nth: usize,
        key: usize,
        priority: u8,
    },
    /// Somebody locks a pending row for no reason of ours, or lets it go.
    Lock {
        nth: usize,
    },
    Unlock,
    Forget {
        idle_for: i64,
    },
}

fn policy() -> impl Strategy<Value = model::Policy> {
    let rate = || {
        proptest::option::of(prop_oneof![
            Just(0.0),
            Just(0.5),
            Just(2.0),
            Just(3.0),
            Just(10.0)
        ])
    };
    (
        proptest::option::of(0u32..6),
        rate(),
        rate(),
        prop::bool::weighted(0.1),
        prop_oneof![2 => Just(0), 1 => Just(SECOND / 2), 1 => Just(3 * SECOND), 1 => Just(1)],
        prop_oneof![1 => Just(None), 2 => Just(Some('/'))],
    )
        .prop_map(
            |(cap, rate, key_rate, paused, aging, separator)| model::Policy {
                cap,
                rate,
                key_rate,
                paused,
                aging,
                separator,
            },
        )
}

pub fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tier = || prop_oneof![4 => Just(3u8), 1 => 1u8..=5];
    let due = || prop_oneof![6 => -20 * SECOND..=0, 2 => 0..40 * SECOND, 1 => Just(i64::MAX)];
    let weight = || prop_oneof![3 => Just(None), 1 => (0..WEIGHTS.len()).prop_map(Some)];
    let op = prop_oneof![
        8 => (0..KEYS.len(), tier(), prop_oneof![4 => Just(0u8), 1 => Just(1)], due(), weight(), 1u8..6)
            .prop_map(|(key, priority, band, due, weight, count)| {
                Op::Enqueue { key, priority, band, due, weight, count }
            }),
        12 => (0..3usize, prop_oneof![3 => Just(1usize), 1 => 2usize..9], prop::bool::weighted(0.95))
            .prop_map(|(session, n, fair)| Op::Claim { session, n, fair }),
        3 => (0..3usize, 0..4usize).prop_map(|(session, keep)| Op::RollbackTo { session, keep }),
        3 => (0..3usize).prop_map(|session| Op::Commit { session }),
        1 => any::<usize>().prop_map(|nth| Op::Release { nth }),
        1 => (any::<usize>(), proptest::option::of(0u8..9))
            .prop_map(|(nth, cost)| Op::Complete { nth, cost }),
        1 => (0..KEYS.len(), weight()).prop_map(|(key, weight)| Op::Override { key, weight }),
        1 => (0..KEYS.len(), tier(), 1u8..9, any::<bool>())
            .prop_map(|(key, priority, cost, abort)| Op::Charge { key, priority, cost, abort }),
        1 => (0..3usize, any::<usize>()).prop_map(|(session, nth)| Op::Aside { session, nth }),
        1 => policy().prop_map(Op::Policy),
        3 => prop_oneof![4 => 0..15 * SECOND, 4 => (0..8 * SECOND).prop_map(|t| t / 250_000 * 250_000), 1 => Just(3600 * SECOND)]
            .prop_map(|micros| Op::Wait { micros }),
        1 => any::<usize>().prop_map(|nth| Op::Delete { nth }),
        1 => (any::<usize>(), due()).prop_map(|(nth, due)| Op::Postpone { nth, due }),
        1 => (any::<usize>(), 0..KEYS.len(), tier())
            .prop_map(|(nth, key, priority)| Op::Move { nth, key, priority }),
        1 => any::<usize>().prop_map(|nth| Op::Lock { nth }),
        1 => Just(Op::Unlock),
        1 => (0..100 * SECOND).prop_map(|idle_for| Op::Forget { idle_for }),
    ];
    proptest::collection::vec(op, 1..60)
}
