//! What the janitor does by itself: snapshots, retention, and keeping out of the way.

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, claim_one, complete, count, enqueue, flood, one,
    wait_until,
};

use crate::support::{brisk, brisk_options, claims, drain, execute, states};

#[test]
fn the_board_is_written_to_key_state_in_ticks() {
    let db = brisk().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 4)");
    flood(&mut client, "q", "A", 20, "1 hour");
    claims(&mut client, "q", 3, 1);
    wait_until("the passes are written", PATIENCE, || {
        one(
            &mut client,
            "SELECT EXISTS (SELECT FROM harvest_fair.key_state
                            WHERE queue = 'q' AND priority = 3 AND fairness_key = 'A'
                              AND pass = 750000 AND last_start = 500000)",
            &[],
        )
    });
}

#[test]
fn a_board_that_does_not_change_is_not_written_again() {
    let db = brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 20, "1 hour");
    claims(&mut client, "q", 3, 1);
    wait_until("the passes are written", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 1 FROM harvest_fair.key_state WHERE pass = 3000000",
            &[],
        )
    });
    // Another queue's flush shows that the janitor came round again.
    flood(&mut client, "other", "B", 20, "1 hour");
    let version = "SELECT xmin::text FROM harvest_fair.key_state WHERE queue = 'q'";
    let before: String = one(&mut client, version, &[]);
    for pass in 1..=3i64 {
        claim_one(&mut client, "other");
        wait_until("the other queue is written", PATIENCE, || {
            one(
                &mut client,
                "SELECT count(*) = 1 FROM harvest_fair.key_state WHERE queue = 'other' AND pass = $1",
                &[&(pass * 1_000_000)],
            )
        });
    }
    assert_eq!(one::<String>(&mut client, version, &[]), before);
}

#[test]
fn finished_tasks_are_deleted_after_their_retention_and_no_others() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 6, "1 hour");
    let tasks = claim(&mut client, "q", "w", 4);
    assert!(complete(&mut client, &tasks[0]));
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET max_attempts = 1 WHERE id = {}",
            tasks[1].id
        ),
    );
    execute(
        &mut client,
        &format!("SELECT fair_fail({}, {}, 'x')", tasks[1].id, tasks[1].lease),
    );
    execute(
        &mut client,
        "SELECT fair_cancel(max(id)) FROM harvest_fair.task WHERE state = 'pending'",
    );
    let states =
        "SELECT coalesce(string_agg(state::text, ' ' ORDER BY state), '') FROM harvest_fair.task";
    assert_eq!(
        one::<String>(&mut client, states, &[]),
        "pending running running completed failed cancelled"
    );
    cluster.append_conf("harvest_fair.retention = '2s'\n");
    cluster.reload();
    wait_until("the finished are gone", PATIENCE, || {
        one::<String>(&mut client, states, &[]) == "pending running running"
    });
    assert!(complete(&mut client, &tasks[2]));
}

#[test]
fn tasks_finished_by_plain_sql_have_a_time_and_are_deleted_too() {
    let db = brisk().database();
    let mut client = db.connect();
    enqueue(&mut client, "q", Some("A"));
    for statement in [
        "UPDATE harvest_fair.task SET state = 'completed' RETURNING finished_at = now()",
        "UPDATE harvest_fair.task SET state = 'pending' RETURNING finished_at IS NULL",
        "UPDATE harvest_fair.task SET state = 'failed' RETURNING finished_at = now()",
        "UPDATE harvest_fair.task SET state = 'running' RETURNING finished_at IS NULL",
        "UPDATE harvest_fair.task SET state = 'cancelled' RETURNING finished_at = now()",
        "INSERT INTO harvest_fair.task (queue, state) VALUES ('q', 'completed') RETURNING finished_at = now()",
        "INSERT INTO harvest_fair.task (queue, state, finished_at) VALUES ('q', 'failed', '2020-01-01')
         RETURNING finished_at = '2020-01-01'",
    ] {
        assert!(one::<bool>(&mut client, statement, &[]), "{statement}");
    }
    execute(
        &mut client,
        r#"SELECT fair_configure('q', '{"retention": 0}')"#,
    );
    wait_until("the finished are gone", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 0 FROM harvest_fair.task",
            &[],
        )
    });
}

#[test]
fn many_finished_tasks_are_deleted_in_small_transactions() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.retention", "1s"));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, state, finished_at)
         SELECT 'q', 'completed', now() - interval '1 day' FROM generate_series(1, 25000)",
    );
    // Each statement says how many it has deleted, and in which transaction.
    execute(
        &mut client,
        "CREATE TABLE deletion (id xid8, tasks bigint);
         CREATE FUNCTION count_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO public.deletion SELECT pg_current_xact_id(), count(*) FROM gone;
             RETURN NULL;
         END $$;
         CREATE TRIGGER zz_count AFTER DELETE ON harvest_fair.task REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION count_deleted()",
    );
    // The first call of a database starts its janitor.
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    wait_until("all are gone", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 0 FROM harvest_fair.task",
            &[],
        )
    });
    let most: i64 = one(
        &mut client,
        "SELECT max(n)::bigint FROM (SELECT sum(tasks) AS n FROM deletion GROUP BY id) t",
        &[],
    );
    assert!((1..=5_000).contains(&most), "{most} deleted at once");
}

#[test]
fn finished_tasks_stay_while_their_retention_lasts() {
    let db = brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 3, "1 hour");
    for task in drain(&mut client, "q", 3) {
        assert!(complete(&mut client, &task));
    }
    execute(
        &mut client,
        r#"SELECT fair_configure('other', '{"retention": 0}')"#,
    );
    // What another queue loses shows that the janitor came round again.
    for _ in 0..2 {
        enqueue(&mut client, "other", Some("A"));
        let task = claim_one(&mut client, "other");
        assert!(complete(&mut client, &task));
        wait_until("the other queue's task is gone", PATIENCE, || {
            one(
                &mut client,
                "SELECT count(*) = 0 FROM harvest_fair.task WHERE queue = 'other'",
                &[],
            )
        });
    }
    let kept: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.task", &[]);
    assert_eq!(kept, 3, "deleted before a day had passed");
}

#[test]
fn every_database_with_the_extension_has_one_janitor_also_after_a_restart() {
    let cluster = Cluster::start(brisk_options());
    let (one_db, other_db) = (cluster.database(), cluster.database());
    let mut admin = cluster.connect();
    let janitors = |client: &mut postgres::Client| -> Vec<(String, i64)> {
        client
            .query(
                "SELECT datname::text, count(*) FROM pg_stat_activity
                 WHERE backend_type ILIKE '%harvest%' AND datname LIKE 't%' AND datname NOT LIKE 'template%'
                 GROUP BY datname ORDER BY datname",
                &[],
            )
            .unwrap()
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect()
    };
    let mut expected = vec![
        (one_db.name().to_owned(), 1),
        (other_db.name().to_owned(), 1),
    ];
    expected.sort();
    for db in [&one_db, &other_db] {
        let mut client = db.connect();
        flood(&mut client, "q", "A", 3, "1 s");
        claim_one(&mut client, "q");
    }
    wait_until("each database has its janitor", PATIENCE, || {
        janitors(&mut admin) == expected
    });
    drop(admin);
    cluster.restart(Shutdown::Fast);
    let mut admin = cluster.connect();
    for db in [&one_db, &other_db] {
        claim_one(&mut db.connect(), "q");
    }
    wait_until("each database has its janitor again", PATIENCE, || {
        janitors(&mut admin) == expected
    });
}

#[test]
fn a_killed_janitor_comes_back() {
    let db = brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    claim_one(&mut client, "q");
    let janitor = |client: &mut postgres::Client| -> Option<i32> {
        one(
            client,
            "SELECT max(pid) FROM pg_stat_activity WHERE backend_type ILIKE '%harvest%' AND datname = current_database()",
            &[],
        )
    };
    let mut pid = None;
    wait_until("there is a janitor", PATIENCE, || {
        pid = janitor(&mut client);
        pid.is_some()
    });
    let done: bool = one(
        &mut client,
        "SELECT pg_terminate_backend($1, 60000)",
        &[&pid.unwrap()],
    );
    assert!(done);
    claim_one(&mut client, "q");
    wait_until("its successor works", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 1 FROM harvest_fair.key_state WHERE pass = 2000000",
            &[],
        )
    });
    assert_ne!(janitor(&mut client), pid);
}

#[test]
fn idle_databases_are_quiet() {
    // An autovacuum that a shutdown interrupts says so.
    let cluster = Cluster::start(
        Options::new()
            .set("log_min_messages", "warning")
            .set("autovacuum", "off"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 3, "1 s");
    drain(&mut client, "q", 3);
    // A background worker that is ended while it still starts is reported by Postgres as FATAL.
    wait_until("the janitor is up", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'harvest_fair janitor'",
            &[],
        )
    });
    drop(client);
    cluster.restart(Shutdown::Fast);
    let log = cluster.log();
    let complaints: Vec<&str> = log
        .lines()
        .filter(|line| {
            ["WARNING", "ERROR", "FATAL", "PANIC"]
                .iter()
                .any(|level| line.contains(&format!(" {level}:")))
        })
        // Connections are refused while the server starts and stops, and the test's own may still be closing.
        .filter(|line| !line.contains("the database system is"))
        .filter(|line| !line.contains("terminating connection due to administrator command"))
        .collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn an_idle_key_in_debt_is_forgotten_after_its_time() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'debtor', 0.001)");
    flood(&mut client, "q", "debtor", 1, "1 hour");
    flood(&mut client, "q", "other", 40, "1 min");
    let tasks = claims(&mut client, "q", 2, 1);
    assert_eq!(count(&tasks, "debtor"), 1);
    for task in &tasks {
        assert!(complete(&mut client, task));
    }
    let known = |client: &mut postgres::Client, key: &str| {
        states(client, "q").iter().any(|state| state.key == key)
    };
    assert!(known(&mut client, "debtor"));
    cluster.append_conf("harvest_fair.prune_after = '2s'\n");
    cluster.reload();
    wait_until("the debt is forgotten", PATIENCE, || {
        !known(&mut client, "debtor")
            && one(
                &mut client,
                "SELECT count(*) = 0 FROM harvest_fair.key_state WHERE fairness_key = 'debtor'",
                &[],
            )
    });
    assert!(known(&mut client, "other"), "a key with work was forgotten");
    flood(&mut client, "q", "debtor", 5, "1 min");
    let next = claims(&mut client, "q", 2, 1);
    assert_eq!(count(&next, "debtor"), 1, "the debt was not forgotten");
}

#[test]
fn a_key_in_debt_is_remembered_until_then() {
    let db = brisk().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'debtor', 0.01)");
    flood(&mut client, "q", "debtor", 1, "1 hour");
    flood(&mut client, "q", "other", 200, "1 min");
    assert_eq!(count(&claims(&mut client, "q", 2, 1), "debtor"), 1);
    wait_until("the janitor has been there", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) > 0 FROM harvest_fair.key_state WHERE fairness_key = 'debtor'",
            &[],
        )
    });
    flood(&mut client, "q", "debtor", 5, "2 hours");
    // It owes a hundred claims of the other, less the one that it has seen.
    let next = claims(&mut client, "q", 98, 1);
    assert_eq!(count(&next, "debtor"), 0);
    let next = claims(&mut client, "q", 3, 1);
    assert_eq!(count(&next, "debtor"), 1);
}
