//! Changed versions of locked rows, written through the table's own interface, as logical replication writes its rows: a
//! statement's start and end cost more than the one row that it changes, and the row trigger would find nothing to do.
//!
//! Whoever writes here tells the board what the row trigger would have told it, and changes nothing that the trigger would
//! have to check. Indexes, constraints and generated columns are Postgres' part, as ever. Where anybody else has a say in
//! updates of the table (see [`Writer::open`]), there is no writer, and the change goes through a statement.

use std::ffi::CStr;

use pgrx::pg_sys;

use super::catalog::column;
use super::table::{TaskTable, Tid};
use crate::pg_compat;

/// The name of our own row trigger; a table has no two of one name.
const OWN_TRIGGER: &CStr = c"zzz_admit";

/// Writes new values of `N` columns into rows of the task table, for the length of one call.
pub struct Writer<'t, const N: usize> {
    table: &'t TaskTable,
    columns: [usize; N],
    /// Columns that were dropped: their values are left behind with the old versions.
    dropped: Vec<usize>,
    state: *mut pg_sys::EState,
    target: *mut pg_sys::ResultRelInfo,
    /// The new version.
    slot: *mut pg_sys::TupleTableSlot,
}

impl<const N: usize> Drop for Writer<'_, N> {
    fn drop(&mut self) {
        // While an ERROR unwinds, Postgres' resource owner closes the indexes, and the call's memory goes.
        if std::thread::panicking() {
            return;
        }
        // SAFETY: all that was made in `open` is given back once; the snapshot is the innermost one.
        unsafe {
            pg_sys::ExecCloseIndices(self.target);
            pg_sys::PopActiveSnapshot();
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::FreeExecutorState(self.state);
        }
    }
}

impl<'t, const N: usize> Writer<'t, N> {
    /// A writer of these columns. Nothing if a rule, or a trigger that is not ours (a foreign key's too), has a say in updates:
    /// these are for a statement to heed.
    pub fn open(table: &'t TaskTable, columns: [usize; N]) -> Option<Writer<'t, N>> {
        if !nobody_else_has_a_say(table.table) {
            return None;
        }
        // SAFETY: the table is open with a writer's lock, and stays so while the writer lives. What is made here lives in
        // the executor state's own memory, in that of the call.
        unsafe {
            let state = pg_sys::CreateExecutorState();
            let call = pg_sys::MemoryContextSwitchTo((*state).es_query_cxt);
            let target =
                pg_sys::palloc0(size_of::<pg_sys::ResultRelInfo>()).cast::<pg_sys::ResultRelInfo>();
            // Number 0 stands for a table that is in no query.
            pg_sys::InitResultRelInfo(target, table.table, 0, std::ptr::null_mut(), 0);
            // The one trigger is ours, and has nothing to say.
            (*target).ri_TrigDesc = std::ptr::null_mut();
            pg_sys::ExecOpenIndices(target, false);
            mark_unchanged(&*target, &columns);
            pg_sys::MemoryContextSwitchTo(call);
            // As before any statement: what is written is not the work of the caller's own command, which must not take it for
            // its own and pass over the row; and functions of constraints and indexes see what is committed by now.
            pg_sys::CommandCounterIncrement();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let slot = pg_sys::MakeSingleTupleTableSlot(
                (*table.table).rd_att,
                &raw const pg_sys::TTSOpsVirtual,
            );
            let dropped = dropped_columns((*table.table).rd_att);
            Some(Writer {
                table,
                columns,
                dropped,
                state,
                target,
                slot,
            })
        }
    }

    /// Reads a row version that is locked, for the next [`Writer::write`]. False if it is not there.
    pub fn read(&self, mut tid: Tid) -> bool {
        // SAFETY: the table is open; the slot keeps the version's buffer pinned.
        unsafe {
            pg_sys::table_tuple_fetch_row_version(
                self.table.table,
                &mut tid,
                &raw mut pg_sys::SnapshotAnyData,
                self.table.slot,
            )
        }
    }

    /// Writes a new version of the row in the table's slot, which this transaction has locked: the columns' new values, where
    /// nothing is NULL.
    pub fn write(&self, values: [Option<pg_sys::Datum>; N]) {
        // SAFETY: both slots have the table's columns, and the old one keeps its buffer pinned, where values of the new one
        // stand. The row is locked, so its newest version is the one in the slot.
        unsafe {
            let (old, new) = (self.table.slot, self.slot);
            pg_sys::slot_getallattrs(old);
            pg_sys::ExecClearTuple(new);
            let all = (*(*old).tts_tupleDescriptor).natts as usize;
            std::ptr::copy_nonoverlapping((*old).tts_values, (*new).tts_values, all);
            std::ptr::copy_nonoverlapping((*old).tts_isnull, (*new).tts_isnull, all);
            for (column, value) in self.columns.iter().zip(values) {
                *(*new).tts_values.add(column - 1) = value.unwrap_or(pg_sys::Datum::from(0));
                *(*new).tts_isnull.add(column - 1) = value.is_none();
            }
            for column in &self.dropped {
                *(*new).tts_isnull.add(*column) = true;
            }
            pg_sys::ExecStoreVirtualTuple(new);
            // Without triggers nothing is ever checked anew for a row that has changed meanwhile.
            let recheck = std::ptr::null_mut();
            pg_sys::ExecSimpleRelationUpdate(self.target, self.state, recheck, old, new);
            let of_row = (*self.state).es_per_tuple_exprcontext;
            if !of_row.is_null() {
                pg_sys::MemoryContextReset((*of_row).ecxt_per_tuple_memory);
            }
        }
    }

    /// A column of the version that was written last; valid until the next is read or written.
    pub fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the slot holds all columns of the row.
        unsafe {
            let null = *(*self.slot).tts_isnull.add(column - 1);
            (!null).then(|| *(*self.slot).tts_values.add(column - 1))
        }
    }
}

/// Lets what comes later in the same statement see what was written.
pub fn show_changes() {
    // SAFETY: within a transaction that has just written, and so has marked its command as one that does.
    unsafe { pg_sys::CommandCounterIncrement() };
}

/// Tells each index whether its entries change but for the row's address. Then it looks for dead entries in a leaf page before
/// it splits it, which is in vain if they are new. Postgres would find this out from the query, of which there is none.
///
/// # Safety
/// The indexes are open.
unsafe fn mark_unchanged(target: &pg_sys::ResultRelInfo, columns: &[usize]) {
    // SAFETY: as the caller promises; the indexes' descriptions are this writer's own.
    unsafe {
        for i in 0..target.ri_NumIndices as usize {
            let index = &mut **target.ri_IndexRelationInfo.add(i);
            let keys = &index.ii_IndexAttrNumbers[..index.ii_NumIndexKeyAttrs as usize];
            let changes = |key: &i16| columns.contains(&usize::try_from(*key).unwrap_or(0));
            index.ii_CheckedUnchanged = true;
            index.ii_IndexUnchanged = index.ii_Expressions.is_null() && !keys.iter().any(changes);
        }
    }
}

/// Counted from 0. Columns of the extension's own are not among them: without one of these no call gets here.
///
/// # Safety
/// The descriptor is that of the open table.
unsafe fn dropped_columns(descriptor: pg_sys::TupleDesc) -> Vec<usize> {
    // SAFETY: as the caller promises.
    unsafe {
        let added = column::COUNT..(*descriptor).natts as usize;
        added
            .filter(|at| (*pg_compat::attribute(descriptor, *at)).attisdropped)
            .collect()
    }
}

/// See [`Writer::open`].
fn nobody_else_has_a_say(table: pg_sys::Relation) -> bool {
    // SAFETY: the table is open. Nothing is looked up meanwhile: then its entry in the relation cache could be made anew, and
    // the old list of triggers freed.
    unsafe {
        if !(*table).rd_rules.is_null() {
            return false;
        }
        let Some(all) = (*table).trigdesc.as_ref() else {
            return true;
        };
        let triggers = std::slice::from_raw_parts(all.triggers, all.numtriggers as usize);
        triggers.iter().all(|trigger| {
            u32::from(trigger.tgtype as u16) & pg_sys::TRIGGER_TYPE_UPDATE == 0
                || CStr::from_ptr(trigger.tgname) == OWN_TRIGGER
        })
    }
}
