//! What the janitor says in the server's log: once when a state begins, not at each event of it.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::board::{self, now, shmem};
use crate::errors::{Error, quoted};
use crate::observe::state::of_scope;
use crate::sfq::Counters;

/// So many leases of a queue that run out between two rounds are a storm.
const STORM: u64 = 50;
/// A storm is over when it has been quiet for so long (µs).
const QUIET: i64 = 60_000_000;

/// A state of a queue that is worth a line in the log.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Full,
    Broken,
    Healing,
    Storm,
}

/// What has been said, and what was seen last.
#[derive(Default)]
struct Known {
    said: HashSet<(State, String)>,
    counters: HashMap<String, (u64, u64)>,
    storms: HashMap<String, i64>,
    reloads: Option<u64>,
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::new(Known::default());
}

/// Whether a state has just begun.
fn begins(state: State, queue: &str, holds: bool) -> bool {
    KNOWN.with_borrow_mut(|known| {
        let key = (state, queue.to_owned());
        if holds {
            known.said.insert(key)
        } else {
            known.said.remove(&key);
            false
        }
    })
}

fn say(level: PgLogLevel, code: PgSqlErrorCode, message: String, detail: &str, hint: &str) {
    ErrorReport::new(code, message, "harvest_fair")
        .set_detail(detail)
        .set_hint(hint)
        .report(level);
}

/// Whether a sweep had no room on the board for keys of a queue.
pub fn full(queue: &str, full: bool) {
    if begins(State::Full, queue, full) {
        say(
            PgLogLevel::WARNING,
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!(
                "no room on the board for more keys of queue {}: all {} slots are in use",
                quoted(queue),
                shmem::max_keys()
            ),
            "Their tasks wait until other keys have no work left.",
            "Raise harvest_fair.max_keys and restart the server.",
        );
    }
}

/// Whether a queue has tasks that break a rule so that no claim can find them, and which.
pub fn broken(queue: &str, rule: Option<&Error>) {
    if begins(State::Broken, queue, rule.is_some())
        && let Some(rule) = rule
    {
        say(
            PgLogLevel::WARNING,
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("tasks of queue {} cannot be claimed: {rule}", quoted(queue)),
            "They were written past the trigger zzz_admit, or changed after it.",
            "Update or delete them; harvest_fair.check() says which they are.",
        );
    }
}

/// How much a sweep has told the board of a queue that it had not been told.
pub fn healed(queue: &str, rows: usize, others: usize) {
    if begins(State::Healing, queue, rows + others > 0) {
        say(
            PgLogLevel::LOG,
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!(
                "the sweep has mended queue {} on the board: {rows} lanes of pending tasks, {others} counts, weights or settings",
                quoted(queue)
            ),
            "The board had not been told of them.",
            "Prepared transactions, sessions with session_replication_role = replica and a full board leave this to the sweep; see harvest_fair.sweep_interval.",
        );
    }
}

/// Says what has changed on the board since the last round.
pub fn look(scope: u64) {
    let reloads = shmem::reloads();
    let before = KNOWN.with_borrow_mut(|known| known.reloads.replace(reloads));
    if before.is_some_and(|before| before != reloads) {
        say(
            PgLogLevel::WARNING,
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            "the board was emptied after an internal error, and is loaded again from the tables"
                .into(),
            "No task is lost; passes go back to the last snapshot.",
            "Please report it, with what the log says just before.",
        );
    }
    for (queue, name) in of_scope(scope) {
        let Counters {
            rebases,
            expired_leases,
            ..
        } = board::with(|sched| *sched.counters(queue));
        let seen = (rebases, expired_leases);
        let before = KNOWN.with_borrow_mut(|known| known.counters.insert(name.clone(), seen));
        // A queue that has left the board counts from 0 again.
        let (rebased, expired) = before.map_or(seen, |before| {
            (
                rebases.checked_sub(before.0).unwrap_or(rebases),
                expired_leases
                    .checked_sub(before.1)
                    .unwrap_or(expired_leases),
            )
        });
        if rebased > 0 {
            say(
                PgLogLevel::LOG,
                PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
                format!("virtual time of queue {} starts again at 0", quoted(&name)),
                "No key has gained or lost anything against another.",
                "This is the usual course; if it happens often, costs are large and weights small.",
            );
        }
        storm(&name, expired);
    }
}

fn storm(queue: &str, expired: u64) {
    let until = KNOWN.with_borrow_mut(|known| {
        let until = known.storms.entry(queue.to_owned()).or_default();
        if expired > 0 {
            *until = now().saturating_add(QUIET);
        }
        *until
    });
    if expired < STORM && now() < until {
        // A storm goes on, if there is one, until it is quiet.
        return;
    }
    if begins(State::Storm, queue, expired >= STORM) {
        say(
            PgLogLevel::WARNING,
            PgSqlErrorCode::ERRCODE_WARNING,
            format!(
                "{expired} leases of queue {} have run out at once",
                quoted(queue)
            ),
            "Their tasks have been put back, and will be done again.",
            "Workers have died or are too slow: give them a longer lease, or let them call fair_extend.",
        );
    }
}
