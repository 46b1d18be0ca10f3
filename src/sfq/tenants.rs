//! What an observer sees of each key of a queue, over all its priorities.

use super::lane::Lane;
use super::records::{GROUP, QueueRec, Tenant};
use super::tree::NIL;
use super::view::{Waiting, waiting_for};
use super::{QueueId, QueueState, Sched, Tally};
use crate::names::FairnessKey;

/// One key of a queue.
#[derive(Clone, Debug)]
pub struct TenantView<'s> {
    pub queue: QueueId,
    pub key: FairnessKey<'s>,
    /// The queue's override, else the own weight of a row of the key, else 1.
    pub weight: f64,
    pub running: i32,
    pub tally: Tally,
    /// The key has a row that can be claimed now.
    pub eligible: bool,
    /// Why it has none, though it has rows.
    pub waiting_for: Option<Waiting>,
    /// scheduled_at of its first due row, or a lower bound of it while a claim of the key is under way.
    pub head_due: Option<i64>,
    /// The name and the weight of its group.
    pub group: Option<(FairnessKey<'s>, f64)>,
}

impl TenantView<'_> {
    /// Whether it takes part in what is shared: it has a row that can be claimed, or was served a moment ago.
    pub fn is_active(&self, now: i64) -> bool {
        self.eligible || self.tally.lately(now) > 0.0
    }
}

impl Sched<'_> {
    /// Calls `visit` for the keys of the loaded queues of a scope, as of `now`; not for what is only a group or an override. It
    /// looks at so many records from number `from` on, and says where to go on, if there are more.
    pub fn tenants(
        &mut self,
        scope: u64,
        now: i64,
        (from, most): (u32, u32),
        mut visit: impl FnMut(TenantView<'_>),
    ) -> Option<u32> {
        for slot in self.queues.slots(&self.header.free_queues) {
            let queue = self.queues.get(slot);
            if from == 0 && queue.stamp != 0 && queue.scope == scope {
                let stamp = queue.stamp;
                self.advance(QueueId { slot, stamp }, now);
            }
        }
        let last = *self.tenants.slots(&self.header.free_tenants).end();
        let next = from.saturating_add(most);
        for slot in from.max(1)..next.min(last.saturating_add(1)) {
            let tenant = self.tenants.get(slot);
            let queue = self.queues.get(tenant.queue);
            let loaded = queue.queue_state() == QueueState::Loaded;
            if tenant.queue == NIL || queue.scope != scope || !loaded {
                continue;
            }
            let view = self.tenant_view(queue, slot, tenant, now);
            if let Some(view) = view {
                visit(view);
            }
        }
        (next <= last).then_some(next)
    }

    fn tenant_view(
        &self,
        queue: &QueueRec,
        slot: u32,
        tenant: &Tenant,
        now: i64,
    ) -> Option<TenantView<'_>> {
        let mut own_weight = None;
        let (mut eligible, mut waiting, mut head_due) = (false, None, None);
        // Its entries are in groups of the same name.
        let (mut one_of_them, mut entries) = (NIL, 0);
        for &at in tenant.entries.iter().filter(|at| **at != NIL) {
            let entry = self.entries.get(at);
            if entry.is(GROUP) {
                continue;
            }
            entries += 1;
            one_of_them = at;
            eligible |= entry.member.is_eligible() && queue.is_open();
            waiting = waiting.max(waiting_for(queue, tenant, entry));
            for lane in entry.lanes.iter().filter(|lane| lane.is_open()) {
                own_weight = own_weight.or(Lane::own_weight(lane));
                if lane.head.is_due(now) && lane.head.due != i64::MIN {
                    let due = lane.head.due;
                    head_due = Some(head_due.map_or(due, |first: i64| first.min(due)));
                }
            }
        }
        if entries == 0 && tenant.running == 0 && tenant.tally.is_empty() {
            return None;
        }
        let latest = Some(f64::from(tenant.own_weight)).filter(|weight| !weight.is_nan());
        let group = self.group_view(queue, one_of_them);
        Some(TenantView {
            queue: QueueId {
                slot: tenant.queue,
                stamp: queue.stamp,
            },
            key: self.key_text(slot),
            weight: self.weight_in_force(slot, own_weight.or(latest)),
            running: tenant.running,
            tally: tenant.tally,
            eligible,
            waiting_for: waiting.filter(|_| !eligible),
            head_due,
            group: group.map(|group| (group.name, group.weight)),
        })
    }
}
