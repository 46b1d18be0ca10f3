//! Caps under claimers that abort, fail and let leases expire, backends that are shot, and restarts.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, complete, flood, one, pid_of, running, try_claim,
    wait_until,
};
use postgres::Client;
use rand::Rng;

use crate::policy_support::{configure, release};
use crate::support::{execute, state};

/// The most tasks that any key runs, as the table shows it.
fn most_running(observer: &mut Client) -> i64 {
    one(
        observer,
        "SELECT coalesce(max(n), 0) FROM (SELECT count(*) n FROM harvest_fair.task
         WHERE queue = 'q' AND state = 'running' GROUP BY fairness_key) c",
        &[],
    )
}

/// Claims, completes, releases, fails, aborts and lets leases run out at random, while an observer looks.
#[test]
fn a_cap_is_never_exceeded_under_claimers_that_abort_fail_and_let_leases_expire() {
    const CAP: i64 = 3;
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        &format!(r#"{{"key_max_running": {CAP}, "lease": 0.3}}"#),
    );
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 4000, "1 hour");
    }
    let (stop, claimed) = (AtomicBool::new(false), AtomicI64::new(0));
    let highest = thread::scope(|scope| {
        for worker in 0..6 {
            let (db, stop, claimed) = (&db, &stop, &claimed);
            scope.spawn(move || {
                let mut rng = rand::rng();
                let mut client = db.connect();
                while !stop.load(Ordering::Relaxed) {
                    let mut transaction = client.transaction().unwrap();
                    let tasks = claim(
                        &mut transaction,
                        "q",
                        &format!("w{worker}"),
                        rng.random_range(1..4),
                    );
                    thread::sleep(Duration::from_millis(rng.random_range(0..4)));
                    if rng.random_bool(0.2) {
                        transaction.rollback().unwrap();
                        continue;
                    }
                    transaction.commit().unwrap();
                    claimed.fetch_add(tasks.len() as i64, Ordering::Relaxed);
                    for task in &tasks {
                        match rng.random_range(0..10) {
                            0..6 => {
                                complete(&mut client, task);
                            }
                            6..8 => {
                                release(&mut client, task);
                            }
                            8 => execute(
                                &mut client,
                                &format!(
                                    "SELECT fair_fail({}, {}, 'x', '10 ms')",
                                    task.id, task.lease
                                ),
                            ),
                            // Nobody ever settles it.
                            _ => {}
                        }
                    }
                }
            });
        }
        let mut observer = db.connect();
        let (start, mut highest) = (Instant::now(), 0);
        let enough = |highest| highest == CAP && claimed.load(Ordering::Relaxed) > 100;
        while start.elapsed() < Duration::from_secs(6)
            || (!enough(highest) && start.elapsed() < PATIENCE)
        {
            let now = most_running(&mut observer);
            highest = highest.max(now);
            assert!(now <= CAP, "{now} running tasks of one key");
        }
        stop.store(true, Ordering::Relaxed);
        highest
    });
    assert_eq!(highest, CAP, "the cap was never reached");
    assert!(claimed.into_inner() > 100);
}

#[test]
fn a_cap_holds_over_kill_9_and_restart() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": 4, "lease": "1 hour"}"#,
    );
    flood(&mut client, "q", "A", 50, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 3).len(), 3);
    let witness = db.connect();
    let mut victim = db.connect();
    execute(
        &mut victim,
        "BEGIN; SELECT * FROM fair_claim('q'::text, 'w', 1)",
    );
    cluster.kill_9(pid_of(&mut victim));
    cluster.wait_for_recovery(witness);
    let mut client = db.connect();
    // Three survive, the open one is gone.
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 1);
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        cluster.restart(how);
        let mut client = db.connect();
        assert!(claim(&mut client, "q", "w", 50).is_empty(), "{how:?}");
        assert_eq!(state(&mut client, "q", "A").running, 4);
    }
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_complete(id, lease) FROM harvest_fair.task WHERE state = 'running' LIMIT 1",
    );
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 1);
}

/// Workers that come back after each crash, one backend shot dead every other second, leases that run out: an observer
/// never sees more than the cap.
#[test]
fn a_cap_is_never_exceeded_while_backends_are_shot() {
    const CAP: i64 = 3;
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        &format!(r#"{{"key_max_running": {CAP}, "lease": 0.5}}"#),
    );
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 3000, "1 hour");
    }
    drop(client);
    let (stop, settled) = (AtomicBool::new(false), AtomicI64::new(0));
    let mut highest = 0;
    thread::scope(|scope| {
        for worker in 0..5 {
            let (db, stop, settled, cluster) = (&db, &stop, &settled, &cluster);
            scope.spawn(move || {
                let mut rng = rand::rng();
                let name = format!("w{worker}");
                // Until the connection breaks; then with a new one.
                let mut session = || -> Result<(), postgres::Error> {
                    let mut client = cluster.try_connect(db.name())?;
                    while !stop.load(Ordering::Relaxed) {
                        let mut transaction = client.transaction()?;
                        let tasks =
                            try_claim(&mut transaction, "q", &name, rng.random_range(1..4))?;
                        thread::sleep(Duration::from_millis(rng.random_range(0..5)));
                        transaction.commit()?;
                        for task in &tasks {
                            if rng.random_bool(0.8) {
                                client.execute(
                                    "SELECT fair_complete($1::bigint, $2::bigint)",
                                    &[&task.id, &task.lease],
                                )?;
                                settled.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                    Ok(())
                };
                while !stop.load(Ordering::Relaxed) {
                    if session().is_err() {
                        thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
        for _ in 0..3 {
            let mut observer = db.connect();
            let (start, before) = (Instant::now(), settled.load(Ordering::Relaxed));
            let enough = || settled.load(Ordering::Relaxed) > before + 20;
            while start.elapsed() < Duration::from_secs(2)
                || (!enough() && start.elapsed() < PATIENCE)
            {
                let now = most_running(&mut observer);
                highest = highest.max(now);
            }
            let victim: Option<i32> = one(
                &mut observer,
                "SELECT max(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
                 AND datname = current_database()",
                &[],
            );
            if let Some(victim) = victim {
                cluster.kill_9(victim);
                cluster.wait_for_recovery(observer);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(highest, CAP);
    assert!(settled.into_inner() > 60);
    let mut client = db.connect();
    // Leases still run out meanwhile.
    wait_until("board and table agree", PATIENCE, || {
        let board: i64 = ["A", "B", "C"]
            .map(|key| state(&mut client, "q", key).running)
            .iter()
            .sum();
        board == running(&mut client, "q")
    });
}
