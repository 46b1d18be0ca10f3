//! What the board shows: the lag map, the state of each key, counters; and charging by hand for dispatchers that
//! read them.

pub mod lag;
pub mod state;
pub mod stats;
