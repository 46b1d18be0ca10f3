//! The counters behind the view harvest_fair.stats.

use std::collections::HashMap;

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::tenants;
use crate::board::{self, shmem};
use crate::sfq::{QueueId, Sched, TenantView, Waiting};
use crate::tasks::catalog::Catalog;

type StatsRow = (
    String,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    f64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
);

/// How many keys of a queue can be claimed, are held back, or run something.
#[derive(Clone, Copy, Default)]
struct Keys {
    runnable: i64,
    capped: i64,
    limited: i64,
    paused: i64,
    future: i64,
    running: i64,
}

impl Keys {
    fn count(&mut self, key: &TenantView<'_>) {
        self.runnable += i64::from(key.eligible);
        self.running += i64::from(key.running > 0);
        match key.waiting_for {
            Some(Waiting::Cap) => self.capped += 1,
            Some(Waiting::Rate) => self.limited += 1,
            Some(Waiting::Paused) => self.paused += 1,
            Some(Waiting::Future) => self.future += 1,
            None => {}
        }
    }
}

/// One row for each queue of this database that is on the board; the last five columns are of the whole board.
#[pg_extern(sql = false)]
fn board_stats() -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(claims, i64),
            name!(refunds, i64),
            name!(empty_claims, i64),
            name!(missed_wakeups, i64),
            name!(full_rejections, i64),
            name!(evictions, i64),
            name!(keys, i64),
            name!(load_ms, f64),
            name!(waiting, i64),
            name!(expired_leases, i64),
            name!(runnable_keys, i64),
            name!(capped_keys, i64),
            name!(limited_keys, i64),
            name!(paused_keys, i64),
            name!(future_keys, i64),
            name!(running_keys, i64),
            name!(bytes_per_key, i64),
            name!(max_keys, i64),
            name!(free_keys, i64),
            name!(reloads, i64),
            name!(audit_overflow, i64),
        ),
    >,
    ErrorReport,
> {
    let scope = Catalog::get()?.scope();
    let overflow = shmem::refused_overflow() as i64;
    let mut rows: Vec<StatsRow> = Vec::new();
    let mut keys: HashMap<QueueId, Keys> = HashMap::new();
    tenants::each(scope, board::now(), |key| {
        keys.entry(key.queue).or_default().count(&key);
    });
    board::with(|sched| {
        let free = i64::from(sched.free_keys());
        sched.queues(|queue| {
            if queue.scope != scope {
                return;
            }
            let c = queue.counters;
            let keys = keys.get(&queue.id).copied().unwrap_or_default();
            rows.push((
                String::from_utf8_lossy(queue.name).into_owned(),
                c.claims as i64,
                c.refunds as i64,
                c.empty_claims as i64,
                c.missed_wakeups as i64,
                c.full_rejections as i64,
                c.evictions as i64,
                i64::from(queue.entries),
                c.load_micros as f64 / 1_000.0,
                i64::from(shmem::waiting(Some(queue.id))),
                c.expired_leases as i64,
                keys.runnable,
                keys.capped,
                keys.limited,
                keys.paused,
                keys.future,
                keys.running,
                Sched::bytes_per_key() as i64,
                i64::from(shmem::max_keys()),
                free,
                shmem::reloads() as i64,
                overflow,
            ));
        });
    });
    rows.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(TableIterator::new(rows))
}
