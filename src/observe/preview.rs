//! `fair_preview`: what the next claims would be, on a copy of the queue.

use pgrx::AnyElement;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{QueueRef, now, stored_key};
use crate::errors::Error;
use crate::names::{FairnessKey, Weight};
use crate::policy::weights::{check_key, check_weight, parse_weights};
use crate::sfq::{self, Charge, Claimed, Lane, Locked, Order, Pick, QueueId, Row, RowPos, Sched};
use crate::tasks::aside::{next_pinned, pinned_rows};
use crate::tasks::catalog::Catalog;
use crate::tasks::check_worker;
use crate::tasks::claim::{SharedBoard, TableRows, check_transaction};
use crate::tasks::functions::{check_max_tasks, queue_name, required};
use crate::tasks::load::ensure_loaded;
use crate::tasks::table::{PinnedRow, TaskTable, Tid};
use crate::{config, janitor, json};

/// The task table, looked at only.
struct LookedAt<'a>(TableRows<'a>);

impl sfq::Rows for LookedAt<'_> {
    type Error = Error;
    type Handle = Tid;

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Tid)>,
    ) -> Result<bool, Error> {
        self.0.probe(lane, from, want, out)
    }

    fn lock(&mut self, _: &Tid) -> Result<Locked, Error> {
        Ok(Locked::Yes)
    }

    fn picked(&mut self, _: &Pick) {}

    fn settled(&mut self, _: Option<Charge>) {}
}

type PreviewRow = (i32, i64, String, i16, f64, f64, String);

/// `fair_preview(queue, worker, max_tasks, weights)`.
#[pg_extern(sql = false)]
fn fair_preview(
    queue: Option<&str>,
    worker: Option<&str>,
    max_tasks: Option<i32>,
    weights: Option<AnyElement>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(position, i32),
            name!(id, i64),
            name!(fairness_key, String),
            name!(priority, i16),
            name!(pass, f64),
            name!(lag, f64),
            name!(reason, String),
        ),
    >,
    ErrorReport,
> {
    let name = required("queue", queue)?;
    let worker = required("worker", worker)?;
    queue_name(name)?;
    check_worker(worker)?;
    let max_tasks = check_max_tasks(required("max_tasks", max_tasks)?)?;
    let weights = hypothetical(weights)?;
    check_transaction("fair_preview")?;
    janitor::ensure_running(&Catalog::get()?);
    let table = TaskTable::open()?;
    let queue = ensure_loaded(&table, name)?;
    Ok(TableIterator::new(preview(
        &table, queue, name, worker, max_tasks, &weights,
    )?))
}

fn hypothetical(
    weights: Option<AnyElement>,
) -> Result<Vec<(FairnessKey<'static>, Option<Weight>)>, Error> {
    let Some(weights) = weights else {
        return Ok(Vec::new());
    };
    parse_weights(&json::read("weights", weights.datum())?)?
        .into_iter()
        .map(|(key, weight)| {
            check_key(&key)?;
            Ok((
                stored_key(&key).into_owned(),
                weight.map(check_weight).transpose()?,
            ))
        })
        .collect()
}

fn preview(
    table: &TaskTable,
    queue: QueueId,
    name: &str,
    worker: &str,
    max_tasks: usize,
    weights: &[(FairnessKey<'static>, Option<Weight>)],
) -> Result<Vec<PreviewRow>, Error> {
    let now = now();
    let order = if config::fairness() {
        Order::Fair
    } else {
        Order::Due
    };
    let name = QueueRef {
        scope: table.catalog.scope(),
        name: name.to_owned(),
    };
    let pinned = pinned_rows(table, queue, &name, worker, now);
    let mut shown = Vec::new();
    let mut claimed: Vec<Claimed<Tid>> = Vec::new();
    let mut aside = |sched: &mut Sched, queue: QueueId| {
        shown.clear();
        let mut pinned = pinned.clone();
        while shown.len() < max_tasks {
            let Some(PinnedRow {
                row, priority, key, ..
            }) = next_pinned(sched, queue, &mut pinned)
            else {
                break;
            };
            let Ok((charged, _)) = sched.take_aside(queue, priority, &stored_key(&key), row, now)
            else {
                pinned.retain(|other| other.key != key);
                continue;
            };
            let priority = i16::from(priority.get());
            let (pass, lag) = (charged.start.units(), charged.lag.units());
            let position = shown.len() as i32 + 1;
            shown.push((
                position,
                row.pos.id,
                key,
                priority,
                pass,
                lag,
                format!("pinned to {worker}"),
            ));
        }
        shown.len()
    };
    let mut rows = LookedAt(TableRows {
        table,
        queue: &name.name,
    });
    let room = pinned.len();
    sfq::preview(
        &mut SharedBoard,
        &mut rows,
        queue,
        order,
        max_tasks,
        now,
        weights,
        (room, &mut aside),
        &mut claimed,
    )?;
    for claim in claimed {
        let priority = i16::from(claim.priority.get());
        let (pass, lag) = (claim.start.units(), claim.lag.units());
        let reason = match order {
            Order::Due => format!("priority {priority}, due first"),
            Order::Fair if claim.aged => format!("aged from priority {priority}"),
            Order::Fair => format!("priority {priority}, lag {lag}, pass {pass}"),
        };
        let position = shown.len() as i32 + 1;
        shown.push((
            position,
            claim.row.pos.id,
            claim.key.as_str().to_owned(),
            priority,
            pass,
            lag,
            reason,
        ));
    }
    Ok(shown)
}
