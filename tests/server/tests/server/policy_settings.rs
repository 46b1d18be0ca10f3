//! The settings of a queue: what they take, and where they come from. When they count stands in `policy_in_force`.

use std::thread;

use harvest_fair_server_tests::{Cluster, expect_error, one};

use crate::policy_support::{SETTINGS, configure, owned, setting};
use crate::support::execute;

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
    assert_eq!(shown.len(), SETTINGS.len());
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
    for field in SETTINGS {
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
    for known in SETTINGS {
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
