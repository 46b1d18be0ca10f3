//! Where the extension's objects are in this database: object ids, and the numbers of columns.

use std::cell::Cell;
use std::ffi::CStr;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::errors::Error;

/// Columns of harvest_fair.task, by number.
pub mod column {
    pub const ID: usize = 1;
    pub const QUEUE: usize = 2;
    pub const FAIRNESS_KEY: usize = 3;
    pub const QUOTA_KEY: usize = 4;
    pub const PRIORITY: usize = 5;
    pub const WEIGHT: usize = 6;
    pub const NEW_START: usize = 7;
    pub const STICKY_WORKER: usize = 8;
    pub const STICKY_UNTIL: usize = 9;
    pub const PAYLOAD: usize = 10;
    pub const STATE: usize = 11;
    pub const SCHEDULED_AT: usize = 12;
    pub const PARENT_ID: usize = 13;
    pub const ATTEMPT: usize = 14;
    pub const MAX_ATTEMPTS: usize = 15;
    pub const WORKER: usize = 16;
    pub const LEASE: usize = 17;
    pub const LEASE_UNTIL: usize = 18;
    pub const CHARGED: usize = 19;
    pub const ENQUEUED_AT: usize = 21;
    pub const STARTED_AT: usize = 22;
    pub const FINISHED_AT: usize = 23;
    /// How many there are.
    pub const COUNT: usize = 23;
}

/// The columns' names and types, in order; no type: the type of states.
const COLUMNS: [(&CStr, Option<pg_sys::Oid>); column::COUNT] = {
    use pg_sys::{
        BOOLOID, FLOAT8OID, INT2OID, INT4OID, INT8OID, JSONBOID, TEXTOID, TIMESTAMPTZOID,
    };
    [
        (c"id", Some(INT8OID)),
        (c"queue", Some(TEXTOID)),
        (c"fairness_key", Some(TEXTOID)),
        (c"quota_key", Some(TEXTOID)),
        (c"priority", Some(INT2OID)),
        (c"weight", Some(FLOAT8OID)),
        (c"new_start", Some(BOOLOID)),
        (c"sticky_worker", Some(TEXTOID)),
        (c"sticky_until", Some(TIMESTAMPTZOID)),
        (c"payload", Some(JSONBOID)),
        (c"state", None),
        (c"scheduled_at", Some(TIMESTAMPTZOID)),
        (c"parent_id", Some(INT8OID)),
        (c"attempt", Some(INT4OID)),
        (c"max_attempts", Some(INT4OID)),
        (c"worker", Some(TEXTOID)),
        (c"lease", Some(INT8OID)),
        (c"lease_until", Some(TIMESTAMPTZOID)),
        (c"charged", Some(FLOAT8OID)),
        (c"last_error", Some(TEXTOID)),
        (c"enqueued_at", Some(TIMESTAMPTZOID)),
        (c"started_at", Some(TIMESTAMPTZOID)),
        (c"finished_at", Some(TIMESTAMPTZOID)),
    ]
};

/// The install script, which says how each index is made.
const SCHEMA: &str = include_str!("../../sql/schema.sql");

/// Object ids of the extension in this database.
#[derive(Clone, Copy)]
pub struct Catalog {
    pub task: pg_sys::Oid,
    pub lane: pg_sys::Oid,
    pub pinned: pg_sys::Oid,
    pub lease: pg_sys::Oid,
    pub finished: pg_sys::Oid,
    pub primary: pg_sys::Oid,
    pub pending: pg_sys::Oid,
    pub running: pg_sys::Oid,
    pub completed: pg_sys::Oid,
    pub failed: pg_sys::Oid,
    pub cancelled: pg_sys::Oid,
}

thread_local! {
    static CATALOG: Cell<Option<Catalog>> = const { Cell::new(None) };
}

fn relation(name: &CStr, schema: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: a constant name; the look-up goes through the system cache.
    unsafe { pg_sys::get_relname_relid(name.as_ptr(), schema) }
}

/// How to make an index of the task table again.
fn index_definition(name: &str) -> String {
    let start = format!("CREATE INDEX {name} ");
    let made = SCHEMA
        .find(&start)
        .and_then(|at| SCHEMA.get(at..)?.split(';').next());
    let made = made.map(|sql| sql.split_whitespace().collect::<Vec<_>>().join(" "));
    made.unwrap_or_else(|| {
        format!("ALTER TABLE harvest_fair.task ADD CONSTRAINT {name} PRIMARY KEY (id)")
    })
}

/// An index of the task table, which a DBA may have dropped.
fn index(name: &CStr, schema: pg_sys::Oid) -> Result<pg_sys::Oid, Error> {
    let found = relation(name, schema);
    if found != pg_sys::InvalidOid {
        return Ok(found);
    }
    let name = name.to_string_lossy();
    Err(Error::Altered {
        what: format!("index harvest_fair.{name} is missing"),
        mend: format!("Create it again: {};", index_definition(&name)),
    })
}

fn type_name(oid: pg_sys::Oid) -> String {
    // SAFETY: gives a string in the current memory context for any object id; it is copied at once.
    unsafe { CStr::from_ptr(pg_sys::format_type_be(oid)) }
        .to_string_lossy()
        .into_owned()
}

/// The task table is read by column numbers and types, so a DBA's changes to them must not go unnoticed. Columns that were
/// added do no harm.
fn check_columns(task: pg_sys::Oid) -> Result<(), Error> {
    for (number, (name, expected)) in (1i16..).zip(COLUMNS) {
        // SAFETY: system cache look-ups by object id, name and number; what is not there gives 0.
        let (at, found) = unsafe {
            (
                pg_sys::get_attnum(task, name.as_ptr()),
                pg_sys::get_atttype(task, number),
            )
        };
        let name = name.to_string_lossy();
        if at != number {
            return Err(Error::Altered {
                what: format!("column \"{name}\" of harvest_fair.task is missing"),
                mend: "Give it its name back; if it was dropped, restore the schema harvest_fair from a dump.".into(),
            });
        }
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            let (expected, found) = (type_name(expected), type_name(found));
            return Err(Error::Altered {
                what: format!(
                    "column \"{name}\" of harvest_fair.task has type {found}, not {expected}"
                ),
                mend: format!(
                    "Change it back: ALTER TABLE harvest_fair.task ALTER COLUMN {name} TYPE {expected} USING {name}::{expected};"
                ),
            });
        }
    }
    Ok(())
}

/// Forgets the object ids when something was done to one of the relations: REINDEX CONCURRENTLY gives indexes new ones.
#[pg_guard]
unsafe extern "C-unwind" fn forget_catalog(_arg: pg_sys::Datum, relation: pg_sys::Oid) {
    let concerns = |known: &Catalog| {
        let ours = [
            known.task,
            known.lane,
            known.pinned,
            known.lease,
            known.finished,
            known.primary,
        ];
        relation == pg_sys::InvalidOid || ours.contains(&relation)
    };
    if CATALOG.get().as_ref().is_some_and(concerns) {
        CATALOG.set(None);
    }
}

/// Registers for news of relations; once, while the postmaster loads the library.
pub fn register() {
    // SAFETY: a static function with the signature that Postgres wants; sessions inherit it.
    unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(forget_catalog), pg_sys::Datum::from(0)) };
}

impl Catalog {
    /// Looks the extension up; two system cache look-ups when nothing has changed since the last call.
    pub fn get() -> Result<Catalog, Error> {
        // SAFETY: a constant name; InvalidOid when there is no such schema.
        let schema = unsafe { pg_sys::get_namespace_oid(c"harvest_fair".as_ptr(), true) };
        if schema == pg_sys::InvalidOid {
            return Err(Error::NotInstalled);
        }
        let task = relation(c"task", schema);
        if let Some(known) = CATALOG.get()
            && known.task == task
        {
            return Ok(known);
        }
        if task == pg_sys::InvalidOid {
            return Err(Error::NotInstalled);
        }
        check_columns(task)?;
        let label = |name: &CStr| -> Result<pg_sys::Oid, Error> {
            // SAFETY: system cache look-ups by constant names; a missing label gives InvalidOid.
            let found = unsafe {
                let state_type = pg_sys::get_atttype(task, column::STATE as i16);
                pg_sys::GetSysCacheOid(
                    pg_sys::SysCacheIdentifier::ENUMTYPOIDNAME as i32,
                    pg_sys::Anum_pg_enum_oid as i16,
                    pg_sys::Datum::from(state_type),
                    pg_sys::Datum::from(name.as_ptr()),
                    pg_sys::Datum::from(0),
                    pg_sys::Datum::from(0),
                )
            };
            if found != pg_sys::InvalidOid {
                return Ok(found);
            }
            Err(Error::Altered {
                what: format!("value {name:?} of the type harvest_fair.task_state is missing"),
                mend: "Give it its name back with ALTER TYPE ... RENAME VALUE.".into(),
            })
        };
        let catalog = Catalog {
            task,
            lane: index(c"task_lane", schema)?,
            pinned: index(c"task_pinned", schema)?,
            lease: index(c"task_lease", schema)?,
            finished: index(c"task_finished", schema)?,
            primary: index(c"task_pkey", schema)?,
            pending: label(c"pending")?,
            running: label(c"running")?,
            completed: label(c"completed")?,
            failed: label(c"failed")?,
            cancelled: label(c"cancelled")?,
        };
        CATALOG.set(Some(catalog));
        Ok(catalog)
    }

    /// What the board knows this database's task table by: a re-created extension starts clean.
    pub fn scope(&self) -> u64 {
        // SAFETY: set for the life of the backend once it is connected.
        let database = unsafe { pg_sys::MyDatabaseId };
        (u64::from(database.to_u32()) << 32) | u64::from(self.task.to_u32())
    }
}
