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
    pub const STATE: usize = 11;
    pub const SCHEDULED_AT: usize = 12;
    pub const PARENT_ID: usize = 13;
    pub const ATTEMPT: usize = 14;
    pub const MAX_ATTEMPTS: usize = 15;
    pub const LEASE: usize = 17;
    pub const LEASE_UNTIL: usize = 18;
    pub const CHARGED: usize = 19;
    pub const ENQUEUED_AT: usize = 21;
    pub const STARTED_AT: usize = 22;
    /// How many there are.
    pub const COUNT: usize = 23;
}

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
        let label = |name: &CStr| -> pg_sys::Oid {
            // SAFETY: system cache look-ups by constant names; a missing label gives InvalidOid.
            unsafe {
                let state_type = pg_sys::get_atttype(task, column::STATE as i16);
                pg_sys::GetSysCacheOid(
                    pg_sys::SysCacheIdentifier::ENUMTYPOIDNAME as i32,
                    pg_sys::Anum_pg_enum_oid as i16,
                    pg_sys::Datum::from(state_type),
                    pg_sys::Datum::from(name.as_ptr()),
                    pg_sys::Datum::from(0),
                    pg_sys::Datum::from(0),
                )
            }
        };
        let catalog = Catalog {
            task,
            lane: relation(c"task_lane", schema),
            pinned: relation(c"task_pinned", schema),
            lease: relation(c"task_lease", schema),
            finished: relation(c"task_finished", schema),
            primary: relation(c"task_pkey", schema),
            pending: label(c"pending"),
            running: label(c"running"),
            failed: label(c"failed"),
            cancelled: label(c"cancelled"),
        };
        let all = [
            catalog.lane,
            catalog.pinned,
            catalog.lease,
            catalog.finished,
            catalog.primary,
            catalog.pending,
            catalog.running,
            catalog.failed,
            catalog.cancelled,
        ];
        if all.contains(&pg_sys::InvalidOid) {
            return Err(Error::NotInstalled);
        }
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
