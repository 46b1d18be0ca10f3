//! `fair_state`: each key on the board, and why it is not eligible.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{self, now};
use crate::janitor;
use crate::sfq::{QueueId, Ticks};
use crate::tasks::catalog::Catalog;
use crate::tasks::claim::check_primary;
use crate::tasks::functions::queue_name;
use crate::tasks::load::ensure_loaded;
use crate::tasks::table::TaskTable;

type StateRow = (
    String,
    i16,
    String,
    f64,
    f64,
    f64,
    f64,
    f64,
    i64,
    bool,
    Option<String>,
    Option<TimestampWithTimeZone>,
    Option<String>,
    Option<f64>,
    Option<f64>,
    Option<f64>,
);

/// `fair_state(queue)`; without a queue, all that are on the board of this database.
#[pg_extern(sql = false)]
fn fair_state(
    queue: Option<&str>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(queue, String),
            name!(priority, i16),
            name!(fairness_key, String),
            name!(weight, f64),
            name!(pass, f64),
            name!(last_start, f64),
            name!(clock, f64),
            name!(lag, f64),
            name!(running, i64),
            name!(eligible, bool),
            name!(waiting_for, Option<String>),
            name!(head_scheduled_at, Option<TimestampWithTimeZone>),
            name!(fairness_group, Option<String>),
            name!(group_weight, Option<f64>),
            name!(group_pass, Option<f64>),
            name!(group_lag, Option<f64>),
        ),
    >,
    ErrorReport,
> {
    check_primary("fair_state")?;
    let catalog = Catalog::get()?;
    janitor::ensure_running(&catalog);
    let queues: Vec<(QueueId, String)> = match queue {
        Some(name) => {
            queue_name(name)?;
            vec![(ensure_loaded(&TaskTable::open()?, name)?, name.to_owned())]
        }
        None => of_scope(catalog.scope()),
    };
    let now = now();
    let mut rows: Vec<StateRow> = Vec::new();
    for (queue, name) in queues {
        board::with(|sched| {
            sched.advance(queue, now);
            sched.entries(queue, |entry| {
                let waiting_for = entry.waiting_for.map(|w| w.as_str().to_owned());
                let group = entry.group.as_ref();
                rows.push((
                    name.clone(),
                    i16::from(entry.priority.get()),
                    entry.key.as_str().to_owned(),
                    entry.weight,
                    entry.pass.units(),
                    entry.last_start.units(),
                    entry.clock.units(),
                    // A key that is behind the clock joins at it.
                    entry.lag.max(Ticks::ZERO).units(),
                    i64::from(entry.running),
                    entry.eligible,
                    waiting_for,
                    entry
                        .head_due
                        .or(entry.wake)
                        .and_then(|at| TimestampWithTimeZone::try_from(at).ok()),
                    group.map(|g| g.name.as_str().to_owned()),
                    group.map(|g| g.weight),
                    group.map(|g| g.pass.units()),
                    group.map(|g| g.lag.max(Ticks::ZERO).units()),
                ));
            });
        });
    }
    rows.sort_by(|a, b| (&a.0, a.1, &a.2).cmp(&(&b.0, b.1, &b.2)));
    Ok(TableIterator::new(rows))
}

/// The queues of one database on the board.
pub fn of_scope(scope: u64) -> Vec<(QueueId, String)> {
    let mut queues = Vec::new();
    board::with(|sched| {
        sched.queues(|queue| {
            if queue.scope == scope {
                queues.push((queue.id, String::from_utf8_lossy(queue.name).into_owned()));
            }
        });
    });
    queues
}
