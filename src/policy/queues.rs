//! `fair_configure`, `fair_queue`, `fair_pause`, `fair_resume`.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use pgrx::{AnyElement, JsonB};
use serde_json::{Map, Value};

use super::audit::{Change, audited};
use super::settings::Settings;
use crate::errors::Error;
use crate::json;
use crate::spi;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;

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
