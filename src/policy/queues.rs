//! `fair_configure`, `fair_queue`, `fair_pause`, `fair_resume`. A row trigger on harvest_fair.queue checks each change
//! and puts it on the board at commit, so that plain SQL is as good as the functions.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use pgrx::{AnyElement, JsonB, pg_sys};
use serde_json::{Map, Value};

use super::audit::{self, Change, audited};
use super::settings::Settings;
use crate::board::{OnCommit, QueueRef, effects};
use crate::errors::Error;
use crate::json;
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::trigger::{self, Operation};

/// The column of harvest_fair.queue that tells a restored row from a new one.
const UPDATED_AT: i32 = 4;

type SettingRow = (String, Option<JsonB>, String);

/// The settings of a queue as they are stored.
pub fn stored(spi: &spi::Spi, queue: &str) -> Map<String, Value> {
    fields(spi.run(&sql::GET_SETTINGS, &[queue.into_datum()]))
}

/// The same, without what this transaction has changed.
pub fn as_others_see(spi: &spi::Spi, queue: &str) -> Map<String, Value> {
    fields(spi.run_as_others(&sql::GET_SETTINGS, &[queue.into_datum()]))
}

fn fields(row: spi::Rows) -> Map<String, Value> {
    match row.datum(0, 1).map(|stored| json::read("settings", stored)) {
        Some(Ok(Value::Object(fields))) => fields,
        _ => Map::new(),
    }
}

fn shown(settings: &Settings) -> Vec<SettingRow> {
    let row = |(field, value, source): (&str, Value, &str)| {
        let value = (!value.is_null()).then_some(JsonB(value));
        (field.to_owned(), value, source.to_owned())
    };
    settings.effective().into_iter().map(row).collect()
}

/// Changes some settings, under the lock of the queue's row; returns all that are then stored.
fn change(
    action: &'static str,
    queue: Option<&str>,
    patch: Option<Result<Value, Error>>,
    reason: Option<&str>,
) -> Result<(bool, Settings), Error> {
    let audit = Change {
        action,
        queue,
        key: None,
        new: json::shown(&patch),
        reason,
    };
    audited(&audit, |spi| {
        let queue = required("queue", queue)?;
        queue_name(queue)?;
        let patch = match required("settings", patch)?? {
            Value::Object(fields) => fields,
            other => {
                return Err(Error::NotAnObject {
                    what: "settings",
                    value: other.to_string(),
                });
            }
        };
        spi.run(&sql::OPEN_SETTINGS, &[queue.into_datum()]);
        let mut fields = stored(spi, queue);
        let old = fields.clone();
        for (field, value) in patch {
            Settings::default().set(&field, &value)?;
            if value.is_null() {
                fields.remove(&field);
            } else {
                fields.insert(field, value);
            }
        }
        let settings = Settings::read(&fields)?;
        let changed = fields != old;
        if changed {
            spi.run(
                &sql::SET_SETTINGS,
                &[
                    queue.into_datum(),
                    JsonB(Value::Object(fields)).into_datum(),
                ],
            );
        }
        Ok((Some(Value::Object(old)), (changed, settings)))
    })
}

/// `fair_configure(queue, settings, reason)`.
#[pg_extern(sql = false)]
fn fair_configure(
    queue: Option<&str>,
    settings: Option<AnyElement>,
    reason: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(setting, String),
            name!(value, Option<JsonB>),
            name!(source, String),
        ),
    >,
    ErrorReport,
> {
    let patch = settings.map(|given| json::read("settings", given.datum()));
    let (_, settings) = change("configure", queue, patch, reason)?;
    Ok(TableIterator::new(shown(&settings)))
}

/// `fair_queue(queue)`.
#[pg_extern(sql = false)]
fn fair_queue(
    queue: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(setting, String),
            name!(value, Option<JsonB>),
            name!(source, String),
        ),
    >,
    ErrorReport,
> {
    let queue = required("queue", queue)?;
    queue_name(queue)?;
    let settings = Settings::read(&spi::connect(|spi| stored(spi, queue)))?;
    Ok(TableIterator::new(shown(&settings)))
}

fn set_paused(
    action: &'static str,
    queue: Option<&str>,
    paused: bool,
    reason: Option<&str>,
) -> Result<bool, Error> {
    let value = if paused {
        Value::Bool(true)
    } else {
        Value::Null
    };
    let patch = Map::from_iter([("paused".to_owned(), value)]);
    Ok(change(action, queue, Some(Ok(Value::Object(patch))), reason)?.0)
}

/// `fair_pause(queue, reason)`: true if it was not paused.
#[pg_extern(sql = false)]
fn fair_pause(queue: Option<&str>, reason: Option<&str>) -> Result<bool, ErrorReport> {
    Ok(set_paused("pause", queue, true, reason)?)
}

/// `fair_resume(queue, reason)`: true if it was paused.
#[pg_extern(sql = false)]
fn fair_resume(queue: Option<&str>, reason: Option<&str>) -> Result<bool, ErrorReport> {
    Ok(set_paused("resume", queue, false, reason)?)
}

/// The trigger function harvest_fair.admit_queue(): before a change it validates, after it the board is told.
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_queue(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: as Postgres calls a trigger function.
    let data = unsafe { trigger::data(fcinfo, "harvest_fair.admit_queue()") };
    match admit(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}
trigger::finfo!(pg_finfo_admit_queue);

/// A row of harvest_fair.queue, as far as it is given.
struct Given {
    queue: Option<String>,
    settings: Option<Result<Value, Error>>,
}

impl Given {
    fn of(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple) -> Given {
        Given {
            queue: trigger::column(data, tuple, 1),
            settings: trigger::datum(data, tuple, 2).map(|given| json::read("settings", given)),
        }
    }

    /// As the audit shows it.
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

    fn check(&self) -> Result<Settings, Error> {
        queue_name(required("queue", self.queue.as_deref())?)?;
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

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let scope = Catalog::get()?.scope();
    let operation = Operation::of(data);
    if operation == Operation::Truncate {
        if trigger::is_before(data) {
            audit::truncated(&sql::AUDIT_TRUNCATED_SETTINGS);
        } else {
            effects::on_commit(OnCommit::SettingsTruncated { scope });
        }
        return Ok(std::ptr::null_mut());
    }
    let action = match operation {
        Operation::Insert => "insert_queue",
        Operation::Update => "update_queue",
        _ => "delete_queue",
    };
    let (old, new, tuple) = trigger::versions(data);
    let (old, given) = (
        old.map(|tuple| Given::of(data, tuple)),
        new.map(|tuple| Given::of(data, tuple)),
    );
    if trigger::is_before(data) {
        if let Some(given) = &given
            && let Err(error) = given.check()
        {
            audit::refused_by_sql(&given.change(action, given.shown()), &error);
            return Err(error);
        }
        return Ok(tuple);
    }
    let tell = |row: &Given, settings: Settings| {
        if let Some(name) = row.queue.clone() {
            let settings = Box::new(settings.on_board());
            effects::on_commit(OnCommit::Settings {
                queue: QueueRef { scope, name },
                settings,
            });
        }
    };
    if let Some(old) = &old {
        tell(old, Settings::default());
    }
    if let Some(given) = &given {
        tell(given, given.check()?);
    }
    let settings = |row: &Given| row.shown();
    match (&old, &given) {
        (Some(old), Some(given)) if old.queue == given.queue => {
            if old.shown() != given.shown() {
                audit::made_by_sql(&given.change(action, settings(given)), settings(old));
            }
        }
        _ => {
            if let Some(old) = &old {
                audit::made_by_sql(&old.change(action, None), settings(old));
            }
            if let (Some(given), Some(new)) = (&given, new)
                && !(old.is_none() && trigger::is_restored(data, new, UPDATED_AT))
            {
                audit::made_by_sql(&given.change(action, settings(given)), None);
            }
        }
    }
    Ok(std::ptr::null_mut())
}
