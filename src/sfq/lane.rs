//! What the board believes about one lane: the pending rows of one (queue, priority, key, band), in the order
//! (scheduled_at, id). Several claimers work on a lane at once and hold no lock while they look at the table, so each
//! change here says what it is based on.
//!
//! * `cursor`: no pending, unlocked row that the board has been told of lies before it. Rows before it are gone or in
//!   the hands of a claimer, who gives them back if its transaction aborts.
//! * `head`: where the first claimable row is (`exact`), or a lower bound of that.
//! * `held`: a row at or after the cursor is locked by somebody whose intentions are unknown; picks leave the cursor
//!   where it is, until a probe that began at the cursor meets no such row.
//! * `generation`: grows whenever a row becomes visible. What a claimer saw in the table is *evidence* about the rows
//!   from its `pick.cursor` on, as of a snapshot younger than the pick. It is acted on only if no row has become
//!   visible since the pick and the lane's cursor is not before the place where the evidence begins.
//! * `seen`: claimers may remember rows that came due up to then from one call to the next.
//! * `reorders`: grows whenever such memories may lack a row. A row that becomes visible behind what anybody remembers, as
//!   most do, leaves it as it is.

/// The place of a row in its lane.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowPos {
    /// scheduled_at, in microseconds; `i64::MAX` never comes due, `i64::MIN` always is.
    pub due: i64,
    pub id: i64,
}

impl RowPos {
    pub const FIRST: RowPos = RowPos {
        due: i64::MIN,
        id: i64::MIN,
    };

    pub fn new(due: i64, id: i64) -> Self {
        RowPos { due, id }
    }

    /// The next place a row could have.
    pub fn after(self) -> Self {
        match self.id.checked_add(1) {
            Some(id) => RowPos { due: self.due, id },
            None => RowPos {
                due: self.due.saturating_add(1),
                id: i64::MIN,
            },
        }
    }

    pub fn is_due(self, now: i64) -> bool {
        self.due <= now && self.due != i64::MAX
    }
}

/// A pending row, as far as scheduling is concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub pos: RowPos,
    /// The task's own weight; a queue's override for the key goes before it.
    pub weight: Option<f64>,
}

/// What follows a row in its lane, as of the claimer's snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Next {
    /// The probe did not look that far.
    Unknown,
    /// Nothing.
    End,
    Row(Row),
}

/// See the head of this file. All-zero is a closed lane.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    pub cursor: RowPos,
    pub head: RowPos,
    /// The own weight of the head row; NaN if it has none or is not known.
    pub weight: f64,
    /// scheduled_at in microseconds.
    seen: i64,
    pub generation: u32,
    /// `reorders` above the flags.
    marks: u32,
}

const OPEN: u32 = 1;
const EXACT: u32 = 2;
const HELD: u32 = 4;
const FLAGS: u32 = OPEN | EXACT | HELD;
const REORDER: u32 = FLAGS + 1;

/// What a claimer took away from the lane under the lock: the state before and after its pick.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    before: Lane,
    after: Lane,
}

impl Taken {
    /// Where the claimer's probe begins, and so its evidence.
    pub fn cursor(&self) -> RowPos {
        self.before.cursor
    }

    pub fn expect(&self) -> RowPos {
        self.before.head
    }

    pub fn exact(&self) -> bool {
        self.before.is_exact()
    }

    pub fn generation(&self) -> u32 {
        self.before.generation
    }

    pub fn reorders(&self) -> u32 {
        self.before.reorders()
    }

    /// The own weight of the expected row.
    pub fn own_weight(&self) -> Option<f64> {
        self.before.own_weight()
    }
}

impl Lane {
    pub const CLOSED: Lane = Lane {
        cursor: RowPos { due: 0, id: 0 },
        head: RowPos { due: 0, id: 0 },
        weight: f64::NAN,
        seen: 0,
        generation: 0,
        marks: 0,
    };

    pub fn is_open(&self) -> bool {
        self.marks & OPEN != 0
    }

    pub fn is_exact(&self) -> bool {
        self.marks & EXACT != 0
    }

    pub fn is_held(&self) -> bool {
        self.marks & HELD != 0
    }

    pub fn own_weight(&self) -> Option<f64> {
        (!self.weight.is_nan()).then_some(self.weight)
    }

    fn set(&mut self, flag: u32, on: bool) {
        self.marks = if on {
            self.marks | flag
        } else {
            self.marks & !flag
        };
    }

    /// Opens the lane, with no other flag.
    fn open(&mut self) {
        self.marks = self.marks & !FLAGS | OPEN;
    }

    /// See the head of this file; it wraps around.
    pub fn reorders(&self) -> u32 {
        self.marks & !FLAGS
    }

    /// A row has become visible that came due at `due`, or any if `i64::MIN`.
    fn grow(&mut self, due: i64) {
        self.generation = self.generation.wrapping_add(1);
        if due <= self.seen {
            self.marks = self.marks.wrapping_add(REORDER);
        }
    }

    /// A claimer who made a pick, and then fetched the rows from its cursor on, will remember them up to those that came due at
    /// `until`. Says how often rows were reordered so far: the memory is good as long as that stays the same; or nothing, if a
    /// row has become visible since the pick.
    pub fn remember(&mut self, generation: u32, until: i64) -> Option<u32> {
        let unchanged = self.generation == generation;
        if unchanged {
            self.seen = self.seen.max(until);
        }
        unchanged.then(|| self.reorders())
    }

    fn head_is(&mut self, row: Row) {
        self.head = row.pos;
        self.weight = row.weight.unwrap_or(f64::NAN);
        self.set(EXACT, true);
    }

    fn head_is_not_before(&mut self, pos: RowPos) {
        self.head = pos;
        self.weight = f64::NAN;
        self.set(EXACT, false);
    }

    /// Opens the lane, or takes the cursor back, so that `row` is within reach.
    fn reach(&mut self, row: Row) {
        if !self.is_open() {
            self.open();
            self.cursor = row.pos;
            self.head_is(row);
        } else if row.pos < self.cursor {
            self.cursor = row.pos;
            self.head_is(row);
        } else if row.pos < self.head || (row.pos == self.head && self.is_exact()) {
            // An exact head gives way to an earlier row. An inexact one is only a bound, and stays one: there may be
            // rows between the cursor and this row that nobody has looked at.
            if self.is_exact() {
                self.head_is(row);
            } else {
                self.head_is_not_before(row.pos);
            }
        }
    }

    /// A pending row became visible.
    pub fn note(&mut self, row: Row) {
        self.grow(row.pos.due);
        self.reach(row);
    }

    /// Takes the head. An inexact head cannot be taken: the claimer has to look first, so nothing changes.
    pub fn take(&mut self) -> Taken {
        let before = *self;
        if self.is_exact() {
            let rest = self.head.after();
            if !self.is_held() {
                self.cursor = rest;
            }
            self.head_is_not_before(rest);
        }
        Taken {
            before,
            after: *self,
        }
    }

    /// Whether what the claimer saw still tells all there is to know from the cursor on.
    fn supports(&self, taken: &Taken) -> bool {
        self.generation == taken.generation() && self.cursor >= taken.cursor()
    }

    /// The evidence contains a row, at or after the pick's cursor, that somebody else holds.
    fn keep_held(&mut self, from: RowPos) {
        if !self.is_open() {
            self.open();
            self.cursor = from;
            self.head_is_not_before(from);
        }
        self.cursor = self.cursor.min(from);
        self.set(HELD, true);
    }

    /// A lane with a held row must not sleep until the row after it comes due: the held one may come free before, and
    /// nothing will tell.
    pub fn stay_awake_for_held(&mut self, now: i64) {
        if self.is_open() && self.is_held() && !self.head.is_due(now) {
            self.head_is_not_before(self.cursor);
        }
    }

    /// The row that was taken is locked by the claimer; `clean` if the claimer met no held row before it.
    pub fn confirm(&mut self, taken: &Taken, clean: bool, next: Next) {
        if !clean {
            self.keep_held(taken.cursor());
        }
        if !self.is_open() || !self.supports(taken) {
            return;
        }
        if clean {
            // Never past a head that somebody with a younger snapshot has found.
            let rest = taken.expect().after();
            let rest = if self.is_exact() {
                rest.min(self.head)
            } else {
                rest
            };
            self.set(HELD, false);
            self.cursor = self.cursor.max(rest);
            if !self.is_exact() {
                self.head = self.head.max(self.cursor);
            }
        }
        if self.is_exact() {
            return;
        }
        match next {
            Next::Row(row) if self.cursor <= row.pos => self.head_is(row),
            Next::End if clean => self.shut(),
            Next::Row(_) | Next::End | Next::Unknown => {}
        }
    }

    /// The first row that the claimer could try is `actual`, not what it expected.
    pub fn found(&mut self, taken: &Taken, clean: bool, actual: Row) {
        if !clean {
            self.keep_held(taken.cursor());
        } else if self.is_open() && self.supports(taken) {
            // Nothing stands before it: the row that was held is gone.
            self.set(HELD, false);
        }
        if taken.exact() && actual.pos < taken.expect() {
            // The pick itself moved the cursor past this row, so it is brought back whatever happened since.
            self.reach(actual);
            return;
        }
        if !self.is_open() || actual.pos < self.cursor {
            return;
        }
        if self.is_exact() {
            if actual.pos < self.head {
                self.head_is(actual);
            }
        } else if self.supports(taken) {
            self.head_is(actual);
        }
    }

    /// The row that was taken is locked by somebody else.
    pub fn hold(&mut self, taken: &Taken, row: RowPos, next: Next) {
        self.keep_held(row.min(taken.expect()));
        if self.is_exact() || !self.supports(taken) {
            return;
        }
        match next {
            Next::Row(next) if self.cursor <= next.pos => self.head_is(next),
            Next::Row(_) | Next::Unknown | Next::End => {}
        }
    }

    /// The claimer saw no row at all from its cursor on.
    pub fn close(&mut self, taken: &Taken) {
        if self.is_open() && !self.is_exact() && self.supports(taken) {
            self.shut();
        }
    }

    /// Somebody who looked at the table since the lane's generation was this one saw no row of the lane. True if it closed.
    pub fn close_unseen(&mut self, generation: u32) -> bool {
        let gone = self.is_open() && self.generation == generation;
        if gone {
            self.shut();
        }
        gone
    }

    /// What was seen from a place on has turned out not to be so.
    pub fn look_again(&mut self, from: RowPos) {
        self.grow(i64::MIN);
        let held = self.is_open() && self.is_held();
        self.cursor = if self.is_open() {
            self.cursor.min(from)
        } else {
            from
        };
        self.open();
        self.set(HELD, held);
        self.head_is_not_before(self.cursor);
    }

    /// Gives back what was taken, as if it never had been.
    pub fn give_back(&mut self, taken: &Taken) {
        if !taken.exact() {
            return;
        }
        if self.is_same(&taken.after) {
            let seen = self.seen;
            *self = taken.before;
            self.seen = seen;
        } else {
            self.reach(Row {
                pos: taken.expect(),
                weight: taken.before.own_weight(),
            });
        }
    }

    fn is_same(&self, other: &Lane) -> bool {
        self.cursor == other.cursor
            && self.head == other.head
            && self.generation == other.generation
            && self.marks == other.marks
            && self.weight.to_bits() == other.weight.to_bits()
    }

    fn shut(&mut self) {
        self.marks &= !FLAGS;
        self.weight = f64::NAN;
    }
}
