//! The claim driver: from pick to locked row. Generic over where the board's lock is and where the rows live, so that
//! the protocol is tested without a server.

use std::collections::{HashMap, HashSet, VecDeque};

use super::lane::{Next, Row, RowPos};
use super::pick::{Charge, LaneRef, Order, Pick};
use super::{QueueId, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

/// Rounds of one call that may come to nothing before the call makes do with what it has.
const FRUITLESS_ROUNDS: u32 = 10_000;
/// Rows fetched at once, at most.
const FETCH: usize = 64;

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

    /// Tries to lock a row, without waiting.
    fn lock(&mut self, handle: &Self::Handle) -> Result<Locked, Self::Error>;

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

/// Rows of one lane, fetched earlier in the call. Good as evidence as long as nothing has become visible in the lane.
struct Fetched<H> {
    lane: Lane,
    generation: u32,
    from: RowPos,
    rows: VecDeque<(Row, H)>,
    end: bool,
    /// How many rows were asked for the last time.
    asked: usize,
}

impl<H> Fetched<H> {
    /// Drops what says nothing about what `pick` asks, or is no longer needed.
    fn fit(&mut self, pick: &Pick) {
        if self.generation != pick.generation || self.from > pick.cursor {
            self.generation = pick.generation;
            self.restart(pick.cursor);
        }
        while self
            .rows
            .front()
            .is_some_and(|(row, _)| row.pos < pick.cursor)
        {
            self.rows.pop_front();
        }
        // Should the cursor come back, because another claimer gives its row back, the dropped ones would be missing.
        self.from = pick.cursor;
    }

    fn restart(&mut self, from: RowPos) {
        self.from = from;
        self.rows.clear();
        self.end = false;
    }

    /// Where to fetch on.
    fn rest(&self, pick: &Pick) -> RowPos {
        self.rows
            .back()
            .map_or(pick.cursor, |(row, _)| row.pos.after())
    }
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
/// one task each would have claimed them (rule 7).
///
/// On an error the pick under way is retracted; what has been claimed so far is in `out` and was remembered, and is undone
/// by the caller when its transaction aborts.
pub fn claim<B: Board, R: Rows>(
    board: &mut B,
    rows: &mut R,
    queue: QueueId,
    order: Order,
    n: usize,
    now: i64,
    out: &mut Vec<Claimed<R::Handle>>,
) -> Result<(), R::Error> {
    let target = out.len().saturating_add(n);
    let mut call = Call {
        order,
        now,
        wanted: n,
        excluded: Vec::new(),
        keys: 1,
        held: HashSet::new(),
        taken: HashSet::new(),
        index: HashMap::new(),
        fetched: Vec::new(),
        buffer: Vec::new(),
    };
    if n == 0 {
        return Ok(());
    }
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

struct Call<H> {
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
    index: HashMap<LaneRef, usize>,
    fetched: Vec<Fetched<H>>,
    buffer: Vec<(Row, H)>,
}

impl<H: Clone> Call<H> {
    /// Under the lock: picks, and says where in `fetched` the lane stands.
    fn pick<R: Rows<Handle = H>>(
        &mut self,
        sched: &mut Sched<'_>,
        rows: &mut R,
        queue: QueueId,
    ) -> Option<(Pick, usize)> {
        let pick = sched.pick(queue, self.now, self.order, &self.excluded)?;
        rows.picked(&pick);
        self.keys = sched.eligible_keys(queue);
        if let Some(&at) = self.index.get(&pick.lane()) {
            return Some((pick, at));
        }
        let key = sched.key_of(&pick).map(FairnessKey::into_owned);
        let lane = Lane {
            queue,
            priority: pick.priority,
            key: key.unwrap_or(FairnessKey::default_key()),
            band: pick.band,
        };
        self.index.insert(pick.lane(), self.fetched.len());
        self.fetched.push(Fetched {
            lane,
            generation: pick.generation,
            from: pick.cursor,
            rows: VecDeque::new(),
            end: false,
            asked: 0,
        });
        Some((pick, self.fetched.len() - 1))
    }

    /// Without the lock: looks at the rows, and locks the expected one if it stands first.
    fn attempt<R: Rows<Handle = H>>(
        &mut self,
        rows: &mut R,
        pick: &Pick,
        at: usize,
    ) -> Result<Outcome<H>, R::Error> {
        let Some(fetched) = self.fetched.get_mut(at) else {
            return Ok(Outcome::Retract);
        };
        fetched.fit(pick);
        let (first, clean) = loop {
            let (taken, held) = (&self.taken, &self.held);
            let skip = |row: &Row| taken.contains(&row.pos) || held.contains(&row.pos);
            let first = fetched.rows.iter().position(|(row, _)| !skip(row));
            if first.is_some() || fetched.end {
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
            // The lane's share of what is wanted, and more each time that this was too little. At least two, so that the
            // row after the claimed one becomes known with it.
            let share = self.wanted / self.keys.max(1) + 2;
            let want = share.max(2 * fetched.asked).min(FETCH);
            fetched.asked = want;
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
        let locked = rows.lock(&handle)?;
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
            Locked::Yes => Outcome::Confirm {
                row,
                handle,
                clean,
                next,
            },
            Locked::Held => Outcome::Hold { row: row.pos, next },
            Locked::Gone => {
                fetched.restart(pick.cursor);
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
                let key = self.fetched.get(at).map(|fetched| fetched.lane.key.clone());
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
