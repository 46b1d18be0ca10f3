//! `fair_prune`: forgets idle keys (rule 8).

use pgrx::datum::Interval;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{self, now};
use crate::config;
use crate::names::{FairnessKey, Priority};
use crate::observe::state::of_scope;
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::claim::check_primary;
use crate::tasks::duration;
use crate::tasks::functions::queue_name;
use crate::tasks::load::ensure_loaded;
use crate::tasks::statements as sql;
use crate::tasks::table::TaskTable;

/// `fair_prune(queue, idle_for, preview)`: how many keys, each counted once a tier, are (or would be) forgotten.
#[pg_extern(sql = false)]
fn fair_prune(
    queue: Option<&str>,
    idle_for: Option<Interval>,
    preview: Option<bool>,
) -> Result<i64, ErrorReport> {
    let idle_for = match idle_for {
        Some(length) => duration("idle_for", &length, false)?,
        None => config::prune_after(),
    };
    let preview = preview.unwrap_or(false);
    check_primary("fair_prune")?;
    let catalog = Catalog::get()?;
    let queues = match queue {
        Some(name) => {
            queue_name(name)?;
            vec![(ensure_loaded(&TaskTable::open()?, name)?, name.to_owned())]
        }
        None => of_scope(catalog.scope()),
    };
    let mut forgotten = 0;
    for (queue, name) in queues {
        let mut gone = Vec::new();
        forgotten += board::with(|sched| sched.forget(queue, now(), idle_for, preview, &mut gone));
        if !preview {
            forget_snapshot(&name, &gone);
        }
    }
    Ok(forgotten as i64)
}

/// Deletes forgotten keys from the snapshot.
pub fn forget_snapshot(queue: &str, gone: &[(Priority, FairnessKey<'_>)]) {
    if gone.is_empty() {
        return;
    }
    let priorities: Vec<i16> = gone
        .iter()
        .map(|(priority, _)| i16::from(priority.get()))
        .collect();
    let keys: Vec<&str> = gone.iter().map(|(_, key)| key.as_str()).collect();
    spi::connect(|spi| {
        spi.run(
            &sql::FORGET_KEYS,
            &[
                queue.into_datum(),
                priorities.into_datum(),
                keys.into_datum(),
            ],
        );
    });
}
