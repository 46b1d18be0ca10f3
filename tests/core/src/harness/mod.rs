//! A board in plain memory and a task table in a map, to drive the core without a server.

mod shop;
mod table;

pub use shop::{Served, Shop, ids};
pub use table::{Owner, Session, Stored, Table};

use crate::names::{FairnessKey, Priority, QueueName};
use crate::sfq::{Board, QueueId, Row, RowPos, Sched};

/// Microseconds.
pub const SECOND: i64 = 1_000_000;
/// From the least to the greatest, and some that divide each other badly.
pub const WEIGHTS: [f64; 8] = [0.001, 0.1, 0.5, 1.0, 2.0, 3.0, 7.0, 1000.0];

/// A key, of group "a" if `/` separates them, that is as long as a key may be, and so goes on outside of its record.
pub const LONG_KEY: &str = concat!(
    "a/0123456789012345678901234567890123456789012345678901234567890123",
    "456789012345678901234567890123456789012345678901234567890123456789",
    "012345678901234567890123456789012345678901234567890123456789012345",
    "6789012345678901234567890123456789012345678901234567ääÄ",
);

/// A board whose lock nobody else wants.
pub struct MemoryBoard {
    bytes: Vec<u8>,
    start: usize,
}

impl MemoryBoard {
    pub fn new(max_queues: u32, max_keys: u32) -> Self {
        let mut bytes = vec![0; Sched::bytes_needed(max_queues, max_keys) + 64];
        let start = bytes.as_ptr().align_offset(64);
        Sched::init(&mut bytes[start..], max_queues, max_keys).expect("the region is large enough");
        MemoryBoard { bytes, start }
    }

    /// The scheduling core in it.
    pub fn sched(&mut self) -> Sched<'_> {
        Sched::attach(&mut self.bytes[self.start..]).expect("the region is set up")
    }

    /// Opens a queue by name, in scope 1.
    pub fn open(&mut self, name: &str) -> QueueId {
        let name = QueueName::parse(name).expect("a valid name");
        self.sched().open_queue(1, &name).expect("room for a queue")
    }
}

impl Board for MemoryBoard {
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R {
        act(&mut self.sched())
    }
}

/// A key as the core takes it; `""` is the default key.
pub fn key(name: &str) -> FairnessKey<'_> {
    FairnessKey::stored(name)
}

pub fn priority(value: u8) -> Priority {
    Priority::new(i64::from(value)).expect("a valid priority")
}

/// A row without a weight of its own.
pub fn row(due: i64, id: i64) -> Row {
    Row {
        pos: RowPos::new(due, id),
        weight: None,
    }
}

/// The keys that the board knows of a queue, sorted.
pub fn names_on(sched: &Sched<'_>, queue: QueueId) -> Vec<String> {
    let mut names = Vec::new();
    sched.entries(queue, |entry| names.push(entry.key.as_str().to_string()));
    names.sort();
    names
}

/// The same with their passes, in units; of a queue that uses one priority.
pub fn passes_on(sched: &Sched<'_>, queue: QueueId) -> Vec<(String, f64)> {
    let mut passes = Vec::new();
    sched.entries(queue, |entry| {
        passes.push((entry.key.as_str().to_string(), entry.pass.units()));
    });
    passes.sort_by(|a, b| a.0.cmp(&b.0));
    passes
}

/// How often `name` is among `keys`.
pub fn count(keys: &[String], name: &str) -> usize {
    keys.iter().filter(|key| *key == name).count()
}

/// How many cases a property test draws: `PROPTEST_CASES`, else `usual`. (`PROPTEST_RNG_SEED` makes it draw the same again.)
pub fn cases(usual: u32) -> u32 {
    let wanted = std::env::var("PROPTEST_CASES").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(usual)
}
