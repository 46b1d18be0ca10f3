//! Finished tasks are deleted once they are older than their queue's `retention`, else `harvest_fair.retention`.

use super::{round, stopping};
use crate::board::now;
use crate::config;
use crate::policy::queues::stored;
use crate::policy::settings::Settings;
use crate::spi;
use crate::tasks::reap::{lock, tids};
use crate::tasks::statements as sql;
use crate::tasks::table::TaskTable;

/// Rows deleted by one transaction.
const BATCH: usize = 1_000;

/// Deletes what is old enough, in small transactions.
pub fn delete_finished() {
    let queues = round(|| {
        TaskTable::open().map_or_else(|_| Vec::new(), |table| table.queues_with_finished())
    });
    for queue in queues {
        while !stopping() && round(|| delete_batch(&queue)) {}
    }
}

/// Deletes one batch of a queue. True if there may be more.
fn delete_batch(queue: &str) -> bool {
    let set = Settings::read(&spi::connect(|spi| stored(spi, queue)))
        .unwrap_or_default()
        .retention;
    let Some(retention) = set.or_else(config::retention) else {
        return false;
    };
    let Ok(table) = TaskTable::open() else {
        return false;
    };
    let old = table.finished_before(queue, now().saturating_sub(retention), BATCH);
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
