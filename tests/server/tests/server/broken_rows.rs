//! Rows that break the rules, as sessions with triggers off write them, and rows that a user's trigger does not let go: they
//! hold up nobody else, and end like others.

use harvest_fair_server_tests::{
    Cluster, PATIENCE, claim, claim_one, complete, expect_error, flood, one, running, wait_until,
};
use postgres::Client;

use crate::support::{brisk_options, differences, execute, stat, task_field, unattended};

/// Inserts tasks without the row trigger.
fn insert_unchecked(client: &mut Client, rows: &str) {
    execute(
        client,
        &format!(
            "SET session_replication_role = replica;
             INSERT INTO harvest_fair.task (id, queue, fairness_key, priority, weight, state, lease_until) VALUES {rows};
             RESET session_replication_role"
        ),
    );
}

#[test]
fn a_row_that_breaks_the_rules_is_taken_back_settled_cancelled_and_deleted_like_others() {
    let db = unattended().database();
    let mut client = db.connect();
    insert_unchecked(
        &mut client,
        "(1, 'q', 'bad ', 3, -1, 'pending', NULL), (2, 'q', 'bad ', 3, 'NaN', 'pending', NULL)",
    );
    let first = claim_one(&mut client, "q");
    assert_eq!((first.id, first.key.as_str()), (1, "bad "));
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET lease_until = now() - interval '1 s' WHERE id = 1",
    );
    let again = claim_one(&mut client, "q");
    assert_eq!((again.id, again.attempt), (1, 2), "the lease is taken back");
    let second = claim_one(&mut client, "q");
    assert_eq!(second.id, 2);
    let settle = |client: &mut Client, call: &str| {
        let yes: bool = one(client, &format!("SELECT {call} IS NOT NULL"), &[]);
        assert!(yes, "{call}");
    };
    settle(&mut client, "fair_extend(1, 2, '5 min')");
    settle(&mut client, "nullif(fair_release(1, 2), false)");
    settle(&mut client, "fair_fail(2, 1, 'it broke', '0 s')");
    settle(&mut client, "nullif(fair_cancel(1), false)");
    settle(&mut client, "nullif(fair_retry(1), false)");
    for task in claim(&mut client, "q", "w", 2) {
        assert!(complete(&mut client, &task), "{task:?}");
    }
    let completed = "SELECT count(*) FROM harvest_fair.task WHERE state = 'completed'";
    assert_eq!(one::<i64>(&mut client, completed, &[]), 2);
    for (change, message) in [
        ("fairness_key = 'worse '", "fairness key \"worse \""),
        ("weight = -2", "weight -2 is out of range"),
        ("queue = ' q'", "queue name \" q\""),
        ("priority = 9", "priority 9"),
        ("max_attempts = 0", "max_attempts"),
        ("attempt = 2147483647", "attempt 2147483647 is out of range"),
        (
            "lease = 9223372036854775807",
            "lease 9223372036854775807 is out of range",
        ),
    ] {
        let sql = format!("UPDATE harvest_fair.task SET {change}");
        expect_error(&mut client, &sql, "22023", message, "");
    }
    execute(&mut client, "DELETE FROM harvest_fair.task");
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn counts_at_the_end_of_their_types_stop_no_claim() {
    let db = unattended().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SET session_replication_role = replica;
         INSERT INTO harvest_fair.task (id, queue, fairness_key, priority, attempt, lease)
             VALUES (1, 'q', 'a', 3, 2147483647, 9223372036854775807), (2, 'q', 'a', 3, 0, 0);
         RESET session_replication_role",
    );
    assert_eq!(differences(&mut client).len(), 1, "the row is named");
    let tasks = claim(&mut client, "q", "w", 2);
    assert_eq!(tasks.iter().map(|task| task.id).collect::<Vec<_>>(), [1, 2]);
    for task in tasks {
        assert!(complete(&mut client, &task), "{task:?}");
    }
}

#[test]
fn a_task_that_a_trigger_does_not_let_go_holds_up_no_other_and_is_said_once() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 3, "1 hour");
    flood(&mut client, "r", "a", 1, "1 hour");
    let tasks = claim(&mut client, "q", "w", 3);
    claim_one(&mut client, "r");
    let id = tasks[0].id;
    let log_line = format!("WARNING:  task {id} of queue \"q\" cannot be taken back: not this one");
    execute(
        &mut client,
        &format!(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
             CREATE TRIGGER refuse BEFORE UPDATE ON harvest_fair.task FOR EACH ROW
                 WHEN (OLD.id = {id} AND NEW.state = 'pending') EXECUTE FUNCTION refuse();
             UPDATE harvest_fair.task SET lease_until = now() WHERE state = 'running'"
        ),
    );
    wait_until("the other tasks are taken back", PATIENCE, || {
        running(&mut client, "q") == 1 && running(&mut client, "r") == 0
    });
    let expired = "SELECT count(*) FROM fair_claim('q', 'w', 5)";
    assert_eq!(one::<i64>(&mut client, expired, &[]), 2, "claims go on");
    let said = || cluster.log().matches(&log_line).count();
    wait_until("the log says which task stays", PATIENCE, || said() > 0);
    // Tried in vain a second time at the latest when the third is due.
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET lease_until = now() + interval '12 s' WHERE worker = 'w' AND lease = 2",
    );
    wait_until("the others are taken back once more", PATIENCE, || {
        running(&mut client, "q") == 1
    });
    assert_eq!(said(), 1);
    execute(&mut client, "DROP TRIGGER refuse ON harvest_fair.task");
    wait_until("it is taken back", PATIENCE, || {
        running(&mut client, "q") == 0
    });
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn a_queue_for_which_a_duty_fails_holds_up_no_other() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON harvest_fair.key_state FOR EACH ROW
             WHEN (NEW.queue = 'q') EXECUTE FUNCTION refuse()",
    );
    for queue in ["q", "r", "s"] {
        flood(&mut client, queue, "a", 3, "1 hour");
        claim_one(&mut client, queue);
    }
    wait_until("the passes of the others are saved", PATIENCE, || {
        one::<i64>(
            &mut client,
            "SELECT count(*) FROM harvest_fair.key_state",
            &[],
        ) == 2
    });
    wait_until("the log says of which they are not", PATIENCE, || {
        cluster
            .log()
            .contains("the janitor cannot save passes of queue \"q\": not now")
    });
}

#[test]
fn check_names_the_rows_that_break_the_rules() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with("SELECT FROM fair_state('q')");
    let long = "k".repeat(300);
    insert_unchecked(
        &mut client,
        &format!(
            "(1, 'q', 'bad ', 3, NULL, 'pending', NULL), (2, 'q', '{long}', 3, NULL, 'pending', NULL),
             (3, 'q', 'a', 9, NULL, 'pending', NULL), (4, 'q', 'b', 3, -1, 'pending', NULL),
             (5, ' q', 'a', 3, NULL, 'pending', NULL),
             (6, 'q', 'gone ', 3, NULL, 'running', now() + interval '1 hour')"
        ),
    );
    wait_until("the sweep has found what can be claimed", PATIENCE, || {
        stat(&mut client, "q", "keys") >= 2
    });
    let found: Vec<String> = differences(&mut client)
        .into_iter()
        .filter(|line| line.contains("|rule|"))
        .map(|line| line.replace(&long, "long").replace(&long[..100], "long"))
        .collect();
    assert_eq!(
        found,
        [
            " q|3|a|rule|-|task 5: queue name \" q\" begins or ends with whitespace",
            "q|3|b|rule|-|task 4: weight -1 is out of range",
            "q|3|bad |rule|-|task 1: fairness key \"bad \" begins or ends with whitespace",
            "q|3|gone |rule|-|task 6: fairness key \"gone \" begins or ends with whitespace",
            "q|3|long|rule|-|task 2: fairness key is too long: 300 bytes: \"long...\"",
            "q|9|a|rule|-|task 3: priority 9 is out of range",
        ]
    );
    let words = "tasks of queue \"q\" cannot be claimed: fairness key is too long: 300 bytes";
    wait_until("the log says what cannot be claimed", PATIENCE, || {
        cluster.log().contains(words)
    });
    assert!(!cluster.log().contains("no room on the board"));
    let too_long = "fairness key is too long";
    expect_error(
        &mut client,
        "SELECT fair_claim_by_id(2, 'w')",
        "22023",
        too_long,
        "256",
    );
    assert_eq!(
        task_field(&mut client, 2, "state").as_deref(),
        Some("pending")
    );
    // Put right, they are like others.
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET queue = 'q', fairness_key = 'good', priority = 3, weight = NULL",
    );
    assert_eq!(claim(&mut client, "q", "w", 9).len(), 5);
    wait_until("board and table agree", PATIENCE, || {
        differences(&mut client).is_empty()
    });
}
