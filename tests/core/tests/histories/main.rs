//! The core, driven by its claim driver over a table in memory, against the naive model: random histories, in which both
//! must agree on every pick, every charge, every pass and every clock. Transactions stay open across other calls, so a
//! claimer meets rows that others hold.

mod compare;
mod ops;
mod world;

use harvest_fair_core_tests::cases;
use harvest_fair_core_tests::model::{self, State};
use harvest_fair_core_tests::sfq::RowPos;
use proptest::prelude::*;

use ops::{Op, ops};
use world::World;

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(12_000), ..ProptestConfig::default() })]

    #[test]
    fn histories_follow_the_naive_model(ops in ops()) {
        run(&ops, Rules::Plain)?;
    }

    #[test]
    fn histories_with_limits_caps_and_ageing_follow_the_naive_model(ops in ops()) {
        run(&ops, Rules::Policies)?;
    }

    #[test]
    fn histories_with_groups_follow_the_naive_model(ops in ops()) {
        run(&ops, Rules::Groups)?;
    }
}

/// What the operator does in a history.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// Nothing but weights.
    Plain,
    /// Limits, caps, pauses and ageing come and go.
    Policies,
    /// And a separator.
    Groups,
}

/// With groups no row goes behind the board's back: which of two groups of equal pass is first depends on their first
/// rows, of which the board, the model and a preview then know different things.
fn applies(op: &Op, rules: Rules) -> bool {
    let behind = matches!(
        op,
        Op::Lock { .. }
            | Op::Delete { .. }
            | Op::Postpone { .. }
            | Op::Move { .. }
            | Op::Aside { .. }
    );
    match rules {
        Rules::Plain => !matches!(op, Op::Policy(_)),
        Rules::Policies => true,
        Rules::Groups => !behind,
    }
}

fn run(ops: &[Op], rules: Rules) -> Result<(), TestCaseError> {
    let mut world = World::new();
    for op in ops.iter().filter(|op| applies(op, rules)) {
        let op = &match *op {
            Op::Policy(policy) if rules != Rules::Groups => Op::Policy(model::Policy {
                separator: None,
                ..policy
            }),
            ref op => op.clone(),
        };
        world.apply(op)?;
        world.compare()?;
    }
    // And to the end: everything that is due is claimed, once, in the model's order.
    for session in 0..3 {
        world.commit(session);
    }
    world.apply(&Op::Unlock)?;
    world.set_policy(model::Policy::default());
    world.claim(0, 1000, true)?;
    world.compare()?;
    let mut lost = world.model.tasks.values().filter(|task| {
        task.state == State::Pending && RowPos::new(task.due, task.id).is_due(world.now)
    });
    prop_assert!(lost.next().is_none());
    Ok(())
}
