//! Claims take no memory that is not given back: neither in what Postgres counts, nor in what the process has. `make soak`
//! makes a million of them.

use std::fs;

use harvest_fair_server_tests::{Cluster, one, pending, pid_of};
use postgres::Client;

use crate::support::execute;

const KB: i64 = 1024;

/// Claims of one transaction. It remembers what it has claimed until it ends, lest it could not be undone.
const OPEN: i64 = 100_000;

/// Bytes: in Postgres' memory contexts, and of the process, shared memory aside.
fn memory(client: &mut Client) -> (i64, i64) {
    let contexts = one(
        client,
        "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts",
        &[],
    );
    let status = fs::read_to_string(format!("/proc/{}/status", pid_of(client)))
        .expect("the status of the backend's process");
    let anonymous = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .and_then(|value| value.trim().strip_suffix(" kB"))
        .and_then(|value| value.parse::<i64>().ok())
        .expect("RssAnon in kB");
    (contexts, anonymous * KB)
}

#[test]
fn a_backend_keeps_no_memory_for_claims_and_a_transaction_a_few_bytes_for_each() {
    let committed: i64 = std::env::var("HF_MEMORY_CLAIMS")
        .map_or(50_000, |claims| claims.parse().expect("a number of claims"));
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        &format!(
            "SELECT fair_configure('q', '{{\"lease\": \"1 day\"}}');
             INSERT INTO harvest_fair.task (queue, fairness_key)
             SELECT 'q', 'k' || i % 50 FROM generate_series(1, {}) i",
            2_000 + OPEN + committed
        ),
    );
    execute(
        &mut client,
        "CREATE PROCEDURE claim(n int, committing boolean) LANGUAGE plpgsql AS $$
         BEGIN
             FOR i IN 1 .. n LOOP
                 PERFORM fair_claim('q', 'w', 1);
                 IF committing THEN COMMIT; END IF;
             END LOOP;
         END $$;
         CALL claim(1000, false)",
    );
    // By itself: it commits.
    execute(&mut client, "CALL claim(1000, true)");
    let (contexts, process) = memory(&mut client);

    execute(&mut client, &format!("BEGIN; CALL claim({OPEN}, false)"));
    let (open_contexts, open_process) = memory(&mut client);
    assert!(
        open_contexts - contexts < 1024 * KB,
        "{contexts} bytes in contexts before, {open_contexts} in a transaction with {OPEN} claims"
    );
    assert!(
        open_process - process < OPEN * 400,
        "{process} bytes before, {open_process} in a transaction with {OPEN} claims"
    );

    execute(&mut client, "COMMIT");
    execute(&mut client, &format!("CALL claim({committed}, true)"));
    let (last_contexts, last_process) = memory(&mut client);
    let left = pending(&mut client, "q");
    assert_eq!(left, 0, "claims came up empty");
    eprintln!(
        "memory in contexts and of the process: {contexts} and {process} bytes before, {open_contexts} and {open_process}
in a transaction with {OPEN} claims, {last_contexts} and {last_process} after {committed} transactions more"
    );
    assert!(
        last_contexts - contexts < 1024 * KB,
        "{contexts} bytes in contexts before, {last_contexts} after {committed} transactions more"
    );
    assert!(
        last_process - open_process < 2048 * KB,
        "{open_process} bytes before, {last_process} after {committed} transactions more"
    );
}
