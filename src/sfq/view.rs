//! What an observer sees, and the check of all invariants that the tests run after every step.

use super::gate::{Gate, gate_of};
use super::group::group_name;
use super::lane::Lane;
use super::records::{DIRTY, Entry, GROUP, IDLE, QueueRec, TIMED, Tenant};
use super::text::chunks_for;
use super::tree::NIL;
use super::wake::{Survey, survey};
use super::{EntryId, QueueId, Sched, Ticks};
use crate::names::{FairnessKey, Priority};

/// One key in one tier.
#[derive(Clone, Debug)]
pub struct EntryView<'s> {
    pub priority: Priority,
    pub key: FairnessKey<'s>,
    /// The queue's override, else the own weight of the key's first known row, else 1.
    pub weight: f64,
    pub pass: Ticks,
    pub last_start: Ticks,
    /// The tier's clock.
    pub clock: Ticks,
    /// `pass - clock`; never below zero for an eligible key.
    pub lag: Ticks,
    /// Of the key in all tiers of the queue.
    pub running: i32,
    pub eligible: bool,
    /// Why it is not; `None` also if it has no row.
    pub waiting_for: Option<Waiting>,
    /// Its group, if the queue has a separator.
    pub group: Option<GroupView<'s>>,
    /// scheduled_at of the first row that is due, or a lower bound of it while a claim of this key is under way.
    pub head_due: Option<i64>,
    /// When the next sleeping lane of the key wakes.
    pub wake: Option<i64>,
    pub in_flight: u32,
    pub dirty: bool,
}

/// Why a key with rows is not eligible. Of a key with rows in several priorities, the last of these that holds says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waiting {
    /// Its rows are not due yet.
    Future,
    /// The key or the queue has no token.
    Rate,
    /// The key is at its cap of running tasks.
    Cap,
    /// The queue is paused.
    Paused,
}

impl Waiting {
    /// As `fair_state` names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Waiting::Paused => "paused",
            Waiting::Cap => "cap",
            Waiting::Rate => "rate",
            Waiting::Future => "future",
        }
    }
}

/// The group of a key, in the key's tier (rule 9). The entry's own pass and lag are those within the group.
#[derive(Clone, Debug)]
pub struct GroupView<'s> {
    pub name: FairnessKey<'s>,
    pub weight: f64,
    pub pass: Ticks,
    /// The tier's clock; the entry's own `clock` is the group's.
    pub clock: Ticks,
    pub lag: Ticks,
}

/// What [`Sched::take_dirty`] gives: a row of key_state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyEntry {
    pub priority: Priority,
    pub key: FairnessKey<'static>,
    pub pass: Ticks,
    pub last_start: Ticks,
}

/// How full the board is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub max_queues: u32,
    pub queues: u32,
    pub max_keys: u32,
    /// Keys, each counted once per queue.
    pub keys: u32,
    /// Keys in tiers, each counted once per tier.
    pub entries: u32,
    /// Those that could be evicted.
    pub idle: u32,
}

impl Sched<'_> {
    pub fn usage(&self) -> Usage {
        Usage {
            max_queues: self.header.max_queues,
            queues: self.header.free_queues.in_use,
            max_keys: self.header.max_keys,
            keys: self.header.free_tenants.in_use,
            entries: self.header.free_entries.in_use,
            idle: self.header.idle_count,
        }
    }

    /// The clock of a tier.
    pub fn clock(&self, queue: QueueId, priority: Priority) -> Ticks {
        let queue = self.queues.get(self.queue_slot(queue));
        queue
            .tiers
            .get(priority.index())
            .map_or(Ticks::ZERO, |tier| tier.node.clock())
    }

    /// Calls `visit` for every key in every tier of the queue, in no particular order. O(the queue's keys).
    pub fn entries(&self, queue: QueueId, mut visit: impl FnMut(EntryView<'_>)) {
        let queue = self.queues.get(self.queue_slot(queue));
        let mut slot = queue.entries.first;
        while slot != NIL {
            if let Some(view) = self.entry_view(queue, slot) {
                visit(view);
            }
            slot = self.entries.get(slot).siblings.next;
        }
    }

    fn entry_view(&self, queue: &QueueRec, slot: u32) -> Option<EntryView<'_>> {
        let entry = self.entries.get(slot);
        let tenant = self.tenants.get(entry.tenant);
        let node = self.node_of(slot);
        let (clock, start) = (node.clock(), node.start_of(&entry.member));
        let eligible = entry.member.is_eligible();
        let front = entry
            .lanes
            .get(usize::from(entry.front))
            .filter(|lane| lane.is_open());
        // A key that is held back has a first row, too.
        let first = if eligible {
            front
        } else {
            let due = survey(entry, &queue.policy, queue.latest).front;
            due.and_then(|(_, band)| entry.lanes.get(usize::from(band)))
        };
        Some(EntryView {
            priority: *Priority::ALL.get(usize::from(entry.tier))?,
            key: self.key_text(entry.tenant),
            weight: self.weight_in_force(entry.tenant, front.and_then(Lane::own_weight)),
            pass: entry.member.pass,
            last_start: entry.member.last_start,
            clock,
            lag: if eligible {
                start.minus(clock)
            } else {
                entry.member.pass.minus(clock)
            },
            running: tenant.running,
            eligible: eligible && queue.is_open(),
            waiting_for: waiting_for(queue, tenant, entry),
            group: self.group_view(queue, slot),
            head_due: first.map(|lane| lane.head.due),
            wake: entry.is(TIMED).then_some(entry.wake),
            in_flight: entry.in_flight,
            dirty: entry.is(DIRTY),
        })
    }

    /// The group that a key of a tier is in, or would be in.
    pub(super) fn group_named(&self, queue: u32, priority: Priority, key: &FairnessKey<'_>) -> u32 {
        let separator = self.queues.get(queue).policy.separator;
        if separator == 0 {
            return NIL;
        }
        let name = FairnessKey::trusted(group_name(key.as_bytes(), separator));
        let tenant = self.tenants.get(self.find_tenant(queue, &name));
        let slot = *tenant.entries.get(priority.index()).unwrap_or(&NIL);
        let entry = self.entries.get(slot);
        if entry.is(GROUP) { slot } else { entry.group }
    }

    /// The group of a key in a tier, as a claim would find it: one that the board does not know starts at the clock.
    pub fn group_of(
        &self,
        queue: QueueId,
        priority: Priority,
        key: &FairnessKey<'_>,
    ) -> Option<GroupView<'static>> {
        let record = self.queue_slot(queue);
        let queue = self.queues.get(record);
        let separator = queue.policy.separator;
        let slot = match self.find_entry(record, priority, key) {
            NIL => self.group_named(record, priority, key),
            slot => self.entries.get(slot).group,
        };
        let clock = queue.tiers.get(priority.index())?.node.clock();
        let pass = self.entries.get(slot).member.pass.max(clock);
        let name = group_name(key.as_bytes(), separator);
        (separator != 0).then(|| GroupView {
            name: FairnessKey::trusted(name).into_owned(),
            weight: self.weight_in_force(self.entries.get(slot).tenant, None),
            pass: if slot == NIL { clock } else { pass },
            clock,
            lag: if slot == NIL {
                Ticks::ZERO
            } else {
                pass.minus(clock)
            },
        })
    }

    /// The group of an entry as its latest claim found it, if nothing has happened in it since.
    pub(super) fn group_at_claim(&self, entry: EntryId) -> Option<GroupView<'static>> {
        let slot = self.entry_slot(entry);
        let queue = self
            .queues
            .get(self.tenants.get(self.entries.get(slot).tenant).queue);
        let view = self.group_view(queue, slot)?;
        let start = self
            .entries
            .get(self.entries.get(slot).group)
            .member
            .last_start;
        Some(GroupView {
            name: view.name.into_owned(),
            pass: start,
            lag: start.minus(view.clock),
            ..view
        })
    }

    /// Every invariant of the whole structure. O(everything); for tests and for doubt.
    pub fn check(&self) -> Result<(), String> {
        let mut entries = 0;
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            if queue.stamp != 0 {
                entries += self
                    .check_queue(slot, queue)
                    .map_err(|fault| format!("queue {slot}: {fault}"))?;
            }
        }
        equal("entries in use", entries, self.header.free_entries.in_use)?;
        self.check_idle()?;
        self.check_tenants()
    }

    pub(super) fn check_queue(&self, slot: u32, queue: &QueueRec) -> Result<u32, String> {
        let (mut count, mut dirty, mut timed) = (0, 0, 0);
        let mut in_tier = [(0, 0, 0); Priority::COUNT];
        let (mut at, mut before) = (queue.entries.first, NIL);
        while at != NIL {
            let entry = self.entries.get(at);
            let tenant = self.tenants.get(entry.tenant);
            let of_tenant = tenant.entries.get(usize::from(entry.tier)).copied();
            if entry.siblings.prev != before || tenant.queue != slot || of_tenant != Some(at) {
                return Err(format!("entry {at} is linked wrongly"));
            }
            if entry.is(DIRTY) && dirty != count {
                return Err(format!("dirty entry {at} stands behind a clean one"));
            }
            self.check_entry(at)
                .map_err(|fault| format!("entry {at}: {fault}"))?;
            count += 1;
            dirty += u32::from(entry.is(DIRTY));
            timed += u32::from(entry.is(TIMED));
            if let Some((all, direct, eligible)) = in_tier.get_mut(usize::from(entry.tier)) {
                *all += 1;
                *direct += u32::from(entry.member.is_eligible() && entry.group == NIL);
                *eligible += u32::from(entry.member.is_eligible());
            }
            before = at;
            at = entry.siblings.next;
        }
        equal("last entry", queue.entries.last, before)?;
        equal("entries", queue.entry_count, count)?;
        equal("dirty entries", queue.dirty_count, dirty)?;
        equal("timers", queue.timers.len(), timed)?;
        queue.timers.check(&self.entries)?;
        let (mut of_queue, mut groups) = (0, 0);
        for (index, (tier, (all, direct, eligible))) in queue.tiers.iter().zip(in_tier).enumerate()
        {
            equal("entries of a tier", tier.entries, all)?;
            tier.node.check(&self.entries)?;
            let mut members = direct;
            for group in self.groups_of(slot, index) {
                groups += 1;
                members += self
                    .check_group(queue, group)
                    .map_err(|fault| format!("group {group}: {fault}"))?;
            }
            equal("members of a tier", tier.node.len(), members)?;
            of_queue += eligible;
        }
        equal("eligible entries", queue.eligible, of_queue)?;
        count += groups;
        Ok(count)
    }

    /// 1 if the group is eligible, else 0.
    fn check_group(&self, queue: &QueueRec, group: u32) -> Result<u32, String> {
        let entry = self.entries.get(group);
        let keys = entry.keys();
        keys.check(&self.entries)?;
        let (mut count, mut eligible, mut at) = (0, 0, queue.entries.first);
        while at != NIL {
            let key = self.entries.get(at);
            if key.group == group {
                count += 1;
                eligible += u32::from(key.member.is_eligible());
                let name = self.key_text(key.tenant);
                let name = group_name(name.as_bytes(), queue.policy.separator);
                let of_group = self.key_text(entry.tenant);
                if key.tier != entry.tier || name != of_group.as_bytes() {
                    return Err(format!("entry {at} belongs elsewhere"));
                }
            }
            at = key.siblings.next;
        }
        equal("keys", entry.in_flight, count)?;
        equal("eligible keys", keys.len(), eligible)?;
        if entry.member.is_eligible() == keys.is_empty() || !entry.is(GROUP) {
            return Err("eligible without keys, or the other way round".into());
        }
        let head = entry.member.head();
        let expected = (self.hopeful_rank(&keys), keys.oldest(&self.entries));
        if !keys.is_empty() && (head.rank, head.due) != expected {
            return Err("does not stand where its first keys do".into());
        }
        Ok(u32::from(entry.member.is_eligible()))
    }

    fn check_entry(&self, slot: u32) -> Result<(), String> {
        let entry = self.entries.get(slot);
        for lane in entry.lanes.iter().filter(|lane| lane.is_open()) {
            if lane.head < lane.cursor {
                return Err(format!(
                    "head {:?} is before cursor {:?}",
                    lane.head, lane.cursor
                ));
            }
        }
        let front = entry.lanes.get(usize::from(entry.front));
        if entry.member.is_eligible() && !front.is_some_and(Lane::is_open) {
            return Err("eligible without an open lane".into());
        }
        if entry.is(IDLE) == entry.has_work() {
            return Err("idle with work, or neither".into());
        }
        if !entry.is(IDLE) && entry.is(TIMED) != (entry.wake != i64::MAX) {
            return Err("timer and wake-up time differ".into());
        }
        let sleeps = entry
            .lanes
            .iter()
            .any(|lane| lane.is_open() && lane.head.due != i64::MAX);
        let tenant = self.tenants.get(entry.tenant);
        let gate = gate_of(self.queues.get(tenant.queue), tenant);
        let asleep = entry.is(TIMED) || matches!(gate, Gate::Capped | Gate::Limited(i64::MAX));
        if sleeps && !asleep && !entry.member.is_eligible() {
            return Err("has open lanes but is neither eligible nor asleep".into());
        }
        if entry.member.is_eligible() && gate != Gate::Open {
            return Err(format!("eligible, but held back: {gate:?}"));
        }
        Ok(())
    }

    fn check_idle(&self) -> Result<(), String> {
        let (mut count, mut at) = (0, self.header.idle.first);
        while at != NIL {
            let entry = self.entries.get(at);
            if !entry.is(IDLE) {
                return Err(format!(
                    "entry {at} stands in the idle list but is not idle"
                ));
            }
            count += 1;
            if count > self.header.idle_count {
                break;
            }
            at = entry.timer.right;
        }
        equal("idle entries", self.header.idle_count, count)
    }

    fn check_tenants(&self) -> Result<(), String> {
        let (mut used, mut chained, mut chunks) = (0, 0, 0);
        for slot in self.tenants.slots(&self.header.free_tenants) {
            let tenant = self.tenants.get(slot);
            if tenant.queue == NIL {
                continue;
            }
            used += 1;
            let parts = chunks_for(tenant.key_len.into());
            if self.chunks_of(tenant) != parts {
                return Err(format!("the key of record {slot} is cut off"));
            }
            chunks += parts as u32;
            if !tenant.has_entries() && tenant.weight.is_nan() && tenant.running == 0 {
                return Err(format!("key record {slot} is kept for nothing"));
            }
        }
        for &head in self.tenant_heads.iter() {
            let mut at = head;
            while at != NIL && chained <= used {
                chained += 1;
                at = self.tenants.get(at).chain;
            }
        }
        equal("chunks in use", self.header.free_chunks.in_use, chunks)?;
        equal("key records in use", self.header.free_tenants.in_use, used)?;
        equal("key records in hash chains", chained, used)
    }
}

/// Why a key is not eligible, as of the last [`Sched::advance`].
pub(super) fn waiting_for(queue: &QueueRec, tenant: &Tenant, entry: &Entry) -> Option<Waiting> {
    let Survey { front, wake } = survey(entry, &queue.policy, queue.latest);
    if front.is_none() {
        return (wake != i64::MAX).then_some(Waiting::Future);
    }
    if queue.policy.paused != 0 {
        return Some(Waiting::Paused);
    }
    match gate_of(queue, tenant) {
        Gate::Capped => Some(Waiting::Cap),
        Gate::Limited(_) => Some(Waiting::Rate),
        Gate::Open => (!queue.is_open()).then_some(Waiting::Rate),
    }
}

fn equal(what: &str, stored: u32, counted: u32) -> Result<(), String> {
    if stored == counted {
        Ok(())
    } else {
        Err(format!("{what}: {stored} stored, {counted} counted"))
    }
}
