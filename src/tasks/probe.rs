//! A look into one lane of the task table: its first pending rows from a place on.

use std::cell::Cell;

use pgrx::pg_sys;

use super::scan_keys::{AT_LEAST, Keys};
use super::table::{TaskTable, Tid};
use crate::sfq::{Row, RowPos};

/// A lane by its index columns.
pub struct LaneKey<'a> {
    pub queue: &'a str,
    pub priority: i16,
    pub key: &'a str,
    pub band: u8,
}

thread_local! {
    /// How far apart rows of lanes come due (µs), as this session has seen them.
    static GAP: Cell<i64> = const { Cell::new(0) };
}

impl TaskTable {
    /// The first `want` pending rows of a lane at or after `from`, in order. True if the lane ends with them.
    ///
    /// An index scan checks every entry of a leaf page that may be wanted before it gives the first. So it is told not to go
    /// far beyond what is wanted, by how far rows of lanes lie apart; where that is not far enough, another scan goes on.
    pub fn probe(
        &self,
        lane: &LaneKey,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Tid)>,
    ) -> bool {
        let all = out.len() + want;
        let gap = GAP.get();
        let reach = match gap {
            0 => i64::MAX,
            _ => from
                .due
                .saturating_add(gap.saturating_mul(2 * (want as i64 + 1))),
        };
        let mut ended = self.probe_within(lane, from, reach, want, out);
        if ended && reach < i64::MAX {
            let rest = RowPos::new(reach + 1, i64::MIN);
            ended = self.probe_within(lane, rest, i64::MAX, all - out.len(), out);
        }
        let found = &out[all - want..];
        if let [(first, _), .., (last, _)] = found
            && first.pos.due > i64::MIN
            && last.pos.due < i64::MAX
        {
            let apart = last.pos.due.saturating_sub(first.pos.due) / (found.len() as i64 - 1);
            // Follows the lanes whose rows lie far apart: to look too far costs less than to look twice.
            GAP.set(apart.max(gap - gap / 16));
        }
        ended
    }

    /// Of those that are due at `reach` or before; then true if there are no more of these.
    fn probe_within(
        &self,
        lane: &LaneKey,
        from: RowPos,
        reach: i64,
        want: usize,
        out: &mut Vec<(Row, Tid)>,
    ) -> bool {
        let zero = pg_sys::InvalidOid;
        let (due, id) = (pg_sys::Datum::from(from.due), pg_sys::Datum::from(from.id));
        let keys = Keys::new()
            .text(1, lane.queue)
            .int2(2, lane.priority)
            .text(3, lane.key)
            .bool(4, lane.band != 0)
            .time_at_most(5, reach)
            .member(5, AT_LEAST, zero, pg_sys::F_TIMESTAMPTZ_CMP, due)
            .member(6, AT_LEAST, zero, pg_sys::F_BTINT8CMP, id)
            .row();
        let mut left = want;
        self.scan(self.catalog.lane, keys, |table, _| {
            out.push((table.row(), table.tid()));
            left -= 1;
            left > 0
        })
    }
}
