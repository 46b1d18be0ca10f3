//! The cap of 1,000 weights a queue holds among transactions that cannot see each other's rows.

use std::thread;

use harvest_fair_server_tests::{Cluster, PATIENCE, one, pid_of, sqlstate_of, wait_until};

use crate::support::execute;

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
const BY_FUNCTION: &str = "SELECT fair_set_weight('q', $1, 2)";
const BY_SQL: &str =
    "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', $1, 2)";
const FILL: &str = "SELECT fair_set_weights('q', (SELECT jsonb_object_agg('k' || i, 2) FROM generate_series(1, 999) i))";

/// Two transactions whose snapshots are older than either's row, which would be the 1,000th. The second waits for the
/// first to end. Gives the error of the second ("" for none) and the number of weights.
fn second_of_two(level: &str, statement: &str, first_ends: &str) -> (String, i64) {
    let db = Cluster::shared().database();
    let (mut first, mut second, mut observer) = (db.connect_with(FILL), db.connect(), db.connect());
    for client in [&mut first, &mut second] {
        execute(
            client,
            &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM harvest_fair.weight"),
        );
    }
    first.execute(statement, &[&"first"]).unwrap();
    let pid = pid_of(&mut second);
    let error = thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let set = second.execute(statement, &[&"second"]);
            let error = set.err().map(|error| sqlstate_of(&error).to_owned());
            let commit = second.batch_execute("COMMIT").err();
            error
                .or(commit.map(|error| sqlstate_of(&error).to_owned()))
                .unwrap_or_default()
        });
        wait_until("the second waits for the first", PATIENCE, || {
            one(
                &mut observer,
                "SELECT wait_event_type IS NOT DISTINCT FROM 'Lock' FROM pg_stat_activity WHERE pid = $1",
                &[&pid],
            )
        });
        execute(&mut first, first_ends);
        waiting.join().unwrap()
    });
    let weights = one(
        &mut observer,
        "SELECT count(*) FROM harvest_fair.weight",
        &[],
    );
    (error, weights)
}

#[test]
fn of_two_transactions_at_any_isolation_level_only_one_sets_the_thousandth_weight() {
    for level in LEVELS {
        for statement in [BY_FUNCTION, BY_SQL] {
            let (error, weights) = second_of_two(level, statement, "COMMIT");
            // A serializable transaction may also be told to try again.
            let told = error == "54000" || level == "SERIALIZABLE" && error == "40001";
            assert!(told, "{level}, {statement}: {error:?}");
            assert_eq!(weights, 1000, "{level}, {statement}");
        }
    }
}

#[test]
fn a_weight_that_is_rolled_back_makes_room_at_any_isolation_level() {
    for level in LEVELS {
        for statement in [BY_FUNCTION, BY_SQL] {
            let (error, weights) = second_of_two(level, statement, "ROLLBACK");
            assert_eq!(
                (error.as_str(), weights),
                ("", 1000),
                "{level}, {statement}"
            );
        }
    }
}

#[test]
fn a_transaction_counts_what_was_committed_after_its_snapshot() {
    for level in LEVELS {
        let db = Cluster::shared().database();
        let (mut client, mut other) = (db.connect_with(FILL), db.connect());
        execute(
            &mut client,
            &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM harvest_fair.weight"),
        );
        execute(&mut other, "SELECT fair_set_weight('q', 'other', 2)");
        let error = client.execute(BY_SQL, &[&"mine"]).unwrap_err();
        assert_eq!(sqlstate_of(&error), "54000", "{level}");
        execute(&mut client, "ROLLBACK");
        // And what others have cleared since.
        execute(
            &mut client,
            &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM harvest_fair.weight"),
        );
        execute(&mut other, "SELECT fair_clear_weight('q', 'other')");
        client.execute(BY_SQL, &[&"mine"]).unwrap();
        execute(&mut client, "COMMIT");
    }
}
