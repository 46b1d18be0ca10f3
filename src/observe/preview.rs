//! `fair_preview`: what the next claims would be, on a copy of the queue.

use pgrx::AnyElement;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{self, QueueRef, effects, now, stored_key};
use crate::errors::Error;
use crate::names::{FairnessKey, Priority, Weight};
use crate::policy::weights::{check_key, check_weight, parse_weights};
use crate::sfq::{self, Charge, GroupView, Lane, Locked, Order, Pick, QueueId, Row, RowPos, Sched};
use crate::tasks::aside::{next_pinned, pinned_rows};
use crate::tasks::catalog::Catalog;
use crate::tasks::check_worker;
use crate::tasks::claim::{SharedBoard, TableRows, check_transaction};
use crate::tasks::functions::{check_max_tasks, queue_name, required};
use crate::tasks::load::ensure_loaded;
use crate::tasks::pinned::PinnedRow;
use crate::tasks::reap::{self, PutBack};
use crate::tasks::table::{TaskTable, Tid};
use crate::{config, janitor, json};

/// The task table, looked at only, with the rows in their lanes that a claim would first put back.
struct LookedAt<'a> {
    table: TableRows<'a>,
    put_back: &'a [PutBack],
}

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
        let start = out.len();
        let mut end = self.table.probe(lane, from, want, out)?;
        let until = if end {
            None
        } else {
            out.last().map(|(row, _)| row.pos)
        };
        let back = self.put_back.iter().filter(|back| {
            (back.priority, back.key.as_str(), back.band)
                == (lane.priority, lane.key.as_str(), lane.band)
                && back.row.pos >= from
                && until.is_none_or(|until| back.row.pos < until)
        });
        out.extend(back.map(|back| (back.row, back.tid)));
        if let Some(found) = out.get_mut(start..) {
            found.sort_by_key(|(row, _)| row.pos);
        }
        if out.len() > start + want {
            out.truncate(start + want);
            end = false;
        }
        Ok(end)
    }

    fn lock(&mut self, _: &Lane, _: &Row, tid: &Tid) -> Result<Locked, Error> {
        Ok(if self.table.table.is_held(*tid) {
            Locked::Held
        } else {
            Locked::Yes
        })
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
    // A transaction can claim what it has enqueued itself.
    effects::note_early(queue, &name);
    let (put_back, mut pinned) = put_back(table, queue, &name, worker, now);
    let is_back = |row: &PinnedRow| put_back.iter().any(|back| back.row.pos == row.row.pos);
    let others = pinned_rows(table, queue, &name, worker, now).into_iter();
    pinned.extend(others.filter(|row| !is_back(row)));
    let keys: Vec<(Priority, FairnessKey)> = pinned
        .iter()
        .map(|row| (row.priority, stored_key(&row.key)))
        .collect();
    let lanes: Vec<(Priority, FairnessKey, u8, Row)> = put_back
        .iter()
        .map(|back| (back.priority, stored_key(&back.key), back.band, back.row))
        .collect();
    let mut shown = Vec::new();
    let mut aside = |sched: &mut Sched, queue: QueueId| {
        shown.clear();
        let mut pinned = pinned.clone();
        while shown.len() < max_tasks {
            let Some(PinnedRow {
                row,
                priority,
                key,
                tid,
                ..
            }) = next_pinned(sched, queue, &mut pinned, now)
            else {
                break;
            };
            if table.is_held(tid) {
                continue;
            }
            let group = sched.group_of(queue, priority, &stored_key(&key));
            let Ok((charged, _)) = sched.take_aside(queue, priority, &stored_key(&key), row, now)
            else {
                pinned.retain(|other| other.key != key);
                continue;
            };
            let (pass, lag) = (charged.start.units(), charged.lag.units());
            let mut reason = format!("pinned to {worker}");
            if group.is_some() {
                reason = format!("{reason}, {}", places(group.as_ref(), pass, lag));
            }
            let priority = i16::from(priority.get());
            let position = shown.len() as i32 + 1;
            shown.push((position, row.pos.id, key, priority, pass, lag, reason));
        }
        shown.len()
    };
    let mut rows = LookedAt {
        table: TableRows {
            table,
            queue: &name.name,
        },
        put_back: &put_back,
    };
    let mut foreseen = Vec::new();
    sfq::Copied::foresee(
        &mut SharedBoard,
        &mut rows,
        queue,
        order,
        max_tasks,
        now,
        weights,
        (0, &keys, &lanes, &mut aside),
        &mut foreseen,
    )?;
    for (claim, group) in foreseen {
        let priority = i16::from(claim.priority.get());
        let (pass, lag) = (claim.start.units(), claim.lag.units());
        let places = places(group.as_ref(), pass, lag);
        let reason = match order {
            Order::Due => format!("priority {priority}, due first"),
            Order::Fair if claim.aged && group.is_none() => {
                format!("aged from priority {priority}")
            }
            Order::Fair if claim.aged => format!("aged from priority {priority}, {places}"),
            Order::Fair => format!("priority {priority}, {places}"),
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

/// Where the key stood at a claim, and its group if it is in one.
fn places(group: Option<&GroupView>, pass: f64, lag: f64) -> String {
    let Some(group) = group else {
        return format!("lag {lag}, pass {pass}");
    };
    let name = match group.name.as_str() {
        "" => "\"\"",
        name => name,
    };
    format!(
        "group {name}: lag {}, pass {}, key: lag {lag}, pass {pass}",
        group.lag.units(),
        group.pass.units()
    )
}

/// What a claim would first put back: into the lanes, and for this worker alone.
fn put_back(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    now: i64,
) -> (Vec<PutBack>, Vec<PinnedRow>) {
    // Pinned rows are looked for only where the board knows of some.
    let any_pins = board::with(|sched| sched.unpin_due(queue)) != i64::MAX;
    let mut back = reap::foresee(table, queue, name, now);
    back.retain(|back| !table.is_held(back.tid));
    let (pinned, free): (Vec<_>, Vec<_>) =
        back.into_iter().partition(|back| back.pinned_to.is_some());
    let mine = |back: &PutBack| {
        any_pins && back.pinned_to.as_deref() == Some(worker) && back.row.pos.due <= now
    };
    let pinned = pinned.into_iter().filter(mine).map(|back| PinnedRow {
        tid: back.tid,
        row: back.row,
        priority: back.priority,
        key: back.key,
        band: back.band,
    });
    (free, pinned.collect())
}
