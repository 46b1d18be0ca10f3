//! The claim: the board says whose turn it is, the table gives that key's first row, one UPDATE hands it over.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::Ordering::Relaxed;

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::load::ensure_loaded;
use super::reap::{reap, tid, tids};
use super::statements as sql;
use super::table::{LaneKey, PinnedRow, TaskTable, Tid, TupleLock, column};
use super::{admit, timestamp};
use crate::board::wait::Waiting;
use crate::board::{
    self, OnCommit, QueueRef, effects, now, shmem, stored_key, stored_priority, wait,
};
use crate::config;
use crate::errors::Error;
use crate::names::Priority;
use crate::sfq::{
    self, Charge, Claimed, Lane, Locked, Order, Pick, QueueId, QueueState, Refused, Row, RowPos,
    Sched, Ticks,
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
pub struct SharedBoard;

impl sfq::Board for SharedBoard {
    fn with<R>(&mut self, f: impl FnOnce(&mut Sched) -> R) -> R {
        board::with(f)
    }
}

/// The task table, as the claim driver wants it.
pub struct TableRows<'a> {
    pub table: &'a TaskTable,
    pub queue: &'a str,
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
    let queues = match request.queues.as_slice() {
        [queue] => vec![*queue],
        several => attempt(|| drawn(&TaskTable::open()?, several))?,
    };
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
    HandOver {
        queue,
        name,
        worker,
        now,
        order,
    }
    .over(&claimed, emit);
    Ok(claimed.len())
}

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
fn claim_pinned(
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
        if let Ok(taken) = take_aside(queue, priority, &key, row, tid, now) {
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
    let claimed = match take_aside(queue, priority, &key, found, tid, now) {
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
    row: Row,
    tid: Tid,
    now: i64,
) -> Result<Claimed<Tid>, Refused> {
    let key = stored_key(key);
    let (accounted, charge) = board::with(|sched| {
        let taken = sched.take_aside(queue, priority, &key, row, now)?;
        effects::claimed(&taken.1);
        Ok::<_, Refused>(taken)
    })?;
    Ok(Claimed {
        handle: tid,
        row,
        priority,
        key: key.into_owned(),
        band: 0,
        start: accounted.start,
        clock: accounted.clock,
        lag: accounted.lag,
        weight: accounted.weight,
        charged: accounted.cost,
        aged: false,
        charge,
    })
}

/// Rows that are locked and charged, on their way to a worker.
struct HandOver<'a> {
    queue: QueueId,
    name: &'a QueueRef,
    worker: &'a str,
    now: i64,
    order: Order,
}

impl HandOver<'_> {
    /// Hands the rows over, in one UPDATE for all that cost the same, and gives them out in pick order.
    fn over(&self, claimed: &[Claimed<Tid>], emit: &mut impl FnMut(&mut ResultRow)) {
        let lease = match shmem::extras(self.queue).lease.load(Relaxed) {
            0 => config::default_lease(),
            lease => lease,
        };
        let lease_until = self.now.saturating_add(lease);
        effects::on_commit(OnCommit::LeaseDue {
            queue: self.name.clone(),
            at: lease_until,
        });
        spi::connect(|spi| {
            let batches = self.update(spi, claimed, lease_until);
            let mut places: HashMap<i64, (usize, usize)> = HashMap::new();
            for (batch, rows) in batches.iter().enumerate() {
                places.extend(
                    (0..rows.len()).filter_map(|i| Some((rows.get::<i64>(i, 1)?, (batch, i)))),
                );
            }
            for claim in claimed {
                // A user's own trigger may have kept a row back.
                let Some(&(batch, place)) = places.get(&claim.row.pos.id) else {
                    continue;
                };
                emit(&mut result_row(&batches[batch], place, claim));
            }
        });
        // SAFETY: a further claim in the same statement must see these rows as taken.
        unsafe { pg_sys::CommandCounterIncrement() };
    }

    fn update<'s>(
        &self,
        spi: &'s spi::Spi,
        claimed: &[Claimed<Tid>],
        lease_until: i64,
    ) -> Vec<spi::Rows<'s>> {
        let mut costs: Vec<f64> = claimed.iter().map(|c| c.charged).collect();
        costs.sort_by(f64::total_cmp);
        costs.dedup();
        costs
            .into_iter()
            .map(|cost| {
                let same: Vec<Tid> = claimed
                    .iter()
                    .filter(|c| c.charged == cost)
                    .map(|c| c.handle)
                    .collect();
                let (statement, rows) = match same.as_slice() {
                    [one] => (&sql::CLAIM_ONE, tid(one)),
                    many => (&sql::CLAIM_MANY, tids(many)),
                };
                // Without fairness nothing is charged, so there is nothing to correct or undo later.
                let charged = (self.order == Order::Fair).then_some(cost).into_datum();
                let until = Some(timestamp(lease_until));
                let args = [
                    rows,
                    self.worker.into_datum(),
                    until,
                    Some(timestamp(self.now)),
                    charged,
                ];
                admit::while_claiming(|| spi.run(statement, &args))
            })
            .collect()
    }
}

/// A row of harvest_fair.claimed_task: the updated row, with weight and lag as of the pick.
fn result_row(rows: &spi::Rows, place: usize, claim: &Claimed<Tid>) -> ResultRow {
    let mut result = (
        [pg_sys::Datum::from(0); RESULT_COLUMNS],
        [true; RESULT_COLUMNS],
    );
    let of_row =
        (0..RESULT_COLUMNS - 2).map(|column| (column, rows.datum(place, column as i32 + 1)));
    let of_pick = [
        (RESULT_COLUMNS - 2, claim.weight.into_datum()),
        (RESULT_COLUMNS - 1, claim.lag.units().into_datum()),
    ];
    for (column, datum) in of_row.chain(of_pick) {
        if let Some(datum) = datum {
            result.0[column] = datum;
            result.1[column] = false;
        }
    }
    result
}

/// The queues, each once, in an order drawn by their weights: a queue of weight 3 stands before one of weight 1 three
/// times out of four; those of weight 0 come last.
fn drawn<'a>(table: &TaskTable, queues: &[&'a str]) -> Result<Vec<&'a str>, Error> {
    let random = RandomState::new();
    let mut drawn: Vec<(f64, &str)> = Vec::with_capacity(queues.len());
    for (i, queue) in queues.iter().enumerate() {
        if drawn.iter().any(|(_, other)| other == queue) {
            continue;
        }
        let weight = shmem::extras(ensure_loaded(table, queue)?).queue_weight();
        let mut hasher = random.build_hasher();
        hasher.write_usize(i);
        // Uniform in (0, 1]; an exponential waiting time at the queue's rate.
        let uniform = (hasher.finish() >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON;
        let wait = -uniform.min(1.0).ln();
        // Weight 0: after all others, in a random order of their own.
        drawn.push((
            if weight > 0.0 {
                wait / weight
            } else {
                f64::MAX / 2.0 * (1.0 + uniform.min(0.99))
            },
            *queue,
        ));
    }
    drawn.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(drawn.into_iter().map(|(_, queue)| queue).collect())
}
