//! The queues on the board: find, open, drop, settings, counters.

use std::hash::{DefaultHasher, Hasher};

use super::records::{Counters, QueueRec};
use super::tree::NIL;
use super::{Full, QueueId, Sched, chain_of};
use crate::names::QueueName;

/// How far the board's picture of a queue has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// Nothing has been read from the tables.
    Unloaded,
    /// Somebody is reading them.
    Loading,
    /// The picture is complete.
    Loaded,
}

const UNLOADED: u8 = 0;
const LOADING: u8 = 1;
const LOADED: u8 = 2;

/// A queue as [`Sched::queues`] shows it.
#[derive(Clone, Copy, Debug)]
pub struct QueueView<'s> {
    pub id: QueueId,
    pub scope: u64,
    pub name: &'s [u8],
    pub state: QueueState,
    pub paused: bool,
    /// Keys in tiers, each counted once per tier.
    pub entries: u32,
    /// Those that could be claimed now.
    pub eligible: u32,
    pub counters: Counters,
}

impl QueueRec {
    fn view(&self, slot: u32) -> QueueView<'_> {
        QueueView {
            id: QueueId {
                slot,
                stamp: self.stamp,
            },
            scope: self.scope,
            name: self.name(),
            state: self.queue_state(),
            paused: self.policy.paused != 0,
            entries: self.entry_count,
            eligible: if self.is_open() { self.eligible } else { 0 },
            counters: self.counters,
        }
    }

    pub(super) fn queue_state(&self) -> QueueState {
        match self.state {
            LOADED => QueueState::Loaded,
            LOADING => QueueState::Loading,
            _ => QueueState::Unloaded,
        }
    }
}

impl Sched<'_> {
    fn queue_hash(&self, scope: u64, name: &[u8]) -> u32 {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.header.seed);
        hasher.write_u64(scope);
        hasher.write(name);
        hasher.finish() as u32
    }

    /// The slot of a queue id, [`NIL`] if it is stale.
    pub(super) fn queue_slot(&self, queue: QueueId) -> u32 {
        let stamp = self.queues.get(queue.slot).stamp;
        if stamp == queue.stamp && stamp != 0 {
            queue.slot
        } else {
            NIL
        }
    }

    /// `scope` tells databases and task tables apart; the core does not look into it.
    pub fn find_queue(&self, scope: u64, name: &QueueName<'_>) -> Option<QueueId> {
        let hash = self.queue_hash(scope, name.as_bytes());
        let index = (u64::from(hash) * self.queue_heads.len() as u64) >> 32;
        let mut slot = self.queue_heads.get(index as usize).copied().unwrap_or(NIL);
        while slot != NIL {
            let queue = self.queues.get(slot);
            if queue.scope == scope && queue.name() == name.as_bytes() {
                return Some(QueueId {
                    slot,
                    stamp: queue.stamp,
                });
            }
            slot = queue.chain;
        }
        None
    }

    /// Finds a queue, or creates it, unloaded and empty.
    pub fn open_queue(&mut self, scope: u64, name: &QueueName<'_>) -> Result<QueueId, Full> {
        if let Some(queue) = self.find_queue(scope, name) {
            return Ok(queue);
        }
        let slot = self.header.free_queues.take(&mut self.queues);
        if slot == NIL {
            return Err(Full::Queues);
        }
        let stamp = self.next_stamp();
        let hash = self.queue_hash(scope, name.as_bytes());
        let queue = self.queues.get_mut(slot);
        queue.scope = scope;
        queue.stamp = stamp;
        let bytes = name.as_bytes();
        if let Some(place) = queue.name.get_mut(..bytes.len()) {
            place.copy_from_slice(bytes);
            queue.name_len = bytes.len() as u16;
        }
        if let Some(head) = chain_of(self.queue_heads, hash) {
            queue.chain = std::mem::replace(head, slot);
        }
        Ok(QueueId { slot, stamp })
    }

    /// Drops all queues of a scope, with what is known of their keys. O(all slots).
    pub fn drop_scope(&mut self, scope: u64) {
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            if queue.stamp != 0 && queue.scope == scope {
                self.drop_queue(QueueId {
                    slot,
                    stamp: queue.stamp,
                });
            }
        }
    }

    /// Drops one queue. O(all slots).
    pub fn drop_queue(&mut self, queue: QueueId) {
        let slot = self.queue_slot(queue);
        if slot == NIL {
            return;
        }
        loop {
            let entry = self.queues.get(slot).entries.first;
            if entry == NIL {
                break;
            }
            self.free_entry(entry);
        }
        self.free_tenants_of(slot);
        let (scope, next) = (self.queues.get(slot).scope, self.queues.get(slot).chain);
        let hash = self.queue_hash(scope, self.queues.get(slot).name());
        if let Some(head) = chain_of(self.queue_heads, hash) {
            if *head == slot {
                *head = next;
            } else {
                let mut at = *head;
                while at != NIL && self.queues.get(at).chain != slot {
                    at = self.queues.get(at).chain;
                }
                self.queues.get_mut(at).chain = next;
            }
        }
        self.header.free_queues.give_back(&mut self.queues, slot);
    }

    /// Calls `visit` for every queue of the board. O(queue slots).
    pub fn queues(&self, mut visit: impl FnMut(QueueView<'_>)) {
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            if queue.stamp != 0 {
                visit(queue.view(slot));
            }
        }
    }

    /// One queue; `None` for a stale id.
    pub fn queue_view(&self, queue: QueueId) -> Option<QueueView<'_>> {
        let slot = self.queue_slot(queue);
        (slot != NIL).then(|| self.queues.get(slot).view(slot))
    }

    /// `None` for a stale id.
    pub fn queue_state(&self, queue: QueueId) -> Option<QueueState> {
        let slot = self.queue_slot(queue);
        (slot != NIL).then(|| self.queues.get(slot).queue_state())
    }

    pub fn set_queue_state(&mut self, queue: QueueId, state: QueueState) {
        let slot = self.queue_slot(queue);
        self.queues.get_mut(slot).state = match state {
            QueueState::Unloaded => UNLOADED,
            QueueState::Loading => LOADING,
            QueueState::Loaded => LOADED,
        };
    }

    /// When the next lease of the queue may expire, at the earliest; `i64::MAX` if none is known.
    pub fn lease_due(&self, queue: QueueId) -> i64 {
        self.queues.get(self.queue_slot(queue)).lease_due
    }

    pub fn set_lease_due(&mut self, queue: QueueId, due: i64) {
        let slot = self.queue_slot(queue);
        self.queues.get_mut(slot).lease_due = due;
    }

    /// Makes the lower bound cover one more lease.
    pub fn note_lease_due(&mut self, queue: QueueId, due: i64) {
        let slot = self.queue_slot(queue);
        let queue = self.queues.get_mut(slot);
        queue.lease_due = queue.lease_due.min(due);
    }

    /// When the next pinned row of the queue may become free for all, at the earliest; `i64::MAX` if none is known.
    pub fn unpin_due(&self, queue: QueueId) -> i64 {
        self.queues.get(self.queue_slot(queue)).unpin_due
    }

    pub fn set_unpin_due(&mut self, queue: QueueId, due: i64) {
        let slot = self.queue_slot(queue);
        self.queues.get_mut(slot).unpin_due = due;
    }

    /// Makes the lower bound cover one more pinned row.
    pub fn note_unpin_due(&mut self, queue: QueueId, due: i64) {
        let slot = self.queue_slot(queue);
        let queue = self.queues.get_mut(slot);
        queue.unpin_due = queue.unpin_due.min(due);
    }

    /// For the caller to count in. Those of a stale id count nothing.
    pub fn counters(&mut self, queue: QueueId) -> &mut Counters {
        let slot = self.queue_slot(queue);
        &mut self.queues.get_mut(slot).counters
    }
}
