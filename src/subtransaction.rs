//! Attempts that leave nothing behind.
//!
//! A session that waits for a task must not keep the locks of its fruitless attempts meanwhile: an ALTER TABLE or a DROP
//! EXTENSION would wait for it, and everybody else behind that. So each attempt of a waiting claim runs in an internal
//! subtransaction, whose rollback gives the locks back.

use std::panic::AssertUnwindSafe;

use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use crate::errors::Error;

/// The session's state around the subtransaction, put back when it ends.
#[derive(Clone, Copy)]
struct Outside {
    context: pg_sys::MemoryContext,
    owner: pg_sys::ResourceOwner,
}

impl Outside {
    fn enter() -> Outside {
        // SAFETY: within a transaction, from a function that Postgres has called.
        unsafe {
            let outside = Outside {
                context: pg_sys::CurrentMemoryContext,
                owner: pg_sys::CurrentResourceOwner,
            };
            pg_sys::BeginInternalSubTransaction(std::ptr::null());
            pg_sys::MemoryContextSwitchTo(outside.context);
            outside
        }
    }

    /// Ends the subtransaction that `enter` began.
    fn leave(&self, keep: bool) {
        // SAFETY: it is the innermost subtransaction: every other one that was begun inside has ended.
        unsafe {
            if keep {
                pg_sys::ReleaseCurrentSubTransaction();
            } else {
                pg_sys::RollbackAndReleaseCurrentSubTransaction();
            }
            pg_sys::MemoryContextSwitchTo(self.context);
            pg_sys::CurrentResourceOwner = self.owner;
        }
    }
}

/// Runs an attempt. If it fails, or `keep` does not want its result kept, nothing of it stays, not even a lock.
pub fn attempt<R>(
    f: impl FnOnce() -> Result<R, Error>,
    keep: impl FnOnce(&R) -> bool,
) -> Result<R, Error> {
    let outside = Outside::enter();
    let undo = move |cause: CaughtError| -> Result<R, Error> {
        outside.leave(false);
        cause.rethrow()
    };
    let result = PgTryBuilder::new(AssertUnwindSafe(f))
        .catch_others(undo)
        .catch_rust_panic(undo)
        .execute();
    outside.leave(result.as_ref().is_ok_and(keep));
    result
}

fn report(cause: &CaughtError) -> &ErrorReportWithLevel {
    match cause {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    }
}

/// What went wrong, for a log; an order to end the session is no failure, and goes on.
pub fn failure(cause: CaughtError) -> String {
    if report(&cause).sql_error_code() == PgSqlErrorCode::ERRCODE_ADMIN_SHUTDOWN {
        cause.rethrow()
    }
    report(&cause).message().to_owned()
}

/// Why a row was refused. What is no matter of the row but of the moment goes on: the session was told to stop, a lock was
/// not to be had, the disk is full.
pub fn refusal(cause: CaughtError) -> String {
    use PgSqlErrorCode::*;
    // As ERRCODE_TO_CATEGORY: two characters of six bits each.
    let class = |code: PgSqlErrorCode| code as i32 & 0xfff;
    let code = report(&cause).sql_error_code();
    let of_the_moment = [
        ERRCODE_TRANSACTION_ROLLBACK,
        ERRCODE_INSUFFICIENT_RESOURCES,
        ERRCODE_OPERATOR_INTERVENTION,
        ERRCODE_SYSTEM_ERROR,
    ]
    .map(class)
    .contains(&class(code));
    if of_the_moment || code == ERRCODE_LOCK_NOT_AVAILABLE {
        cause.rethrow()
    }
    report(&cause).message().to_owned()
}

/// Runs something that may fail; then nothing of it stays, and the answer says why.
pub fn try_out(f: impl FnOnce()) -> Result<(), CaughtError> {
    let outside = Outside::enter();
    let undo = move |cause: CaughtError| {
        outside.leave(false);
        Err(cause)
    };
    let result = PgTryBuilder::new(AssertUnwindSafe(|| {
        f();
        Ok(())
    }))
    .catch_others(undo)
    .catch_rust_panic(undo)
    .execute();
    if result.is_ok() {
        outside.leave(true);
    }
    result
}
