//! The rows of harvest_fair.weight, of which a queue can have 1,000.

use pgrx::pg_sys;
use pgrx::prelude::*;
use serde_json::Value;

use super::audit::Change;
use super::rows::{PolicyRow, admit};
use super::weights::{check_key, check_weight, shown};
use crate::board::{OnCommit, QueueRef};
use crate::errors::Error;
use crate::spi::{self, Statement};
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::trigger;

/// Most overrides that a queue can have.
const MAX_WEIGHTS: usize = 1_000;
/// The class of the advisory lock that serializes new overrides of a queue.
const LOCK_CLASS: i32 = 0x4641_4952;

/// The trigger function harvest_fair.admit_weight(): before a change it validates, after it the board is told.
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_weight(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: as Postgres calls a trigger function.
    let data = unsafe { trigger::data(fcinfo, "harvest_fair.admit_weight()") };
    match admit::<WeightRow>(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}
trigger::finfo!(pg_finfo_admit_weight);

struct WeightRow {
    queue: Option<String>,
    key: Option<String>,
    weight: Option<f64>,
    reason: Option<String>,
}

impl PolicyRow for WeightRow {
    const ACTIONS: [&'static str; 3] = ["insert_weight", "update_weight", "delete_weight"];
    const AUDIT_TRUNCATED: &'static Statement = &sql::AUDIT_TRUNCATED_WEIGHTS;
    const UPDATED_AT: i32 = 6;

    fn read(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple) -> Self {
        WeightRow {
            queue: trigger::column(data, tuple, 1),
            key: trigger::column(data, tuple, 2),
            weight: trigger::column(data, tuple, 3),
            reason: trigger::column(data, tuple, 4),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let queue = required("queue", self.queue.as_deref())?;
        let key = required("fairness_key", self.key.as_deref())?;
        queue_name(queue)?;
        check_key(key)?;
        check_weight(required("weight", self.weight)?)?;
        spi::connect(|spi| check_room(spi, queue, key))
    }

    fn shown(&self) -> Option<Value> {
        self.weight.map(shown)
    }

    fn change<'a>(&'a self, action: &'a str, new: Option<Value>) -> Change<'a> {
        Change {
            action,
            queue: self.queue.as_deref(),
            key: self.key.as_deref(),
            new,
            reason: self.reason.as_deref(),
        }
    }

    fn has_key_of(&self, other: &Self) -> bool {
        (&self.queue, &self.key) == (&other.queue, &other.key)
    }

    fn is_equal(&self, other: &Self) -> bool {
        (self.weight, &self.reason) == (other.weight, &other.reason)
    }

    fn effect(&self, scope: u64, stays: bool) -> Option<OnCommit> {
        Some(OnCommit::Override {
            queue: QueueRef {
                scope,
                name: self.queue.clone()?,
            },
            key: self.key.clone()?,
            weight: self.weight.filter(|_| stays),
        })
    }

    fn all_gone(scope: u64) -> OnCommit {
        OnCommit::WeightsTruncated { scope }
    }
}

/// The 1,001st override of a queue is refused, also when several sessions set one at once.
pub fn check_room(spi: &spi::Spi, queue: &str, key: &str) -> Result<(), Error> {
    lock(spi, queue);
    // On a snapshot younger than the lock, also where the transaction's own is older.
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

/// Lets one session after the other set weights of a queue.
pub fn lock(spi: &spi::Spi, queue: &str) {
    spi.run(
        &sql::LOCK_WEIGHTS,
        &[LOCK_CLASS.into_datum(), queue.into_datum()],
    );
}
