//! Workers that find nothing because of a policy: what wakes them, without help from a janitor, and what they cost.

use std::time::Instant;

use harvest_fair_server_tests::{Cluster, PATIENCE, claim, claim_one, flood};

use crate::policy_support::configure;
use crate::support::{execute, unattended, woken_by};

#[test]
fn a_raised_cap_wakes_who_waits() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    woken_by(&db, "sleeper", |client| {
        configure(client, "q", r#"{"key_max_running": 2}"#)
    });
}

#[test]
fn a_raised_rate_wakes_who_waits() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.001}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    woken_by(&db, "sleeper", |client| {
        configure(client, "q", r#"{"key_rate_limit": 20}"#)
    });
}

#[test]
fn a_raised_weight_scales_the_rate_of_its_key_at_once_and_wakes_who_waits() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 0.01}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    claim_one(&mut client, "q");
    woken_by(&db, "sleeper", |client| {
        execute(client, "SELECT fair_set_weight('q', 'A', 1000)")
    });
}

#[test]
fn a_token_that_an_abort_gives_back_wakes_who_waits() {
    let db = unattended().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    for settings in [
        r#"{"key_rate_limit": 0.001}"#,
        r#"{"key_rate_limit": null, "rate_limit": 0.001}"#,
    ] {
        configure(&mut client, "q", settings);
        flood(&mut client, "q", "A", 3, "1 hour");
        let mut open = other.transaction().unwrap();
        assert_eq!(claim(&mut open, "q", "w", 3).len(), 1, "{settings}");
        woken_by(&db, "sleeper", |_| open.rollback().unwrap());
        execute(&mut client, "DELETE FROM harvest_fair.task");
    }
}

#[test]
fn a_place_under_the_cap_that_an_abort_gives_back_wakes_who_waits() {
    let db = unattended().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    flood(&mut client, "q", "A", 3, "1 hour");
    let mut open = other.transaction().unwrap();
    assert_eq!(claim(&mut open, "q", "w", 3).len(), 1);
    woken_by(&db, "sleeper", |_| open.rollback().unwrap());
}

#[test]
fn a_worker_of_several_queues_wakes_when_a_token_comes_back() {
    let db = unattended().database();
    let mut client = db.connect();
    configure(&mut client, "a", r#"{"rate_limit": 1}"#);
    flood(&mut client, "a", "A", 3, "1 hour");
    claim_one(&mut client, "a");
    let start = Instant::now();
    let rows = client
        .query(
            "SELECT id FROM fair_claim(ARRAY['a', 'b'], 'w', 1, '10 min')",
            &[],
        )
        .unwrap();
    assert_eq!(rows.len(), 1);
    let waited = start.elapsed();
    assert!(waited < PATIENCE, "{waited:?}");
}

#[test]
fn empty_claims_on_paused_capped_and_limited_queues_write_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (queue, settings) in [
        ("paused", r#"{"paused": true}"#),
        ("capped", r#"{"key_max_running": 1}"#),
        ("limited", r#"{"key_rate_limit": 0.001}"#),
    ] {
        configure(&mut client, queue, settings);
        flood(&mut client, queue, "A", 5, "1 hour");
        claim(&mut client, queue, "w", 5);
        let mut transaction = client.transaction().unwrap();
        for _ in 0..3 {
            assert!(claim(&mut transaction, queue, "w", 5).is_empty(), "{queue}");
        }
        let assigned: Option<String> = transaction
            .query_one("SELECT pg_current_xact_id_if_assigned()::text", &[])
            .unwrap()
            .get(0);
        assert_eq!(assigned, None, "{queue}");
        transaction.commit().unwrap();
    }
}
