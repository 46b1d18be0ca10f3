//! Rows of the task table that break the rules: written with triggers off, or changed by a trigger that fires last.

use std::collections::HashMap;

use super::differences::Difference;
use crate::tasks::catalog::column;
use crate::tasks::rules;
use crate::tasks::table::TaskTable;

/// One row for each key and rule, of those that wait or run: of those that wait in order, the first of each lane is looked at.
pub fn look(table: &TaskTable) -> Vec<Difference> {
    let mut found = HashMap::new();
    for queue in table.queues() {
        let mut see = |row: &TaskTable| {
            let Some(rule) = rules::broken(row) else {
                return;
            };
            let key: String = row.get(column::FAIRNESS_KEY).unwrap_or_default();
            let priority = row.get::<i16>(column::PRIORITY);
            let id = row.get::<i64>(column::ID).unwrap_or_default();
            let rule = rule.to_string();
            found
                .entry((queue.clone(), priority, key, rule))
                .or_insert(id);
        };
        table.walk_lanes(&queue, |_, _, _, _| see(table));
        table.leases(&queue, |row| {
            see(row);
            true
        });
        table.pins(&queue, |_, _| see(table));
    }
    let difference = |((queue, priority, key, rule), id)| Difference {
        queue: Some(queue),
        priority,
        key: Some(key),
        what: "rule".into(),
        on_board: None,
        in_table: Some(format!("task {id}: {rule}")),
        stamp: 0,
    };
    found.into_iter().map(difference).collect()
}
