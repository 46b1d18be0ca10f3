//! Weights in bulk, their reasons, and their cap.

use harvest_fair_server_tests::{Cluster, count, expect_error, flood, one};
use postgres::Client;

use crate::support::{assert_near, claims, execute};

/// Rows of weights, as "key weight reason".
#[track_caller]
fn rows(client: &mut Client, call: &str) -> Vec<String> {
    client
        .query(
            &format!(
                "SELECT concat_ws(' ', fairness_key, weight, coalesce(reason, '-')) FROM {call} ORDER BY fairness_key"
            ),
            &[],
        )
        .unwrap_or_else(|error| panic!("{call}: {error:?}"))
        .iter()
        .map(|row| row.get(0))
        .collect()
}

#[test]
fn weights_set_in_bulk_share_the_next_claims_of_another_session() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    assert_near(
        count(&claims(&mut client, "q", 60, 1), "A"),
        20,
        1,
        "A's claims at equal weights",
    );
    let set = rows(
        &mut admin,
        r#"fair_set_weights('q', '{"A": 4, "B": 1, "C": 1}', 'a new contract')"#,
    );
    assert_eq!(
        set,
        [
            "A 4 a new contract",
            "B 1 a new contract",
            "C 1 a new contract"
        ]
    );
    assert_near(
        count(&claims(&mut client, "q", 120, 1), "A"),
        80,
        2,
        "A's claims at weight 4 of 6",
    );
}

#[test]
fn an_override_beats_the_weight_on_the_task_which_beats_one() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight)
         SELECT 'q', k, w FROM generate_series(1, 400), (VALUES ('A', 3::float8), ('B', NULL)) v (k, w)",
    );
    assert_near(
        count(&claims(&mut client, "q", 80, 1), "A"),
        60,
        1,
        "claims at the task's weight 3",
    );
    execute(&mut admin, r#"SELECT fair_set_weights('q', '{"A": 1}')"#);
    assert_near(
        count(&claims(&mut client, "q", 80, 1), "A"),
        40,
        2,
        "claims under an override of 1",
    );
    execute(&mut admin, r#"SELECT fair_set_weights('q', '{"A": null}')"#);
    assert_near(
        count(&claims(&mut client, "q", 80, 1), "A"),
        60,
        2,
        "claims at the task's weight again",
    );
}

#[test]
fn a_null_in_bulk_unsets_and_the_rest_is_set() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"A": 2, "B": 3}')"#,
    );
    let changed = rows(
        &mut client,
        r#"fair_set_weights('q', '{"A": null, "C": 0.5, "unset": null}', 'tidy')"#,
    );
    assert_eq!(changed, ["A 2 -", "C 0.5 tidy"]);
    assert_eq!(
        rows(&mut client, "fair_weights('q')"),
        ["B 3 -", "C 0.5 tidy"]
    );
}

#[test]
fn one_wrong_weight_in_bulk_changes_none() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (weights, message) in [
        (r#"{"A": 2, "B": 0}"#, "weight 0 "),
        (r#"{"A": 2, "B": 1000.5}"#, "weight 1000.5 "),
        (r#"{"A": 2, "B": -1}"#, "weight -1 "),
        (r#"{"A": 2, "B": "3"}"#, "\"B\""),
        (r#"{"A": 2, "B": [1]}"#, "\"B\""),
        (r#"{"A": 2, "": 1}"#, "default key"),
        (r#"{"A": 2, "..": 1}"#, "fairness key"),
        (r#"[2]"#, "object"),
        ("2", "object"),
    ] {
        expect_error(
            &mut client,
            &format!("SELECT fair_set_weights('q', '{weights}')"),
            "22023",
            message,
            "",
        );
        assert!(
            rows(&mut client, "fair_weights('q')").is_empty(),
            "{weights}"
        );
    }
}

#[test]
fn weights_that_are_no_finite_number_in_range_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for weight in [
        "0",
        "0.0009",
        "1000.001",
        "-1",
        "'NaN'",
        "'Infinity'",
        "'-Infinity'",
    ] {
        expect_error(
            &mut client,
            &format!("SELECT fair_set_weight('q', 'A', {weight}::float8)"),
            "22023",
            "weight",
            "",
        );
    }
    for edge in ["0.001", "1000"] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', 'A', {edge})"),
        );
    }
    let refused = "SELECT fair_set_weight('q', '', 2)";
    expect_error(&mut client, refused, "22023", "default key", "always 1");
    for (call, what) in [
        ("fair_set_weight(NULL, 'A', 2)", "queue"),
        ("fair_set_weight('q', NULL, 2)", "fairness_key"),
        ("fair_set_weight('q', 'A', NULL)", "weight"),
        ("fair_set_weights('q', NULL)", "weights"),
        ("fair_clear_weight('q', NULL)", "fairness_key"),
        ("fair_clear_weights(NULL)", "queue"),
    ] {
        expect_error(&mut client, &format!("SELECT {call}"), "22004", what, "");
    }
}

#[test]
fn clearing_returns_what_was_cleared_and_touches_no_other_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"SELECT fair_set_weights(q, '{"A": 2, "B": 3, "C": 4}') FROM (VALUES ('q'), ('other')) v (q)"#,
    );
    assert_eq!(
        rows(&mut client, "fair_clear_weight('q', 'A', 'over')"),
        ["A 2 -"]
    );
    assert!(rows(&mut client, "fair_clear_weight('q', 'A')").is_empty());
    assert_eq!(
        rows(&mut client, "fair_clear_weights('q')"),
        ["B 3 -", "C 4 -"]
    );
    assert!(rows(&mut client, "fair_weights('q')").is_empty());
    assert_eq!(rows(&mut client, "fair_weights('other')").len(), 3);
}

#[test]
fn clearing_all_weights_counts_at_the_next_claim_of_another_session() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    execute(
        &mut admin,
        r#"SELECT fair_set_weights('q', '{"A": 9, "B": 1}')"#,
    );
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    assert_near(
        count(&claims(&mut client, "q", 100, 1), "A"),
        90,
        1,
        "claims at weight 9",
    );
    execute(&mut admin, "SELECT fair_clear_weights('q')");
    assert_near(
        count(&claims(&mut client, "q", 100, 1), "A"),
        50,
        2,
        "claims without weights",
    );
}

#[test]
fn at_a_thousand_overrides_a_change_succeeds_and_one_more_names_the_cap() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_set_weights('q', (SELECT jsonb_object_agg('k' || i, 2) FROM generate_series(1, 999) i))",
    );
    let refused = r#"SELECT fair_set_weights('q', '{"k1": 5, "new": 1, "newer": 1}')"#;
    expect_error(&mut client, refused, "54000", "1000", "Clear one");
    let first: f64 = one(
        &mut client,
        "SELECT weight FROM fair_weights('q') WHERE fairness_key = 'k1'",
        &[],
    );
    assert_eq!(first, 2.0, "half of a refused bulk was kept");
    execute(&mut client, r#"SELECT fair_set_weights('q', '{"new": 1}')"#);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"k1": 5, "new": 2}')"#,
    );
    let plain =
        "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'newer', 1)";
    expect_error(&mut client, plain, "54000", "1000", "");
    execute(
        &mut client,
        r#"SELECT fair_set_weights('other', '{"newer": 1}')"#,
    );
    let overrides: i64 = one(&mut client, "SELECT count(*) FROM fair_weights('q')", &[]);
    assert_eq!(overrides, 1000);
}

#[test]
fn a_claim_reads_no_table_of_weights_or_settings() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    execute(
        &mut admin,
        r#"SELECT fair_set_weights('q', '{"A": 2, "B": 3}')"#,
    );
    execute(
        &mut admin,
        r#"SELECT fair_configure('q', '{"key_max_running": 1000}')"#,
    );
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    claims(&mut client, "q", 2, 1);
    let reads = "SELECT coalesce(sum(seq_scan + idx_scan), 0)::bigint FROM pg_stat_xact_user_tables
                 WHERE schemaname = 'harvest_fair' AND relname IN ('weight', 'queue', 'key_state')";
    let mut transaction = client.transaction().unwrap();
    let before: i64 = one(&mut transaction, reads, &[]);
    for _ in 0..20 {
        assert_eq!(
            harvest_fair_server_tests::claim(&mut transaction, "q", "w", 1).len(),
            1
        );
    }
    assert_eq!(one::<i64>(&mut transaction, reads, &[]), before);
    transaction.commit().unwrap();
}

#[test]
fn truncating_the_weights_makes_every_key_weigh_one() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, r#"SELECT fair_set_weights('q', '{"A": 9}')"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    assert_near(
        count(&claims(&mut client, "q", 40, 1), "A"),
        36,
        1,
        "claims at weight 9",
    );
    execute(&mut client, "TRUNCATE harvest_fair.weight");
    assert_near(
        count(&claims(&mut client, "q", 40, 1), "A"),
        20,
        2,
        "claims without weights",
    );
}
