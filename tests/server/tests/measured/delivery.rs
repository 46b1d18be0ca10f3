//! Producers with slow commits against waiting workers: every task arrives, and soon.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Cluster, claim, claim_waiting, one, pending};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{quantile, turn};

const RUN: Duration = Duration::from_secs(30);
const PRODUCERS: u64 = 6;
const WORKERS: usize = 4;
const SOON: Duration = Duration::from_millis(100);
/// A pause this long between two looks of the bystander, who looks every 5 ms, means that the machine itself stood still.
const STALL: Duration = Duration::from_millis(40);

/// When the machine kept even an idle bystander waiting.
fn watch_for_stalls(running: &AtomicBool) -> Vec<(Instant, Instant)> {
    let mut stalls = Vec::new();
    let mut last = Instant::now();
    while running.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(5));
        let now = Instant::now();
        if now - last > STALL {
            stalls.push((last, now));
        }
        last = now;
    }
    stalls
}

#[test]
fn every_task_is_claimed_within_a_tenth_of_a_second_of_its_commit() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let (producing, watching) = (AtomicBool::new(true), AtomicBool::new(true));
    let committed: Mutex<HashMap<i64, Instant>> = Mutex::default();
    let claimed: Mutex<Vec<(i64, Instant)>> = Mutex::default();
    let end = Instant::now() + RUN;
    let stalls = thread::scope(|scope| {
        let bystander = scope.spawn(|| watch_for_stalls(&watching));
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
    let (mut late, mut excused) = (Vec::new(), 0);
    for (id, at) in &claimed {
        let commit = committed
            .get(id)
            .unwrap_or_else(|| panic!("task {id} was claimed but never committed"));
        let delay = at.saturating_duration_since(*commit);
        delays.push(delay);
        if delay > SOON {
            if stalls.iter().any(|(from, to)| from < at && to > commit) {
                excused += 1;
            } else {
                late.push(delay);
            }
        }
    }
    let missed: i64 = one(
        &mut client,
        "SELECT coalesce(sum(missed_wakeups), 0)::bigint FROM harvest_fair.stats WHERE queue = 'q'",
        &[],
    );
    println!(
        "{} tasks of {PRODUCERS} slow producers: claimed {:?} after their commit (median), {:?} (99th percentile); \
         {} stalls of the machine, {excused} tasks late because of them",
        delays.len(),
        quantile(&delays, 0.5),
        quantile(&delays, 0.99),
        stalls.len(),
    );
    assert!(
        delays.len() > 3_000,
        "only {} tasks: the machine is too slow to tell",
        delays.len()
    );
    assert!(late.is_empty(), "{} tasks came late: {late:?}", late.len());
    assert!(
        excused * 100 <= delays.len(),
        "{excused} of {} tasks came late",
        delays.len()
    );
    assert_eq!(missed, 0, "missed wake-ups");
}
