//! A dump carries the policy along.

use std::process::Stdio;

use harvest_fair_server_tests::{Cluster, Database, claim, flood, one};
use postgres::Client;

use crate::policy_support::{audit, configure, setting};
use crate::support::{assert_all_different, assert_near, claims, drain, execute};

/// Copies a database by pg_dump and psql.
#[track_caller]
fn dump(old: &Database, new: &Database, options: &[&str]) {
    let cluster = old.cluster();
    let environment = cluster.environment();
    let mut dump = environment
        .command(environment.program("pg_dump"))
        .args(["-U", "postgres", "-h"])
        .arg(cluster.socket_dir())
        .args(options)
        .arg(old.name())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let restore = environment
        .command(environment.program("psql"))
        .args([
            "-X",
            "-q",
            "-o",
            "/dev/null",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "postgres",
            "-h",
        ])
        .arg(cluster.socket_dir())
        .arg(new.name())
        .stdin(dump.stdout.take().unwrap())
        .status()
        .unwrap();
    assert!(
        dump.wait().unwrap().success() && restore.success(),
        "{options:?}"
    );
}

#[test]
fn a_restored_dump_has_the_settings_of_queues_in_force_and_the_audit() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    let mut client = old.connect();
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": 2, "group_separator": "/"}"#,
    );
    execute(&mut client, "SELECT fair_pause('paused', 'for the dump')");
    for queue in ["q", "paused"] {
        flood(&mut client, queue, "A", 10, "1 hour");
    }
    // One is running when the dump is made.
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    dump(&old, &new, &[]);

    let mut restored = new.connect();
    assert_eq!(audit(&mut restored), audit(&mut client));
    for field in ["key_max_running", "group_separator"] {
        assert_eq!(
            setting(&mut restored, "q", field),
            setting(&mut client, "q", field)
        );
    }
    assert_eq!(claim(&mut restored, "q", "w", 10).len(), 1);
    assert!(claim(&mut restored, "paused", "w", 10).is_empty());
    // The audit's numbers go on where they were.
    execute(&mut restored, "SELECT fair_resume('paused')");
    assert_eq!(audit(&mut restored).len(), audit(&mut client).len() + 1);
}

/// Everything of the policy that a dump carries.
#[track_caller]
fn policy(client: &mut Client) -> String {
    one(
        client,
        "SELECT concat((SELECT jsonb_agg(a ORDER BY id) FROM harvest_fair.audit a),
                       (SELECT jsonb_agg(w ORDER BY queue, fairness_key) FROM harvest_fair.weight w),
                       (SELECT jsonb_agg(q ORDER BY queue) FROM harvest_fair.queue q))",
        &[],
    )
}

#[test]
fn no_way_to_restore_makes_audit_rows_up() {
    let cluster = Cluster::shared();
    let old = cluster.database();
    let mut client = old.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'A', 2, 'by function');
         INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'B', 3);
         SELECT fair_pause('q');
         INSERT INTO harvest_fair.queue (queue, settings) VALUES ('r', '{\"lease\": 9}')",
    );
    let before = policy(&mut client);
    for (options, into_empty) in [
        (&[][..], true),
        (&["--inserts"], true),
        (&["--data-only"], false),
        (&["--data-only", "--column-inserts"], false),
        (&["--data-only", "--disable-triggers"], false),
    ] {
        let new = if into_empty {
            cluster.empty_database()
        } else {
            cluster.database()
        };
        dump(&old, &new, options);
        let mut restored = new.connect();
        assert_eq!(policy(&mut restored), before, "{options:?}");
        execute(&mut restored, "SELECT fair_clear_weight('q', 'A')");
        assert_eq!(audit(&mut restored).len(), audit(&mut client).len() + 1);
    }
}

#[test]
fn a_restored_queue_with_groups_goes_on_by_groups_and_has_every_task() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    let mut client = old.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "a/p": 2}')"#,
    );
    for key in ["a/p", "a/q", "v"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    assert_eq!(claims(&mut client, "q", 5, 8).len(), 40);
    dump(&old, &new, &[]);

    let mut restored = new.connect();
    let groups: String = one(
        &mut restored,
        "SELECT string_agg(concat_ws(' ', fairness_key, fairness_group, group_weight), ', ' ORDER BY fairness_key)
         FROM fair_state('q')",
        &[],
    );
    assert_eq!(groups, "a/p a 3, a/q a 3, v v 1");
    let mut tasks = claims(&mut restored, "q", 80, 1);
    let of = |key: &str| tasks.iter().filter(|task| task.key == key).count();
    for (key, share) in [("a/p", 40), ("a/q", 20), ("v", 20)] {
        assert_near(of(key), share, 1, key);
    }
    tasks.extend(drain(&mut restored, "q", 100));
    assert_all_different(&tasks);
    assert_eq!(tasks.len(), 560);
}
