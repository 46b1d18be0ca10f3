//! What would be claimed next, without claiming: a copy of one queue, made under the board's lock, on which the claim
//! driver then runs without it.

use std::collections::HashSet;

use super::arena::{Shape, bytes_needed};
use super::claim::{self, Board, Claimed, Locked, Rows, claim};
use super::fetched::Memory;
use super::lane::{Lane, Row, RowPos};
use super::pick::{Charge, Order, Pick};
use super::records::Tier;
use super::tree::NIL;
use super::view::GroupView;
use super::{Error, QueueId, Sched};
use crate::names::{FairnessKey, Priority, QueueName, Weight};

/// Keys copied beyond those that a preview of so many rows can reach, for keys that turn out to have no rows.
const SPARE: usize = 64;

/// Memory for a copy.
#[derive(Default)]
pub struct CopyBuffer(Vec<u8>);

/// What can be claimed of one queue at an instant, copied out of its board.
pub struct Copied<'a> {
    pub sched: Sched<'a>,
    pub queue: QueueId,
    /// Whether a tier has keys that were not copied.
    cut: [bool; Priority::COUNT],
}

impl Board for Copied<'_> {
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R {
        act(&mut self.sched)
    }
}

impl Copied<'_> {
    /// Whether claims have used up all that was copied of a tier, so that a key which was left out might be next.
    fn is_exhausted(&self) -> bool {
        let queue = self.sched.queues.get(self.sched.queue_slot(self.queue));
        let mut untouched = [false; Priority::COUNT];
        let mut slot = queue.entries.first;
        while slot != NIL {
            let entry = self.sched.entries.get(slot);
            if let Some(untouched) = untouched.get_mut(usize::from(entry.tier)) {
                *untouched |= entry.in_flight == 0 && entry.lanes.iter().any(Lane::is_open);
            }
            slot = entry.siblings.next;
        }
        self.cut
            .iter()
            .zip(untouched)
            .any(|(&cut, untouched)| cut && !untouched)
    }
}

impl Sched<'_> {
    /// Copies what can be claimed of a queue, as of the last [`Sched::advance`]: of each tier the first `limit` keys in the
    /// order, and all that are behind the clock. `room`: key slots to spare, for overrides of other keys.
    pub fn extract<'b>(
        &self,
        queue: QueueId,
        limit: usize,
        room: usize,
        buffer: &'b mut CopyBuffer,
    ) -> Result<Copied<'b>, Error> {
        let record = self.queue_slot(queue);
        let source = self.queues.get(record);
        // Of a group, any key may be next.
        let limit = match source.policy.separator {
            0 => limit,
            _ => usize::MAX,
        };
        let mut cut = [false; Priority::COUNT];
        let mut keys: u32 = 0;
        for (tier, cut) in source.tiers.iter().zip(&mut cut) {
            let (count, all) = self.reach(tier, limit);
            keys = keys.saturating_add(count).min(source.eligible);
            *cut = !all;
        }
        if source.policy.separator != 0 {
            // As many groups at the most.
            keys = source.eligible.saturating_mul(2);
        }
        let keys = keys.saturating_add(u32::try_from(room).unwrap_or(u32::MAX));
        let shape = Shape::roomy(1, keys);
        let bytes = bytes_needed(shape).saturating_add(align_of::<u64>());
        buffer.0.clear();
        buffer.0.resize(bytes, 0);
        let start = buffer.0.as_ptr().align_offset(align_of::<u64>());
        let region = buffer.0.get_mut(start..).unwrap_or_default();
        let mut copied = Copied {
            sched: Sched::init_shaped(region, shape)?,
            queue: QueueId {
                slot: NIL,
                stamp: 0,
            },
            cut,
        };
        let name = std::str::from_utf8(source.name()).map(QueueName::parse);
        let Ok(Ok(name)) = name else {
            return Ok(copied);
        };
        let Ok(queue) = copied.sched.open_queue(source.scope, &name) else {
            return Ok(copied);
        };
        copied.queue = queue;
        let target = copied.sched.queues.get_mut(queue.slot);
        target.policy = source.policy;
        target.bucket = source.bucket;
        target.latest = source.latest;
        target.state = source.state;
        for (tier, target) in source.tiers.iter().zip(&mut target.tiers) {
            target.node.set_clock(tier.node.clock());
        }
        for (tier, priority) in source.tiers.iter().zip(Priority::ALL) {
            let (count, _) = self.reach(tier, limit);
            let mut left = count;
            self.each_eligible(record, priority, |slot| {
                if left > 0 {
                    copied.adopt(self, priority, slot);
                }
                left = left.saturating_sub(1);
                left > 0
            });
        }
        Ok(copied)
    }

    /// How many keys of a tier are to be copied, and whether those are all.
    fn reach(&self, tier: &Tier, limit: usize) -> (u32, bool) {
        if limit == usize::MAX {
            return (u32::MAX, true);
        }
        let (mut count, mut behind): (u32, u32) = (0, 0);
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            // All of these start at the clock, so any of them may be next, whatever their number.
            let is_behind = self.entries.get(slot).member.pass < tier.node.clock();
            if !is_behind && (count - behind) as usize >= limit {
                return (count, false);
            }
            count += 1;
            behind += u32::from(is_behind);
            slot = tier.node.next(&self.entries, slot);
        }
        (count, true)
    }
}

impl Copied<'_> {
    fn adopt(&mut self, source: &Sched<'_>, priority: Priority, slot: u32) {
        let entry = source.entries.get(slot);
        let key = source.key_text(entry.tenant);
        let (queue, latest) = (self.queue.slot, source.latest_of(entry.tenant));
        let Ok(copy) = self.sched.entry_or_new(queue, priority, &key, latest) else {
            return;
        };
        self.adopt_tenant(source, entry.tenant, self.sched.entries.get(copy).tenant);
        let target = self.sched.entries.get_mut(copy);
        target.lanes = entry.lanes;
        target.front = entry.front;
        self.stand_alone(entry.group, copy);
        self.adopt_group(source, entry.group, copy);
        self.sched.with_node(copy, |node, entries| {
            node.adopt(entries, copy, &entry.member);
        });
        self.sched.count_eligible(copy, 1);
        self.sched.settle_idle(copy, latest);
    }

    /// Copies what a claim aside from the order of a row of this key would meet, or a row that is put back: the key in all
    /// tiers, and its group in this one. What is eligible has been copied with the others; a key that the board does not know
    /// stays unknown.
    fn adopt_key(
        &mut self,
        source: &Sched<'_>,
        from: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
    ) {
        let record = source.queue_slot(from);
        for priority in Priority::ALL {
            self.adopt_sleeping(source, priority, source.find_entry(record, priority, key));
        }
        let tenant = source.find_tenant(record, key);
        if tenant != NIL
            && !source.tenants.get(tenant).has_entries()
            && let Ok(own) = self.sched.tenant_or_new(self.queue.slot, key)
        {
            self.adopt_tenant(source, tenant, own);
        }
        let group = source.group_named(record, priority, key);
        if group != NIL && self.sched.group_named(self.queue.slot, priority, key) == NIL {
            // A group is there as long as it has keys.
            let mut slot = source.queues.get(record).entries.first;
            while slot != NIL && source.entries.get(slot).group != group {
                slot = source.entries.get(slot).siblings.next;
            }
            self.adopt_sleeping(source, priority, slot);
        }
    }

    /// Copies an entry that is not eligible, if there is one.
    fn adopt_sleeping(&mut self, source: &Sched<'_>, priority: Priority, slot: u32) {
        let entry = source.entries.get(slot);
        if slot == NIL || entry.member.is_eligible() {
            return;
        }
        let key = source.key_text(entry.tenant);
        let (queue, latest) = (self.queue.slot, source.latest_of(entry.tenant));
        if self.sched.find_entry(queue, priority, &key) != NIL {
            return;
        }
        let Ok(copy) = self.sched.entry_or_new(queue, priority, &key, latest) else {
            return;
        };
        self.adopt_tenant(source, entry.tenant, self.sched.entries.get(copy).tenant);
        self.stand_alone(entry.group, copy);
        self.adopt_group(source, entry.group, copy);
        let target = self.sched.entries.get_mut(copy);
        target.lanes = entry.lanes;
        target.front = entry.front;
        target.member.pass = entry.member.pass;
        target.member.last_start = entry.member.last_start;
        self.sched.refresh(copy, latest);
    }

    /// Gives a copied key's record what the one in the source holds.
    fn adopt_tenant(&mut self, source: &Sched<'_>, from: u32, own: u32) {
        let tenant = source.tenants.get(from);
        let record = self.sched.tenants.get_mut(own);
        record.weight = tenant.weight;
        record.bucket = tenant.bucket;
        record.average = tenant.average;
        record.own_weight = tenant.own_weight;
        record.running = tenant.running;
    }

    /// An entry for whose group there was no slot stands in its tier by itself, in the copy too.
    fn stand_alone(&mut self, group: u32, copy: u32) {
        if group == NIL && self.sched.entries.get(copy).group != NIL {
            self.sched.leave_group(copy);
        }
    }

    /// Gives the group of a copied entry the state of the one in the source, once.
    fn adopt_group(&mut self, source: &Sched<'_>, group: u32, copy: u32) {
        let own = self.sched.entries.get(copy).group;
        if own == NIL || group == NIL {
            return;
        }
        let theirs = source.entries.get(group);
        let target = self.sched.entries.get_mut(own);
        if !target.keys().is_empty() {
            return;
        }
        let mut keys = target.keys();
        keys.set_clock(theirs.keys().clock());
        target.set_keys(keys);
        target.member.pass = theirs.member.pass;
        target.member.last_start = theirs.member.last_start;
        let weight = source.tenants.get(theirs.tenant).weight;
        let tenant = target.tenant;
        self.sched.tenants.get_mut(tenant).weight = weight;
    }
}

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
