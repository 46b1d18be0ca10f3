//! One ordered set of members with a clock of its own: start-time fair queuing (DESIGN.md section 3, rules 1, 3, 4, 5
//! and 6). It knows neither lanes nor queues. A tier is a node of keys today; with groups it becomes a node of groups,
//! each of which is again a node of keys, which is why the members are reached through a trait.

use super::ticks::Ticks;
use super::tree::{Links, NIL, Nodes, Tree};

/// Breaks ties between equal passes: claim-order due time, then id, of a member's head.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub due: i64,
    pub id: i64,
}

impl Rank {
    pub const FIRST: Rank = Rank {
        due: i64::MIN,
        id: i64::MIN,
    };
    pub const LAST: Rank = Rank {
        due: i64::MAX,
        id: i64::MAX,
    };
}

/// What places an eligible member beside its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub rank: Rank,
    /// As [`Member::due`].
    pub due: i64,
}

/// What a node keeps in each of its members, eligible or not.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Member {
    /// Where the member may start next, in virtual time.
    pub pass: Ticks,
    /// Where its latest charge started.
    pub last_start: Ticks,
    pub rank: Rank,
    /// Since when its oldest row is due; `i64::MAX` if rows do not age.
    pub due: i64,
    /// The smallest `due` in its subtree of the order.
    pub oldest: i64,
    pub links: Links,
    /// 1 while the member stands in the node's order.
    queued: u32,
}

impl Member {
    /// A member is in the node's order exactly while it is eligible.
    pub fn is_eligible(&self) -> bool {
        self.queued != 0
    }

    pub fn head(&self) -> Head {
        Head {
            rank: self.rank,
            due: self.due,
        }
    }
}

/// Access to a node's members by slot.
pub trait Members {
    fn member(&self, slot: u32) -> &Member;
    fn member_mut(&mut self, slot: u32) -> &mut Member;
}

/// The order (pass, rank) among eligible members.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByPass;

impl<M: Members> Nodes<ByPass> for M {
    type Key = (Ticks, Rank);

    fn key(&self, slot: u32) -> Self::Key {
        let member = self.member(slot);
        (member.pass, member.rank)
    }

    fn links(&self, slot: u32) -> &Links {
        &self.member(slot).links
    }

    fn links_mut(&mut self, slot: u32) -> &mut Links {
        &mut self.member_mut(slot).links
    }

    fn begin(&mut self, leaf: u32) {
        let member = self.member_mut(leaf);
        member.oldest = member.due;
    }

    fn absorb(&mut self, slot: u32, child: u32) -> bool {
        let oldest = self.member(child).oldest;
        let member = self.member_mut(slot);
        let lower = oldest < member.oldest;
        if lower {
            member.oldest = oldest;
        }
        lower
    }

    fn rotated(&mut self, up: u32, down: u32) {
        let oldest = self.member(down).oldest;
        self.member_mut(up).oldest = oldest;
        self.summarise(down);
    }

    fn summarise(&mut self, slot: u32) -> bool {
        let Member {
            due, oldest, links, ..
        } = *self.member(slot);
        // Where nothing ages there is nothing to do, nor a child to be looked at.
        if oldest == i64::MAX {
            return false;
        }
        let mut smallest = due;
        for child in [links.left, links.right] {
            if child != NIL {
                smallest = smallest.min(self.member(child).oldest);
            }
        }
        self.member_mut(slot).oldest = smallest;
        smallest != oldest
    }
}

/// What a charge did, and what it takes to undo it without a trace.
#[derive(Clone, Copy, Debug)]
pub struct Charged {
    pub start: Ticks,
    pub step: Ticks,
    /// The clock after the clock rule.
    pub clock: Ticks,
    clock_before: Ticks,
    pass_before: Ticks,
    last_start_before: Ticks,
    sequence: u32,
}

impl Charged {
    pub fn lag(&self) -> Ticks {
        self.start.minus(self.clock)
    }
}

/// The clock and the order of the eligible members. All-zero is an empty node at clock 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    clock: Ticks,
    pub(super) order: Tree<ByPass>,
    /// Grows with every join and charge, so that a charge that is taken back at once can restore the clock.
    sequence: u32,
    pad: u32,
}

impl Node {
    pub fn clock(&self) -> Ticks {
        self.clock
    }

    /// How many members are eligible.
    pub fn len(&self) -> u32 {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The member that is next, or [`NIL`].
    pub fn first(&self, members: &impl Members) -> u32 {
        self.order.first(members)
    }

    /// The one after it.
    pub fn next(&self, members: &impl Members, slot: u32) -> u32 {
        self.order.next(members, slot)
    }

    /// Rule 1: a member becomes eligible. Idle time earns no credit.
    pub fn join(&mut self, members: &mut impl Members, slot: u32, head: Head) {
        self.touch();
        let member = members.member_mut(slot);
        member.pass = member.pass.max(self.clock);
        member.rank = head.rank;
        member.due = head.due;
        member.queued = 1;
        self.order.insert(members, slot);
    }

    /// Takes over an eligible member of another node as it is.
    pub fn adopt(&mut self, members: &mut impl Members, slot: u32, other: &Member) {
        *members.member_mut(slot) = Member {
            links: Links::default(),
            ..*other
        };
        self.order.insert(members, slot);
    }

    /// The member is no longer eligible; it keeps its pass.
    pub fn leave(&mut self, members: &mut impl Members, slot: u32) {
        self.order.remove(members, slot);
        members.member_mut(slot).queued = 0;
    }

    /// An eligible member's head has changed.
    pub fn rerank(&mut self, members: &mut impl Members, slot: u32, head: Head) {
        let pass = members.member(slot).pass;
        self.place(members, slot, pass, head);
    }

    /// Where a charge of this member would start. Only a member whose rows others held when the clock moved on can be
    /// behind it: it could not be claimed then, so it is as if it had left, and joins again.
    pub fn start_of(&self, member: &Member) -> Ticks {
        member.pass.max(self.clock)
    }

    /// The same, for good: a row of this member has become claimable.
    pub fn lift(&mut self, members: &mut impl Members, slot: u32) {
        if members.member(slot).is_eligible() {
            let start = self.start_of(members.member(slot));
            self.set_pass(members, slot, start);
        }
    }

    /// Rules 3 and 4 for a claim in lag order. The chosen member has the smallest pass of all that can be claimed, so
    /// the clock follows it. `head` is its head now that the former one has been taken.
    pub fn claim(
        &mut self,
        members: &mut impl Members,
        slot: u32,
        step: Ticks,
        head: Head,
    ) -> Charged {
        let clock_before = self.clock;
        self.clock = self.start_of(members.member(slot));
        Charged {
            clock_before,
            ..self.charge_and_rank(members, slot, step, head)
        }
    }

    /// Rule 4 alone, for a charge out of lag order: the clock stays where it is. A member that is not eligible is
    /// charged from the clock at least, as if it had joined.
    pub fn charge(&mut self, members: &mut impl Members, slot: u32, step: Ticks) -> Charged {
        let head = members.member(slot).head();
        self.charge_and_rank(members, slot, step, head)
    }

    fn charge_and_rank(
        &mut self,
        members: &mut impl Members,
        slot: u32,
        step: Ticks,
        head: Head,
    ) -> Charged {
        self.touch();
        let start = self.start_of(members.member(slot));
        let member = members.member_mut(slot);
        let (pass_before, last_start_before) = (member.pass, member.last_start);
        member.last_start = start;
        self.place(members, slot, start.plus(step), head);
        Charged {
            start,
            step,
            clock: self.clock,
            clock_before: self.clock,
            pass_before,
            last_start_before,
            sequence: self.sequence,
        }
    }

    /// Takes back a claim that came to nothing. If nothing else has happened in the node, as if it never had been,
    /// clock included; else as [`Node::undo`].
    pub fn retract(&mut self, members: &mut impl Members, slot: u32, charged: &Charged) {
        if self.sequence == charged.sequence {
            self.touch();
            self.clock = charged.clock_before;
            self.set_pass(members, slot, charged.pass_before);
        } else {
            self.undo(members, slot, charged.step);
        }
        let member = members.member_mut(slot);
        if member.last_start == charged.start {
            member.last_start = charged.last_start_before;
        }
    }

    /// Rule 5: takes back a charge, but never below the clock, which stays.
    pub fn undo(&mut self, members: &mut impl Members, slot: u32, step: Ticks) {
        self.touch();
        let pass = members.member(slot).pass.minus(step).max(self.clock);
        self.set_pass(members, slot, pass);
    }

    /// Rule 6, when a task turned out dearer than it was charged.
    pub fn add(&mut self, members: &mut impl Members, slot: u32, step: Ticks) {
        self.touch();
        let pass = members.member(slot).pass;
        self.set_pass(members, slot, pass.plus(step));
    }

    /// Sets a pass, eligible or not, and keeps the order.
    pub fn set_pass(&mut self, members: &mut impl Members, slot: u32, pass: Ticks) {
        let head = members.member(slot).head();
        self.place(members, slot, pass, head);
    }

    fn place(&mut self, members: &mut impl Members, slot: u32, pass: Ticks, head: Head) {
        let member = members.member(slot);
        if (member.pass, member.head()) == (pass, head) {
            return;
        }
        let queued = member.is_eligible();
        if queued {
            self.order.remove(members, slot);
        }
        let member = members.member_mut(slot);
        member.pass = pass;
        member.rank = head.rank;
        member.due = head.due;
        if queued {
            self.order.insert(members, slot);
        }
    }

    /// Sets the clock of a node whose state is being restored.
    pub fn set_clock(&mut self, clock: Ticks) {
        self.touch();
        self.clock = clock;
    }

    /// The node as plain numbers, to be kept where there is room.
    pub fn to_words(self) -> [i64; 3] {
        let pair = |high: u32, low: u32| (u64::from(high) << 32 | u64::from(low)) as i64;
        [
            self.clock.get(),
            pair(self.order.root(), self.order.len()),
            i64::from(self.sequence),
        ]
    }

    pub fn from_words([clock, order, sequence]: [i64; 3]) -> Self {
        Node {
            clock: Ticks::new(clock),
            order: Tree::from_parts((order as u64 >> 32) as u32, order as u32),
            sequence: sequence as u32,
            pad: 0,
        }
    }

    /// Every invariant of the node, for tests.
    pub fn check(&self, members: &impl Members) -> Result<(), String> {
        self.order.check(members)?;
        let (mut smallest, mut slot) = (i64::MAX, self.first(members));
        while slot != NIL {
            smallest = smallest.min(members.member(slot).due);
            slot = self.next(members, slot);
        }
        if self.oldest(members) == smallest {
            Ok(())
        } else {
            Err(format!("oldest {} stored", self.oldest(members)))
        }
    }

    fn touch(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }
}
