//! The audit: every change and every refused change, with who, what, from what, to what and why.

use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, expect_error, expect_refusal, holds_within, one, wait_until,
};
use postgres::Client;

use crate::policy_support::audit;
use crate::support::{at_best, brisk, execute, stat};

/// A connection to a database whose janitor was asked for.
#[track_caller]
fn connect(db: &Database) -> Client {
    db.connect_with("SELECT * FROM fair_state()")
}

#[track_caller]
fn wait_for_refused(client: &mut Client, rows: i64) {
    wait_until("the refused changes are written", PATIENCE, || {
        one(
            client,
            "SELECT count(*) >= $1 FROM harvest_fair.audit WHERE status = 'rejected'",
            &[&rows],
        )
    });
}

#[test]
fn every_change_of_weights_leaves_a_row_with_old_and_new() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"SELECT fair_set_weight('q', 'A', 2, 'first');
           SELECT fair_set_weight('q', 'A', 3);
           SELECT fair_set_weights('q', '{"A": null, "B": 5}', 'bulk');
           SELECT fair_clear_weight('q', 'B', 'gone');
           SELECT fair_set_weight('q', 'C', 0.5);
           SELECT fair_clear_weights('q', 'all over')"#,
    );
    assert_eq!(
        audit(&mut client),
        [
            "set_weight ok q A - 2.0 first -",
            "set_weight ok q A 2.0 3.0 - -",
            r#"set_weights ok q - {"A": 3.0, "B": null} {"A": null, "B": 5} bulk -"#,
            "clear_weight ok q B 5.0 - gone -",
            "set_weight ok q C - 0.5 - -",
            r#"clear_weights ok q - {"C": 0.5} - all over -"#,
        ]
    );
}

#[test]
fn every_change_of_settings_leaves_a_row_with_old_and_new() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"SELECT fair_configure('q', '{"key_max_running": 2}', 'too many');
           SELECT fair_configure('q', '{"key_max_running": null, "lease": 9}');
           SELECT fair_pause('q', 'upgrade');
           SELECT fair_resume('q')"#,
    );
    assert_eq!(
        audit(&mut client),
        [
            r#"configure ok q - {} {"key_max_running": 2} too many -"#,
            r#"configure ok q - {"key_max_running": 2} {"lease": 9, "key_max_running": null} - -"#,
            r#"pause ok q - {"lease": 9} {"paused": true} upgrade -"#,
            r#"resume ok q - {"lease": 9, "paused": true} {"paused": null} - -"#,
        ]
    );
}

#[test]
fn the_actor_is_the_session_user_also_under_another_role() {
    let cluster = brisk();
    let db = cluster.database();
    let mut admin = db.connect_with(
        "DROP ROLE IF EXISTS audited_operator, audited_cover;
         CREATE ROLE audited_operator LOGIN; CREATE ROLE audited_cover; GRANT audited_cover TO audited_operator;
         SELECT * FROM fair_state(); SELECT fair_grant('audited_operator', 'admin'); SELECT fair_grant('audited_cover', 'admin')",
    );
    let mut operator = db.connect_as("audited_operator");
    execute(
        &mut operator,
        "SET ROLE audited_cover; SELECT fair_set_weight('q', 'A', 2)",
    );
    expect_refusal(&mut operator, "SELECT fair_set_weight('q', 'A', 0)");
    wait_for_refused(&mut admin, 1);
    let actors: String = one(
        &mut admin,
        "SELECT string_agg(actor || ' ' || status, ', ' ORDER BY id) FROM harvest_fair.audit",
        &[],
    );
    assert_eq!(actors, "audited_operator ok, audited_operator rejected");
    let by: String = one(&mut admin, "SELECT updated_by FROM fair_weights('q')", &[]);
    assert_eq!(by, "audited_operator");
    drop(operator);
    execute(
        &mut admin,
        "DROP OWNED BY audited_operator, audited_cover; DROP ROLE audited_operator, audited_cover",
    );
}

#[test]
fn a_change_that_rolls_back_leaves_no_row() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        r#"BEGIN; SELECT fair_set_weight('q', 'A', 2); SELECT fair_configure('q', '{"lease": 9}'); ROLLBACK"#,
    );
    assert!(audit(&mut client).is_empty());
}

#[test]
fn a_refused_change_reaches_the_audit_within_five_seconds() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    at_best(|| {
        execute(&mut client, "DELETE FROM harvest_fair.audit");
        expect_refusal(&mut client, "SELECT fair_set_weight('q', 'A', 0)");
        let refused = Instant::now();
        wait_for_refused(&mut client, 1);
        let taken = refused.elapsed();
        if taken < Duration::from_secs(5) {
            Ok(())
        } else {
            Err(format!("it took {taken:?}"))
        }
    });
}

#[test]
fn every_kind_of_refused_change_reaches_the_audit() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    let refused = [
        (
            "fair_set_weight('q', 'A', 0, 'why')",
            "set_weight rejected q A - 0.0 why weight 0 ",
        ),
        (
            "fair_set_weight('q', 'A', 'NaN')",
            "set_weight rejected q A - \"NaN\" - weight NaN",
        ),
        (
            "fair_set_weight('q', '', 2)",
            "set_weight rejected q - - 2.0 - the default key",
        ),
        (
            r#"fair_set_weights('q', '{"A": "x"}')"#,
            r#"set_weights rejected q - - {"A": "x"} - weight of key "A""#,
        ),
        (
            "fair_clear_weight('q', '..')",
            "clear_weight rejected q .. - - - ",
        ),
        (
            r#"fair_configure('q', '{"x": 1}', 'try')"#,
            r#"configure rejected q - - {"x": 1} try unknown setting: "x""#,
        ),
        (
            r#"fair_configure('q', '{"paused": 1}')"#,
            r#"configure rejected q - - {"paused": 1} - invalid value for setting "paused""#,
        ),
        (
            "fair_pause(' ')",
            "pause rejected   - - {\"paused\": true} - ",
        ),
    ];
    for (call, _) in refused {
        expect_refusal(&mut client, &format!("SELECT {call}"));
    }
    wait_for_refused(&mut client, refused.len() as i64);
    let rows = audit(&mut client);
    assert_eq!(rows.len(), refused.len(), "{rows:?}");
    for (row, (call, expected)) in rows.iter().zip(refused) {
        assert!(
            row.starts_with(expected),
            "{call}: {row:?} does not begin with {expected:?}"
        );
    }
}

#[test]
fn a_refused_change_is_kept_though_its_transaction_rolls_back() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    execute(
        &mut client,
        "BEGIN; SELECT fair_set_weight('q', 'kept not', 2)",
    );
    expect_error(
        &mut client,
        "SELECT fair_set_weight('q', 'A', 5000)",
        "22023",
        "5000",
        "",
    );
    execute(&mut client, "ROLLBACK");
    execute(
        &mut client,
        "BEGIN; DO $$ BEGIN PERFORM fair_set_weight('q', 'B', -1); EXCEPTION WHEN OTHERS THEN NULL; END $$; ROLLBACK",
    );
    wait_for_refused(&mut client, 2);
    let keys: String = one(
        &mut client,
        "SELECT string_agg(fairness_key || ' ' || status, ', ' ORDER BY id) FROM harvest_fair.audit",
        &[],
    );
    assert_eq!(keys, "A rejected, B rejected");
}

#[test]
fn a_refused_change_keeps_the_time_at_which_it_was_refused() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    execute(
        &mut client,
        "CREATE TABLE moment AS SELECT clock_timestamp() AS before, NULL::timestamptz AS after",
    );
    expect_refusal(&mut client, "SELECT fair_set_weight('q', 'A', 0)");
    execute(&mut client, "UPDATE moment SET after = clock_timestamp()");
    wait_for_refused(&mut client, 1);
    let between: bool = one(
        &mut client,
        "SELECT at BETWEEN before AND after FROM harvest_fair.audit, moment",
        &[],
    );
    assert!(between);
}

#[test]
fn refused_changes_stay_with_their_own_database() {
    let (one_db, other_db) = (Cluster::shared().database(), Cluster::shared().database());
    let (mut one_client, mut other_client) = (connect(&one_db), connect(&other_db));
    expect_refusal(&mut one_client, "SELECT fair_set_weight('q', 'mine', 0)");
    expect_refusal(
        &mut other_client,
        "SELECT fair_set_weight('q', 'theirs', 0)",
    );
    wait_for_refused(&mut one_client, 1);
    wait_for_refused(&mut other_client, 1);
    for (client, key) in [(&mut one_client, "mine"), (&mut other_client, "theirs")] {
        let keys: String = one(
            client,
            "SELECT string_agg(fairness_key, ' ') FROM harvest_fair.audit",
            &[],
        );
        assert_eq!(keys, key);
    }
}

#[test]
fn refused_changes_beyond_the_ring_are_counted_and_none_vanishes_unseen() {
    let cluster = Cluster::start(harvest_fair_server_tests::Options::new());
    let db = cluster.database();
    let mut client = connect(&db);
    execute(&mut client, "SELECT * FROM fair_state('q')");
    let refused = 1000;
    // In one statement: the janitor comes round once a second.
    execute(
        &mut client,
        &format!(
            "DO $$ BEGIN FOR i IN 1..{refused} LOOP
                BEGIN PERFORM fair_set_weight('q', 'k' || i, 0); EXCEPTION WHEN OTHERS THEN NULL; END;
             END LOOP; END $$"
        ),
    );
    let mut written_and_counted = (0, 0);
    let all = holds_within(PATIENCE, || {
        let written: i64 = one(
            &mut client,
            "SELECT count(DISTINCT fairness_key) FROM harvest_fair.audit WHERE status = 'rejected'",
            &[],
        );
        written_and_counted = (written, stat(&mut client, "q", "audit_overflow"));
        written_and_counted.0 + written_and_counted.1 == refused
    });
    assert!(
        all,
        "written and counted: {written_and_counted:?} of {refused}"
    );
    assert!(written_and_counted.0 >= 64, "{written_and_counted:?}");
    assert!(written_and_counted.1 > 0, "{written_and_counted:?}");
}

#[test]
fn long_and_hostile_values_of_refused_changes_are_cut_and_stored() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    let long = "ü".repeat(5000);
    expect_refusal(
        &mut client,
        &format!("SELECT fair_set_weight('q', '{long}', 2, '{long}')"),
    );
    expect_refusal(
        &mut client,
        &format!(r#"SELECT fair_set_weights('q', '{{"{long}": 0}}')"#),
    );
    let hostile = r#"SELECT fair_set_weight('q', $$'); DROP TABLE harvest_fair.audit; --$$, 0)"#;
    expect_refusal(&mut client, hostile);
    wait_for_refused(&mut client, 3);
    let keys: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.audit WHERE fairness_key LIKE 'üü%' OR fairness_key LIKE '%DROP TABLE%'",
        &[],
    );
    assert_eq!(keys, 2);
    let cut: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.audit
         WHERE fairness_key LIKE 'üü%ü...' AND reason LIKE 'üü%ü...' OR new #>> '{}' LIKE '{\"üü%ü...'",
        &[],
    );
    assert_eq!(cut, 2, "what was cut does not end in dots");
}

#[test]
fn jsonb_that_cannot_be_read_is_refused_by_name_and_recorded() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    execute(
        &mut client,
        r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('row', '{"rate_limit": 5}')"#,
    );
    let nested = format!(r#"{{"deep": {}{}}}"#, "[".repeat(200), "]".repeat(200));
    let large = r#"{"large": 1e400}"#;
    for (value, shown) in [
        (large, r#"{"large": 1000"#),
        (nested.as_str(), r#"{"deep": [[["#),
    ] {
        for change in [
            format!("SELECT fair_set_weights('q', '{value}')"),
            format!("SELECT fair_configure('q', '{value}')"),
            format!("INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{value}')"),
            format!("UPDATE harvest_fair.queue SET settings = '{value}'"),
            // Which changes nothing, and leaves no row.
            format!("SELECT fair_preview('q', 'w', 1, '{value}')"),
        ] {
            let refusal = expect_error(&mut client, &change, "22023", shown, "127 levels");
            assert!(refusal.message.len() < 150, "{refusal:?}");
        }
    }
    wait_for_refused(&mut client, 8);
}

#[test]
fn a_refused_change_that_is_the_first_call_of_a_database_reaches_the_audit() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_refusal(&mut client, "SELECT fair_set_weight('q', 'A', 0)");
    wait_for_refused(&mut client, 1);
}

#[test]
fn the_override_beyond_the_cap_is_recorded_as_refused() {
    let db = Cluster::shared().database();
    let mut client = connect(&db);
    execute(
        &mut client,
        "SELECT fair_set_weights('q', (SELECT jsonb_object_agg('k' || i, 2) FROM generate_series(1, 1000) i))",
    );
    expect_error(
        &mut client,
        "SELECT fair_set_weight('q', 'more', 2)",
        "54000",
        "1000",
        "",
    );
    wait_for_refused(&mut client, 1);
    let error: String = one(
        &mut client,
        "SELECT error FROM harvest_fair.audit WHERE status = 'rejected' AND fairness_key = 'more'",
        &[],
    );
    assert!(error.contains("1000"), "{error}");
}
