//! Weight overrides. They live in harvest_fair.weight; a row trigger validates each change and puts it on the board at
//! commit, so that a plain INSERT, UPDATE, DELETE or COPY is as good as the functions.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use pgrx::{JsonB, pg_sys};
use serde_json::{Map, Value};

use super::audit::{Change, audited};
use crate::board::{OnCommit, QueueRef, effects};
use crate::errors::Error;
use crate::names::{FairnessKey, Weight};
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::trigger::{self, Operation};

/// Most overrides that a queue can have.
const MAX_WEIGHTS: usize = 1_000;
/// The class of the advisory lock that serializes new overrides of a queue.
const LOCK_CLASS: i32 = 0x4641_4952;

type WeightRow = (
    String,
    String,
    f64,
    Option<String>,
    String,
    TimestampWithTimeZone,
);

fn rows(rows: &spi::Rows) -> Vec<WeightRow> {
    (0..rows.len())
        .filter_map(|i| {
            Some((
                rows.get(i, 1)?,
                rows.get(i, 2)?,
                rows.get(i, 3)?,
                rows.get(i, 4),
                rows.get(i, 5)?,
                rows.get(i, 6)?,
            ))
        })
        .collect()
}

/// Checks a key that may have an override.
pub fn check_key(key: &str) -> Result<(), Error> {
    if key.is_empty() {
        return Err(Error::DefaultKeyWeight);
    }
    FairnessKey::parse(key)
        .map(|_| ())
        .map_err(|broken| Error::Name {
            value: key.to_owned(),
            broken,
        })
}

/// Checks a weight as given.
pub fn check_weight(weight: f64) -> Result<Weight, Error> {
    Weight::new(weight).map_err(|broken| Error::Name {
        value: weight.to_string(),
        broken,
    })
}

/// Sets overrides (`Some`) or clears them (`None`), all or none; returns the rows that were set or cleared.
fn change(
    spi: &spi::Spi,
    queue: &str,
    weights: &[(String, Option<f64>)],
    reason: Option<&str>,
) -> Result<(Option<Value>, Vec<WeightRow>), Error> {
    queue_name(queue)?;
    for (key, weight) in weights {
        check_key(key)?;
        weight.map(check_weight).transpose()?;
    }
    // Before the rows are looked at: a second session must see what the first has set.
    spi.run(
        &sql::LOCK_WEIGHTS,
        &[LOCK_CLASS.into_datum(), queue.into_datum()],
    );
    let mut old = Map::new();
    let mut changed = Vec::new();
    for (key, weight) in weights {
        let before = spi
            .run(
                &sql::GET_WEIGHT,
                &[queue.into_datum(), key.as_str().into_datum()],
            )
            .get::<f64>(0, 1);
        old.insert(key.clone(), before.into());
        let row = match weight {
            Some(weight) => {
                if before.is_none() {
                    check_room(spi, queue, key)?;
                }
                let reason = reason.and_then(|r| r.into_datum());
                let args = [
                    queue.into_datum(),
                    key.as_str().into_datum(),
                    weight.into_datum(),
                    reason,
                ];
                rows(&spi.run(&sql::SET_WEIGHT, &args))
            }
            None => rows(&spi.run(
                &sql::CLEAR_WEIGHT,
                &[queue.into_datum(), key.as_str().into_datum()],
            )),
        };
        changed.extend(row);
    }
    let old = match weights {
        [(key, _)] => old.remove(key).unwrap_or(Value::Null),
        _ => Value::Object(old),
    };
    Ok((Some(old), changed))
}

/// `fair_set_weight(queue, fairness_key, weight, reason)`.
#[pg_extern(sql = false)]
fn fair_set_weight(
    queue: Option<&str>,
    fairness_key: Option<&str>,
    weight: Option<f64>,
    reason: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(reason, Option<String>),
            name!(updated_by, String),
            name!(updated_at, TimestampWithTimeZone),
        ),
    >,
    ErrorReport,
> {
    let (queue, key) = (
        required("queue", queue)?,
        required("fairness_key", fairness_key)?,
    );
    let weight = required("weight", weight)?;
    let asked = Change {
        action: "set_weight",
        queue,
        key: Some(key),
        new: Some(shown(weight)),
        reason,
    };
    Ok(TableIterator::new(audited(&asked, |spi| {
        change(spi, queue, &[(key.to_owned(), Some(weight))], reason)
    })?))
}

/// `fair_set_weights(queue, weights, reason)`: a null value clears the key's override.
#[pg_extern(sql = false)]
fn fair_set_weights(
    queue: Option<&str>,
    weights: Option<JsonB>,
    reason: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(reason, Option<String>),
            name!(updated_by, String),
            name!(updated_at, TimestampWithTimeZone),
        ),
    >,
    ErrorReport,
> {
    let queue = required("queue", queue)?;
    let JsonB(value) = required("weights", weights)?;
    let asked = Change {
        action: "set_weights",
        queue,
        key: None,
        new: Some(value.clone()),
        reason,
    };
    let set = audited(&asked, |spi| {
        let weights = parse_weights(&value)?;
        change(spi, queue, &weights, reason)
    })?;
    Ok(TableIterator::new(set))
}

/// Reads `{"key": weight, "other": null}`.
pub fn parse_weights(value: &Value) -> Result<Vec<(String, Option<f64>)>, Error> {
    let Value::Object(fields) = value else {
        return Err(Error::NotAnObject {
            what: "weights",
            value: value.to_string(),
        });
    };
    fields
        .iter()
        .map(|(key, value)| match value {
            Value::Null => Ok((key.clone(), None)),
            Value::Number(number) => Ok((key.clone(), number.as_f64())),
            other => Err(Error::WeightType {
                key: key.clone(),
                value: other.to_string(),
            }),
        })
        .collect()
}

/// A weight as the audit shows it: NaN and infinities are no JSON numbers.
fn shown(weight: f64) -> Value {
    serde_json::Number::from_f64(weight)
        .map_or_else(|| Value::from(weight.to_string()), Value::Number)
}

/// `fair_clear_weight(queue, fairness_key, reason)`.
#[pg_extern(sql = false)]
fn fair_clear_weight(
    queue: Option<&str>,
    fairness_key: Option<&str>,
    reason: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(reason, Option<String>),
            name!(updated_by, String),
            name!(updated_at, TimestampWithTimeZone),
        ),
    >,
    ErrorReport,
> {
    let (queue, key) = (
        required("queue", queue)?,
        required("fairness_key", fairness_key)?,
    );
    let asked = Change {
        action: "clear_weight",
        queue,
        key: Some(key),
        new: None,
        reason,
    };
    Ok(TableIterator::new(audited(&asked, |spi| {
        change(spi, queue, &[(key.to_owned(), None)], reason)
    })?))
}

/// `fair_clear_weights(queue, reason)`: all overrides of the queue.
#[pg_extern(sql = false)]
fn fair_clear_weights(
    queue: Option<&str>,
    reason: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(reason, Option<String>),
            name!(updated_by, String),
            name!(updated_at, TimestampWithTimeZone),
        ),
    >,
    ErrorReport,
> {
    let queue = required("queue", queue)?;
    let asked = Change {
        action: "clear_weights",
        queue,
        key: None,
        new: None,
        reason,
    };
    let cleared = audited(&asked, |spi| {
        queue_name(queue)?;
        let cleared = rows(&spi.run(&sql::CLEAR_WEIGHTS, &[queue.into_datum()]));
        let old: Map<String, Value> = cleared
            .iter()
            .map(|row| (row.1.clone(), row.2.into()))
            .collect();
        Ok((Some(Value::Object(old)), cleared))
    })?;
    Ok(TableIterator::new(cleared))
}

/// `fair_weights(queue)`.
#[pg_extern(sql = false)]
fn fair_weights(
    queue: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(reason, Option<String>),
            name!(updated_by, String),
            name!(updated_at, TimestampWithTimeZone),
        ),
    >,
    ErrorReport,
> {
    let queue = required("queue", queue)?;
    queue_name(queue)?;
    Ok(TableIterator::new(spi::connect(|spi| {
        rows(&spi.run(&sql::LIST_WEIGHTS, &[queue.into_datum()]))
    })))
}

/// The trigger function harvest_fair.admit_weight(): before a change it validates, after it the board is told.
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_weight(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: as Postgres calls a trigger function.
    let data = unsafe { trigger::data(fcinfo, "harvest_fair.admit_weight()") };
    match admit(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}
trigger::finfo!(pg_finfo_admit_weight);

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let scope = Catalog::get()?.scope();
    if Operation::of(data) == Operation::Truncate {
        effects::on_commit(OnCommit::WeightsTruncated { scope });
        return Ok(std::ptr::null_mut());
    }
    let (old, new, tuple) = trigger::versions(data);
    let named = |tuple| {
        (
            trigger::column::<String>(data, tuple, 1),
            trigger::column::<String>(data, tuple, 2),
        )
    };
    if trigger::is_before(data) {
        if let Some(new) = new {
            let (queue, key) = named(new);
            let queue = required("queue", queue.as_deref())?;
            let key = required("fairness_key", key.as_deref())?;
            queue_name(queue)?;
            check_key(key)?;
            check_weight(required("weight", trigger::column(data, new, 3))?)?;
            spi::connect(|spi| check_room(spi, queue, key))?;
        }
        return Ok(tuple);
    }
    let tell = |tuple, weight: Option<f64>| {
        if let (Some(name), Some(key)) = named(tuple) {
            effects::on_commit(OnCommit::Override {
                queue: QueueRef { scope, name },
                key,
                weight,
            });
        }
    };
    if let Some(old) = old {
        tell(old, None);
    }
    if let Some(new) = new {
        tell(new, trigger::column(data, new, 3));
    }
    Ok(std::ptr::null_mut())
}

/// The 1,001st override of a queue is refused, also when several sessions set one at once.
fn check_room(spi: &spi::Spi, queue: &str, key: &str) -> Result<(), Error> {
    spi.run(
        &sql::LOCK_WEIGHTS,
        &[LOCK_CLASS.into_datum(), queue.into_datum()],
    );
    // A statement of its own, hence a snapshot younger than the lock.
    let others = spi
        .run_on_latest(&sql::COUNT_WEIGHTS, &[queue.into_datum(), key.into_datum()])
        .get::<i64>(0, 1);
    if others.unwrap_or(0) >= MAX_WEIGHTS as i64 {
        return Err(Error::TooManyWeights {
            queue: queue.to_owned(),
            max: MAX_WEIGHTS,
        });
    }
    Ok(())
}
