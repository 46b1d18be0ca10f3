//! Weight overrides: the functions. They write harvest_fair.weight, whose row trigger does the rest.

use pgrx::AnyElement;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use serde_json::{Map, Value};

use super::audit::{Change, audited};
use super::weight_rows::{check_room, lock};
use crate::errors::Error;
use crate::json;
use crate::names::{FairnessKey, Weight};
use crate::spi;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;

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
    lock(spi, queue);
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
    let asked = Change {
        action: "set_weight",
        queue,
        key: fairness_key,
        new: weight.map(shown),
        reason,
    };
    Ok(TableIterator::new(audited(&asked, |spi| {
        let queue = required("queue", queue)?;
        let key = required("fairness_key", fairness_key)?;
        let weight = required("weight", weight)?;
        change(spi, queue, &[(key.to_owned(), Some(weight))], reason)
    })?))
}

/// `fair_set_weights(queue, weights, reason)`: a null value clears the key's override.
#[pg_extern(sql = false)]
fn fair_set_weights(
    queue: Option<&str>,
    weights: Option<AnyElement>,
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
    let value = weights.map(|given| json::read("weights", given.datum()));
    let asked = Change {
        action: "set_weights",
        queue,
        key: None,
        new: json::shown(&value),
        reason,
    };
    let set = audited(&asked, |spi| {
        let queue = required("queue", queue)?;
        let value = required("weights", value)??;
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
            Value::Number(number) => match number.as_f64() {
                Some(value) if Weight::new(value).is_err() => Err(Error::WeightOfKey {
                    key: key.clone(),
                    value,
                }),
                weight => Ok((key.clone(), weight)),
            },
            other => Err(Error::WeightType {
                key: key.clone(),
                value: other.to_string(),
            }),
        })
        .collect()
}

/// A weight as the audit shows it: NaN and infinities are no JSON numbers.
pub fn shown(weight: f64) -> Value {
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
    let asked = Change {
        action: "clear_weight",
        queue,
        key: fairness_key,
        new: None,
        reason,
    };
    Ok(TableIterator::new(audited(&asked, |spi| {
        let queue = required("queue", queue)?;
        let key = required("fairness_key", fairness_key)?;
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
    let asked = Change {
        action: "clear_weights",
        queue,
        key: None,
        new: None,
        reason,
    };
    let cleared = audited(&asked, |spi| {
        let queue = required("queue", queue)?;
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
