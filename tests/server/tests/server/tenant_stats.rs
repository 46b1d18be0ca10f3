//! `harvest_fair.tenant_stats`: what each key got, and what its tasks wait for.

use harvest_fair_server_tests::{
    Cluster, claim, claim_one, complete, count, enqueue, flood, keys_of, one,
};
use postgres::Client;
use postgres::types::FromSqlOwned;

use crate::support::{execute, fail, stat, unattended};

/// A figure of a key of the queue `q`.
#[track_caller]
fn figure<T: FromSqlOwned>(client: &mut Client, key: &str, column: &str) -> T {
    let sql = format!(
        "SELECT {column} FROM harvest_fair.tenant_stats WHERE queue = 'q' AND fairness_key = $1"
    );
    one(client, &sql, &[&key])
}

/// claims, completions, failures, served cost
#[track_caller]
fn counted(client: &mut Client, key: &str) -> (i64, i64, i64, f64) {
    (
        figure(client, key, "claims"),
        figure(client, key, "completions"),
        figure(client, key, "failures"),
        figure(client, key, "served_cost"),
    )
}

/// runnable, capped, limited, paused, future, running
#[track_caller]
fn tasks(client: &mut Client, key: &str) -> [i64; 6] {
    [
        "runnable", "capped", "limited", "paused", "future", "running",
    ]
    .map(|state| figure(client, key, state))
}

#[test]
fn each_key_is_counted_for_what_became_of_its_tasks() {
    let db = unattended().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    let claimed = claim(&mut client, "q", "w", 6);
    assert_eq!(counted(&mut client, "A"), (6, 0, 0, 6.0));
    assert!(complete(&mut client, &claimed[0]));
    assert!(complete(&mut client, &claimed[1]));
    assert_eq!(counted(&mut client, "A"), (6, 2, 0, 6.0));
    // To be tried again, and for good.
    assert_eq!(
        fail(&mut client, &claimed[2], Some("1 hour")).as_deref(),
        Some("pending")
    );
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET max_attempts = 1 WHERE id = {}",
            claimed[3].id
        ),
    );
    assert_eq!(
        fail(&mut client, &claimed[3], None).as_deref(),
        Some("failed")
    );
    assert_eq!(counted(&mut client, "A"), (6, 2, 2, 6.0));
    // What is given back is no failure, and was not served.
    let released: bool = one(
        &mut client,
        "SELECT fair_release($1::bigint, $2::bigint)",
        &[&claimed[4].id, &claimed[4].lease],
    );
    assert!(released);
    assert_eq!(counted(&mut client, "A"), (6, 2, 2, 5.0));
    let mut transaction = client.transaction().unwrap();
    claim(&mut transaction, "q", "w", 2);
    transaction.rollback().unwrap();
    assert_eq!(counted(&mut client, "A"), (6, 2, 2, 5.0));
    // The real cost, and a charge by hand.
    execute(
        &mut client,
        &format!(
            "SELECT fair_complete({}, {}, cost => 4.5)",
            claimed[5].id, claimed[5].lease
        ),
    );
    execute(&mut client, "SELECT fair_charge('q', 'A', 2)");
    assert_eq!(counted(&mut client, "A"), (6, 3, 2, 10.5));
}

#[test]
fn a_lease_that_runs_out_is_a_failure() {
    let db = unattended().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '1ms'");
    enqueue(&mut client, "q", Some("A"));
    claim_one(&mut client, "q");
    execute(&mut client, "SELECT pg_sleep(0.01)");
    // Meets it, and takes it back before it is claimed again.
    claim_one(&mut client, "q");
    let (claims, _, failures, _) = counted(&mut client, "A");
    assert_eq!((claims, failures), (2, 1));
}

#[test]
fn waits_are_from_the_due_time_to_the_claim() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "100 s");
    enqueue(&mut client, "q", Some("B"));
    claim(&mut client, "q", "w", 1);
    let none: Option<f64> = figure(&mut client, "B", "wait_median");
    assert_eq!(none, None);
    claim(&mut client, "q", "w", 50);
    for column in ["wait_median", "wait_p95"] {
        let wait: f64 = figure(&mut client, "A", column);
        assert!((50.0..250.0).contains(&wait), "{column} {wait}");
    }
    flood(&mut client, "q", "A", 20, "100 s");
    let age: f64 = figure(&mut client, "A", "head_age");
    assert!((99.0..250.0).contains(&age), "{age}");
    let none: Option<f64> = figure(&mut client, "B", "head_age");
    assert_eq!(none, None);
}

#[test]
fn shares_and_fair_shares_go_by_weight() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 3)");
    flood(&mut client, "q", "A", 100, "1 min");
    flood(&mut client, "q", "B", 100, "1 min");
    let share = |client: &mut Client, key: &str| -> (Option<f64>, Option<f64>) {
        (
            figure(client, key, "share"),
            figure(client, key, "fair_share"),
        )
    };
    execute(&mut client, "SELECT fair_state('q')");
    assert_eq!(share(&mut client, "A"), (None, Some(0.25)));
    let tasks = claim(&mut client, "q", "w", 80);
    assert_eq!(count(&tasks, "B"), 60);
    assert_eq!(share(&mut client, "A"), (Some(0.25), Some(0.25)));
    assert_eq!(share(&mut client, "B"), (Some(0.75), Some(0.75)));
    let weight: f64 = figure(&mut client, "B", "weight");
    assert_eq!(weight, 3.0);
    // One that has nothing to do takes no part.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at) VALUES ('q', 'C', now() + interval '1 hour')",
    );
    assert_eq!(share(&mut client, "C"), (Some(0.0), None));
    assert_eq!(share(&mut client, "A").1, Some(0.25));
}

#[test]
fn fair_shares_within_groups_are_parts_of_the_groups_share() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_configure('q', '{\"group_separator\": \"/\"}')");
    execute(
        &mut client,
        "SELECT fair_set_weights('q', '{\"acme\": 3, \"acme/ann\": 2}')",
    );
    for key in ["acme/ann", "acme/bob", "bolt/dan"] {
        flood(&mut client, "q", key, 50, "1 min");
    }
    let tasks = claim(&mut client, "q", "w", 80);
    for (key, fair) in [("acme/ann", 0.5), ("acme/bob", 0.25), ("bolt/dan", 0.25)] {
        let share: f64 = figure(&mut client, key, "fair_share");
        assert!((share - fair).abs() < 1e-9, "{key} {share}");
        let share: f64 = figure(&mut client, key, "share");
        assert_eq!(share, count(&tasks, key) as f64 / 80.0);
        assert!((share - fair).abs() < 0.03, "{key} {share}");
    }
    let group: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.tenant_stats WHERE fairness_key IN ('acme', 'bolt')",
        &[],
    );
    assert_eq!(group, 0);
}

#[test]
fn tasks_are_counted_by_what_they_wait_for() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_configure('q', '{\"key_max_running\": 2}')");
    flood(&mut client, "q", "A", 5, "1 min");
    claim(&mut client, "q", "w", 5);
    flood(&mut client, "q", "B", 1, "1 min");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', key, now() + interval '1 hour' FROM unnest(ARRAY['A', 'B', 'C', 'C']) key",
    );
    assert_eq!(tasks(&mut client, "A"), [0, 3, 0, 0, 1, 2]);
    assert_eq!(tasks(&mut client, "B"), [1, 0, 0, 0, 1, 0]);
    assert_eq!(tasks(&mut client, "C"), [0, 0, 0, 0, 2, 0]);
    let keys = |client: &mut Client| {
        [
            "runnable", "capped", "limited", "paused", "future", "running",
        ]
        .map(|state| stat(client, "q", &format!("{state}_keys")))
    };
    assert_eq!(keys(&mut client), [1, 1, 0, 0, 1, 1]);
    // With a token an hour.
    execute(
        &mut client,
        "SELECT fair_configure('q', '{\"key_max_running\": null, \"key_rate_limit\": 0.0003}')",
    );
    claim(&mut client, "q", "w", 5);
    assert_eq!(tasks(&mut client, "A"), [0, 0, 2, 0, 1, 3]);
    assert_eq!(keys(&mut client), [0, 0, 1, 0, 2, 2]);
    execute(&mut client, "SELECT fair_pause('q')");
    assert_eq!(tasks(&mut client, "A"), [0, 0, 0, 2, 1, 3]);
    assert_eq!(keys(&mut client), [0, 0, 0, 1, 2, 2]);
}

#[test]
fn what_the_board_knows_costs_no_look_at_the_backlog() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let plan = |client: &mut Client, columns: &str| -> String {
        let sql =
            format!("EXPLAIN SELECT {columns} FROM harvest_fair.tenant_stats WHERE queue = 'q'");
        let lines = client.query(&sql, &[]).unwrap();
        lines
            .iter()
            .map(|row| row.get::<_, String>(0) + "\n")
            .collect()
    };
    let of_board = "fairness_key, weight, claims, completions, failures, served_cost, wait_median, wait_p95, share, \
                    fair_share, head_age, waiting_for, running";
    let lean = plan(&mut client, of_board);
    assert!(!lean.contains("task"), "{lean}");
    let full = plan(&mut client, "runnable");
    assert!(full.contains("task"), "{full}");
}

#[test]
fn only_keys_of_this_database_are_shown_that_have_or_had_something_to_do() {
    let cluster = Cluster::shared();
    let (mine, other) = (cluster.database(), cluster.database());
    flood(&mut other.connect(), "q", "secret", 2, "1 s");
    claim_one(&mut other.connect(), "q");
    let mut client = mine.connect_with("SELECT fair_set_weight('q', 'unused', 3)");
    flood(&mut client, "q", "A", 1, "1 s");
    claim_one(&mut client, "q");
    let seen: String = one(
        &mut client,
        "SELECT string_agg(queue || '.' || fairness_key, ',') FROM harvest_fair.tenant_stats",
        &[],
    );
    assert_eq!(seen, "q.A");
}

#[test]
fn keys_of_the_greatest_length_are_told_apart_and_a_key_takes_at_most_half_a_kilobyte() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let keys: Vec<String> = ["a", "b"].map(|end| "ä".repeat(127) + "-" + end).to_vec();
    for key in &keys {
        assert_eq!(key.len(), 256);
        flood(&mut client, "q", key, 10, "1 min");
    }
    let foreseen: Vec<String> = client
        .query(
            "SELECT fairness_key FROM fair_preview('q', 'w', 6) ORDER BY position",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let tasks = claim(&mut client, "q", "w", 6);
    assert_eq!(keys_of(&tasks), foreseen);
    for key in &keys {
        assert_eq!(counted(&mut client, key), (3, 0, 0, 3.0));
    }
    let bytes = stat(&mut client, "q", "bytes_per_key");
    assert!((256..=512).contains(&bytes), "{bytes}");
    let differences: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.check()",
        &[],
    );
    assert_eq!(differences, 0);
}
