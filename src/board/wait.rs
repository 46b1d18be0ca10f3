//! Waiting: a worker sleeps until a task of its queues may have become claimable.
//!
//! Sleepers stand in line at the queue's condition variable. One wake-up is one task: whoever takes it and leaves
//! more behind, or leaves the line for any other reason, wakes the next. A session can stand in one line only; those
//! that wait for several queues share a line of their own, and are all woken when any queue gets work.

use pgrx::pg_sys;

use super::{effects, shmem};
use crate::sfq::QueueId;

/// Longest sleep while a lane's only rows are locked by a transaction that gives no sign when it ends.
const HELD_RECHECK_MS: i64 = 100;

/// A waiting line: for one queue, or (`None`) for any of several.
pub type Line = Option<QueueId>;

/// A place in a waiting line, left when dropped.
pub struct Waiting(Line);

impl Waiting {
    /// Takes a place in line. What becomes claimable from now on ends the next sleep, even if it has not begun.
    pub fn line_up(line: Line) -> Waiting {
        effects::waiting(Some(line));
        shmem::count_waiting(line, 1);
        // SAFETY: the condition variable lies in shared memory.
        unsafe { pg_sys::ConditionVariablePrepareToSleep(shmem::sleepers(line)) };
        Waiting(line)
    }

    /// Sleeps until woken or until a point in time (µs). `held`: rows were seen that others hold. Reacts to cancel,
    /// timeouts and shutdown.
    pub fn sleep(&self, until: i64, held: bool) {
        let micros = until.saturating_sub(effects::now());
        if micros <= 0 {
            return;
        }
        let mut millis = (micros.saturating_add(999) / 1_000).min(i64::from(i32::MAX));
        if held {
            millis = millis.min(HELD_RECHECK_MS);
        }
        // SAFETY: the session stands in line at this condition variable; interrupts are served inside.
        unsafe {
            pg_sys::ConditionVariableTimedSleep(
                shmem::sleepers(self.0),
                millis,
                pg_sys::PG_WAIT_EXTENSION,
            )
        };
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // While an ERROR unwinds, the abort callback leaves the line and hands the wake-up on.
        if std::thread::panicking() {
            return;
        }
        effects::waiting(None);
        shmem::count_waiting(self.0, -1);
        // SAFETY: leaves whatever condition variable the session stood at.
        unsafe { pg_sys::ConditionVariableCancelSleep() };
    }
}

/// Wakes the next in line for a queue, and whoever waits for several.
pub fn wake_one(queue: QueueId) {
    // SAFETY: the condition variable lies in shared memory; waking takes its spin lock only.
    unsafe { pg_sys::ConditionVariableSignal(shmem::sleepers(Some(queue))) };
    wake_any();
}

/// Wakes everybody who waits for a queue.
pub fn wake_all(queue: QueueId) {
    // SAFETY: as above.
    unsafe { pg_sys::ConditionVariableBroadcast(shmem::sleepers(Some(queue))) };
    wake_any();
}

/// Wakes whoever waits for several queues.
pub fn wake_any() {
    if shmem::waiting(None) > 0 {
        // SAFETY: as above.
        unsafe { pg_sys::ConditionVariableBroadcast(shmem::sleepers(None)) };
    }
}

/// Wakes the next in line, if there is something to claim.
pub fn pass_on(queue: QueueId) {
    if shmem::anyone_waiting() && shmem::with(|sched| sched.has_eligible(queue)) {
        wake_one(queue);
    }
}
