//! A claim does not depend on statistics, planner settings, or on what is not its own.

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, claim, claim_one, enqueue, flood, one, wait_until,
};
use postgres::Client;
use serde_json::Value;

use crate::support::{BYSTANDER, assert_all_different, brisk, claims, drain, execute};

/// Buffers that one claim of `n` touches, in a session that has claimed before.
fn buffers(client: &mut Client, queue: &str, n: i32) -> i64 {
    let plan: Value = one(
        client,
        &format!(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM fair_claim('{queue}', 'w', {n})"
        ),
        &[],
    );
    let plan = &plan[0]["Plan"];
    assert_eq!(plan["Actual Rows"].as_f64(), Some(f64::from(n)), "{plan}");
    plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap()
}

/// The middle one of nine claims' buffers: a page split now and then is not what is looked for.
fn usual_buffers(client: &mut Client, queue: &str) -> i64 {
    claim_one(client, queue);
    let mut seen: Vec<i64> = (0..9).map(|_| buffers(client, queue, 1)).collect();
    seen.sort_unstable();
    seen[4]
}

#[test]
fn a_claim_of_one_returns_one_row_whatever_the_planner_believes() {
    for setting in [
        "SET plan_cache_mode = auto",
        "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_material = off",
        "SET plan_cache_mode = force_generic_plan",
        "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off; SET enable_tidscan = off",
        "SET enable_seqscan = off; SET enable_nestloop = off",
        "SET jit_above_cost = 0; SET debug_parallel_query = on",
    ] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(
            &mut client,
            "ALTER TABLE harvest_fair.task SET (autovacuum_enabled = off);
             INSERT INTO harvest_fair.task (queue, fairness_key, payload)
             SELECT 'q', 'k' || i % 3, to_jsonb(repeat('x', 1500) || i) FROM generate_series(1, 60) i;
             DELETE FROM harvest_fair.task WHERE id > 1",
        );
        execute(&mut client, "VACUUM ANALYZE harvest_fair.task");
        execute(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, fairness_key, payload)
             SELECT 'q', 'k' || i % 3, to_jsonb(repeat('x', 1500) || i) FROM generate_series(1, 5) i",
        );
        // Not every version knows every setting.
        for statement in setting.split("; ") {
            let _ = client.batch_execute(statement);
        }
        let tasks = claims(&mut client, "q", 6, 1);
        assert_eq!(tasks.len(), 6, "{setting}");
        assert_all_different(&tasks);
        let running: i64 = one(
            &mut client,
            "SELECT count(*) FROM harvest_fair.task WHERE state = 'running'",
            &[],
        );
        assert_eq!(running, 6, "{setting}");
    }
}

#[test]
fn a_claim_reads_no_more_for_a_hundred_thousand_rows_that_are_due_next_week() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "without", "B", 12, "1 hour");
    let without = usual_buffers(&mut client, "without");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'with', 'A', now() + interval '7 days' + i * interval '1 ms' FROM generate_series(1, 100000) i",
    );
    flood(&mut client, "with", "B", 12, "1 hour");
    let with = usual_buffers(&mut client, "with");
    assert!(
        with <= without * 3 / 2 + 4,
        "{with} buffers, {without} without them"
    );
}

#[test]
fn a_claim_reads_no_more_for_the_backlog_of_another_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q2", "B", 50, "1 hour");
    let alone = usual_buffers(&mut client, "q2");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key)
         SELECT 'q1', 'k' || i % 50 FROM generate_series(1, 100000) i",
    );
    let beside = usual_buffers(&mut client, "q2");
    assert!(
        beside <= alone * 3 / 2 + 4,
        "{beside} buffers, {alone} alone"
    );
}

#[test]
fn a_claim_reads_no_more_with_statistics_of_an_empty_table_and_many_finished_tasks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SET harvest_fair.default_lease = '1d';
         ALTER TABLE harvest_fair.task SET (autovacuum_enabled = off); ANALYZE harvest_fair.task",
    );
    let finish = |client: &mut Client, n: i64| {
        execute(
            client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, state, finished_at)
                 SELECT 'q', 'k' || i % 5, 'completed', now() FROM generate_series(1, {n}) i"
            ),
        );
    };
    finish(&mut client, 1_000);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i % 5 FROM generate_series(1, 1200) i",
    );
    let few = usual_buffers(&mut client, "q");
    finish(&mut client, 100_000);
    let many = usual_buffers(&mut client, "q");
    assert!(
        many <= few * 3 / 2 + 4,
        "{many} buffers, {few} with few finished tasks"
    );
    assert_eq!(drain(&mut client, "q", 500).len(), 1200 - 20);
}

#[test]
fn a_claim_reads_no_more_while_an_old_snapshot_keeps_dead_entries_alive() {
    let db = Cluster::shared().database();
    let (mut client, mut old) = (db.connect(), db.connect());
    execute(
        &mut client,
        "SET harvest_fair.default_lease = '1d';
         INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i % 10 FROM generate_series(1, 8000) i",
    );
    execute(
        &mut old,
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM harvest_fair.task",
    );
    let first = usual_buffers(&mut client, "q");
    for task in claims(&mut client, "q", 60, 100) {
        assert!(harvest_fair_server_tests::complete(&mut client, &task));
    }
    let last = usual_buffers(&mut client, "q");
    assert!(
        last <= first * 3 / 2 + 4,
        "{last} buffers after 6,000 claims, {first} at the start"
    );
    // No table of ours but the tasks' gains a dead row for each claim.
    let pages: i64 = one(
        &mut client,
        "SELECT coalesce(sum(pg_relation_size(c.oid) / 8192), 0)::bigint FROM pg_class c
         JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'harvest_fair' AND c.relkind = 'r' AND c.relname <> 'task'",
        &[],
    );
    assert!(pages < 20, "{pages} pages in tables other than the tasks'");
    execute(&mut old, "ROLLBACK");
}

/// How often the table of tasks was read from end to end.
fn table_scans(db: &Database) -> i64 {
    // Sessions report when they end, so this one is new, and those that came before are gone.
    let mut client = db.connect();
    wait_until("all sessions have reported", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 1 FROM pg_stat_activity
             WHERE datname = current_database() AND backend_type = 'client backend'",
            &[],
        )
    });
    one(
        &mut client,
        "SELECT seq_scan FROM pg_stat_user_tables WHERE relid = 'harvest_fair.task'::regclass",
        &[],
    )
}

#[test]
fn plans_made_while_the_table_was_empty_never_read_all_of_it() {
    let db = brisk().database();
    let mut client = db.connect_with(
        "ALTER TABLE harvest_fair.task SET (autovacuum_enabled = off); SET harvest_fair.default_lease = '1 s'",
    );
    // The queue's first claim makes the session's plans.
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    let parent = enqueue(&mut client, "q", Some("k0"));
    execute(&mut client, "SELECT fair_set_weight('q', 'k1', 2)");
    drop(client);
    let before = table_scans(&db);
    let mut client = db.connect_with("SET harvest_fair.default_lease = '1 s'");
    for round in 0..40 {
        for i in 0..20 {
            let key = format!("k{}", i % 7);
            client
                .execute(
                    "SELECT fair_enqueue('q', fairness_key => $1, parent_id => $2)",
                    &[&key, &parent],
                )
                .unwrap();
        }
        execute(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', 'x'), ('q', 'y')",
        );
        let tasks = claim(&mut client, "q", "w", 10);
        assert_eq!(tasks.len(), 10);
        let (ids, leases): (Vec<i64>, Vec<i64>) =
            tasks[5..7].iter().map(|task| (task.id, task.lease)).unzip();
        for sql in [
            format!("SELECT fair_complete({}, {})", tasks[0].id, tasks[0].lease),
            format!("SELECT fair_release({}, {})", tasks[1].id, tasks[1].lease),
            format!("SELECT fair_fail({}, {}, 'x')", tasks[2].id, tasks[2].lease),
            format!("SELECT fair_extend({}, {})", tasks[3].id, tasks[3].lease),
            format!(
                "SELECT fair_complete({}, {}, 2)",
                tasks[4].id, tasks[4].lease
            ),
            format!("SELECT fair_complete(ARRAY{ids:?}, ARRAY{leases:?})"),
            format!(
                "SELECT fair_cancel({0}); SELECT fair_retry({0})",
                tasks[1].id
            ),
        ] {
            execute(&mut client, &sql);
        }
        assert!(claim_one(&mut client, "q").attempt >= 1);
        if round == 20 {
            execute(
                &mut client,
                "SELECT fair_clear_weight('q', 'k1'); SELECT * FROM fair_state('q')",
            );
        }
    }
    // Three leases of each round run out, which the janitor or a claim finds.
    let expired = "SELECT count(*) = 0 FROM harvest_fair.task WHERE state = 'running' AND lease_until < clock_timestamp()";
    execute(&mut client, "SET enable_seqscan = off");
    wait_until("no lease is overdue", PATIENCE, || {
        one(&mut client, expired, &[])
    });
    drop(client);
    assert_eq!(table_scans(&db) - before, 0, "reads of the whole table");
}

/// The middle one of five completions' buffers, in a session that has completed before.
fn completion_buffers(client: &mut Client) -> i64 {
    let mut seen: Vec<i64> = (0..6)
        .map(|_| {
            let task = claim_one(client, "q");
            let complete = format!("SELECT fair_complete({}, {})", task.id, task.lease);
            let plan: Value = one(
                client,
                &format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {complete}"),
                &[],
            );
            plan[0]["Plan"]["Shared Hit Blocks"].as_i64().unwrap()
        })
        .skip(1)
        .collect();
    seen.sort_unstable();
    seen[2]
}

#[test]
fn a_completion_finds_its_task_by_its_id_whatever_the_session_has_switched_off() {
    // Written directly, and by a statement.
    for setup in ["SELECT", BYSTANDER] {
        let db = Cluster::shared().database();
        let connect = || {
            db.connect_with(
                "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off;
                 SET enable_tidscan = off; SET harvest_fair.default_lease = '1d'",
            )
        };
        let mut client = connect();
        execute(&mut client, setup);
        flood(&mut client, "q", "A", 100, "1 hour");
        let few = completion_buffers(&mut client);
        flood(&mut client, "q", "A", 20_000, "1 hour");
        let (kept, new) = (
            completion_buffers(&mut client),
            completion_buffers(&mut connect()),
        );
        assert!(
            kept.max(new) <= few * 3 / 2 + 10,
            "{kept} and {new} pages, {few} in a small table"
        );
        let switched: String = one(&mut client, "SHOW enable_indexscan", &[]);
        assert_eq!(switched, "off", "the session's own");
    }
}

#[test]
fn tasks_close_together_and_far_apart_come_in_their_order_and_none_is_passed_over() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    // By turns 40 tasks a microsecond apart, or due at once, and 40 that are days, or most of the calendar, apart.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', k, CASE WHEN i / 40 % 2 = 0 THEN base + i * apart ELSE base + i * interval '3 days' END
         FROM generate_series(0, 199) i,
              (VALUES ('a', now() - interval '900 days', interval '1 us'), ('b', now() - interval '4000 days', interval '0'),
                      ('c', '-infinity', interval '0')) AS keys (k, base, apart);
         INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         SELECT 'q', 'a', '4700-01-01 BC'::timestamptz + i * interval '600 years' FROM generate_series(0, 9) i",
    );
    let tasks = drain(&mut client, "q", 7);
    assert_eq!(tasks.len(), 610);
    for key in ["a", "b", "c"] {
        let places: Vec<_> = tasks
            .iter()
            .filter(|task| task.key == key)
            .map(|task| (task.scheduled_at, task.id))
            .collect();
        assert!(places.is_sorted(), "{key}: {places:?}");
    }
}

#[test]
fn an_empty_claim_writes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "drained", "A", 3, "1 hour");
    drain(&mut client, "drained", 3);
    execute(
        &mut client,
        "SELECT fair_enqueue('future', scheduled_at => now() + interval '1 day')",
    );
    for (queue, n, wait) in [
        ("drained", 1, "NULL"),
        ("future", 5, "NULL"),
        ("unknown", 1, "NULL"),
        ("drained", 1, "'20 ms'"),
    ] {
        // The first claim may load the queue.
        execute(
            &mut client,
            &format!("SELECT fair_claim('{queue}', 'w', 1)"),
        );
        let mut transaction = client.transaction().unwrap();
        let plan: Value = one(
            &mut transaction,
            &format!(
                "EXPLAIN (ANALYZE, WAL, FORMAT JSON) SELECT * FROM fair_claim('{queue}', 'w', {n}, {wait})"
            ),
            &[],
        );
        let plan = &plan[0]["Plan"];
        assert_eq!(plan["Actual Rows"].as_f64(), Some(0.0), "{queue}");
        assert_eq!(plan["WAL Records"].as_i64(), Some(0), "{queue}: {plan}");
        let assigned: bool = one(
            &mut transaction,
            "SELECT pg_current_xact_id_if_assigned() IS NOT NULL",
            &[],
        );
        assert!(!assigned, "an empty claim on {queue} took a transaction id");
        transaction.commit().unwrap();
    }
}

#[test]
fn idle_workers_that_poll_use_no_transaction_ids() {
    let cluster = Cluster::start(harvest_fair_server_tests::Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    execute(&mut client, "SELECT fair_claim('q', 'w', 1)");
    let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    let before: i64 = one(&mut client, next, &[]);
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let mut client = db.connect();
                for _ in 0..50 {
                    assert!(harvest_fair_server_tests::claim(&mut client, "q", "w", 3).is_empty());
                }
            });
        }
    });
    let used = one::<i64>(&mut client, next, &[]) - before;
    // The janitor and autovacuum may use a few; 1,600 polls use none.
    assert!(used < 100, "{used} transaction ids for 1,600 empty claims");
}
