//! What would be claimed next, without claiming: a copy of one queue, made under the board's lock, on which the claim
//! driver then runs without it.

use super::claim::{Board, Claimed, Rows, claim};
use super::lane::Lane;
use super::pick::Order;
use super::records::Tier;
use super::tree::NIL;
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
        let bytes = Sched::bytes_needed(1, keys).saturating_add(align_of::<u64>());
        buffer.0.clear();
        buffer.0.resize(bytes, 0);
        let start = buffer.0.as_ptr().align_offset(align_of::<u64>());
        let region = buffer.0.get_mut(start..).unwrap_or_default();
        let mut copied = Copied {
            sched: Sched::init(region, 1, keys)?,
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
        let mut count: u32 = 0;
        let mut slot = tier.node.first(&self.entries);
        while slot != NIL {
            let behind = self.entries.get(slot).member.pass < tier.node.clock();
            if count as usize >= limit && !behind {
                return (count, false);
            }
            count += 1;
            slot = tier.node.next(&self.entries, slot);
        }
        (count, true)
    }
}

impl Copied<'_> {
    fn adopt(&mut self, source: &Sched<'_>, priority: Priority, slot: u32) {
        let entry = source.entries.get(slot);
        let tenant = source.tenants.get(entry.tenant);
        let key = FairnessKey::trusted(tenant.key());
        let (queue, latest) = (self.queue.slot, source.latest_of(entry.tenant));
        let Ok(copy) = self.sched.entry_or_new(queue, priority, &key, latest) else {
            return;
        };
        let own = self.sched.entries.get(copy).tenant;
        let record = self.sched.tenants.get_mut(own);
        record.weight = tenant.weight;
        record.bucket = tenant.bucket;
        record.average = tenant.average;
        record.own_weight = tenant.own_weight;
        record.running = tenant.running;
        let target = self.sched.entries.get_mut(copy);
        target.lanes = entry.lanes;
        target.front = entry.front;
        let (group, own_group) = (entry.group, target.group);
        if group != NIL && own_group != NIL {
            let keys = source.entries.get(group).keys();
            let target = self.sched.entries.get_mut(own_group);
            if target.keys().is_empty() {
                let mut own = target.keys();
                own.set_clock(keys.clock());
                target.set_keys(own);
                target.member.pass = source.entries.get(group).member.pass;
                let weight = source.tenants.get(source.entries.get(group).tenant).weight;
                let own_tenant = target.tenant;
                self.sched.tenants.get_mut(own_tenant).weight = weight;
            }
        }
        self.sched.with_node(copy, |node, entries| {
            node.adopt(entries, copy, &entry.member);
        });
        self.sched.count_eligible(copy, 1);
        self.sched.settle_idle(copy, latest);
    }
}

/// Makes the claims that go before the order, on a copy, and says how many they were.
pub type Aside<'f> = dyn FnMut(&mut Sched<'_>, QueueId) -> usize + 'f;

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
    let (room, aside) = aside;
    let room = room.saturating_add(weights.len());
    // By due time, any key may be next.
    let mut limit = match order {
        Order::Fair => n.saturating_add(SPARE),
        Order::Due => usize::MAX,
    };
    loop {
        let mut buffer = CopyBuffer::default();
        let copied = board.with(|sched| {
            sched.advance(queue, now);
            if sched.policy(queue).aging > 0 {
                limit = usize::MAX;
            }
            sched.extract(queue, limit, room, &mut buffer)
        });
        let Ok(mut copied) = copied else {
            return Ok(());
        };
        for (key, weight) in weights {
            // There is room: it was asked for.
            let _ = copied.sched.set_override(copied.queue, key, *weight);
        }
        let before = out.len();
        let queue = copied.queue;
        let first = aside(&mut copied.sched, queue);
        claim(
            &mut copied,
            rows,
            queue,
            order,
            n.saturating_sub(first),
            now,
            out,
        )?;
        if !copied.is_exhausted() {
            return Ok(());
        }
        out.truncate(before);
        limit = limit.saturating_mul(8);
    }
}
