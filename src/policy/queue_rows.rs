//! The rows of harvest_fair.queue.

use pgrx::pg_sys;
use pgrx::prelude::*;
use serde_json::Value;

use super::audit::Change;
use super::rows::{PolicyRow, admit};
use super::settings::Settings;
use crate::board::{OnCommit, QueueRef};
use crate::errors::Error;
use crate::json;
use crate::spi::Statement;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::trigger;

/// The trigger function harvest_fair.admit_queue(): before a change it validates, after it the board is told.
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_queue(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: as Postgres calls a trigger function.
    let data = unsafe { trigger::data(fcinfo, "harvest_fair.admit_queue()") };
    match admit::<QueueRow>(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}
trigger::finfo!(pg_finfo_admit_queue);

struct QueueRow {
    queue: Option<String>,
    settings: Option<Result<Value, Error>>,
}

impl QueueRow {
    fn settings(&self) -> Result<Settings, Error> {
        match &self.settings {
            Some(Ok(Value::Object(fields))) => Settings::read(fields),
            Some(Ok(other)) => Err(Error::NotAnObject {
                what: "settings",
                value: other.to_string(),
            }),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::Null { what: "settings" }),
        }
    }
}

impl PolicyRow for QueueRow {
    const ACTIONS: [&'static str; 3] = ["insert_queue", "update_queue", "delete_queue"];
    const AUDIT_TRUNCATED: &'static Statement = &sql::AUDIT_TRUNCATED_SETTINGS;
    const UPDATED_AT: i32 = 4;

    fn read(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple) -> Self {
        QueueRow {
            queue: trigger::column(data, tuple, 1),
            settings: trigger::datum(data, tuple, 2).map(|given| json::read("settings", given)),
        }
    }

    fn check(&self) -> Result<(), Error> {
        queue_name(required("queue", self.queue.as_deref())?)?;
        self.settings().map(|_| ())
    }

    fn shown(&self) -> Option<Value> {
        json::shown(&self.settings)
    }

    fn change<'a>(&'a self, action: &'a str, new: Option<Value>) -> Change<'a> {
        Change {
            action,
            queue: self.queue.as_deref(),
            new,
            ..Change::default()
        }
    }

    fn has_key_of(&self, other: &Self) -> bool {
        self.queue == other.queue
    }

    fn is_equal(&self, other: &Self) -> bool {
        self.shown() == other.shown()
    }

    fn effect(&self, scope: u64, stays: bool) -> Option<OnCommit> {
        let settings = match stays {
            // What was stored without this trigger, against the rules, counts as not set.
            true => self.settings().unwrap_or_default(),
            false => Settings::default(),
        };
        Some(OnCommit::Settings {
            queue: QueueRef {
                scope,
                name: self.queue.clone()?,
            },
            settings: Box::new(settings.on_board()),
        })
    }

    fn all_gone(scope: u64) -> OnCommit {
        OnCommit::SettingsTruncated { scope }
    }
}
