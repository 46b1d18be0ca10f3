//! The SQL functions of a task's life: each a face over a plain function.

use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::aside;
use super::catalog::Catalog;
use super::claim::{self, Request};
use super::hand_over::{RESULT_COLUMNS, ResultRow};
use super::statements as sql;
use super::{check_worker, duration, settle, timestamp};
use crate::board::now;
use crate::errors::Error;
use crate::names::{FairnessKey, Priority, QueueName};
use crate::{config, janitor, spi};

type Result<T> = std::result::Result<T, ErrorReport>;

/// A value that must not be NULL.
pub fn required<T>(what: &'static str, value: Option<T>) -> std::result::Result<T, Error> {
    value.ok_or(Error::Null { what })
}

/// Checks a queue name as given.
pub fn queue_name(name: &str) -> std::result::Result<QueueName<'_>, Error> {
    QueueName::parse(name).map_err(|broken| Error::Name {
        value: name.to_owned(),
        broken,
    })
}

/// Checks how many tasks a claim asks for.
pub fn check_max_tasks(max_tasks: i32) -> std::result::Result<usize, Error> {
    let max = config::max_batch();
    if (1..=max).contains(&max_tasks) {
        Ok(max_tasks as usize)
    } else {
        Err(Error::MaxTasks {
            value: max_tasks,
            max,
        })
    }
}

/// Checks a priority as given.
pub fn check_priority(priority: i32) -> std::result::Result<Priority, Error> {
    Priority::new(i64::from(priority)).map_err(|broken| Error::Name {
        value: priority.to_string(),
        broken,
    })
}

/// `fair_enqueue(...)`.
#[pg_extern(sql = false)]
#[allow(clippy::too_many_arguments)]
fn fair_enqueue(
    queue: Option<&str>,
    payload: Option<pgrx::datum::AnyElement>,
    fairness_key: Option<&str>,
    priority: Option<i32>,
    weight: Option<f64>,
    scheduled_at: Option<TimestampWithTimeZone>,
    parent_id: Option<i64>,
    quota_key: Option<&str>,
    sticky_worker: Option<&str>,
    sticky_for: Option<Interval>,
    new_start: Option<bool>,
    max_attempts: Option<i32>,
) -> Result<i64> {
    let queue = required("queue", queue)?;
    queue_name(queue)?;
    janitor::ensure_running(&Catalog::get()?);
    if fairness_key == Some("") {
        // In the table '' is the default key; here null asks for it, and '' is more likely a tenant that got lost.
        FairnessKey::parse("").map_err(|broken| Error::Name {
            value: String::new(),
            broken,
        })?;
    }
    let priority = priority
        .map(check_priority)
        .transpose()?
        .map(|p| i16::from(p.get()));
    let sticky_until = match (&sticky_worker, &sticky_for) {
        (Some(_), Some(length)) => Some(timestamp(now().saturating_add(duration(
            "sticky_for",
            length,
            true,
        )?))),
        (None, Some(_)) => return Err(Error::StickyFor.into()),
        (_, None) => None,
    };
    let args = [
        queue.into_datum(),
        payload.map(|p| p.datum()).or_else(empty_payload),
        fairness_key.and_then(|k| k.into_datum()),
        priority.into_datum(),
        weight.into_datum(),
        scheduled_at.into_datum(),
        parent_id.into_datum(),
        quota_key.and_then(|k| k.into_datum()),
        sticky_worker.and_then(|w| w.into_datum()),
        sticky_until,
        new_start.into_datum(),
        max_attempts.into_datum(),
    ];
    let id = spi::connect(|spi| spi.run(&sql::ENQUEUE, &args).get::<i64>(0, 1));
    // A trigger of the user's own may have swallowed the row.
    Ok(required("id of the new task", id)?)
}

/// `{}`, as the column's default.
fn empty_payload() -> Option<pg_sys::Datum> {
    pgrx::JsonB(serde_json::json!({})).into_datum()
}

/// Declares a raw SQL function; `$arguments` reads argument 0 and runs inside the function's `unsafe` block.
macro_rules! raw_function {
    ($finfo:ident, $name:ident, $arguments:expr) => {
        crate::trigger::finfo!($finfo);

        /// A claim; its result goes straight into the caller's tuplestore.
        ///
        /// # Safety
        /// Called by Postgres with the arguments that sql/functions.sql declares.
        #[unsafe(no_mangle)]
        #[pg_guard]
        pub unsafe extern "C-unwind" fn $name(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
            // SAFETY: as the caller promises.
            unsafe {
                let outcome = claim_into(fcinfo, $arguments);
                if let Err(error) = outcome {
                    error.raise();
                }
            }
            pg_sys::Datum::from(0)
        }
    };
}

raw_function!(pg_finfo_fair_claim, fair_claim, |fcinfo| {
    let queue = pgrx::fcinfo::pg_getarg::<String>(fcinfo, 0);
    Ok(vec![required("queue", queue)?])
});

raw_function!(pg_finfo_fair_claim_any, fair_claim_any, |fcinfo| {
    let queues = pgrx::fcinfo::pg_getarg::<Vec<Option<String>>>(fcinfo, 0);
    let queues = required("queues", queues)?;
    queues
        .into_iter()
        .map(|q| q.ok_or(Error::ArrayNull { what: "queues" }))
        .collect()
});

/// `fair_claim_by_id(id, worker)`.
///
/// # Safety
/// Called by Postgres with the arguments that sql/functions.sql declares.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn fair_claim_by_id(
    fcinfo: pg_sys::FunctionCallInfo,
) -> pg_sys::Datum {
    // SAFETY: arguments 0 and 1 are bigint and text; InitMaterializedSRF checks that the caller takes a set.
    let outcome = unsafe {
        pg_sys::InitMaterializedSRF(fcinfo, pg_sys::MAT_SRF_USE_EXPECTED_DESC);
        let (id, worker) = (
            pgrx::fcinfo::pg_getarg::<i64>(fcinfo, 0),
            pgrx::fcinfo::pg_getarg::<String>(fcinfo, 1),
        );
        let result = (*fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>();
        by_id(id, worker, |row| put_row(result, row))
    };
    if let Err(error) = outcome {
        error.raise();
    }
    pg_sys::Datum::from(0)
}
crate::trigger::finfo!(pg_finfo_fair_claim_by_id);

/// Adds a row to the result of a set-returning function.
///
/// # Safety
/// `result` is what InitMaterializedSRF has set up for a function that returns harvest_fair.claimed_task.
unsafe fn put_row(result: *mut pg_sys::ReturnSetInfo, (values, nulls): &mut ResultRow) {
    // SAFETY: as the caller promises; both arrays have one element a column.
    unsafe {
        debug_assert_eq!((*(*result).setDesc).natts as usize, RESULT_COLUMNS);
        // Mutable pointers, since the older headers ask for them.
        let (values, nulls) = (values.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::tuplestore_putvalues((*result).setResult, (*result).setDesc, values, nulls);
    }
}

fn by_id(
    id: Option<i64>,
    worker: Option<String>,
    emit: impl FnMut(&mut ResultRow),
) -> std::result::Result<(), Error> {
    let (id, worker) = (required("id", id)?, required("worker", worker)?);
    check_worker(&worker)?;
    claim::check_transaction("fair_claim_by_id")?;
    janitor::ensure_running(&Catalog::get()?);
    aside::claim_by_id(id, &worker, emit)
}

/// # Safety
/// `fcinfo` is a call of fair_claim as sql/functions.sql declares it.
unsafe fn claim_into(
    fcinfo: pg_sys::FunctionCallInfo,
    queues: impl FnOnce(pg_sys::FunctionCallInfo) -> std::result::Result<Vec<String>, Error>,
) -> std::result::Result<(), Error> {
    // SAFETY: arguments 1 to 3 are text, integer and interval; InitMaterializedSRF checks that the caller takes a set.
    unsafe {
        pg_sys::InitMaterializedSRF(fcinfo, pg_sys::MAT_SRF_USE_EXPECTED_DESC);
        let result = (*fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>();
        let queues = queues(fcinfo)?;
        let worker = required("worker", pgrx::fcinfo::pg_getarg::<String>(fcinfo, 1))?;
        let max_tasks = required("max_tasks", pgrx::fcinfo::pg_getarg::<i32>(fcinfo, 2))?;
        let wait = pgrx::fcinfo::pg_getarg::<Interval>(fcinfo, 3);
        for queue in &queues {
            queue_name(queue)?;
        }
        check_worker(&worker)?;
        let max_tasks = check_max_tasks(max_tasks)?;
        let wait = wait.map(|w| duration("wait", &w, false)).transpose()?;
        claim::check_transaction("fair_claim")?;
        janitor::ensure_running(&Catalog::get()?);
        let request = Request {
            queues: queues.iter().map(String::as_str).collect(),
            worker: &worker,
            max_tasks,
            wait,
        };
        claim::claim(&request, |row| put_row(result, row))
    }
}

/// `fair_complete(id, lease, cost)`.
#[pg_extern(sql = false)]
fn fair_complete(id: Option<i64>, lease: Option<i64>, cost: Option<f64>) -> Result<bool> {
    let (id, lease) = (required("id", id)?, required("lease", lease)?);
    Ok(!settle::complete(&[id], &[lease], &[cost])?.is_empty())
}

/// `fair_complete(ids, leases, costs)`.
#[pg_extern(sql = false)]
fn fair_complete_many(
    ids: Option<Vec<Option<i64>>>,
    leases: Option<Vec<Option<i64>>>,
    costs: Option<Vec<Option<f64>>>,
) -> Result<SetOfIterator<'static, i64>> {
    let (ids, leases) = leases_held(ids, leases)?;
    let costs = costs.unwrap_or_else(|| vec![None; ids.len()]);
    same_length(&ids, "costs", costs.len())?;
    Ok(SetOfIterator::new(settle::complete(&ids, &leases, &costs)?))
}

/// `fair_release(id, lease)`.
#[pg_extern(sql = false)]
fn fair_release(id: Option<i64>, lease: Option<i64>) -> Result<bool> {
    let (id, lease) = (required("id", id)?, required("lease", lease)?);
    Ok(!settle::release(&[id], &[lease])?.is_empty())
}

/// `fair_release(ids, leases)`.
#[pg_extern(sql = false)]
fn fair_release_many(
    ids: Option<Vec<Option<i64>>>,
    leases: Option<Vec<Option<i64>>>,
) -> Result<SetOfIterator<'static, i64>> {
    let (ids, leases) = leases_held(ids, leases)?;
    Ok(SetOfIterator::new(settle::release(&ids, &leases)?))
}

fn leases_held(
    ids: Option<Vec<Option<i64>>>,
    leases: Option<Vec<Option<i64>>>,
) -> std::result::Result<(Vec<i64>, Vec<i64>), Error> {
    let whole = |what, values: Option<Vec<Option<i64>>>| -> std::result::Result<Vec<i64>, Error> {
        let values = required(what, values)?;
        values
            .into_iter()
            .map(|v| v.ok_or(Error::ArrayNull { what }))
            .collect()
    };
    let ids = whole("ids", ids)?;
    let leases = whole("leases", leases)?;
    same_length(&ids, "leases", leases.len())?;
    Ok((ids, leases))
}

fn same_length(
    ids: &[i64],
    second: &'static str,
    second_len: usize,
) -> std::result::Result<(), Error> {
    if ids.len() == second_len {
        return Ok(());
    }
    Err(Error::ArrayLength {
        first: "ids",
        first_len: ids.len(),
        second,
        second_len,
    })
}

/// `fair_fail(id, lease, error, retry_in)`: the label as a datum of harvest_fair.task_state.
#[pg_extern(sql = false)]
fn fair_fail(
    id: Option<i64>,
    lease: Option<i64>,
    error: Option<&str>,
    retry_in: Option<Interval>,
) -> Result<Option<pg_sys::Oid>> {
    let (id, lease) = (required("id", id)?, required("lease", lease)?);
    let retry_in = retry_in
        .map(|i| duration("retry_in", &i, false))
        .transpose()?;
    let catalog = Catalog::get()?;
    // An enum value is passed as the object id of its label.
    Ok(
        settle::fail(id, lease, error, retry_in)?.map(|after| match after {
            settle::AfterFailure::Pending => catalog.pending,
            settle::AfterFailure::Failed => catalog.failed,
        }),
    )
}

/// `fair_extend(id, lease, lease_for)`.
#[pg_extern(sql = false)]
fn fair_extend(
    id: Option<i64>,
    lease: Option<i64>,
    lease_for: Option<Interval>,
) -> Result<Option<TimestampWithTimeZone>> {
    let (id, lease) = (required("id", id)?, required("lease", lease)?);
    let lease_for = lease_for
        .map(|i| duration("lease_for", &i, true))
        .transpose()?;
    let until = settle::extend(id, lease, lease_for)?;
    Ok(until.and_then(|until| TimestampWithTimeZone::try_from(until).ok()))
}

/// `fair_cancel(id)`.
#[pg_extern(sql = false)]
fn fair_cancel(id: Option<i64>) -> Result<bool> {
    Ok(settle::cancel(required("id", id)?)?)
}

/// `fair_retry(id)`.
#[pg_extern(sql = false)]
fn fair_retry(id: Option<i64>) -> Result<bool> {
    Ok(settle::retry(required("id", id)?)?)
}
