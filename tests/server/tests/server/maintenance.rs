//! What administrators do to tables and databases under a running queue.

use std::sync::{Barrier, Mutex};
use std::thread;

use harvest_fair_server_tests::{
    Cluster, Options, Shutdown, claim, claim_one, complete, enqueue, expect_error, expect_refusal,
    flood, keys_of, one, sqlstate_of,
};

use crate::support::{assert_all_different, brisk_options, claims, drain, execute, state};

#[test]
fn open_sessions_go_on_after_the_table_was_rewritten_or_its_indexes_rebuilt() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 100, "1 hour");
    let mut tasks = claim(&mut client, "q", "w", 2);
    let changes = [
        "REINDEX TABLE CONCURRENTLY harvest_fair.task",
        "REINDEX TABLE harvest_fair.task",
        "VACUUM FULL harvest_fair.task",
        "CLUSTER harvest_fair.task USING task_pkey",
        "ANALYZE harvest_fair.task",
        "ALTER TABLE harvest_fair.task ADD COLUMN note text",
        "ALTER TABLE harvest_fair.task ADD COLUMN noted text DEFAULT 'x'",
        "ALTER TABLE harvest_fair.task DROP COLUMN note",
        "CREATE INDEX CONCURRENTLY ON harvest_fair.task (enqueued_at)",
        "ALTER TABLE harvest_fair.task SET (fillfactor = 70)",
        "ALTER TABLE harvest_fair.task DISABLE TRIGGER USER, ENABLE TRIGGER USER",
    ];
    for change in changes {
        execute(&mut dba, change);
        let more = claim(&mut client, "q", "w", 2);
        assert_eq!(more.len(), 2, "after {change}");
        assert!(complete(&mut client, &more[0]), "after {change}");
        enqueue(&mut client, "q", Some("A"));
        tasks.extend(more);
    }
    tasks.extend(drain(&mut client, "q", 10));
    assert_all_different(&tasks);
    assert_eq!(tasks.len(), 100 + changes.len());
}

#[test]
fn a_load_that_is_cancelled_is_done_again_by_the_next_claim() {
    let cluster = Cluster::start(Options::new().set("harvest_fair.max_keys", 32_768));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i FROM generate_series(1, 20000) i",
    );
    drop(client);
    let mut cancelled = 0;
    for timeout in [1, 3, 10, 30] {
        cluster.restart(Shutdown::Fast);
        let mut client = db.connect_with(&format!("SET statement_timeout = '{timeout} ms'"));
        match client.batch_execute("SELECT fair_claim('q', 'w', 1)") {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(sqlstate_of(&error), "57014", "{error:?}");
                cancelled += 1;
            }
        }
        // Also for another session, which must not wait for the loader that is gone.
        assert_eq!(claim(&mut db.connect(), "q", "w", 5).len(), 5);
    }
    assert!(cancelled > 0, "the load was never cancelled");
}

#[test]
fn sessions_that_all_come_at_once_after_a_restart_all_get_work() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i % 500 FROM generate_series(1, 5000) i",
    );
    drop(client);
    cluster.restart(Shutdown::Immediate);
    let (ready, all) = (Barrier::new(8), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = db.connect();
                ready.wait();
                all.lock().unwrap().extend(claims(&mut client, "q", 20, 3));
            });
        }
    });
    let all = all.into_inner().unwrap();
    assert_all_different(&all);
    assert_eq!(all.len(), 480);
    let mut keys = keys_of(&all);
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(
        keys.len(),
        480,
        "a key came twice before all others had come once"
    );
}

#[test]
fn a_server_without_room_for_a_janitor_serves_and_says_so() {
    let cluster = Cluster::start(Options::new().set("max_worker_processes", 1));
    let db = cluster.database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '500 ms'");
    flood(&mut client, "q", "A", 3, "1 hour");
    let lost = claim_one(&mut client, "q");
    execute(&mut client, "SELECT pg_sleep(0.6)");
    assert_eq!(claim_one(&mut client, "q").id, lost.id);
    assert!(
        cluster
            .log()
            .lines()
            .any(|line| line.contains("HINT") && line.contains("max_worker_processes")),
        "nothing was said"
    );
}

#[test]
fn a_database_that_is_not_in_utf8_is_refused_with_the_mend() {
    let cluster = Cluster::shared();
    let mut admin = cluster.connect();
    for encoding in ["LATIN1", "SQL_ASCII", "EUC_JP"] {
        let db = cluster.empty_database();
        execute(&mut admin, &format!("DROP DATABASE {}", db.name()));
        execute(
            &mut admin,
            &format!(
                "CREATE DATABASE {} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'",
                db.name()
            ),
        );
        let mut client = db.connect();
        expect_error(
            &mut client,
            "CREATE EXTENSION harvest_fair",
            "0A000",
            encoding,
            "UTF8",
        );
        let left: i64 = one(
            &mut client,
            "SELECT count(*) FROM pg_namespace WHERE nspname = 'harvest_fair'",
            &[],
        );
        assert_eq!(left, 0);
    }
}

#[test]
fn a_wrong_trigger_of_a_users_own_does_not_take_the_queue_down() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'broken'; END $$;
         CREATE TRIGGER zz AFTER UPDATE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION broken()",
    );
    flood(&mut client, "q", "A", 10, "1 hour");
    for _ in 0..3 {
        assert_eq!(
            expect_refusal(&mut client, "SELECT fair_claim('q', 'w', 4)").message,
            "broken"
        );
    }
    execute(&mut client, "DROP TRIGGER zz ON harvest_fair.task");
    assert_eq!(state(&mut client, "q", "A").running, 0);
    assert_eq!(drain(&mut client, "q", 4).len(), 10);
}
