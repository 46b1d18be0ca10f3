//! The tables harvest_fair.weight and harvest_fair.queue. A row trigger validates each change, puts it on the board at commit
//! and has it audited, so that a plain INSERT, UPDATE, DELETE or COPY is as good as the functions.

use pgrx::pg_sys;
use serde_json::Value;

use super::audit::{self, Change};
use crate::board::{OnCommit, effects};
use crate::errors::Error;
use crate::spi::Statement;
use crate::tasks::catalog::Catalog;
use crate::trigger::{self, Operation};

/// A row of one of the tables, as far as it is given.
pub trait PolicyRow: Sized {
    /// What the audit calls an INSERT, an UPDATE and a DELETE.
    const ACTIONS: [&'static str; 3];
    /// Writes the audit of a TRUNCATE.
    const AUDIT_TRUNCATED: &'static Statement;
    /// The column that tells a restored row from a new one.
    const UPDATED_AT: i32;

    fn read(data: &pg_sys::TriggerData, tuple: pg_sys::HeapTuple) -> Self;

    fn check(&self) -> Result<(), Error>;

    /// As the audit shows what it sets.
    fn shown(&self) -> Option<Value>;

    fn change<'a>(&'a self, action: &'a str, new: Option<Value>) -> Change<'a>;

    fn has_key_of(&self, other: &Self) -> bool;

    fn is_equal(&self, other: &Self) -> bool;

    /// What the board is told when the row `stays`, or has gone.
    fn effect(&self, scope: u64, stays: bool) -> Option<OnCommit>;

    /// What the board is told when all rows have gone.
    fn all_gone(scope: u64) -> OnCommit;
}

/// Answers a call of the row trigger.
pub fn admit<R: PolicyRow>(data: &pg_sys::TriggerData) -> Result<pg_sys::HeapTuple, Error> {
    let scope = Catalog::get()?.scope();
    let [insert, update, delete] = R::ACTIONS;
    let action = match Operation::of(data) {
        Operation::Insert => insert,
        Operation::Update => update,
        Operation::Delete => delete,
        Operation::Truncate => {
            if trigger::is_before(data) {
                audit::truncated(R::AUDIT_TRUNCATED);
            } else {
                effects::on_commit(R::all_gone(scope));
            }
            return Ok(std::ptr::null_mut());
        }
    };
    let (old, new, tuple) = trigger::versions(data);
    let read = |tuple| R::read(data, tuple);
    let (old, given) = (old.map(read), new.map(read));
    if trigger::is_before(data) {
        if let Some(given) = &given
            && let Err(error) = given.check()
        {
            audit::refused_by_sql(&given.change(action, given.shown()), &error);
            return Err(error);
        }
        return Ok(tuple);
    }
    let gone = old.as_ref().and_then(|row| row.effect(scope, false));
    let stays = given.as_ref().and_then(|row| row.effect(scope, true));
    gone.into_iter().chain(stays).for_each(effects::on_commit);
    match (&old, &given) {
        (Some(old), Some(given)) if old.has_key_of(given) => {
            if !old.is_equal(given) {
                audit::made_by_sql(&given.change(action, given.shown()), old.shown());
            }
        }
        // An UPDATE of the key is the end of one row and the beginning of another.
        _ => {
            if let Some(old) = &old {
                audit::made_by_sql(&old.change(action, None), old.shown());
            }
            if let (Some(given), Some(new)) = (&given, new)
                && !(old.is_none() && trigger::is_restored(data, new, R::UPDATED_AT))
            {
                audit::made_by_sql(&given.change(action, given.shown()), None);
            }
        }
    }
    Ok(std::ptr::null_mut())
}
