//! The board's place in shared memory, and the one lock around it.
//!
//! Everything the scheduler knows lies in one region that is laid out by [`crate::sfq`]. The lock is held for one
//! call into the core (microseconds), never across I/O, SPI or a wait. A flag beside it is set while it is held: if
//! the next holder finds the flag still set, an error has struck inside the critical section, and the board is
//! emptied to be loaded again from the tables.

use std::ffi::CStr;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering,
};

use pgrx::pg_sys;
use pgrx::prelude::*;

pub use super::refused::Refused;
use super::refused::Ring;
use crate::config;
use crate::sfq::{QueueId, Sched, Snapshot};

const NAME: &CStr = c"harvest_fair";
/// Databases of one server that can have a janitor at a time.
pub const MAX_JANITORS: usize = 128;
const ALIGN: usize = 64;

/// Who keeps a database's board, in shared memory.
#[repr(C)]
pub struct JanitorSlot {
    /// The scope it keeps; 0 is a free slot.
    pub scope: AtomicU64,
    /// Its process, 0 while it starts.
    pub pid: AtomicI32,
    /// When it was last asked to start (µs).
    pub asked_at: AtomicI64,
}

/// The sessions that wait for tasks of a queue.
#[repr(C)]
struct WaitingLine {
    /// Where they sleep.
    variable: pg_sys::ConditionVariable,
    sessions: AtomicI32,
}

#[repr(C)]
struct Shared {
    /// Set while the lock is held; found set by the next holder: the board is poisoned.
    busy: AtomicBool,
    /// How often the board was emptied because it was poisoned.
    reloads: AtomicU64,
    max_queues: AtomicU32,
    max_keys: AtomicU32,
    /// Sessions that wait for tasks, in all lines together.
    waiting: AtomicI32,
    /// Refused changes on their way into the audit; under the board's lock.
    refused: Ring,
    janitors: [JanitorSlot; MAX_JANITORS],
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
static LOCK: AtomicPtr<pg_sys::LWLock> = AtomicPtr::new(std::ptr::null_mut());

static mut PREVIOUS_REQUEST_HOOK: pg_sys::shmem_request_hook_type = None;
static mut PREVIOUS_STARTUP_HOOK: pg_sys::shmem_startup_hook_type = None;

/// What claims need of a queue's settings besides the scheduler's share of them, in shared memory.
#[repr(C)]
pub struct Extras {
    /// Length of a lease (µs); 0: the session's default.
    lease: AtomicI64,
    /// Bits of the weight with which the queue is drawn; all zeros stand for 1.
    draw: AtomicU64,
    /// When the settings were last put on the board (µs).
    since: AtomicI64,
    /// How often pinned rows have come to the queue.
    pins: AtomicU32,
}

impl Extras {
    /// Sets both; `None` is the default.
    pub fn set(&self, lease: Option<i64>, queue_weight: Option<f64>, now: i64) {
        self.lease.store(lease.unwrap_or(0), Ordering::Relaxed);
        // A weight of 0 is kept apart from "not set" by its sign bit.
        let bits = queue_weight.map_or(0, |w| {
            if w == 0.0 {
                (-0.0f64).to_bits()
            } else {
                w.to_bits()
            }
        });
        self.draw.store(bits, Ordering::Relaxed);
        self.since.store(now, Ordering::Relaxed);
    }

    /// The queue's own length of a lease (µs).
    pub fn own_lease(&self) -> Option<i64> {
        Some(self.lease.load(Ordering::Relaxed)).filter(|lease| *lease != 0)
    }

    /// The queue's own weight.
    pub fn own_queue_weight(&self) -> Option<f64> {
        let bits = self.draw.load(Ordering::Relaxed);
        (bits != 0).then(|| f64::from_bits(bits).abs())
    }

    /// Length of a lease (µs): the queue's own, else the session's default.
    pub fn lease(&self) -> i64 {
        self.own_lease().unwrap_or_else(config::default_lease)
    }

    /// The weight with which the queue is drawn.
    pub fn queue_weight(&self) -> f64 {
        self.own_queue_weight().unwrap_or(1.0)
    }

    /// Since when all settings of the queue are in force (µs).
    pub fn since(&self) -> i64 {
        self.since.load(Ordering::Relaxed)
    }

    /// How often pinned rows have come to the queue, to be compared with what was seen before.
    pub fn pins(&self) -> u32 {
        self.pins.load(Ordering::SeqCst)
    }

    /// Pinned rows have come to the queue, or may have.
    pub fn count_pins(&self) {
        self.pins.fetch_add(1, Ordering::SeqCst);
    }
}

/// Where each part lies, as offsets from the start of the chunk.
struct Layout {
    /// One waiting line a queue, and one for those that wait for several.
    waiting: usize,
    /// One record of extras a queue.
    extras: usize,
    board: usize,
    board_bytes: usize,
    total: usize,
}

fn layout(max_queues: u32, max_keys: u32) -> Layout {
    let up = |n: usize| n.next_multiple_of(ALIGN);
    let waiting = up(size_of::<Shared>());
    let lines = max_queues as usize + 1;
    let extras = up(waiting + lines * size_of::<WaitingLine>());
    let board = up(extras + max_queues as usize * size_of::<Extras>());
    let board_bytes = Sched::bytes_needed(max_queues, max_keys);
    Layout {
        waiting,
        extras,
        board,
        board_bytes,
        total: up(board + board_bytes),
    }
}

/// Asks for the memory and the lock; called once, while the postmaster loads the library.
pub fn register() {
    // SAFETY: the postmaster is single-threaded here, and hooks are chained as Postgres asks.
    unsafe {
        PREVIOUS_REQUEST_HOOK = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(request);
        PREVIOUS_STARTUP_HOOK = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn request() {
    // SAFETY: runs once in the postmaster; the previous hook is whatever stood there before ours.
    unsafe {
        if let Some(previous) = PREVIOUS_REQUEST_HOOK {
            pg_sys::submodules::ffi::pg_guard_ffi_boundary(|| previous());
        }
        pg_sys::RequestAddinShmemSpace(layout(config::max_queues(), config::max_keys()).total);
        pg_sys::RequestNamedLWLockTranche(NAME.as_ptr(), 1);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn startup() {
    let (max_queues, max_keys) = (config::max_queues(), config::max_keys());
    let layout = layout(max_queues, max_keys);
    // SAFETY: AddinShmemInitLock is held while the chunk is found or made; the chunk has `layout.total` bytes, and
    // it is laid out before any other process can see it.
    unsafe {
        if let Some(previous) = PREVIOUS_STARTUP_HOOK {
            pg_sys::submodules::ffi::pg_guard_ffi_boundary(|| previous());
        }
        let init_lock = &raw mut (*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock;
        pg_sys::LWLockAcquire(init_lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let chunk = pg_sys::ShmemInitStruct(NAME.as_ptr(), layout.total, &mut found).cast::<u8>();
        if !found {
            std::ptr::write_bytes(chunk, 0, layout.total);
            let shared = chunk.cast::<Shared>();
            (*shared).max_queues.store(max_queues, Ordering::Relaxed);
            (*shared).max_keys.store(max_keys, Ordering::Relaxed);
            let lines = chunk.add(layout.waiting).cast::<WaitingLine>();
            for i in 0..=max_queues as usize {
                pg_sys::ConditionVariableInit(&raw mut (*lines.add(i)).variable);
            }
            let board = std::slice::from_raw_parts_mut(chunk.add(layout.board), layout.board_bytes);
            if let Err(error) = Sched::init(board, max_queues, max_keys) {
                pgrx::error!("harvest_fair: cannot set up the board: {error}");
            }
        }
        LOCK.store(
            &raw mut (*pg_sys::GetNamedLWLockTranche(NAME.as_ptr())).lock,
            Ordering::Relaxed,
        );
        SHARED.store(chunk.cast(), Ordering::Relaxed);
        pg_sys::LWLockRelease(init_lock);
    }
}

/// Number of AddinShmemInitLock among the main locks (lwlocknames.txt), the same in Postgres 15 to 18.
const ADDIN_SHMEM_INIT_LOCK: usize = 21;

fn shared() -> &'static Shared {
    let shared = SHARED.load(Ordering::Relaxed);
    assert!(
        !shared.is_null(),
        "the board is only there when the library was preloaded"
    );
    // SAFETY: set once at start-up to a chunk that lives as long as the process; all fields are atomics or are
    // handed to Postgres by address.
    unsafe { &*shared }
}

/// Holds the lock, and marks the board as being changed.
struct Held;

impl Held {
    fn acquire() -> Held {
        // SAFETY: the lock was set at start-up.
        unsafe {
            pg_sys::LWLockAcquire(
                LOCK.load(Ordering::Relaxed),
                pg_sys::LWLockMode::LW_EXCLUSIVE,
            )
        };
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Only a call that returned has left the board whole.
        if !std::thread::panicking() {
            shared().busy.store(false, Ordering::Relaxed);
        }
        // SAFETY: this process holds the lock: `Held` exists only between acquire and drop.
        unsafe { pg_sys::LWLockRelease(LOCK.load(Ordering::Relaxed)) };
    }
}

/// Runs `f` on the board under its lock. `f` must neither wait nor call Postgres.
pub fn with<R>(f: impl FnOnce(&mut Sched) -> R) -> R {
    let shared = shared();
    let held = Held::acquire();
    let layout = layout(
        shared.max_queues.load(Ordering::Relaxed),
        shared.max_keys.load(Ordering::Relaxed),
    );
    // SAFETY: the region was laid out at start-up, and the lock makes this the only reference to it.
    let region = unsafe {
        let chunk = SHARED.load(Ordering::Relaxed).cast::<u8>();
        std::slice::from_raw_parts_mut(chunk.add(layout.board), layout.board_bytes)
    };
    let Ok(mut sched) = Sched::attach(region) else {
        // Cannot be: start-up has initialised the region, and it never shrinks.
        std::process::abort();
    };
    if shared.busy.swap(true, Ordering::Relaxed) {
        sched.wipe();
        shared.reloads.fetch_add(1, Ordering::Relaxed);
    }
    let result = f(&mut sched);
    drop(held);
    result
}

/// Copies the board. The lock is held for one pass over what is in use.
pub fn snapshot(memory: &mut Snapshot) -> Option<Sched<'_>> {
    let shared = shared();
    let max_queues = shared.max_queues.load(Ordering::Relaxed);
    let mut copy = memory
        .board(max_queues, shared.max_keys.load(Ordering::Relaxed))
        .ok()?;
    with(|sched| sched.copy_to(&mut copy));
    Some(copy)
}

/// Memory for [`snapshot`].
pub fn snapshot_memory() -> Option<Snapshot> {
    let shared = shared();
    Snapshot::new(
        shared.max_queues.load(Ordering::Relaxed),
        shared.max_keys.load(Ordering::Relaxed),
    )
}

/// How often the board was emptied after an error inside the critical section.
pub fn reloads() -> u64 {
    shared().reloads.load(Ordering::Relaxed)
}

/// Slots for keys that the board was made with.
pub fn max_keys() -> u32 {
    shared().max_keys.load(Ordering::Relaxed)
}

/// The line of those who wait for one queue, or of those who wait for several.
fn line(queue: Option<QueueId>) -> *mut WaitingLine {
    let shared = shared();
    let max_queues = shared.max_queues.load(Ordering::Relaxed) as usize;
    let layout = layout(max_queues as u32, shared.max_keys.load(Ordering::Relaxed));
    let index = queue.map_or(max_queues, |queue| queue.index().min(max_queues));
    // SAFETY: the index is at most `max_queues`, and one more line than that was laid out at start-up.
    unsafe {
        let chunk = SHARED.load(Ordering::Relaxed).cast::<u8>();
        chunk.add(layout.waiting).cast::<WaitingLine>().add(index)
    }
}

/// The extras of a queue.
pub fn extras(queue: QueueId) -> &'static Extras {
    let shared = shared();
    let max_queues = shared.max_queues.load(Ordering::Relaxed);
    let layout = layout(max_queues, shared.max_keys.load(Ordering::Relaxed));
    // SAFETY: the index is below `max_queues`, so many records were laid out, and all their fields are atomics.
    unsafe {
        let extras = SHARED
            .load(Ordering::Relaxed)
            .cast::<u8>()
            .add(layout.extras)
            .cast::<Extras>();
        &*extras.add(queue.index().min(max_queues as usize - 1))
    }
}

fn with_ring<R>(f: impl FnOnce(&mut Ring) -> R) -> R {
    // The board's lock, taken through `with` for its handling of errors inside.
    with(|_| {
        // SAFETY: the lock makes this the only reference to the ring.
        f(unsafe { &mut (*SHARED.load(Ordering::Relaxed)).refused })
    })
}

/// Remembers a refused change for the janitor.
pub fn refuse(refused: &Refused) {
    with_ring(|ring| ring.push(refused));
}

/// Takes what was refused in one database.
pub fn take_refused(scope: u64) -> Vec<Refused> {
    with_ring(|ring| ring.take(scope))
}

/// How many refused changes found no room on their way into the audit.
pub fn refused_overflow() -> u64 {
    with_ring(|ring| ring.overflowed())
}

/// Where the sessions of a line sleep.
pub fn sleepers(queue: Option<QueueId>) -> *mut pg_sys::ConditionVariable {
    // SAFETY: the address of a field in shared memory; only Postgres' condition variable functions use it.
    unsafe { &raw mut (*line(queue)).variable }
}

/// Counts a session in or out of a line.
pub fn count_waiting(queue: Option<QueueId>, by: i32) {
    shared().waiting.fetch_add(by, Ordering::SeqCst);
    // SAFETY: the line lives as long as the server, and the field is an atomic.
    unsafe { &(*line(queue)).sessions }.fetch_add(by, Ordering::SeqCst);
}

/// How many sessions stand in a line.
pub fn waiting(queue: Option<QueueId>) -> i32 {
    // SAFETY: as above.
    unsafe { &(*line(queue)).sessions }.load(Ordering::SeqCst)
}

/// Whether somebody waits for tasks, of whatever queue.
pub fn anyone_waiting() -> bool {
    shared().waiting.load(Ordering::SeqCst) > 0
}

/// The janitors of all databases.
pub fn janitors() -> &'static [JanitorSlot] {
    &shared().janitors
}
