//! pg_dump and restore.

use std::process::Stdio;

use harvest_fair_server_tests::{Cluster, count, enqueue, flood, one};

use crate::support::{assert_near, claims, drain, execute};

#[test]
fn a_restored_dump_has_every_task_and_weight_and_goes_on() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    let mut client = old.connect_with("SELECT fair_set_weight('q', 'A', 3, 'pays more')");
    flood(&mut client, "q", "A", 100, "1 hour");
    flood(&mut client, "q", "B", 100, "1 hour");
    let parent = enqueue(&mut client, "q", Some("C"));
    execute(
        &mut client,
        &format!("SELECT fair_enqueue('q', parent_id => {parent}, priority => 5)"),
    );
    // The parent is gone when the child is restored.
    execute(
        &mut client,
        &format!("DELETE FROM harvest_fair.task WHERE id = {parent}"),
    );
    let running = claims(&mut client, "q", 20, 1);
    assert!(harvest_fair_server_tests::complete(
        &mut client,
        &running[0]
    ));

    let environment = cluster.environment();
    let mut dump = environment
        .command(environment.program("pg_dump"))
        .args(["-U", "postgres", "-h"])
        .arg(cluster.socket_dir())
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
    assert!(dump.wait().unwrap().success() && restore.success());

    let mut restored = new.connect();
    let content = "SELECT md5(string_agg(t::text, '|' ORDER BY id)) FROM harvest_fair.task t";
    assert_eq!(
        one::<String>(&mut restored, content, &[]),
        one::<String>(&mut client, content, &[])
    );
    let reason: String = one(&mut restored, "SELECT reason FROM fair_weights('q')", &[]);
    assert_eq!(reason, "pays more");
    let tasks = claims(&mut restored, "q", 80, 1);
    assert_near(count(&tasks, "A"), 60, 2, "claims at weight 3");
    // A new task gets an id that no old one has.
    let id = enqueue(&mut restored, "q", Some("new"));
    assert!(id > parent + 1);
    assert_eq!(drain(&mut restored, "q", 50).len(), 201 - 20 - 80 + 1);
}
