//! What can be seen of the board, and the charge for those who claim by their own SQL.

use harvest_fair_server_tests::{Cluster, claim, claim_one, count, flood, keys_of, one};
use postgres::Client;

use crate::support::{assert_near, claims, drain, execute, stat, state, states, unattended};

/// weight, start, pass, clock, lag
type Charged = (f64, f64, f64, f64, f64);

fn charge(client: &mut impl postgres::GenericClient, key: &str, cost: f64) -> Charged {
    let row = client
        .query_one(
            "SELECT weight, start, pass, clock, lag FROM fair_charge('q', $1, $2)",
            &[&key, &cost],
        )
        .unwrap();
    (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4))
}

fn lag_map(client: &mut Client) -> Vec<(String, f64)> {
    client
        .query(
            "SELECT fairness_key, lag FROM fair_lag('q') ORDER BY fairness_key",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect()
}

#[test]
fn the_lag_map_shows_who_has_had_more_than_the_others() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'B', 0.5)");
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 min");
    assert_eq!(keys_of(&claims(&mut client, "q", 2, 1)), ["A", "B"]);
    // A is at 1, B at 2, and the clock where the last claim started.
    assert_eq!(
        lag_map(&mut client),
        [("A".to_owned(), 1.0), ("B".to_owned(), 2.0)]
    );
    let other: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair_lag('q', 1::smallint)",
        &[],
    );
    assert_eq!(other, 0);
    let row = client
        .query_one("SELECT queue, priority, weight, pass, clock FROM fair_lag('q', 3::smallint) WHERE fairness_key = 'B'", &[])
        .unwrap();
    assert_eq!(
        (
            row.get::<_, String>(0),
            row.get::<_, i16>(1),
            row.get::<_, f64>(2),
            row.get::<_, f64>(3),
            row.get::<_, f64>(4)
        ),
        ("q".to_owned(), 3, 0.5, 2.0, 0.0)
    );
}

#[test]
fn the_lag_map_joined_into_an_own_claim_query_gives_the_fair_order() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 60, "1 hour");
    flood(&mut client, "q", "B", 60, "1 min");
    let mut served = Vec::new();
    for _ in 0..40 {
        let row = client
            .query_one(
                "SELECT t.id, t.fairness_key FROM harvest_fair.task t
                 LEFT JOIN fair_lag('q') l ON l.fairness_key = t.fairness_key AND l.priority = t.priority
                 WHERE t.queue = 'q' AND t.state = 'pending'
                 ORDER BY t.priority, coalesce(l.lag, 0), t.scheduled_at, t.id LIMIT 1",
                &[],
            )
            .unwrap();
        let (id, key): (i64, String) = (row.get(0), row.get(1));
        execute(
            &mut client,
            &format!("UPDATE harvest_fair.task SET state = 'completed' WHERE id = {id}"),
        );
        charge(&mut client, &key, 1.0);
        served.push(key);
    }
    assert_near(
        served.iter().filter(|key| *key == "A").count(),
        20,
        1,
        "rows of A",
    );
}

#[test]
fn a_charge_is_a_claim_without_a_task() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'A', 2)");
    assert_eq!(charge(&mut client, "A", 1.0), (2.0, 0.0, 0.5, 0.0, 0.5));
    assert_eq!(charge(&mut client, "A", 3.0), (2.0, 0.5, 2.0, 0.0, 2.0));
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 min");
    // A is two units ahead, which are two claims of B and then one each in turn.
    let tasks = claims(&mut client, "q", 4, 1);
    assert_eq!(count(&tasks[..2], "B"), 2, "{:?}", keys_of(&tasks));
}

#[test]
fn a_charge_never_moves_the_clock_and_is_undone_with_its_transaction() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    claims(&mut client, "q", 3, 1);
    let before = states(&mut client, "q");
    let mut transaction = client.transaction().unwrap();
    charge(&mut transaction, "A", 5.0);
    charge(&mut transaction, "new", 5.0);
    transaction.rollback().unwrap();
    assert_eq!(state(&mut client, "q", "A").pass, before[0].pass);
    assert!(
        states(&mut client, "q")
            .iter()
            .all(|state| state.lag <= 1.0)
    );
    let mut transaction = client.transaction().unwrap();
    {
        let mut savepoint = transaction.savepoint("s").unwrap();
        charge(&mut savepoint, "A", 5.0);
        savepoint.rollback().unwrap();
    }
    transaction.commit().unwrap();
    let after = state(&mut client, "q", "A");
    assert_eq!((after.pass, after.clock), (before[0].pass, before[0].clock));
}

#[test]
fn fair_state_tells_why_a_key_is_not_eligible() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'busy')",
    );
    claim_one(&mut client, "q");
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'later', scheduled_at => now() + interval '1 hour');
         SELECT fair_enqueue('q', fairness_key => 'now')",
    );
    let rows: Vec<(String, bool, i64, bool)> = client
        .query(
            "SELECT fairness_key, eligible, running::bigint, coalesce(head_scheduled_at > now(), false)
             FROM fair_state('q') ORDER BY fairness_key",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect();
    assert_eq!(
        rows,
        [
            ("busy".to_owned(), false, 1, false),
            ("later".to_owned(), false, 0, true),
            ("now".to_owned(), true, 0, false)
        ]
    );
    // A key without pending tasks waits for nothing.
    let waiting: String = one(
        &mut client,
        "SELECT string_agg(fairness_key, ' ') FROM fair_state('q') WHERE waiting_for IS NOT NULL",
        &[],
    );
    assert_eq!(waiting, "later");
}

#[test]
fn fair_state_shows_when_the_first_task_was_due_of_a_key_that_is_held_back() {
    let db = unattended().database();
    let mut client = db.connect();
    for (queue, settings, waits_for) in [
        ("capped", r#"{"key_max_running": 1}"#, "cap"),
        ("limited", r#"{"key_rate_limit": 0.000001}"#, "rate"),
        ("closed", r#"{"rate_limit": 0.000001}"#, "rate"),
    ] {
        execute(
            &mut client,
            &format!(
                "SELECT fair_configure('{queue}', '{settings}');
                 INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
                 SELECT '{queue}', 'a', '2020-01-01'::timestamptz + i * interval '1 day' FROM generate_series(0, 2) i"
            ),
        );
        claim_one(&mut client, queue);
        assert!(claim(&mut client, queue, "w", 1).is_empty());
        let shown: String = one(
            &mut client,
            "SELECT waiting_for || ' ' || (head_scheduled_at = '2020-01-02') FROM fair_state($1)",
            &[&queue],
        );
        assert_eq!(shown, format!("{waits_for} true"), "{queue}");
        execute(&mut client, &format!("SELECT fair_pause('{queue}')"));
        let paused: bool = one(
            &mut client,
            "SELECT waiting_for = 'paused' AND head_scheduled_at = '2020-01-02' FROM fair_state($1)",
            &[&queue],
        );
        assert!(paused, "{queue}");
    }
}

#[test]
fn fair_state_without_a_queue_shows_all_of_this_database() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for queue in ["one", "two"] {
        flood(&mut client, queue, "A", 2, "1 s");
        claim_one(&mut client, queue);
    }
    let queues: Vec<String> = client
        .query("SELECT queue FROM fair_state() ORDER BY queue", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(queues, ["one", "two"]);
}

#[test]
fn a_key_shows_once_for_each_priority_it_has_work_at() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority)
         SELECT 'q', 'A', i % 3 + 1 FROM generate_series(1, 9) i",
    );
    claim_one(&mut client, "q");
    let passes: Vec<f64> = states(&mut client, "q")
        .iter()
        .map(|state| state.pass)
        .collect();
    assert_eq!(passes, [1.0, 0.0, 0.0]);
}

#[test]
fn the_statistics_count_what_happened() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    flood(&mut client, "q", "B", 10, "1 hour");
    let tasks = claims(&mut client, "q", 3, 2);
    claims(&mut client, "q", 4, 1);
    let _: bool = one(
        &mut client,
        "SELECT fair_release($1::bigint, $2::bigint)",
        &[&tasks[0].id, &tasks[0].lease],
    );
    assert_eq!(stat(&mut client, "q", "claims"), 10);
    assert!(stat(&mut client, "q", "refunds") >= 1);
    assert_eq!(stat(&mut client, "q", "empty_claims"), 0);
    drain(&mut client, "q", 20);
    claim(&mut client, "q", "w", 1);
    assert_eq!(stat(&mut client, "q", "empty_claims"), 2);
    assert_eq!(stat(&mut client, "q", "missed_wakeups"), 0);
    assert_eq!(stat(&mut client, "q", "keys"), 2);
    let bytes = stat(&mut client, "q", "bytes_per_key");
    assert!((64..=1024).contains(&bytes), "{bytes} bytes a key");
    assert_eq!(stat(&mut client, "q", "max_keys"), 16384);
}

#[test]
fn statistics_show_only_this_databases_queues() {
    let cluster = Cluster::shared();
    let (mine, other) = (cluster.database(), cluster.database());
    flood(&mut other.connect(), "secret", "A", 2, "1 s");
    claim_one(&mut other.connect(), "secret");
    let mut client = mine.connect();
    let seen: i64 = one(
        &mut client,
        "SELECT (SELECT count(*) FROM harvest_fair.stats WHERE queue = 'secret')
              + (SELECT count(*) FROM fair_state() WHERE queue = 'secret')
              + (SELECT count(*) FROM fair_state('secret'))",
        &[],
    );
    assert_eq!(seen, 0);
}

#[test]
fn every_public_function_is_described() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let undescribed: Vec<String> = client
        .query(
            "SELECT p.oid::regprocedure::text FROM pg_proc p
             JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
             JOIN pg_extension e ON d.refobjid = e.oid AND e.extname = 'harvest_fair'
             WHERE obj_description(p.oid, 'pg_proc') IS NULL",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(undescribed.is_empty(), "{undescribed:?}");
}
