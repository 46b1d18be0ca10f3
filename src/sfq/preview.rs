//! What would be claimed next, without claiming: the claim driver runs on a copy, without the board's lock.

use std::collections::HashSet;

use super::claim::{self, Board, Claimed, Locked, Rows, claim};
use super::copy::{Copied, CopyBuffer, SPARE};
use super::fetched::Memory;
use super::lane::{Row, RowPos};
use super::pick::{Charge, Order, Pick};
use super::view::GroupView;
use super::{Error, QueueId, Sched};
use crate::names::{FairnessKey, Priority, Weight};

/// Rows that earlier claims of the same preview have taken are passed over: the table still shows them.
struct Untaken<'r, R> {
    rows: &'r mut R,
    taken: HashSet<RowPos>,
}

impl<R: Rows> Rows for Untaken<'_, R> {
    type Error = R::Error;
    type Handle = R::Handle;

    fn probe(
        &mut self,
        lane: &claim::Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, R::Handle)>,
    ) -> Result<bool, R::Error> {
        let (before, mut from) = (out.len(), from);
        loop {
            let seen = out.len();
            let end = self.rows.probe(lane, from, want, out)?;
            let last = out.last().filter(|_| out.len() > seen);
            let rest = last.map(|(row, _)| row.pos.after());
            out.retain(|(row, _)| !self.taken.contains(&row.pos));
            match rest {
                Some(rest) if !end && out.len() == before => from = rest,
                _ => return Ok(end),
            }
        }
    }

    fn lock(
        &mut self,
        lane: &claim::Lane,
        row: &Row,
        handle: &R::Handle,
    ) -> Result<Locked, R::Error> {
        self.rows.lock(lane, row, handle)
    }

    fn picked(&mut self, pick: &Pick) {
        self.rows.picked(pick);
    }

    fn settled(&mut self, charge: Option<Charge>) {
        self.rows.settled(charge);
    }
}

/// Makes the claims that go before the order, on a copy, and says how many they were.
pub type Aside<'f> = dyn FnMut(&mut Sched<'_>, QueueId) -> usize + 'f;
/// A claim of a preview; and where its group, if the key is in one, stood at the claim: its pass and lag are those at which
/// the claim started.
pub type Foreseen<H> = (Claimed<H>, Option<GroupView<'static>>);
/// A row that a claim would first put back into its lane.
pub type PutBack<'k> = (Priority, FairnessKey<'k>, u8, Row);

/// The next `n` claims of a queue at the instant `now`, exactly as [`claim`] would make them, under hypothetical weights:
/// `None` unsets. `rows` shows the rows; what it locks and is told to remember means nothing. `aside` makes the claims that
/// go before the order (pinned rows) on the copy, which has room for as many more keys as `weights` names and `aside`
/// announces, and says how many they were; it may be called more than once.
#[allow(clippy::too_many_arguments)]
pub fn preview<B: Board, R: Rows>(
    board: &mut B,
    rows: &mut R,
    queue: QueueId,
    order: Order,
    n: usize,
    now: i64,
    weights: &[(FairnessKey<'_>, Option<Weight>)],
    aside: (usize, &mut Aside<'_>),
    out: &mut Vec<Claimed<R::Handle>>,
) -> Result<(), R::Error> {
    let mut foreseen = Vec::new();
    let (room, claims) = aside;
    let aside: (_, _, &[PutBack<'_>], _) = (room, &[][..], &[], claims);
    Copied::foresee(
        board,
        rows,
        queue,
        order,
        n,
        now,
        weights,
        aside,
        &mut foreseen,
    )?;
    out.extend(foreseen.into_iter().map(|(claimed, _)| claimed));
    Ok(())
}

impl Copied<'_> {
    /// As [`preview`]. `aside`: for how many further keys to leave room; the keys of which the claims that go before the order
    /// may take rows; the rows that a claim would first put back; and what makes the claims that go before the order.
    #[allow(clippy::too_many_arguments)]
    pub fn foresee<B: Board, R: Rows>(
        board: &mut B,
        rows: &mut R,
        queue: QueueId,
        order: Order,
        n: usize,
        now: i64,
        weights: &[(FairnessKey<'_>, Option<Weight>)],
        (room, keys, put_back, aside): (
            usize,
            &[(Priority, FairnessKey<'_>)],
            &[PutBack<'_>],
            &mut Aside<'_>,
        ),
        out: &mut Vec<Foreseen<R::Handle>>,
    ) -> Result<(), R::Error> {
        let mut named: Vec<(Priority, &FairnessKey<'_>)> = put_back
            .iter()
            .map(|(priority, key, ..)| (*priority, key))
            .chain(keys.iter().map(|(priority, key)| (*priority, key)))
            .collect();
        named.sort();
        named.dedup();
        // Each may stand in all tiers, and bring a group or, where it is new, another key of its group along.
        let room = room + weights.len() + (2 * Priority::COUNT + 2) * named.len();
        // By due time, any key may be next; and where some are copied by name, others may stand between them and the first.
        let mut limit = match order {
            Order::Fair if named.is_empty() => n.saturating_add(SPARE),
            _ => usize::MAX,
        };
        loop {
            let mut buffer = CopyBuffer::default();
            let copied = board.with(|sched| {
                sched.advance(queue, now);
                if sched.policy(queue).aging > 0 {
                    limit = usize::MAX;
                }
                let mut copied = sched.extract(queue, limit, room, &mut buffer)?;
                for (priority, key) in &named {
                    copied.adopt_key(sched, queue, *priority, key);
                }
                Ok::<_, Error>(copied)
            });
            let Ok(mut copied) = copied else {
                return Ok(());
            };
            for (key, weight) in weights {
                // There is room: it was asked for.
                let _ = copied.sched.set_override(copied.queue, key, *weight);
            }
            for (priority, key, band, row) in put_back {
                let own = copied.queue;
                let _ = copied.sched.note(own, *priority, key, *band, *row, now);
            }
            let before = out.len();
            let first = aside(&mut copied.sched, copied.queue);
            copied.claims(rows, order, n.saturating_sub(first), now, out)?;
            if !copied.is_exhausted() {
                return Ok(());
            }
            out.truncate(before);
            limit = limit.saturating_mul(8);
        }
    }

    fn claims<R: Rows>(
        &mut self,
        rows: &mut R,
        order: Order,
        n: usize,
        now: i64,
        out: &mut Vec<Foreseen<R::Handle>>,
    ) -> Result<(), R::Error> {
        let queue = self.queue;
        let mut claimed = Vec::new();
        if self.sched.policy(queue).separator.is_none() {
            let mut memory = Memory::default();
            claim(self, rows, &mut memory, queue, order, n, now, &mut claimed)?;
            out.extend(claimed.into_iter().map(|claimed| (claimed, None)));
            return Ok(());
        }
        // One by one, to see where the group stands at each.
        let mut untaken = Untaken {
            rows,
            taken: HashSet::new(),
        };
        for _ in 0..n {
            // What it remembers would tell of rows that the table shows and this preview has taken.
            let mut memory = Memory::default();
            claim(
                self,
                &mut untaken,
                &mut memory,
                queue,
                order,
                1,
                now,
                &mut claimed,
            )?;
            let Some(claimed) = claimed.pop() else { break };
            untaken.taken.insert(claimed.row.pos);
            let group = self.sched.group_at_claim(claimed.charge.entry);
            out.push((claimed, group.filter(|_| order == Order::Fair)));
        }
        Ok(())
    }
}
