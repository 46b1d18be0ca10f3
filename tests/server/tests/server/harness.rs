//! The cluster harness itself, without the extension.

use harvest_fair_server_tests::{Cluster, Options, Shutdown, one, pid_of};

fn bare() -> Cluster {
    Cluster::start(Options::new().without_preload())
}

#[test]
fn a_cluster_keeps_its_rows_over_every_kind_of_restart() {
    let cluster = bare();
    cluster
        .connect()
        .batch_execute("CREATE TABLE kept (i int)")
        .unwrap();
    for (restarts, how) in [Shutdown::Smart, Shutdown::Fast, Shutdown::Immediate]
        .into_iter()
        .enumerate()
    {
        cluster.restart(how);
        let mut client = cluster.connect();
        let rows: i64 = one(&mut client, "SELECT count(*) FROM kept", &[]);
        assert_eq!(rows, restarts as i64);
        client.batch_execute("INSERT INTO kept VALUES (1)").unwrap();
    }
}

#[test]
fn a_cluster_recovers_by_itself_when_a_backend_is_killed() {
    let cluster = bare();
    let witness = cluster.connect();
    let mut victim = cluster.connect();
    cluster.kill_9(pid_of(&mut victim));
    cluster.wait_for_recovery(witness);
    assert!(victim.batch_execute("SELECT 1").is_err());
    assert!(cluster.log().contains("was terminated by signal 9"));
}

#[test]
fn a_dropped_cluster_leaves_nothing_behind() {
    let cluster = bare();
    let (data, sockets) = (cluster.data(), cluster.socket_dir().to_owned());
    assert!(data.exists() && sockets.exists());
    drop(cluster);
    assert!(!data.exists() && !sockets.exists());
}
