//! The settings of a queue: what they take, where they come from, when they count, and the pause.

use std::thread;
use std::time::Duration;

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, claim_one, claim_waiting, complete, enqueue,
    expect_error, flood, one, pending, wait_until,
};

use crate::policy_support::{claim_by_id, configure, setting, waiting_for};
use crate::support::{brisk, execute, stat};

const ALL: [&str; 11] = [
    "queue_weight",
    "rate_limit",
    "key_rate_limit",
    "key_max_running",
    "lease",
    "priority_aging",
    "new_start_handicap",
    "charge",
    "group_separator",
    "paused",
    "retention",
];

fn owned(value: &str, source: &str) -> (String, String) {
    (value.to_owned(), source.to_owned())
}

#[test]
fn a_queue_that_nobody_configured_shows_every_default_and_where_it_comes_from() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let shown: Vec<String> = client
        .query(
            "SELECT concat_ws(' ', setting, coalesce(value::text, '-'), source) FROM fair_queue('q')",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(shown.len(), ALL.len());
    for expected in [
        "queue_weight 1.0 default",
        "rate_limit - default",
        "key_rate_limit - default",
        "key_max_running - default",
        "priority_aging - default",
        "new_start_handicap 30.0 default",
        "charge \"claims\" default",
        "group_separator - default",
        "paused false default",
    ] {
        assert!(
            shown.iter().any(|line| line == expected),
            "{expected}: {shown:?}"
        );
    }
    for of_the_server in ["lease", "retention"] {
        let (value, source) = setting(&mut client, "q", of_the_server);
        assert_eq!(source, "guc", "{of_the_server}");
        assert_ne!(value, "-", "{of_the_server}");
    }
    execute(&mut client, "SET harvest_fair.default_lease = '45s'");
    assert_eq!(setting(&mut client, "q", "lease"), owned("45.0", "guc"));
}

#[test]
fn a_setting_that_is_set_shows_its_value_until_null_resets_it() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let given = [
        ("queue_weight", "3", "3.0"),
        ("rate_limit", "2.5", "2.5"),
        ("key_rate_limit", "1", "1.0"),
        ("key_max_running", "7", "7"),
        ("lease", "\"10 s\"", "10.0"),
        ("priority_aging", "0.5", "0.5"),
        ("new_start_handicap", "\"1 min\"", "60.0"),
        ("charge", "\"seconds\"", "\"seconds\""),
        ("group_separator", "\"/\"", "\"/\""),
        ("paused", "true", "true"),
        ("retention", "\"2 days\"", "172800.0"),
    ];
    for (field, value, _) in given {
        configure(&mut client, "q", &format!(r#"{{"{field}": {value}}}"#));
    }
    for (field, _, shown) in given {
        assert_eq!(
            setting(&mut client, "q", field),
            owned(shown, "set"),
            "{field}"
        );
        // Another queue has none of it.
        assert_ne!(setting(&mut client, "other", field).1, "set", "{field}");
    }
    for (field, ..) in given {
        configure(&mut client, "q", &format!(r#"{{"{field}": null}}"#));
        assert_ne!(setting(&mut client, "q", field).1, "set", "{field}");
    }
    for field in ALL {
        assert_eq!(
            setting(&mut client, "q", field),
            setting(&mut client, "other", field),
            "{field}"
        );
    }
}

#[test]
fn configure_returns_the_effective_settings() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut rows = |sql: &str| -> Vec<String> {
        client
            .query(sql, &[])
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect()
    };
    let line = "concat_ws(' ', setting, coalesce(value::text, '-'), source)";
    let returned = rows(&format!(
        r#"SELECT {line} FROM fair_configure('q', '{{"key_max_running": 4, "lease": 20}}')"#
    ));
    let shown = rows(&format!("SELECT {line} FROM fair_queue('q')"));
    assert_eq!(returned, shown);
    assert!(
        shown.contains(&"key_max_running 4 set".to_owned()),
        "{shown:?}"
    );
}

#[test]
fn an_unknown_setting_is_refused_by_name_with_the_list_of_the_known_ones() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let refusal = expect_error(
        &mut client,
        r#"SELECT fair_configure('q', '{"lease": 9, "rate_limt": 5}')"#,
        "22023",
        "\"rate_limt\"",
        "",
    );
    for known in ALL {
        assert!(refusal.hint.contains(known), "no {known} in {refusal:?}");
    }
    // All or nothing.
    assert_eq!(setting(&mut client, "q", "lease").1, "guc");
}

#[test]
fn a_mistyped_setting_is_refused_by_name_and_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let wrong = [
        ("queue_weight", "-1"),
        ("queue_weight", "\"3\""),
        ("queue_weight", "1e9"),
        ("rate_limit", "0"),
        ("rate_limit", "-5"),
        ("rate_limit", "\"10/s\""),
        ("rate_limit", "true"),
        ("key_rate_limit", "0"),
        ("key_rate_limit", "[1]"),
        ("key_max_running", "-1"),
        ("key_max_running", "1.5"),
        ("key_max_running", "\"2\""),
        ("key_max_running", "99999999999"),
        ("lease", "0"),
        ("lease", "\"soon\""),
        ("lease", "\"-1 s\""),
        ("lease", "1e300"),
        ("priority_aging", "0"),
        ("priority_aging", "false"),
        ("new_start_handicap", "-1"),
        ("new_start_handicap", "{}"),
        ("charge", "\"bytes\""),
        ("charge", "1"),
        ("group_separator", "\"\""),
        ("group_separator", "\"//\""),
        ("group_separator", "\" \""),
        ("group_separator", "7"),
        ("paused", "\"yes\""),
        ("paused", "1"),
        ("retention", "-1"),
        ("retention", "\"for ever and a day\""),
    ];
    for (field, value) in wrong {
        let refusal = expect_error(
            &mut client,
            &format!(r#"SELECT fair_configure('q', '{{"{field}": {value}}}')"#),
            "22023",
            &format!("\"{field}\""),
            "null restores the default",
        );
        assert!(!refusal.hint.is_empty(), "{refusal:?}");
        assert_ne!(
            setting(&mut client, "q", field).1,
            "set",
            "{field}: {value}"
        );
    }
    let stored: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.queue", &[]);
    assert_eq!(stored, 0);
}

#[test]
fn settings_that_are_no_object_or_a_queue_that_is_no_name_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for value in ["[]", "7", "\"paused\"", "null"] {
        expect_error(
            &mut client,
            &format!("SELECT fair_configure('q', '{value}')"),
            "22023",
            "settings must be a jsonb object",
            "{",
        );
    }
    expect_error(
        &mut client,
        "SELECT fair_configure('q', NULL)",
        "22004",
        "settings",
        "",
    );
    expect_error(
        &mut client,
        "SELECT fair_configure(NULL, '{}')",
        "22004",
        "queue",
        "",
    );
    for call in [
        "fair_configure(' ', '{}')",
        "fair_queue(' ')",
        "fair_pause(' ')",
        "fair_resume('..')",
    ] {
        expect_error(&mut client, &format!("SELECT {call}"), "22023", "queue", "");
    }
}

#[test]
fn a_setting_written_by_plain_sql_is_checked_and_counts_alike() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    execute(
        &mut admin,
        r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{"paused": true}')"#,
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    expect_error(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{"pause": true}' WHERE queue = 'q'"#,
        "22023",
        "\"pause\"",
        "paused",
    );
    execute(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{}'"#,
    );
    claim_one(&mut client, "q");
    execute(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{"paused": true}'"#,
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(&mut admin, "DELETE FROM harvest_fair.queue");
    claim_one(&mut client, "q");
}

#[test]
fn truncating_the_settings_restores_every_default() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    for queue in ["q", "r"] {
        flood(&mut client, queue, "A", 3, "1 hour");
        execute(&mut admin, &format!("SELECT fair_pause('{queue}')"));
        assert!(claim(&mut client, queue, "w", 1).is_empty());
    }
    execute(&mut admin, "TRUNCATE harvest_fair.queue");
    claim_one(&mut client, "q");
    claim_one(&mut client, "r");
}

#[test]
fn a_setting_that_was_rolled_back_never_counted() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 5, "1 hour");
    let mut transaction = admin.transaction().unwrap();
    transaction.batch_execute("SELECT fair_pause('q')").unwrap();
    claim_one(&mut client, "q");
    transaction.rollback().unwrap();
    claim_one(&mut client, "q");
    assert_eq!(
        setting(&mut admin, "q", "paused"),
        owned("false", "default")
    );
    execute(
        &mut admin,
        "BEGIN; SAVEPOINT s; SELECT fair_pause('q'); ROLLBACK TO s; COMMIT",
    );
    claim_one(&mut client, "q");
}

#[test]
fn settings_outlive_a_restart_and_a_crash() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": 2, "lease": "90 s"}"#,
    );
    flood(&mut client, "q", "A", 5, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        cluster.restart(how);
        let mut client = db.connect();
        assert_eq!(
            setting(&mut client, "q", "key_max_running"),
            owned("2", "set")
        );
        // One is running from before.
        let more = claim(&mut client, "q", "w", 5);
        assert_eq!(more.len(), 1, "{how:?}");
        let lease: f64 = one(
            &mut client,
            "SELECT extract(epoch FROM lease_until - started_at)::float8 FROM harvest_fair.task WHERE id = $1",
            &[&more[0].id],
        );
        assert!((lease - 90.0).abs() < 0.001, "a lease of {lease} s");
        assert!(complete(&mut client, &more[0]));
    }
}

#[test]
fn a_queue_s_lease_is_that_of_its_claims_and_of_no_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '70s'");
    configure(&mut client, "q", r#"{"lease": "7 s"}"#);
    for (queue, expected) in [("q", 7.0), ("other", 70.0)] {
        flood(&mut client, queue, "A", 3, "1 hour");
        let id = claim_one(&mut client, queue).id;
        let by_id: i64 = one(
            &mut client,
            "SELECT id FROM harvest_fair.task WHERE queue = $1 AND state = 'pending' LIMIT 1",
            &[&queue],
        );
        assert_eq!(claim_by_id(&mut client, by_id, "w").len(), 1);
        for id in [id, by_id] {
            let lease: f64 = one(
                &mut client,
                "SELECT extract(epoch FROM lease_until - started_at)::float8 FROM harvest_fair.task WHERE id = $1",
                &[&id],
            );
            assert!(
                (lease - expected).abs() < 0.001,
                "{queue}: a lease of {lease} s"
            );
        }
    }
}

#[test]
fn a_queue_s_retention_overrides_the_server_s() {
    let db = brisk().database();
    let mut client = db.connect();
    configure(&mut client, "short", r#"{"retention": "1 s"}"#);
    // Infinite intervals came with Postgres 17.
    let infinite = one(
        &mut client,
        "SELECT current_setting('server_version_num')::integer >= 170000",
        &[],
    );
    let for_ever = if infinite { "infinity" } else { "1000 years" };
    configure(
        &mut client,
        "for ever",
        &format!(r#"{{"retention": "{for_ever}"}}"#),
    );
    for queue in ["short", "long", "for ever"] {
        flood(&mut client, queue, "A", 2, "1 hour");
        let task = claim_one(&mut client, queue);
        assert!(complete(&mut client, &task));
    }
    wait_until(
        "the finished task of the one queue is gone",
        PATIENCE,
        || {
            one(
                &mut client,
                "SELECT count(*) = 1 FROM harvest_fair.task WHERE queue = 'short'",
                &[],
            )
        },
    );
    let kept: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.task WHERE queue IN ('long', 'for ever')",
        &[],
    );
    assert_eq!(kept, 4);
    assert_eq!(pending(&mut client, "short"), 1);
}

#[test]
fn writers_of_different_settings_at_the_same_time_lose_none() {
    let db = Cluster::shared().database();
    thread::scope(|scope| {
        for (field, last) in [("rate_limit", 40), ("key_max_running", 40), ("lease", 40)] {
            let db = &db;
            scope.spawn(move || {
                let mut client = db.connect();
                for value in 1..=last {
                    configure(&mut client, "q", &format!(r#"{{"{field}": {value}}}"#));
                }
            });
        }
    });
    let mut client = db.connect();
    for (field, value) in [
        ("rate_limit", "40.0"),
        ("key_max_running", "40"),
        ("lease", "40.0"),
    ] {
        assert_eq!(setting(&mut client, "q", field), owned(value, "set"));
    }
}

#[test]
fn a_paused_queue_hands_out_nothing_and_says_so_until_it_is_resumed() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "other", "A", 10, "1 hour");
    let before = claim_one(&mut client, "q");
    assert!(one::<bool>(
        &mut admin,
        "SELECT fair_pause('q', 'database upgrade')",
        &[]
    ));
    assert!(
        !one::<bool>(&mut admin, "SELECT fair_pause('q')", &[]),
        "paused twice"
    );
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(waiting_for(&mut client, "q", "A"), "paused");
    let eligible: bool = one(
        &mut client,
        "SELECT bool_or(eligible) FROM fair_state('q')",
        &[],
    );
    assert!(!eligible);
    let waiting: i64 = one(
        &mut client,
        "SELECT id FROM harvest_fair.task WHERE queue = 'q' AND state = 'pending' LIMIT 1",
        &[],
    );
    assert!(claim_by_id(&mut client, waiting, "w").is_empty());
    // Others go on, and so does what runs already, and enqueueing.
    claim_one(&mut client, "other");
    assert!(complete(&mut client, &before));
    enqueue(&mut client, "q", Some("B"));
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert!(one::<bool>(&mut admin, "SELECT fair_resume('q')", &[]));
    assert!(
        !one::<bool>(&mut admin, "SELECT fair_resume('q')", &[]),
        "resumed twice"
    );
    assert_eq!(waiting_for(&mut client, "q", "A"), "-");
    assert_eq!(claim(&mut client, "q", "w", 20).len(), 10);
}

#[test]
fn each_key_s_reason_to_wait_is_shown() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    flood(&mut client, "q", "future", 1, "-1 hour");
    assert_eq!(waiting_for(&mut client, "q", "A"), "-");
    claim_one(&mut client, "q");
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
    assert_eq!(waiting_for(&mut client, "q", "future"), "future");
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": null, "key_rate_limit": 0.001}"#,
    );
    flood(&mut client, "q", "B", 3, "1 hour");
    // A's bucket is new with the limit: full for one claim.
    claim(&mut client, "q", "w", 5);
    for key in ["A", "B"] {
        assert_eq!(waiting_for(&mut client, "q", key), "rate", "{key}");
    }
    execute(&mut client, "SELECT fair_pause('q')");
    assert_eq!(waiting_for(&mut client, "q", "B"), "paused");
}

#[test]
fn a_worker_that_waits_on_a_paused_queue_wakes_when_it_is_resumed() {
    let db = Cluster::shared().database();
    let mut admin = db.connect();
    flood(&mut admin, "q", "A", 1, "1 hour");
    execute(&mut admin, "SELECT fair_pause('q')");
    thread::scope(|scope| {
        let worker = scope.spawn(|| claim_waiting(&mut db.connect(), "q", "w", 1, "60 s"));
        wait_until("the worker waits", PATIENCE, || {
            stat(&mut admin, "q", "waiting") == 1
        });
        let resumed = std::time::Instant::now();
        execute(&mut admin, "SELECT fair_resume('q')");
        assert_eq!(worker.join().unwrap().len(), 1);
        assert!(
            resumed.elapsed() < Duration::from_secs(5),
            "{:?}",
            resumed.elapsed()
        );
    });
}

#[test]
fn a_change_of_settings_cannot_be_prepared() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, "BEGIN; SELECT fair_pause('q')");
    expect_error(
        &mut client,
        "PREPARE TRANSACTION 'policy'",
        "0A000",
        "prepare",
        "",
    );
    execute(&mut client, "ROLLBACK");
    assert_eq!(
        setting(&mut client, "q", "paused"),
        owned("false", "default")
    );
}
