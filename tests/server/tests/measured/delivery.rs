//! Producers with slow commits against waiting workers: every task arrives, and soon.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Cluster, Database, claim, claim_waiting, one, pending};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{quantile, turn};

const RUN: Duration = Duration::from_secs(30);
const PRODUCERS: u64 = 6;
const WORKERS: usize = 4;
const SOON: Duration = Duration::from_millis(100);

/// How long the machine kept a bystander waiting who has nothing to do with the queue: his session sleeps for a moment
/// again and again, and each time it takes this much longer.
fn watch_the_machine(db: &Database, running: &AtomicBool) -> Vec<Duration> {
    const MOMENT: Duration = Duration::from_millis(5);
    let mut client = db.connect();
    let mut late = Vec::new();
    while running.load(Ordering::Relaxed) {
        let start = Instant::now();
        client.batch_execute("SELECT pg_sleep(0.005)").unwrap();
        late.push(start.elapsed().saturating_sub(MOMENT));
    }
    late
}

#[test]
fn tasks_are_claimed_within_a_tenth_of_a_second_of_their_commit() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let (producing, watching) = (AtomicBool::new(true), AtomicBool::new(true));
    let committed: Mutex<HashMap<i64, Instant>> = Mutex::default();
    let claimed: Mutex<Vec<(i64, Instant)>> = Mutex::default();
    let end = Instant::now() + RUN;
    let machine = thread::scope(|scope| {
        let bystander = scope.spawn(|| watch_the_machine(&db, &watching));
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|producer| {
                let (db, committed) = (&db, &committed);
                scope.spawn(move || {
                    let mut random = StdRng::seed_from_u64(producer);
                    let mut client = db.connect();
                    while Instant::now() < end {
                        let (n, key) = (random.random_range(1..=5i64), random.random_range(0..40i64));
                        let (before, after) = (random.random_range(0.0..0.03), random.random_range(0.005..0.05));
                        let mut transaction = client.transaction().unwrap();
                        transaction.execute("SELECT pg_sleep($1)", &[&before]).unwrap();
                        let ids: Vec<i64> = transaction
                            .query(
                                "INSERT INTO harvest_fair.task (queue, fairness_key, priority)
                                 SELECT 'q', 'k' || ($2 + i) % 40, 1 + ($2 + i) % 3 FROM generate_series(1, $1::bigint) i RETURNING id",
                                &[&n, &key],
                            )
                            .unwrap()
                            .iter()
                            .map(|row| row.get(0))
                            .collect();
                        transaction.execute("SELECT pg_sleep($1)", &[&after]).unwrap();
                        if random.random_ratio(1, 10) {
                            transaction.rollback().unwrap();
                            continue;
                        }
                        transaction.commit().unwrap();
                        let now = Instant::now();
                        committed.lock().unwrap().extend(ids.into_iter().map(|id| (id, now)));
                    }
                })
            })
            .collect();
        let workers: Vec<_> = (0..WORKERS)
            .map(|_| {
                let (db, claimed, producing) = (&db, &claimed, &producing);
                scope.spawn(move || {
                    let mut client = db.connect();
                    loop {
                        let last = !producing.load(Ordering::Relaxed);
                        let tasks = claim_waiting(&mut client, "q", "w", 10, "500 ms");
                        let now = Instant::now();
                        if last && tasks.is_empty() {
                            break;
                        }
                        claimed
                            .lock()
                            .unwrap()
                            .extend(tasks.iter().map(|task| (task.id, now)));
                    }
                })
            })
            .collect();
        for producer in producers {
            producer.join().unwrap();
        }
        producing.store(false, Ordering::Relaxed);
        for worker in workers {
            worker.join().unwrap();
        }
        watching.store(false, Ordering::Relaxed);
        bystander.join().unwrap()
    });

    let committed = committed.into_inner().unwrap();
    let claimed = claimed.into_inner().unwrap();
    let mut client = db.connect();
    assert_eq!(pending(&mut client, "q"), 0, "tasks are left");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert_eq!(
        claimed.len(),
        committed.len(),
        "claimed and committed tasks"
    );
    let mut delays = Vec::new();
    for (id, at) in &claimed {
        let commit = committed
            .get(id)
            .unwrap_or_else(|| panic!("task {id} was claimed but never committed"));
        delays.push(at.saturating_duration_since(*commit));
    }
    let missed: i64 = one(
        &mut client,
        "SELECT coalesce(sum(missed_wakeups), 0)::bigint FROM harvest_fair.stats WHERE queue = 'q'",
        &[],
    );
    println!(
        "{} tasks of {PRODUCERS} slow producers: claimed {:?} after their commit (median), {:?} (99th percentile), \
         {:?} (the slowest), {} after {SOON:?}; a bystander's sleeps ended {:?} late (median), {:?} (99th percentile), {:?} (the slowest)",
        delays.len(),
        quantile(&delays, 0.5),
        quantile(&delays, 0.99),
        quantile(&delays, 1.0),
        delays.iter().filter(|delay| **delay > SOON).count(),
        quantile(&machine, 0.5),
        quantile(&machine, 0.99),
        quantile(&machine, 1.0),
    );
    assert!(
        delays.len() > 1_000,
        "only {} tasks: the machine is too slow to tell",
        delays.len()
    );
    // A delivery is a few wake-ups, of the worker's session and of the worker, each of which the machine may hold up.
    for share in [0.5, 0.9, 0.99] {
        let (delay, most) = (
            quantile(&delays, share),
            SOON + quantile(&machine, share) * 5,
        );
        assert!(
            delay <= most,
            "{share} of the tasks came within {delay:?}, not {most:?}"
        );
    }
    // A task that nobody was woken for would wait for the next sweep, or the next task of the queue.
    let (slowest, most) = (
        quantile(&delays, 1.0),
        SOON * 10 + quantile(&machine, 1.0) * 5,
    );
    assert!(slowest <= most, "one task waited {slowest:?}, not {most:?}");
    assert_eq!(missed, 0, "missed wake-ups");
}
