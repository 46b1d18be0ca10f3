//! What an observer sees.

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
