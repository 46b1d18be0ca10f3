//! Weighted fair job queues: Postgres keeps the rows, shared memory keeps the order.
//!
//! *names* are validated, the *sfq* core orders them, the *board* shares that order, *tasks* move through it,
//! *policy* bends it, *observe* shows it, the *janitor* keeps it.

#![deny(unsafe_op_in_unsafe_fn)]
// pgrx's error report is large, and returned only on the way to an ERROR; pgrx reads the columns of a result from the
// signature, so they cannot be named apart.
#![allow(clippy::result_large_err, clippy::type_complexity)]

mod board;
mod config;
mod errors;
mod janitor;
mod json;
mod names;
mod observe;
mod pg_compat;
mod policy;
mod sfq;
mod spi;
mod subtransaction;
mod tasks;
mod trigger;

use pgrx::prelude::*;

pgrx::pg_module_magic!();

/// Called by Postgres when it loads the library, which must be while the server starts: the board needs its memory.
#[allow(non_snake_case)]
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    // SAFETY: reads a flag that the postmaster has set.
    if !unsafe { pg_sys::process_shared_preload_libraries_in_progress } {
        errors::Error::NotPreloaded.raise();
    }
    errors::hook();
    config::register();
    board::shmem::register();
    board::effects::register();
    tasks::catalog::register();
}
