//! The parts of the extension that need no Postgres, compiled on their own so that they can be tested by the million, and
//! the naive model that they are tested against.

#[path = "../../../src/names.rs"]
pub mod names;
#[path = "../../../src/sfq/mod.rs"]
pub mod sfq;
