//! Rule 4, the charge itself: `max(1, round(cost * 1e6 / weight))` ticks.

use harvest_fair_core_tests::names::{MAX_COST, MAX_WEIGHT, MIN_WEIGHT};
use harvest_fair_core_tests::sfq::Ticks;

#[test]
fn a_charge_is_the_cost_by_the_weight_rounded_to_a_tick() {
    for (cost, weight, ticks) in [
        (1.0, 1.0, 1_000_000),
        (1.0, 3.0, 333_333),
        (1.0, 0.6, 1_666_667),
        (2.5, MAX_WEIGHT, 2_500),
        (MAX_COST, MIN_WEIGHT, 1_000_000_000_000_000_000),
    ] {
        assert_eq!(Ticks::step(cost, weight).get(), ticks, "{cost} at {weight}");
    }
}

#[test]
fn the_cheapest_charge_still_moves_virtual_time() {
    for cost in [0.0, f64::MIN_POSITIVE, 1e-9, 4.9e-7] {
        for weight in [1.0, MAX_WEIGHT] {
            assert_eq!(Ticks::step(cost, weight).get(), 1, "{cost} at {weight}");
        }
    }
}
