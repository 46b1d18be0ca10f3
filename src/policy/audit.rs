//! The audit of what operators change: through the functions, or by plain SQL on harvest_fair.weight and
//! harvest_fair.queue, whose row triggers come here too.
//!
//! A change writes its row in its own transaction. A refused change cannot, since its transaction is about to abort: it
//! goes into a small ring on the board, from which the janitor writes it out within a second or so.

use std::ffi::CStr;
use std::panic::AssertUnwindSafe;

use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use pgrx::{JsonB, PgTryBuilder, pg_sys};
use serde_json::Value;

use crate::board::effects::{self, Written};
use crate::board::shmem::{self, Refused};
use crate::errors::Error;
use crate::janitor;
use crate::spi::{self, Spi};
use crate::tasks::catalog::Catalog;
use crate::tasks::statements as sql;
use crate::trigger::OwnStatements;

thread_local! {
    /// The changes that a function makes: it writes the audit row itself.
    static BY_FUNCTION: OwnStatements = const { OwnStatements::new() };
}

/// A change as it was asked for; what was NULL is missing.
#[derive(Clone, Default)]
pub struct Change<'a> {
    /// What was done: `set_weight`, `configure`, ...
    pub action: &'a str,
    pub queue: Option<&'a str>,
    pub key: Option<&'a str>,
    pub new: Option<Value>,
    pub reason: Option<&'a str>,
}

fn jsonb(value: Option<Value>) -> spi::Arg {
    value
        .filter(|v| !v.is_null())
        .and_then(|v| JsonB(v).into_datum())
}

/// Makes a change for a function and writes its audit row; `change` returns what was there before, and its result. A
/// refused change, also one that Postgres refuses, is remembered for the janitor, and its error goes on to the caller.
pub fn audited<R>(
    asked: &Change,
    change: impl FnOnce(&Spi) -> Result<(Option<Value>, R), Error>,
) -> Result<R, Error> {
    let origin = Origin::here()?;
    let act = || -> Result<R, Error> {
        spi::connect(|spi| {
            let (old, result) = BY_FUNCTION.with(|own| own.run(|| change(spi)))?;
            write(spi, asked, old);
            Ok(result)
        })
    };
    let outcome: Result<R, Error> = PgTryBuilder::new(AssertUnwindSafe(act))
        .catch_others(|cause| {
            if let CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) = &cause {
                origin.refused(asked, report.message());
            }
            cause.rethrow()
        })
        .execute();
    if let Err(error) = &outcome {
        origin.refused(asked, &error.to_string());
    }
    outcome
}

/// Writes the audit row of a change that plain SQL has made; nothing if a function is making it.
pub fn made_by_sql(change: &Change, old: Option<Value>) {
    if !BY_FUNCTION.with(OwnStatements::have_fired) {
        spi::connect(|spi| write(spi, change, old));
    }
}

/// Writes an audit row for each row that a TRUNCATE is about to remove; `statement` makes them.
pub fn truncated(statement: &'static spi::Statement) {
    spi::connect(|spi| {
        spi.run(statement, &[]);
    });
}

/// Remembers a change by plain SQL that a trigger is about to refuse.
pub fn refused_by_sql(asked: &Change, error: &Error) {
    if !BY_FUNCTION.with(OwnStatements::have_fired)
        && let Ok(origin) = Origin::here()
    {
        origin.refused(asked, &error.to_string());
    }
}

fn write(spi: &Spi, change: &Change, old: Option<Value>) {
    spi.run(
        &sql::AUDIT,
        &[
            change.action.into_datum(),
            change.queue.and_then(|q| q.into_datum()),
            change.key.and_then(|k| k.into_datum()),
            jsonb(old),
            jsonb(change.new.clone()),
            change.reason.and_then(|r| r.into_datum()),
        ],
    );
}

/// Who asks, and in which database; looked up before anything can go wrong.
struct Origin {
    scope: u64,
    actor: String,
}

impl Origin {
    fn here() -> Result<Origin, Error> {
        let catalog = Catalog::get()?;
        janitor::ensure_running(&catalog);
        // SAFETY: the name lives in the current memory context; it is copied at once.
        let actor = unsafe {
            let name = pg_sys::GetUserNameFromId(pg_sys::GetSessionUserId(), true);
            if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        };
        Ok(Origin {
            scope: catalog.scope(),
            actor,
        })
    }

    /// Remembers a refused change. Touches nothing but the board: the transaction may be beyond help.
    fn refused(&self, asked: &Change, error: &str) {
        let new = asked.new.as_ref().map(Value::to_string);
        shmem::refuse(&Refused::new(
            self.scope,
            crate::board::now(),
            [
                &self.actor,
                asked.action,
                asked.queue.unwrap_or(""),
                asked.key.unwrap_or(""),
                new.as_deref().unwrap_or(""),
                asked.reason.unwrap_or(""),
                error,
            ],
        ));
    }
}

/// Writes out what was refused in this database since the last time.
pub fn write_refused(scope: u64) {
    let refused = shmem::take_refused(scope);
    if refused.is_empty() {
        return;
    }
    for entry in &refused {
        effects::writing(Written::Refused(Box::new(*entry)));
    }
    spi::connect(|spi| {
        for entry in refused {
            let [actor, action, queue, key, new, reason, error] = entry.texts();
            let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned()).into_datum();
            // What was cut is no JSON any more: it is shown as a string.
            let new = (!new.is_empty())
                .then(|| serde_json::from_str(&new).unwrap_or_else(|_| Value::from(new.clone())));
            spi.run(
                &sql::AUDIT_REFUSED,
                &[
                    Some(crate::tasks::timestamp(entry.at())),
                    filled(&actor),
                    filled(&action),
                    filled(&queue),
                    filled(&key),
                    jsonb(new),
                    filled(&reason),
                    filled(&error),
                ],
            );
        }
    });
}
