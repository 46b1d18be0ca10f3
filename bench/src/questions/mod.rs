//! The questions, one file a theme.

mod claims;
mod concurrency;
mod enqueue;
mod flat;
mod held;
mod janitor;
mod restart;
mod rivals;
mod waiting;

use harvest_fair_server_tests::Cluster;

use crate::Result;
use crate::contenders::Fetched;
use crate::report::Answer;
use crate::sizes::Sizes;

/// What every question needs.
pub struct Bench<'a> {
    pub cluster: &'a Cluster,
    pub fetched: &'a Fetched,
    pub sizes: &'a Sizes,
}

type Question = fn(&Bench) -> Result<Vec<Answer>>;

/// In the order of the table; those that change or restart the server come last.
pub const QUESTIONS: [(&str, Question); 11] = [
    ("claims", claims::claims),
    ("rivals", rivals::all),
    ("full-scan", rivals::full_scan),
    ("grouped", rivals::grouped),
    ("stamped", rivals::stamped),
    ("flat", flat::flat),
    ("concurrency", concurrency::concurrency),
    ("held-snapshot", held::held),
    ("enqueue", enqueue::enqueue),
    ("idle-wait", waiting::waiting),
    ("janitor", janitor::janitor),
];
