//! Claims aside from the fair order: pinned tasks, and tasks asked for by their ids. Their keys are charged, but they never
//! move the clock (rule 3).

use std::collections::HashMap;

use pgrx::pg_sys;

use super::catalog::column;
use super::hand_over::{HandOver, ResultRow};
use super::load::ensure_loaded;
use super::table::{PinnedRow, TaskTable, Tid, TupleLock};
use crate::board::{self, QueueRef, effects, now, stored_key, stored_priority};
use crate::config;
use crate::errors::Error;
use crate::names::Priority;
use crate::sfq::{Claimed, Order, QueueId, Refused, Row, Ticks};

/// The pinned tasks of a worker in the order of their turns: priority, lag of their key, due time.
pub fn pinned_in_turn(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    want: usize,
    now: i64,
) -> Vec<PinnedRow> {
    if board::with(|sched| sched.unpin_due(queue)) == i64::MAX {
        return Vec::new();
    }
    let mut rows = table.pinned(&name.name, worker, now, want);
    let passes: HashMap<i64, Ticks> = board::with(|sched| {
        let pass = |row: &PinnedRow| sched.pass_of(queue, row.priority, &stored_key(&row.key));
        rows.iter().map(|row| (row.row.pos.id, pass(row))).collect()
    });
    rows.sort_by_key(|row| {
        (
            row.priority,
            passes.get(&row.row.pos.id).copied(),
            row.row.pos,
        )
    });
    rows
}

/// Pinned tasks of this worker go first. They are charged, but they never move the clock (rule 3).
pub fn claim_pinned(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    want: usize,
    now: i64,
    claimed: &mut Vec<Claimed<Tid>>,
) {
    for PinnedRow {
        tid,
        row,
        priority,
        key,
    } in pinned_in_turn(table, queue, name, worker, want, now)
    {
        if claimed.len() == want {
            break;
        }
        let TupleLock::Locked(tid) = table.lock_or_skip(tid) else {
            continue;
        };
        // No room for the key on the board, or it is gated: the task stays pinned until that is over.
        if let Ok(taken) = take_aside(queue, priority, &key, 0, row, tid, now) {
            claimed.push(taken);
        }
    }
}

/// Claims one task by its id, aside from the order: its key is charged, the clock does not move (rule 3). Nothing if it is
/// not claimable now by this worker.
pub fn claim_by_id(
    id: i64,
    worker: &str,
    mut emit: impl FnMut(&mut ResultRow),
) -> Result<(), Error> {
    let table = TaskTable::open()?;
    let now = now();
    let claimable = |row: &TaskTable| {
        let pinned = row
            .get::<String>(column::STICKY_WORKER)
            .is_some_and(|w| w != worker)
            && row
                .micros(column::STICKY_UNTIL)
                .is_none_or(|until| until > now);
        row.get::<pg_sys::Oid>(column::STATE) == Some(table.catalog.pending)
            && row
                .micros(column::SCHEDULED_AT)
                .is_some_and(|due| due <= now)
            && !pinned
    };
    if !table.find(id) || !claimable(&table) {
        return Ok(());
    }
    let queue_name: String = table.get(column::QUEUE).unwrap_or_default();
    let TupleLock::Locked(tid) = table.lock_or_skip(table.tid()) else {
        return Ok(());
    };
    let found = table.row();
    let priority = stored_priority(table.get(column::PRIORITY).unwrap_or(3));
    let key: String = table.get(column::FAIRNESS_KEY).unwrap_or_default();
    let queue = ensure_loaded(&table, &queue_name)?;
    let name = QueueRef {
        scope: table.catalog.scope(),
        name: queue_name,
    };
    let band = u8::from(table.get(column::NEW_START).unwrap_or(false));
    let claimed = match take_aside(queue, priority, &key, band, found, tid, now) {
        Ok(claimed) => claimed,
        Err(Refused::Full) => {
            return Err(Error::BoardFull {
                key,
                max: config::max_keys(),
            });
        }
        Err(Refused::Capped | Refused::Limited | Refused::Paused) => return Ok(()),
    };
    let hand = HandOver {
        queue,
        name: &name,
        worker,
        now,
        order: Order::Fair,
    };
    hand.over(&[claimed], &mut emit);
    Ok(())
}

/// Charges a locked row aside from the order.
fn take_aside(
    queue: QueueId,
    priority: Priority,
    key: &str,
    band: u8,
    row: Row,
    tid: Tid,
    now: i64,
) -> Result<Claimed<Tid>, Refused> {
    let key = stored_key(key);
    let (accounted, charge) = board::with(|sched| {
        let taken = sched.claim_aside(queue, priority, &key, band, row, now)?;
        effects::claimed(&taken.1);
        Ok::<_, Refused>(taken)
    })?;
    Ok(Claimed {
        handle: tid,
        row,
        priority,
        key: key.into_owned(),
        band,
        start: accounted.start,
        clock: accounted.clock,
        lag: accounted.lag,
        weight: accounted.weight,
        charged: accounted.cost,
        aged: false,
        charge,
    })
}
