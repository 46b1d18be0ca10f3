//! The board's part of the view harvest_fair.tenant_stats: what each key got, and what would have been its fair share.

use std::collections::HashMap;

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::state::of_scope;
use crate::board::{self, now};
use crate::sfq::{QueueId, TenantView, Waiting};
use crate::tasks::catalog::Catalog;

const MICROS_PER_S: f64 = 1e6;

/// One key of a queue on the board. Times are in seconds.
pub struct TenantRow {
    pub queue: String,
    pub key: String,
    pub weight: f64,
    pub claims: u64,
    pub completions: u64,
    pub failures: u32,
    pub served: f64,
    pub wait_median: Option<f64>,
    pub wait_p95: Option<f64>,
    /// Of the queue's served cost in the last minute.
    pub share: Option<f64>,
    pub fair_share: Option<f64>,
    pub head_age: Option<f64>,
    pub waiting_for: Option<Waiting>,
    pub running: i64,
    /// The cost served in the last minute.
    pub lately: f64,
}

/// What shares are reckoned with.
struct Part {
    queue: QueueId,
    group: Option<(String, f64)>,
    is_active: bool,
}

/// What the active keys of a queue, or of a group, come to.
#[derive(Default)]
struct Sum {
    weight: f64,
    served: f64,
}

/// Keys looked at under one hold of the board's lock: who looks on must not stop the claims of others.
const KEYS_A_HOLD: u32 = 256;

/// Calls `visit` for every key of the loaded queues of a database.
pub fn each(scope: u64, now: i64, mut visit: impl FnMut(TenantView<'_>)) {
    let mut next = Some(0);
    while let Some(from) = next {
        next = board::with(|sched| sched.tenants(scope, now, (from, KEYS_A_HOLD), &mut visit));
    }
}

/// The keys of all loaded queues of a database, in the order of queue and key.
pub fn rows(scope: u64) -> Vec<TenantRow> {
    let names: HashMap<QueueId, String> = of_scope(scope).into_iter().collect();
    let now = now();
    let mut found: Vec<(TenantRow, Part)> = Vec::new();
    each(scope, now, |view| {
        if let Some(queue) = names.get(&view.queue) {
            found.push(row(queue, &view, now));
        }
    });
    let mut queues: HashMap<QueueId, Sum> = HashMap::new();
    let mut groups: HashMap<(QueueId, &str), f64> = HashMap::new();
    for (row, part) in &found {
        let queue = queues.entry(part.queue).or_default();
        queue.served += row.lately;
        match &part.group {
            _ if !part.is_active => {}
            None => queue.weight += row.weight,
            Some((group, weight)) => {
                let keys = groups.entry((part.queue, group)).or_insert_with(|| {
                    queue.weight += weight;
                    0.0
                });
                *keys += row.weight;
            }
        }
    }
    let fair_share = |row: &TenantRow, part: &Part| {
        let all = queues.get(&part.queue)?.weight;
        let share = match &part.group {
            None => row.weight / all,
            Some((group, weight)) => {
                let keys = groups.get(&(part.queue, group.as_str()))?;
                weight / all * (row.weight / keys)
            }
        };
        part.is_active.then_some(share)
    };
    let shares: Vec<_> = found
        .iter()
        .map(|(row, part)| {
            let served = queues.get(&part.queue).map_or(0.0, |queue| queue.served);
            let share = (served > 0.0).then(|| row.lately / served);
            (share, fair_share(row, part))
        })
        .collect();
    let mut rows: Vec<TenantRow> = found
        .into_iter()
        .zip(shares)
        .map(|((row, _), (share, fair_share))| TenantRow {
            share,
            fair_share,
            ..row
        })
        .collect();
    rows.sort_by(|a, b| (&a.queue, &a.key).cmp(&(&b.queue, &b.key)));
    rows
}

fn row(queue: &str, view: &TenantView<'_>, now: i64) -> (TenantRow, Part) {
    let tally = &view.tally;
    let age = |due: i64| now.saturating_sub(due) as f64 / MICROS_PER_S;
    let row = TenantRow {
        queue: queue.to_owned(),
        key: view.key.as_str().to_owned(),
        weight: view.weight,
        claims: tally.claims,
        completions: tally.completions,
        failures: tally.failures,
        served: tally.served,
        wait_median: tally.wait(0.5),
        wait_p95: tally.wait(0.95),
        share: None,
        fair_share: None,
        head_age: view.head_due.map(age),
        waiting_for: view.waiting_for,
        running: i64::from(view.running),
        lately: tally.lately(now),
    };
    let group = view.group.as_ref();
    let part = Part {
        queue: view.queue,
        group: group.map(|(name, weight)| (name.as_str().to_owned(), *weight)),
        is_active: view.is_active(now),
    };
    (row, part)
}

/// One row for each key on the board of the loaded queues of this database.
#[pg_extern(sql = false)]
fn board_tenant_stats() -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(claims, i64),
            name!(completions, i64),
            name!(failures, i64),
            name!(served_cost, f64),
            name!(wait_median, Option<f64>),
            name!(wait_p95, Option<f64>),
            name!(share, Option<f64>),
            name!(fair_share, Option<f64>),
            name!(head_age, Option<f64>),
            name!(waiting_for, Option<String>),
            name!(running, i64),
        ),
    >,
    ErrorReport,
> {
    let rows = rows(Catalog::get()?.scope()).into_iter().map(|row| {
        (
            row.queue,
            row.key,
            row.weight,
            row.claims as i64,
            row.completions as i64,
            i64::from(row.failures),
            row.served,
            row.wait_median,
            row.wait_p95,
            row.share,
            row.fair_share,
            row.head_age,
            row.waiting_for.map(|waiting| waiting.as_str().to_owned()),
            row.running,
        )
    });
    Ok(TableIterator::new(rows))
}
