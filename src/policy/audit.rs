//! The audit of what operators change.
//!
//! A change writes its row in its own transaction. A refused change cannot, since its transaction is about to abort: it
//! goes into a small ring on the board, from which the janitor writes it out within a second or so.

use std::ffi::CStr;

use pgrx::JsonB;
use pgrx::pg_sys;
use pgrx::prelude::*;
use serde_json::Value;

use crate::board::shmem::{self, Refused};
use crate::errors::Error;
use crate::janitor;
use crate::spi::{self, Spi};
use crate::tasks::catalog::Catalog;
use crate::tasks::statements as sql;

/// A change as it was asked for.
pub struct Change<'a> {
    /// What was done: `set_weight`, `configure`, ...
    pub action: &'static str,
    pub queue: &'a str,
    pub key: Option<&'a str>,
    pub new: Option<Value>,
    pub reason: Option<&'a str>,
}

fn jsonb(value: Option<Value>) -> spi::Arg {
    value
        .filter(|v| !v.is_null())
        .and_then(|v| JsonB(v).into_datum())
}

/// Makes a change and writes its audit row; `change` returns what was there before, and its result. A refused change
/// is remembered for the janitor, and its error returned.
pub fn audited<R>(
    asked: &Change,
    change: impl FnOnce(&Spi) -> Result<(Option<Value>, R), Error>,
) -> Result<R, Error> {
    let outcome = spi::connect(|spi| {
        let (old, result) = change(spi)?;
        spi.run(
            &sql::AUDIT,
            &[
                asked.action.into_datum(),
                asked.queue.into_datum(),
                asked.key.and_then(|k| k.into_datum()),
                jsonb(old),
                jsonb(asked.new.clone()),
                asked.reason.and_then(|r| r.into_datum()),
            ],
        );
        Ok(result)
    });
    if let Err(error) = &outcome {
        refused(asked, error);
    }
    outcome
}

/// Remembers a refused change.
fn refused(asked: &Change, error: &Error) {
    let Ok(catalog) = Catalog::get() else { return };
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
    let new = asked.new.as_ref().map(Value::to_string);
    shmem::refuse(&Refused::new(
        catalog.scope(),
        crate::board::now(),
        [
            &actor,
            asked.action,
            asked.queue,
            asked.key.unwrap_or(""),
            new.as_deref().unwrap_or(""),
            asked.reason.unwrap_or(""),
            &error.to_string(),
        ],
    ));
}

/// Writes out what was refused in this database since the last time.
pub fn write_refused(scope: u64) {
    let refused = shmem::take_refused(scope);
    if refused.is_empty() {
        return;
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
