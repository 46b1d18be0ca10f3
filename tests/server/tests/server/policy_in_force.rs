//! When the settings of a queue count, and for what; and the pause.

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, claim_one, complete, enqueue, expect_error, flood,
    one, pending, wait_until,
};

use crate::policy_support::{claim_by_id, configure, lease_of, owned, setting, waiting_for};
use crate::support::{brisk, execute, unattended, woken_by};

#[test]
fn a_setting_written_by_plain_sql_is_checked_and_counts_alike() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    execute(
        &mut admin,
        r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{"paused": true}')"#,
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    expect_error(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{"pause": true}' WHERE queue = 'q'"#,
        "22023",
        "\"pause\"",
        "paused",
    );
    execute(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{}'"#,
    );
    claim_one(&mut client, "q");
    execute(
        &mut admin,
        r#"UPDATE harvest_fair.queue SET settings = '{"paused": true}'"#,
    );
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(&mut admin, "DELETE FROM harvest_fair.queue");
    claim_one(&mut client, "q");
}

#[test]
fn truncating_the_settings_restores_every_default() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    for queue in ["q", "r"] {
        flood(&mut client, queue, "A", 3, "1 hour");
        execute(&mut admin, &format!("SELECT fair_pause('{queue}')"));
        assert!(claim(&mut client, queue, "w", 1).is_empty());
    }
    execute(&mut admin, "TRUNCATE harvest_fair.queue");
    claim_one(&mut client, "q");
    claim_one(&mut client, "r");
}

#[test]
fn a_setting_that_was_rolled_back_never_counted() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 5, "1 hour");
    let mut transaction = admin.transaction().unwrap();
    transaction.batch_execute("SELECT fair_pause('q')").unwrap();
    claim_one(&mut client, "q");
    transaction.rollback().unwrap();
    claim_one(&mut client, "q");
    assert_eq!(
        setting(&mut admin, "q", "paused"),
        owned("false", "default")
    );
    execute(
        &mut admin,
        "BEGIN; SAVEPOINT s; SELECT fair_pause('q'); ROLLBACK TO s; COMMIT",
    );
    claim_one(&mut client, "q");
}

#[test]
fn settings_outlive_a_restart_and_a_crash() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": 2, "lease": "90 s"}"#,
    );
    flood(&mut client, "q", "A", 5, "1 hour");
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        cluster.restart(how);
        let mut client = db.connect();
        assert_eq!(
            setting(&mut client, "q", "key_max_running"),
            owned("2", "set")
        );
        // One is running from before.
        let more = claim(&mut client, "q", "w", 5);
        assert_eq!(more.len(), 1, "{how:?}");
        let lease = lease_of(&mut client, more[0].id);
        assert!((lease - 90.0).abs() < 0.001, "a lease of {lease} s");
        assert!(complete(&mut client, &more[0]));
    }
}

#[test]
fn a_queue_s_lease_is_that_of_its_claims_and_of_no_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '70s'");
    configure(&mut client, "q", r#"{"lease": "7 s"}"#);
    for (queue, expected) in [("q", 7.0), ("other", 70.0)] {
        flood(&mut client, queue, "A", 3, "1 hour");
        let id = claim_one(&mut client, queue).id;
        let by_id: i64 = one(
            &mut client,
            "SELECT id FROM harvest_fair.task WHERE queue = $1 AND state = 'pending' LIMIT 1",
            &[&queue],
        );
        assert_eq!(claim_by_id(&mut client, by_id, "w").len(), 1);
        for id in [id, by_id] {
            let lease = lease_of(&mut client, id);
            assert!(
                (lease - expected).abs() < 0.001,
                "{queue}: a lease of {lease} s"
            );
        }
    }
}

#[test]
fn a_queue_s_retention_overrides_the_server_s() {
    let db = brisk().database();
    let mut client = db.connect();
    configure(&mut client, "short", r#"{"retention": "1 s"}"#);
    // Infinite intervals came with Postgres 17.
    let infinite = one(
        &mut client,
        "SELECT current_setting('server_version_num')::integer >= 170000",
        &[],
    );
    let for_ever = if infinite { "infinity" } else { "1000 years" };
    configure(
        &mut client,
        "for ever",
        &format!(r#"{{"retention": "{for_ever}"}}"#),
    );
    for queue in ["short", "long", "for ever"] {
        flood(&mut client, queue, "A", 2, "1 hour");
        let task = claim_one(&mut client, queue);
        assert!(complete(&mut client, &task));
    }
    wait_until(
        "the finished task of the one queue is gone",
        PATIENCE,
        || {
            one(
                &mut client,
                "SELECT count(*) = 1 FROM harvest_fair.task WHERE queue = 'short'",
                &[],
            )
        },
    );
    let kept: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.task WHERE queue IN ('long', 'for ever')",
        &[],
    );
    assert_eq!(kept, 4);
    assert_eq!(pending(&mut client, "short"), 1);
}

#[test]
fn a_paused_queue_hands_out_nothing_and_says_so_until_it_is_resumed() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "other", "A", 10, "1 hour");
    let before = claim_one(&mut client, "q");
    assert!(one::<bool>(
        &mut admin,
        "SELECT fair_pause('q', 'database upgrade')",
        &[]
    ));
    assert!(
        !one::<bool>(&mut admin, "SELECT fair_pause('q')", &[]),
        "paused twice"
    );
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert_eq!(waiting_for(&mut client, "q", "A"), "paused");
    let eligible: bool = one(
        &mut client,
        "SELECT bool_or(eligible) FROM fair_state('q')",
        &[],
    );
    assert!(!eligible);
    let waiting: i64 = one(
        &mut client,
        "SELECT id FROM harvest_fair.task WHERE queue = 'q' AND state = 'pending' LIMIT 1",
        &[],
    );
    assert!(claim_by_id(&mut client, waiting, "w").is_empty());
    // Others go on, and so does what runs already, and enqueueing.
    claim_one(&mut client, "other");
    assert!(complete(&mut client, &before));
    enqueue(&mut client, "q", Some("B"));
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    assert!(one::<bool>(&mut admin, "SELECT fair_resume('q')", &[]));
    assert!(
        !one::<bool>(&mut admin, "SELECT fair_resume('q')", &[]),
        "resumed twice"
    );
    assert_eq!(waiting_for(&mut client, "q", "A"), "-");
    assert_eq!(claim(&mut client, "q", "w", 20).len(), 10);
}

#[test]
fn each_key_s_reason_to_wait_is_shown() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    flood(&mut client, "q", "future", 1, "-1 hour");
    assert_eq!(waiting_for(&mut client, "q", "A"), "-");
    claim_one(&mut client, "q");
    assert_eq!(waiting_for(&mut client, "q", "A"), "cap");
    assert_eq!(waiting_for(&mut client, "q", "future"), "future");
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": null, "key_rate_limit": 0.001}"#,
    );
    flood(&mut client, "q", "B", 3, "1 hour");
    // A's bucket is new with the limit: full for one claim.
    claim(&mut client, "q", "w", 5);
    for key in ["A", "B"] {
        assert_eq!(waiting_for(&mut client, "q", key), "rate", "{key}");
    }
    execute(&mut client, "SELECT fair_pause('q')");
    assert_eq!(waiting_for(&mut client, "q", "B"), "paused");
    configure(&mut client, "slow", r#"{"rate_limit": 0.001}"#);
    flood(&mut client, "slow", "A", 3, "1 hour");
    claim_one(&mut client, "slow");
    assert_eq!(waiting_for(&mut client, "slow", "A"), "rate");
}

#[test]
fn a_worker_that_waits_on_a_paused_queue_wakes_when_it_is_resumed() {
    let db = unattended().database();
    let mut admin = db.connect();
    flood(&mut admin, "q", "A", 1, "1 hour");
    execute(&mut admin, "SELECT fair_pause('q')");
    woken_by(&db, "w", |admin| execute(admin, "SELECT fair_resume('q')"));
}

#[test]
fn a_change_of_settings_cannot_be_prepared() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, "BEGIN; SELECT fair_pause('q')");
    expect_error(
        &mut client,
        "PREPARE TRANSACTION 'policy'",
        "0A000",
        "prepare",
        "",
    );
    execute(&mut client, "ROLLBACK");
    assert_eq!(
        setting(&mut client, "q", "paused"),
        owned("false", "default")
    );
}
