//! Calls of everything with anything: like [`crate::fuzz`], which says how to repeat a run.

use harvest_fair_server_tests::{one, pid_of};
use postgres::Client;
use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::Value;

use crate::fuzz::{Session, cluster, input};
use crate::fuzz_input::Input;
use crate::support::execute;

/// Committed or not; then every task is still there, and every count right.
#[test]
fn any_call_with_any_input_leaves_everything_in_order() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    let queues = ["q", "r/é", "s"];
    let mut open = false;
    for _ in 0..3_000 {
        let dice = input.0.random_range(0..100);
        match dice {
            0..8 if !open => {
                execute(&mut session.client, "BEGIN");
                open = true;
            }
            0..4 => {
                drop(session.client.batch_execute("COMMIT"));
                open = false;
            }
            4..8 => {
                execute(&mut session.client, "ROLLBACK");
                open = false;
            }
            _ => {
                let queue = if dice < 95 {
                    (*queues.choose(&mut input.0).expect("a queue")).to_owned()
                } else {
                    input.name(255)
                };
                anything(&mut session, &mut input, &queue);
            }
        }
        if open && session.client.execute("SELECT 1", &[]).is_err() {
            execute(&mut session.client, "ROLLBACK");
            open = false;
        }
    }
    drop(session.client.batch_execute("ROLLBACK"));
    execute(
        &mut session.client,
        "TRUNCATE harvest_fair.queue; SET statement_timeout = 0",
    );
    assert_eq!(pid_of(&mut session.client), session.pid);
    counts_are_right(&mut session.client);
    let names: Vec<String> = session
        .client
        .query("SELECT DISTINCT queue FROM harvest_fair.task", &[])
        .expect("the queues")
        .iter()
        .map(|row| row.get(0))
        .collect();
    // Tasks that come due while these are claimed are another matter.
    execute(
        &mut session.client,
        "CREATE TEMP TABLE due AS SELECT id FROM harvest_fair.task WHERE state = 'pending' AND scheduled_at <= now()
             AND (sticky_worker IS NULL OR sticky_worker = 'w' OR sticky_until <= now())",
    );
    let mut claimed = 0;
    for queue in &names {
        loop {
            // Not through the client, which cannot read every number that a payload may hold.
            let tasks: i64 = one(
                &mut session.client,
                "SELECT count(*) FROM fair_claim($1::text, 'w', 100)",
                &[queue],
            );
            if tasks == 0 {
                break;
            }
            claimed += tasks;
        }
    }
    assert!(claimed > 0);
    let lost: Option<String> = one(
        &mut session.client,
        "SELECT string_agg(task::text, E'\\n') FROM harvest_fair.task JOIN due USING (id) WHERE state = 'pending'",
        &[],
    );
    assert_eq!(lost, None, "tasks that no claim finds");
    counts_are_right(&mut session.client);
}

/// The board counts as running what the table does.
fn counts_are_right(client: &mut Client) {
    let wrong = client
        .query(
            "SELECT s.queue, s.fairness_key, max(s.running), (SELECT count(*) FROM harvest_fair.task t
                 WHERE t.queue = s.queue COLLATE \"C\" AND t.fairness_key = s.fairness_key COLLATE \"C\" AND t.state = 'running')
             FROM fair_state() s GROUP BY 1, 2 HAVING max(s.running) <> (SELECT count(*) FROM harvest_fair.task t
                 WHERE t.queue = s.queue COLLATE \"C\" AND t.fairness_key = s.fairness_key COLLATE \"C\" AND t.state = 'running')",
            &[],
        )
        .expect("fair_state");
    let wrong: Vec<(String, String, i64, i64)> = wrong
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect();
    assert!(
        wrong.is_empty(),
        "(queue, key, on the board, in the table): {wrong:?}"
    );
}

/// One call.
fn anything(session: &mut Session, input: &mut Input, queue: &str) {
    let key = input.maybe_key();
    let worker = input.worker();
    let (id, lease) = (input.maybe_id(), input.maybe_id());
    let (n, float) = (input.small(), input.maybe_float());
    let parent = input.0.random_bool(0.2).then(|| input.id());
    let (time, interval) = (input.maybe_time(), input.maybe_interval());
    let payload: Value = input.value(3);
    let queues: Vec<Option<String>> = (0..input.0.random_range(0..4))
        .map(|_| input.0.random_bool(0.9).then(|| queue.to_owned()))
        .collect();
    let mine = "SELECT id, lease FROM harvest_fair.task WHERE state = 'running' ORDER BY md5(id::text || random()) LIMIT 3";
    match input.0.random_range(0..24) {
        0..4 => session.call(
            "SELECT fair_enqueue($1, $2, $3, $4, $5, $6::text::timestamptz, $7)",
            &[&queue, &payload, &key, &n, &float, &time, &parent],
        ),
        4 => session.call(
            "SELECT fair_enqueue($1, sticky_worker => $2, sticky_for => $3::text::interval, quota_key => $4, max_attempts => $5)",
            &[&queue, &worker, &interval, &key, &n],
        ),
        5 => session.call(
            "INSERT INTO harvest_fair.task (queue, fairness_key, priority, weight, scheduled_at, new_start, sticky_worker)
             VALUES ($1, $2, $3, $4, $5::text::timestamptz, true, $6), ($1, NULL, NULL, NULL, now(), false, NULL)",
            &[&queue, &key, &n.map(|n| n as i16), &float, &time, &worker],
        ),
        6..10 => session.call("SELECT fair_claim($1::text, $2, $3)", &[&queue, &worker, &n]),
        10 => session.call("SELECT fair_claim($1::text[], $2, $3)", &[&queues, &worker, &n]),
        11 => session.call("SELECT fair_claim_by_id($1, $2)", &[&id, &worker]),
        12 => session.call(
            &format!("SELECT fair_complete(id, lease, $1) FROM ({mine}) mine"),
            &[&float],
        ),
        13 => session.call(
            &format!("SELECT fair_release(array_agg(id), array_agg(lease)) FROM ({mine}) mine"),
            &[],
        ),
        14 => session.call(
            &format!("SELECT fair_fail(id, lease, $1, $2::text::interval) FROM ({mine}) mine"),
            &[&worker, &interval],
        ),
        15 => session.call(
            &format!("SELECT fair_extend(id, lease, $1::text::interval) FROM ({mine}) mine"),
            &[&interval],
        ),
        16 => session.call("SELECT fair_cancel($1), fair_retry($2)", &[&id, &lease]),
        17 => session.call(
            "SELECT fair_charge($1, $2, $3, $4)",
            &[&queue, &key, &float, &n],
        ),
        18 => session.call("SELECT fair_set_weight($1, $2, $3, $4)", &[&queue, &key, &float, &worker]),
        19 => session.call(
            "SELECT fair_configure($1, $2::text::jsonb)",
            &[&queue, &input.settings()],
        ),
        20 => session.call(
            "SELECT fair_preview($1, $2, $3), fair_lag($1, $3), fair_state($1), fair_weights($1), fair_queue($1)",
            &[&queue, &worker, &n],
        ),
        21 => session.call(
            "UPDATE harvest_fair.task SET queue = $1, fairness_key = $2, priority = $3, weight = $4,
                 scheduled_at = coalesce($5::text::timestamptz, scheduled_at), charged = $4
             WHERE id IN (SELECT id FROM harvest_fair.task ORDER BY md5(id::text || random()) LIMIT 3)",
            &[&queue, &key, &n.map(|n| n as i16), &float, &time],
        ),
        22 => session.call(
            "UPDATE harvest_fair.task SET state = (enum_range(NULL::harvest_fair.task_state))[1 + abs($1::int % 5)]
             WHERE id IN (SELECT id FROM harvest_fair.task ORDER BY md5(id::text || random()) LIMIT 3)",
            &[&n.unwrap_or(0)],
        ),
        _ => session.call(
            "DELETE FROM harvest_fair.task WHERE id IN (SELECT id FROM harvest_fair.task ORDER BY md5(id::text || random()) LIMIT 2)",
            &[],
        ),
    }
    .ok();
}
