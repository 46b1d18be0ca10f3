//! Every mistake of a user has its own SQLSTATE, names the value, hints at the mend, and stores nothing.

use harvest_fair_server_tests::{Cluster, claim_one, enqueue, expect_error, expect_refusal, one};
use postgres::Client;

use crate::support::{execute, states};

const BAD_VALUE: &str = "22023";

/// Each of these must be refused with 22023, name the value and give a hint.
#[track_caller]
fn refuse_all(client: &mut Client, statements: &[(&str, String)]) {
    for (value, sql) in statements {
        let refusal = expect_error(client, sql, BAD_VALUE, value, "");
        assert!(!refusal.hint.is_empty(), "no hint: {sql}: {refusal:?}");
    }
    nothing_is_stored(client);
}

#[track_caller]
fn nothing_is_stored(client: &mut Client) {
    let stored: i64 = one(
        client,
        "SELECT (SELECT count(*) FROM harvest_fair.task) + (SELECT count(*) FROM harvest_fair.weight)
              + (SELECT count(*) FROM harvest_fair.queue) + (SELECT count(*) FROM harvest_fair.key_state)",
        &[],
    );
    assert_eq!(stored, 0);
}

/// An SQL literal with what the log could not show written as escapes.
fn literal(value: &str) -> String {
    let escaped: String = value
        .chars()
        .map(|c| match c {
            '\'' => "''".to_owned(),
            '\\' => "\\\\".to_owned(),
            c if c.is_control() => format!("\\x{:02x}", c as u32),
            c => c.to_string(),
        })
        .collect();
    format!("E'{escaped}'")
}

/// A bad name and the part of it that the message must show.
fn bad_names() -> Vec<(String, &'static str)> {
    [
        (" ", " "),
        (" outer", " outer"),
        ("outer ", "outer "),
        ("\u{2003}em space", "em space"),
        ("outer\u{a0}", "outer"),
        (".", "."),
        ("..", ".."),
    ]
    .map(|(name, shown)| (name.to_owned(), shown))
    .to_vec()
}

#[test]
fn bad_queue_names_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut names = bad_names();
    names.push((String::new(), ""));
    names.push(("q".repeat(256), "qqqq"));
    names.push(("é".repeat(128), "éé"));
    let mut statements = Vec::new();
    for (name, shown) in &names {
        let name = literal(name);
        for sql in [
            format!("SELECT fair_enqueue({name})"),
            format!("INSERT INTO harvest_fair.task (queue) VALUES ({name})"),
            format!("SELECT fair_claim({name}::text, 'w', 1)"),
            format!("SELECT fair_claim(ARRAY['good', {name}], 'w', 1)"),
            format!("SELECT fair_set_weight({name}, 'k', 2)"),
            format!("SELECT fair_charge({name}, 'k')"),
        ] {
            statements.push((*shown, sql));
        }
    }
    refuse_all(&mut client, &statements);
    assert!(states(&mut client, "good").is_empty());
}

#[test]
fn bad_keys_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut keys = bad_names();
    keys.push(("k".repeat(257), "kkkk"));
    keys.push(("line\nbreak".to_owned(), "line"));
    keys.push(("tab\tstop".to_owned(), "tab"));
    keys.push(("bell\u{7}".to_owned(), "bell"));
    keys.push(("del\u{7f}".to_owned(), "del"));
    let mut statements = Vec::new();
    for (key, shown) in &keys {
        let key = literal(key);
        for sql in [
            format!("SELECT fair_enqueue('q', fairness_key => {key})"),
            format!("INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', {key})"),
            format!("SELECT fair_set_weight('q', {key}, 2)"),
            format!("SELECT fair_charge('q', {key})"),
        ] {
            statements.push((*shown, sql));
        }
    }
    refuse_all(&mut client, &statements);
    assert!(states(&mut client, "q").is_empty());
}

#[test]
fn an_empty_key_is_a_mistake_in_a_function_and_the_default_key_in_the_table() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    refuse_all(
        &mut client,
        &[(
            "",
            "SELECT fair_enqueue('q', fairness_key => '')".to_owned(),
        )],
    );
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', '')",
    );
    assert_eq!(claim_one(&mut client, "q").key, "");
}

#[test]
fn bad_weights_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut statements = Vec::new();
    for weight in [
        "0",
        "-1",
        "0.0009",
        "1000.5",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e300",
    ] {
        for sql in [
            format!("SELECT fair_enqueue('q', fairness_key => 'k', weight => '{weight}')"),
            format!("INSERT INTO harvest_fair.task (queue, weight) VALUES ('q', '{weight}')"),
            format!("SELECT fair_set_weight('q', 'k', '{weight}')"),
            format!(
                "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'k', '{weight}')"
            ),
        ] {
            statements.push((weight.trim_end_matches("e300"), sql));
        }
    }
    for (shown, _) in &mut statements {
        if shown.ends_with("Infinity") {
            *shown = "inf";
        }
    }
    for (shown, sql) in &statements {
        let refusal = expect_error(&mut client, sql, BAD_VALUE, "", "");
        let message = refusal.message.to_lowercase();
        assert!(
            message.contains(&shown.to_lowercase()),
            "{sql}: no {shown:?} in {refusal:?}"
        );
        assert!(!refusal.hint.is_empty(), "no hint: {sql}: {refusal:?}");
    }
    nothing_is_stored(&mut client);
}

#[test]
fn the_default_key_takes_no_weight() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["''", "NULL"] {
        let refusal = expect_refusal(
            &mut client,
            &format!("SELECT fair_set_weight('q', {key}, 2)"),
        );
        assert!(
            [BAD_VALUE, "22004"].contains(&refusal.sqlstate.as_str()),
            "{key}: {refusal:?}"
        );
    }
    nothing_is_stored(&mut client);
}

#[test]
fn bad_priorities_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut statements = Vec::new();
    for priority in ["0", "6", "-3", "32767"] {
        for sql in [
            format!("SELECT fair_enqueue('q', priority => '{priority}'::smallint)"),
            format!("INSERT INTO harvest_fair.task (queue, priority) VALUES ('q', '{priority}')"),
            format!("SELECT fair_charge('q', 'k', 1, '{priority}'::smallint)"),
        ] {
            statements.push((priority, sql));
        }
    }
    refuse_all(&mut client, &statements);
}

#[test]
fn a_claim_of_no_task_or_of_more_than_a_batch_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut statements = Vec::new();
    for n in ["0", "-1", "1001", "2147483647"] {
        statements.push((n, format!("SELECT fair_claim('q', 'w', {n})")));
        statements.push((n, format!("SELECT fair_claim(ARRAY['q'], 'w', {n})")));
    }
    refuse_all(&mut client, &statements);
    execute(
        &mut client,
        "SET harvest_fair.max_batch = 5; SELECT fair_claim('q', 'w', 5)",
    );
    refuse_all(
        &mut client,
        &[("6", "SELECT fair_claim('q', 'w', 6)".to_owned())],
    );
}

#[test]
fn nulls_where_a_value_is_needed_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for sql in [
        "SELECT fair_enqueue(NULL)",
        "INSERT INTO harvest_fair.task (queue) VALUES (NULL)",
        "SELECT fair_claim(NULL::text, 'w', 1)",
        "SELECT fair_claim('q', NULL, 1)",
        "SELECT fair_claim('q', 'w', NULL)",
        "SELECT fair_claim(NULL::text[], 'w', 1)",
        "SELECT fair_claim(ARRAY['q', NULL], 'w', 1)",
        "SELECT fair_set_weight('q', 'k', NULL)",
        "SELECT fair_set_weight(NULL, 'k', 2)",
        "SELECT fair_charge(NULL, 'k')",
    ] {
        let refusal = expect_refusal(&mut client, sql);
        assert!(
            [BAD_VALUE, "22004", "23502"].contains(&refusal.sqlstate.as_str()),
            "{sql}: {refusal:?}"
        );
    }
    nothing_is_stored(&mut client);
}

#[test]
fn bad_waits_and_leases_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    refuse_all(
        &mut client,
        &[("-", "SELECT fair_claim('q', 'w', 1, '-1 s')".to_owned())],
    );
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    for lease_for in ["-1 s", "0"] {
        let sql = format!(
            "SELECT fair_extend({}, {}, '{lease_for}')",
            task.id, task.lease
        );
        let refusal = expect_error(&mut client, &sql, BAD_VALUE, "", "");
        assert!(!refusal.hint.is_empty(), "{refusal:?}");
    }
    let sql = format!("SELECT fair_fail({}, {}, 'x', '-1 s')", task.id, task.lease);
    expect_error(&mut client, &sql, BAD_VALUE, "", "");
    assert!(
        harvest_fair_server_tests::complete(&mut client, &task),
        "the lease is gone"
    );
}

#[test]
fn bad_costs_are_refused_and_the_task_runs_on() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", Some("A"));
    let task = claim_one(&mut client, "q");
    for cost in ["-1", "NaN", "Infinity", "1e10"] {
        let sql = format!(
            "SELECT fair_complete({}, {}, '{cost}')",
            task.id, task.lease
        );
        let refusal = expect_error(&mut client, &sql, BAD_VALUE, "", "");
        assert!(!refusal.hint.is_empty(), "{refusal:?}");
    }
    for cost in ["-1", "0", "NaN", "Infinity"] {
        expect_error(
            &mut client,
            &format!("SELECT fair_charge('q', 'A', '{cost}')"),
            BAD_VALUE,
            "",
            "",
        );
    }
    assert_eq!(crate::support::state(&mut client, "q", "A").pass, 1.0);
    assert!(harvest_fair_server_tests::complete(&mut client, &task));
}

#[test]
fn bad_attempts_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut statements = Vec::new();
    for n in ["0", "-1"] {
        statements.push((n, format!("SELECT fair_enqueue('q', max_attempts => {n})")));
        statements.push((
            n,
            format!("INSERT INTO harvest_fair.task (queue, max_attempts) VALUES ('q', {n})"),
        ));
    }
    refuse_all(&mut client, &statements);
}

#[test]
fn arrays_of_different_length_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", None);
    let task = claim_one(&mut client, "q");
    for function in ["fair_complete", "fair_release"] {
        let sql = format!(
            "SELECT {function}(ARRAY[{}, 7], ARRAY[{}::bigint])",
            task.id, task.lease
        );
        let refusal = expect_refusal(&mut client, &sql);
        assert!(
            ["2202E", BAD_VALUE].contains(&refusal.sqlstate.as_str()),
            "{refusal:?}"
        );
    }
    assert!(harvest_fair_server_tests::complete(&mut client, &task));
}

#[test]
fn a_parent_that_no_task_is_is_refused_later_on_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let parent = enqueue(&mut client, "q", Some("a"));
    let child = enqueue(&mut client, "q", Some("b"));
    let set = |parent: i64| {
        format!("UPDATE harvest_fair.task SET parent_id = {parent} WHERE id = {child}")
    };
    let no_such = "parent task 999999999 does not exist";
    expect_error(&mut client, &set(999_999_999), "23503", no_such, "");
    execute(&mut client, &set(parent));
    execute(
        &mut client,
        &format!("DELETE FROM harvest_fair.task WHERE id = {parent}"),
    );
    // As it was: the parent may be gone by now.
    execute(&mut client, &set(parent));
    assert_eq!(claim_one(&mut client, "q").id, child);
}

#[test]
fn one_bad_row_of_many_stores_none() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_error(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', 'good'), ('q', ' bad'), ('q', 'good')",
        BAD_VALUE,
        " bad",
        "",
    );
    nothing_is_stored(&mut client);
    assert!(harvest_fair_server_tests::claim(&mut client, "q", "w", 5).is_empty());
}

#[test]
fn an_unknown_bundle_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_error(
        &mut client,
        "SELECT fair_grant('postgres', 'emperor')",
        BAD_VALUE,
        "emperor",
        "producer",
    );
}

#[test]
fn a_made_up_setting_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let refusal = expect_refusal(&mut client, "SET harvest_fair.no_such_setting = 1");
    assert_eq!(refusal.sqlstate, "42602", "{refusal:?}");
    assert!(refusal.message.contains("harvest_fair.no_such_setting"));
}
