//! Admission: the row trigger of the task table.
//!
//! Every way a row can come into the table passes here: `fair_enqueue`, INSERT, COPY, a DBA's UPDATE, and the
//! extension's own updates when a task is put back. The trigger validates, resolves what was left NULL and notes what
//! the board must know at commit. It is a plain C function: it runs for each row of a bulk load.

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::catalog::{Catalog, column};
use super::fields::{Changes, Fields};
use super::pinned::end_of_pin;
use super::rules;
use super::table::TaskTable;
use super::timestamp;
use crate::board::{OnCommit, effects, now, stored_priority};
use crate::config;
use crate::errors::Error;
use crate::names::FairnessKey;
use crate::sfq::{Outcome, Row, RowPos};
use crate::trigger::{self, Operation, OwnStatements};

thread_local! {
    /// The updates that hand locked rows to a worker: the claim has told the board itself.
    static CLAIMS: OwnStatements = const { OwnStatements::new() };
}

/// Runs the update of a claim, whose rows the trigger lets pass.
pub fn while_claiming<R>(f: impl FnOnce() -> R) -> R {
    CLAIMS.with(|claims| claims.run(f))
}

/// The trigger function harvest_fair.admit().
///
/// # Safety
/// Called by Postgres as a trigger.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn admit_task(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: as Postgres calls a trigger function.
    let data = unsafe { trigger::data(fcinfo, "harvest_fair.admit()") };
    let tuple = match admit(data) {
        Ok(tuple) => tuple,
        Err(error) => error.raise(),
    };
    pg_sys::Datum::from(tuple)
}

trigger::finfo!(pg_finfo_admit_task);

fn admit(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let operation = Operation::of(data);
    if operation == Operation::Truncate {
        effects::on_commit(OnCommit::TasksTruncated {
            scope: Catalog::get()?.scope(),
        });
        return Ok(std::ptr::null_mut());
    }
    let catalog = Catalog::get()?;
    // SAFETY: the relation of the trigger is open.
    let descriptor = unsafe { (*data.tg_relation).rd_att };
    if operation == Operation::Insert {
        let row = Fields::of(data.tg_trigtuple, descriptor);
        let (tuple, row) = resolve(data.tg_trigtuple, descriptor, row, &catalog, None)?;
        note(&catalog, &row);
        if row.is(catalog.running) {
            count(&catalog, &row, 1, None);
            note_lease(&catalog, &row);
        }
        return Ok(tuple);
    }
    let old = Fields::of(data.tg_trigtuple, descriptor);
    if operation == Operation::Delete {
        if old.is(catalog.running) {
            count(&catalog, &old, -1, None);
        }
        return Ok(data.tg_trigtuple);
    }
    let new = Fields::of(data.tg_newtuple, descriptor);
    let moved = old.queue() != new.queue() || old.key() != new.key();
    let claimed = CLAIMS.with(OwnStatements::have_fired);
    // Unless a user's own trigger has made something else of it.
    if claimed && !moved && new.is(catalog.running) {
        return Ok(data.tg_newtuple);
    }
    let (tuple, new) = resolve(data.tg_newtuple, descriptor, new, &catalog, Some(&old))?;
    note(&catalog, &new);
    // The board has counted what it has picked.
    let was = claimed || old.is(catalog.running);
    let is = new.is(catalog.running);
    if was && (!is || moved) {
        count(&catalog, &old, -1, outcome(&catalog, &old, &new));
    }
    if is && (!was || moved) {
        count(&catalog, &new, 1, None);
    }
    if is && old.lease_until() != new.lease_until() {
        note_lease(&catalog, &new);
    }
    Ok(tuple)
}

/// How an attempt has come to its end. One that is put back without being counted was released, and came to none.
fn outcome(catalog: &Catalog, old: &Fields, new: &Fields) -> Option<Outcome> {
    if new.is(catalog.completed) {
        Some(Outcome::Completed)
    } else if new.is(catalog.failed) || new.is(catalog.pending) && new.attempt() >= old.attempt() {
        Some(Outcome::Failed)
    } else {
        None
    }
}

/// Tells the board at commit that a key has one running task more or less, and how the attempt of one that ended.
fn count(catalog: &Catalog, row: &Fields, delta: i32, outcome: Option<Outcome>) {
    effects::on_commit(OnCommit::Running {
        queue: row.queue_ref(catalog),
        key: row.key().to_owned(),
        delta,
        outcome,
    });
}

/// Tells the board at commit when a running row's lease ends.
fn note_lease(catalog: &Catalog, row: &Fields) {
    let at = row.lease_until().unwrap_or(i64::MIN);
    effects::on_commit(OnCommit::LeaseDue {
        queue: row.queue_ref(catalog),
        at,
    });
}

/// Notes the lane of a pending row, or that a pinned one must be looked for.
fn note(catalog: &Catalog, row: &Fields) {
    if !row.is(catalog.pending) {
        return;
    }
    if row.is_null(column::STICKY_WORKER) {
        let pos = RowPos {
            due: row.due(),
            id: row.id(),
        };
        let weight = row.weight();
        effects::note(
            catalog.scope(),
            row.queue(),
            stored_priority(row.priority()),
            row.key(),
            row.band(),
            Row { pos, weight },
        );
    } else {
        let at = end_of_pin(row.sticky_until());
        effects::on_commit(OnCommit::UnpinDue {
            queue: row.queue_ref(catalog),
            at,
        });
    }
}

/// Checks the fields of a row and fills in what was left NULL. An inserted row takes it from its parent. Of an updated row
/// only what has changed is checked: one that came in past this trigger must not hold up its own end.
fn resolve(
    tuple: pg_sys::HeapTuple,
    descriptor: pg_sys::TupleDesc,
    mut row: Fields,
    catalog: &Catalog,
    old: Option<&Fields>,
) -> Result<(pg_sys::HeapTuple, Fields), Error> {
    let mut changes = Changes::default();
    if row.is_null(column::QUEUE) {
        return Err(Error::Null { what: "queue" });
    }
    let queue = row.queue();
    if old.is_none_or(|old| old.queue() != queue) {
        rules::queue(queue)?;
    }

    // A row that brings another time of enqueueing than now() is a restored one: its parent may come later, or be gone.
    let restored = row
        .micros(column::ENQUEUED_AT)
        .is_some_and(|at| at != transaction_start());
    let parent = match (row.parent_id(), old) {
        (Some(id), None) if !restored => Some(Parent::find(id)?),
        (Some(id), Some(old)) if old.parent_id() != Some(id) => {
            // Nothing is inherited later on, but there must be such a task.
            Parent::find(id)?;
            None
        }
        _ => None,
    };
    let parent = parent.as_ref();

    if row.is_null(column::FAIRNESS_KEY) {
        let quota = row
            .text(column::QUOTA_KEY)
            .filter(|key| FairnessKey::parse(*key).is_ok());
        let key = parent
            .map(|p| p.key.as_str())
            .or(quota)
            .unwrap_or("")
            .to_owned();
        changes.set(&mut row, column::FAIRNESS_KEY, key.as_str().into_datum());
    } else if old.is_none_or(|old| old.key() != row.key()) {
        rules::key(row.key())?;
    }
    if row.is_null(column::PRIORITY) {
        changes.set(
            &mut row,
            column::PRIORITY,
            parent.map_or(3i16, |p| p.priority).into_datum(),
        );
    } else if old.is_none_or(|old| old.priority() != row.priority()) {
        rules::priority(row.priority())?;
    }
    match row.weight() {
        // By its bits, since NaN is not even like itself.
        Some(weight)
            if old.is_some_and(|old| old.weight().map(f64::to_bits) == Some(weight.to_bits())) => {}
        Some(weight) => rules::weight(weight)?,
        None => {
            if let Some(weight) = parent.and_then(|p| p.weight) {
                changes.set(&mut row, column::WEIGHT, weight.into_datum());
            }
        }
    }
    if row.is_null(column::SCHEDULED_AT) {
        changes.set(
            &mut row,
            column::SCHEDULED_AT,
            Some(pg_sys::Datum::from(transaction_start())),
        );
    }
    if row.is_null(column::ENQUEUED_AT) {
        changes.set(
            &mut row,
            column::ENQUEUED_AT,
            Some(pg_sys::Datum::from(transaction_start())),
        );
    }
    if row.is_null(column::MAX_ATTEMPTS) {
        changes.set(&mut row, column::MAX_ATTEMPTS, 5i32.into_datum());
    } else if row.max_attempts() < 1
        && old.is_none_or(|old| old.max_attempts() != row.max_attempts())
    {
        return Err(Error::MaxAttempts {
            value: row.max_attempts(),
        });
    }
    if old.is_none_or(|old| old.attempt() != row.attempt()) {
        rules::attempt(row.attempt())?;
    }
    match row.lease() {
        Some(lease) if old.is_none_or(|old| old.lease() != Some(lease)) => rules::lease(lease)?,
        _ => {}
    }
    if row.is_null(column::NEW_START) {
        changes.set(&mut row, column::NEW_START, false.into_datum());
    }
    if row.is_null(column::LEASE_UNTIL) && row.is(catalog.running) {
        // Set to running by hand: nobody holds a lease, so it is taken back like one that has run out.
        let until = now().saturating_add(config::default_lease());
        changes.set(&mut row, column::LEASE_UNTIL, Some(timestamp(until)));
    }
    // A task that was finished by hand is deleted in its time too, and one put back by hand will be finished anew.
    let finished = !row.is(catalog.pending) && !row.is(catalog.running);
    if finished && row.is_null(column::FINISHED_AT) {
        let at = pg_sys::Datum::from(transaction_start());
        changes.set(&mut row, column::FINISHED_AT, Some(at));
    } else if !finished && !row.is_null(column::FINISHED_AT) {
        changes.set(&mut row, column::FINISHED_AT, None);
    }
    if let Some(worker) = row.text(column::STICKY_WORKER)
        && old.is_none_or(|old| old.text(column::STICKY_WORKER) != Some(worker))
    {
        super::check_worker(worker)?;
    }
    Ok((changes.apply(tuple, descriptor), row))
}

fn transaction_start() -> i64 {
    // SAFETY: reads the start time of this backend's transaction.
    unsafe { pg_sys::GetCurrentTransactionStartTimestamp() }
}

/// What a task inherits.
struct Parent {
    key: String,
    priority: i16,
    weight: Option<f64>,
}

impl Parent {
    fn find(id: i64) -> Result<Parent, Error> {
        let table = TaskTable::open()?;
        if !table.find(id) {
            return Err(Error::UnknownParent { id });
        }
        Ok(Parent {
            key: table.get(column::FAIRNESS_KEY).unwrap_or_default(),
            priority: table.get(column::PRIORITY).unwrap_or(3),
            weight: table.get(column::WEIGHT),
        })
    }
}
