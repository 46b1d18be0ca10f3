//! A dump carries the policy along.

use std::process::Stdio;

use harvest_fair_server_tests::{Cluster, claim, flood};

use crate::policy_support::{audit, configure, setting};
use crate::support::execute;

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
