//! Handing over: rows that a claim has locked and charged become a worker's, in one UPDATE.

use std::collections::HashMap;

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::reap::{tid, tids};
use super::statements as sql;
use super::table::Tid;
use super::{admit, timestamp};
use crate::board::{OnCommit, QueueRef, effects, shmem};
use crate::sfq::{Claimed, Order, QueueId};
use crate::spi;

/// Columns of harvest_fair.claimed_task.
pub const RESULT_COLUMNS: usize = 12;
/// A row of the result, alive until the call returns.
pub type ResultRow = ([pg_sys::Datum; RESULT_COLUMNS], [bool; RESULT_COLUMNS]);

/// Rows that are locked and charged, on their way to a worker.
pub struct HandOver<'a> {
    pub queue: QueueId,
    pub name: &'a QueueRef,
    pub worker: &'a str,
    /// The instant of the claim (µs).
    pub now: i64,
    pub order: Order,
}

impl HandOver<'_> {
    /// Hands the rows over, in one UPDATE for all that cost the same, and gives them out in pick order.
    pub fn over(&self, claimed: &[Claimed<Tid>], emit: &mut impl FnMut(&mut ResultRow)) {
        let lease_until = self.now.saturating_add(shmem::extras(self.queue).lease());
        effects::on_commit(OnCommit::LeaseDue {
            queue: self.name.clone(),
            at: lease_until,
        });
        spi::connect(|spi| {
            let batches = self.update(spi, claimed, lease_until);
            let mut places: HashMap<i64, (usize, usize)> = HashMap::new();
            for (batch, rows) in batches.iter().enumerate() {
                places.extend(
                    (0..rows.len()).filter_map(|i| Some((rows.get::<i64>(i, 1)?, (batch, i)))),
                );
            }
            for claim in claimed {
                // A user's own trigger may have kept a row back.
                let Some(&(batch, place)) = places.get(&claim.row.pos.id) else {
                    continue;
                };
                emit(&mut result_row(&batches[batch], place, claim));
            }
        });
        // SAFETY: a further claim in the same statement must see these rows as taken.
        unsafe { pg_sys::CommandCounterIncrement() };
    }

    fn update<'s>(
        &self,
        spi: &'s spi::Spi,
        claimed: &[Claimed<Tid>],
        lease_until: i64,
    ) -> Vec<spi::Rows<'s>> {
        let mut costs: Vec<f64> = claimed.iter().map(|c| c.charged).collect();
        costs.sort_by(f64::total_cmp);
        costs.dedup();
        costs
            .into_iter()
            .map(|cost| {
                let same: Vec<Tid> = claimed
                    .iter()
                    .filter(|c| c.charged == cost)
                    .map(|c| c.handle)
                    .collect();
                let (statement, rows) = match same.as_slice() {
                    [one] => (&sql::CLAIM_ONE, tid(one)),
                    many => (&sql::CLAIM_MANY, tids(many)),
                };
                // Without fairness nothing is charged, so there is nothing to correct or undo later.
                let charged = (self.order == Order::Fair).then_some(cost).into_datum();
                let until = Some(timestamp(lease_until));
                let args = [
                    rows,
                    self.worker.into_datum(),
                    until,
                    Some(timestamp(self.now)),
                    charged,
                ];
                admit::while_claiming(|| spi.run(statement, &args))
            })
            .collect()
    }
}

/// A row of harvest_fair.claimed_task: the updated row, with weight and lag as of the pick.
fn result_row(rows: &spi::Rows, place: usize, claim: &Claimed<Tid>) -> ResultRow {
    let mut result = (
        [pg_sys::Datum::from(0); RESULT_COLUMNS],
        [true; RESULT_COLUMNS],
    );
    let of_row =
        (0..RESULT_COLUMNS - 2).map(|column| (column, rows.datum(place, column as i32 + 1)));
    let of_pick = [
        (RESULT_COLUMNS - 2, claim.weight.into_datum()),
        (RESULT_COLUMNS - 1, claim.lag.units().into_datum()),
    ];
    for (column, datum) in of_row.chain(of_pick) {
        if let Some(datum) = datum {
            result.0[column] = datum;
            result.1[column] = false;
        }
    }
    result
}
