//! What the row triggers share: plain C functions, since they run for each row.

use std::cell::Cell;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys;
use pgrx::prelude::*;

/// Declares that a raw function follows calling convention 1.
macro_rules! finfo {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        #[doc(hidden)]
        pub extern "C" fn $name() -> &'static pgrx::pg_sys::Pg_finfo_record {
            const V1: pgrx::pg_sys::Pg_finfo_record =
                pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
            &V1
        }
    };
}
pub(crate) use finfo;

/// What a trigger was fired for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    Insert,
    Update,
    Delete,
    Truncate,
}

impl Operation {
    /// The operation of this call.
    pub fn of(data: &pg_sys::TriggerData) -> Operation {
        match data.tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
            pg_sys::TRIGGER_EVENT_INSERT => Operation::Insert,
            pg_sys::TRIGGER_EVENT_UPDATE => Operation::Update,
            pg_sys::TRIGGER_EVENT_DELETE => Operation::Delete,
            _ => Operation::Truncate,
        }
    }
}

/// Tells what the extension's own statements do from what a user's own trigger does meanwhile: by the depth of triggers.
pub struct OwnStatements(Cell<Option<i32>>);

impl OwnStatements {
    pub const fn new() -> OwnStatements {
        OwnStatements(Cell::new(None))
    }

    /// Runs `f`, whose statements are the extension's own.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Before<'a>(&'a OwnStatements, Option<i32>);
        impl Drop for Before<'_> {
            // Also when an ERROR unwinds: the next statement of the session is an ordinary one.
            fn drop(&mut self) {
                self.0.0.set(self.1);
            }
        }
        let _before = Before(self, self.0.replace(Some(depth())));
        f()
    }

    /// Whether one of them has fired the trigger that runs now.
    pub fn have_fired(&self) -> bool {
        self.0.get().is_some_and(|of_run| depth() == of_run + 1)
    }
}

/// How many triggers run within each other.
fn depth() -> i32 {
    // SAFETY: reads a counter of this backend; the function has no arguments, and looks for none.
    unsafe { pg_sys::pg_trigger_depth(std::ptr::null_mut()) }.value() as i32
}

/// What Postgres passes to a trigger.
///
/// # Safety
/// `fcinfo` is that of a call by Postgres; the result lives as long as the call.
pub unsafe fn data<'a>(fcinfo: pg_sys::FunctionCallInfo, name: &str) -> &'a pg_sys::TriggerData {
    // SAFETY: `context` is null or a node, whose tag says what it is.
    unsafe {
        let context = (*fcinfo).context;
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
            ereport!(
                ERROR,
                PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
                format!("{name} can only be called as a trigger")
            );
        }
        &*context.cast::<pg_sys::TriggerData>()
    }
}

/// Whether the trigger runs before the change.
pub fn is_before(data: &pg_sys::TriggerData) -> bool {
    data.tg_event & pg_sys::TRIGGER_EVENT_TIMINGMASK == pg_sys::TRIGGER_EVENT_BEFORE
}

/// The row version before and after the change, and the one that a BEFORE trigger gives back.
pub fn versions(
    data: &pg_sys::TriggerData,
) -> (
    Option<pg_sys::HeapTuple>,
    Option<pg_sys::HeapTuple>,
    pg_sys::HeapTuple,
) {
    match Operation::of(data) {
        Operation::Insert => (None, Some(data.tg_trigtuple), data.tg_trigtuple),
        Operation::Update => (
            Some(data.tg_trigtuple),
            Some(data.tg_newtuple),
            data.tg_newtuple,
        ),
        Operation::Delete | Operation::Truncate => {
            (Some(data.tg_trigtuple), None, data.tg_trigtuple)
        }
    }
}

/// A column (from 1) of a row version, as the Rust type that the caller knows it to have.
pub fn column<T: FromDatum>(
    data: &pg_sys::TriggerData,
    tuple: pg_sys::HeapTuple,
    column: i32,
) -> Option<T> {
    let datum = datum(data, tuple, column)?;
    // SAFETY: the datum is not null, and of this type.
    unsafe { T::from_datum(datum, false) }
}

/// A column (from 1) of a row version as it stands there.
pub fn datum(
    data: &pg_sys::TriggerData,
    tuple: pg_sys::HeapTuple,
    column: i32,
) -> Option<pg_sys::Datum> {
    let mut null = false;
    // SAFETY: the version belongs to the trigger's relation; SPI_getbinval checks the column number.
    let datum =
        unsafe { pg_sys::SPI_getbinval(tuple, (*data.tg_relation).rd_att, column, &mut null) };
    (!null).then_some(datum)
}

/// Whether an inserted row was written by a restore: a dump brings the time of its last change along, where a new row has
/// that of its transaction.
pub fn is_restored(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple, updated_at: i32) -> bool {
    // SAFETY: reads the start time of this backend's transaction.
    let now = unsafe { pg_sys::GetCurrentTransactionStartTimestamp() };
    column::<TimestampWithTimeZone>(data, tuple, updated_at).is_some_and(|at| i64::from(at) != now)
}
