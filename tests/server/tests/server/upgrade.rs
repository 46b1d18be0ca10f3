//! Databases of earlier versions: the new library serves them, and ALTER EXTENSION ... UPDATE makes of them what a fresh
//! install is.
//!
//! `sql/harvest_fair--VERSION.sql` is the install script of a version, frozen; `make freeze` writes it.

use std::path::{Path, PathBuf};

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Prefix, Shutdown, claim, claim_one, complete, count, enqueue,
    flood, one, pending, running, wait_until,
};
use postgres::Client;

use crate::catalog::{difference, facts};
use crate::policy_support::configure;
use crate::support::{assert_all_different, brisk_options, claims, drain, execute, stat};

/// The scripts in `sql/` that Postgres would look for, by name.
fn scripts() -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sql");
    let mut scripts: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("sql/ can be read")
        .map(|entry| entry.expect("sql/ can be read").path())
        .collect();
    scripts.sort();
    scripts
        .into_iter()
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.to_owned();
            let script = std::fs::read_to_string(&path).expect("a script can be read");
            name.starts_with("harvest_fair--").then_some((name, script))
        })
        .collect()
}

/// The version that is being built.
fn current(client: &mut Client) -> String {
    one(
        client,
        "SELECT default_version FROM pg_available_extensions WHERE name = 'harvest_fair'",
        &[],
    )
}

/// The versions whose install script is frozen.
fn frozen(scripts: &[(String, String)]) -> Vec<String> {
    scripts
        .iter()
        .filter_map(|(name, _)| name.strip_prefix("harvest_fair--")?.strip_suffix(".sql"))
        .filter(|version| !version.contains("--"))
        .map(str::to_owned)
        .collect()
}

/// A Postgres with the library that is being tested, the install scripts of all versions, and the updates between them.
fn with_frozen_scripts() -> (Prefix, Vec<String>) {
    let scripts = scripts();
    let prefix = Prefix::with_extension();
    for (name, script) in &scripts {
        prefix.write(name, script);
    }
    let versions = frozen(&scripts);
    assert!(!versions.is_empty(), "no install script is frozen");
    (prefix, versions)
}

/// Tasks in every state, weights, settings and an audit.
fn fill(client: &mut Client) {
    execute(
        client,
        "SELECT fair_set_weight('q', 'A', 3, 'pays more'); SELECT fair_pause('paused', 'for now')",
    );
    configure(client, "q", r#"{"key_max_running": 20, "lease": "1 hour"}"#);
    for queue in ["q", "paused"] {
        flood(client, queue, "A", 30, "1 hour");
        flood(client, queue, "B", 30, "1 hour");
    }
    let tasks = claim(client, "q", "w", 10);
    assert!(complete(client, &tasks[0]));
    let (failed, released) = (&tasks[1], &tasks[2]);
    execute(
        client,
        &format!(
            "SELECT fair_fail({}, {}, 'it broke'), fair_cancel((SELECT max(id) FROM harvest_fair.task))",
            failed.id, failed.lease
        ),
    );
    execute(
        client,
        &format!(
            "SELECT fair_release({}::bigint, {}::bigint)",
            released.id, released.lease
        ),
    );
}

/// The rows of a table, in the columns that it has now.
struct Rows {
    sql: String,
    digest: String,
}

fn rows_of_all_tables(client: &mut Client) -> Vec<Rows> {
    ["task", "weight", "queue", "audit"]
        .into_iter()
        .map(|table| {
            let columns: String = one(
                client,
                "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
                 WHERE attrelid = ('harvest_fair.' || $1::text)::regclass AND attnum > 0 AND NOT attisdropped",
                &[&table],
            );
            let sql = format!(
                "SELECT count(*) || ' ' || md5(string_agg(r::text, '|' ORDER BY r::text))
                 FROM (SELECT {columns} FROM harvest_fair.{table}) r"
            );
            let digest = one(client, &sql, &[]);
            Rows { sql, digest }
        })
        .collect()
}

/// Calls what a worker, a producer and a DBA call; leaves two more tasks running.
fn exercise(client: &mut Client) {
    for sql in [
        "SELECT * FROM fair_state('q')",
        "SELECT * FROM fair_lag('q')",
        "SELECT * FROM fair_preview('q', 'w', 3)",
        "SELECT * FROM fair_weights('q')",
        "SELECT * FROM fair_queue('q')",
        "SELECT * FROM harvest_fair.stats",
    ] {
        let rows = client.query(sql, &[]);
        let rows = rows.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        assert!(!rows.is_empty(), "{sql} has no rows");
    }
    execute(
        client,
        "SELECT fair_set_weights('q', '{\"B\": 2}'); SELECT fair_clear_weight('q', 'B');
         SELECT fair_charge('q', 'B', 2); SELECT fair_prune('q', preview => true)",
    );
    let id = enqueue(client, "q", Some("A"));
    let before = running(client, "q");
    let tasks = claim(client, "q", "w", 4);
    assert_eq!(tasks.len(), 4);
    execute(
        client,
        &format!(
            "SELECT fair_extend({0}, {1}), fair_complete({0}::bigint, {1}::bigint, 2.5), fair_fail({2}, {3}, 'x')",
            tasks[0].id, tasks[0].lease, tasks[1].id, tasks[1].lease
        ),
    );
    assert_eq!(running(client, "q"), before + 2);
    assert!(one::<bool>(client, "SELECT fair_cancel($1)", &[&id]));
    assert!(one::<bool>(client, "SELECT fair_retry($1)", &[&id]));
}

#[test]
fn each_frozen_version_is_served_and_updates_to_what_a_fresh_install_is() {
    let fresh = Cluster::shared().database();
    let expected = facts(&mut fresh.connect());
    let current = current(&mut fresh.connect());
    assert!(expected.len() > 100, "found too little: {expected:#?}");
    let (prefix, versions) = with_frozen_scripts();
    let cluster = Cluster::start_on(prefix.environment(), Options::new());
    for version in versions {
        let db = cluster.empty_database();
        let mut client = db.connect_with(&format!(
            "CREATE EXTENSION harvest_fair VERSION '{version}'"
        ));
        fill(&mut client);
        // The library is newer than the functions and tables: they still fit.
        exercise(&mut client);
        let before = rows_of_all_tables(&mut client);
        execute(&mut client, "ALTER EXTENSION harvest_fair UPDATE");
        let now: String = one(
            &mut client,
            "SELECT extversion FROM pg_extension WHERE extname = 'harvest_fair'",
            &[],
        );
        assert_eq!(now, current);
        let difference = difference(&facts(&mut client), &expected);
        assert!(
            difference.is_empty(),
            "An update from {version} (-) is not what a fresh install is (+). If {version} has not been released, run \
             `make freeze`; else write an update script.\n{}",
            difference.join("\n")
        );
        for rows in before {
            let digest: String = one(&mut client, &rows.sql, &[]);
            assert_eq!(digest, rows.digest, "{}", rows.sql);
        }
        exercise(&mut client);
        // All but those that run: 10 of `fill` less three, and two of each exercise.
        let left = pending(&mut client, "q");
        execute(
            &mut client,
            r#"SELECT fair_configure('q', '{"key_max_running": null}')"#,
        );
        execute(
            &mut client,
            "UPDATE harvest_fair.task SET scheduled_at = now() WHERE state = 'pending'",
        );
        assert_eq!(drain(&mut client, "q", 7).len() as i64, left);
        assert_eq!(pending(&mut client, "paused"), 59);
    }
}

#[test]
fn a_cluster_goes_on_after_pg_upgrade_to_a_later_major_version() {
    let Some(bindir) = std::env::var_os("HF_PG_UPGRADE_TO") else {
        println!(
            "HF_PG_UPGRADE_TO names no later Postgres with the extension: pg_upgrade is not tested here"
        );
        return;
    };
    let old = Cluster::start(brisk_options());
    let later = old.environment().with_bindir(PathBuf::from(bindir));
    let db = old.database();
    let mut client = db.connect();
    fill(&mut client);
    flood(&mut client, "shares", "A", 100, "1 hour");
    flood(&mut client, "shares", "B", 100, "1 hour");
    execute(&mut client, "SELECT fair_set_weight('shares', 'A', 3)");
    let before = claims(&mut client, "shares", 21, 1);
    wait_until("the passes are written", PATIENCE, || {
        let sql = "SELECT count(*) = 2 FROM harvest_fair.key_state WHERE queue = 'shares' AND pass >= 5000000";
        one(&mut client, sql, &[])
    });
    let rows = rows_of_all_tables(&mut client);
    // Postgres 15.20 marks each column with an option that 18.6 does not know, so that 18.6 could not take any of its
    // clusters. Without the marks this one is like those of the releases before.
    execute(
        &mut client,
        "UPDATE pg_attribute SET attoptions = NULL WHERE attoptions::text LIKE '{pg_attver=%}'",
    );
    drop(client);
    old.stop(Shutdown::Fast);

    let new = old.upgraded(later, brisk_options());
    let mut client = new.connect_db(db.name());
    let version: String = one(&mut client, "SHOW server_version_num", &[]);
    assert!(version.starts_with(&later.major().to_string()), "{version}");
    for rows in rows {
        let digest: String = one(&mut client, &rows.sql, &[]);
        assert_eq!(digest, rows.digest, "{}", rows.sql);
    }
    let mut all = claims(&mut client, "shares", 99, 1);
    all.extend(before);
    assert_eq!(count(&all, "A"), 90, "claims at weight 3");
    exercise(&mut client);
    // Fresh statistics, vacuum and a restart find nothing odd.
    execute(&mut client, "VACUUM ANALYZE");
    drop(client);
    new.restart(Shutdown::Fast);
    let mut client = new.connect_db(db.name());
    all.extend(drain(&mut client, "shares", 7));
    assert_all_different(&all);
    assert_eq!(all.len(), 200);
}

#[test]
fn an_update_under_way_of_work_loses_nothing_and_shows_in_the_catalog() {
    let prefix = Prefix::with_extension();
    let current = current(&mut Cluster::shared().connect());
    let next = format!("{current}.next");
    // What a next version may bring: a column, an index, a setting of a function.
    prefix.write(
        &format!("harvest_fair--{current}--{next}.sql"),
        "ALTER TABLE harvest_fair.task ADD COLUMN note text;
         CREATE INDEX task_note ON harvest_fair.task (note);
         COMMENT ON COLUMN harvest_fair.task.note IS 'new';
         ALTER FUNCTION fair_weights(text) COST 7;",
    );
    let cluster = Cluster::start_on(prefix.environment(), Options::new());
    let db = cluster.database();
    let (mut client, mut worker, mut dba) = (db.connect(), db.connect(), db.connect());
    fill(&mut client);
    let held = claim_one(&mut worker, "q");
    let before = (facts(&mut client), rows_of_all_tables(&mut client));
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            harvest_fair_server_tests::claim_waiting(&mut worker, "empty", "w", 1, "60 s")
        });
        wait_until("the worker waits", PATIENCE, || {
            stat(&mut client, "empty", "waiting") == 1
        });
        execute(
            &mut dba,
            &format!("ALTER EXTENSION harvest_fair UPDATE TO '{next}'"),
        );
        enqueue(&mut client, "empty", Some("A"));
        waiting.join().expect("the worker is well")
    });
    assert_eq!(waiting.len(), 1);
    assert!(complete(&mut worker, &held));
    for rows in &before.1[1..] {
        assert_eq!(
            one::<String>(&mut client, &rows.sql, &[]),
            rows.digest,
            "{}",
            rows.sql
        );
    }
    let changes = difference(&before.0, &facts(&mut client));
    let about = |what: &str| {
        changes
            .iter()
            .filter(|change| change.contains(what))
            .count()
    };
    assert_eq!(
        (about("task 24 note"), about("task_note")),
        (1, 1),
        "{changes:#?}"
    );
    assert_eq!(
        (about("fair_weights"), changes.len()),
        (2, 4),
        "{changes:#?}"
    );
    exercise(&mut client);
}
