//! How tasks come in: functions, INSERT, COPY, and what they inherit.

use std::io::Write;

use harvest_fair_server_tests::{
    Cluster, claim, claim_one, enqueue, expect_error, flood, keys_of, one, pending,
};

use crate::support::{drain, execute, states, task_field};

#[test]
fn an_enqueued_task_arrives_with_everything_that_was_said_about_it() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let parent = enqueue(&mut client, "other", None);
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('mail', '{\"to\": \"a@b\"}', 'acme', 2::smallint, 1.5,
             now() - interval '1 s', $1, 'quota', NULL, NULL, true, 7)",
        &[&parent],
    );
    let told = "concat_ws(' ', quota_key, new_start, max_attempts, state, worker)";
    assert_eq!(
        task_field(&mut client, id, told).unwrap(),
        "quota t 7 pending"
    );
    let task = claim_one(&mut client, "mail");
    assert_eq!(task.id, id);
    assert_eq!(
        (task.queue.as_str(), task.key.as_str(), task.priority),
        ("mail", "acme", 2)
    );
    assert_eq!(task.payload["to"], "a@b");
    assert_eq!(
        (task.weight, task.attempt, task.parent_id),
        (1.5, 1, Some(parent))
    );
    assert_eq!(
        task_field(&mut client, id, told).unwrap(),
        "quota t 7 running w"
    );
}

#[test]
fn a_task_of_which_nothing_is_said_gets_the_defaults() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let by_function: i64 = one(&mut client, "SELECT fair_enqueue('q')", &[]);
    let by_insert: i64 = one(
        &mut client,
        "INSERT INTO harvest_fair.task (queue) VALUES ('q') RETURNING id",
        &[],
    );
    for id in [by_function, by_insert] {
        assert_eq!(
            task_field(
                &mut client,
                id,
                "concat_ws('|', fairness_key, priority, coalesce(weight::text, 'none'), payload, state, attempt, max_attempts, new_start)"
            )
            .unwrap(),
            "|3|none|{}|pending|0|5|f"
        );
    }
    let tasks = claim(&mut client, "q", "w", 5);
    assert_eq!(keys_of(&tasks), ["", ""]);
    assert!(tasks.iter().all(|task| task.weight == 1.0));
}

#[test]
fn the_short_form_of_a_claim_needs_no_casts() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, "SELECT fair_enqueue('queue', '{\"n\": 1}')");
    let rows: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair_claim('queue', 'worker-1', 10)",
        &[],
    );
    assert_eq!(rows, 1);
}

#[test]
fn plain_insert_and_copy_enqueue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', 'inserted'), ('q', NULL), ('q', '')",
    );
    let mut copy = client
        .copy_in("COPY harvest_fair.task (queue, fairness_key) FROM STDIN")
        .unwrap();
    copy.write_all(b"q\tcopied\nq\t\\N\nq\t\n").unwrap();
    copy.finish().unwrap();
    let tasks = drain(&mut client, "q", 4);
    let mut keys = keys_of(&tasks);
    keys.sort_unstable();
    assert_eq!(keys, ["", "", "", "", "copied", "inserted"]);
}

#[test]
fn each_field_is_inherited_from_the_parent_on_its_own() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let parent: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'acme', priority => 2::smallint, weight => 2.5)",
        &[],
    );
    let fields = "concat_ws('|', fairness_key, priority, weight)";
    for (given, expected) in [
        ("", "acme|2|2.5"),
        (", fairness_key => 'own'", "own|2|2.5"),
        (", priority => 5::smallint", "acme|5|2.5"),
        (", weight => 7", "acme|2|7"),
        (", quota_key => 'quota'", "acme|2|2.5"),
    ] {
        let child: i64 = one(
            &mut client,
            &format!("SELECT fair_enqueue('q', parent_id => $1{given})"),
            &[&parent],
        );
        assert_eq!(
            task_field(&mut client, child, fields).unwrap(),
            expected,
            "{given}"
        );
    }
    let grandchild: i64 = one(
        &mut client,
        "WITH child AS (SELECT fair_enqueue('q', parent_id => $1) AS id)
         INSERT INTO harvest_fair.task (queue, parent_id) SELECT 'q', $1 FROM child RETURNING id",
        &[&parent],
    );
    assert_eq!(
        task_field(&mut client, grandchild, fields).unwrap(),
        "acme|2|2.5"
    );
}

#[test]
fn a_parent_without_a_key_makes_children_without_a_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let parent = enqueue(&mut client, "q", None);
    let child: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', parent_id => $1, priority => NULL)",
        &[&parent],
    );
    assert_eq!(task_field(&mut client, child, "fairness_key").unwrap(), "");
}

#[test]
fn a_quota_key_stands_in_for_a_missing_key_when_it_is_a_valid_one() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let long = "x".repeat(257);
    for (quota_key, expected) in [
        ("tenant", "tenant"),
        (" outer", ""),
        ("..", ""),
        ("", ""),
        ("a\tb", ""),
        (&long, ""),
    ] {
        let id: i64 = one(
            &mut client,
            "SELECT fair_enqueue('q', quota_key => $1)",
            &[&quota_key],
        );
        assert_eq!(
            task_field(&mut client, id, "fairness_key").unwrap(),
            expected,
            "{quota_key:?}"
        );
        assert_eq!(task_field(&mut client, id, "quota_key").unwrap(), quota_key);
    }
}

#[test]
fn an_unknown_parent_is_an_error_that_names_it() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_error(
        &mut client,
        "SELECT fair_enqueue('q', parent_id => 4711)",
        "23503",
        "4711",
        "",
    );
    expect_error(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, parent_id) VALUES ('q', 4711)",
        "23503",
        "4711",
        "",
    );
    assert_eq!(pending(&mut client, "q"), 0);
}

#[test]
fn a_rolled_back_enqueue_leaves_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut transaction = client.transaction().unwrap();
    enqueue(&mut transaction, "q", Some("gone"));
    transaction.rollback().unwrap();
    let mut transaction = client.transaction().unwrap();
    {
        let mut savepoint = transaction.savepoint("s").unwrap();
        enqueue(&mut savepoint, "q", Some("gone too"));
        savepoint.rollback().unwrap();
    }
    enqueue(&mut transaction, "q", Some("kept"));
    transaction.commit().unwrap();
    assert_eq!(keys_of(&drain(&mut client, "q", 1)), ["kept"]);
    assert!(
        states(&mut client, "q")
            .iter()
            .all(|state| state.key == "kept")
    );
}

#[test]
fn a_task_is_claimable_in_its_own_transaction_and_then_by_others_after_a_rollback_of_the_claim() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut transaction = client.transaction().unwrap();
    enqueue(&mut transaction, "q", Some("A"));
    // Whether the claim already sees the row is open; that it is not lost is not.
    let early = {
        let mut savepoint = transaction.savepoint("s").unwrap();
        let early = claim(&mut savepoint, "q", "w", 1).len();
        savepoint.rollback().unwrap();
        early
    };
    assert!(early <= 1);
    transaction.commit().unwrap();
    assert_eq!(drain(&mut client, "q", 1).len(), 1);
}

#[test]
fn an_enqueue_that_commits_late_is_served_although_later_rows_went_first() {
    let db = Cluster::shared().database();
    let (mut slow, mut fast) = (db.connect(), db.connect());
    let mut transaction = slow.transaction().unwrap();
    let first = enqueue(&mut transaction, "q", Some("A"));
    for _ in 0..4 {
        enqueue(&mut fast, "q", Some("A"));
    }
    let tasks = drain(&mut fast, "q", 1);
    assert_eq!(tasks.len(), 4);
    assert!(tasks.iter().all(|task| task.id > first));
    transaction.commit().unwrap();
    assert_eq!(claim_one(&mut fast, "q").id, first);
}

#[test]
fn an_older_row_that_commits_while_its_key_has_a_backlog_goes_first() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "1 hour");
    drain_some(&mut client);
    let older: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() - interval '2 hours')",
        &[],
    );
    assert_eq!(claim_one(&mut client, "q").id, older);
    assert_eq!(drain(&mut client, "q", 3).len(), 10);
}

fn drain_some(client: &mut postgres::Client) {
    assert_eq!(claim(client, "q", "w", 10).len(), 10);
}

#[test]
fn names_of_the_longest_legal_length_and_of_any_script_are_taken_as_they_are() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let queues = [
        "q".repeat(255),
        "Очередь № 1".to_owned(),
        "a 'quoted\" \\ name; --".to_owned(),
        "...".to_owned(),
    ];
    let keys = [
        "k".repeat(256),
        "客户".to_owned(),
        "x' OR '1'='1".to_owned(),
        "a/b/c".to_owned(),
    ];
    for queue in &queues {
        for key in &keys {
            enqueue(&mut client, queue, Some(key));
        }
        let tasks = drain(&mut client, queue, 3);
        assert_eq!(
            keys_of(&tasks),
            keys.iter().map(String::as_str).collect::<Vec<_>>()
        );
        assert!(tasks.iter().all(|task| task.queue == *queue));
    }
}

#[test]
fn a_payload_comes_back_as_it_went_in() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let payload = serde_json::json!({
        "text": "'; DROP TABLE harvest_fair.task; --", "nested": {"deep": [1, 2.5, null, true]}, "big": "x".repeat(100_000)
    });
    let _: i64 = one(&mut client, "SELECT fair_enqueue('q', $1)", &[&payload]);
    let task = claim_one(&mut client, "q");
    assert_eq!(task.payload, payload);
    assert!(harvest_fair_server_tests::complete(&mut client, &task));
    let stored: serde_json::Value = one(&mut client, "SELECT payload FROM harvest_fair.task", &[]);
    assert_eq!(stored, payload);
}
