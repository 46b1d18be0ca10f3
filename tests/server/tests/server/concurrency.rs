//! Many workers at once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, claim, complete, count, flood, one, pending,
};

use crate::support::{assert_all_different, assert_near, drain, execute, state, states};

/// `total` claims of one task by `workers` connections; each claim's transaction stays open for 2 ms.
fn claim_concurrently(db: &Database, workers: usize, total: usize) -> Vec<ClaimedTask> {
    let started = AtomicUsize::new(0);
    let all = Mutex::new(Vec::new());
    let ready = Barrier::new(workers);
    thread::scope(|scope| {
        for worker in 0..workers {
            let (started, all, ready) = (&started, &all, &ready);
            scope.spawn(move || {
                let mut client = db.connect();
                let name = format!("worker {worker}");
                ready.wait();
                while started.fetch_add(1, Ordering::Relaxed) < total {
                    let mut transaction = client.transaction().unwrap();
                    let tasks = claim(&mut transaction, "q", &name, 1);
                    transaction.batch_execute("SELECT pg_sleep(0.002)").unwrap();
                    transaction.commit().unwrap();
                    all.lock().unwrap().extend(tasks);
                }
            });
        }
    });
    all.into_inner().unwrap()
}

fn shares_are_exact_with(workers: usize) {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (key, weight) in [("A", 1), ("B", 1), ("C", 4)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 600, "1 hour");
    }
    let tasks = claim_concurrently(&db, workers, 600);
    assert_eq!(tasks.len(), 600);
    assert_all_different(&tasks);
    assert_near(count(&tasks, "A"), 100, 2, "claims of A");
    assert_near(count(&tasks, "B"), 100, 2, "claims of B");
    assert_near(count(&tasks, "C"), 400, 2, "claims of C");
    let running: i64 = states(&mut client, "q")
        .iter()
        .map(|state| state.running)
        .sum();
    assert_eq!(running, 600);
    assert_eq!(pending(&mut client, "q"), 1200);
}

#[test]
fn one_claimer_shares_by_weight() {
    shares_are_exact_with(1);
}

#[test]
fn two_claimers_share_by_weight() {
    shares_are_exact_with(2);
}

#[test]
fn eight_claimers_share_by_weight() {
    shares_are_exact_with(8);
}

#[test]
fn sixteen_claimers_share_by_weight() {
    shares_are_exact_with(16);
}

#[test]
fn claimers_that_drain_a_queue_get_every_task_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         SELECT 'q', 'k' || i % 17, 1 + i % 3, now() - i * interval '1 ms' FROM generate_series(1, 3000) i",
    );
    let all = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for worker in 0..8 {
            let (all, db) = (&all, &db);
            scope.spawn(move || {
                let mut client = db.connect();
                loop {
                    let tasks = claim(&mut client, "q", "w", 1 + worker % 4 * 5);
                    if tasks.is_empty() {
                        break;
                    }
                    for task in &tasks {
                        assert!(complete(&mut client, task));
                    }
                    all.lock().unwrap().extend(tasks);
                }
            });
        }
    });
    let mut all = all.into_inner().unwrap();
    // A claim may come up empty while others hold the last rows; what they then gave back would still be here.
    all.extend(drain(&mut client, "q", 100));
    assert_all_different(&all);
    assert_eq!(all.len(), 3000);
    for state in states(&mut client, "q") {
        assert_eq!(state.running, 0, "{state:?}");
    }
}

#[test]
fn every_session_gets_work_when_all_claim_at_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key)
         SELECT 'q', 'k' || i % 30 FROM generate_series(1, 6000) i",
    );
    let ready = Barrier::new(8);
    let got = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..8 {
            let (ready, db, got) = (&ready, &db, &got);
            scope.spawn(move || {
                let mut client = db.connect();
                ready.wait();
                let mut transaction = client.transaction().unwrap();
                let tasks = claim(&mut transaction, "q", "w", 10);
                ready.wait();
                transaction.commit().unwrap();
                got.lock().unwrap().push(tasks);
            });
        }
    });
    let got = got.into_inner().unwrap();
    assert!(got.iter().all(|tasks| tasks.len() == 10));
    assert_all_different(&got.concat());
}

#[test]
fn aborts_among_concurrent_claims_lose_nothing_and_keep_the_shares() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (key, weight) in [("A", 1), ("B", 2)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 900, "1 hour");
    }
    let all = Mutex::new(Vec::new());
    let claimed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for worker in 0..6 {
            let (all, claimed, db) = (&all, &claimed, &db);
            scope.spawn(move || {
                let mut client = db.connect();
                let mut round = worker;
                while claimed.load(Ordering::Relaxed) < 900 {
                    round += 1;
                    let mut transaction = client.transaction().unwrap();
                    let tasks = claim(&mut transaction, "q", "w", 3);
                    if round % 4 == 0 {
                        transaction.rollback().unwrap();
                    } else {
                        transaction.commit().unwrap();
                        claimed.fetch_add(tasks.len(), Ordering::Relaxed);
                        all.lock().unwrap().extend(tasks);
                    }
                }
            });
        }
    });
    let mut all = all.into_inner().unwrap();
    let (a, b) = (count(&all, "A"), count(&all, "B"));
    // Each undone batch may shift a key by the claims that others made in its place, no more.
    let share = b as f64 / (a + b) as f64;
    assert!((share - 2.0 / 3.0).abs() < 0.03, "{a} of A and {b} of B");
    all.extend(drain(&mut client, "q", 100));
    assert_all_different(&all);
    assert_eq!(all.len(), 1800);
}

#[test]
fn two_sessions_that_settle_the_same_task_settle_it_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 50, "1 hour");
    let tasks = claim(&mut client, "q", "w", 50);
    let settled = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            let (db, tasks, settled) = (&db, &tasks, &settled);
            scope.spawn(move || {
                let mut client = db.connect();
                for task in tasks {
                    if complete(&mut client, task) {
                        settled.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert_eq!(settled.into_inner(), 50);
    assert_eq!(state(&mut client, "q", "A").running, 0);
}

/// Counts itself out when it ends, be it by a panic: those who wait for the producers' end must not wait for ever.
struct Producer<'a>(&'a AtomicUsize);

impl Drop for Producer<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn keys_that_come_and_go_under_load_are_all_served() {
    let db = Cluster::shared().database();
    let enqueued = AtomicUsize::new(0);
    let producing = AtomicUsize::new(3);
    let all = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for producer in 0..3 {
            let (db, enqueued, producing) = (&db, &enqueued, &producing);
            scope.spawn(move || {
                let _producer = Producer(producing);
                let mut client = db.connect();
                for i in 0..200 {
                    let key = format!("p{producer} k{}", i % 50);
                    let mut transaction = client.transaction().unwrap();
                    flood(&mut transaction, "q", &key, 1 + i % 3, "1 s");
                    if i % 5 == 4 {
                        transaction.rollback().unwrap();
                    } else {
                        transaction.commit().unwrap();
                        enqueued.fetch_add(1 + i as usize % 3, Ordering::Relaxed);
                    }
                }
            });
        }
        for _ in 0..3 {
            let (db, producing, all) = (&db, &producing, &all);
            scope.spawn(move || {
                let mut client = db.connect();
                loop {
                    let last = producing.load(Ordering::SeqCst) == 0;
                    let tasks = claim(&mut client, "q", "w", 4);
                    if last && tasks.is_empty() {
                        break;
                    }
                    all.lock().unwrap().extend(tasks);
                }
            });
        }
    });
    let all = all.into_inner().unwrap();
    assert_all_different(&all);
    assert_eq!(all.len(), enqueued.into_inner());
    let mut per_key: HashMap<&str, usize> = HashMap::new();
    for task in &all {
        *per_key.entry(&task.key).or_default() += 1;
    }
    assert!(per_key.len() >= 120, "{} keys", per_key.len());
    let mut client = db.connect();
    assert_eq!(pending(&mut client, "q"), 0);
    let missed: i64 = one(
        &mut client,
        "SELECT coalesce(sum(missed_wakeups), 0)::bigint FROM harvest_fair.stats WHERE queue = 'q'",
        &[],
    );
    assert_eq!(missed, 0);
}
