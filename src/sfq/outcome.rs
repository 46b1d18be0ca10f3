//! What came of a pick. A pick happens under the board's lock; then the claimer, holding no lock, looks at the lane's rows
//! and tries to lock the one it was told to expect; then it reports exactly one outcome:
//!
//! | the claimer | reports |
//! | --- | --- |
//! | locked the expected row | [`Sched::confirm`], and when its transaction ends [`Sched::kept`] or [`Sched::undo`] |
//! | saw another row first | [`Sched::found`] |
//! | saw no row at all | [`Sched::close`] |
//! | could not lock the expected row | [`Sched::hold`] |
//! | lost the row in between, or failed | [`Sched::retract`] |

use super::lane::{Lane, Next, Row, RowPos, Taken};
use super::pick::{Charge, LaneRef, Pick};
use super::tree::NIL;
use super::{EntryId, Sched, Ticks};
use crate::names::FairnessKey;

impl Sched<'_> {
    /// The key of a pick, for the caller to look for its rows; `None` if the pick is stale.
    pub fn key_of(&self, pick: &Pick) -> Option<FairnessKey<'_>> {
        let slot = self.live(pick.epoch, pick.entry);
        (slot != NIL).then(|| self.key_text(self.entries.get(slot).tenant))
    }

    /// The expected row has been locked. `clean`: no row from `pick.cursor` on is held by somebody else. `next`:
    /// what follows it, as of the claimer's snapshot.
    pub fn confirm(&mut self, pick: &Pick, clean: bool, next: Next, now: i64) {
        self.update_lane(pick, now, |lane, taken| lane.confirm(taken, clean, next));
    }

    /// The first row that could be tried is `actual`, not the expected one; `clean` as in [`Sched::confirm`], for the
    /// rows before `actual`. What was charged is taken back.
    pub fn found(&mut self, pick: &Pick, clean: bool, actual: Row, now: i64) {
        self.take_back(pick, now);
        self.update_lane(pick, now, |lane, taken| lane.found(taken, clean, actual));
    }

    /// No row was seen from `pick.cursor` on. What was charged is taken back.
    pub fn close(&mut self, pick: &Pick, now: i64) {
        self.take_back(pick, now);
        self.update_lane(pick, now, |lane, taken| lane.close(taken));
    }

    /// The expected row is held by somebody else, so the cursor stays at it; `next` is the row after it that could
    /// be tried. What was charged is taken back.
    pub fn hold(&mut self, pick: &Pick, row: RowPos, next: Next, now: i64) {
        self.take_back(pick, now);
        self.update_lane(pick, now, |lane, taken| lane.hold(taken, row, next));
    }

    /// The pick came to nothing: everything is given back.
    pub fn retract(&mut self, pick: &Pick, now: i64) {
        self.take_back(pick, now);
        self.update_lane(pick, now, |lane, taken| lane.give_back(taken));
    }

    /// The claim's transaction has committed.
    pub fn kept(&mut self, charge: &Charge, now: i64) {
        let slot = self.live(charge.epoch, charge.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        self.counters(charge.queue).claims += 1;
        let tenant = self.entries.get(slot).tenant;
        let waited = charge.at.saturating_sub(charge.row.pos.due);
        let tally = &mut self.tenants.get_mut(tenant).tally;
        tally.claimed(waited, charge.served(), now);
        self.settle_idle(slot, now);
    }

    /// The claim's transaction, or its savepoint, has aborted (rule 5): the row is pending again.
    pub fn undo(&mut self, charge: &Charge, now: i64) {
        let slot = self.live(charge.epoch, charge.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        if charge.step != Ticks::ZERO {
            self.take_off(slot, charge.step, charge.group_step);
            self.counters(charge.queue).refunds += 1;
        }
        let tenant = self.entries.get(slot).tenant;
        self.stop_running(tenant, now);
        self.return_key_token(tenant, now);
        self.note_row(slot, charge.band, charge.row, now);
    }

    /// See [`Lane::remember`].
    pub fn remember(&mut self, pick: &Pick, until: i64) -> Option<u32> {
        let slot = self.live(pick.epoch, pick.entry);
        self.lane_mut(slot, pick.band)?
            .remember(pick.generation, until)
    }

    /// The transaction of a claimer that saw its own changes in a lane has aborted: from the cursor of its picks on, the rows may
    /// be others than it has reported. A lane that the board has forgotten meanwhile is found by the sweep.
    pub fn look_again(&mut self, epoch: u64, lane: LaneRef, from: RowPos, now: i64) {
        let slot = self.live(epoch, lane.entry);
        if slot == NIL {
            return;
        }
        if let Some(lane) = self.lane_mut(slot, lane.band) {
            lane.look_again(from);
        }
        self.woken(slot, from, now);
    }

    /// The slot of an entry that a pick or charge refers to, [`NIL`] if that is stale.
    fn live(&self, epoch: u64, entry: EntryId) -> u32 {
        if epoch == self.epoch() {
            self.entry_slot(entry)
        } else {
            NIL
        }
    }

    fn land(&mut self, slot: u32) {
        let entry = self.entries.get_mut(slot);
        entry.in_flight = entry.in_flight.saturating_sub(1);
    }

    fn take_back(&mut self, pick: &Pick, now: i64) {
        let slot = self.live(pick.epoch, pick.entry);
        if slot == NIL {
            return;
        }
        self.land(slot);
        // Before the key may join again: a join would be in the way of an exact retraction.
        if let Some(charged) = pick.charged {
            self.with_node(slot, |node, entries| node.retract(entries, slot, &charged));
            if let Some(charged) = pick.group_charged {
                self.with_group(slot, |tier, entries, group| {
                    tier.retract(entries, group, &charged);
                });
            }
            self.mark_dirty_slot(slot);
        }
        if pick.exact {
            let slot = self.entries.get(slot).tenant;
            let tenant = self.tenants.get_mut(slot);
            let [before, after] = pick.tokens;
            if tenant.bucket.is_same(&after) {
                // Not a token more is due, whatever the weights of the rows.
                tenant.own_weight = pick.own_weight_before;
                tenant.bucket = before;
                self.stop_running(slot, now);
            } else {
                self.stop_running(slot, now);
                self.return_key_token(slot, now);
            }
        }
    }

    fn update_lane(&mut self, pick: &Pick, now: i64, update: impl FnOnce(&mut Lane, &Taken)) {
        let slot = self.live(pick.epoch, pick.entry);
        if let Some(lane) = self.lane_mut(slot, pick.band) {
            update(lane, &pick.taken);
            lane.stay_awake_for_held(now);
            self.refresh(slot, now);
        }
    }
}
