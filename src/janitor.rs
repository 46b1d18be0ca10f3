//! The janitor: one background worker for each database that uses the extension.
//!
//! It is started by the first session that touches the board, and ends when the extension or its database goes. Its
//! rounds are short transactions; between them it holds no lock and no snapshot.
//!
//! - *reap*: takes back expired leases and ended pins
//! - *flush*: writes changed passes into harvest_fair.key_state, also at shutdown
//! - *sweep*: loads queues that nobody has touched, and tells the board what it missed
//! - *prune*: forgets idle keys (rule 8); *retention*: deletes finished tasks in small batches

mod flush;
mod guard;
mod news;
mod policy;
mod retention;
mod sweep;

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, SignalWakeFlags};
use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use self::guard::{for_each, guarded, round};
use crate::board::shmem::{self, JanitorSlot};
use crate::board::{self, QueueRef, now, wait};
use crate::config;
use crate::errors::Error;
use crate::observe::state::of_scope;
use crate::pg_compat;
use crate::policy::audit;
use crate::sfq::QueueId;
use crate::tasks::catalog::Catalog;
use crate::tasks::reap::reap;
use crate::tasks::table::TaskTable;

/// Longest pause between two rounds: how long DROP DATABASE and expired leases wait at most.
const TICK: Duration = Duration::from_secs(1);
/// The duty on which all others depend.
const LOOK_AROUND: &str = "look around";
/// How long a janitor may take to start before another one is asked for (µs).
const STARTING: i64 = 5_000_000;

/// Starts this database's janitor unless it runs or is about to.
pub fn ensure_running(catalog: &Catalog) {
    // SAFETY: reads the state of the server.
    if unsafe { pg_sys::RecoveryInProgress() } {
        // On a standby it could not start, and would keep a background worker slot until it can.
        return;
    }
    let scope = catalog.scope();
    let janitors = shmem::janitors();
    let mine = |slot: &&JanitorSlot| slot.scope.load(Ordering::Acquire) == scope;
    let slot = match janitors.iter().find(mine) {
        Some(slot) => slot,
        None => {
            let free = |slot: &&JanitorSlot| {
                slot.scope
                    .compare_exchange(0, scope, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            };
            match janitors.iter().find(free) {
                Some(slot) => slot,
                // As many databases as the board has room for have a janitor; claims still meet expired leases.
                None => return,
            }
        }
    };
    if slot.pid.load(Ordering::Acquire) != 0 {
        return;
    }
    let (asked, now) = (slot.asked_at.load(Ordering::Acquire), now());
    let recently = asked != 0 && now.saturating_sub(asked) < STARTING;
    if recently
        || slot
            .asked_at
            .compare_exchange(asked, now, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    let started = BackgroundWorkerBuilder::new("harvest_fair janitor")
        .set_library("harvest_fair")
        .set_function("harvest_fair_janitor")
        .set_argument(Some(pg_sys::Datum::from(scope as i64)))
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic();
    if started.is_err() {
        ErrorReport::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            "cannot start the janitor of harvest_fair: no background worker slot is free",
            "harvest_fair",
        )
        .set_hint("Raise max_worker_processes and restart the server.")
        .report(PgLogLevel::WARNING);
    }
}

/// Gives the janitor's place back when its process ends, however it ends.
#[pg_guard]
unsafe extern "C-unwind" fn leave(_code: i32, scope: pg_sys::Datum) {
    let scope = scope.value() as u64;
    // SAFETY: reads this process's own id.
    let pid = unsafe { pg_sys::MyProcPid };
    for slot in shmem::janitors() {
        if slot.scope.load(Ordering::Acquire) == scope && slot.pid.load(Ordering::Acquire) == pid {
            slot.pid.store(0, Ordering::Release);
            slot.asked_at.store(0, Ordering::Release);
            slot.scope.store(0, Ordering::Release);
        }
    }
}

/// Why a janitor ends.
enum End {
    /// The server shuts down, or somebody has terminated the janitor.
    Shutdown,
    /// Somebody wants the database for himself: DROP, RENAME, a template copy.
    Database,
    /// The extension is gone from the database.
    Extension,
}

/// The janitor's life.
#[unsafe(no_mangle)]
#[pg_guard]
pub extern "C-unwind" fn harvest_fair_janitor(scope: pg_sys::Datum) {
    let scope_datum = scope;
    let scope = scope.value() as u64;
    let database = pg_sys::Oid::from((scope >> 32) as u32);
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP | SignalWakeFlags::SIGTERM);
    // SAFETY: registers a callback of this process for its own end.
    unsafe { pg_sys::before_shmem_exit(Some(leave), scope_datum) };
    // SAFETY: reads this process's own id.
    let pid = unsafe { pg_sys::MyProcPid };
    let Some(slot) = shmem::janitors()
        .iter()
        .find(|s| s.scope.load(Ordering::Acquire) == scope)
    else {
        return;
    };
    if slot
        .pid
        .compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed)
        .is_err()
    {
        return;
    }
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(database), None);
    settle_in();
    match rounds(scope, database) {
        // The extension may have gone since the last round.
        End::Shutdown => {
            let mut there = false;
            guarded(LOOK_AROUND, || there = round(|| is_there(scope)));
            if there {
                save(scope);
            }
        }
        End::Extension => {
            let queues = of_scope(scope);
            board::with(|sched| sched.drop_scope(scope));
            // Whoever waits for tasks of a table that is gone learns of it.
            queues.iter().for_each(|(queue, _)| wait::wake_all(*queue));
        }
        End::Database => {}
    }
}

/// Settings of its own, as autovacuum has: what sessions have by default must neither change what the janitor does nor hold
/// it up. SIGTERM is looked at between its waits, so none may be without an end.
fn settle_in() {
    let set = |name: &CStr, value: &CStr| {
        let (context, source) = (
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
        // SAFETY: constant names and values of Postgres' own settings, outside of any transaction.
        unsafe { pg_sys::SetConfigOption(name.as_ptr(), value.as_ptr(), context, source) };
    };
    set(c"default_transaction_isolation", c"read committed");
    set(c"lock_timeout", c"1s");
    if pg_compat::HAS_TRANSACTION_TIMEOUT {
        set(c"transaction_timeout", c"0");
    }
    let local = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32;
    // SAFETY: reads a setting of this backend.
    if unsafe { pg_sys::synchronous_commit } > local {
        // Nobody waits for what it writes, so it waits for no standby.
        set(c"synchronous_commit", c"local");
    }
}

/// Whether the janitor was told to end. Remembers it: asking the background worker resets its flag.
fn stopping() -> bool {
    static STOPPING: AtomicBool = AtomicBool::new(false);
    if BackgroundWorker::sigterm_received() {
        STOPPING.store(true, Ordering::Relaxed);
    }
    STOPPING.load(Ordering::Relaxed)
}

/// The janitor's pause between two of its transactions.
fn pause(length: Duration) {
    sleep(length);
    // Whoever cancels what the janitor does finds it doing nothing: as for a session without a statement, that order is void,
    // and must not end the process. One that comes this very moment ends a transaction, as it should.
    // SAFETY: plain variables of this process, outside of any transaction.
    unsafe {
        pg_sys::QueryCancelPending = 0;
        pg_sys::QueryCancelHoldoffCount += 1;
        pgrx::check_for_interrupts!();
        pg_sys::QueryCancelHoldoffCount -= 1;
    }
}

/// Sleeps, until somebody sets this process's latch at the latest.
pub fn sleep(length: Duration) {
    // SAFETY: waits on this process's own latch; a death of the postmaster ends the process.
    unsafe {
        let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
        pg_sys::WaitLatch(
            pg_sys::MyLatch,
            events as i32,
            length.as_millis() as i64,
            pg_sys::PG_WAIT_EXTENSION,
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

fn rounds(scope: u64, database: pg_sys::Oid) -> End {
    let (mut next_flush, mut next_sweep) = (now() + config::flush_interval(), now());
    loop {
        if stopping() {
            return End::Shutdown;
        }
        if BackgroundWorker::sighup_received() {
            // SAFETY: this is a background worker's main loop, outside of any transaction.
            unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
            settle_in();
        }
        let mut end = None;
        guarded(LOOK_AROUND, || {
            end = round(|| look_around(scope, database));
        });
        if let Some(end) = end {
            return end;
        }
        reap_all(scope);
        guarded("write refused changes to the audit", || {
            round(|| audit::write_refused(scope));
        });
        news::look(scope);
        if now() >= next_flush {
            save(scope);
            next_flush = now() + config::flush_interval();
        }
        if now() >= next_sweep {
            let mut full = false;
            guarded("find missed tasks", || full = sweep::sweep(scope));
            for_each(
                "forget idle keys",
                &of_scope(scope),
                name,
                |(queue, name)| {
                    flush::prune(*queue, name);
                },
            );
            guarded("forget dropped databases", || {
                round(forget_dropped_databases)
            });
            guarded("look for finished tasks", retention::delete_finished);
            // Keys without room take the place of the next ones that have no work left.
            let pause = config::sweep_interval();
            next_sweep = now()
                + if full {
                    pause.min(TICK.as_micros() as i64)
                } else {
                    pause
                };
        }
        let due = next_flush.min(next_sweep).saturating_sub(now()).max(0);
        pause(
            TICK.min(Duration::from_micros(due as u64))
                .max(Duration::from_millis(10)),
        );
    }
}

/// Whether the extension that this janitor serves is still in the database.
fn is_there(scope: u64) -> bool {
    match Catalog::get() {
        Ok(catalog) => catalog.scope() == scope,
        // Somebody may be about to mend it.
        Err(Error::Altered { .. }) => true,
        Err(_) => false,
    }
}

/// Whether it is time to go.
fn look_around(scope: u64, database: pg_sys::Oid) -> Option<End> {
    if !is_there(scope) {
        return Some(End::Extension);
    }
    // Whoever drops or copies a database takes this lock and then waits for its sessions to go.
    let tag = pg_sys::LOCKTAG {
        locktag_field1: 0,
        locktag_field2: pg_sys::DatabaseRelationId.to_u32(),
        locktag_field3: database.to_u32(),
        locktag_field4: 0,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
    };
    // SAFETY: within a transaction, whose end gives the lock back.
    let got = unsafe { pg_sys::LockAcquire(&tag, pg_sys::RowExclusiveLock as i32, false, true) };
    (got == pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL).then_some(End::Database)
}

/// Frees what the board holds of databases that are gone; any janitor does it for all.
fn forget_dropped_databases() {
    let mut scopes = Vec::new();
    board::with(|sched| sched.queues(|queue| scopes.push(queue.scope)));
    scopes.sort_unstable();
    scopes.dedup();
    for scope in scopes {
        let database = pg_sys::Oid::from((scope >> 32) as u32);
        // SAFETY: a system cache look-up within a transaction.
        let exists = unsafe {
            pg_sys::SearchSysCacheExists(
                pg_sys::SysCacheIdentifier::DATABASEOID as i32,
                pg_sys::Datum::from(database),
                pg_sys::Datum::from(0),
                pg_sys::Datum::from(0),
                pg_sys::Datum::from(0),
            )
        };
        if !exists {
            board::with(|sched| sched.drop_scope(scope));
        }
    }
}

fn name((_, name): &(QueueId, String)) -> &str {
    name
}

/// Saves the passes that have changed.
fn save(scope: u64) {
    for_each("save passes", &of_scope(scope), name, |(queue, name)| {
        flush::flush(*queue, name);
    });
}

/// Takes back what has run out on the queues of the board.
fn reap_all(scope: u64) {
    let due: Vec<_> = of_scope(scope)
        .into_iter()
        .filter(|(queue, _)| {
            let now = now();
            board::with(|sched| sched.lease_due(*queue) <= now || sched.unpin_due(*queue) <= now)
        })
        .collect();
    for_each("take back expired leases", &due, name, |(queue, name)| {
        let Ok(table) = TaskTable::open() else { return };
        let name = name.clone();
        reap(&table, *queue, &QueueRef { scope, name }, now());
    });
}
