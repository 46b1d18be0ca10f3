//! The task table, read directly: index probes that no plan and no statistics can slow down.
//!
//! Rows are read through the lane, lease and primary key indexes with a fresh snapshot for each probe (a statement's
//! own snapshot is older than the lane generation that the claim has read, and would lose a wake-up) and locked with
//! `table_tuple_lock`. They are only ever written through SPI.

use std::cell::Cell;
use std::ffi::CStr;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::board::stored_priority;
use crate::errors::Error;
use crate::names::Priority;
use crate::pg_compat;
use crate::sfq::{Row, RowPos};

/// Columns of harvest_fair.task, by number.
pub mod column {
    pub const ID: usize = 1;
    pub const QUEUE: usize = 2;
    pub const FAIRNESS_KEY: usize = 3;
    pub const QUOTA_KEY: usize = 4;
    pub const PRIORITY: usize = 5;
    pub const WEIGHT: usize = 6;
    pub const NEW_START: usize = 7;
    pub const STICKY_WORKER: usize = 8;
    pub const STICKY_UNTIL: usize = 9;
    pub const STATE: usize = 11;
    pub const SCHEDULED_AT: usize = 12;
    pub const PARENT_ID: usize = 13;
    pub const ATTEMPT: usize = 14;
    pub const MAX_ATTEMPTS: usize = 15;
    pub const LEASE: usize = 17;
    pub const LEASE_UNTIL: usize = 18;
    pub const CHARGED: usize = 19;
    pub const ENQUEUED_AT: usize = 21;
    /// How many there are.
    pub const COUNT: usize = 23;
}

/// Object ids of the extension in this database.
#[derive(Clone, Copy)]
pub struct Catalog {
    pub task: pg_sys::Oid,
    lane: pg_sys::Oid,
    pinned: pg_sys::Oid,
    lease: pg_sys::Oid,
    finished: pg_sys::Oid,
    primary: pg_sys::Oid,
    pub pending: pg_sys::Oid,
    pub running: pg_sys::Oid,
    pub failed: pg_sys::Oid,
    pub cancelled: pg_sys::Oid,
}

thread_local! {
    static CATALOG: Cell<Option<Catalog>> = const { Cell::new(None) };
}

fn relation(name: &CStr, schema: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: a constant name; the look-up goes through the system cache.
    unsafe { pg_sys::get_relname_relid(name.as_ptr(), schema) }
}

/// Forgets the object ids when something was done to one of the relations: REINDEX CONCURRENTLY gives indexes new ones.
#[pg_guard]
unsafe extern "C-unwind" fn forget_catalog(_arg: pg_sys::Datum, relation: pg_sys::Oid) {
    let concerns = |known: &Catalog| {
        let ours = [
            known.task,
            known.lane,
            known.pinned,
            known.lease,
            known.finished,
            known.primary,
        ];
        relation == pg_sys::InvalidOid || ours.contains(&relation)
    };
    if CATALOG.get().as_ref().is_some_and(concerns) {
        CATALOG.set(None);
    }
}

/// Registers for news of relations; once, while the postmaster loads the library.
pub fn register() {
    // SAFETY: a static function with the signature that Postgres wants; sessions inherit it.
    unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(forget_catalog), pg_sys::Datum::from(0)) };
}

impl Catalog {
    /// Looks the extension up; two system cache look-ups when nothing has changed since the last call.
    pub fn get() -> Result<Catalog, Error> {
        // SAFETY: a constant name; InvalidOid when there is no such schema.
        let schema = unsafe { pg_sys::get_namespace_oid(c"harvest_fair".as_ptr(), true) };
        if schema == pg_sys::InvalidOid {
            return Err(Error::NotInstalled);
        }
        let task = relation(c"task", schema);
        if let Some(known) = CATALOG.get()
            && known.task == task
        {
            return Ok(known);
        }
        if task == pg_sys::InvalidOid {
            return Err(Error::NotInstalled);
        }
        let label = |name: &CStr| -> pg_sys::Oid {
            // SAFETY: system cache look-ups by constant names; a missing label gives InvalidOid.
            unsafe {
                let state_type = pg_sys::get_atttype(task, column::STATE as i16);
                pg_sys::GetSysCacheOid(
                    pg_sys::SysCacheIdentifier::ENUMTYPOIDNAME as i32,
                    pg_sys::Anum_pg_enum_oid as i16,
                    pg_sys::Datum::from(state_type),
                    pg_sys::Datum::from(name.as_ptr()),
                    pg_sys::Datum::from(0),
                    pg_sys::Datum::from(0),
                )
            }
        };
        let catalog = Catalog {
            task,
            lane: relation(c"task_lane", schema),
            pinned: relation(c"task_pinned", schema),
            lease: relation(c"task_lease", schema),
            finished: relation(c"task_finished", schema),
            primary: relation(c"task_pkey", schema),
            pending: label(c"pending"),
            running: label(c"running"),
            failed: label(c"failed"),
            cancelled: label(c"cancelled"),
        };
        let all = [
            catalog.lane,
            catalog.pinned,
            catalog.lease,
            catalog.finished,
            catalog.primary,
            catalog.pending,
            catalog.running,
            catalog.failed,
            catalog.cancelled,
        ];
        if all.contains(&pg_sys::InvalidOid) {
            return Err(Error::NotInstalled);
        }
        CATALOG.set(Some(catalog));
        Ok(catalog)
    }

    /// What the board knows this database's task table by: a re-created extension starts clean.
    pub fn scope(&self) -> u64 {
        // SAFETY: set for the life of the backend once it is connected.
        let database = unsafe { pg_sys::MyDatabaseId };
        (u64::from(database.to_u32()) << 32) | u64::from(self.task.to_u32())
    }
}

/// The address of a row version.
pub type Tid = pg_sys::ItemPointerData;

/// A lane by its index columns.
pub struct LaneKey<'a> {
    pub queue: &'a str,
    pub priority: i16,
    pub key: &'a str,
    pub band: u8,
}

/// A row that waits for one worker.
pub struct PinnedRow {
    pub tid: Tid,
    pub row: Row,
    pub priority: Priority,
    pub key: String,
}

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
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
}

impl Drop for TaskTable {
    fn drop(&mut self) {
        // While an ERROR unwinds, Postgres' resource owner closes what is open.
        if std::thread::panicking() {
            return;
        }
        // SAFETY: both were opened in `open` and are closed once.
        unsafe {
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::table_close(self.table, pg_sys::NoLock as i32);
        }
    }
}

/// Scan keys, with room for the members of one row comparison.
struct Keys {
    keys: Vec<pg_sys::ScanKeyData>,
    members: Vec<pg_sys::ScanKeyData>,
}

const EQUAL: u16 = pg_sys::BTEqualStrategyNumber as u16;
const AT_LEAST: u16 = pg_sys::BTGreaterEqualStrategyNumber as u16;
const AFTER: u16 = pg_sys::BTGreaterStrategyNumber as u16;
const AT_MOST: u16 = pg_sys::BTLessEqualStrategyNumber as u16;

fn entry(
    attribute: i16,
    strategy: u16,
    flags: u32,
    collation: pg_sys::Oid,
    function: u32,
    value: pg_sys::Datum,
) -> pg_sys::ScanKeyData {
    let mut key = pg_sys::ScanKeyData::default();
    // SAFETY: fills the record that it is given; `function` is a built-in comparison of the column's type.
    unsafe {
        pg_sys::ScanKeyEntryInitialize(
            &mut key,
            flags as i32,
            attribute,
            strategy,
            pg_sys::InvalidOid,
            collation,
            pg_sys::Oid::from(function),
            value,
        );
    }
    key
}

fn text(value: &str) -> pg_sys::Datum {
    // SAFETY: copies `value` into a text of the current memory context.
    unsafe {
        pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(
            value.as_ptr().cast(),
            value.len() as i32,
        ))
    }
}

impl Keys {
    fn new() -> Keys {
        Keys {
            keys: Vec::with_capacity(5),
            members: Vec::with_capacity(3),
        }
    }

    fn text(mut self, attribute: i16, value: &str) -> Keys {
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            pg_sys::C_COLLATION_OID,
            pg_sys::F_TEXTEQ,
            text(value),
        ));
        self
    }

    fn int2(mut self, attribute: i16, value: i16) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_INT2EQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    fn int8(mut self, attribute: i16, value: i64) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_INT8EQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    fn bool(mut self, attribute: i16, value: bool) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_BOOLEQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    fn time_at_most(mut self, attribute: i16, value: i64) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            AT_MOST,
            0,
            zero,
            pg_sys::F_TIMESTAMPTZ_LE,
            pg_sys::Datum::from(value),
        ));
        self
    }

    /// A member of the row comparison that ends the key: comparison function of the column's operator class.
    fn member(
        mut self,
        attribute: i16,
        strategy: u16,
        collation: pg_sys::Oid,
        function: u32,
        value: pg_sys::Datum,
    ) -> Keys {
        self.members.push(entry(
            attribute,
            strategy,
            pg_sys::SK_ROW_MEMBER,
            collation,
            function,
            value,
        ));
        self
    }

    /// Turns the members into one row comparison.
    fn row(mut self) -> Keys {
        if let Some(last) = self.members.last_mut() {
            last.sk_flags |= pg_sys::SK_ROW_END as i32;
        }
        if let Some(first) = self.members.first() {
            let header = pg_sys::ScanKeyData {
                sk_flags: pg_sys::SK_ROW_HEADER as i32,
                sk_attno: first.sk_attno,
                sk_strategy: first.sk_strategy,
                sk_argument: pg_sys::Datum::from(self.members.as_ptr()),
                ..Default::default()
            };
            self.keys.push(header);
        }
        self
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
            })
        }
    }

    /// Scans an index from the start of a key range with a fresh snapshot, until `each` says stop.
    /// `each` gets this table, its slot filled with a visible row.
    fn scan(
        &self,
        index: pg_sys::Oid,
        mut keys: Keys,
        mut each: impl FnMut(&TaskTable, pg_sys::Snapshot) -> bool,
    ) -> bool {
        let mut ended = false;
        // SAFETY: the snapshot is registered for the whole scan; index and scan are closed before it is given back;
        // the row comparison's members live in `keys` through the scan.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let index = pg_sys::index_open(index, pg_sys::AccessShareLock as i32);
            let count = keys.keys.len() as i32;
            let scan = pg_compat::index_beginscan(self.table, index, snapshot, count);
            pg_sys::index_rescan(scan, keys.keys.as_mut_ptr(), count, std::ptr::null_mut(), 0);
            loop {
                if !pg_sys::index_getnext_slot(
                    scan,
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
            pg_sys::index_endscan(scan);
            // The table's lock is enough to keep the index.
            pg_sys::index_close(index, pg_sys::AccessShareLock as i32);
            pg_sys::UnregisterSnapshot(snapshot);
        }
        ended
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

    fn row(&self) -> Row {
        // The later column first: one walk along the row decodes them all.
        let due = self.micros(column::SCHEDULED_AT).unwrap_or(i64::MAX);
        let id = self.get(column::ID).unwrap_or(i64::MAX);
        Row {
            pos: RowPos { due, id },
            weight: self.get(column::WEIGHT),
        }
    }

    /// The first `want` pending rows of a lane at or after `from`, in order. True if the lane ends with them.
    pub fn probe(
        &self,
        lane: &LaneKey,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Tid)>,
    ) -> bool {
        let keys = Keys::new()
            .text(1, lane.queue)
            .int2(2, lane.priority)
            .text(3, lane.key)
            .bool(4, lane.band != 0)
            .member(
                5,
                AT_LEAST,
                pg_sys::InvalidOid,
                pg_sys::F_TIMESTAMPTZ_CMP,
                pg_sys::Datum::from(from.due),
            )
            .member(
                6,
                AT_LEAST,
                pg_sys::InvalidOid,
                pg_sys::F_BTINT8CMP,
                pg_sys::Datum::from(from.id),
            )
            .row();
        let mut left = want;
        self.scan(self.catalog.lane, keys, |table, _| {
            out.push((table.row(), table.tid()));
            left -= 1;
            left > 0
        })
    }

    /// Visits the first row of each lane of a queue, in index order: one descent a lane.
    pub fn walk_lanes(&self, queue: &str, mut each: impl FnMut(i16, &str, u8, Row)) {
        let mut last: Option<(i16, String, bool)> = None;
        loop {
            pgrx::check_for_interrupts!();
            let keys = Keys::new().text(1, queue);
            let keys = match &last {
                None => keys,
                Some((priority, key, band)) => keys
                    .member(
                        2,
                        AFTER,
                        pg_sys::InvalidOid,
                        pg_sys::F_BTINT2CMP,
                        pg_sys::Datum::from(*priority),
                    )
                    .member(
                        3,
                        AFTER,
                        pg_sys::C_COLLATION_OID,
                        pg_sys::F_BTTEXTCMP,
                        text(key),
                    )
                    .member(
                        4,
                        AFTER,
                        pg_sys::InvalidOid,
                        pg_sys::F_BTBOOLCMP,
                        pg_sys::Datum::from(*band),
                    )
                    .row(),
            };
            let mut found = None;
            self.scan(self.catalog.lane, keys, |table, _| {
                let row = table.row();
                found = Some((
                    table.get::<i16>(column::PRIORITY).unwrap_or(3),
                    table
                        .get::<String>(column::FAIRNESS_KEY)
                        .unwrap_or_default(),
                    table.get::<bool>(column::NEW_START).unwrap_or(false),
                    row,
                ));
                false
            });
            let Some((priority, key, band, row)) = found else {
                return;
            };
            each(priority, &key, u8::from(band), row);
            last = Some((priority, key, band));
        }
    }

    /// The queues that have unpinned pending, pinned or running rows: one descent each in each index.
    pub fn queues(&self) -> Vec<String> {
        let mut queues = Vec::new();
        for index in [self.catalog.lane, self.catalog.pinned, self.catalog.lease] {
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

    /// Running tasks of a queue whose lease ended by `until`, at most `want`; and when the next one ends.
    pub fn expired_leases(&self, queue: &str, until: i64, want: usize) -> (Vec<Tid>, Option<i64>) {
        let mut expired = Vec::new();
        let mut next = None;
        self.scan(
            self.catalog.lease,
            Keys::new().text(1, queue),
            |table, _| {
                let ends = table.micros(column::LEASE_UNTIL).unwrap_or(i64::MAX);
                if ends <= until && expired.len() < want {
                    expired.push(table.tid());
                    return true;
                }
                next = Some(ends);
                false
            },
        );
        (expired, next)
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

    /// Pinned pending rows of one worker in a queue that are due by `now`, at most `want` of each priority.
    pub fn pinned(&self, queue: &str, worker: &str, now: i64, want: usize) -> Vec<PinnedRow> {
        let mut found = Vec::new();
        for priority in 1..=5i16 {
            let mut left = want;
            let keys = Keys::new()
                .text(1, queue)
                .text(2, worker)
                .int2(3, priority)
                .time_at_most(4, now);
            self.scan(self.catalog.pinned, keys, |table, _| {
                let row = table.row();
                let key = table.get(column::FAIRNESS_KEY).unwrap_or_default();
                found.push(PinnedRow {
                    tid: table.tid(),
                    row,
                    priority: stored_priority(priority),
                    key,
                });
                left -= 1;
                left > 0
            });
        }
        found
    }

    /// Visits the end of the pin of each pinned row of a queue.
    pub fn pins(&self, queue: &str, mut each: impl FnMut(Tid, Option<i64>)) {
        self.scan(
            self.catalog.pinned,
            Keys::new().text(1, queue),
            |table, _| {
                each(table.tid(), table.micros(column::STICKY_UNTIL));
                true
            },
        );
    }

    /// Finished tasks from before a point in time, the oldest first, at most `want`.
    pub fn finished_before(&self, until: i64, want: usize) -> Vec<Tid> {
        let mut found = Vec::new();
        self.scan(
            self.catalog.finished,
            Keys::new().time_at_most(1, until),
            |table, _| {
                found.push(table.tid());
                found.len() < want
            },
        );
        found
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

    /// Locks a row version for an update; never waits.
    pub fn lock_or_skip(&self, tid: Tid) -> TupleLock {
        self.lock(tid, pg_sys::LockWaitPolicy::LockWaitSkip, 0)
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
