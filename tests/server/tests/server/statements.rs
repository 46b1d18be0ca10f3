//! Calls in statements, functions and transactions of every kind that commit.

use harvest_fair_server_tests::{
    Cluster, PATIENCE, claim, claim_one, complete, enqueue, expect_error, flood, one, pending,
    running, wait_until,
};

use crate::policy_support::release;
use crate::support::{brisk, drain, execute, stat, state};

#[test]
fn a_claim_whose_rows_are_not_all_read_still_claims_them_all() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    let read: i64 = one(
        &mut client,
        "SELECT count(*) FROM (SELECT id FROM fair_claim('q', 'w', 5) LIMIT 2) t",
        &[],
    );
    assert_eq!(read, 2);
    assert_eq!(running(&mut client, "q"), 5);
    assert_eq!(drain(&mut client, "q", 2).len(), 5);
}

#[test]
fn several_claims_in_one_statement_claim_different_tasks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    flood(&mut client, "q", "B", 5, "1 hour");
    let ids: i64 = one(
        &mut client,
        "SELECT count(DISTINCT c.id) FROM generate_series(1, 5) i, LATERAL fair_claim('q', 'w' || i, 2) c",
        &[],
    );
    assert_eq!(ids, 10);
    assert_eq!(running(&mut client, "q"), 10);
}

#[test]
fn a_task_can_be_claimed_and_settled_in_one_statement_and_in_one_transaction() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 6, "1 hour");
    let done: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair_claim('q', 'w', 3) c WHERE fair_complete(c.id, c.lease)",
        &[],
    );
    assert_eq!(done, 3);
    let mut transaction = client.transaction().unwrap();
    let mine = enqueue(&mut transaction, "q", Some("A"));
    let task = claim_one(&mut transaction, "q");
    assert!(complete(&mut transaction, &task));
    let given_back = claim_one(&mut transaction, "q");
    assert!(release(&mut transaction, &given_back));
    transaction.commit().unwrap();
    assert_eq!(state(&mut client, "q", "A").running, 0);
    let rest = drain(&mut client, "q", 2);
    assert_eq!(rest.len(), 3);
    assert!(rest.iter().any(|task| task.id == mine));
}

#[test]
fn a_claim_at_repeatable_read_or_serializable_is_refused_with_the_mend() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", Some("A"));
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        execute(&mut client, &format!("BEGIN ISOLATION LEVEL {level}"));
        expect_error(
            &mut client,
            "SELECT fair_claim('q', 'w', 1)",
            "0A000",
            &level.to_lowercase(),
            "READ COMMITTED",
        );
        execute(&mut client, "ROLLBACK");
    }
    assert_eq!(claim_one(&mut client, "q").key, "A");
}

#[test]
fn an_enqueue_works_at_every_isolation_level() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        execute(
            &mut client,
            &format!("BEGIN ISOLATION LEVEL {level}; SELECT fair_enqueue('q'); COMMIT"),
        );
    }
    assert_eq!(drain(&mut client, "q", 1).len(), 3);
}

#[test]
fn a_claim_in_a_read_only_transaction_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", Some("A"));
    execute(&mut client, "BEGIN READ ONLY");
    expect_error(
        &mut client,
        "SELECT fair_claim('q', 'w', 1)",
        "25006",
        "read-only",
        "",
    );
    execute(&mut client, "ROLLBACK");
    assert_eq!(claim_one(&mut client, "q").key, "A");
}

#[test]
fn tasks_of_a_prepared_transaction_are_found_by_the_sweep() {
    let db = brisk().database();
    let mut client = db.connect();
    // The queue is loaded before, so that loading it does not find the rows.
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    let name = format!("enqueue in {}", db.name());
    execute(
        &mut client,
        &format!(
            "BEGIN; SELECT fair_enqueue('q', fairness_key => 'A'); PREPARE TRANSACTION '{name}'"
        ),
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(&mut client, &format!("COMMIT PREPARED '{name}'"));
    let mut found = Vec::new();
    wait_until("the sweep has found the task", PATIENCE, || {
        found = claim(&mut client, "q", "w", 1);
        !found.is_empty()
    });
    assert_eq!(found[0].key, "A");
    wait_until("it has been counted", PATIENCE, || {
        stat(&mut client, "q", "missed_wakeups") >= 1
    });
}

#[test]
fn rows_of_a_session_without_triggers_are_found_by_the_sweep() {
    let db = brisk().database();
    let mut client = db.connect();
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(
        &mut client,
        "SET session_replication_role = replica;
         INSERT INTO harvest_fair.task (queue, fairness_key, priority, enqueued_at) VALUES ('q', 'A', 3, now());
         RESET session_replication_role",
    );
    wait_until("the sweep has found the task", PATIENCE, || {
        claim(&mut client, "q", "w", 1).len() == 1
    });
}

#[test]
fn a_claim_in_a_function_and_a_procedure_works() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 6, "1 hour");
    execute(
        &mut client,
        "CREATE FUNCTION take() RETURNS int LANGUAGE plpgsql AS $$
         DECLARE n int := 0; t record; BEGIN
             FOR t IN SELECT * FROM fair_claim('q', 'w', 2) LOOP n := n + 1; END LOOP;
             RETURN n; END $$;
         CREATE PROCEDURE take_all() LANGUAGE plpgsql AS $$
         BEGIN
             WHILE (SELECT count(*) FROM fair_claim('q', 'w', 1)) > 0 LOOP COMMIT; END LOOP;
         END $$",
    );
    assert_eq!(one::<i32>(&mut client, "SELECT take()", &[]), 2);
    execute(&mut client, "CALL take_all()");
    assert_eq!(pending(&mut client, "q"), 0);
}
