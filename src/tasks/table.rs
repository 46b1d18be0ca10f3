//! The task table, read directly: index probes that no plan and no statistics can slow down.
//!
//! Rows are read through the lane, lease and primary key indexes with a fresh snapshot for each probe (a statement's
//! own snapshot is older than the lane generation that the claim has read, and would lose a wake-up) and locked with
//! `table_tuple_lock`.

use std::cell::Cell;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::catalog::{Catalog, column};
use super::scan_keys::{AFTER, Keys, entry, text};
use crate::errors::Error;
use crate::pg_compat;
use crate::sfq::{Row, RowPos};
use crate::spi;

/// The address of a row version.
pub type Tid = pg_sys::ItemPointerData;

/// What became of an attempt to lock a row.
pub enum TupleLock {
    /// Locked, as the version at this address.
    Locked(Tid),
    /// Another transaction holds it.
    Held,
    /// It was changed or deleted since it was read.
    Gone,
}

/// The task table, open for the length of one call.
pub struct TaskTable {
    pub catalog: Catalog,
    pub(super) table: pg_sys::Relation,
    pub(super) slot: *mut pg_sys::TupleTableSlot,
    /// The scan made last, kept for the next one: to open and close one costs as much as to use it.
    idle: Cell<Option<IndexScan>>,
    /// Whether this transaction's own changes are overlooked.
    pub(super) as_others: Cell<bool>,
    /// How many blocks the table has at least; 0 while nobody has asked.
    blocks: Cell<u32>,
}

/// A scan of an index with so many keys, between two uses.
#[derive(Clone, Copy)]
struct IndexScan {
    oid: pg_sys::Oid,
    count: i32,
    index: pg_sys::Relation,
    scan: pg_sys::IndexScanDesc,
}

impl IndexScan {
    fn close(self) {
        // SAFETY: both were opened in `TaskTable::scan`, and whoever has the only copy closes them.
        unsafe {
            pg_sys::index_endscan(self.scan);
            // The table's lock is enough to keep the index.
            pg_sys::index_close(self.index, pg_sys::AccessShareLock as i32);
        }
    }
}

impl Drop for TaskTable {
    fn drop(&mut self) {
        // While an ERROR unwinds, Postgres' resource owner closes what is open.
        if std::thread::panicking() {
            return;
        }
        if let Some(scan) = self.idle.take() {
            scan.close();
        }
        // SAFETY: both were opened in `open` and are closed once.
        unsafe {
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::table_close(self.table, pg_sys::NoLock as i32);
        }
    }
}

impl TaskTable {
    /// Opens the table with the lock of a writer.
    pub fn open() -> Result<TaskTable, Error> {
        let catalog = Catalog::get()?;
        // SAFETY: the relation was just looked up; the lock is kept to the end of the transaction, as for any writer.
        unsafe {
            let table = pg_sys::try_table_open(catalog.task, pg_sys::RowExclusiveLock as i32);
            if table.is_null() {
                // Dropped while this session waited for the lock.
                return Err(Error::NotInstalled);
            }
            // The lock has let in word of what was done to the table before: its indexes may be others.
            let catalog = Catalog::get()?;
            let slot = pg_sys::table_slot_create(table, std::ptr::null_mut());
            Ok(TaskTable {
                catalog,
                table,
                slot,
                idle: Cell::new(None),
                as_others: Cell::new(false),
                blocks: Cell::new(0),
            })
        }
    }

    /// Whether the table has a block. Under its lock, none is taken from it.
    pub(super) fn has_block(&self, block: u32) -> bool {
        if block >= self.blocks.get() {
            // SAFETY: the table is open.
            let blocks = unsafe {
                pg_sys::RelationGetNumberOfBlocksInFork(
                    self.table,
                    pg_sys::ForkNumber::MAIN_FORKNUM,
                )
            };
            self.blocks.set(blocks);
        }
        block < self.blocks.get()
    }

    /// Runs `f`, in which scans of this table see it as other sessions do, without what this transaction has changed.
    pub fn as_others_see<R>(&self, f: impl FnOnce() -> R) -> R {
        self.as_others.set(true);
        let result = f();
        self.as_others.set(false);
        result
    }

    /// Scans an index from the start of a key range with a fresh snapshot, until `each` says stop.
    /// `each` gets this table, its slot filled with a visible row.
    pub(super) fn scan(
        &self,
        index: pg_sys::Oid,
        mut keys: Keys,
        mut each: impl FnMut(&TaskTable, pg_sys::Snapshot) -> bool,
    ) -> bool {
        let mut ended = false;
        let count = keys.keys.len() as i32;
        // SAFETY: the snapshot is registered while the scan is in use, and the scan gets it before it starts anew; the row
        // comparison's members live in `keys` through the scan; the scan stays open with its index until `close`.
        unsafe {
            let snapshot = if self.as_others.get() {
                spi::snapshot_of_others()
            } else {
                pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot())
            };
            let open = self.scan_of(index, count, snapshot);
            (*open.scan).xs_snapshot = snapshot;
            pg_sys::index_rescan(
                open.scan,
                keys.keys.as_mut_ptr(),
                count,
                std::ptr::null_mut(),
                0,
            );
            loop {
                if !pg_sys::index_getnext_slot(
                    open.scan,
                    pg_sys::ScanDirection::ForwardScanDirection,
                    self.slot,
                ) {
                    ended = true;
                    break;
                }
                if !each(self, snapshot) {
                    break;
                }
            }
            if let Some(other) = self.idle.replace(Some(open)) {
                other.close();
            }
            pg_sys::UnregisterSnapshot(snapshot);
        }
        ended
    }

    /// The idle scan, if it is of this kind, else a new one.
    ///
    /// # Safety
    /// The snapshot is a registered one.
    unsafe fn scan_of(
        &self,
        oid: pg_sys::Oid,
        count: i32,
        snapshot: pg_sys::Snapshot,
    ) -> IndexScan {
        match self.idle.take() {
            Some(scan) if (scan.oid, scan.count) == (oid, count) => return scan,
            Some(scan) => scan.close(),
            None => {}
        }
        // SAFETY: the table is open and locked, so the index is there.
        unsafe {
            let index = pg_sys::index_open(oid, pg_sys::AccessShareLock as i32);
            let scan = pg_compat::index_beginscan(self.table, index, snapshot, count);
            IndexScan {
                oid,
                count,
                index,
                scan,
            }
        }
    }

    /// A column of the row in the slot.
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the slot holds a row of the task table, which has at least `column` columns.
        unsafe {
            if ((*self.slot).tts_nvalid as usize) < column {
                pg_sys::slot_getsomeattrs_int(self.slot, column as i32);
            }
            let null = *(*self.slot).tts_isnull.add(column - 1);
            (!null).then(|| *(*self.slot).tts_values.add(column - 1))
        }
    }

    /// A column of the row in the slot as a Rust value.
    pub fn get<T: FromDatum>(&self, column: usize) -> Option<T> {
        let datum = self.datum(column)?;
        // SAFETY: callers name the Rust type of the column.
        unsafe { T::from_datum(datum, false) }
    }

    /// A timestamp column of the row in the slot, in microseconds as Postgres counts them.
    pub fn micros(&self, column: usize) -> Option<i64> {
        self.datum(column).map(|d| d.value() as i64)
    }

    /// The address of the row in the slot.
    pub fn tid(&self) -> Tid {
        // SAFETY: the slot holds a row.
        unsafe { (*self.slot).tts_tid }
    }

    /// The row in the slot, as the scheduler knows it.
    pub fn row(&self) -> Row {
        // The later column first: one walk along the row decodes them all.
        let due = self.micros(column::SCHEDULED_AT).unwrap_or(i64::MAX);
        let id = self.get(column::ID).unwrap_or(i64::MAX);
        Row {
            pos: RowPos { due, id },
            weight: self.get(column::WEIGHT),
        }
    }

    /// The queues that have unpinned pending, pinned or running rows: one descent each in each index.
    pub fn queues(&self) -> Vec<String> {
        self.first_columns(&[self.catalog.lane, self.catalog.pinned, self.catalog.lease])
    }

    /// The queues in indexes that begin with the queue: one descent each.
    fn first_columns(&self, indexes: &[pg_sys::Oid]) -> Vec<String> {
        let mut queues = Vec::new();
        for &index in indexes {
            let mut last: Option<String> = None;
            loop {
                pgrx::check_for_interrupts!();
                let keys = match &last {
                    None => Keys::new(),
                    Some(queue) => {
                        let mut keys = Keys::new();
                        keys.keys.push(entry(
                            1,
                            AFTER,
                            0,
                            pg_sys::C_COLLATION_OID,
                            pg_sys::F_TEXT_GT,
                            text(queue),
                        ));
                        keys
                    }
                };
                let mut found = None;
                self.scan(index, keys, |table, _| {
                    found = table.get::<String>(column::QUEUE);
                    false
                });
                let Some(queue) = found else { break };
                if !queues.contains(&queue) {
                    queues.push(queue.clone());
                }
                last = Some(queue);
            }
        }
        queues
    }

    /// Visits the running tasks of a queue in the order in which their leases end, until `each` says stop.
    pub fn leases(&self, queue: &str, mut each: impl FnMut(&TaskTable) -> bool) {
        self.scan(
            self.catalog.lease,
            Keys::new().text(1, queue),
            |table, _| each(table),
        );
    }

    /// Visits the key of each running task of a queue.
    pub fn running(&self, queue: &str, mut each: impl FnMut(&str)) {
        self.scan(
            self.catalog.lease,
            Keys::new().text(1, queue),
            |table, _| {
                each(
                    &table
                        .get::<String>(column::FAIRNESS_KEY)
                        .unwrap_or_default(),
                );
                true
            },
        );
    }

    /// Finished tasks of a queue from before a point in time, the oldest first, at most `want`.
    pub fn finished_before(&self, queue: &str, until: i64, want: usize) -> Vec<Tid> {
        let mut found = Vec::new();
        let keys = Keys::new().text(1, queue).time_at_most(2, until);
        self.scan(self.catalog.finished, keys, |table, _| {
            found.push(table.tid());
            found.len() < want
        });
        found
    }

    /// The queues that have finished tasks.
    pub fn queues_with_finished(&self) -> Vec<String> {
        self.first_columns(&[self.catalog.finished])
    }

    /// Finds a task by its id as this instant sees it; the slot then holds it.
    pub fn find(&self, id: i64) -> bool {
        let mut found = false;
        self.scan(self.catalog.primary, Keys::new().int8(1, id), |_, _| {
            found = true;
            false
        });
        found
    }
}
