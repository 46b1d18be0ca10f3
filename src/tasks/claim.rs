//! The claim: the board says whose turn it is, the table gives that key's first row, one UPDATE hands it over.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::load::ensure_loaded;
use super::reap::{reap, tid, tids};
use super::statements as sql;
use super::table::{LaneKey, PinnedRow, TaskTable, Tid, TupleLock};
use super::{admit, timestamp};
use crate::board::wait::Waiting;
use crate::board::{self, QueueRef, effects, now, stored_key, wait};
use crate::config;
use crate::errors::Error;
use crate::sfq::{
    self, Charge, Claimed, Lane, Locked, Order, Pick, QueueId, QueueState, Row, RowPos, Sched,
};
use crate::spi;
use crate::subtransaction::attempt;

/// What a worker asks for.
pub struct Request<'a> {
    /// Where to look, one queue at a time.
    pub queues: Vec<&'a str>,
    pub worker: &'a str,
    /// Most tasks to hand over.
    pub max_tasks: usize,
    /// How long to wait for the first one (µs); `None`: not at all.
    pub wait: Option<i64>,
}

/// Columns of harvest_fair.claimed_task.
pub const RESULT_COLUMNS: usize = 12;
/// A row of the result, alive until the call returns.
pub type ResultRow = ([pg_sys::Datum; RESULT_COLUMNS], [bool; RESULT_COLUMNS]);

/// The shared board, as the claim driver wants it.
struct SharedBoard;

impl sfq::Board for SharedBoard {
    fn with<R>(&mut self, f: impl FnOnce(&mut Sched) -> R) -> R {
        board::with(f)
    }
}

/// The task table, as the claim driver wants it.
struct TableRows<'a> {
    table: &'a TaskTable,
    queue: &'a str,
}

impl sfq::Rows for TableRows<'_> {
    type Error = Error;
    type Handle = Tid;

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Tid)>,
    ) -> Result<bool, Error> {
        pgrx::check_for_interrupts!();
        let lane = LaneKey {
            queue: self.queue,
            priority: i16::from(lane.priority.get()),
            key: lane.key.as_str(),
            band: lane.band,
        };
        Ok(self.table.probe(&lane, from, want, out))
    }

    fn lock(&mut self, tid: &Tid) -> Result<Locked, Error> {
        Ok(match self.table.lock_or_skip(*tid) {
            TupleLock::Locked(_) => Locked::Yes,
            TupleLock::Held => Locked::Held,
            TupleLock::Gone => Locked::Gone,
        })
    }

    fn picked(&mut self, pick: &Pick) {
        effects::picked(pick);
    }

    fn settled(&mut self, charge: Option<Charge>) {
        effects::settled(charge.as_ref());
    }
}

/// Claims must see what others commit while they run.
pub fn check_transaction(function: &'static str) -> Result<(), Error> {
    // SAFETY: reads the state of this backend's transaction and of the server.
    unsafe {
        let level = pg_sys::XactIsoLevel;
        if level >= pg_sys::XACT_REPEATABLE_READ as i32 {
            let level = if level == pg_sys::XACT_REPEATABLE_READ as i32 {
                "repeatable read"
            } else {
                "serializable"
            };
            return Err(Error::Isolation { function, level });
        }
        if pg_sys::XactReadOnly || pg_sys::RecoveryInProgress() {
            return Err(Error::ReadOnly { function });
        }
    }
    Ok(())
}

/// Claims tasks and gives each to `emit`, in pick order.
pub fn claim(request: &Request, mut emit: impl FnMut(&mut ResultRow)) -> Result<(), Error> {
    let queues = shuffled(&request.queues);
    let Some(wait) = request.wait else {
        let table = TaskTable::open()?;
        return claim_once(&table, &queues, request, &mut emit).map(|_| ());
    };
    let deadline = now().saturating_add(wait);
    let mut round = try_round(&queues, request, &mut emit)?;
    while round.handed == 0 && now() < deadline && !queues.is_empty() {
        // Nothing that ends a subtransaction may stand between lining up and sleep: it would leave the line.
        let ids = attempt(|| load(&queues), |_| false)?;
        let line = Waiting::line_up(match ids.as_slice() {
            [queue] => Some(*queue),
            _ => None,
        });
        // Looked at after the place in line was taken: no wake-up falls between the two.
        let (claimable, until) = outlook(&ids);
        if round.held {
            line.sleep(deadline, true);
        } else if !claimable {
            line.sleep(deadline.min(until), false);
        }
        drop(line);
        pgrx::check_for_interrupts!();
        round = try_round(&queues, request, &mut emit)?;
    }
    Ok(())
}

/// A round of a claim that waits: it leaves nothing behind unless it has handed tasks over. Leases that it has taken back in
/// vain (the key is at its limit, or the task has failed for good) are the janitor's.
fn try_round(
    queues: &[&str],
    request: &Request,
    emit: &mut impl FnMut(&mut ResultRow),
) -> Result<Round, Error> {
    attempt(
        || claim_once(&TaskTable::open()?, queues, request, emit),
        |round| round.handed > 0,
    )
}

fn load(queues: &[&str]) -> Result<Vec<QueueId>, Error> {
    let table = TaskTable::open()?;
    queues
        .iter()
        .map(|queue| ensure_loaded(&table, queue))
        .collect()
}

/// Whether something may be claimable now, and when to look again if nothing happens before.
fn outlook(queues: &[QueueId]) -> (bool, i64) {
    let (mut claimable, mut until) = (false, i64::MAX);
    let now = now();
    for &queue in queues {
        board::with(|sched| {
            sched.advance(queue, now);
            let reaping = sched.lease_due(queue).min(sched.unpin_due(queue));
            // A queue that has left the board must be loaded again before it can be waited for.
            let gone = sched.queue_state(queue) != Some(QueueState::Loaded);
            claimable |= gone || sched.has_eligible(queue) || reaping <= now;
            until = until
                .min(sched.next_timer(queue).unwrap_or(i64::MAX))
                .min(reaping);
        });
    }
    (claimable, until)
}

/// What a round over the queues came to.
struct Round {
    /// Tasks handed over.
    handed: usize,
    /// There is something that is not to be had now, and that gives no sign when it is: rows that others hold, or leases
    /// that were taken back in vain.
    held: bool,
}

/// One round over the queues.
fn claim_once(
    table: &TaskTable,
    queues: &[&str],
    request: &Request,
    emit: &mut impl FnMut(&mut ResultRow),
) -> Result<Round, Error> {
    let mut round = Round {
        handed: 0,
        held: false,
    };
    for name in queues {
        let queue = ensure_loaded(table, name)?;
        let name = QueueRef {
            scope: table.catalog.scope(),
            name: (*name).to_owned(),
        };
        let want = request.max_tasks - round.handed;
        let reaped = reap(table, queue, &name, now());
        let got = claim_queue(table, queue, &name, request.worker, want, emit)?;
        round.handed += got;
        if got == 0 {
            round.held |= reaped || board::with(|sched| sched.has_eligible(queue));
        } else {
            wait::pass_on(queue);
        }
        if round.handed >= request.max_tasks {
            break;
        }
    }
    Ok(round)
}

/// Claims up to `want` tasks of one queue.
fn claim_queue(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    want: usize,
    emit: &mut impl FnMut(&mut ResultRow),
) -> Result<usize, Error> {
    let now = now();
    effects::note_early(queue, name);
    let order = if config::fairness() {
        Order::Fair
    } else {
        Order::Due
    };
    let mut claimed = Vec::new();
    claim_pinned(table, queue, name, worker, want, now, &mut claimed);
    let mut rows = TableRows {
        table,
        queue: &name.name,
    };
    if claimed.len() < want {
        sfq::claim(
            &mut SharedBoard,
            &mut rows,
            queue,
            order,
            want - claimed.len(),
            now,
            &mut claimed,
        )?;
    }
    if claimed.is_empty() {
        board::with(|sched| sched.counters(queue).empty_claims += 1);
        return Ok(0);
    }
    hand_over(&claimed, name, worker, now, order, emit);
    Ok(claimed.len())
}

/// Pinned tasks of this worker go first: priority, lag of their key, due time. They are charged, but they never move
/// the clock (rule 3).
fn claim_pinned(
    table: &TaskTable,
    queue: QueueId,
    name: &QueueRef,
    worker: &str,
    want: usize,
    now: i64,
    claimed: &mut Vec<Claimed<Tid>>,
) {
    if board::with(|sched| sched.unpin_due(queue)) == i64::MAX {
        return;
    }
    let candidates = table.pinned(&name.name, worker, now, want);
    let lags = board::with(|sched| {
        let lag = |row: &PinnedRow| sched.pass_of(queue, row.priority, &stored_key(&row.key));
        candidates.iter().map(lag).collect::<Vec<_>>()
    });
    let mut turns: Vec<usize> = (0..candidates.len()).collect();
    turns.sort_by_key(|i| (candidates[*i].priority, lags[*i], candidates[*i].row.pos));
    for turn in turns {
        if claimed.len() == want {
            break;
        }
        let PinnedRow {
            tid,
            row,
            priority,
            key,
        } = &candidates[turn];
        let TupleLock::Locked(tid) = table.lock_or_skip(*tid) else {
            continue;
        };
        let key = stored_key(key);
        let taken = board::with(|sched| {
            let taken = sched.take_aside(queue, *priority, &key, *row, now);
            if let Ok((_, charge)) = &taken {
                effects::claimed(charge);
            }
            taken
        });
        // No room for the key on the board: the task stays pinned until there is.
        let Ok((accounted, charge)) = taken else {
            continue;
        };
        claimed.push(Claimed {
            handle: tid,
            row: *row,
            priority: *priority,
            key: key.into_owned(),
            band: 0,
            start: accounted.start,
            clock: accounted.clock,
            lag: accounted.lag,
            weight: accounted.weight,
            charged: 1.0,
            charge,
        });
    }
}

/// Hands locked rows to the worker in one UPDATE, and gives them out in pick order.
fn hand_over(
    claimed: &[Claimed<Tid>],
    name: &QueueRef,
    worker: &str,
    now: i64,
    order: Order,
    emit: &mut impl FnMut(&mut ResultRow),
) {
    let lease_until = now.saturating_add(config::default_lease());
    let charged = match order {
        Order::Fair => 1f64.into_datum(),
        Order::Due => None,
    };
    effects::on_commit(board::OnCommit::LeaseDue {
        queue: name.clone(),
        at: lease_until,
    });
    spi::connect(|spi| {
        let (statement, rows) = match claimed {
            [one] => (&sql::CLAIM_ONE, tid(&one.handle)),
            many => (
                &sql::CLAIM_MANY,
                tids(&many.iter().map(|c| c.handle).collect::<Vec<_>>()),
            ),
        };
        let args = [
            rows,
            worker.into_datum(),
            Some(timestamp(lease_until)),
            Some(timestamp(now)),
            charged,
        ];
        let rows = admit::while_claiming(|| spi.run(statement, &args));
        let mut places: HashMap<i64, usize> = HashMap::with_capacity(rows.len());
        if claimed.len() > 1 {
            places.extend((0..rows.len()).filter_map(|i| Some((rows.get::<i64>(i, 1)?, i))));
        }
        for claim in claimed {
            let place = if claimed.len() > 1 {
                places.get(&claim.row.pos.id).copied()
            } else {
                Some(0)
            };
            let Some(place) = place.filter(|p| *p < rows.len()) else {
                continue;
            };
            let mut result = (
                [pg_sys::Datum::from(0); RESULT_COLUMNS],
                [true; RESULT_COLUMNS],
            );
            for column in 0..RESULT_COLUMNS - 2 {
                if let Some(datum) = rows.datum(place, column as i32 + 1) {
                    result.0[column] = datum;
                    result.1[column] = false;
                }
            }
            for (column, value) in [
                (RESULT_COLUMNS - 2, claim.weight),
                (RESULT_COLUMNS - 1, claim.lag.units()),
            ] {
                if let Some(datum) = value.into_datum() {
                    result.0[column] = datum;
                    result.1[column] = false;
                }
            }
            emit(&mut result);
        }
    });
    // SAFETY: a further claim in the same statement must see these rows as taken.
    unsafe { pg_sys::CommandCounterIncrement() };
}

/// The queues in an order drawn anew, each once.
fn shuffled<'a>(queues: &[&'a str]) -> Vec<&'a str> {
    let mut left: Vec<&str> = Vec::with_capacity(queues.len());
    for queue in queues {
        if !left.contains(queue) {
            left.push(queue);
        }
    }
    let random = RandomState::new();
    for i in (1..left.len()).rev() {
        let mut hasher = random.build_hasher();
        hasher.write_usize(i);
        left.swap(i, (hasher.finish() % (i as u64 + 1)) as usize);
    }
    left
}
