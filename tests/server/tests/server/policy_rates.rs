//! Rate limits: token buckets of one second, of the queue and of each key.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, claim, claim_one, claim_waiting, count, enqueue, flood, one, running,
};
use postgres::Client;

use crate::policy_support::{claim_by_id, configure, flood_at, release};
use crate::support::{at_best, await_claim, claims, execute, state};

/// What workers got of a limited queue in some seconds.
struct Taken {
    seconds: f64,
    counts: Vec<usize>,
}

/// Claims whatever there is, without a pause in the claims, until the deadline; how many of each key.
fn claim_for(client: &mut Client, seconds: u64, keys: &[&str]) -> Taken {
    let start = Instant::now();
    let mut counts = vec![0; keys.len()];
    while start.elapsed() < Duration::from_secs(seconds) {
        for task in claim_waiting(client, "q", "w", 10, "100 ms") {
            counts[keys.iter().position(|key| *key == task.key).unwrap()] += 1;
        }
    }
    Taken {
        // The loop ends when its last claim returns.
        seconds: start.elapsed().as_secs_f64(),
        counts,
    }
}

/// Never more than the rate, whatever the machine does; and close to it unless the machine kept the worker from claiming,
/// when a bucket that is full takes no more.
#[track_caller]
fn holds(count: usize, rate: f64, seconds: f64, what: &str) -> Result<(), String> {
    let (count, expected) = (count as f64, rate * seconds);
    let found = format!("{count} claims of {what} in {seconds:.2} s at {rate} a second");
    // One token may be on its way at either end.
    let near = expected * 0.02 + 1.0;
    assert!(count <= expected + near, "{found}");
    if count < expected - near {
        return Err(found);
    }
    Ok(())
}

#[test]
fn key_rates_scaled_by_weight_hold_within_two_percent_over_ten_seconds() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 2)");
    configure(&mut client, "q", r#"{"key_rate_limit": 10}"#);
    at_best(|| {
        execute(&mut client, "DELETE FROM harvest_fair.task");
        for key in ["A", "B"] {
            flood(&mut client, "q", key, 1_000, "1 hour");
        }
        // A claim has one instant: what comes in meanwhile is none of it.
        let burst = claim(&mut client, "q", "w", 100);
        assert!(
            count(&burst, "A") <= 10 && count(&burst, "B") <= 20,
            "{burst:?}"
        );
        let taken = claim_for(&mut client, 10, &["A", "B"]);
        holds(taken.counts[0], 10.0, taken.seconds, "A")?;
        holds(taken.counts[1], 20.0, taken.seconds, "B")
    });
}

#[test]
fn a_bucket_holds_one_second_s_worth() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 2)");
    configure(&mut client, "q", r#"{"key_rate_limit": 10}"#);
    configure(&mut client, "whole", r#"{"rate_limit": 50}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 1_000, "1 hour");
        flood(&mut client, "whole", key, 1_000, "1 hour");
    }
    let burst = claim(&mut client, "q", "w", 100);
    assert_eq!((count(&burst, "A"), count(&burst, "B")), (10, 20));
    assert_eq!(claim(&mut client, "whole", "w", 300).len(), 50);
}

#[test]
fn three_hundred_tasks_of_three_limited_keys_take_nine_to_eleven_seconds() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 10}"#);
    at_best(|| {
        execute(&mut client, "DELETE FROM harvest_fair.task");
        for key in ["A", "B", "C"] {
            flood(&mut client, "q", key, 100, "1 hour");
        }
        let (start, done) = (Instant::now(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                let (db, done) = (&db, &done);
                scope.spawn(move || {
                    let mut client = db.connect();
                    while done.load(Ordering::Relaxed) < 300 {
                        let tasks = claim_waiting(&mut client, "q", "w", 5, "400 ms");
                        done.fetch_add(tasks.len(), Ordering::Relaxed);
                    }
                });
            }
        });
        // A burst of ten of the hundred, then ten a second: nine seconds.
        let all = start.elapsed().as_secs_f64();
        assert!(all >= 8.98, "over after {all} s");
        assert_eq!(done.into_inner(), 300);
        let last: f64 = one(
            &mut client,
            "SELECT extract(epoch FROM max(started_at) - min(started_at))::float8 FROM harvest_fair.task WHERE queue = 'q'",
            &[],
        );
        if last > 11.0 {
            return Err(format!("over after {last} s"));
        }
        Ok(())
    });
}

#[test]
fn a_limit_of_the_queue_holds_for_all_its_keys_together() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"rate_limit": 50}"#);
    at_best(|| {
        execute(&mut client, "DELETE FROM harvest_fair.task");
        for key in ["A", "B", "C", "D"] {
            flood(&mut client, "q", key, 300, "1 hour");
        }
        assert!(claim(&mut client, "q", "w", 300).len() <= 50);
        let taken = claim_for(&mut client, 4, &["A", "B", "C", "D"]);
        // What there is, is shared fairly.
        let counts = taken.counts;
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{counts:?}");
        holds(counts.iter().sum(), 50.0, taken.seconds, "all")
    });
}

#[test]
fn of_two_limits_the_tighter_one_counts() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (queue, settings, expected) in [
        ("queue", r#"{"rate_limit": 4, "key_rate_limit": 50}"#, 4),
        ("key", r#"{"rate_limit": 200, "key_rate_limit": 3}"#, 6),
    ] {
        configure(&mut client, queue, settings);
        for key in ["A", "B"] {
            flood(&mut client, queue, key, 100, "1 hour");
        }
        let burst = claim(&mut client, queue, "w", 100).len();
        assert_eq!(burst, expected, "{queue}");
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
    at_best(|| {
        assert_eq!(await_claim(&mut client, "q", "w", 10).len(), 1);
        let after: f64 = one(
            &mut client,
            "SELECT extract(epoch FROM max(started_at) - min(started_at))::float8
             FROM (SELECT started_at FROM harvest_fair.task WHERE state = 'running' ORDER BY started_at DESC LIMIT 2) t",
            &[],
        );
        let found = format!("a token at half a second's rate came after {after} s");
        // A token that came while the test was kept waiting is there at once the next time, but no two are.
        assert!(after >= 1.99, "{found}");
        if after < 4.0 { Ok(()) } else { Err(found) }
    });
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
    assert_eq!(burst.len(), 2);
    // A second later the bucket is full again.
    burst.extend(await_claim(&mut client, "q", "w", 1));
    execute(&mut client, "SELECT pg_sleep(1.2)");
    for task in &burst {
        assert!(release(&mut client, task));
    }
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 2);
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
    assert!(limited <= 1, "{limited} at once");
    configure(&mut admin, "q", r#"{"key_rate_limit": null}"#);
    assert_eq!(claim(&mut client, "q", "w", 30).len(), 30);
}

#[test]
fn a_key_that_was_limited_comes_back_with_no_credit_and_no_burst() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 1000)");
    configure(&mut client, "q", r#"{"key_rate_limit": 0.1}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    // A has a token in ten seconds, B a hundred at once.
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
    at_best(|| {
        execute(
            &mut client,
            "DELETE FROM harvest_fair.task WHERE state = 'running'",
        );
        let start = Instant::now();
        thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| claim_for(&mut db.connect(), 4, &["A", "B", "C"]));
            }
        });
        let seconds = start.elapsed().as_secs_f64();
        // As the table tells it: in no stretch of time more than the bucket's second and what came in meanwhile.
        let worst: f64 = one(
            &mut client,
            "SELECT max(n - 200 * extract(epoch FROM b.at - a.at))::float8
             FROM (SELECT started_at AS at, row_number() OVER (ORDER BY started_at) AS i FROM harvest_fair.task WHERE state = 'running') a
             JOIN (SELECT started_at AS at, row_number() OVER (ORDER BY started_at) AS i FROM harvest_fair.task WHERE state = 'running') b ON b.i >= a.i,
             LATERAL (SELECT b.i - a.i + 1 AS n) c",
            &[],
        );
        let found = format!("{worst} claims more than came in");
        // A worker that was kept waiting for the lock has an earlier instant for its ten than that of their tokens.
        assert!(worst <= 202.0 + 5.0 * 10.0, "{found}");
        if worst > 202.0 {
            return Err(found);
        }
        let (taken, expected) = (running(&mut client, "q") as f64, 200.0 + 200.0 * seconds);
        if taken < expected * 0.96 {
            return Err(format!("{taken} claims, not {expected}"));
        }
        Ok(())
    });
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
