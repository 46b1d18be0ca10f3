//! Bands: new starts, which let continuations pass.

use harvest_fair_server_tests::{Cluster, claim, claim_one, one};
use postgres::{Client, GenericClient};

use crate::policy_support::configure;
use crate::support::{execute, task_field};

/// Enqueues a task of `key` that has been due for `ago` seconds; in one transaction all are counted from the same moment.
#[track_caller]
fn due_for(client: &mut impl GenericClient, key: &str, seconds: f64, new_start: bool) -> i64 {
    one(
        client,
        "SELECT fair_enqueue('q', fairness_key => $1, scheduled_at => now() - $2 * interval '1 s', new_start => $3)",
        &[&key, &seconds, &new_start],
    )
}

#[test]
fn a_continuation_that_is_due_goes_before_a_new_start_less_than_half_a_minute_old() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    // Of other keys with the same lag, and of the same key.
    let mut moment = client.transaction().unwrap();
    let young = due_for(&mut moment, "A", 20.0, true);
    let old = due_for(&mut moment, "B", 40.0, true);
    let continuation = due_for(&mut moment, "C", 0.0, false);
    moment.commit().unwrap();
    let ids: Vec<i64> = claim(&mut client, "q", "w", 3)
        .iter()
        .map(|task| task.id)
        .collect();
    assert_eq!(ids, [old, continuation, young]);
    let mut moment = client.transaction().unwrap();
    let young = due_for(&mut moment, "D", 20.0, true);
    let continuation = due_for(&mut moment, "D", 0.0, false);
    moment.commit().unwrap();
    let ids: Vec<i64> = claim(&mut client, "q", "w", 3)
        .iter()
        .map(|task| task.id)
        .collect();
    assert_eq!(ids, [continuation, young]);
}

#[test]
fn a_handicap_that_is_changed_counts_for_the_backlog_at_the_next_claim() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    let first = |client: &mut Client| -> i64 {
        let mut transaction = client.transaction().unwrap();
        let id = claim_one(&mut transaction, "q").id;
        transaction.rollback().unwrap();
        id
    };
    let mut moment = client.transaction().unwrap();
    let new_start = due_for(&mut moment, "A", 40.0, true);
    let continuation = due_for(&mut moment, "A", 0.0, false);
    moment.commit().unwrap();
    assert_eq!(first(&mut client), new_start);
    configure(&mut admin, "q", r#"{"new_start_handicap": "2 min"}"#);
    assert_eq!(first(&mut client), continuation);
    configure(&mut admin, "q", r#"{"new_start_handicap": 0}"#);
    assert_eq!(first(&mut client), new_start);
    configure(&mut admin, "q", r#"{"new_start_handicap": null}"#);
    assert_eq!(first(&mut client), new_start);
}

#[test]
fn a_new_start_is_claimable_as_soon_as_it_is_due() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = due_for(&mut client, "A", 0.0, true);
    assert_eq!(claim_one(&mut client, "q").id, id);
}

#[test]
fn after_its_first_kept_claim_a_task_is_no_new_start() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = due_for(&mut client, "A", 5.0, true);
    let mut transaction = client.transaction().unwrap();
    claim_one(&mut transaction, "q");
    transaction.rollback().unwrap();
    assert_eq!(
        task_field(&mut client, id, "new_start").as_deref(),
        Some("true")
    );
    let task = claim_one(&mut client, "q");
    execute(
        &mut client,
        &format!(
            "SELECT fair_fail({}, {}, 'again', '0')",
            task.id, task.lease
        ),
    );
    // Another new start, due for longer, lets it pass now.
    due_for(&mut client, "A", 10.0, true);
    assert_eq!(claim_one(&mut client, "q").id, id);
}
