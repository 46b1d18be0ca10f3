//! What measures time: these tests run one after another, whatever the number of test threads, and in a binary of their
//! own, so that nothing else of ours keeps the machine busy meanwhile.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

mod claims;
mod delivery;
mod restart;
mod waking;

/// To be held by each test of this binary.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// The value that `share` of the durations do not exceed.
fn quantile(durations: &[Duration], share: f64) -> Duration {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let index = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[index]
}

fn median(durations: &[Duration]) -> Duration {
    quantile(durations, 0.5)
}
