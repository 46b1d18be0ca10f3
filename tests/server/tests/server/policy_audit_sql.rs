//! The audit of changes by plain SQL, and of calls that fail before they change anything.

use harvest_fair_server_tests::{Cluster, PATIENCE, expect_error, expect_refusal, one, wait_until};
use postgres::Client;

use crate::policy_support::audit;
use crate::support::execute;

#[track_caller]
fn wait_for_rows(client: &mut Client, rows: i64) {
    wait_until("the refused changes are written", PATIENCE, || {
        one::<i64>(client, "SELECT count(*) FROM harvest_fair.audit", &[]) >= rows
    });
}

#[test]
fn plain_sql_on_the_weights_leaves_a_row_for_each_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.weight (queue, fairness_key, weight, reason) VALUES ('q', 'A', 2, 'new'), ('q', 'B', 3, NULL);
         UPDATE harvest_fair.weight SET weight = 5 WHERE fairness_key = 'A';
         UPDATE harvest_fair.weight SET weight = 5, updated_at = now() WHERE fairness_key = 'A';
         UPDATE harvest_fair.weight SET fairness_key = 'C' WHERE fairness_key = 'A';
         DELETE FROM harvest_fair.weight WHERE fairness_key = 'B';
         INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('r', 'D', 7) ON CONFLICT DO NOTHING;
         INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('r', 'D', 8) ON CONFLICT DO NOTHING;
         TRUNCATE harvest_fair.weight",
    );
    assert_eq!(
        audit(&mut client),
        [
            "insert_weight ok q A - 2.0 new -",
            "insert_weight ok q B - 3.0 - -",
            "update_weight ok q A 2.0 5.0 new -",
            "update_weight ok q A 5.0 - new -",
            "update_weight ok q C - 5.0 new -",
            "delete_weight ok q B 3.0 - - -",
            "insert_weight ok r D - 7.0 - -",
            r#"truncate_weight ok q - {"C": 5} - - -"#,
            r#"truncate_weight ok r - {"D": 7} - - -"#,
        ]
    );
}

#[test]
fn plain_sql_on_the_queues_leaves_a_row_for_each_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{"lease": 9}'), ('r', '{}');
           UPDATE harvest_fair.queue SET settings = '{"paused": true}' WHERE queue = 'q';
           UPDATE harvest_fair.queue SET settings = settings;
           UPDATE harvest_fair.queue SET queue = 's' WHERE queue = 'r';
           DELETE FROM harvest_fair.queue WHERE queue = 's';
           TRUNCATE harvest_fair.queue"#,
    );
    assert_eq!(
        audit(&mut client),
        [
            r#"insert_queue ok q - - {"lease": 9} - -"#,
            "insert_queue ok r - - {} - -",
            r#"update_queue ok q - {"lease": 9} {"paused": true} - -"#,
            "update_queue ok r - {} - - -",
            "update_queue ok s - - {} - -",
            "delete_queue ok s - {} - - -",
            r#"truncate_queue ok q - {"paused": true} - - -"#,
        ]
    );
}

#[test]
fn a_copy_is_audited_row_by_row_and_a_rolled_back_change_is_not() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    use std::io::Write;
    let mut writer = client
        .copy_in("COPY harvest_fair.weight (queue, fairness_key, weight) FROM STDIN")
        .unwrap();
    writer.write_all(b"q\tA\t2\nq\tB\t3\n").unwrap();
    writer.finish().unwrap();
    execute(
        &mut client,
        "BEGIN; DELETE FROM harvest_fair.weight; TRUNCATE harvest_fair.weight; ROLLBACK",
    );
    assert_eq!(
        audit(&mut client),
        [
            "insert_weight ok q A - 2.0 - -",
            "insert_weight ok q B - 3.0 - -",
        ]
    );
}

#[test]
fn a_function_and_plain_sql_in_one_transaction_leave_a_row_each() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "BEGIN; SELECT fair_set_weight('q', 'A', 2); UPDATE harvest_fair.weight SET weight = 3;
         SELECT fair_clear_weight('q', 'A'); SELECT fair_pause('q'); DELETE FROM harvest_fair.queue; COMMIT",
    );
    assert_eq!(
        audit(&mut client),
        [
            "set_weight ok q A - 2.0 - -",
            "update_weight ok q A 2.0 3.0 - -",
            "clear_weight ok q A 3.0 - - -",
            r#"pause ok q - {} {"paused": true} - -"#,
            r#"delete_queue ok q - {"paused": true} - - -"#,
        ]
    );
    // Nor does a refused call make the session forget who makes the next change.
    expect_refusal(&mut client, "SELECT fair_set_weight('q', 'A', 0)");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'A', 2)",
    );
    assert_eq!(audit(&mut client)[5], "insert_weight ok q A - 2.0 - -");
}

#[test]
fn refused_plain_sql_reaches_the_audit() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let refused = [
        (
            "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'A', 0)",
            "insert_weight rejected q A - 0.0 - weight 0 ",
        ),
        (
            "INSERT INTO harvest_fair.weight (queue, fairness_key, weight, reason) VALUES (NULL, 'A', 2, 'why')",
            "insert_weight rejected - A - 2.0 why queue must not be null",
        ),
        (
            "INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '[]')",
            "insert_queue rejected q - - [] - settings must be a jsonb object",
        ),
        (
            r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{"x": 1}')"#,
            r#"insert_queue rejected q - - {"x": 1} - unknown setting"#,
        ),
    ];
    for (sql, _) in refused {
        expect_refusal(&mut client, sql);
    }
    wait_for_rows(&mut client, refused.len() as i64);
    let rows = audit(&mut client);
    assert_eq!(rows.len(), refused.len(), "{rows:?}");
    for (row, (sql, expected)) in rows.iter().zip(refused) {
        assert!(
            row.starts_with(expected),
            "{sql}: {row:?}, not {expected:?}"
        );
    }
}

#[test]
fn calls_that_fail_before_they_change_anything_reach_the_audit() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let refused = [
        (
            "fair_set_weight(NULL, 'A', 2, 'why')",
            "set_weight rejected - A - 2.0 why queue must not",
        ),
        (
            "fair_set_weight('q', NULL, 2)",
            "set_weight rejected q - - 2.0 - fairness_key must not",
        ),
        (
            "fair_set_weight('q', 'A', NULL)",
            "set_weight rejected q A - - - weight must not",
        ),
        (
            "fair_set_weight('..', 'A', 2)",
            "set_weight rejected .. A - 2.0 - queue name",
        ),
        (
            "fair_set_weights(NULL, '{}')",
            "set_weights rejected - - - {} - queue must not",
        ),
        (
            "fair_set_weights('q', NULL)",
            "set_weights rejected q - - - - weights must not",
        ),
        (
            "fair_set_weights('q', '[1]')",
            "set_weights rejected q - - [1] - weights must be a jsonb object",
        ),
        (
            "fair_clear_weight(NULL, 'A')",
            "clear_weight rejected - A - - - queue must not",
        ),
        (
            "fair_clear_weight('q', NULL)",
            "clear_weight rejected q - - - - fairness_key must not",
        ),
        (
            "fair_clear_weights(NULL, 'why')",
            "clear_weights rejected - - - - why queue must not",
        ),
        (
            "fair_configure(NULL, '{}')",
            "configure rejected - - - {} - queue must not",
        ),
        (
            "fair_configure('q', NULL)",
            "configure rejected q - - - - settings must not",
        ),
        (
            "fair_configure('q', '5')",
            "configure rejected q - - 5 - settings must be a jsonb object",
        ),
        (
            "fair_pause(NULL)",
            "pause rejected - - - {\"paused\": true} - queue must not",
        ),
        (
            "fair_resume(NULL)",
            "resume rejected - - - {\"paused\": null} - queue must not",
        ),
    ];
    for (call, _) in refused {
        expect_refusal(&mut client, &format!("SELECT {call}"));
    }
    wait_for_rows(&mut client, refused.len() as i64);
    let rows = audit(&mut client);
    assert_eq!(rows.len(), refused.len(), "{rows:?}");
    for (row, (call, expected)) in rows.iter().zip(refused) {
        assert!(
            row.starts_with(expected),
            "{call}: {row:?}, not {expected:?}"
        );
    }
}

#[test]
fn a_change_that_postgres_itself_refuses_reaches_the_audit_once() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    expect_error(
        &mut client,
        "BEGIN READ ONLY; SELECT fair_set_weight('q', 'A', 2)",
        "25006",
        "",
        "",
    );
    execute(&mut client, "ROLLBACK");
    // Held up by another session, and then by its own time limit.
    execute(
        &mut other,
        "BEGIN; SELECT fair_configure('q', '{\"lease\": 9}')",
    );
    expect_error(
        &mut client,
        "SET lock_timeout = '10ms'; SELECT fair_pause('q')",
        "55P03",
        "",
        "",
    );
    execute(&mut other, "ROLLBACK");
    wait_for_rows(&mut client, 2);
    let rows = audit(&mut client);
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert!(
        rows[0].starts_with("set_weight rejected q A - 2.0 - cannot execute"),
        "{rows:?}"
    );
    assert!(
        rows[1].contains("pause rejected q") && rows[1].contains("lock timeout"),
        "{rows:?}"
    );
}

#[test]
fn what_was_restored_is_no_change() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    // As a dump has it: with the time of the last change.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.weight (queue, fairness_key, weight, updated_at) VALUES ('q', 'A', 2, '2020-01-01');
         INSERT INTO harvest_fair.queue (queue, updated_at) VALUES ('q', '2020-01-01')",
    );
    assert!(audit(&mut client).is_empty());
    // From then on it is like any other.
    execute(
        &mut client,
        "UPDATE harvest_fair.weight SET weight = 3; DELETE FROM harvest_fair.queue",
    );
    assert_eq!(
        audit(&mut client),
        [
            "update_weight ok q A 2.0 3.0 - -",
            "delete_queue ok q - {} - - -"
        ]
    );
}
