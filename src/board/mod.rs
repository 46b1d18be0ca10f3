//! The board: the scheduling core in shared memory, as the sessions of a server share it.
//!
//! - [`shmem`]: its place and its lock
//! - [`effects`]: what a transaction does to it, at once, at commit and on abort
//! - `notes`: the pending rows that it has noted
//! - `on_commit`: what it is told at commit
//! - [`refused`]: refused changes on their way into the audit
//! - `seen`: what it was told of what an aborted transaction saw
//! - [`wait`]: sleeping until a task becomes claimable

pub mod effects;
mod notes;
mod on_commit;
pub mod refused;
mod seen;
pub mod shmem;
pub mod wait;

pub use effects::now;
pub use on_commit::{BoardSettings, OnCommit, QueueRef};
pub use shmem::with;

use crate::names::{FairnessKey, Priority, QueueName};
use crate::sfq::{QueueId, Sched};

/// A key as it stands in the tables, which only admit valid ones.
pub fn stored_key(key: &str) -> FairnessKey<'_> {
    FairnessKey::stored(key)
}

/// A priority as it stands in the tables.
pub fn stored_priority(priority: i16) -> Priority {
    Priority::new(i64::from(priority)).unwrap_or_default()
}

/// The queue on the board, if it is there.
pub fn find_queue(sched: &Sched, queue: &QueueRef) -> Option<QueueId> {
    sched.find_queue(queue.scope, &QueueName::parse(queue.name.as_str()).ok()?)
}
