//! A standby, and what becomes of the queue when it is promoted.

use harvest_fair_server_tests::{
    Cluster, PATIENCE, Shutdown, count, expect_error, flood, one, wait_until,
};

use crate::support::{assert_all_different, assert_near, brisk_options, claims, drain, execute};

#[test]
fn a_promoted_standby_goes_on_where_the_primary_was() {
    let primary = Cluster::start(brisk_options());
    let db = primary.database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 3)");
    flood(&mut client, "q", "A", 100, "1 hour");
    flood(&mut client, "q", "B", 100, "1 hour");
    let standby = primary.standby(brisk_options());
    let before = claims(&mut client, "q", 40, 1);
    wait_until("the passes are written", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) > 0 FROM harvest_fair.key_state WHERE pass >= 10000000",
            &[],
        )
    });
    let written: String = one(&mut client, "SELECT pg_current_wal_lsn()::text", &[]);
    let mut reader = standby.connect_db(db.name());
    wait_until("the standby has caught up", PATIENCE, || {
        one(
            &mut reader,
            "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn",
            &[&written],
        )
    });

    expect_error(
        &mut reader,
        "SELECT fair_claim('q', 'w', 1)",
        "25006",
        "",
        "",
    );
    expect_error(&mut reader, "SELECT fair_enqueue('q')", "25006", "", "");
    expect_error(
        &mut reader,
        "SELECT * FROM harvest_fair.check()",
        "25006",
        "harvest_fair.check",
        "Connect to the primary",
    );
    let running: i64 = one(
        &mut reader,
        "SELECT count(*) FROM harvest_fair.task WHERE state = 'running'",
        &[],
    );
    assert_eq!(running, 40);
    // What is looked at there must not be on the board when the standby is promoted.
    for call in [
        "fair_state('q')",
        "fair_lag('q')",
        "fair_chart('q')",
        "fair_prune('q')",
        "fair_charge('q', 'A')",
        "fair_preview('q', 'w', 1)",
    ] {
        let (function, _) = call.split_once('(').unwrap();
        let sql = format!("SELECT FROM {call}");
        expect_error(
            &mut reader,
            &sql,
            "25006",
            function,
            "Connect to the primary",
        );
    }
    for view in ["stats", "tenant_stats"] {
        let sql = format!("SELECT count(*) FROM harvest_fair.{view}");
        assert_eq!(one::<i64>(&mut reader, &sql, &[]), 0, "{view}");
    }

    drop(client);
    primary.stop(Shutdown::Immediate);
    standby.promote();
    let mut client = standby.connect_db(db.name());
    let mut all = claims(&mut client, "q", 40, 1);
    assert_near(count(&all, "A"), 30, 1, "claims at weight 3");
    all.extend(before);
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'new')",
    );
    all.extend(drain(&mut client, "q", 50));
    assert_all_different(&all);
    assert_eq!(all.len(), 201);
    primary.start_server();
}
