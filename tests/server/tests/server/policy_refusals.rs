//! What is refused says which rule was broken, which object is amiss, and how to mend it.

use harvest_fair_server_tests::{Cluster, Database, claim, claim_one, enqueue, expect_error, one};
use postgres::Client;

use crate::policy_support::{preview, release};
use crate::support::execute;

#[test]
fn a_grant_without_a_role_or_bundle_hints_at_what_to_give() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (call, what, hint) in [
        (
            "fair_grant(NULL, 'worker')",
            "role",
            "fair_grant('app', 'worker')",
        ),
        (
            "fair_grant('postgres', NULL)",
            "bundle",
            "producer, worker and admin",
        ),
    ] {
        let message = format!("{what} must not be null");
        expect_error(
            &mut client,
            &format!("SELECT {call}"),
            "22004",
            &message,
            hint,
        );
    }
    expect_error(
        &mut client,
        "SELECT fair_grant('postgres', 'boss')",
        "22023",
        "'boss'",
        "producer, worker and admin",
    );
}

#[test]
fn a_wrong_worker_name_says_which_rule_it_breaks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    let long = "w".repeat(256);
    for (name, message, hint) in [
        ("", "worker name must not be blank: \"\"", "1 to 255 bytes"),
        (
            "  ",
            "worker name must not be blank: \"  \"",
            "1 to 255 bytes",
        ),
        (
            long.as_str(),
            "worker name is too long: 256 bytes: \"www",
            "at most 255 bytes",
        ),
        (
            "a\nb",
            "worker name \"a\\nb\" contains a control character",
            "printable",
        ),
        (
            " a",
            "worker name \" a\" begins or ends with whitespace",
            "Trim",
        ),
        ("a\u{a0}", "begins or ends with whitespace", "Trim"),
    ] {
        for call in [
            format!("SELECT fair_claim('q', '{name}')"),
            format!("SELECT fair_claim(ARRAY['q'], '{name}')"),
            format!("SELECT fair_claim_by_id({id}, '{name}')"),
            format!("SELECT fair_preview('q', '{name}', 1)"),
            format!("SELECT fair_enqueue('q', sticky_worker => '{name}')"),
            format!("INSERT INTO harvest_fair.task (queue, sticky_worker) VALUES ('q', '{name}')"),
            format!("UPDATE harvest_fair.task SET sticky_worker = '{name}'"),
        ] {
            expect_error(&mut client, &call, "22023", message, hint);
        }
    }
    for name in [".", "host 7: worker/3", "Größe", &"w".repeat(255)] {
        assert_eq!(preview(&mut client, "q", name, 1, "").len(), 1, "{name}");
    }
}

/// Every call that reads the task table must say what is amiss.
#[track_caller]
fn all_say(client: &mut Client, message: &str, hint: &str) {
    for call in [
        "SELECT fair_claim('q', 'w')",
        "SELECT fair_claim('q', 'w', 1, '1 s')",
        "SELECT fair_claim(ARRAY['q', 'r'], 'w')",
        "SELECT fair_claim_by_id(1, 'w')",
        "SELECT fair_preview('q', 'w', 1)",
        "SELECT fair_enqueue('q')",
        "INSERT INTO harvest_fair.task (queue) VALUES ('q')",
        "SELECT fair_complete(1::bigint, 1::bigint)",
        "SELECT fair_release(1::bigint, 1::bigint)",
        "SELECT fair_fail(1, 1, 'x')",
        "SELECT fair_extend(1, 1)",
        "SELECT fair_cancel(1)",
        "SELECT fair_state('q')",
        "SELECT fair_set_weight('q', 'A', 2)",
    ] {
        expect_error(client, call, "55000", message, hint);
    }
}

/// A database with a running and a pending task; the running one can be released once all is well again.
fn two_tasks<'c>() -> (Database<'c>, Client) {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for _ in 0..2 {
        enqueue(&mut client, "q", Some("A"));
    }
    (db, client)
}

#[test]
fn a_column_of_another_type_is_named_and_claims_go_on_once_it_is_changed_back() {
    let (_db, mut client) = two_tasks();
    let task = claim_one(&mut client, "q");
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task ALTER COLUMN payload DROP DEFAULT, ALTER COLUMN payload TYPE text",
    );
    let mend = "ALTER TABLE harvest_fair.task ALTER COLUMN payload TYPE jsonb USING payload::jsonb";
    let message = "column \"payload\" of harvest_fair.task has type text, not jsonb";
    all_say(&mut client, message, mend);
    execute(&mut client, mend);
    assert!(release(&mut client, &task));
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
    // More columns are nobody's business.
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task ADD COLUMN more text DEFAULT 'x'; SELECT fair_enqueue('q')",
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 1);
}

#[test]
fn a_renamed_column_is_named() {
    let (_db, mut client) = two_tasks();
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task RENAME COLUMN payload TO body",
    );
    let message = "column \"payload\" of harvest_fair.task is missing";
    all_say(&mut client, message, "name back");
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task RENAME COLUMN body TO payload",
    );
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
}

#[test]
fn a_dropped_index_is_named_and_claims_go_on_once_it_is_made_as_the_hint_says() {
    for index in ["task_lane", "task_pinned", "task_lease", "task_finished"] {
        let (_db, mut client) = two_tasks();
        let task = claim_one(&mut client, "q");
        let before: String = one(
            &mut client,
            "SELECT pg_get_indexdef(('harvest_fair.' || $1)::regclass)",
            &[&index],
        );
        execute(&mut client, &format!("DROP INDEX harvest_fair.{index}"));
        let message = format!("index harvest_fair.{index} is missing");
        let start = format!("CREATE INDEX {index} ON harvest_fair.task (queue, ");
        all_say(&mut client, &message, &start);
        let refusal = expect_error(
            &mut client,
            "SELECT fair_claim('q', 'w')",
            "55000",
            &message,
            &start,
        );
        execute(
            &mut client,
            refusal.hint.strip_prefix("Create it again: ").unwrap(),
        );
        let after: String = one(
            &mut client,
            "SELECT pg_get_indexdef(('harvest_fair.' || $1)::regclass)",
            &[&index],
        );
        assert_eq!(after, before);
        assert!(release(&mut client, &task));
        assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
    }
}

#[test]
fn a_dropped_primary_key_is_named() {
    let (_db, mut client) = two_tasks();
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task DROP CONSTRAINT task_pkey",
    );
    let mend = "ALTER TABLE harvest_fair.task ADD CONSTRAINT task_pkey PRIMARY KEY (id)";
    all_say(&mut client, "index harvest_fair.task_pkey is missing", mend);
    execute(&mut client, mend);
    assert_eq!(claim(&mut client, "q", "w", 5).len(), 2);
}

#[test]
fn a_renamed_state_is_named() {
    let (_db, mut client) = two_tasks();
    execute(
        &mut client,
        "ALTER TYPE harvest_fair.task_state RENAME VALUE 'running' TO 'busy'",
    );
    // Sessions of their own: an enum's labels are looked up once.
    let mut other = _db.connect();
    expect_error(
        &mut other,
        "SELECT fair_claim('q', 'w')",
        "55000",
        "\"running\"",
        "RENAME VALUE",
    );
    execute(
        &mut client,
        "ALTER TYPE harvest_fair.task_state RENAME VALUE 'busy' TO 'running'",
    );
    assert_eq!(claim(&mut other, "q", "w", 5).len(), 2);
}
