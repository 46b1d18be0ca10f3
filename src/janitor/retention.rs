//! Finished tasks are deleted once they are older than their queue's `retention`, else `harvest_fair.retention`.

use std::cell::RefCell;
use std::collections::HashMap;

use super::guard::{guarded, of_queue, round};
use super::stopping;
use crate::board::now;
use crate::config;
use crate::policy::queues::stored;
use crate::policy::settings::Settings;
use crate::spi;
use crate::subtransaction::{failure, try_out};
use crate::tasks::reap::{lock, tids};
use crate::tasks::statements as sql;
use crate::tasks::table::{TaskTable, Tid};

/// Rows deleted by one transaction.
const BATCH: usize = 1_000;

thread_local! {
    /// How many of a queue's oldest tasks could not be deleted the last time.
    static STUCK: RefCell<HashMap<String, usize>> = RefCell::default();
}

/// Deletes what is old enough, in small transactions.
pub fn delete_finished() {
    let queues = round(|| {
        TaskTable::open().map_or_else(|_| Vec::new(), |table| table.queues_with_finished())
    });
    for queue in queues {
        guarded(&of_queue("delete finished tasks", &queue), || {
            while !stopping() && round(|| delete_batch(&queue)) {}
        });
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
    let stuck = STUCK.with_borrow(|stuck| stuck.get(queue).copied().unwrap_or(0));
    let want = BATCH + stuck;
    let old = table.finished_before(queue, now().saturating_sub(retention), want);
    // What somebody holds is deleted another time.
    let rows = lock(&table, &old);
    if rows.is_empty() {
        return false;
    }
    let kept = match try_out(|| delete(&rows)).map_err(failure) {
        Ok(()) => 0,
        Err(_) => delete_what_can_go(queue, &rows, stuck),
    };
    STUCK.with_borrow_mut(|stuck| stuck.insert(queue.to_owned(), kept));
    old.len() == want && kept < rows.len()
}

fn delete(rows: &[Tid]) {
    spi::connect(|spi| {
        spi.run(&sql::DELETE_FINISHED, &[tids(rows)]);
    });
}

/// A row that is referred to, or that a trigger protects, must not keep the others. Returns how many stay.
fn delete_what_can_go(queue: &str, rows: &[Tid], stuck: usize) -> usize {
    let (mut kept, mut why) = (0, String::new());
    for row in rows {
        let one = std::slice::from_ref(row);
        if let Err(message) = try_out(|| delete(one)).map_err(failure) {
            kept += 1;
            why = message;
        }
    }
    // Once for as long as it lasts.
    if stuck == 0 && kept > 0 {
        pgrx::ereport!(
            pgrx::PgLogLevel::WARNING,
            pgrx::PgSqlErrorCode::ERRCODE_WARNING,
            format!("harvest_fair: finished tasks of queue {queue:?} cannot be deleted: {kept}"),
            format!(
                "{why}; a foreign key to harvest_fair.task needs ON DELETE CASCADE or SET NULL"
            )
        );
    }
    kept
}
