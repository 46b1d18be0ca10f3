//! Rate limits: token buckets of one second, of the queue and of each key.

use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, claim, claim_one, claim_waiting, count, enqueue, flood, one, running,
};
use postgres::Client;

use crate::policy_support::{claim_by_id, configure, flood_at, release, waiting_for};
use crate::support::{claims, execute, state};

/// Claims whatever there is, without a pause in the claims, until the deadline; how many of each key.
fn claim_until(client: &mut Client, deadline: Instant, keys: &[&str]) -> Vec<usize> {
    let mut counts = vec![0; keys.len()];
    while Instant::now() < deadline {
        for task in claim_waiting(client, "q", "w", 10, "100 ms") {
            counts[keys.iter().position(|key| *key == task.key).unwrap()] += 1;
        }
    }
    counts
}

#[test]
fn key_rates_scaled_by_weight_hold_within_two_percent_over_ten_seconds() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 2)");
    configure(&mut client, "q", r#"{"key_rate_limit": 10}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 1_000, "1 hour");
    }
    let burst = claim(&mut client, "q", "w", 100);
    // One second's worth, and what has come in meanwhile.
    assert!(
        (10..=11).contains(&count(&burst, "A")),
        "{} of A at once",
        count(&burst, "A")
    );
    assert!(
        (20..=22).contains(&count(&burst, "B")),
        "{} of B at once",
        count(&burst, "B")
    );
    for key in ["A", "B"] {
        assert_eq!(waiting_for(&mut client, "q", key), "rate");
    }
    let start = Instant::now();
    let counts = claim_until(&mut client, start + Duration::from_secs(10), &["A", "B"]);
    // The loop ends when its last claim returns.
    let seconds = start.elapsed().as_secs_f64();
    for (key, count, rate) in [("A", counts[0], 10.0), ("B", counts[1], 20.0)] {
        let expected = rate * seconds;
        // One token may be on its way at either end.
        assert!(
            (count as f64 - expected).abs() <= expected * 0.02 + 1.0,
            "{count} claims of {key} in {seconds:.2} s at {rate} a second"
        );
    }
}

#[test]
fn three_hundred_tasks_of_three_limited_keys_take_nine_to_eleven_seconds() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 10}"#);
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    let start = Instant::now();
    let done: usize = thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let db = &db;
                scope.spawn(move || {
                    let (mut client, mut done) = (db.connect(), 0);
                    loop {
                        // Longer than a token takes.
                        match claim_waiting(&mut client, "q", "w", 5, "400 ms").len() {
                            0 => return done,
                            n => done += n,
                        }
                    }
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .sum()
    });
    assert_eq!(done, 300);
    let last: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM max(started_at) - min(started_at))::float8 FROM harvest_fair.task WHERE queue = 'q'",
        &[],
    );
    // A burst of ten of the hundred, then ten a second: nine seconds.
    assert!(
        (8.98..=11.0).contains(&last),
        "over after {last} s ({:?})",
        start.elapsed()
    );
}

#[test]
fn a_limit_of_the_queue_holds_for_all_its_keys_together() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"rate_limit": 50}"#);
    for key in ["A", "B", "C", "D"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    let burst = claim(&mut client, "q", "w", 300).len();
    assert!((50..=53).contains(&burst), "{burst} at once");
    assert_eq!(waiting_for(&mut client, "q", "A"), "rate");
    let start = Instant::now();
    let counts = claim_until(
        &mut client,
        start + Duration::from_secs(4),
        &["A", "B", "C", "D"],
    );
    let (all, expected) = (
        counts.iter().sum::<usize>() as f64,
        start.elapsed().as_secs_f64() * 50.0,
    );
    assert!(
        (all - expected).abs() <= expected * 0.02 + 1.0,
        "{all} claims, not {expected}"
    );
    // What there is, is shared fairly.
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 1, "{counts:?}");
}

#[test]
fn of_two_limits_the_tighter_one_counts() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (queue, settings, expected) in [
        ("queue", r#"{"rate_limit": 4, "key_rate_limit": 50}"#, 4..=5),
        ("key", r#"{"rate_limit": 200, "key_rate_limit": 3}"#, 6..=8),
    ] {
        configure(&mut client, queue, settings);
        for key in ["A", "B"] {
            flood(&mut client, queue, key, 100, "1 hour");
        }
        let burst = claim(&mut client, queue, "w", 100).len();
        assert!(expected.contains(&burst), "{queue}: {burst} at once");
    }
}

#[test]
fn a_key_without_tokens_leaves_its_turn_to_one_of_a_lower_priority() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.01}"#);
    flood_at(&mut client, "q", "first", 1, 5);
    flood_at(&mut client, "q", "second", 2, 5);
    let taken: Vec<(String, i16)> = claims(&mut client, "q", 2, 1)
        .into_iter()
        .map(|task| (task.key, task.priority))
        .collect();
    assert_eq!(taken, [("first".to_owned(), 1), ("second".to_owned(), 2)]);
    assert!(claim(&mut client, "q", "w", 5).is_empty());
}

#[test]
fn a_rate_below_one_a_second_still_admits_one_at_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.5}"#);
    flood(&mut client, "q", "A", 10, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 10).len(), 1);
    let start = Instant::now();
    assert_eq!(claim_waiting(&mut client, "q", "w", 10, "20 s").len(), 1);
    let waited = start.elapsed();
    assert!(
        (Duration::from_millis(1_700)..Duration::from_secs(4)).contains(&waited),
        "a token at half a second's rate came after {waited:?}"
    );
}

#[test]
fn a_token_that_is_given_back_is_usable_at_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (queue, settings) in [
        ("of the key", r#"{"key_rate_limit": 0.01}"#),
        ("of the queue", r#"{"rate_limit": 0.01}"#),
    ] {
        configure(&mut client, queue, settings);
        flood(&mut client, queue, "A", 5, "1 hour");
        // Undone by the transaction, by a savepoint, by a release.
        let mut transaction = client.transaction().unwrap();
        assert_eq!(claim(&mut transaction, queue, "w", 5).len(), 1);
        transaction.rollback().unwrap();
        let mut transaction = client.transaction().unwrap();
        let mut savepoint = transaction.transaction().unwrap();
        assert_eq!(claim(&mut savepoint, queue, "w", 5).len(), 1);
        savepoint.rollback().unwrap();
        assert_eq!(claim(&mut transaction, queue, "w", 5).len(), 1);
        transaction.rollback().unwrap();
        let task = claim_one(&mut client, queue);
        assert!(claim(&mut client, queue, "w", 5).is_empty());
        assert!(release(&mut client, &task));
        assert_eq!(claim(&mut client, queue, "w", 5).len(), 1);
        assert!(claim(&mut client, queue, "w", 5).is_empty());
        assert_eq!(running(&mut client, queue), 1);
    }
}

#[test]
fn giving_back_never_fills_a_bucket_beyond_one_second() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 2}"#);
    flood(&mut client, "q", "A", 50, "1 hour");
    let mut burst = claim(&mut client, "q", "w", 50);
    let most = burst.len();
    assert!((2..=3).contains(&most));
    // A second later the bucket is full again.
    burst.extend(claim_waiting(&mut client, "q", "w", 1, "20 s"));
    execute(&mut client, "SELECT pg_sleep(1.2)");
    for task in &burst {
        assert!(release(&mut client, task));
    }
    let again = claim(&mut client, "q", "w", 50).len();
    assert!((2..=3).contains(&again), "{again} at once");
}

#[test]
fn a_pinned_task_and_one_by_id_need_a_token_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.01}"#);
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w', sticky_for => '1 hour') FROM generate_series(1, 3)",
    );
    let plain = enqueue(&mut client, "q", Some("A"));
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
    assert!(claim_by_id(&mut client, plain, "w").is_empty());
}

#[test]
fn a_limit_set_on_a_backlog_counts_at_the_next_claim_and_ends_with_its_reset() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 100, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 30).len(), 30);
    configure(&mut admin, "q", r#"{"key_rate_limit": 1}"#);
    let limited = claim(&mut client, "q", "w", 30).len();
    assert!(limited <= 2, "{limited} at once");
    configure(&mut admin, "q", r#"{"key_rate_limit": null}"#);
    assert_eq!(claim(&mut client, "q", "w", 30).len(), 30);
}

#[test]
fn a_key_that_was_limited_comes_back_with_no_credit_and_no_burst() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 1000)");
    configure(&mut client, "q", r#"{"key_rate_limit": 1}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    // A is out of tokens, B is far from it.
    let before = claims(&mut client, "q", 100, 1);
    assert!(count(&before, "B") >= 97, "{} of B", count(&before, "B"));
    execute(
        &mut client,
        "SELECT fair_clear_weight('q', 'B'); SELECT fair_configure('q', '{\"key_rate_limit\": null}')",
    );
    let lag = state(&mut client, "q", "A").lag;
    assert!(lag >= 0.0);
    let after = claims(&mut client, "q", 60, 1);
    assert!(
        count(&after, "A") <= 31,
        "{} of 60 went to the key that comes back",
        count(&after, "A")
    );
}

#[test]
fn five_hundred_limited_keys_cost_the_others_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.001}"#);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', 'limited ' || k, now() - interval '2 hours' FROM generate_series(1, 500) k, generate_series(1, 5)",
    );
    assert_eq!(claim(&mut client, "q", "w", 1000).len(), 500);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    // Out of tokens, they are not even looked at: an empty claim touches no more pages than one on an empty queue.
    let touched = |client: &mut Client, queue: &str| -> i64 {
        let claim = format!("SELECT * FROM fair_claim('{queue}'::text, 'w', 1)");
        execute(client, &claim);
        let plan: serde_json::Value = one(
            client,
            &format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {claim}"),
            &[],
        );
        plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
            + plan[0]["Plan"]["Shared Read Blocks"].as_i64().unwrap()
    };
    let (limited, empty) = (touched(&mut client, "q"), touched(&mut client, "empty"));
    assert!(
        limited <= empty + 2,
        "{limited} buffers beside limited keys, {empty} on an empty queue"
    );
}

#[test]
fn a_limit_is_exact_for_workers_side_by_side() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"rate_limit": 200}"#);
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 1_000, "1 hour");
    }
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..5 {
            let db = &db;
            scope.spawn(move || {
                let mut client = db.connect();
                claim_until(
                    &mut client,
                    start + Duration::from_secs(4),
                    &["A", "B", "C"],
                )
            });
        }
    });
    // As the table tells it: in no stretch of time more than the bucket's second and what came in meanwhile.
    let worst: f64 = one(
        &mut client,
        "SELECT max(n - 200 * extract(epoch FROM b.at - a.at))::float8
         FROM (SELECT started_at AS at, row_number() OVER (ORDER BY started_at) AS i FROM harvest_fair.task WHERE state = 'running') a
         JOIN (SELECT started_at AS at, row_number() OVER (ORDER BY started_at) AS i FROM harvest_fair.task WHERE state = 'running') b ON b.i >= a.i,
         LATERAL (SELECT b.i - a.i + 1 AS n) c",
        &[],
    );
    assert!(worst <= 202.0, "{worst} claims more than came in");
    let taken = running(&mut client, "q") as f64;
    let expected = 200.0 + 200.0 * 4.0;
    assert!(
        (taken - expected).abs() <= expected * 0.03,
        "{taken} claims, not {expected}"
    );
}

#[test]
fn limits_of_every_size_are_taken() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 0.001)");
    for limit in ["1e-300", "1e6", "0.000001"] {
        configure(
            &mut client,
            "q",
            &format!(r#"{{"key_rate_limit": {limit}, "rate_limit": {limit}}}"#),
        );
        flood(&mut client, "q", "A", 5, "1 hour");
        flood(&mut client, "q", "B", 5, "1 hour");
        assert!(claim(&mut client, "q", "w", 3).len() <= 3);
        assert!(claim_waiting(&mut client, "q", "w", 3, "10 ms").len() <= 3);
        execute(&mut client, "SELECT * FROM fair_state('q')");
    }
    configure(
        &mut client,
        "q",
        r#"{"key_rate_limit": null, "rate_limit": null}"#,
    );
    let left: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.task WHERE state = 'pending'",
        &[],
    );
    assert_eq!(claim(&mut client, "q", "w", 100).len() as i64, left);
}
