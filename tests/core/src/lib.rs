//! The parts of the extension that need no Postgres, compiled on their own so that they can be tested by the million; the
//! naive model that they are tested against; and an in-memory board and table to drive them with.

#[path = "../../../src/names.rs"]
pub mod names;
#[path = "../../../src/sfq/mod.rs"]
pub mod sfq;

pub mod harness;
pub mod model;
pub mod stage;

/// How many cases a property is tested with: `PROPTEST_CASES`, or the default.
pub fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(default)
}
