//! Virtual time in whole ticks. Floats would lose whole charges once the clock is large: 2^53 ticks are reached
//! by nine million claims of weight 0.001, and exactness must outlive that.

use crate::names::{MAX_COST, MAX_WEIGHT, MIN_WEIGHT};

/// A point or a span of virtual time; 1,000,000 ticks are one unit (one claim of cost 1 at weight 1).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticks(i64);

impl Ticks {
    pub const ZERO: Ticks = Ticks(0);
    pub const PER_UNIT: i64 = 1_000_000;
    /// No time lies beyond plus or minus this, so the difference of two times never overflows. A clock is
    /// rebased at [`Ticks::REBASE_AT`], and the dearest single charge is 10^18 ticks, below 2^60: only a key whose
    /// debt itself passes billions of claims is ever cut off here.
    const LIMIT: i64 = 1 << 62;
    /// A tier is rebased once its clock has reached this.
    pub const REBASE_AT: Ticks = Ticks(1 << 60);

    pub fn new(ticks: i64) -> Self {
        Ticks(ticks.clamp(-Self::LIMIT, Self::LIMIT))
    }

    pub fn get(self) -> i64 {
        self.0
    }

    /// As people see it: claims of cost 1 at weight 1.
    pub fn units(self) -> f64 {
        self.0 as f64 / Self::PER_UNIT as f64
    }

    /// The charge for `cost` at `weight`: `max(1, round(cost * 1e6 / weight))`, so that virtual time grows at every claim.
    /// Values out of range are brought into it, since a charge must never fail.
    pub fn step(cost: f64, weight: f64) -> Self {
        let cost = if cost.is_nan() {
            0.0
        } else {
            cost.clamp(0.0, MAX_COST)
        };
        let weight = if weight.is_nan() {
            1.0
        } else {
            weight.clamp(MIN_WEIGHT, MAX_WEIGHT)
        };
        let ticks = (cost * Self::PER_UNIT as f64 / weight).round();
        Ticks::new((ticks as i64).max(1))
    }

    pub fn plus(self, span: Ticks) -> Self {
        Ticks::new(self.0.saturating_add(span.0))
    }

    pub fn minus(self, span: Ticks) -> Self {
        Ticks::new(self.0.saturating_sub(span.0))
    }
}
