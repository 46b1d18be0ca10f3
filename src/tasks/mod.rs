//! The life of a task in the table: admitted, claimed, settled, or taken back.
//!
//! - [`table`]: the task table, read directly ([`catalog`]: where it is; `scan_keys`: where a scan begins; `lanes`: a walk
//!   over them all; [`probe`]: a look into one; `row_locks`: who holds a row; [`pinned`]: rows that wait for one worker)
//! - [`statements`]: the task table, written through SQL; [`write`]: written directly, by claims and completions
//! - [`admit`]: the row trigger (`fields`: the row as it sees it); [`rules`]: what each row obeys
//! - [`load`]: what the board knows of a queue, read from the tables
//! - [`claim`], [`aside`], [`hand_over`]: from the pick to the worker
//! - [`settle`], [`reap`]: what workers and leases do
//! - [`functions`]: the SQL functions

pub mod admit;
pub mod aside;
pub mod catalog;
pub mod claim;
mod fields;
pub mod functions;
pub mod hand_over;
mod lanes;
pub mod load;
pub mod pinned;
pub mod probe;
pub mod reap;
mod row_locks;
pub mod rules;
mod scan_keys;
pub mod settle;
pub mod statements;
pub mod table;
pub mod write;

use pgrx::datum::Interval;
use pgrx::pg_sys;
use pgrx::prelude::ToIsoString;

use crate::errors::{Error, quoted};
use crate::names;

const MICROS_PER_DAY: i64 = 86_400_000_000;
const DAYS_PER_MONTH: i64 = 30;

/// The length of an interval in microseconds, with days of 24 hours and months of 30 days.
pub fn micros(interval: &Interval) -> i64 {
    let days = i64::from(interval.months()) * DAYS_PER_MONTH + i64::from(interval.days());
    days.saturating_mul(MICROS_PER_DAY)
        .saturating_add(interval.micros())
}

/// A duration that must not be negative, in microseconds.
pub fn duration(what: &'static str, interval: &Interval, positive: bool) -> Result<i64, Error> {
    let length = micros(interval);
    if length < 0 || (positive && length == 0) {
        return Err(Error::Duration {
            what,
            value: quoted(&(*interval).to_iso_string()),
            positive,
        });
    }
    Ok(length)
}

/// A point in time, kept within what Postgres can show.
pub fn shown(micros: i64) -> i64 {
    const END_TIMESTAMP: i64 = 9_223_371_331_200_000_000;
    micros.min(END_TIMESTAMP - 1)
}

/// A point in time as a datum, kept within what Postgres can show.
pub fn timestamp(micros: i64) -> pg_sys::Datum {
    pg_sys::Datum::from(shown(micros))
}

/// Checks the name of a worker as given.
pub fn check_worker(worker: &str) -> Result<(), Error> {
    names::check_worker(worker).map_err(|broken| Error::Name {
        value: worker.to_owned(),
        broken,
    })
}
