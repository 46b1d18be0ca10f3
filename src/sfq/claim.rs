//! The claim driver: from pick to locked row. Generic over where the board's lock is and where the rows live, so that
//! the protocol is tested without a server.

use std::collections::HashSet;

use super::fetched::Memory;
use super::lane::{Next, Row, RowPos};
use super::pick::{Charge, LaneRef, Order, Pick};
use super::{QueueId, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

/// Rounds of one call that may come to nothing before the call makes do with what it has.
const FRUITLESS_ROUNDS: u32 = 10_000;

/// The board behind its lock.
pub trait Board {
    /// Holds the lock while `act` runs, and no longer.
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R;
}

/// A lane, as the rows are found by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    pub queue: QueueId,
    pub priority: Priority,
    pub key: FairnessKey<'static>,
    pub band: u8,
}

/// What came of locking a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locked {
    /// It is ours, and still a pending row at its place.
    Yes,
    /// Somebody else holds it.
    Held,
    /// It is no longer a pending row at its place.
    Gone,
}

/// Where the rows live.
pub trait Rows {
    type Error;
    /// Names a row version, to lock it.
    type Handle: Clone;

    /// Appends up to `want` pending rows of the lane from `from` (inclusive) on, in the order (due, id), as a snapshot taken
    /// now shows them; true if the lane ends there. Rows locked by others are among them.
    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Self::Handle)>,
    ) -> Result<bool, Self::Error>;

    /// Tries to lock a row of a lane, without waiting. It may have been seen a while ago, and the handle may by now name
    /// another row's version: such a row is gone.
    fn lock(
        &mut self,
        lane: &Lane,
        row: &Row,
        handle: &Self::Handle,
    ) -> Result<Locked, Self::Error>;

    /// A pick has been made and awaits its outcome. Called under the board's lock, like the next one, so that whoever
    /// cleans up after an error that unwinds from here knows exactly what to take back.
    fn picked(&mut self, pick: &Pick);

    /// The pick's outcome has been reported. With a charge, it has become a claim, to be kept or undone when the
    /// transaction ends.
    fn settled(&mut self, charge: Option<Charge>);
}

/// A task that is now the caller's.
#[derive(Clone, Debug)]
pub struct Claimed<H> {
    pub handle: H,
    pub row: Row,
    pub priority: Priority,
    pub key: FairnessKey<'static>,
    pub band: u8,
    pub start: Ticks,
    pub clock: Ticks,
    pub lag: Ticks,
    /// The weight in force.
    pub weight: f64,
    /// The cost that was charged; 0 if fairness is off.
    pub charged: f64,
    /// Chosen for its age, out of lag order.
    pub aged: bool,
    pub charge: Charge,
}

/// What the caller does about a pick.
enum Outcome<H> {
    Confirm {
        row: Row,
        handle: H,
        clean: bool,
        next: Next,
    },
    Found {
        actual: Row,
        clean: bool,
    },
    Hold {
        row: RowPos,
        next: Next,
    },
    Close,
    /// All that could be claimed of the lane is held by others.
    OnlyHeld,
    Retract,
}

/// Claims up to `n` tasks of a queue at the instant `now`, and appends them to `out`, in the order in which `n` calls of
/// one task each would have claimed them (rule 7). `memory` is the session's own, from its call before.
///
/// On an error the pick under way is retracted; what has been claimed so far is in `out` and was remembered, and is undone
/// by the caller when its transaction aborts.
#[allow(clippy::too_many_arguments)]
pub fn claim<B: Board, R: Rows>(
    board: &mut B,
    rows: &mut R,
    memory: &mut Memory<R::Handle>,
    queue: QueueId,
    order: Order,
    n: usize,
    now: i64,
    out: &mut Vec<Claimed<R::Handle>>,
) -> Result<(), R::Error> {
    let target = out.len().saturating_add(n);
    if n == 0 {
        return Ok(());
    }
    memory.begin();
    let mut call = Call {
        order,
        now,
        wanted: n,
        excluded: Vec::new(),
        keys: 1,
        held: HashSet::new(),
        taken: HashSet::new(),
        memory,
        buffer: Vec::new(),
    };
    let mut fruitless = 0;
    let mut under_way = board.with(|sched| call.pick(sched, rows, queue));
    while let Some((pick, at)) = under_way {
        call.wanted = target - out.len();
        let outcome = match call.attempt(rows, &pick, at) {
            Ok(outcome) => outcome,
            Err(error) => {
                board.with(|sched| {
                    sched.retract(&pick, now);
                    rows.settled(None);
                });
                return Err(error);
            }
        };
        let last = match outcome {
            Outcome::Confirm { .. } => out.len() + 1 >= target,
            _ => {
                fruitless += 1;
                fruitless >= FRUITLESS_ROUNDS
            }
        };
        // The outcome and the next pick share one turn of the lock.
        under_way = board.with(|sched| {
            call.report(sched, rows, &pick, at, outcome, out);
            if last {
                None
            } else {
                call.pick(sched, rows, queue)
            }
        });
    }
    Ok(())
}

struct Call<'m, H> {
    order: Order,
    now: i64,
    wanted: usize,
    /// Lanes in which only held rows are left.
    excluded: Vec<LaneRef>,
    /// Keys that were eligible at the latest pick.
    keys: usize,
    /// Rows that somebody else held when this call tried to lock them.
    held: HashSet<RowPos>,
    /// Rows that this call has claimed.
    taken: HashSet<RowPos>,
    memory: &'m mut Memory<H>,
    buffer: Vec<(Row, H)>,
}

impl<H: Clone> Call<'_, H> {
    /// Under the lock: picks, and says where in the memory the lane stands.
    fn pick<R: Rows<Handle = H>>(
        &mut self,
        sched: &mut Sched<'_>,
        rows: &mut R,
        queue: QueueId,
    ) -> Option<(Pick, usize)> {
        let pick = sched.pick(queue, self.now, self.order, &self.excluded)?;
        rows.picked(&pick);
        self.keys = sched.eligible_keys(queue);
        let at = self.memory.place(&pick, self.now, || {
            let key = sched.key_of(&pick).map(FairnessKey::into_owned);
            Lane {
                queue,
                priority: pick.priority,
                key: key.unwrap_or(FairnessKey::default_key()),
                band: pick.band,
            }
        });
        Some((pick, at))
    }

    /// Without the lock: looks at the rows, and locks the expected one if it stands first.
    fn attempt<R: Rows<Handle = H>>(
        &mut self,
        rows: &mut R,
        pick: &Pick,
        at: usize,
    ) -> Result<Outcome<H>, R::Error> {
        let Some(fetched) = self.memory.get_mut(at) else {
            return Ok(Outcome::Retract);
        };
        fetched.fit(pick, self.now);
        let (first, clean) = loop {
            let (taken, held) = (&self.taken, &self.held);
            let skip = |row: &Row| taken.contains(&row.pos) || held.contains(&row.pos);
            let first = fetched.rows.iter().position(|(row, _)| !skip(row));
            // The row after the one to claim becomes the lane's head, so it must be known too.
            if first.is_some_and(|first| first + 1 < fetched.rows.len()) || fetched.end {
                let clean = !fetched
                    .rows
                    .iter()
                    .take(first.unwrap_or(usize::MAX))
                    .any(|(row, _)| held.contains(&row.pos));
                // Behind a held row, one that is not due yet is as good as none: the lane stays awake for the held one.
                let first = first.filter(|&at| {
                    let due = |(row, _): &(Row, H)| row.pos.is_due(self.now);
                    clean || fetched.rows.get(at).is_some_and(due)
                });
                break (first, clean);
            }
            // The lane's share of what is wanted, and the row after it.
            let want = fetched.next_fetch(self.wanted / self.keys.max(1) + 2);
            self.buffer.clear();
            fetched.end = rows.probe(&fetched.lane, fetched.rest(pick), want, &mut self.buffer)?;
            // A lane that has not ended must have given something, or this would never end.
            fetched.end |= self.buffer.is_empty();
            fetched.rows.extend(self.buffer.drain(..));
        };
        let Some((first, (row, handle))) =
            first.and_then(|first| Some((first, fetched.rows.get(first)?.clone())))
        else {
            return Ok(if clean {
                Outcome::Close
            } else {
                Outcome::OnlyHeld
            });
        };
        if !pick.exact || row.pos != pick.expect {
            return Ok(Outcome::Found { actual: row, clean });
        }
        let locked = rows.lock(&fetched.lane, &row, &handle)?;
        if locked == Locked::Held {
            self.held.insert(row.pos);
        }
        let (taken, held) = (&self.taken, &self.held);
        // Behind a held row the cursor waits, so the lane's head may pass over other held ones. Else it must not: a pick
        // of a head beyond them would carry the cursor past them.
        let pass_held = !clean || locked == Locked::Held;
        let next = fetched
            .rows
            .iter()
            .skip(first + 1)
            .map(|(row, _)| *row)
            .find(|row| !(taken.contains(&row.pos) || pass_held && held.contains(&row.pos)));
        let next = match next {
            Some(row) => Next::Row(row),
            None if fetched.end => Next::End,
            None => Next::Unknown,
        };
        Ok(match locked {
            Locked::Yes => {
                fetched.take(first);
                Outcome::Confirm {
                    row,
                    handle,
                    clean,
                    next,
                }
            }
            Locked::Held => Outcome::Hold { row: row.pos, next },
            Locked::Gone => {
                fetched.restart(pick.cursor, self.now);
                Outcome::Retract
            }
        })
    }

    /// Under the lock: tells the board what came of the pick.
    fn report<R: Rows<Handle = H>>(
        &mut self,
        sched: &mut Sched<'_>,
        rows: &mut R,
        pick: &Pick,
        at: usize,
        outcome: Outcome<H>,
        out: &mut Vec<Claimed<H>>,
    ) {
        let mut settled = None;
        if let Some(fetched) = self.memory.get_mut(at) {
            fetched.keep(sched, pick, self.now);
        }
        match outcome {
            Outcome::Confirm {
                row,
                handle,
                clean,
                next,
            } => {
                sched.confirm(pick, clean, next, self.now);
                let charge = pick.charge(row);
                settled = Some(charge);
                self.taken.insert(row.pos);
                let key = self.memory.get(at).map(|fetched| fetched.lane.key.clone());
                out.push(Claimed {
                    handle,
                    row,
                    priority: pick.priority,
                    key: key.unwrap_or(FairnessKey::default_key()),
                    band: pick.band,
                    start: pick.start,
                    clock: pick.clock,
                    lag: pick.lag,
                    weight: pick.weight,
                    charged: pick.cost,
                    aged: pick.aged,
                    charge,
                });
            }
            Outcome::Found { actual, clean } => sched.found(pick, clean, actual, self.now),
            Outcome::Hold { row, next } => sched.hold(pick, row, next, self.now),
            Outcome::Close => sched.close(pick, self.now),
            Outcome::OnlyHeld => {
                sched.retract(pick, self.now);
                self.excluded.push(pick.lane());
            }
            Outcome::Retract => sched.retract(pick, self.now),
        }
        rows.settled(settled);
    }
}
