//! Private Postgres clusters with harvest_fair loaded, and the few calls that every test makes.
//!
//! [`Cluster::start`] makes a throw-away server, [`Cluster::shared`] one for a whole test binary, and
//! [`Cluster::database`] a fresh database with the extension in it. The environment says which Postgres:
//! `HF_PG_BINDIR` (its `bin` directory; default: what `pg_config --bindir` says), `HF_RUNAS` (command prefix that
//! drops root's privileges, since Postgres refuses to run as root) and `HF_CACHE` (a writable directory).

mod cluster;
mod database;
mod environment;
mod errors;
mod prefix;
mod queue;
mod watchdog;

pub use cluster::{Cluster, Options, Shutdown};
pub use database::{Database, pid_of};
pub use environment::Environment;
pub use errors::{Refusal, expect_error, expect_refusal, sqlstate_of};
pub use prefix::{Prefix, install};
pub use queue::{
    ClaimedTask, claim, claim_one, claim_waiting, complete, count, enqueue, flood, keys_of, one,
    pending, running, try_claim, try_claim_waiting,
};

use std::time::{Duration, Instant};

/// What everything that should happen "at once" may take on a busy machine before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a worker waits for at most that something must wake: far beyond all [`PATIENCE`], so that the end of its wait is
/// never what ended it.
pub const LONG: &str = "10 min";

/// Asks until `condition` holds; `false` when `timeout` passed first. The last question is asked after the deadline,
/// so a slow machine cannot turn a late yes into a no.
pub fn holds_within(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        let late = Instant::now() >= deadline;
        if condition() {
            return true;
        }
        if late {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks until `condition` holds and panics, naming `what`, when `timeout` passes first.
#[track_caller]
pub fn wait_until(what: &str, timeout: Duration, condition: impl FnMut() -> bool) {
    assert!(
        holds_within(timeout, condition),
        "waited {timeout:?} in vain until {what}"
    );
}
