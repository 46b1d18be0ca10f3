//! pg_dump and restore.

use std::process::Stdio;

use harvest_fair_server_tests::{
    Cluster, Database, claim, complete, count, enqueue, flood, one, pending,
};
use postgres::Client;

use crate::policy_support::{audit, configure, setting};
use crate::support::{assert_near, claims, drain, execute};

/// pg_dump with these options, restored by psql.
#[track_caller]
pub fn dump_and_restore(old: &Database, new: &Database, options: &[&str]) {
    let cluster = old.cluster();
    let environment = cluster.environment();
    let mut dump = environment
        .command(environment.program("pg_dump"))
        .args(options)
        .args(["-U", "postgres", "-h"])
        .arg(cluster.socket_dir())
        .arg(old.name())
        .stdout(Stdio::piped())
        .spawn()
        .expect("pg_dump can be started");
    let restore = environment
        .command(environment.program("psql"))
        .args(["-X", "-q", "-o", "/dev/null", "-v", "ON_ERROR_STOP=1"])
        .args(["-U", "postgres", "-h"])
        .arg(cluster.socket_dir())
        .arg(new.name())
        .stdin(dump.stdout.take().expect("its output is a pipe"))
        .status()
        .expect("psql can be started");
    assert!(
        dump.wait().expect("pg_dump ends").success() && restore.success(),
        "{options:?}"
    );
}

/// 201 tasks with a weight, of which 20 have been claimed: 19 run and one is completed. Returns the id of a parent that
/// is gone.
fn fill(client: &mut Client) -> i64 {
    execute(client, "SELECT fair_set_weight('q', 'A', 3, 'pays more')");
    flood(client, "q", "A", 100, "1 hour");
    flood(client, "q", "B", 100, "1 hour");
    let parent = enqueue(client, "q", Some("C"));
    execute(
        client,
        &format!("SELECT fair_enqueue('q', parent_id => {parent}, priority => 5)"),
    );
    execute(
        client,
        &format!("DELETE FROM harvest_fair.task WHERE id = {parent}"),
    );
    let running = claims(client, "q", 20, 1);
    assert!(complete(client, &running[0]));
    parent
}

/// What `fill` made is all there in another database, and the queue goes on from it.
fn assert_restored(old: &mut Client, new: &mut Client, parent: i64) {
    let content = "SELECT md5(string_agg(t::text, '|' ORDER BY id)) FROM harvest_fair.task t";
    assert_eq!(
        one::<String>(new, content, &[]),
        one::<String>(old, content, &[])
    );
    let reason: String = one(new, "SELECT reason FROM fair_weights('q')", &[]);
    assert_eq!(reason, "pays more");
    let tasks = claims(new, "q", 80, 1);
    assert_near(count(&tasks, "A"), 60, 2, "claims at weight 3");
    // A new task gets an id that no old one has.
    let id = enqueue(new, "q", Some("new"));
    assert!(id > parent + 1);
    assert_eq!(drain(new, "q", 50).len(), 201 - 20 - 80 + 1);
}

#[test]
fn a_restored_dump_has_every_task_and_weight_and_goes_on() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    let mut client = old.connect();
    let parent = fill(&mut client);
    dump_and_restore(&old, &new, &[]);
    assert_restored(&mut client, &mut new.connect(), parent);
}

#[test]
fn a_dump_of_data_only_can_be_restored_where_the_extension_and_its_queue_are_in_use() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.database());
    let mut client = old.connect();
    let parent = fill(&mut client);
    let mut worker = new.connect();
    assert!(claim(&mut worker, "q", "w", 1).is_empty());
    dump_and_restore(&old, &new, &["--data-only"]);
    assert_eq!(audit(&mut worker), audit(&mut client));
    assert_restored(&mut client, &mut worker, parent);
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
    dump_and_restore(&old, &new, &[]);

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

#[test]
fn a_dump_of_the_schema_alone_makes_an_empty_queue() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    fill(&mut old.connect());
    dump_and_restore(&old, &new, &["--schema-only"]);
    let mut restored = new.connect();
    assert_eq!(pending(&mut restored, "q"), 0);
    let id = enqueue(&mut restored, "q", None);
    assert_eq!(drain(&mut restored, "q", 1)[0].id, id);
}
