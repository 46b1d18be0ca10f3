//! The records of the byte region: plain integers and floats, no pointers, since every process maps the region at an
//! address of its own. All-zero bytes are a valid, unused record of every kind.

use super::bucket::Bucket;
use super::lane::Lane;
use super::node::{Member, Node};
use super::policy::PolicyRec;
use super::tally::Tally;
use super::tree::{Links, Tree};
use crate::names::Priority;

pub const BANDS: usize = 2;
/// Bytes of a key that stand in its record.
pub const KEY_IN_RECORD: usize = 80;
/// Bytes of a key in one chunk.
pub const CHUNK_TEXT: usize = 60;
/// Buckets of waits: below 1 ms, then each up to twice the one before, the last one from 18.6 hours on.
pub const WAIT_BUCKETS: usize = 28;

/// How far a new queue's `new_start` rows stand back, in microseconds.
pub const DEFAULT_HANDICAP: i64 = 30_000_000;

/// Slots that are in no use: a chain of returned ones, then those never used so far.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FreeSlots {
    pub returned: u32,
    pub used_so_far: u32,
    pub in_use: u32,
    pub pad: u32,
}

/// A doubly linked list: its ends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct List {
    pub first: u32,
    pub last: u32,
}

/// A record's place in a [`List`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Siblings {
    pub prev: u32,
    pub next: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    pub magic: u64,
    pub epoch: u64,
    /// Makes hash chains unpredictable to whoever invents keys.
    pub seed: u64,
    pub max_queues: u32,
    pub max_keys: u32,
    /// The last stamp given to a slot; each use of a slot has its own, so that stale ids are told apart.
    pub stamp: u32,
    pub idle_count: u32,
    /// Idle entries of all queues, the longest idle first.
    pub idle: List,
    pub free_queues: FreeSlots,
    pub free_tenants: FreeSlots,
    pub free_entries: FreeSlots,
    pub free_chunks: FreeSlots,
    pub max_chunks: u32,
    pub pad: u32,
}

/// One priority of one queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Tier {
    pub node: Node,
    /// Entries of this tier, eligible or not.
    pub entries: u32,
    /// 1 after a rebase: every persisted row of the tier is out of date.
    pub rewrite: u32,
}

/// Events of one queue since it was opened.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub claims: u64,
    pub refunds: u64,
    pub empty_claims: u64,
    pub missed_wakeups: u64,
    pub full_rejections: u64,
    pub evictions: u64,
    pub loads: u64,
    pub load_micros: u64,
    pub sweeps: u64,
    pub expired_leases: u64,
    /// How often virtual time of a tier or a group was started anew.
    pub rebases: u64,
}

/// The order of sleeping entries by wake-up time.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByWake;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QueueRec {
    pub scope: u64,
    pub(super) policy: PolicyRec,
    /// Of all claims, against `rate_limit`.
    pub(super) bucket: Bucket,
    /// The latest time that any call has told.
    pub latest: i64,
    pub lease_due: i64,
    pub unpin_due: i64,
    pub counters: Counters,
    pub tiers: [Tier; Priority::COUNT],
    pub timers: Tree<ByWake>,
    /// Its entries, the dirty ones first.
    pub entries: List,
    pub entry_count: u32,
    pub dirty_count: u32,
    /// Entries that are eligible, as far as their keys go.
    pub eligible: u32,
    /// Next in its hash chain; next free slot while unused.
    pub chain: u32,
    /// 0 while the slot is unused.
    pub stamp: u32,
    pub name_len: u16,
    pub state: u8,
    pub pad: [u8; 1],
    pub name: [u8; 256],
}

/// A fairness key of one queue: what all its tiers share.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tenant {
    /// The queue's override; NaN if there is none.
    pub weight: f64,
    /// Of the key's claims, against `key_rate_limit`.
    pub(super) bucket: Bucket,
    /// 0 while the slot is unused.
    pub queue: u32,
    /// Next in its hash chain; next free slot while unused.
    pub chain: u32,
    pub hash: u32,
    /// Tasks in the state running, claims in flight included.
    pub running: i32,
    /// Its entry in each tier.
    pub entries: [u32; Priority::COUNT],
    /// Moving average of measured run times, in seconds; NaN: none has been measured.
    pub average: f32,
    /// The own weight of the row claimed last, else of the first noted, for the rate of a key without an override; NaN:
    /// there has been none.
    pub own_weight: f32,
    pub key_len: u16,
    /// Grows with each change of `running`, so that a count read from the table can be known to be out of date.
    pub running_changes: u16,
    /// Where a key goes on that is longer than its record holds.
    pub more: u32,
    pub key: [u8; KEY_IN_RECORD],
    pub tally: Tally,
}

/// Part of the text of a key that does not fit into its record.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub text: [u8; CHUNK_TEXT],
    /// The next part; next free slot while unused.
    pub next: u32,
}

/// One key in one tier.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub member: Member,
    pub lanes: [Lane; BANDS],
    /// When the first sleeping lane's head comes due, or the key has a token again; `i64::MAX`: never. Of an idle entry,
    /// since when nothing is pending or running.
    pub wake: i64,
    pub timer: Links,
    /// Among the queue's entries.
    pub siblings: Siblings,
    pub tenant: u32,
    /// The group that the key stands in, if any.
    pub group: u32,
    /// 0 while the slot is unused; then `siblings.next` is the next free slot.
    pub stamp: u32,
    /// Picks and claims whose transactions have not ended; the entry stays until they have. Of a group: its keys.
    pub in_flight: u32,
    pub tier: u8,
    /// The band of the lane whose head ranks the entry.
    pub front: u8,
    pub flags: u8,
    pub pad: u8,
}

/// Has changed since the last snapshot.
pub const DIRTY: u8 = 1;
/// Stands in the idle list; its place in it is `timer`, as idle entries do not sleep.
pub const IDLE: u8 = 2;
/// Stands in the queue's timers.
pub const TIMED: u8 = 4;
/// Joined while its queue was loading, and no persisted state has been seen: its pass is unknown.
pub const FRESH: u8 = 8;
/// Is no key, but a group of keys.
pub const GROUP: u8 = 16;

impl Entry {
    pub fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub fn set(&mut self, flag: u8, on: bool) {
        self.flags = if on {
            self.flags | flag
        } else {
            self.flags & !flag
        };
    }

    pub fn has_work(&self) -> bool {
        self.in_flight > 0 || self.lanes.iter().any(Lane::is_open)
    }
}

impl QueueRec {
    pub fn name(&self) -> &[u8] {
        self.name
            .get(..usize::from(self.name_len))
            .unwrap_or_default()
    }
}

impl Tenant {
    pub fn set_running(&mut self, running: i32) {
        self.running = running;
        self.running_changes = self.running_changes.wrapping_add(1);
    }

    pub fn has_entries(&self) -> bool {
        self.entries.iter().any(|&slot| slot != 0)
    }
}
