//! The rules that each row of the task table keeps, unless it came in past the trigger: with triggers off, or changed by a
//! trigger that fires later.

use super::catalog::column;
use super::table::TaskTable;
use crate::errors::Error;
use crate::names::{FairnessKey, MAX_KEY_BYTES, NameError, Priority, QueueName, Weight};

fn error(value: &dyn std::fmt::Display, broken: NameError) -> Error {
    Error::Name {
        value: value.to_string(),
        broken,
    }
}

/// Checks the name of a queue.
pub fn queue(name: &str) -> Result<(), Error> {
    QueueName::parse(name)
        .map(|_| ())
        .map_err(|broken| error(&name, broken))
}

/// Checks a key as it is stored, `''` being the default key.
pub fn key(key: &str) -> Result<(), Error> {
    if key.is_empty() {
        return Ok(());
    }
    FairnessKey::parse(key)
        .map(|_| ())
        .map_err(|broken| error(&key, broken))
}

/// Checks a priority.
pub fn priority(value: i16) -> Result<(), Error> {
    Priority::new(i64::from(value))
        .map(|_| ())
        .map_err(|broken| error(&value, broken))
}

/// Checks the weight of a task.
pub fn weight(value: f64) -> Result<(), Error> {
    Weight::new(value)
        .map(|_| ())
        .map_err(|broken| error(&value, broken))
}

/// Checks how often a task has been tried.
pub fn attempt(value: i32) -> Result<(), Error> {
    counter("attempt", value.into(), 1_000_000_000)
}

/// Checks the number of a task's last lease.
pub fn lease(value: i64) -> Result<(), Error> {
    counter("lease", value, 1_000_000_000_000_000_000)
}

fn counter(what: &'static str, value: i64, max: i64) -> Result<(), Error> {
    if (0..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::Counter { what, value, max })
}

/// The first rule that the row in the table's slot breaks, if any.
pub fn broken(row: &TaskTable) -> Option<Error> {
    let check = || {
        queue(&row.get::<String>(column::QUEUE).unwrap_or_default())?;
        key(&row.get::<String>(column::FAIRNESS_KEY).unwrap_or_default())?;
        priority(row.get(column::PRIORITY).unwrap_or(3))?;
        row.get(column::WEIGHT).map_or(Ok(()), weight)?;
        row.get(column::ATTEMPT).map_or(Ok(()), attempt)?;
        row.get(column::LEASE).map_or(Ok(()), lease)
    };
    check().err()
}

/// Why the rows of a lane have no place on the board, if they have none.
pub fn unservable(of_priority: i16, of_key: &str) -> Option<Error> {
    priority(of_priority).err().or_else(|| {
        let too_long = of_key.len() > MAX_KEY_BYTES;
        too_long.then(|| key(of_key).err()).flatten()
    })
}
