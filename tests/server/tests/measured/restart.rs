//! A large backlog after a restart.

use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Cluster, Options, Shutdown, claim, claim_one};

use crate::turn;

#[test]
fn a_million_rows_of_twenty_thousand_keys_can_be_claimed_within_a_second_of_a_restart() {
    let _turn = turn();
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 32_768)
            .set("max_wal_size", "8GB")
            .set("autovacuum", "off"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    client
        .batch_execute(
            "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
             SELECT 'q', 'k' || i % 20000, now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 1000000) i",
        )
        .unwrap();
    claim_one(&mut client, "q");
    client.batch_execute("CHECKPOINT").unwrap();
    drop(client);
    for how in [Shutdown::Smart, Shutdown::Fast, Shutdown::Immediate] {
        cluster.restart(how);
        let up = Instant::now();
        let mut client = db.connect();
        let tasks = claim(&mut client, "q", "w", 1);
        let taken = up.elapsed();
        println!(
            "first claim on 1,000,000 rows of 20,000 keys after a restart ({how:?}): {taken:?}"
        );
        assert_eq!(tasks.len(), 1, "{how:?}");
        assert!(taken < Duration::from_secs(1), "{how:?}: {taken:?}");
        assert_eq!(claim(&mut client, "q", "w", 1000).len(), 1000);
    }
}
