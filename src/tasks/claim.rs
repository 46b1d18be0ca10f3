//! The claim: the board says whose turn it is, the table gives that key's first row, one UPDATE hands it over.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

use pgrx::pg_sys;

use super::aside::claim_pinned;
use super::hand_over::{HandOver, ResultRow};
use super::load::ensure_loaded;
use super::probe::LaneKey;
use super::reap::reap;
use super::table::{TaskTable, Tid, TupleLock};
use crate::board::wait::Waiting;
use crate::board::{self, QueueRef, effects, now, shmem, wait};
use crate::config;
use crate::errors::Error;
use crate::sfq::{
    self, Charge, Lane, Locked, Memory, Order, Pick, QueueId, QueueState, Row, RowPos, Sched,
};
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

impl TableRows<'_> {
    fn lane_key<'l>(&'l self, lane: &'l Lane) -> LaneKey<'l> {
        LaneKey {
            queue: self.queue,
            priority: i16::from(lane.priority.get()),
            key: lane.key.as_str(),
            band: lane.band,
        }
    }
}

thread_local! {
    /// What this session has seen of the lanes in its latest calls; lost when an ERROR unwinds.
    static MEMORY: Cell<Memory<Tid>> = Cell::default();
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
        Ok(self.table.probe(&self.lane_key(lane), from, want, out))
    }

    fn lock(&mut self, lane: &Lane, row: &Row, tid: &Tid) -> Result<Locked, Error> {
        let lane = self.lane_key(lane);
        Ok(match self.table.lock_pending(&lane, row.pos, *tid) {
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
    // SAFETY: reads the state of this backend's transaction.
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
        if pg_sys::XactReadOnly {
            return Err(Error::ReadOnly { function });
        }
    }
    check_primary(function)
}

/// The board of a standby is told of nothing that happens, so it must know of nothing when the standby is promoted.
pub fn check_primary(function: &'static str) -> Result<(), Error> {
    // SAFETY: reads the state of the server.
    if unsafe { pg_sys::RecoveryInProgress() } {
        return Err(Error::ReadOnly { function });
    }
    Ok(())
}

/// Claims tasks and gives each to `emit`, in pick order.
pub fn claim(request: &Request, mut emit: impl FnMut(&mut ResultRow)) -> Result<(), Error> {
    let queues = match request.queues.as_slice() {
        [queue] => vec![*queue],
        several => attempt(|| drawn(&TaskTable::open()?, several), |_| false)?,
    };
    let Some(wait) = request.wait else {
        let table = TaskTable::open()?;
        return claim_once(&table, &queues, request, &mut emit).map(|_| ());
    };
    let deadline = now().saturating_add(wait);
    let mut since = now();
    let mut round = try_round(&queues, request, &mut emit)?;
    while round.handed == 0 && now() < deadline && !queues.is_empty() {
        // Nothing that ends a subtransaction may stand between lining up and sleep: it would leave the line.
        let ahead = attempt(|| look_ahead(&queues, request.worker, since), |_| false)?;
        let line = Waiting::line_up(match ahead.as_slice() {
            [one] => Some(one.queue),
            _ => None,
        });
        // Looked at after the place in line was taken: no wake-up falls between the two.
        let (claimable, until) = outlook(&ahead);
        if round.held {
            line.sleep(deadline, true);
        } else if !claimable {
            line.sleep(deadline.min(until), false);
        }
        drop(line);
        pgrx::check_for_interrupts!();
        since = now();
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

/// What a worker that waits knows of a queue.
struct Ahead {
    queue: QueueId,
    /// How often pinned rows had come to the queue before they were looked for.
    pins: u32,
    /// When the next row that is pinned to the worker comes due.
    pinned_due: i64,
}

/// Looks for what the board does not tell: pinned rows that come due after a point in time.
fn look_ahead(queues: &[&str], worker: &str, since: i64) -> Result<Vec<Ahead>, Error> {
    let table = TaskTable::open()?;
    let of_queue = |name: &&str| {
        let queue = ensure_loaded(&table, name)?;
        let pins = shmem::extras(queue).pins();
        let any = board::with(|sched| sched.unpin_due(queue)) != i64::MAX;
        let pinned_due = if any {
            table.next_pinned(name, worker, since)
        } else {
            i64::MAX
        };
        Ok(Ahead {
            queue,
            pins,
            pinned_due,
        })
    };
    queues.iter().map(of_queue).collect()
}

/// Whether something may be claimable now, and when to look again if nothing happens before.
fn outlook(ahead: &[Ahead]) -> (bool, i64) {
    let (mut claimable, mut until) = (false, i64::MAX);
    let now = now();
    for of_queue in ahead {
        let queue = of_queue.queue;
        board::with(|sched| {
            sched.advance(queue, now);
            let reaping = sched.lease_due(queue).min(sched.unpin_due(queue));
            // A queue that has left the board must be loaded again before it can be waited for.
            let gone = sched.queue_state(queue) != Some(QueueState::Loaded);
            let pinned = shmem::extras(queue).pins() != of_queue.pins;
            claimable |= gone || pinned || sched.has_eligible(queue) || reaping <= now;
            until = until
                .min(sched.next_timer(queue).unwrap_or(i64::MAX))
                .min(reaping)
                .min(of_queue.pinned_due);
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
        round.handed += got.handed;
        if got.handed == 0 {
            let eligible = board::with(|sched| sched.has_eligible(queue));
            round.held |= reaped || got.held || eligible;
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
) -> Result<Round, Error> {
    let now = now();
    effects::note_early(queue, name);
    let order = if config::fairness() {
        Order::Fair
    } else {
        Order::Due
    };
    let mut claimed = Vec::new();
    let held = claim_pinned(table, queue, name, worker, want, now, &mut claimed);
    let mut rows = TableRows {
        table,
        queue: &name.name,
    };
    if claimed.len() < want {
        let mut memory = MEMORY.take();
        sfq::claim(
            &mut SharedBoard,
            &mut rows,
            &mut memory,
            queue,
            order,
            want - claimed.len(),
            now,
            &mut claimed,
        )?;
        MEMORY.set(memory);
    }
    if claimed.is_empty() {
        board::with(|sched| sched.counters(queue).empty_claims += 1);
        return Ok(Round { handed: 0, held });
    }
    HandOver {
        table,
        queue,
        name,
        worker,
        now,
        order,
    }
    .over(&claimed, emit);
    let handed = claimed.len();
    Ok(Round { handed, held })
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
