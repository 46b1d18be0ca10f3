//! Kept statements, run through SPI.
//!
//! Each statement is prepared once a session with a generic plan (a custom plan for each call costs more than the
//! claim it serves) and runs under `SPI_execute_plan`, which assigns a transaction id only when a row is written.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;

use pgrx::pg_sys;
use pgrx::prelude::*;

/// A statement of the extension: SQL text with every name schema-qualified, and the types of its parameters.
pub struct Statement {
    /// The SQL text.
    pub sql: &'static str,
    /// The types of `$1`, `$2`, ...
    pub args: &'static [pg_sys::Oid],
}

/// A parameter: its datum, or `None` for NULL.
pub type Arg = Option<pg_sys::Datum>;

thread_local! {
    static PLANS: RefCell<HashMap<*const u8, pg_sys::SPIPlanPtr>> = RefCell::new(HashMap::new());
}

/// An open SPI connection; rows that it returned die with it.
pub struct Spi(());

/// Runs `f` with an SPI connection. An ERROR inside unwinds past the end of the connection, which Postgres then
/// closes with the transaction.
pub fn connect<R>(f: impl FnOnce(&Spi) -> R) -> R {
    // SAFETY: called within a transaction, on the one thread of the backend.
    unsafe { pg_sys::SPI_connect() };
    let result = f(&Spi(()));
    // SAFETY: closes the connection opened above; nothing in between returned early.
    unsafe { pg_sys::SPI_finish() };
    result
}

/// A registered snapshot of now, in which nothing that this transaction has done has happened yet.
pub fn snapshot_of_others() -> pg_sys::Snapshot {
    // SAFETY: within a transaction. The registered snapshot is a copy of its own; each command of this transaction comes
    // after the first one's id, so that what it did counts as done after the snapshot was taken.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
        (*snapshot).curcid = 0;
        snapshot
    }
}

impl Spi {
    /// Runs a statement to its end and returns its rows.
    pub fn run(&self, statement: &'static Statement, args: &[Arg]) -> Rows<'_> {
        self.execute(statement, args, None)
    }

    /// Runs a query that sees what others have committed until now, whatever the transaction's isolation level.
    pub fn run_on_latest(&self, statement: &'static Statement, args: &[Arg]) -> Rows<'_> {
        // SAFETY: within a transaction; `on` gives the snapshot back.
        let snapshot = unsafe { pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()) };
        self.on(statement, args, snapshot, false)
    }

    /// Runs a query that sees what other sessions see now: not what this transaction has changed.
    pub fn run_as_others(&self, statement: &'static Statement, args: &[Arg]) -> Rows<'_> {
        // Read only, since Postgres else lets the query see this transaction's changes.
        self.on(statement, args, snapshot_of_others(), true)
    }

    fn on(
        &self,
        statement: &'static Statement,
        args: &[Arg],
        snapshot: pg_sys::Snapshot,
        read_only: bool,
    ) -> Rows<'_> {
        let rows = self.execute(statement, args, Some((snapshot, read_only)));
        // SAFETY: registered by the caller; an ERROR in between leaves it to the resource owner.
        unsafe { pg_sys::UnregisterSnapshot(snapshot) };
        rows
    }

    /// Without a snapshot, the transaction's own is used.
    fn execute(
        &self,
        statement: &'static Statement,
        args: &[Arg],
        snapshot: Option<(pg_sys::Snapshot, bool)>,
    ) -> Rows<'_> {
        debug_assert_eq!(statement.args.len(), args.len());
        let plan = plan(statement);
        let _planned = Planned::now(plan);
        let mut values: Vec<pg_sys::Datum> = args
            .iter()
            .map(|a| a.unwrap_or(pg_sys::Datum::from(0)))
            .collect();
        let nulls: Vec<std::ffi::c_char> = args
            .iter()
            .map(|a| {
                if a.is_some() {
                    b' ' as std::ffi::c_char
                } else {
                    b'n' as std::ffi::c_char
                }
            })
            .collect();
        // SAFETY: the plan was kept for the session; values and nulls have one element a parameter.
        let code = unsafe {
            let (values, nulls) = (values.as_mut_ptr(), nulls.as_ptr());
            match snapshot {
                None => pg_sys::SPI_execute_plan(plan, values, nulls, false, 0),
                // As the triggers of foreign keys look for rows that the transaction cannot see.
                Some((snapshot, read_only)) => {
                    let none = std::ptr::null_mut();
                    pg_sys::SPI_execute_snapshot(
                        plan, values, nulls, snapshot, none, read_only, true, 0,
                    )
                }
            }
        };
        if code < 0 {
            pgrx::error!("harvest_fair: a statement failed with code {code}");
        }
        // SAFETY: SPI_execute_plan has just set both globals for this connection.
        unsafe {
            let table = pg_sys::SPI_tuptable;
            let count = if table.is_null() {
                0
            } else {
                pg_sys::SPI_processed as usize
            };
            Rows {
                table,
                count,
                _spi: self,
            }
        }
    }
}

fn plan(statement: &'static Statement) -> pg_sys::SPIPlanPtr {
    let key = statement.sql.as_ptr();
    if let Some(plan) = PLANS.with(|p| p.borrow().get(&key).copied()) {
        return plan;
    }
    let sql = CString::new(statement.sql).unwrap_or_default();
    let mut types = statement.args.to_vec();
    // SAFETY: an SPI connection is open (`Spi` exists); the text and the types live through the call.
    let plan = unsafe {
        let plan = pg_sys::SPI_prepare_cursor(
            sql.as_ptr(),
            types.len() as i32,
            types.as_mut_ptr(),
            pg_sys::CURSOR_OPT_GENERIC_PLAN as i32,
        );
        if plan.is_null() {
            pgrx::error!("harvest_fair: cannot prepare: {}", statement.sql);
        }
        pg_sys::SPI_keepplan(plan);
        plan
    };
    PLANS.with(|p| p.borrow_mut().insert(key, plan));
    plan
}

/// A plan that is up to date, kept so for the length of one execution.
///
/// What a claim costs must not hang on the planner's statistics: a generic plan that is made while the task table is
/// small, or was never analysed, would read the whole table for a row whose address is given. So plans are made, and
/// made anew after an invalidation, while sequential scans are switched off, and those by address or index on. Only planning
/// is under these switches, not the execution, in which a user's own triggers may plan statements of theirs.
struct Planned(*mut pg_sys::CachedPlan);

impl Planned {
    fn now(plan: pg_sys::SPIPlanPtr) -> Planned {
        /// The planner's switches as the session has them, put back when dropped.
        struct Switches(bool, bool, bool);
        impl Drop for Switches {
            // Also while an ERROR unwinds: these are the session's own settings.
            fn drop(&mut self) {
                // SAFETY: plain variables of this backend.
                unsafe {
                    (pg_sys::enable_seqscan, pg_sys::enable_tidscan) = (self.0, self.1);
                    pg_sys::enable_indexscan = self.2;
                }
            }
        }
        // SAFETY: plain variables of this backend; the plan was kept for the session.
        unsafe {
            let _switches = Switches(
                pg_sys::enable_seqscan,
                pg_sys::enable_tidscan,
                pg_sys::enable_indexscan,
            );
            (pg_sys::enable_seqscan, pg_sys::enable_tidscan) = (false, true);
            pg_sys::enable_indexscan = true;
            Planned(pg_sys::SPI_plan_get_cached_plan(plan))
        }
    }
}

impl Drop for Planned {
    fn drop(&mut self) {
        // While an ERROR unwinds, the resource owner lets go of it.
        if !self.0.is_null() && !std::thread::panicking() {
            // SAFETY: taken above under the same resource owner.
            unsafe { pg_sys::ReleaseCachedPlan(self.0, pg_sys::CurrentResourceOwner) };
        }
    }
}

/// The rows of one statement.
pub struct Rows<'a> {
    table: *mut pg_sys::SPITupleTable,
    count: usize,
    _spi: &'a Spi,
}

impl Rows<'_> {
    /// How many rows came back.
    pub fn len(&self) -> usize {
        self.count
    }

    /// The raw datum of a column (from 1) of a row (from 0); valid until the connection ends.
    pub fn datum(&self, row: usize, column: i32) -> Option<pg_sys::Datum> {
        if row >= self.count {
            return None;
        }
        let mut null = false;
        // SAFETY: row < numvals, and SPI_getbinval checks the column number.
        unsafe {
            let tuple = *(*self.table).vals.add(row);
            let datum = pg_sys::SPI_getbinval(tuple, (*self.table).tupdesc, column, &mut null);
            (!null).then_some(datum)
        }
    }

    /// A column as a Rust value (owned types only: the row dies with the connection).
    pub fn get<T: FromDatum>(&self, row: usize, column: i32) -> Option<T> {
        let datum = self.datum(row, column)?;
        // SAFETY: the caller names the type that the statement selects.
        unsafe { T::from_datum(datum, false) }
    }
}
