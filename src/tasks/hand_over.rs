//! Handing over: rows that a claim has locked and charged become a worker's.

use std::collections::HashMap;

use pgrx::IntoDatum;
use pgrx::pg_sys;

use super::catalog::column;
use super::reap::{tid, tids};
use super::statements as sql;
use super::table::{TaskTable, Tid};
use super::write::{Writer, show_changes};
use super::{admit, timestamp};
use crate::board::{OnCommit, QueueRef, effects, shmem};
use crate::sfq::{Claimed, Order, QueueId};
use crate::spi;

/// Columns of harvest_fair.claimed_task.
pub const RESULT_COLUMNS: usize = 12;
/// Those of the task itself, which [`sql::CLAIM_ONE`] returns too.
const RESULTS: [usize; RESULT_COLUMNS - 2] = [
    column::ID,
    column::QUEUE,
    column::FAIRNESS_KEY,
    column::PRIORITY,
    column::PAYLOAD,
    column::ATTEMPT,
    column::LEASE,
    column::LEASE_UNTIL,
    column::SCHEDULED_AT,
    column::PARENT_ID,
];
/// What a claim changes, as [`sql::CLAIM_ONE`] does.
const CHANGED: [usize; 8] = [
    column::STATE,
    column::WORKER,
    column::ATTEMPT,
    column::LEASE,
    column::LEASE_UNTIL,
    column::STARTED_AT,
    column::FINISHED_AT,
    column::CHARGED,
];
/// A row of the result, alive until the call returns.
pub type ResultRow = ([pg_sys::Datum; RESULT_COLUMNS], [bool; RESULT_COLUMNS]);

/// Rows that are locked and charged, on their way to a worker.
pub struct HandOver<'a> {
    pub table: &'a TaskTable,
    pub queue: QueueId,
    pub name: &'a QueueRef,
    pub worker: &'a str,
    /// The instant of the claim (µs).
    pub now: i64,
    pub order: Order,
}

impl HandOver<'_> {
    /// Hands the rows over and gives them out in pick order.
    pub fn over(&self, claimed: &[Claimed<Tid>], emit: &mut impl FnMut(&mut ResultRow)) {
        let lease_until = self.now.saturating_add(shmem::extras(self.queue).lease());
        effects::on_commit(OnCommit::LeaseDue {
            queue: self.name.clone(),
            at: lease_until,
        });
        match Writer::open(self.table, CHANGED) {
            Some(writer) => self.directly(&writer, claimed, lease_until, emit),
            None => self.by_statement(claimed, lease_until, emit),
        }
        show_changes();
    }

    /// What a claim costs, as the task keeps it. Without fairness nothing is charged, so there is nothing to correct or undo
    /// later.
    fn charged(&self, cost: f64) -> spi::Arg {
        (self.order == Order::Fair).then_some(cost).into_datum()
    }

    /// Row by row. Must say the same as the statements.
    fn directly(
        &self,
        writer: &Writer<{ CHANGED.len() }>,
        claimed: &[Claimed<Tid>],
        lease_until: i64,
        emit: &mut impl FnMut(&mut ResultRow),
    ) {
        let worker = self.worker.into_datum();
        for claim in claimed {
            if !writer.read(claim.handle) {
                continue;
            }
            let attempt = self.table.get(column::ATTEMPT).unwrap_or(0i32);
            let lease = self.table.get(column::LEASE).unwrap_or(0i64);
            writer.write([
                self.table.catalog.running.into_datum(),
                worker,
                attempt.saturating_add(1).into_datum(),
                lease.saturating_add(1).into_datum(),
                Some(timestamp(lease_until)),
                Some(timestamp(self.now)),
                None,
                self.charged(claim.charged),
            ]);
            emit(&mut result_row(|i| writer.datum(RESULTS[i]), claim));
        }
    }

    /// In one UPDATE for all that cost the same.
    fn by_statement(
        &self,
        claimed: &[Claimed<Tid>],
        lease_until: i64,
        emit: &mut impl FnMut(&mut ResultRow),
    ) {
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
                let datum = |i| batches[batch].datum(place, i as i32 + 1);
                emit(&mut result_row(datum, claim));
            }
        });
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
                let until = Some(timestamp(lease_until));
                let args = [
                    rows,
                    self.worker.into_datum(),
                    until,
                    Some(timestamp(self.now)),
                    self.charged(cost),
                ];
                admit::while_claiming(|| spi.run(statement, &args))
            })
            .collect()
    }
}

/// A row of harvest_fair.claimed_task: columns of the updated row, then weight and lag as of the pick.
fn result_row(of_row: impl Fn(usize) -> Option<pg_sys::Datum>, claim: &Claimed<Tid>) -> ResultRow {
    let mut result = (
        [pg_sys::Datum::from(0); RESULT_COLUMNS],
        [true; RESULT_COLUMNS],
    );
    let of_row = (0..RESULTS.len()).map(|i| (i, of_row(i)));
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
