//! Caps: a key never runs more tasks than `key_max_running`, at any instant, however its tasks end.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, claim_one, complete, count, enqueue, flood, one,
    pid_of, running, try_claim, wait_until,
};
use rand::Rng;

use crate::policy_support::{claim_by_id, configure, flood_at, release, waiting_for};
use crate::support::{await_claim, claims, execute, in_time, state, unattended, woken_by};

#[test]
fn a_key_at_its_cap_is_passed_over_and_admitted_again_when_a_task_ends() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    let first = claim(&mut client, "q", "w", 10);
    assert_eq!((count(&first, "A"), count(&first, "B")), (2, 2));
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
    let of_a: Vec<_> = first.iter().filter(|task| task.key == "A").collect();
    assert!(complete(&mut client, of_a[0]));
    assert_eq!(claim_one(&mut client, "q").key, "A");
    assert!(claim(&mut client, "q", "w", 10).is_empty());
    assert!(release(&mut client, of_a[1]));
    assert_eq!(claim_one(&mut client, "q").key, "A");
    let of_b = first.iter().find(|task| task.key == "B").unwrap();
    execute(
        &mut client,
        &format!(
            "SELECT fair_fail({}, {}, 'x', '1 hour')",
            of_b.id, of_b.lease
        ),
    );
    assert_eq!(claim_one(&mut client, "q").key, "B");
    assert!(claim(&mut client, "q", "w", 10).is_empty());
}

#[test]
fn a_cap_counts_the_running_tasks_of_all_priorities() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 3}"#);
    for priority in 1..=5 {
        flood_at(&mut client, "q", "A", priority, 2);
    }
    flood_at(&mut client, "q", "B", 5, 1);
    let priorities: Vec<(String, i16)> = claim(&mut client, "q", "w", 10)
        .into_iter()
        .map(|task| (task.key, task.priority))
        .collect();
    let a = |priority| ("A".to_owned(), priority);
    assert_eq!(priorities, [a(1), a(1), a(2), ("B".to_owned(), 5)]);
}

#[test]
fn an_open_transaction_holds_its_place_under_the_cap_and_an_abort_gives_it_back() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    let mut open = client.transaction().unwrap();
    assert_eq!(claim(&mut open, "q", "w", 5).len(), 2);
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    open.rollback().unwrap();
    let mut open = other.transaction().unwrap();
    let mut savepoint = open.transaction().unwrap();
    assert_eq!(claim(&mut savepoint, "q", "w", 1).len(), 1);
    savepoint.rollback().unwrap();
    assert_eq!(claim(&mut open, "q", "w", 5).len(), 2);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    open.commit().unwrap();
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(state(&mut client, "q", "A").running, 2);
}

#[test]
fn a_completion_frees_its_place_only_when_it_commits() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    let task = claim_one(&mut client, "q");
    let mut open = client.transaction().unwrap();
    assert!(complete(&mut open, &task));
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    open.rollback().unwrap();
    assert!(claim(&mut other, "q", "w", 5).is_empty());
    assert!(complete(&mut client, &task));
    assert_eq!(claim(&mut other, "q", "w", 5).len(), 1);
}

#[test]
fn a_cap_lowered_below_the_running_count_admits_none_until_it_is_below() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "1 hour");
    let mut tasks = claim(&mut client, "q", "w", 5);
    configure(&mut client, "q", r#"{"key_max_running": 3}"#);
    for left in [4, 3] {
        assert!(complete(&mut client, &tasks.remove(0)));
        assert!(
            claim(&mut client, "q", "w", 5).is_empty(),
            "{left} are running"
        );
    }
    assert!(complete(&mut client, &tasks.remove(0)));
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    configure(&mut client, "q", r#"{"key_max_running": 5}"#);
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
    configure(&mut client, "q", r#"{"key_max_running": null}"#);
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 12);
}

#[test]
fn a_cap_of_zero_admits_none() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 0}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
}

#[test]
fn neither_pins_nor_ids_pass_a_cap() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    let pinned: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w', sticky_for => '1 hour')",
        &[],
    );
    let plain = enqueue(&mut client, "q", Some("A"));
    let task = claim_one(&mut client, "q");
    assert_eq!(task.id, pinned);
    assert!(claim_by_id(&mut client, plain, "w").is_empty());
    assert!(complete(&mut client, &task));
    assert_eq!(claim_by_id(&mut client, plain, "w").len(), 1);
    let again: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w', sticky_for => '1 hour')",
        &[],
    );
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert!(claim_by_id(&mut client, again, "w").is_empty());
}

#[test]
fn a_key_that_was_capped_comes_back_with_no_credit_and_no_burst() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let first = claim(&mut client, "q", "w", 2);
    let blocked = first.iter().find(|task| task.key == "A").unwrap();
    let mut of_b = first.iter().find(|task| task.key == "B").unwrap().clone();
    for _ in 0..40 {
        assert!(complete(&mut client, &of_b));
        of_b = claim_one(&mut client, "q");
        assert_eq!(of_b.key, "B");
    }
    configure(&mut client, "q", r#"{"key_max_running": null}"#);
    assert!(complete(&mut client, blocked));
    let after = claims(&mut client, "q", 40, 1);
    assert!(
        count(&after, "A").abs_diff(20) <= 1,
        "{} of 40",
        count(&after, "A")
    );
}

#[test]
fn a_thousand_capped_keys_cost_the_others_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', 'capped ' || k, now() - interval '2 hours' FROM generate_series(1, 1000) k, generate_series(1, 10)",
    );
    assert_eq!(claim(&mut client, "q", "w", 1000).len(), 1000);
    flood(&mut client, "q", "free", 400, "1 hour");
    // Buffers touched, as they do not depend on how busy the machine is.
    let claim_and_complete =
        "SELECT count(fair_complete(id, lease)) FROM fair_claim('q'::text, 'w', 1)";
    let touched = |client: &mut postgres::Client| -> i64 {
        for _ in 0..20 {
            execute(client, claim_and_complete);
        }
        let plan: serde_json::Value = one(
            client,
            &format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {claim_and_complete}"),
            &[],
        );
        plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
            + plan[0]["Plan"]["Shared Read Blocks"].as_i64().unwrap()
    };
    let beside_capped = touched(&mut client);
    configure(&mut client, "alone", r#"{"key_max_running": 1}"#);
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET queue = 'alone' WHERE fairness_key = 'free' AND state = 'pending' AND id % 2 = 0",
    );
    let mut alone = db.connect();
    let in_alone = claim_and_complete.replace("'q'", "'alone'");
    for _ in 0..20 {
        execute(&mut alone, &in_alone);
    }
    let plan: serde_json::Value = one(
        &mut alone,
        &format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {in_alone}"),
        &[],
    );
    let alone = plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
        + plan[0]["Plan"]["Shared Read Blocks"].as_i64().unwrap();
    assert!(
        beside_capped <= alone * 2 + 20,
        "{beside_capped} buffers beside 1,000 capped keys, {alone} alone"
    );
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
            let now: i64 = one(
                &mut observer,
                "SELECT coalesce(max(n), 0) FROM (SELECT count(*) n FROM harvest_fair.task
                 WHERE queue = 'q' AND state = 'running' GROUP BY fairness_key) c",
                &[],
            );
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

#[test]
fn rows_deleted_or_changed_by_hand_give_their_place_back() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    flood(&mut client, "q", "A", 20, "1 hour");
    let tasks = claim(&mut client, "q", "w", 5);
    assert_eq!(tasks.len(), 2);
    execute(
        &mut client,
        &format!("DELETE FROM harvest_fair.task WHERE id = {}", tasks[0].id),
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET state = 'completed', finished_at = now() WHERE id = {}",
            tasks[1].id
        ),
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    assert_eq!(running(&mut client, "q"), 2);
}

#[test]
fn a_worker_that_waits_for_a_capped_key_wakes_when_a_task_ends() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    let task = claim_one(&mut client, "q");
    woken_by(&db, "w", |client| assert!(complete(client, &task)));
}

#[test]
fn an_expired_lease_gives_its_place_back() {
    // A worker that waits leaves it to the janitor to take back what it could not have itself.
    let db = Cluster::shared().database();
    let mut client = db.connect();
    in_time(|lease| {
        configure(
            &mut client,
            "q",
            &format!(r#"{{"key_max_running": 1, "lease": "{lease}"}}"#),
        );
        flood(&mut client, "q", "A", 3, "1 hour");
        let task = claim_one(&mut client, "q");
        let early = claim(&mut client, "q", "w", 1);
        if one(
            &mut client,
            "SELECT clock_timestamp() > $1",
            &[&task.lease_until],
        ) {
            execute(&mut client, "DELETE FROM harvest_fair.task");
            return None;
        }
        assert!(early.is_empty());
        Some(())
    });
    assert_eq!(await_claim(&mut client, "q", "w", 5).len(), 1);
    assert_eq!(running(&mut client, "q"), 1);
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
                let now: i64 = one(
                    &mut observer,
                    "SELECT coalesce(max(n), 0) FROM (SELECT count(*) n FROM harvest_fair.task
                     WHERE queue = 'q' AND state = 'running' GROUP BY fairness_key) c",
                    &[],
                );
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
