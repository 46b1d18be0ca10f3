//! `fair_configure`, `fair_queue`, `fair_pause`, `fair_resume`. A row trigger on harvest_fair.queue checks each change
//! and puts it on the board at commit, so that plain SQL is as good as the functions.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use pgrx::{AnyElement, JsonB, pg_sys};
use serde_json::{Map, Value};

use super::audit::{Change, audited};
use super::settings::Settings;
use crate::board::{OnCommit, QueueRef, effects};
use crate::errors::Error;
use crate::json;
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;

type SettingRow = (String, Option<JsonB>, String);

/// The settings of a queue as they are stored.
pub fn stored(spi: &spi::Spi, queue: &str) -> Map<String, Value> {
    let row = spi.run(&sql::GET_SETTINGS, &[queue.into_datum()]);
    row.datum(0, 1)
        .and_then(|settings| json::read_object("settings", settings).ok())
        .unwrap_or_default()
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
    queue: &str,
    patch: &Map<String, Value>,
    reason: Option<&str>,
) -> Result<(bool, Settings), Error> {
    let audit = Change {
        action,
        queue,
        key: None,
        new: Some(Value::Object(patch.clone())),
        reason,
    };
    audited(&audit, |spi| {
        queue_name(queue)?;
        spi.run(&sql::OPEN_SETTINGS, &[queue.into_datum()]);
        let mut fields = stored(spi, queue);
        let old = fields.clone();
        for (field, value) in patch {
            Settings::default().set(field, value)?;
            if value.is_null() {
                fields.remove(field);
            } else {
                fields.insert(field.clone(), value.clone());
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
    let queue = required("queue", queue)?;
    let patch = json::read_object("settings", required("settings", settings)?.datum())?;
    let (_, settings) = change("configure", queue, &patch, reason)?;
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
    let queue = required("queue", queue)?;
    let value = if paused {
        Value::Bool(true)
    } else {
        Value::Null
    };
    let patch = Map::from_iter([("paused".to_owned(), value)]);
    Ok(change(action, queue, &patch, reason)?.0)
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
    let data = unsafe { crate::trigger::data(fcinfo, "harvest_fair.admit_queue()") };
    match admit(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}
crate::trigger::finfo!(pg_finfo_admit_queue);

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    use crate::trigger::Operation;
    let scope = Catalog::get()?.scope();
    let operation = Operation::of(data);
    if operation == Operation::Truncate {
        effects::on_commit(OnCommit::SettingsTruncated { scope });
        return Ok(std::ptr::null_mut());
    }
    let (old, new, tuple) = crate::trigger::versions(data);
    let row = |tuple| {
        let name = crate::trigger::column::<String>(data, tuple, 1);
        let fields = required("settings", crate::trigger::datum(data, tuple, 2))
            .and_then(|settings| json::read_object("settings", settings));
        (name, fields)
    };
    if crate::trigger::is_before(data) {
        if let Some(new) = new {
            let (name, fields) = row(new);
            queue_name(required("queue", name.as_deref())?)?;
            Settings::read(&fields?)?;
        }
        return Ok(tuple);
    }
    let tell = |tuple: pg_sys::HeapTuple, settings: Settings| {
        if let (Some(name), _) = row(tuple) {
            let settings = Box::new(settings.on_board());
            effects::on_commit(OnCommit::Settings {
                queue: QueueRef { scope, name },
                settings,
            });
        }
    };
    if let Some(old) = old {
        tell(old, Settings::default());
    }
    if let Some(new) = new {
        tell(new, Settings::read(&row(new).1?)?);
    }
    Ok(std::ptr::null_mut())
}
