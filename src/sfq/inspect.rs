//! A copy of the whole board, taken under its lock, to be compared with the tables without it.

use super::records::GROUP;
use super::tree::NIL;
use super::{Error, QueueId, QueueState, RowPos, Sched};
use crate::names::{FairnessKey, Priority};

/// Memory for a copy of a board.
pub struct Snapshot(Vec<u8>);

/// One lane, as the board knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneView {
    pub is_open: bool,
    pub cursor: RowPos,
    /// Where its first claimable row is, or a lower bound of that.
    pub head: RowPos,
    /// A row at or after the cursor is in the hands of somebody who gives no sign when he is done.
    pub is_held: bool,
    /// Grows whenever a row becomes visible.
    pub generation: u32,
}

/// One key of a queue, over all its priorities.
#[derive(Clone, Debug)]
pub struct KeyView<'s> {
    pub key: FairnessKey<'s>,
    pub running: i32,
    /// Grows with each change of `running`.
    pub changes: u16,
    /// Picks and claims of the key whose transactions have not ended.
    pub in_flight: u32,
    /// The queue's override.
    pub weight: Option<f64>,
    /// It stands in no tier.
    pub is_aside: bool,
}

impl Snapshot {
    /// Memory for a copy of a board of this size; `None` if there is not that much.
    pub fn new(max_queues: u32, max_keys: u32) -> Option<Snapshot> {
        let bytes = Sched::bytes_needed(max_queues, max_keys).saturating_add(align_of::<u64>());
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).ok()?;
        // Touched here, so that the copy finds every page in its place.
        memory.resize(bytes, 0);
        Some(Snapshot(memory))
    }

    /// An empty board in this memory, to be filled by [`Sched::copy_to`].
    pub fn board(&mut self, max_queues: u32, max_keys: u32) -> Result<Sched<'_>, Error> {
        let start = self.0.as_ptr().align_offset(align_of::<u64>());
        Sched::init(
            self.0.get_mut(start..).unwrap_or_default(),
            max_queues,
            max_keys,
        )
    }
}

impl Sched<'_> {
    /// Makes `target`, an empty board of the same size, a copy of this one. One pass over what is in use.
    pub fn copy_to(&self, target: &mut Sched<'_>) {
        target
            .queues
            .copy_from(&self.queues, &self.header.free_queues);
        target
            .tenants
            .copy_from(&self.tenants, &self.header.free_tenants);
        target
            .entries
            .copy_from(&self.entries, &self.header.free_entries);
        target
            .chunks
            .copy_from(&self.chunks, &self.header.free_chunks);
        for (to, from) in [
            (&mut *target.queue_heads, &*self.queue_heads),
            (&mut *target.tenant_heads, &*self.tenant_heads),
        ] {
            if to.len() == from.len() {
                to.copy_from_slice(from);
            }
        }
        *target.header = *self.header;
    }

    /// What is wrong with the structure of a queue's part of the board: order, clocks, passes, timers, gates.
    pub fn fault_of(&self, queue: QueueId) -> Option<String> {
        let slot = self.queue_slot(queue);
        let record = self.queues.get(slot);
        if slot == NIL || record.queue_state() != QueueState::Loaded {
            return None;
        }
        self.check_queue(slot, record).err()
    }

    /// A lane of a key that the board knows.
    pub fn lane_view(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
        band: u8,
    ) -> Option<LaneView> {
        let queue = self.queue_slot(queue);
        let slot = match queue {
            NIL => NIL,
            queue => self.find_entry(queue, priority, key),
        };
        let lane = self.entries.get(slot).lanes.get(usize::from(band.min(1)))?;
        (slot != NIL).then_some(LaneView {
            is_open: lane.is_open(),
            cursor: lane.cursor,
            head: lane.head,
            is_held: lane.is_held(),
            generation: lane.generation,
        })
    }

    /// Calls `visit` for every key of the board, with its queue. O(all keys).
    pub fn keys(&self, mut visit: impl FnMut(QueueId, KeyView<'_>)) {
        for slot in self.tenants.slots(&self.header.free_tenants) {
            let tenant = self.tenants.get(slot);
            if tenant.queue == NIL {
                continue;
            }
            let stamp = self.queues.get(tenant.queue).stamp;
            let in_flight = self.in_flight_of(slot);
            visit(
                QueueId {
                    slot: tenant.queue,
                    stamp,
                },
                KeyView {
                    key: self.key_text(slot),
                    running: tenant.running,
                    changes: tenant.running_changes,
                    in_flight,
                    weight: (!tenant.weight.is_nan()).then_some(tenant.weight),
                    is_aside: !tenant.has_entries(),
                },
            );
        }
    }
}
