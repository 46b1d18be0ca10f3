//! Weight overrides: what they bend, when, and what limits them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use harvest_fair_server_tests::{Cluster, claim_one, count, expect_error, flood, one, sqlstate_of};

use crate::support::{assert_near, claims, execute, state};

#[test]
fn a_new_weight_acts_on_the_whole_backlog_at_the_next_claim_of_another_session() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 1000, "1 hour");
    flood(&mut client, "q", "B", 1000, "1 hour");
    let before = claims(&mut client, "q", 100, 1);
    assert_near(count(&before, "A"), 50, 1, "claims of A at equal weights");
    execute(&mut admin, "SELECT fair_set_weight('q', 'A', 9)");
    let heavy = claims(&mut client, "q", 100, 1);
    assert_near(count(&heavy, "A"), 90, 2, "claims of A at weight 9");
    execute(&mut admin, "SELECT fair_clear_weight('q', 'A')");
    let after = claims(&mut client, "q", 100, 1);
    assert_near(
        count(&after, "A"),
        50,
        2,
        "claims of A with its weight cleared",
    );
}

#[test]
fn a_claim_tells_the_weight_in_force() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight) SELECT 'q', 'A', 2 FROM generate_series(1, 5)",
    );
    assert_eq!(claim_one(&mut client, "q").weight, 2.0);
    assert_eq!(state(&mut client, "q", "A").pass, 0.5);
    execute(&mut client, "SELECT fair_set_weight('q', 'A', 4)");
    assert_eq!(claim_one(&mut client, "q").weight, 4.0);
    assert_eq!(state(&mut client, "q", "A").pass, 0.75);
    execute(&mut client, "SELECT fair_clear_weight('q', 'A')");
    assert_eq!(claim_one(&mut client, "q").weight, 2.0);
}

#[test]
fn the_default_key_always_weighs_one() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight) SELECT 'q', '', 100 FROM generate_series(1, 5)",
    );
    assert_eq!(claim_one(&mut client, "q").weight, 1.0);
    assert_eq!(state(&mut client, "q", "").pass, 1.0);
}

#[test]
fn a_rolled_back_weight_never_counted() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 100, "1 hour");
    flood(&mut client, "q", "B", 100, "1 hour");
    let mut transaction = admin.transaction().unwrap();
    transaction
        .batch_execute("SELECT fair_set_weight('q', 'A', 9)")
        .unwrap();
    let during = claims(&mut client, "q", 20, 1);
    assert_near(count(&during, "A"), 10, 1, "claims of A before the commit");
    transaction.rollback().unwrap();
    let after = claims(&mut client, "q", 20, 1);
    assert_near(count(&after, "A"), 10, 1, "claims of A after the rollback");
}

#[test]
fn weights_of_one_queue_do_not_bend_another() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('other', 'A', 9)");
    flood(&mut client, "q", "A", 100, "1 hour");
    flood(&mut client, "q", "B", 100, "1 hour");
    assert_near(
        count(&claims(&mut client, "q", 20, 1), "A"),
        10,
        1,
        "claims of A",
    );
}

#[test]
fn weights_are_listed_with_who_set_them_and_why() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'B', 0.5, 'slow payer');
         SELECT fair_set_weight('q', 'A', 2);
         SELECT fair_set_weight('q', 'A', 3, 'upgraded');
         SELECT fair_set_weight('other', 'A', 4)",
    );
    let listed: Vec<String> = client
        .query(
            "SELECT concat_ws('|', queue, fairness_key, weight, reason, updated_by)
             FROM fair_weights('q') ORDER BY fairness_key",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(
        listed,
        ["q|A|3|upgraded|postgres", "q|B|0.5|slow payer|postgres"]
    );
    execute(&mut client, "SELECT fair_clear_weight('q', 'A')");
    let left: i64 = one(&mut client, "SELECT count(*) FROM fair_weights('q')", &[]);
    assert_eq!(left, 1);
}

#[test]
fn very_light_and_very_heavy_keys_are_both_served() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (key, weight) in [("light", 0.001), ("heavy", 1000.0)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let tasks = claims(&mut client, "q", 100, 1);
    assert_eq!(count(&tasks, "light"), 1);
    // The light key has paid a thousand units; the heavy one a thousandth for each of its claims.
    assert_eq!(state(&mut client, "q", "light").pass, 1000.0);
    assert!((state(&mut client, "q", "heavy").pass - 0.099).abs() < 1e-9);
}

#[test]
fn weights_of_six_hundred_and_a_thousand_share_three_to_five() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (key, weight) in [("A", 600), ("B", 1000)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 400, "1 hour");
    }
    let tasks = claims(&mut client, "q", 400, 1);
    assert_near(count(&tasks, "A"), 150, 1, "claims at weight 600");
}

#[test]
fn a_queue_has_at_most_a_thousand_overrides() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'k' || i, 2) FROM generate_series(1, 1000) i",
    );
    let refusal = expect_error(
        &mut client,
        "SELECT fair_set_weight('q', 'one more', 2)",
        "54000",
        "1000",
        "",
    );
    assert!(!refusal.hint.is_empty(), "{refusal:?}");
    execute(&mut client, "SELECT fair_set_weight('q', 'k7', 3)");
    execute(
        &mut client,
        "SELECT fair_set_weight('other', 'one more', 2)",
    );
    execute(
        &mut client,
        "SELECT fair_clear_weight('q', 'k8'); SELECT fair_set_weight('q', 'one more', 2)",
    );
    let overrides: i64 = one(&mut client, "SELECT count(*) FROM fair_weights('q')", &[]);
    assert_eq!(overrides, 1000);
}

#[test]
fn concurrent_writers_cannot_pass_the_cap_of_overrides() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'k' || i, 2) FROM generate_series(1, 960) i",
    );
    let set = AtomicUsize::new(0);
    thread::scope(|scope| {
        for writer in 0..8 {
            let (db, set) = (&db, &set);
            scope.spawn(move || {
                let mut client = db.connect();
                for i in 0..10 {
                    let sql = format!("SELECT fair_set_weight('q', 'w{writer} {i}', 2)");
                    match client.batch_execute(&sql) {
                        Ok(()) => {
                            set.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert_eq!(sqlstate_of(&error), "54000", "{error:?}"),
                    }
                }
            });
        }
    });
    assert_eq!(set.into_inner(), 40);
    let overrides: i64 = one(&mut client, "SELECT count(*) FROM fair_weights('q')", &[]);
    assert_eq!(overrides, 1000);
}

#[test]
fn weights_outlive_a_restart() {
    let cluster = Cluster::start(harvest_fair_server_tests::Options::new());
    let db = cluster.database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 3)");
    flood(&mut client, "q", "A", 400, "1 hour");
    flood(&mut client, "q", "B", 400, "1 hour");
    cluster.restart(harvest_fair_server_tests::Shutdown::Fast);
    let mut client = db.connect();
    let tasks = claims(&mut client, "q", 80, 1);
    assert_near(count(&tasks, "A"), 60, 1, "claims at weight 3");
}
