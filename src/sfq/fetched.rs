//! Rows of lanes that a claimer has fetched, kept from one call to the next: most claims need no look at the index then.
//!
//! What was seen of a lane is evidence as long as nothing has become visible in it, which its generation tells, and as the
//! lane's cursor is not before the place where the look began. Rows may have gone meanwhile: that shows when they are locked.
//! Rows that become visible are mostly later than those that are remembered, up to [`Kept::until`]: then these stay evidence.

use std::collections::{HashMap, VecDeque};

use super::Sched;
use super::claim::Lane;
use super::lane::{Row, RowPos};
use super::pick::{LaneRef, Pick};

/// Rows fetched at once, at most.
const FETCH: usize = 64;
/// Lanes remembered, at most.
const LANES: usize = 1_024;
/// How long rows are remembered (µs): one that the board was not told of must not be overlooked for longer.
const LIFETIME: i64 = 1_000_000;

/// What a session remembers of the lanes that it has looked at. `H` names a row version.
pub struct Memory<H> {
    index: HashMap<LaneRef, usize>,
    lanes: Vec<Fetched<H>>,
}

/// Rows of one lane.
pub(super) struct Fetched<H> {
    pub lane: Lane,
    generation: u32,
    kept: Option<Kept>,
    /// Where the look began, or the cursor of a later pick.
    from: RowPos,
    /// When it began (µs).
    at: i64,
    pub rows: VecDeque<(Row, H)>,
    /// The lane ends with them.
    pub end: bool,
    /// How many of the rows were claimed since some were last fetched.
    claimed: usize,
}

/// What the board has been told of the rows that are remembered, and has answered.
#[derive(Clone, Copy)]
struct Kept {
    /// See [`super::lane`].
    reorders: u32,
    /// Rows that came due up to then (µs) are meant.
    until: i64,
}

impl<H> Default for Memory<H> {
    fn default() -> Self {
        Memory {
            index: HashMap::new(),
            lanes: Vec::new(),
        }
    }
}

impl<H> Memory<H> {
    /// Makes room, between two calls.
    pub(super) fn begin(&mut self) {
        if self.lanes.len() >= LANES {
            self.index.clear();
            self.lanes.clear();
        }
    }

    /// Where the lane of a pick stands; `lane` names it if it is not known yet. (The number of an entry is never given again,
    /// not even after the board was wiped.)
    pub(super) fn place(&mut self, pick: &Pick, now: i64, lane: impl FnOnce() -> Lane) -> usize {
        let next = self.lanes.len();
        let at = *self.index.entry(pick.lane()).or_insert(next);
        if at == next {
            self.lanes.push(Fetched {
                lane: lane(),
                generation: pick.generation,
                kept: None,
                from: pick.cursor,
                at: now,
                rows: VecDeque::new(),
                end: false,
                claimed: 0,
            });
        }
        at
    }

    pub(super) fn get(&self, at: usize) -> Option<&Fetched<H>> {
        self.lanes.get(at)
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Fetched<H>> {
        self.lanes.get_mut(at)
    }
}

impl<H> Fetched<H> {
    /// Drops what says nothing about what `pick` asks, or is no longer needed.
    pub fn fit(&mut self, pick: &Pick, now: i64) {
        let age = now.saturating_sub(self.at);
        if self.from > pick.cursor || !(0..=LIFETIME).contains(&age) {
            self.restart(pick.cursor, now);
        } else if self.generation != pick.generation {
            match self.kept.filter(|kept| kept.reorders == pick.reorders) {
                Some(kept) => self.forget_after(kept.until),
                None => self.restart(pick.cursor, now),
            }
        }
        self.generation = pick.generation;
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

    pub fn restart(&mut self, from: RowPos, now: i64) {
        self.from = from;
        self.at = now;
        self.rows.clear();
        self.end = false;
        self.kept = None;
    }

    /// Rows may have become visible that are due later.
    fn forget_after(&mut self, until: i64) {
        let known = self.rows.partition_point(|(row, _)| row.pos.due <= until);
        self.rows.truncate(known);
        self.end = false;
    }

    /// Under the lock, when a pick's outcome is reported: tells the board what is remembered.
    pub fn keep(&mut self, sched: &mut Sched<'_>, pick: &Pick, now: i64) {
        let Some((last, _)) = self.rows.back() else {
            return;
        };
        // Later rows come and go before they are due, and there are often such, of tasks that have failed; whoever remembered
        // those would have to forget with each new task.
        let until = last.pos.due.min(now);
        if let Some(reorders) = sched.remember(pick, until) {
            self.kept = Some(Kept { reorders, until });
        }
    }

    /// Where to fetch on.
    pub fn rest(&self, pick: &Pick) -> RowPos {
        self.rows
            .back()
            .map_or(pick.cursor, |(row, _)| row.pos.after())
    }

    /// How many rows to fetch: those that are wanted of the lane, or twice as many as were claimed of the last ones. Rows that
    /// other claimers take are not worth fetching.
    pub fn next_fetch(&mut self, share: usize) -> usize {
        share.max(2 * std::mem::take(&mut self.claimed)).min(FETCH)
    }

    /// Takes out a row that is being claimed.
    pub fn take(&mut self, at: usize) -> Option<(Row, H)> {
        self.claimed += 1;
        self.rows.remove(at)
    }
}
