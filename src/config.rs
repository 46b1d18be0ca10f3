//! The settings `harvest_fair.*`.

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

static MAX_KEYS: GucSetting<i32> = GucSetting::<i32>::new(16_384);
static MAX_QUEUES: GucSetting<i32> = GucSetting::<i32>::new(1_024);
static FAIRNESS: GucSetting<bool> = GucSetting::<bool>::new(true);
static DEFAULT_LEASE: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static MAX_BATCH: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static FLUSH_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(5_000);
static SWEEP_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static PRUNE_AFTER: GucSetting<i32> = GucSetting::<i32>::new(3_600);
static RETENTION: GucSetting<i32> = GucSetting::<i32>::new(86_400);

const MICROS_PER_MS: i64 = 1_000;
const MICROS_PER_S: i64 = 1_000_000;

/// Slots of the board for keys (one for each key and tier).
pub fn max_keys() -> u32 {
    MAX_KEYS.get().max(1) as u32
}

/// Slots of the board for queues.
pub fn max_queues() -> u32 {
    MAX_QUEUES.get().max(1) as u32
}

/// Whether claims follow the fair order; off: plain priority and due order, nothing charged.
pub fn fairness() -> bool {
    FAIRNESS.get()
}

/// Length of a lease, in microseconds.
pub fn default_lease() -> i64 {
    i64::from(DEFAULT_LEASE.get()) * MICROS_PER_MS
}

/// Most tasks that one claim may ask for.
pub fn max_batch() -> i32 {
    MAX_BATCH.get()
}

/// Time between two snapshots of the board, in microseconds.
pub fn flush_interval() -> i64 {
    i64::from(FLUSH_INTERVAL.get()) * MICROS_PER_MS
}

/// Time between two sweeps, in microseconds.
pub fn sweep_interval() -> i64 {
    i64::from(SWEEP_INTERVAL.get()) * MICROS_PER_MS
}

/// Idle time after which a key in debt is forgotten, in microseconds.
pub fn prune_after() -> i64 {
    i64::from(PRUNE_AFTER.get()) * MICROS_PER_S
}

/// How long finished tasks are kept, in microseconds; `None`: for ever.
pub fn retention() -> Option<i64> {
    let seconds = RETENTION.get();
    (seconds >= 0).then(|| i64::from(seconds) * MICROS_PER_S)
}

/// Registers the settings; called once, while the postmaster loads the library.
pub fn register() {
    let int = |name, short, long, setting, min, max, context, flags| {
        GucRegistry::define_int_guc(name, short, long, setting, min, max, context, flags);
    };
    int(
        c"harvest_fair.max_keys",
        c"Keys that the board has room for.",
        c"One slot for each fairness key in each priority of each queue that has work.",
        &MAX_KEYS,
        16,
        10_000_000,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    int(
        c"harvest_fair.max_queues",
        c"Queues that the board has room for.",
        c"Counted over all databases of the server.",
        &MAX_QUEUES,
        1,
        1_000_000,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        c"harvest_fair.fairness",
        c"Claims follow the weighted fair order.",
        c"Off: plain priority and due order; keys are ignored and nothing is charged.",
        &FAIRNESS,
        GucContext::Suset,
        GucFlags::default(),
    );
    int(
        c"harvest_fair.default_lease",
        c"Length of the lease of a claimed task.",
        c"A task whose lease has run out is put back.",
        &DEFAULT_LEASE,
        1,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    int(
        c"harvest_fair.max_batch",
        c"Most tasks that one claim may ask for.",
        c"",
        &MAX_BATCH,
        1,
        100_000,
        GucContext::Userset,
        GucFlags::default(),
    );
    int(
        c"harvest_fair.flush_interval",
        c"Time between two snapshots of the board into harvest_fair.key_state.",
        c"Only keys that changed are written. After a crash, passes are back to the last snapshot.",
        &FLUSH_INTERVAL,
        100,
        3_600_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    int(
        c"harvest_fair.sweep_interval",
        c"Time between two sweeps that add to the board what it missed.",
        c"Rows of prepared transactions, of sessions without triggers, and of keys for which the board had no room.",
        &SWEEP_INTERVAL,
        100,
        3_600_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    int(
        c"harvest_fair.prune_after",
        c"Idle time after which the board forgets a key.",
        c"Forgives at most one claim's worth of debt.",
        &PRUNE_AFTER,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    int(
        c"harvest_fair.retention",
        c"How long finished tasks are kept.",
        c"-1 keeps them for ever.",
        &RETENTION,
        -1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    // SAFETY: a constant C string; the server is starting, no other thread exists.
    unsafe { pgrx::pg_sys::MarkGUCPrefixReserved(c"harvest_fair".as_ptr()) };
}
