//! Claims from several queues, and rows taken by hand.

use std::thread;

use harvest_fair_server_tests::{
    Cluster, Database, PATIENCE, claim, claim_one, enqueue, expect_error, flood, one, wait_until,
};
use postgres::Client;
use postgres::types::ToSql;

use crate::policy_support::{claim_any, claim_by_id, configure};
use crate::support::{claims, execute, stat, state, unattended};

#[test]
fn weights_of_queues_draw_the_first_one_in_proportion() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "heavy", r#"{"queue_weight": 3}"#);
    configure(&mut client, "light", r#"{"queue_weight": 1}"#);
    for queue in ["heavy", "light"] {
        flood(&mut client, queue, "A", 4000, "1 hour");
    }
    let first: i64 = one(
        &mut client,
        "SELECT count(*) FILTER (WHERE c.queue = 'heavy')
         FROM generate_series(1, 4000) i, LATERAL fair_claim(CASE WHEN i > 0 THEN ARRAY['light', 'heavy'] END, 'w', 1) c",
        &[],
    );
    let share = first as f64 / 4000.0;
    assert!(
        (0.73..=0.77).contains(&share),
        "{share} of the draws put the heavy queue first"
    );
}

#[test]
fn a_queue_of_weight_zero_comes_last() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "last", r#"{"queue_weight": 0}"#);
    configure(&mut client, "light", r#"{"queue_weight": 0.001}"#);
    flood(&mut client, "last", "A", 10, "1 hour");
    flood(&mut client, "light", "A", 100, "1 hour");
    for _ in 0..100 {
        assert_eq!(claim_any(&mut client, &["last", "light"], 1)[0].1, "light");
    }
    assert_eq!(claim_any(&mut client, &["last", "light"], 1)[0].1, "last");
}

#[test]
fn a_claim_goes_on_to_the_next_queue_while_rows_are_missing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "b", r#"{"queue_weight": 0}"#);
    flood(&mut client, "a", "A", 3, "1 hour");
    flood(&mut client, "b", "A", 5, "1 hour");
    let taken = claim_any(&mut client, &["b", "nothing here", "a"], 7);
    let queues: Vec<&str> = taken.iter().map(|(_, queue)| queue.as_str()).collect();
    assert_eq!(queues, ["a", "a", "a", "b", "b", "b", "b"]);
}

#[test]
fn duplicate_and_unknown_queues_are_harmless() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "a", r#"{"queue_weight": 1}"#);
    configure(&mut client, "b", r#"{"queue_weight": 1}"#);
    for queue in ["a", "b"] {
        flood(&mut client, queue, "A", 1000, "1 hour");
    }
    let mut first_a = 0;
    for _ in 0..400 {
        // Named five times, it is still drawn as one.
        let taken = claim_any(&mut client, &["a", "a", "a", "unknown", "a", "a", "b"], 1);
        assert_eq!(taken.len(), 1);
        first_a += usize::from(taken[0].1 == "a");
    }
    // Five standard deviations.
    assert!(
        first_a.abs_diff(200) <= 50,
        "{first_a} of 400 from the queue named five times"
    );
    let taken = claim_any(&mut client, &["a", "a"], 50);
    let mut ids: Vec<i64> = taken.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 50);
    assert!(claim_any(&mut client, &["unknown", "unknown too"], 5).is_empty());
    assert!(claim_any(&mut client, &[], 5).is_empty());
}

#[test]
fn a_paused_queue_leaves_its_turn_to_the_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(
        &mut client,
        "a",
        r#"{"queue_weight": 1000000, "paused": true}"#,
    );
    for queue in ["a", "b"] {
        flood(&mut client, queue, "A", 10, "1 hour");
    }
    for _ in 0..10 {
        assert_eq!(claim_any(&mut client, &["a", "b"], 1)[0].1, "b");
    }
    assert!(claim_any(&mut client, &["a", "b"], 1).is_empty());
}

#[test]
fn bad_queue_lists_are_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let calls = [
        ("fair_claim(NULL::text[], 'w', 1)", "22004"),
        ("fair_claim(ARRAY['a', NULL], 'w', 1)", "22004"),
        ("fair_claim(ARRAY['a', ' '], 'w', 1)", "22023"),
        ("fair_claim(ARRAY['a'], 'w', 0)", "22023"),
    ];
    for (call, sqlstate) in calls {
        expect_error(&mut client, &format!("SELECT {call}"), sqlstate, "", "");
    }
}

#[test]
fn a_claim_by_id_charges_its_key_and_never_moves_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 2)");
    flood(&mut client, "q", "A", 5, "1 hour");
    flood(&mut client, "q", "B", 5, "1 hour");
    let last: i64 = one(
        &mut client,
        "SELECT max(id) FROM harvest_fair.task WHERE fairness_key = 'A'",
        &[],
    );
    let clock = state(&mut client, "q", "A").clock;
    assert_eq!(claim_by_id(&mut client, last, "me").len(), 1);
    let after = state(&mut client, "q", "A");
    assert_eq!((after.pass, after.clock, after.running), (0.5, clock, 1));
    assert_eq!(state(&mut client, "q", "B").pass, 0.0);
    // B is first now: A has had half a claim.
    assert_eq!(claim_one(&mut client, "q").key, "B");
    let charged: f64 = one(
        &mut client,
        "SELECT charged FROM harvest_fair.task WHERE id = $1 AND worker = 'me' AND state = 'running'",
        &[&last],
    );
    assert_eq!(charged, 1.0);
}

#[test]
fn claims_by_id_never_change_the_order_of_the_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["A", "B", "C"] {
        flood(&mut client, "q", key, 20, "1 hour");
    }
    claims(&mut client, "q", 4, 1);
    let taken: Vec<i64> = client
        .query(
            "SELECT id FROM harvest_fair.task WHERE fairness_key = 'C' AND state = 'pending' ORDER BY id DESC LIMIT 10",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    for id in taken {
        assert_eq!(claim_by_id(&mut client, id, "me").len(), 1);
    }
    let next: Vec<String> = claims(&mut client, "q", 8, 1)
        .into_iter()
        .map(|task| task.key)
        .collect();
    // A had two of four claims, B and C one each; C has had eleven by now.
    assert_eq!(next, ["B", "A", "B", "A", "B", "A", "B", "A"]);
}

#[test]
fn what_cannot_be_claimed_now_cannot_be_claimed_by_id() {
    let db = Cluster::shared().database();
    let (mut client, mut other) = (db.connect(), db.connect());
    let future: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() + interval '1 hour')",
        &[],
    );
    let cancelled = enqueue(&mut client, "q", Some("A"));
    execute(&mut client, &format!("SELECT fair_cancel({cancelled})"));
    let running = enqueue(&mut client, "q", Some("A"));
    assert_eq!(claim_by_id(&mut client, running, "w").len(), 1);
    let held = enqueue(&mut client, "q", Some("A"));
    let mut transaction = other.transaction().unwrap();
    assert_eq!(claim_by_id(&mut transaction, held, "other").len(), 1);
    let before = state(&mut client, "q", "A").pass;
    for id in [future, cancelled, running, held, i64::MAX, -1] {
        assert!(claim_by_id(&mut client, id, "w").is_empty(), "task {id}");
    }
    assert_eq!(state(&mut client, "q", "A").pass, before);
    transaction.rollback().unwrap();
    assert_eq!(claim_by_id(&mut client, held, "w").len(), 1);
    expect_error(
        &mut client,
        "SELECT fair_claim_by_id(NULL, 'w')",
        "22004",
        "id",
        "",
    );
    expect_error(
        &mut client,
        "SELECT fair_claim_by_id(1, ' ')",
        "22023",
        "worker",
        "",
    );
}

#[test]
fn a_claim_by_id_that_rolls_back_charges_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 5, "1 hour");
    let id = claim_one(&mut client, "q").id + 3;
    let before = state(&mut client, "q", "A");
    let mut transaction = client.transaction().unwrap();
    assert_eq!(claim_by_id(&mut transaction, id, "w").len(), 1);
    transaction.rollback().unwrap();
    assert_eq!(state(&mut client, "q", "A"), before);
    assert_eq!(claim(&mut client, "q", "w", 10).len(), 4);
}

#[test]
fn a_charge_by_hand_weighs_like_claims_and_never_moves_the_clock() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 2)");
    flood(&mut client, "q", "A", 20, "1 hour");
    flood(&mut client, "q", "B", 20, "1 hour");
    let charge = "SELECT concat_ws(' ', fairness_key, priority, weight, start, pass, clock, lag) FROM fair_charge('q', 'A', $1)";
    let cost: &(dyn ToSql + Sync) = &8.0f64;
    assert_eq!(one::<String>(&mut client, charge, &[cost]), "A 3 2 0 4 0 4");
    // B catches up by four claims before A comes again.
    let next: Vec<String> = claims(&mut client, "q", 5, 1)
        .into_iter()
        .map(|task| task.key)
        .collect();
    assert_eq!(next[..4], ["B", "B", "B", "B"]);
    assert_eq!(stat(&mut client, "q", "claims"), 5);
}

/// The queue of the task that a worker who sleeps on queues `a` and `b` gets by `change`.
#[track_caller]
fn woken_among_two(db: &Database, change: impl FnOnce(&mut Client)) -> String {
    let mut client = db.connect();
    thread::scope(|scope| {
        let worker = scope.spawn(|| -> String {
            one(
                &mut db.connect(),
                "SELECT queue FROM fair_claim(ARRAY['a', 'b'], 'w', 1, '10 min')",
                &[],
            )
        });
        wait_until("the worker waits", PATIENCE, || {
            one(
                &mut client,
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%ARRAY[''a'', ''b'']%'
                                AND datname = current_database() AND pid <> pg_backend_pid()
                                AND wait_event_type = 'Extension')",
                &[],
            )
        });
        change(&mut client);
        wait_until("the worker has woken", PATIENCE, || worker.is_finished());
        worker.join().unwrap()
    })
}

#[test]
fn a_worker_of_several_queues_wakes_for_any_of_them() {
    let db = unattended().database();
    for queue in ["b", "a"] {
        let woken = woken_among_two(&db, |client| {
            enqueue(client, queue, Some("A"));
        });
        assert_eq!(woken, queue);
    }
}

#[test]
fn a_worker_of_several_queues_wakes_when_one_is_resumed() {
    let db = unattended().database();
    let mut client = db.connect();
    flood(&mut client, "b", "A", 1, "1 hour");
    execute(&mut client, "SELECT fair_pause('b')");
    let woken = woken_among_two(&db, |client| {
        execute(client, "SELECT fair_resume('b')");
    });
    assert_eq!(woken, "b");
}
