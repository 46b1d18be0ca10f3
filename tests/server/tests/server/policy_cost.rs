//! What tasks cost: reported by the worker, or measured in seconds.

use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, claim, claim_one, complete, flood, one, try_claim,
};

use crate::policy_support::{complete_at_cost, configure, setting};
use crate::support::{at_best, execute, state};

#[test]
fn equal_keys_share_the_work_and_not_the_number_of_tasks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 900, "1 hour");
    }
    let cost = |key: &str| if key == "A" { 1.0 } else { 10.0 };
    let (mut work, mut a, mut b) = (0.0, 0, 0);
    while work < 1_100.0 {
        let task = claim_one(&mut client, "q");
        let cost = cost(&task.key);
        assert!(complete_at_cost(&mut client, &task, cost));
        work += cost;
        *(if task.key == "A" { &mut a } else { &mut b }) += 1;
    }
    // Half of the work each, within 5%.
    assert!((53..=57).contains(&b), "{b} tasks of B, not 55");
    assert!((523..=577).contains(&a), "{a} tasks of A, not 550");
}

#[test]
fn costs_in_array_form_correct_each_task_by_its_own() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 2)");
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    let tasks = claim(&mut client, "q", "w", 4);
    let mut first: Vec<&ClaimedTask> = Vec::new();
    for key in ["A", "B", "C"] {
        first.push(tasks.iter().find(|task| task.key == key).unwrap());
    }
    let before: Vec<f64> = ["A", "B", "C"]
        .map(|key| state(&mut client, "q", key).pass)
        .to_vec();
    let ids: Vec<i64> = first.iter().map(|task| task.id).collect();
    let leases: Vec<i64> = first.iter().map(|task| task.lease).collect();
    let settled: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair_complete($1::bigint[], $2::bigint[], ARRAY[7, 5, NULL]::float8[])",
        &[&ids, &leases],
    );
    assert_eq!(settled, 3);
    let after: Vec<f64> = ["A", "B", "C"]
        .map(|key| state(&mut client, "q", key).pass)
        .to_vec();
    // Each had been charged 1; B's units count half.
    assert_eq!(
        [
            after[0] - before[0],
            after[1] - before[1],
            after[2] - before[2]
        ],
        [6.0, 2.0, 0.0]
    );
}

#[test]
fn a_reported_cost_counts_only_if_its_transaction_commits() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    let task = claim_one(&mut client, "q");
    let mut transaction = client.transaction().unwrap();
    assert!(complete_at_cost(&mut transaction, &task, 100.0));
    transaction.rollback().unwrap();
    assert_eq!(state(&mut client, "q", "A").pass, 1.0);
    assert!(complete_at_cost(&mut client, &task, 100.0));
    assert_eq!(state(&mut client, "q", "A").pass, 100.0);
}

#[test]
fn a_correction_never_moves_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    let tasks = claim(&mut client, "q", "w", 4);
    let clock = state(&mut client, "q", "A").clock;
    for (task, cost) in tasks.iter().zip([0.0, 50.0, 0.25, 3.0]) {
        assert!(complete_at_cost(&mut client, task, cost));
        let after = state(&mut client, "q", &task.key);
        assert_eq!(after.clock, clock);
        assert!(after.pass >= clock);
    }
}

#[test]
fn a_queue_that_charges_by_seconds_charges_what_a_task_ran() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"charge": "seconds"}"#);
    assert_eq!(
        setting(&mut client, "q", "charge"),
        ("\"seconds\"".to_owned(), "set".to_owned())
    );
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 hour");
    let claimed_at = Instant::now();
    let task = claim_one(&mut client, "q");
    let charged = |client: &mut postgres::Client, id: i64| -> f64 {
        one(
            client,
            "SELECT charged FROM harvest_fair.task WHERE id = $1",
            &[&id],
        )
    };
    assert_eq!(
        charged(&mut client, task.id),
        1.0,
        "nothing is known of the key yet"
    );
    // It has run for forty seconds, as far as the table can tell.
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET started_at = started_at - interval '40 s' WHERE id = {}",
            task.id
        ),
    );
    assert!(complete(&mut client, &task));
    let most = 40.0 + claimed_at.elapsed().as_secs_f64();
    let pass = state(&mut client, "q", &task.key).pass;
    assert!((40.0..=most).contains(&pass), "{pass} charged for 40 s");
    // The next claim of the key weighs from the start what its tasks have taken so far.
    let by_id: i64 = one(
        &mut client,
        "SELECT id FROM harvest_fair.task WHERE fairness_key = $1 AND state = 'pending' LIMIT 1",
        &[&task.key],
    );
    assert_eq!(
        crate::policy_support::claim_by_id(&mut client, by_id, "w").len(),
        1
    );
    let expected = charged(&mut client, by_id);
    assert!(
        expected > 2.0,
        "{expected} charged in advance by a key whose last task took 40 s"
    );
}

#[test]
fn a_reported_cost_beats_the_measured_one() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"charge": "seconds"}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    let task = claim_one(&mut client, "q");
    assert!(complete_at_cost(&mut client, &task, 12.0));
    assert_eq!(state(&mut client, "q", "A").pass, 12.0);
}

#[test]
fn a_queue_that_charges_by_claims_takes_no_notice_of_time() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    let task = claim_one(&mut client, "q");
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET started_at = now() - interval '1 day' WHERE state = 'running'",
    );
    assert!(complete(&mut client, &task));
    assert_eq!(state(&mut client, "q", "A").pass, 1.0);
}

#[test]
fn eight_workers_give_long_and_short_tasks_the_same_worker_time() {
    // A's tasks take 34 of these, B's take one.
    const UNIT: Duration = Duration::from_millis(6);
    const LENGTH: Duration = Duration::from_secs(14);
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"charge": "seconds"}"#);
    at_best(|| {
        execute(&mut client, "DELETE FROM harvest_fair.task");
        flood(&mut client, "q", "A", 2_000, "1 hour");
        flood(&mut client, "q", "B", 20_000, "1 hour");
        let start = Instant::now();
        let times: Vec<(Duration, Duration)> = thread::scope(|scope| {
            let workers: Vec<_> = (0..8)
                .map(|worker| {
                    let db = &db;
                    scope.spawn(move || {
                        let mut client = db.connect();
                        let name = format!("w{worker}");
                        let mut spent = (Duration::ZERO, Duration::ZERO);
                        while start.elapsed() < LENGTH {
                            let task = try_claim(&mut client, "q", &name, 1).unwrap().remove(0);
                            let from = Instant::now();
                            thread::sleep(UNIT * if task.key == "A" { 34 } else { 1 });
                            assert!(complete(&mut client, &task));
                            *(if task.key == "A" {
                                &mut spent.0
                            } else {
                                &mut spent.1
                            }) += from.elapsed();
                        }
                        spent
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap())
                .collect()
        });
        let a: f64 = times.iter().map(|(a, _)| a.as_secs_f64()).sum();
        let b: f64 = times.iter().map(|(_, b)| b.as_secs_f64()).sum();
        let share = a / (a + b);
        if (0.45..=0.55).contains(&share) {
            return Ok(());
        }
        Err(format!(
            "A had {share} of the workers' time ({a:.1} s, B {b:.1} s)"
        ))
    });
}
