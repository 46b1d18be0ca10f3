//! The extension goes, and leaves a server that works.

use std::sync::{Arc, Mutex};

use harvest_fair_server_tests::{
    Cluster, Database, Options, PATIENCE, Prefix, Shutdown, claim, claim_one, complete, enqueue,
    expect_error, flood, one, pending, wait_until,
};
use postgres::{Client, NoTls};

use crate::support::{drain, execute};

/// A connection, and the notices that it gets.
fn connect_listening(db: &Database) -> (Client, Arc<Mutex<Vec<String>>>) {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let client = db
        .cluster()
        .config(db.name())
        .notice_callback(move |notice| {
            let text = [Some(notice.message()), notice.detail()];
            let text: Vec<&str> = text.into_iter().flatten().collect();
            heard
                .lock()
                .expect("no listener panics")
                .push(text.join("\n"));
        })
        .connect(NoTls)
        .expect("it can connect");
    (client, notices)
}

fn janitors(client: &mut Client, db: &Database) -> i64 {
    one(
        client,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND backend_type LIKE 'harvest_fair%'",
        &[&db.name()],
    )
}

/// What is left of the extension in the catalog of a database.
fn remains(client: &mut Client) -> i64 {
    one(
        client,
        "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'harvest_fair')
              + (SELECT count(*) FROM pg_proc WHERE proname LIKE 'fair\\_%' OR probin LIKE '%harvest_fair%')
              + (SELECT count(*) FROM pg_extension WHERE extname = 'harvest_fair')
              + (SELECT count(*) FROM pg_type WHERE typname IN ('claimed_task', 'task_state'))",
        &[],
    )
}

#[test]
fn a_drop_is_refused_while_others_depend_on_it_and_cascade_says_what_goes() {
    let cluster = Cluster::shared();
    let (db, other) = (cluster.database(), cluster.database());
    let (mut client, notices) = connect_listening(&db);
    let mut neighbour = other.connect();
    for client in [&mut client, &mut neighbour] {
        flood(client, "q", "A", 5, "1 hour");
        claim_one(client, "q");
    }
    execute(
        &mut client,
        "CREATE VIEW late AS SELECT id FROM harvest_fair.task WHERE scheduled_at < now();
         CREATE TABLE invoice (task bigint REFERENCES harvest_fair.task, last harvest_fair.task_state);
         CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
         CREATE TRIGGER mine AFTER INSERT ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION mine()",
    );
    let refusal = expect_error(
        &mut client,
        "DROP EXTENSION harvest_fair",
        "2BP01",
        "other objects depend on it",
        "CASCADE",
    );
    let dependent = [
        "view late",
        "column last of table invoice",
        "invoice_task_fkey",
    ];
    for dependent in dependent {
        assert!(
            refusal.detail.contains(dependent),
            "no {dependent}: {refusal:?}"
        );
    }
    assert_eq!(pending(&mut client, "q"), 4);

    execute(&mut client, "DROP EXTENSION harvest_fair CASCADE");
    let notices = notices.lock().expect("no listener panics").join("\n");
    for dependent in dependent {
        assert!(notices.contains(dependent), "no {dependent}: {notices}");
    }
    assert_eq!(remains(&mut client), 0);
    // What depended on it in part is there without that part.
    execute(
        &mut client,
        "INSERT INTO invoice VALUES (4711); DROP FUNCTION mine()",
    );
    wait_until("its janitor has gone", PATIENCE, || {
        janitors(&mut client, &db) == 0
    });
    // Another database has its own.
    assert_eq!(drain(&mut neighbour, "q", 2).len(), 4);
    let on_board: i64 = one(
        &mut neighbour,
        "SELECT count(*) FROM harvest_fair.stats WHERE queue = 'q'",
        &[],
    );
    assert_eq!(on_board, 1);
}

#[test]
fn without_the_preload_the_tasks_can_still_be_read_dumped_and_dropped() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    let task = claim_one(&mut client, "q");
    assert!(complete(&mut client, &task));
    execute(
        &mut client,
        "ALTER DATABASE postgres SET harvest_fair.default_lease = '5 min'",
    );
    drop(client);
    // Settings of the extension may stay where they are.
    cluster.append_conf("shared_preload_libraries = ''\nharvest_fair.max_keys = 1000\n");
    cluster.restart(Shutdown::Fast);

    let mut client = db.connect();
    assert_eq!(pending(&mut client, "q"), 4);
    execute(&mut client, "VACUUM ANALYZE");
    for sql in [
        "INSERT INTO harvest_fair.task (queue) VALUES ('q')",
        "SELECT fair_enqueue('q')",
    ] {
        expect_error(&mut client, sql, "55000", "shared_preload_libraries", "");
    }
    let environment = cluster.environment();
    environment.run(
        environment
            .command(environment.program("pg_dump"))
            .args(["-U", "postgres", "-f", "/dev/null", "-h"])
            .arg(cluster.socket_dir())
            .arg(db.name()),
    );
    execute(&mut client, "DROP EXTENSION harvest_fair");
    assert_eq!(remains(&mut client), 0);
    let log = cluster.log();
    assert!(!log.contains("WARNING") && !log.contains("PANIC"), "{log}");
}

#[test]
fn the_files_can_be_removed_once_the_preload_is_and_what_was_left_can_still_be_dropped() {
    let prefix = Prefix::with_extension();
    let cluster = Cluster::start_on(prefix.environment(), Options::new());
    let (dropped, left) = (cluster.database(), cluster.database());
    for db in [&dropped, &left] {
        let mut client = db.connect();
        enqueue(&mut client, "q", Some("A"));
        assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    }
    let mut client = dropped.connect();
    execute(&mut client, "DROP EXTENSION harvest_fair");
    drop(client);
    cluster.append_conf("shared_preload_libraries = ''\n");
    cluster.stop(Shutdown::Fast);
    // The janitor, which could not yet know, has saved nothing into tables that are gone.
    assert!(
        !cluster.log().contains("does not exist"),
        "{}",
        cluster.log()
    );
    for file in prefix
        .extension_files()
        .into_iter()
        .chain([prefix.library()])
    {
        std::fs::remove_file(file).expect("a file of the extension can be removed");
    }
    cluster.start_server();

    let mut client = dropped.connect();
    execute(&mut client, "CREATE TABLE plain AS SELECT 1 AS i");
    assert_eq!(remains(&mut client), 0);
    let mut client = left.connect();
    let tasks: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.task", &[]);
    assert_eq!(tasks, 1);
    execute(&mut client, "DROP EXTENSION harvest_fair");
    assert_eq!(remains(&mut client), 0);
}
