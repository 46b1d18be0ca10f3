//! A steady load of producers and workers in two databases, while one fault after another strikes. A ledger outside of the
//! database knows what each client was told: no task is lost, and none is done twice but by a lease that ran out. After
//! each fault the board agrees with the tables, and no cap was ever exceeded.
//!
//! `make soak` runs it for longer: `HF_SOAK_SECONDS` says how long, `HF_SOAK_SEED` repeats a run's choices.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Options, Shutdown, holds_within, one, pid_of, sqlstate_of, try_claim, wait_until,
};
use postgres::{Client, Error};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::soak_ledger::{Ledger, Told};
use crate::support::{differences, execute, was_struck};

/// How long a lease lasts in the test.
const LEASE: Duration = Duration::from_secs(3);
const CAP: i64 = 4;
/// Keys that are always busy, in each database.
const KEYS: i64 = 8;
/// Time for recovery, the healing sweep and the drain of what a fault has added.
const SETTLING: Duration = Duration::from_secs(60);

/// A database under load.
struct World<'c> {
    cluster: &'c Cluster,
    database: String,
    ledger: &'c Ledger,
    stop: &'c AtomicBool,
    /// statement_timeout of the clients (ms).
    timeout: &'c AtomicU32,
}

impl World<'_> {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A connection, as soon as the server takes one; `None` when the load is over.
    fn connect(&self) -> Option<Client> {
        while !self.stopped() {
            if let Ok(client) = self.cluster.try_connect(&self.database) {
                return Some(client);
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// Connects again and again, and acts until the connection breaks.
    fn live(&self, seed: u64, act: impl Fn(&Self, &mut Client, &mut StdRng) -> Result<(), Error>) {
        let mut random = StdRng::seed_from_u64(seed);
        while let Some(mut client) = self.connect() {
            while !self.stopped() && !client.is_closed() {
                let timeout = self.timeout.load(Ordering::Relaxed);
                let set = client.batch_execute(&format!("SET statement_timeout = {timeout}"));
                if let Err(error) = set.and_then(|()| act(self, &mut client, &mut random)) {
                    self.tolerate(&error);
                    // What a broken transaction has left behind must not reach the next one.
                    if client.batch_execute("ROLLBACK").is_err() {
                        break;
                    }
                }
            }
        }
    }

    fn tolerate(&self, error: &Error) {
        // The server may be on its way down or up, too.
        let code = sqlstate_of(error);
        let is_restart = ["57P02", "57P03", "53300"].contains(&code);
        let is_disk = error
            .as_db_error()
            .is_some_and(|error| error.message().contains("File too large"));
        assert!(is_disk || is_restart || was_struck(error), "{error:?}");
    }
}

fn produce(world: &World, client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let waiting: i64 = client
        .query_one(
            "SELECT count(*) FROM (SELECT FROM harvest_fair.task WHERE state = 'pending' LIMIT 400) t",
            &[],
        )?
        .get(0);
    if waiting >= 400 {
        thread::sleep(Duration::from_millis(20));
        return Ok(());
    }
    let ids = world.ledger.new_ids(random.random_range(1..20));
    let keep = random.random_ratio(9, 10);
    let mut transaction = client.transaction()?;
    transaction.execute(
        &format!(
            "INSERT INTO harvest_fair.task (id, queue, fairness_key, priority, max_attempts, scheduled_at)
             SELECT id, 'q', 'k' || id % {KEYS}, 2 + id % 2, 1000000, now() + (id % 40 - 35) * interval '10 ms'
             FROM unnest($1::bigint[]) id"
        ),
        &[&ids],
    )?;
    if keep {
        transaction.commit()?;
        world.ledger.enqueued(&ids, Told::Yes);
    } else {
        transaction.rollback()?;
        world.ledger.enqueued(&ids, Told::No);
    }
    Ok(())
}

fn work(world: &World, client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let began = Instant::now();
    let mut transaction = client.transaction()?;
    let tasks = try_claim(&mut transaction, "q", "w", random.random_range(1..6))?;
    if random.random_ratio(1, 12) {
        return transaction.rollback();
    }
    transaction.commit()?;
    for task in &tasks {
        world.ledger.handed_out(task.id, task.lease, began);
    }
    if tasks.is_empty() {
        thread::sleep(Duration::from_millis(5));
    }
    for task in &tasks {
        let kind = random.random_range(0..40);
        let call = match kind {
            // Left to its lease.
            0 => continue,
            1..4 => "fair_release($1::bigint, $2::bigint)",
            4..6 => "fair_fail($1::bigint, $2::bigint, 'x', '10 ms') IS NOT NULL",
            _ => "fair_complete($1::bigint, $2::bigint, 2)",
        };
        if kind < 6 {
            world.ledger.gives_back(task.id, task.lease);
        }
        let answer = client.query_one(&format!("SELECT {call}"), &[&task.id, &task.lease]);
        if kind >= 6 {
            let told = match &answer {
                Ok(row) if row.get(0) => Told::Yes,
                Ok(_) => Told::No,
                Err(_) => Told::Unknown,
            };
            world.ledger.completed(task.id, told);
        }
        answer?;
    }
    Ok(())
}

/// Holds tasks for longer than their lease, and then tries to complete them.
fn dawdle(world: &World, client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let began = Instant::now();
    let tasks = try_claim(client, "q", "slow", 2)?;
    for task in &tasks {
        world.ledger.handed_out(task.id, task.lease, began);
    }
    thread::sleep(LEASE.mul_f64(random.random_range(0.9..1.3)));
    for task in &tasks {
        let answer = client.query_one(
            "SELECT fair_complete($1::bigint, $2::bigint)",
            &[&task.id, &task.lease],
        );
        let told = match &answer {
            Ok(row) if row.get(0) => Told::Yes,
            Ok(_) => Told::No,
            Err(_) => Told::Unknown,
        };
        world.ledger.completed(task.id, told);
        answer?;
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    KillBackend,
    KillJanitor,
    ImmediateRestart,
    TerminateStorm,
    StatementTimeouts,
    FrozenBackends,
    ManyKeys,
    TriggersOff,
    OtherExtension,
    FullDisk,
}

const FAULTS: [Fault; 10] = [
    Fault::KillBackend,
    Fault::KillJanitor,
    Fault::ImmediateRestart,
    Fault::TerminateStorm,
    Fault::StatementTimeouts,
    Fault::FrozenBackends,
    Fault::ManyKeys,
    Fault::TriggersOff,
    Fault::OtherExtension,
    Fault::FullDisk,
];

/// Processes of the worlds' clients.
fn backends(worlds: &[World]) -> Vec<i32> {
    pids(
        worlds,
        "backend_type = 'client backend' AND pid <> pg_backend_pid()",
    )
}

fn pids(worlds: &[World], which: &str) -> Vec<i32> {
    let names: Vec<&str> = worlds.iter().map(|world| world.database.as_str()).collect();
    let rows = worlds[0].cluster.connect().query(
        &format!("SELECT pid FROM pg_stat_activity WHERE datname = ANY ($1) AND {which}"),
        &[&names],
    );
    rows.unwrap().iter().map(|row| row.get(0)).collect()
}

fn inject(fault: Fault, worlds: &[World], random: &mut StdRng) {
    let cluster = worlds[0].cluster;
    match fault {
        Fault::KillBackend | Fault::KillJanitor => {
            let mut victims = Vec::new();
            wait_until("there is somebody to kill", SETTLING, || {
                victims = if matches!(fault, Fault::KillBackend) {
                    backends(worlds)
                } else {
                    pids(worlds, "backend_type = 'harvest_fair janitor'")
                };
                !victims.is_empty()
            });
            let witness = cluster.connect();
            cluster.kill_9(*victims.choose(random).unwrap());
            cluster.wait_for_recovery(witness);
        }
        Fault::FullDisk => {
            // No room for the log of what has been done: the server goes down and comes back by itself.
            let witness = cluster.connect();
            // One that completes tasks all the time.
            wait_until("there is somebody who writes", SETTLING, || {
                let writers = pids(worlds, "query LIKE 'SELECT fair_complete(%, 2)'");
                let writer = writers.choose(random);
                writer
                    .inspect(|pid| cluster.limit_files(**pid, 1 << 16))
                    .is_some()
            });
            cluster.wait_for_recovery(witness);
        }
        Fault::ImmediateRestart => cluster.restart(Shutdown::Immediate),
        Fault::TerminateStorm => {
            let mut client = cluster.connect();
            for _ in 0..30 {
                if let Some(pid) = backends(worlds).choose(random) {
                    execute(&mut client, &format!("SELECT pg_terminate_backend({pid})"));
                }
            }
        }
        Fault::StatementTimeouts => {
            for timeout in [1, 2, 5, 3] {
                worlds[0].timeout.store(timeout, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(300));
            }
            worlds[0].timeout.store(0, Ordering::Relaxed);
        }
        Fault::FrozenBackends => {
            let mut frozen = backends(worlds);
            frozen.shuffle(random);
            frozen.truncate(2);
            for pid in &frozen {
                cluster.signal(*pid, "STOP");
            }
            // Until what they hold has long been given to others.
            thread::sleep(LEASE + Duration::from_millis(500));
            for pid in &frozen {
                cluster.signal(*pid, "CONT");
            }
        }
        Fault::ManyKeys => insert(&worlds[0], "SET harvest_fair.fairness = on", 1_000),
        Fault::TriggersOff => {
            for world in worlds {
                insert(world, "SET session_replication_role = replica", 40);
            }
        }
        Fault::OtherExtension => {
            let db = cluster.empty_database();
            let mut client = db.connect();
            for _ in 0..3 {
                execute(
                    &mut client,
                    "CREATE EXTENSION harvest_fair;
                     INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i % 9 FROM generate_series(1, 30) i;",
                );
                let claimed = try_claim(&mut client, "q", "w", 20).unwrap().len();
                assert!((1..=20).contains(&claimed), "{claimed} claimed");
                execute(&mut client, "DROP EXTENSION harvest_fair CASCADE");
            }
        }
    }
}

/// Adds tasks of as many keys, after `first`.
fn insert(world: &World, first: &str, n: i64) {
    let ids = world.ledger.new_ids(n);
    let mut client = world.cluster.connect_db(&world.database);
    execute(&mut client, first);
    client
        .execute(
            "INSERT INTO harvest_fair.task (id, queue, fairness_key, priority, max_attempts)
             SELECT id, 'q', 'many ' || id, 3, 1000000 FROM unnest($1::bigint[]) id",
            &[&ids],
        )
        .unwrap();
    world.ledger.enqueued(&ids, Told::Yes);
}

/// Waits until the board of each database agrees with its tables, under load.
fn settle(worlds: &[World], after: &str) {
    for world in worlds {
        let mut client = world.cluster.connect_db(&world.database);
        let mut found = Vec::new();
        let settled = holds_within(SETTLING, || {
            assert_caps(&mut client);
            found = differences(&mut client);
            found.is_empty()
        });
        assert!(settled, "after {after}, in {}: {found:#?}", world.database);
    }
}

fn assert_caps(client: &mut Client) {
    let most: i64 = one(
        client,
        "SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM harvest_fair.task WHERE state = 'running' GROUP BY fairness_key) t",
        &[],
    );
    assert!(most <= CAP, "{most} tasks of one key run");
}

/// Ends the load, also when the test panics.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `script` while producers and workers of all worlds are at it.
fn under_load(worlds: &[World], seed: u64, script: impl FnOnce()) {
    worlds[0].stop.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let _stop = StopAtEnd(worlds[0].stop);
        for (world, n) in worlds.iter().zip(0..) {
            let seed = seed.wrapping_add(100 * n);
            for i in 0..2 {
                scope.spawn(move || world.live(seed + i, produce));
            }
            for i in 10..13 {
                scope.spawn(move || world.live(seed + i, work));
            }
            scope.spawn(move || world.live(seed + 20, dawdle));
        }
        script();
    });
}

fn options() -> Options {
    Options::new()
        .set("harvest_fair.max_keys", 64)
        .set("harvest_fair.sweep_interval", "200ms")
        .set("harvest_fair.flush_interval", "500ms")
        .set(
            "harvest_fair.default_lease",
            format!("{}ms", LEASE.as_millis()),
        )
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn whatever_strikes_no_task_is_lost_and_none_is_done_twice() {
    let length = Duration::from_secs(from_environment("HF_SOAK_SECONDS").unwrap_or(25));
    let seed = from_environment("HF_SOAK_SEED").unwrap_or_else(|| rand::rng().random());
    println!("HF_SOAK_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let cluster = Cluster::start(options());
    let dbs = [cluster.database(), cluster.database()];
    let ledgers = [Ledger::new(LEASE), Ledger::new(LEASE)];
    let (stop, timeout) = (AtomicBool::new(false), AtomicU32::new(0));
    let worlds_on = |cluster| -> Vec<World> {
        let world = |(db, ledger): (&harvest_fair_server_tests::Database, _)| World {
            cluster,
            database: db.name().to_owned(),
            ledger,
            stop: &stop,
            timeout: &timeout,
        };
        dbs.iter().zip(&ledgers).map(world).collect()
    };
    for db in &dbs {
        db.connect_with(&format!(
            r#"SELECT fair_configure('q', '{{"key_max_running": {CAP}}}')"#
        ));
    }
    let worlds = worlds_on(&cluster);
    let (began, mut injected) = (Instant::now(), 0);
    under_load(&worlds, seed, || {
        // Each fault at least once.
        let mut left = Vec::new();
        while injected < FAULTS.len() || began.elapsed() < length {
            if left.is_empty() {
                left = FAULTS.to_vec();
                left.shuffle(&mut random);
            }
            let fault = left.pop().unwrap();
            let start = Instant::now();
            inject(fault, &worlds, &mut random);
            let struck = start.elapsed();
            settle(&worlds, &format!("{fault:?}"));
            injected += 1;
            println!(
                "{fault:?}: {struck:.1?}, settled after {:.1?}",
                start.elapsed()
            );
        }
    });
    agree(&worlds);

    let standby = cluster.standby(options());
    let written: String = one(
        &mut cluster.connect(),
        "SELECT pg_current_wal_lsn()::text",
        &[],
    );
    let mut reader = standby.connect();
    wait_until("the standby has caught up", SETTLING, || {
        one(
            &mut reader,
            "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn",
            &[&written],
        )
    });
    cluster.stop(Shutdown::Immediate);
    standby.promote();
    let worlds = worlds_on(&standby);
    under_load(&worlds, seed.wrapping_add(1_000), || {
        settle(&worlds, "promotion");
        thread::sleep(Duration::from_secs(1));
        settle(&worlds, "work on the promoted standby");
    });
    agree(&worlds);
    println!("{injected} faults in {:.0?}", began.elapsed());
    cluster.start_server();
}

/// The ledgers agree with the tables, and the boards too, while nobody works.
fn agree(worlds: &[World]) {
    for world in worlds {
        let mut client = world.cluster.connect_db(&world.database);
        let pid = pid_of(&mut client);
        wait_until("its clients are gone", SETTLING, || {
            one(
                &mut client,
                "SELECT count(*) = 0 FROM pg_stat_activity
                 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> $1",
                &[&pid],
            )
        });
        println!(
            "{}: {}",
            world.database,
            world.ledger.assert_agrees(&mut client)
        );
        wait_until("the board agrees", SETTLING, || {
            differences(&mut client).is_empty()
        });
    }
}
