//! What the janitor says in the server's log: once for each state, with the queue's name and a hint.

use harvest_fair_server_tests::{Cluster, Options, PATIENCE, claim, claim_one, flood, wait_until};

use crate::support::{at_best, brisk_options, claims, differences, execute, stat};

/// Lines of the log that hold all of `words`.
fn lines(cluster: &Cluster, words: &[&str]) -> usize {
    let log = cluster.log();
    let holds = |line: &&str| words.iter().all(|word| line.contains(word));
    log.lines().filter(holds).count()
}

#[test]
fn a_sweep_that_mends_says_so_once() {
    let mut intervals = ["2s", "6s", "15s", "40s"].iter();
    at_best(|| {
        let interval = intervals.next().unwrap();
        let cluster = Cluster::start(Options::new().set("harvest_fair.sweep_interval", interval));
        let db = cluster.database();
        let mut client = db.connect();
        flood(&mut client, "q", "a", 3, "1 hour");
        claim(&mut client, "q", "w", 1);
        // From one sweep to the next there is always something to mend, unless the test is kept waiting for that long.
        for round in 1..=2i64 {
            execute(
                &mut client,
                &format!(
                    "SET session_replication_role = replica;
                     INSERT INTO harvest_fair.task (queue, fairness_key, priority) SELECT 'q', {round} || 'k' || i, 3 FROM generate_series(1, 5) i;
                     RESET session_replication_role"
                ),
            );
            wait_until("the sweep has found them", PATIENCE, || {
                stat(&mut client, "q", "missed_wakeups") == 5 * round
            });
        }
        wait_until("the log says so", PATIENCE, || {
            lines(&cluster, &["LOG", "has mended queue \"q\""]) > 0
        });
        assert!(lines(&cluster, &["HINT", "session_replication_role"]) > 0);
        match lines(&cluster, &["has mended queue \"q\""]) {
            1 => Ok(()),
            n => Err(format!("said {n} times")),
        }
    });
}

#[test]
fn virtual_time_that_starts_again_is_in_the_log_and_changes_nothing() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'a', 0.001)");
    flood(&mut client, "q", "a", 9, "1 hour");
    execute(
        &mut client,
        "SELECT fair_charge('q', 'a', 1e9), fair_charge('q', 'a', 1e9)",
    );
    assert_eq!(claims(&mut client, "q", 3, 1).len(), 3);
    let line = ["LOG", "virtual time of queue \"q\" starts again at 0"];
    wait_until("the log says so", PATIENCE, || lines(&cluster, &line) > 0);
    assert_eq!(differences(&mut client), [""; 0]);
    claim_one(&mut client, "q");
    assert_eq!(lines(&cluster, &line), 1);
}

#[test]
fn a_storm_of_leases_that_run_out_is_one_warning() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 200, "1 hour");
    for _ in 0..3 {
        assert_eq!(claim(&mut client, "q", "w", 60).len(), 60);
        execute(
            &mut client,
            "UPDATE harvest_fair.task SET lease_until = now() WHERE state = 'running'",
        );
        wait_until("they are taken back", PATIENCE, || {
            harvest_fair_server_tests::running(&mut client, "q") == 0
        });
    }
    let line = ["WARNING", "leases of queue \"q\" have run out"];
    wait_until("the log says so", PATIENCE, || lines(&cluster, &line) > 0);
    assert_eq!(lines(&cluster, &line), 1);
    assert!(lines(&cluster, &["HINT", "fair_extend"]) > 0);
}
