//! The preview and the pruning: what they say is what then happens, and saying it changes nothing.

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, claim, claim_one, complete, count, expect_error, flood, one,
    running, wait_until,
};

use crate::policy_support::{configure, flood_at, preview, preview_then_claim};
use crate::support::{assert_near, at_best, claims, drain, execute, states};

#[test]
fn a_preview_is_exactly_what_the_next_claims_return() {
    let db = Cluster::shared().database();
    let mut client = db
        .connect_with("SELECT fair_set_weight('q', 'A', 3); SELECT fair_set_weight('q', 'B', 0.5)");
    for (key, n) in [("A", 40), ("B", 40), ("C", 3), ("D", 40)] {
        flood(&mut client, "q", key, n, "1 hour");
    }
    flood_at(&mut client, "q", "D", 2, 4);
    flood_at(&mut client, "q", "E", 4, 5);
    claims(&mut client, "q", 7, 3);
    for n in [1, 2, 7, 20, 200] {
        preview_then_claim(&mut client, "q", "w", n);
    }
    assert!(preview(&mut client, "q", "w", 5, "").is_empty());
}

#[test]
fn a_preview_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 50, "1 hour");
    }
    claims(&mut client, "q", 5, 1);
    let before = states(&mut client, "q");
    let first = preview(&mut client, "q", "w", 30, "");
    let hypothetical = preview(&mut client, "q", "w", 30, r#"{"A": 100}"#);
    assert_ne!(first, hypothetical);
    assert_eq!(preview(&mut client, "q", "w", 30, ""), first);
    assert_eq!(states(&mut client, "q"), before);
    assert_eq!(running(&mut client, "q"), 5);
    let overrides: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.weight", &[]);
    assert_eq!(overrides, 0);
    let audited: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.audit", &[]);
    assert_eq!(audited, 0);
}

#[test]
fn a_preview_gives_the_reason_of_each_claim() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'pin', sticky_worker => 'w', sticky_for => '1 hour')",
    );
    flood_at(&mut client, "q", "A", 1, 2);
    flood_at(&mut client, "q", "B", 3, 2);
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 5);
    let said: Vec<(&str, i16, &str)> = lines
        .iter()
        .map(|line| (line.key.as_str(), line.priority, line.reason.as_str()))
        .collect();
    assert_eq!(
        said,
        [
            ("pin", 3, "pinned to w"),
            ("A", 1, "priority 1, lag 0, pass 0"),
            ("A", 1, "priority 1, lag 0, pass 1"),
            ("B", 3, "priority 3, lag 0, pass 0"),
            ("B", 3, "priority 3, lag 0, pass 1"),
        ]
    );
}

#[test]
fn a_preview_shows_another_worker_no_pin() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'pin', sticky_worker => 'w', sticky_for => '1 hour')",
    );
    flood(&mut client, "q", "A", 1, "1 hour");
    let (lines, _) = preview_then_claim(&mut client, "q", "somebody else", 5);
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].key, "A");
}

#[test]
fn hypothetical_weights_foretell_what_they_would_do() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'C', 5)");
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    claims(&mut client, "q", 11, 1);
    let weights = r#"{"A": 4, "C": null}"#;
    let lines = preview(&mut client, "q", "w", 60, weights);
    let of = |key: &str| lines.iter().filter(|line| line.key == key).count();
    assert_near(of("A"), 40, 2, "foretold claims of A at 4 of 6");
    execute(
        &mut client,
        &format!("SELECT fair_set_weights('q', '{weights}')"),
    );
    let came = claim(&mut client, "q", "w", 60);
    let foretold: Vec<i64> = lines.iter().map(|line| line.id).collect();
    assert_eq!(
        came.iter().map(|task| task.id).collect::<Vec<_>>(),
        foretold
    );
    assert_eq!(count(&came, "A"), of("A"));
}

#[test]
fn bad_arguments_of_a_preview_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (call, sqlstate, what) in [
        ("fair_preview(NULL, 'w', 1)", "22004", "queue"),
        ("fair_preview('q', NULL, 1)", "22004", "worker"),
        ("fair_preview('q', 'w', NULL)", "22004", "max_tasks"),
        ("fair_preview('q', 'w', 0)", "22023", "max_tasks"),
        ("fair_preview(' ', 'w', 1)", "22023", "queue"),
        (
            r#"fair_preview('q', 'w', 1, '{"A": 0}')"#,
            "22023",
            "weight",
        ),
        (
            r#"fair_preview('q', 'w', 1, '{"A": "x"}')"#,
            "22023",
            "\"A\"",
        ),
        ("fair_preview('q', 'w', 1, '[]')", "22023", "object"),
    ] {
        expect_error(&mut client, &format!("SELECT {call}"), sqlstate, what, "");
    }
}

#[test]
fn a_preview_respects_caps_and_the_pause() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    claim_one(&mut client, "q");
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 10);
    assert_eq!(lines.len(), 3);
    execute(
        &mut client,
        "SELECT fair_configure('q', '{\"key_max_running\": null}'); SELECT fair_pause('q')",
    );
    assert!(preview(&mut client, "q", "w", 10, "").is_empty());
}

#[test]
fn a_preview_waits_for_no_open_claim_and_holds_none_up() {
    let db = Cluster::shared().database();
    let (mut client, mut other, mut observer) = (db.connect(), db.connect(), db.connect());
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 20, "1 hour");
    }
    let mut open = client.transaction().unwrap();
    let taken = claim(&mut open, "q", "w", 5);
    let mut looking = observer.transaction().unwrap();
    looking
        .batch_execute("SET LOCAL lock_timeout = '10s'; SET LOCAL statement_timeout = '1min'")
        .unwrap();
    let lines = preview(&mut looking, "q", "w", 10, "");
    assert!(
        lines
            .iter()
            .all(|line| taken.iter().all(|task| task.id != line.id))
    );
    // The preview's transaction is still open: a claim gets exactly what was foretold.
    let came = claim(&mut other, "q", "w", 10);
    assert_eq!(
        came.iter().map(|task| task.id).collect::<Vec<_>>(),
        lines.iter().map(|line| line.id).collect::<Vec<_>>()
    );
    looking.commit().unwrap();
    open.rollback().unwrap();
}

#[test]
fn a_preview_of_many_keys_is_exact() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight)
         SELECT 'q', 'k' || i % 700, 1 + i % 7 FROM generate_series(1, 5000) i",
    );
    claims(&mut client, "q", 3, 100);
    preview_then_claim(&mut client, "q", "w", 300);
    preview_then_claim(&mut client, "q", "w", 1000);
}

#[test]
fn a_prune_forgets_idle_keys_and_the_preview_of_it_counts_the_same_and_deletes_none() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 2, "1 hour");
    }
    flood(&mut client, "q", "busy", 50, "1 hour");
    flood(&mut client, "other", "A", 1, "1 hour");
    for task in claim(&mut client, "q", "w", 8) {
        assert!(complete(&mut client, &task));
    }
    for task in drain(&mut client, "other", 5) {
        assert!(complete(&mut client, &task));
    }
    let prune = |client: &mut postgres::Client, arguments: &str| -> i64 {
        one(client, &format!("SELECT fair_prune({arguments})"), &[])
    };
    let clock = states(&mut client, "q")[0].clock;
    assert_eq!(prune(&mut client, "'q', interval '1 hour', true"), 0);
    assert_eq!(prune(&mut client, "'q', interval '0', true"), 3);
    assert_eq!(prune(&mut client, "'q', interval '0', true"), 3);
    assert_eq!(states(&mut client, "q").len(), 4);
    assert_eq!(prune(&mut client, "'q', interval '0'"), 3);
    let left = states(&mut client, "q");
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].key, "busy");
    assert!(
        left[0].clock >= clock,
        "the clock fell from {clock} to {}",
        left[0].clock
    );
    assert_eq!(prune(&mut client, "'q', interval '0'"), 0);
    // The other queue was left alone; without a queue, all are meant.
    assert_eq!(prune(&mut client, "NULL, interval '0', true"), 1);
    assert_eq!(prune(&mut client, "NULL, interval '0'"), 1);
}

#[test]
fn a_key_that_was_pruned_comes_back_at_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    flood(&mut client, "q", "busy", 100, "1 hour");
    for task in claims(&mut client, "q", 30, 1) {
        assert!(complete(&mut client, &task));
    }
    assert_eq!(
        one::<i64>(&mut client, "SELECT fair_prune('q', interval '0')", &[]),
        1
    );
    let clock = states(&mut client, "q")[0].clock;
    flood(&mut client, "q", "A", 50, "2 hours");
    let came_back = states(&mut client, "q");
    let a = came_back.iter().find(|state| state.key == "A").unwrap();
    assert!(
        a.clock >= clock && a.pass >= a.clock && a.lag == 0.0,
        "{a:?}"
    );
    // No credit for the time away, no burst.
    assert_near(
        count(&claims(&mut client, "q", 20, 1), "A"),
        10,
        1,
        "claims of the key that came back",
    );
}

#[test]
fn a_key_with_running_or_future_tasks_is_not_pruned() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "running", 1, "1 hour");
    flood(&mut client, "q", "future", 1, "-1 hour");
    let task = claim_one(&mut client, "q");
    assert_eq!(
        one::<i64>(&mut client, "SELECT fair_prune('q', interval '0')", &[]),
        0
    );
    assert!(complete(&mut client, &task));
    wait_until("the key is idle", PATIENCE, || {
        one::<i64>(&mut client, "SELECT fair_prune('q', interval '0')", &[]) == 1
    });
    expect_error(
        &mut client,
        "SELECT fair_prune('q', interval '-1 s')",
        "22023",
        "idle_for",
        "",
    );
}

#[test]
fn what_was_pruned_is_gone_from_the_snapshot_too() {
    let db = crate::support::brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 1, "1 hour");
    flood(&mut client, "q", "busy", 10, "1 hour");
    for task in claim(&mut client, "q", "w", 3) {
        assert!(complete(&mut client, &task));
    }
    wait_until("the passes are written", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 2 FROM harvest_fair.key_state WHERE queue = 'q'",
            &[],
        )
    });
    assert_eq!(
        one::<i64>(&mut client, "SELECT fair_prune('q', interval '0')", &[]),
        1
    );
    let left: String = one(
        &mut client,
        "SELECT string_agg(fairness_key, ' ') FROM harvest_fair.key_state WHERE queue = 'q'",
        &[],
    );
    assert_eq!(left, "busy");
}

#[test]
fn hypothetical_weights_of_groups_foretell_what_they_would_do() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    for key in ["a/1", "a/2", "b/1", "c"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    claims(&mut client, "q", 9, 1);
    let weights = r#"{"a": 4, "a/2": 3, "nobody": 7}"#;
    let foretold: Vec<i64> = preview(&mut client, "q", "w", 60, weights)
        .iter()
        .map(|line| line.id)
        .collect();
    assert_ne!(
        preview(&mut client, "q", "w", 60, "")
            .iter()
            .map(|line| line.id)
            .collect::<Vec<_>>(),
        foretold
    );
    execute(
        &mut client,
        &format!("SELECT fair_set_weights('q', '{weights}')"),
    );
    let came: Vec<i64> = claim(&mut client, "q", "w", 60)
        .iter()
        .map(|task| task.id)
        .collect();
    assert_eq!(came, foretold);
}

#[test]
fn an_override_that_is_hypothetically_gone_leaves_the_weight_of_the_task() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 1)");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight)
         SELECT 'q', k, w FROM generate_series(1, 200), (VALUES ('A', 4::float8), ('B', NULL)) v (k, w)",
    );
    claims(&mut client, "q", 10, 1);
    let lines = preview(&mut client, "q", "w", 50, r#"{"A": null}"#);
    assert_near(
        lines.iter().filter(|line| line.key == "A").count(),
        40,
        1,
        "claims foretold for A",
    );
}

#[test]
fn what_only_looks_works_in_a_read_only_transaction() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    execute(
        &mut client,
        "BEGIN READ ONLY; SELECT * FROM fair_state('q'); SELECT * FROM fair_queue('q'); SELECT * FROM fair_weights('q');
         SELECT * FROM fair_lag('q'); SELECT * FROM harvest_fair.stats; SELECT fair_prune('q', '0', true); COMMIT",
    );
}

#[test]
fn previews_of_many_keys_hold_up_no_claim() {
    // Of its own: it would fill the shared board.
    let cluster = Cluster::start(Options::new().set("harvest_fair.max_keys", 25_000));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i FROM generate_series(1, 20000) i",
    );
    claim_one(&mut client, "q");
    at_best(|| {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (alone, beside, looks) = std::thread::scope(|scope| {
            let fastest_half = |client: &mut postgres::Client| {
                let mut times: Vec<_> = (0..100)
                    .map(|_| {
                        let start = std::time::Instant::now();
                        claim_one(client, "q");
                        start.elapsed()
                    })
                    .collect();
                times.sort_unstable();
                times[50]
            };
            let alone = fastest_half(&mut client);
            let observer = scope.spawn(|| {
                let (mut observer, mut looks) = (db.connect(), 0);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(preview(&mut observer, "q", "w", 10, "").len(), 10);
                    looks += 1;
                }
                looks
            });
            let beside = fastest_half(&mut client);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            (alone, beside, observer.join().unwrap())
        });
        assert!(looks > 0);
        // Far more than noise, far less than a look at 20,000 keys under the lock for each preview.
        let most = alone * 10 + std::time::Duration::from_millis(20);
        if beside < most {
            return Ok(());
        }
        Err(format!(
            "a claim took {beside:?} beside {looks} previews, {alone:?} alone"
        ))
    });
}

#[test]
fn a_preview_passes_over_rows_that_others_hold_and_locks_none() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 4, "1 hour");
    }
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', sticky_worker => 'w')",
    );
    execute(
        &mut other,
        "BEGIN; SELECT FROM harvest_fair.task WHERE id % 2 = 1 FOR UPDATE;
         SELECT FROM harvest_fair.task WHERE id % 2 = 0 FOR KEY SHARE",
    );
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 3);
    assert!(lines.iter().all(|line| line.id % 2 == 0), "{lines:?}");
    assert_eq!(lines.len(), 3);
    // Nor does it lock what it shows.
    let mut looking = client.transaction().unwrap();
    assert_eq!(preview(&mut looking, "q", "w", 9, "").len(), 1);
    execute(
        &mut other,
        "SELECT FROM harvest_fair.task WHERE state = 'pending' FOR UPDATE NOWAIT; COMMIT",
    );
    looking.commit().unwrap();
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 9);
    assert_eq!(lines.len(), 6);
    assert_eq!(lines[0].reason, "pinned to w");
}
