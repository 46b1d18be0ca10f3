//! Claims aside from the fair order: pinned tasks, and tasks asked for by their ids. Their keys are charged, but they never
//! move the clock (rule 3).

use pgrx::pg_sys;

use super::catalog::column;
use super::hand_over::{HandOver, ResultRow};
use super::load::ensure_loaded;
use super::pinned::PinnedRow;
use super::rules;
use super::table::{TaskTable, Tid, TupleLock};
use crate::board::{self, QueueRef, effects, now, stored_key, stored_priority};
use crate::config;
use crate::errors::Error;
use crate::names::Priority;
use crate::sfq::{Claimed, Order, QueueId, Refused, Row, Sched};

/// Pinned tasks of one worker that are looked at in one claim.
const PINNED: usize = 1_000;

/// The pinned tasks of a worker that are due, in no particular order.
pub fn pinned_rows(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    now: i64,
) -> Vec<PinnedRow> {
    // Whether there are any is known without a look at the table.
    if board::with(|sched| sched.unpin_due(queue)) == i64::MAX {
        return Vec::new();
    }
    table.pinned(&name.name, worker, now, PINNED)
}

/// Takes out the pinned row whose turn it is: by effective priority, priority, lag of its key, due time in claim order (rule 2).
pub fn next_pinned(
    sched: &Sched,
    queue: QueueId,
    rows: &mut Vec<PinnedRow>,
    now: i64,
) -> Option<PinnedRow> {
    let turn = |row: &PinnedRow| {
        let key = stored_key(&row.key);
        sched.turn_of(queue, row.priority, &key, row.band, row.row.pos, now)
    };
    let first = (0..rows.len()).min_by_key(|i| turn(&rows[*i]))?;
    Some(rows.swap_remove(first))
}

/// Pinned tasks of this worker go first. They are charged, but they never move the clock (rule 3). True if some are due that
/// are not to be had now, and nothing will tell when they are.
pub fn claim_pinned(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    want: usize,
    now: i64,
    claimed: &mut Vec<Claimed<Tid>>,
) -> bool {
    let mut rows = pinned_rows(table, queue, name, worker, now);
    let (mut held, mut gated) = (false, false);
    // No room for the key on the board, or it is gated: its tasks stay pinned until that is over.
    let mut leave = |key: &str, refused: Refused, rows: &mut Vec<PinnedRow>| {
        gated |= refused != Refused::Paused;
        rows.retain(|other| other.key != key);
    };
    while claimed.len() < want {
        // Anew after each charge: the key that was served stands further back.
        let next = board::with(|sched| {
            let row = next_pinned(sched, queue, &mut rows, now)?;
            let refused = sched.refused(queue, &stored_key(&row.key), now);
            Some((row, refused))
        });
        let Some((row, refused)) = next else {
            break;
        };
        if let Some(refused) = refused {
            // Before its row is locked: a claim that comes to nothing writes nothing.
            leave(&row.key, refused, &mut rows);
            continue;
        }
        let tid = match table.lock_or_skip(row.tid) {
            TupleLock::Locked(tid) => tid,
            TupleLock::Held => {
                held = true;
                continue;
            }
            TupleLock::Gone => continue,
        };
        match take_aside(queue, row.priority, &row.key, row.band, row.row, tid, now) {
            Ok(taken) => claimed.push(taken),
            Err(refused) => leave(&row.key, refused, &mut rows),
        }
    }
    held || gated
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
            rules::key(&key)?;
            return Err(Error::BoardFull {
                key,
                max: config::max_keys(),
            });
        }
        Err(Refused::Capped | Refused::Limited | Refused::Paused) => return Ok(()),
    };
    let hand = HandOver {
        table: &table,
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
