//! The janitor's transactions: if one of its duties fails, as by an error of a user's own trigger, the others go on, and so
//! does the same duty for the other queues.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;

use pgrx::PgTryBuilder;
use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;

use crate::errors::quoted;
use crate::subtransaction::failure;

thread_local! {
    /// The duties that failed when they were last done, and why.
    static FAILING: RefCell<HashMap<String, String>> = RefCell::default();
}

/// Does something that may fail; then its transaction is undone, and the answer says why.
fn tried(f: impl FnOnce()) -> Result<(), String> {
    let undo = |cause: CaughtError| {
        // SAFETY: the duty's transaction is the one that failed, and no other is open.
        unsafe { pg_sys::AbortCurrentTransaction() };
        Err(failure(cause))
    };
    PgTryBuilder::new(AssertUnwindSafe(|| {
        f();
        Ok(())
    }))
    .catch_others(undo)
    .catch_rust_panic(undo)
    .execute()
}

/// Does one of the janitor's duties. If it fails, the log says so once for as long as the reason is the same.
pub fn guarded(duty: &str, f: impl FnOnce()) {
    let done = tried(f);
    FAILING.with_borrow_mut(|failing| match done {
        Ok(()) => {
            failing.remove(duty);
        }
        Err(why) => {
            if failing.get(duty) != Some(&why) {
                pgrx::warning!("harvest_fair: the janitor cannot {duty}: {why}");
            }
            failing.insert(duty.to_owned(), why);
        }
    });
}

/// A duty for one of the queues.
pub fn of_queue(duty: &str, queue: &str) -> String {
    format!("{duty} of queue {}", quoted(queue))
}

/// Does a duty for each queue, in one transaction for all of them as long as nothing fails. A queue for which it fails holds
/// up no other: each then has a transaction of its own, those last for which it failed before.
pub fn for_each<Q>(duty: &str, queues: &[Q], name: impl Fn(&Q) -> &str, f: impl Fn(&Q)) {
    let duty_of = |queue: &Q| of_queue(duty, name(queue));
    let (failing, sound): (Vec<&Q>, Vec<&Q>) = FAILING.with_borrow(|failing| {
        queues
            .iter()
            .partition(|queue| failing.contains_key(&duty_of(queue)))
    });
    let together = sound.len() > 1 && tried(|| round(|| sound.iter().for_each(|q| f(q)))).is_ok();
    let alone = if together { Vec::new() } else { sound };
    for queue in alone.into_iter().chain(failing) {
        guarded(&duty_of(queue), || round(|| f(queue)));
    }
}

/// One transaction of the janitor.
pub fn round<R>(f: impl FnOnce() -> R) -> R {
    let mut result = None;
    let run = AssertUnwindSafe(|| result = Some(f()));
    BackgroundWorker::transaction(|| {
        let run = run;
        (run.0)()
    });
    // SAFETY: outside of any transaction. Autovacuum goes by these numbers.
    unsafe { pg_sys::pgstat_report_stat(false) };
    match result {
        Some(result) => result,
        None => unreachable!("the transaction has run"),
    }
}
