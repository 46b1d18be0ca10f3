//! What the board shows: the lag map, the state of each key, counters, what each key got, what comes next; charging by hand
//! for dispatchers that read them; and whether the board agrees with the tables.

mod broken;
mod chart;
mod check;
mod differences;
pub mod lag;
pub mod preview;
pub mod state;
pub mod stats;
mod tenants;
