//! The rows of harvest_fair.weight. A row trigger validates each change, puts it on the board at commit and has it
//! audited, so that a plain INSERT, UPDATE, DELETE or COPY is as good as the functions.

use pgrx::pg_sys;
use pgrx::prelude::*;
use serde_json::Value;

use super::audit::{self, Change};
use super::weights::{check_key, check_weight, shown};
use crate::board::{OnCommit, QueueRef, effects};
use crate::errors::Error;
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::trigger::{self, Operation};

/// Most overrides that a queue can have.
const MAX_WEIGHTS: usize = 1_000;
/// The class of the advisory lock that serializes new overrides of a queue.
const LOCK_CLASS: i32 = 0x4641_4952;
/// The column of harvest_fair.weight that tells a restored row from a new one.
const UPDATED_AT: i32 = 6;

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

/// A row of harvest_fair.weight, as far as it is given.
struct Given {
    queue: Option<String>,
    key: Option<String>,
    weight: Option<f64>,
    reason: Option<String>,
}

impl Given {
    fn of(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple) -> Given {
        Given {
            queue: trigger::column(data, tuple, 1),
            key: trigger::column(data, tuple, 2),
            weight: trigger::column(data, tuple, 3),
            reason: trigger::column(data, tuple, 4),
        }
    }

    fn same_key(&self, other: &Given) -> bool {
        (&self.queue, &self.key) == (&other.queue, &other.key)
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

    fn check(&self) -> Result<(), Error> {
        let queue = required("queue", self.queue.as_deref())?;
        let key = required("fairness_key", self.key.as_deref())?;
        queue_name(queue)?;
        check_key(key)?;
        check_weight(required("weight", self.weight)?)?;
        spi::connect(|spi| check_room(spi, queue, key))
    }
}

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let scope = Catalog::get()?.scope();
    let operation = Operation::of(data);
    if operation == Operation::Truncate {
        if trigger::is_before(data) {
            audit::truncated(&sql::AUDIT_TRUNCATED_WEIGHTS);
        } else {
            effects::on_commit(OnCommit::WeightsTruncated { scope });
        }
        return Ok(std::ptr::null_mut());
    }
    let action = match operation {
        Operation::Insert => "insert_weight",
        Operation::Update => "update_weight",
        _ => "delete_weight",
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
            audit::refused_by_sql(&given.change(action, given.weight.map(shown)), &error);
            return Err(error);
        }
        return Ok(tuple);
    }
    let tell = |row: &Given, weight: Option<f64>| {
        if let (Some(name), Some(key)) = (row.queue.clone(), row.key.clone()) {
            effects::on_commit(OnCommit::Override {
                queue: QueueRef { scope, name },
                key,
                weight,
            });
        }
    };
    if let Some(old) = &old {
        tell(old, None);
    }
    if let Some(given) = &given {
        tell(given, given.weight);
    }
    let weight = |row: &Given| row.weight.map(shown);
    match (&old, &given) {
        (Some(old), Some(given)) if old.same_key(given) => {
            if (old.weight, &old.reason) != (given.weight, &given.reason) {
                audit::made_by_sql(&given.change(action, weight(given)), weight(old));
            }
        }
        _ => {
            if let Some(old) = &old {
                audit::made_by_sql(&old.change(action, None), weight(old));
            }
            if let (Some(given), Some(new)) = (&given, new)
                && !(old.is_none() && trigger::is_restored(data, new, UPDATED_AT))
            {
                audit::made_by_sql(&given.change(action, weight(given)), None);
            }
        }
    }
    Ok(std::ptr::null_mut())
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
