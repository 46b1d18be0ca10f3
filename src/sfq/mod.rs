//! The scheduling core: start-time fair queuing over many queues, in one byte region of fixed size. No Postgres type, no
//! clock, no I/O: time is an `i64` of microseconds that the caller gives, and the rows themselves live elsewhere. What
//! stands here is, per queue and priority, which keys have work, in which order they are next, and where in each of
//! their lanes the next row is.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `ticks` | virtual time |
//! | `tree` | the ordered set: a treap whose links stand in the records |
//! | `node` | one ordered set with its clock: join, claim, charge, undo |
//! | `lane` | what is believed about one lane, and on what evidence |
//! | `records`, `arena`, `list` | the records, the byte region seen as such, and lists of entries |
//! | `text` | the text of keys |
//! | `tally` | what has happened to a key: counts, served cost, waits |
//! | `queue` | queues: find, open, drop, settings, counters |
//! | `keys` | keys of a queue and their entries in its tiers: find, create, evict, forget |
//! | `wake` | which entries are eligible now, and when the sleeping ones wake |
//! | `pick`, `outcome` | pick the next lane, and what came of it |
//! | `account` | charges, refunds, corrections, weights, running counts |
//! | `persist` | restore, rebase, and what the periodic snapshot needs |
//! | `bucket` | a token bucket |
//! | `aging` | the pick when rows age |
//! | `group` | groups of keys |
//! | `gate` | caps and rate limits: which keys are held back |
//! | `policy` | the settings of a queue |
//! | `upkeep` | what the keeper of a board needs besides claims |
//! | `tenants` | what an observer sees of keys, over all their priorities |
//! | `view` | what an observer sees |
//! | `check` | the check of all invariants |
//! | `inspect` | a copy of the board, to be compared with the tables |
//! | `copy`, `preview` | the next claims, without claiming: what can be claimed is copied, and claimed from the copy |
//! | `claim` | the driver: from pick to locked row, over any board and any table |
//! | `fetched` | the rows that a claimer has fetched, kept from one call to the next |
//!
//! Every function is total: no input, and no stale id, can make it panic. A stale id (its slot has been freed or the
//! board wiped) is answered as if its queue or key did not exist. Nothing allocates but into buffers of the caller, except
//! where groups are listed: a change of the separator, the end of a load, a rebase, the check; and for the text of a key
//! that is longer than its record holds.
//! Unless said otherwise a call costs O(log K) for K keys.

// The extension uses one part of this API, the tests another.
#![allow(dead_code, unused_imports)]

mod account;
mod aging;
mod arena;
mod bucket;
mod check;
mod claim;
mod copy;
mod fetched;
mod gate;
mod group;
mod inspect;
mod keys;
mod lane;
mod list;
mod node;
mod outcome;
mod persist;
mod pick;
mod policy;
mod preview;
mod queue;
mod records;
mod tally;
mod tenants;
mod text;
mod ticks;
pub mod tree;
mod upkeep;
mod view;
mod wake;

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};

pub use account::Accounted;
pub use claim::{Board, Claimed, Lane, Locked, Rows, claim};
pub use copy::{Copied, CopyBuffer};
pub use fetched::Memory;
pub use inspect::{KeyView, LaneView, Snapshot};
pub use lane::{Next, Row, RowPos};
pub use pick::{Charge, LaneRef, Order, Pick};
pub use policy::Policy;
pub use preview::{Aside, preview};
pub use queue::{QueueState, QueueView};
pub use records::Counters;
pub use tally::{Outcome, Tally};
pub use tenants::TenantView;
pub use ticks::Ticks;
pub use upkeep::{OpenLane, RunningCount};
pub use view::{DirtyEntry, EntryView, GroupView, Usage, Waiting};
pub use wake::Noted;

use arena::{Pool, Shape};
use records::{Chunk, Entry, Header, QueueRec, Tenant};

/// Why a region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    TooSmall,
    /// It does not begin at a multiple of 8 bytes.
    Misaligned,
    /// [`Sched::init`] has not set it up, or another version has.
    NotInitialised,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Error::TooSmall => "the region is too small",
            Error::Misaligned => "the region is not aligned to 8 bytes",
            Error::NotInitialised => "the region has not been initialised",
        })
    }
}

impl std::error::Error for Error {}

/// No slot is free, and none can be freed without losing work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    Queues,
    Keys,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Full::Queues => "all queue slots are taken",
            Full::Keys => "all key slots are taken by keys with work",
        })
    }
}

impl std::error::Error for Full {}

/// Why a row cannot be claimed aside from the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No room for the key on the board.
    Full,
    /// The key is at its cap.
    Capped,
    /// The key or the queue has no token.
    Limited,
    /// The queue is paused.
    Paused,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::Full => "all key slots are taken by keys with work",
            Refused::Capped => "the key is at its cap of running tasks",
            Refused::Limited => "the rate limit of the key or the queue is reached",
            Refused::Paused => "the queue is paused",
        })
    }
}

impl std::error::Error for Refused {}

impl From<Full> for Refused {
    fn from(_: Full) -> Self {
        Refused::Full
    }
}

/// A queue on the board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    slot: u32,
    stamp: u32,
}

/// One key in one tier of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryId {
    slot: u32,
    stamp: u32,
}

/// The scheduling state, seen in its byte region. Made anew at each lock acquisition; that costs no scan.
pub struct Sched<'a> {
    header: &'a mut Header,
    queues: Pool<'a, QueueRec>,
    tenants: Pool<'a, Tenant>,
    entries: Pool<'a, Entry>,
    chunks: Pool<'a, Chunk>,
    /// First queue of each hash chain.
    queue_heads: &'a mut [u32],
    /// First tenant of each hash chain.
    tenant_heads: &'a mut [u32],
}

impl<'a> Sched<'a> {
    /// Bytes of a region for so many queues and keys; `usize::MAX` if that cannot be counted.
    pub fn bytes_needed(max_queues: u32, max_keys: u32) -> usize {
        arena::bytes_needed(Shape::new(max_queues, max_keys))
    }

    /// What one more key costs, in bytes.
    pub const fn bytes_per_key() -> usize {
        arena::BYTES_PER_KEY
    }

    /// Sets up a region, whatever it held, and attaches to it. O(its size).
    pub fn init(region: &'a mut [u8], max_queues: u32, max_keys: u32) -> Result<Self, Error> {
        Self::init_shaped(region, Shape::new(max_queues, max_keys))
    }

    fn init_shaped(region: &'a mut [u8], shape: Shape) -> Result<Self, Error> {
        let seed = RandomState::new().build_hasher().finish();
        arena::init(region, shape, seed)?;
        arena::attach(region)
    }

    /// Attaches to a region that [`Sched::init`] has set up, in this process or another.
    pub fn attach(region: &'a mut [u8]) -> Result<Self, Error> {
        arena::attach(region)
    }

    /// Grows with each [`Sched::wipe`]; picks and charges of an earlier epoch are ignored.
    pub fn epoch(&self) -> u64 {
        self.header.epoch
    }

    /// Forgets everything but the epoch, which grows. O(size of the region).
    pub fn wipe(&mut self) {
        *self.header = Header {
            epoch: self.header.epoch.wrapping_add(1),
            stamp: self.header.stamp,
            ..arena::empty_header(self.header)
        };
        self.queues.clear();
        self.tenants.clear();
        self.entries.clear();
        self.chunks.clear();
        self.queue_heads.fill(0);
        self.tenant_heads.fill(0);
    }

    /// A number that no other slot in use has, and never 0.
    fn next_stamp(&mut self) -> u32 {
        self.header.stamp = self.header.stamp.wrapping_add(1).max(1);
        self.header.stamp
    }
}

/// The chain of `heads` that a hash belongs to.
fn chain_of(heads: &mut [u32], hash: u32) -> Option<&mut u32> {
    let index = (u64::from(hash) * heads.len() as u64) >> 32;
    heads.get_mut(index as usize)
}
