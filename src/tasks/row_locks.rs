//! Row locks on the task table: taken for an update, or looked at only.

use pgrx::pg_sys;

use super::catalog::column;
use super::probe::LaneKey;
use super::table::{TaskTable, Tid, TupleLock};
use crate::sfq::RowPos;

impl TaskTable {
    /// Whether another transaction holds a row, such that [`TaskTable::lock_or_skip`] would skip it. Locks nothing. The slot
    /// then holds it.
    pub fn is_held(&self, mut tid: Tid) -> bool {
        // SAFETY: the table is open and the snapshot registered; the slot, which is one for heap tuples, keeps its buffer
        // pinned while the header is read. A header that changes meanwhile gives an answer from before or after.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let found =
                pg_sys::table_tuple_fetch_row_version(self.table, &mut tid, snapshot, self.slot);
            pg_sys::UnregisterSnapshot(snapshot);
            let is_heap = std::ptr::eq(
                (*self.slot).tts_ops,
                &raw const pg_sys::TTSOpsBufferHeapTuple,
            );
            if !found || !is_heap {
                return false;
            }
            let slot = self.slot.cast::<pg_sys::HeapTupleTableSlot>();
            let header = (*(*slot).tuple).t_data;
            let mask = u32::from((*header).t_infomask);
            let holder = (*header).t_choice.t_heap.t_xmax;
            // What a foreign key takes is no hindrance to an update that leaves the key alone.
            let of_key = mask & pg_sys::HEAP_LOCK_MASK == pg_sys::HEAP_XMAX_KEYSHR_LOCK;
            let lock_only = mask & pg_sys::HEAP_XMAX_LOCK_ONLY != 0;
            if mask & pg_sys::HEAP_XMAX_INVALID != 0 {
                false
            } else if mask & pg_sys::HEAP_XMAX_IS_MULTI != 0 {
                pg_sys::MultiXactIdIsRunning(holder, lock_only)
            } else {
                let mine = pg_sys::TransactionIdIsCurrentTransactionId(holder);
                let hinders = !(mine || lock_only && of_key);
                hinders && pg_sys::TransactionIdIsInProgress(holder)
            }
        }
    }

    /// Locks a row version for an update; never waits.
    pub fn lock_or_skip(&self, tid: Tid) -> TupleLock {
        self.lock(tid, pg_sys::LockWaitPolicy::LockWaitSkip, 0)
    }

    /// Locks a row of a lane that was seen at this address, maybe a while ago, if it still stands there; never waits.
    pub fn lock_pending(&self, lane: &LaneKey, at: RowPos, mut tid: Tid) -> TupleLock {
        // SAFETY: the table is open, with a lock under which it is not cut off, and has this block; the snapshot is
        // registered while it is in use. Until then no version that it shows makes way for another row's.
        unsafe {
            if !self.has_block(pgrx::itemptr::item_pointer_get_block_number(&tid)) {
                return TupleLock::Gone;
            }
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let found =
                pg_sys::table_tuple_fetch_row_version(self.table, &mut tid, snapshot, self.slot);
            let locked = if found && self.is_pending(lane, at) {
                self.lock_or_skip(tid)
            } else {
                TupleLock::Gone
            };
            pg_sys::UnregisterSnapshot(snapshot);
            locked
        }
    }

    /// Whether the slot holds a pending row of the lane at its place.
    fn is_pending(&self, lane: &LaneKey, at: RowPos) -> bool {
        self.get::<bool>(column::NEW_START) == Some(lane.band != 0)
            && self.get::<pg_sys::Oid>(column::STATE) == Some(self.catalog.pending)
            && self.row().pos == at
            && self.get::<i16>(column::PRIORITY) == Some(lane.priority)
            && self.get::<&str>(column::STICKY_WORKER).is_none()
            && self.get::<&str>(column::FAIRNESS_KEY) == Some(lane.key)
            && self.get::<&str>(column::QUEUE) == Some(lane.queue)
    }

    /// Locks the newest version of a row for an update; waits for whoever holds it. The slot then holds it.
    pub fn lock_newest(&self, tid: Tid) -> TupleLock {
        self.lock(
            tid,
            pg_sys::LockWaitPolicy::LockWaitBlock,
            pg_sys::TUPLE_LOCK_FLAG_FIND_LAST_VERSION as u8,
        )
    }

    fn lock(&self, mut tid: Tid, policy: pg_sys::LockWaitPolicy::Type, flags: u8) -> TupleLock {
        let mut failure = pg_sys::TM_FailureData::default();
        // SAFETY: the table is open with a writer's lock; the snapshot is registered during the call.
        let result = unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let result = pg_sys::table_tuple_lock(
                self.table,
                &mut tid,
                snapshot,
                self.slot,
                pg_sys::GetCurrentCommandId(true),
                pg_sys::LockTupleMode::LockTupleNoKeyExclusive,
                policy,
                flags,
                &mut failure,
            );
            pg_sys::UnregisterSnapshot(snapshot);
            result
        };
        match result {
            pg_sys::TM_Result::TM_Ok => TupleLock::Locked(self.tid()),
            pg_sys::TM_Result::TM_WouldBlock | pg_sys::TM_Result::TM_BeingModified => {
                TupleLock::Held
            }
            _ => TupleLock::Gone,
        }
    }
}
