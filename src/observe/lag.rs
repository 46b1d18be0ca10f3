//! `fair_lag` and `fair_charge`: for dispatchers that claim by SQL of their own.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{self, effects, now, stored_key};
use crate::errors::Error;
use crate::names::{Cost, FairnessKey};
use crate::sfq::Ticks;
use crate::tasks::catalog::Catalog;
use crate::tasks::claim::{check_primary, check_transaction};
use crate::tasks::functions::{check_priority, queue_name, required};
use crate::tasks::load::ensure_loaded;
use crate::tasks::table::TaskTable;
use crate::{config, janitor};

type LagRow = (String, i16, String, f64, f64, f64, f64);

/// `fair_lag(queue, priority)`.
#[pg_extern(sql = false)]
fn fair_lag(
    queue: Option<&str>,
    priority: Option<i32>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(priority, i16),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(pass, f64),
            name!(clock, f64),
            name!(lag, f64),
        ),
    >,
    ErrorReport,
> {
    let name = required("queue", queue)?;
    queue_name(name)?;
    let priority = priority.map(check_priority).transpose()?;
    check_primary("fair_lag")?;
    janitor::ensure_running(&Catalog::get()?);
    let queue = ensure_loaded(&TaskTable::open()?, name)?;
    let mut rows: Vec<LagRow> = Vec::new();
    let now = now();
    board::with(|sched| {
        sched.advance(queue, now);
        sched.entries(queue, |entry| {
            if priority.is_none_or(|p| p == entry.priority) {
                rows.push((
                    name.to_owned(),
                    i16::from(entry.priority.get()),
                    entry.key.as_str().to_owned(),
                    entry.weight,
                    entry.pass.units(),
                    entry.clock.units(),
                    entry.lag.max(Ticks::ZERO).units(),
                ));
            }
        });
    });
    rows.sort_by(|a, b| (a.1, &a.2).cmp(&(b.1, &b.2)));
    Ok(TableIterator::new(rows))
}

/// `fair_charge(queue, fairness_key, cost, priority)`.
#[pg_extern(sql = false)]
fn fair_charge(
    queue: Option<&str>,
    fairness_key: Option<&str>,
    cost: Option<f64>,
    priority: Option<i32>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(priority, i16),
            name!(weight, f64),
            name!(start, f64),
            name!(pass, f64),
            name!(clock, f64),
            name!(lag, f64),
        ),
    >,
    ErrorReport,
> {
    let name = required("queue", queue)?;
    queue_name(name)?;
    // Null is the default key.
    if let Some(key) = fairness_key {
        FairnessKey::parse(key).map_err(|broken| Error::Name {
            value: key.to_owned(),
            broken,
        })?;
    }
    let key = fairness_key.unwrap_or("");
    let cost = required("cost", cost)?;
    Cost::of_claim(cost).map_err(|broken| Error::Name {
        value: cost.to_string(),
        broken,
    })?;
    let priority = check_priority(required("priority", priority)?)?;
    check_transaction("fair_charge")?;
    janitor::ensure_running(&Catalog::get()?);
    let queue = ensure_loaded(&TaskTable::open()?, name)?;
    let charged =
        board::with(|sched| sched.charge(queue, priority, &stored_key(key), cost, None, now()))
            .map_err(|_| Error::BoardFull {
                key: key.to_owned(),
                max: config::max_keys(),
            })?;
    effects::charged(charged);
    Ok(TableIterator::once((
        name.to_owned(),
        key.to_owned(),
        i16::from(priority.get()),
        charged.weight,
        charged.start.units(),
        charged.pass.units(),
        charged.clock.units(),
        // After the charge, as fair_lag shows it.
        charged.pass.minus(charged.clock).units(),
    )))
}
