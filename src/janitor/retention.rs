//! Finished tasks are deleted once they are older than `harvest_fair.retention`.

use crate::board::now;
use crate::config;
use crate::spi;
use crate::tasks::reap::{lock, tids};
use crate::tasks::statements as sql;
use crate::tasks::table::TaskTable;

/// Rows deleted by one transaction.
const BATCH: usize = 1_000;

/// Deletes one batch. True if there may be more.
pub fn delete_batch() -> bool {
    let Some(retention) = config::retention() else {
        return false;
    };
    let Ok(table) = TaskTable::open() else {
        return false;
    };
    let old = table.finished_before(now().saturating_sub(retention), BATCH);
    // What somebody holds is deleted another time.
    let rows = lock(&table, &old);
    if rows.is_empty() {
        return false;
    }
    spi::connect(|spi| {
        spi.run(&sql::DELETE_FINISHED, &[tids(&rows)]);
    });
    old.len() == BATCH
}
