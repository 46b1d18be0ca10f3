//! Pinned rows: pending tasks that wait for one worker.

use super::catalog::column;
use super::scan_keys::Keys;
use super::table::{TaskTable, Tid};
use crate::board::stored_priority;
use crate::names::Priority;
use crate::sfq::Row;

/// When a pin without an end ends. One before the far end of time: there are pinned rows to look for.
pub const NEVER: i64 = i64::MAX - 1;

/// A row that waits for one worker.
#[derive(Clone)]
pub struct PinnedRow {
    pub tid: Tid,
    pub row: Row,
    pub priority: Priority,
    pub key: String,
    pub band: u8,
}

/// When a pin ends: NULL and 'infinity' are for good.
pub fn end_of_pin(sticky_until: Option<i64>) -> i64 {
    sticky_until.map_or(NEVER, |until| until.min(NEVER))
}

impl TaskTable {
    /// Pinned pending rows of one worker in a queue that are due by `now`, at most `want` of each priority, those
    /// that have been due for longest.
    pub fn pinned(&self, queue: &str, worker: &str, now: i64, want: usize) -> Vec<PinnedRow> {
        let mut found = Vec::new();
        for priority in 1..=5i16 {
            let mut left = want;
            let keys = Keys::new()
                .text(1, queue)
                .text(2, worker)
                .int2(3, priority)
                .time_at_most(4, now);
            self.scan(self.catalog.pinned, keys, |table, _| {
                let row = table.row();
                let key = table.get(column::FAIRNESS_KEY).unwrap_or_default();
                found.push(PinnedRow {
                    tid: table.tid(),
                    row,
                    priority: stored_priority(priority),
                    key,
                    band: u8::from(table.get(column::NEW_START).unwrap_or(false)),
                });
                left -= 1;
                left > 0
            });
        }
        found
    }

    /// When the next pinned row of one worker in a queue comes due after a point in time; `i64::MAX`: never.
    pub fn next_pinned(&self, queue: &str, worker: &str, after: i64) -> i64 {
        let mut next = i64::MAX;
        for priority in 1..=5i16 {
            let keys = Keys::new()
                .text(1, queue)
                .text(2, worker)
                .int2(3, priority)
                .time_after(4, after);
            self.scan(self.catalog.pinned, keys, |table, _| {
                next = next.min(table.row().pos.due);
                false
            });
        }
        next
    }

    /// Visits the end of the pin of each pinned row of a queue.
    pub fn pins(&self, queue: &str, mut each: impl FnMut(Tid, i64)) {
        self.scan(
            self.catalog.pinned,
            Keys::new().text(1, queue),
            |table, _| {
                each(table.tid(), end_of_pin(table.micros(column::STICKY_UNTIL)));
                true
            },
        );
    }
}
