//! Sessions that come, fail, are cancelled and terminated at any moment: the board agrees with the table afterwards.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{ClaimedTask, Database, PATIENCE, pid_of, try_claim, wait_until};
use postgres::{Client, Error, GenericClient};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{assert_all_different, drain, execute, restless, stat, states, was_struck};

const RUN: Duration = Duration::from_secs(12);
const HITS: usize = 50;

/// The sessions that may be shot at, and how often one was hit while it did something.
struct Targets {
    since: Instant,
    pids: Mutex<Vec<i32>>,
    hits: AtomicUsize,
}

impl Targets {
    /// Until the time is over and enough has happened: a slow machine takes longer.
    fn go_on(&self) -> bool {
        let length = self.since.elapsed();
        length < RUN || (length < PATIENCE && self.hits.load(Ordering::Relaxed) <= HITS)
    }
}

/// Connects again and again, each time with a life of its own, until the time is over.
fn live(
    db: &Database,
    targets: &Targets,
    seed: u64,
    act: impl Fn(&mut Client, &mut StdRng) -> Result<(), Error>,
) {
    let mut random = StdRng::seed_from_u64(seed);
    while targets.go_on() {
        let mut client = db.connect();
        let pid = pid_of(&mut client);
        targets.pids.lock().unwrap().push(pid);
        while targets.go_on() && !client.is_closed() {
            if let Err(error) = act(&mut client, &mut random) {
                assert!(was_struck(&error), "{error:?}");
                // What it has left open must not reach the next turn. Cancelled too, it comes again then.
                let _ = client.batch_execute("ROLLBACK");
                targets.hits.fetch_add(1, Ordering::Relaxed);
            }
        }
        targets.pids.lock().unwrap().retain(|target| *target != pid);
    }
}

fn produce(client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let mut transaction = client.transaction()?;
    for _ in 0..random.random_range(1..4) {
        let (key, n) = (random.random_range(0..8), random.random_range(1..6i64));
        let priority = *["2", "3", "NULL"].choose(random).unwrap();
        transaction.execute(
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, priority, max_attempts, scheduled_at)
                 SELECT 'q', 'k{key}', {priority}, 1000, now() + ({} * interval '1 ms') FROM generate_series(1, $1::bigint)",
                random.random_range(-500..100)
            ),
            &[&n],
        )?;
    }
    if random.random_ratio(1, 6) {
        transaction.rollback()
    } else {
        transaction.commit()
    }
}

fn settle(
    client: &mut impl GenericClient,
    task: &ClaimedTask,
    random: &mut StdRng,
) -> Result<(), Error> {
    let call = *[
        "fair_complete($1::bigint, $2::bigint)",
        "fair_complete($1::bigint, $2::bigint, 3)",
        "fair_release($1::bigint, $2::bigint)",
        "fair_fail($1::bigint, $2::bigint, 'x', '20 ms')",
    ]
    .choose(random)
    .unwrap();
    client
        .execute(&format!("SELECT {call}"), &[&task.id, &task.lease])
        .map(|_| ())
}

fn work(client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let n = random.random_range(1..12);
    let mut transaction = client.transaction()?;
    let mut tasks = try_claim(&mut transaction, "q", "w", n)?;
    if random.random_ratio(1, 3) {
        let mut savepoint = transaction.savepoint("s")?;
        try_claim(&mut savepoint, "q", "w", n)?;
        if random.random() {
            savepoint.rollback()?;
        } else {
            savepoint.commit()?;
        }
    }
    if random.random_ratio(1, 4) {
        transaction.batch_execute("SELECT pg_sleep(0.01)")?;
    }
    if random.random_ratio(1, 5) {
        return transaction.rollback();
    }
    transaction.commit()?;
    tasks.retain(|_| random.random_ratio(9, 10));
    for task in &tasks {
        settle(client, task, random)?;
    }
    Ok(())
}

fn wait_for_work(client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let tasks = harvest_fair_server_tests::try_claim_waiting(client, "q", "waiter", 3, "200 ms")?;
    for task in &tasks {
        settle(client, task, random)?;
    }
    Ok(())
}

fn meddle(client: &mut Client, random: &mut StdRng) -> Result<(), Error> {
    let change = *[
        "UPDATE harvest_fair.task SET fairness_key = 'k' || (id % 9)",
        "UPDATE harvest_fair.task SET priority = 1 + id % 3",
        "UPDATE harvest_fair.task SET state = 'pending'",
        "UPDATE harvest_fair.task SET scheduled_at = now() + interval '30 ms'",
        "UPDATE harvest_fair.task SET lease_until = now()",
        "DELETE FROM harvest_fair.task",
    ]
    .choose(random)
    .unwrap();
    let state = *["pending", "running"].choose(random).unwrap();
    client.batch_execute(&format!(
        "{change} WHERE id IN (SELECT id FROM harvest_fair.task WHERE state = '{state}' ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED);
         SELECT pg_sleep(0.02)"
    ))
}

#[test]
fn whatever_happens_to_its_sessions_the_board_agrees_with_the_table() {
    let db = restless().database();
    let targets = Targets {
        since: Instant::now(),
        pids: Mutex::default(),
        hits: AtomicUsize::default(),
    };
    thread::scope(|scope| {
        let (db, targets) = (&db, &targets);
        for seed in 0..3 {
            scope.spawn(move || live(db, targets, seed, produce));
            scope.spawn(move || live(db, targets, 100 + seed, work));
        }
        scope.spawn(move || live(db, targets, 200, wait_for_work));
        scope.spawn(move || live(db, targets, 300, meddle));
        scope.spawn(move || {
            let mut client = db.connect();
            let mut random = StdRng::seed_from_u64(400);
            while targets.go_on() {
                thread::sleep(Duration::from_millis(random.random_range(1..30)));
                let target = targets.pids.lock().unwrap().choose(&mut random).copied();
                let shot = if random.random_ratio(1, 5) {
                    "pg_terminate_backend"
                } else {
                    "pg_cancel_backend"
                };
                if let Some(pid) = target {
                    client
                        .execute(&format!("SELECT {shot}($1)"), &[&pid])
                        .unwrap();
                }
            }
        });
    });

    let mut client = db.connect();
    wait_until("the sessions are gone", PATIENCE, || {
        harvest_fair_server_tests::one(
            &mut client,
            "SELECT count(*) = 1 FROM pg_stat_activity
             WHERE datname = current_database() AND backend_type = 'client backend'",
            &[],
        )
    });
    assert_running_counts_agree(&mut client);
    let pending = pending_ids(&mut client);
    let mut drained = Vec::new();
    wait_until("nothing is pending", PATIENCE, || {
        drained.extend(drain(&mut client, "q", 50));
        pending_ids(&mut client).is_empty()
    });
    assert_all_different(&drained);
    let mut claimed: Vec<i64> = drained.iter().map(|task| task.id).collect();
    claimed.sort_unstable();
    assert!(
        pending.iter().all(|id| claimed.binary_search(id).is_ok()),
        "tasks were lost"
    );
    assert_running_counts_agree(&mut client);
    assert_eq!(stat(&mut client, "q", "missed_wakeups"), 0);
    let total: i64 =
        harvest_fair_server_tests::one(&mut client, "SELECT count(*) FROM harvest_fair.task", &[]);
    assert!(total > 300, "only {total} tasks");
    let hits = targets.hits.into_inner();
    println!("{total} tasks, {hits} statements interrupted");
    assert!(hits > HITS, "only {hits} statements were interrupted");
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'after')",
    );
    assert_eq!(drain(&mut client, "q", 5).len(), 1);
}

fn pending_ids(client: &mut Client) -> Vec<i64> {
    client
        .query(
            "SELECT id FROM harvest_fair.task WHERE state = 'pending' ORDER BY id",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect()
}

/// The running tasks of each key, as the board and as the table have them.
fn assert_running_counts_agree(client: &mut Client) {
    let mut board: BTreeMap<String, i64> = BTreeMap::new();
    for state in states(client, "q") {
        // A key's count is shown at each of its priorities.
        board.insert(state.key, state.running);
    }
    board.retain(|_, running| *running != 0);
    let table: BTreeMap<String, i64> = client
        .query(
            "SELECT fairness_key, count(*) FROM harvest_fair.task WHERE state = 'running' GROUP BY fairness_key",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    assert_eq!(board, table);
}
