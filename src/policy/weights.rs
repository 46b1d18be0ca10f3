//! Weight overrides. They live in harvest_fair.weight; a row trigger validates each change and puts it on the board at
//! commit, so that a plain INSERT, UPDATE, DELETE or COPY is as good as the functions.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use pgrx::{JsonB, pg_sys};
use serde_json::json;

use crate::board::{OnCommit, QueueRef, effects};
use crate::errors::Error;
use crate::names::{FairnessKey, Weight};
use crate::spi;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::statements as sql;
use crate::tasks::table::Catalog;

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

fn check_key(key: &str) -> Result<(), Error> {
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

fn check_weight(weight: f64) -> Result<Weight, Error> {
    Weight::new(weight).map_err(|broken| Error::Name {
        value: weight.to_string(),
        broken,
    })
}

fn audit(
    spi: &spi::Spi,
    action: &str,
    queue: &str,
    key: &str,
    old: Option<f64>,
    new: Option<f64>,
    reason: Option<&str>,
) {
    let weight = |w: Option<f64>| w.and_then(|w| JsonB(json!(w)).into_datum());
    spi.run(
        &sql::AUDIT,
        &[
            action.into_datum(),
            queue.into_datum(),
            key.into_datum(),
            weight(old),
            weight(new),
            reason.and_then(|r| r.into_datum()),
        ],
    );
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
    queue_name(queue)?;
    check_key(key)?;
    check_weight(weight)?;
    let set = spi::connect(|spi| {
        // Before the row is looked at: a second session must see what the first has set.
        spi.run(
            &sql::LOCK_WEIGHTS,
            &[LOCK_CLASS.into_datum(), queue.into_datum()],
        );
        let old = spi
            .run(&sql::GET_WEIGHT, &[queue.into_datum(), key.into_datum()])
            .get::<f64>(0, 1);
        let args = [
            queue.into_datum(),
            key.into_datum(),
            weight.into_datum(),
            reason.and_then(|r| r.into_datum()),
        ];
        let set = rows(&spi.run(&sql::SET_WEIGHT, &args));
        audit(spi, "set_weight", queue, key, old, Some(weight), reason);
        set
    });
    Ok(TableIterator::new(set))
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
    queue_name(queue)?;
    check_key(key)?;
    let cleared = spi::connect(|spi| {
        let cleared = rows(&spi.run(&sql::CLEAR_WEIGHT, &[queue.into_datum(), key.into_datum()]));
        if let [(_, _, old, ..)] = cleared.as_slice() {
            audit(spi, "clear_weight", queue, key, Some(*old), None, reason);
        }
        cleared
    });
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

#[unsafe(no_mangle)]
#[doc(hidden)]
pub extern "C" fn pg_finfo_admit_weight() -> &'static pg_sys::Pg_finfo_record {
    const V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &V1
}

/// The trigger function harvest_fair.admit_weight(): before a change it validates, after it the board is told.
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_weight(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: `context` is what Postgres passes to a trigger, checked by its node tag.
    let data = unsafe {
        let context = (*fcinfo).context;
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
            pgrx::error!("harvest_fair.admit_weight() can only be called as a trigger");
        }
        &*context.cast::<pg_sys::TriggerData>()
    };
    match admit(data) {
        Ok(tuple) => pg_sys::Datum::from(tuple),
        Err(error) => error.raise(),
    }
}

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let scope = Catalog::get()?.scope();
    let operation = data.tg_event & pg_sys::TRIGGER_EVENT_OPMASK;
    let before = data.tg_event & pg_sys::TRIGGER_EVENT_TIMINGMASK == pg_sys::TRIGGER_EVENT_BEFORE;
    if operation == pg_sys::TRIGGER_EVENT_TRUNCATE {
        effects::on_commit(OnCommit::WeightsTruncated { scope });
        return Ok(std::ptr::null_mut());
    }
    let old =
        (operation != pg_sys::TRIGGER_EVENT_INSERT).then(|| weight_of(data, data.tg_trigtuple));
    let (new, tuple) = match operation {
        pg_sys::TRIGGER_EVENT_INSERT => {
            (Some(weight_of(data, data.tg_trigtuple)), data.tg_trigtuple)
        }
        pg_sys::TRIGGER_EVENT_UPDATE => (Some(weight_of(data, data.tg_newtuple)), data.tg_newtuple),
        _ => (None, data.tg_trigtuple),
    };
    if before {
        if let Some((queue, key, weight)) = &new {
            let queue = required("queue", queue.as_deref())?;
            let key = required("fairness_key", key.as_deref())?;
            queue_name(queue)?;
            check_key(key)?;
            check_weight(required("weight", *weight)?)?;
            check_room(queue, key)?;
        }
        return Ok(tuple);
    }
    let note = |weight: Option<(Option<String>, Option<String>, Option<f64>)>, keep: bool| {
        if let Some((Some(name), Some(key), weight)) = weight {
            let weight = if keep { weight } else { None };
            effects::on_commit(OnCommit::Override {
                queue: QueueRef { scope, name },
                key,
                weight,
            });
        }
    };
    note(old, false);
    note(new, true);
    Ok(std::ptr::null_mut())
}

/// Queue, key and weight of a row of harvest_fair.weight: its first three columns.
fn weight_of(
    data: &pg_sys::TriggerData,
    tuple: pg_sys::HeapTuple,
) -> (Option<String>, Option<String>, Option<f64>) {
    // SAFETY: the tuple is of the trigger's relation; the columns have the types that are named.
    unsafe {
        let descriptor = (*data.tg_relation).rd_att;
        let get = |column: i32| {
            let mut null = false;
            let datum = pg_sys::SPI_getbinval(tuple, descriptor, column, &mut null);
            (datum, null)
        };
        let (queue, no_queue) = get(1);
        let (key, no_key) = get(2);
        let (weight, no_weight) = get(3);
        (
            String::from_datum(queue, no_queue),
            String::from_datum(key, no_key),
            f64::from_datum(weight, no_weight),
        )
    }
}

/// The 1,001st override of a queue is refused, also when several sessions set one at once.
fn check_room(queue: &str, key: &str) -> Result<(), Error> {
    let others = spi::connect(|spi| {
        spi.run(
            &sql::LOCK_WEIGHTS,
            &[LOCK_CLASS.into_datum(), queue.into_datum()],
        );
        // A statement of its own, hence a snapshot younger than the lock.
        spi.run(&sql::COUNT_WEIGHTS, &[queue.into_datum(), key.into_datum()])
            .get::<i64>(0, 1)
    });
    if others.unwrap_or(0) >= MAX_WEIGHTS as i64 {
        return Err(Error::TooManyWeights {
            queue: queue.to_owned(),
            max: MAX_WEIGHTS,
        });
    }
    Ok(())
}
