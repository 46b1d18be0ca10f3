//! Input of every kind: each call gives a right answer or an error with a proper SQLSTATE, never a crash and never an
//! internal error. Each run draws other input: a failure prints its seed, and `HF_SEED` runs it again.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use harvest_fair_server_tests::{Cluster, Database, Options, claim, one, pid_of, sqlstate_of};
use postgres::Client;
use postgres::types::ToSql;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::fuzz_input::{Input, key_is_valid, name_is_valid};
use crate::support::{execute, states};

/// Of its own: it holds more queues than others leave room for.
pub fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    Cluster::shared_in(&CLUSTER, || {
        Options::new()
            .set("harvest_fair.sweep_interval", "1s")
            .set("harvest_fair.flush_interval", "1s")
    })
}

/// The input of one test.
pub fn input() -> Input {
    let seed = std::env::var("HF_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    eprintln!("HF_SEED={seed}");
    Input(StdRng::seed_from_u64(seed))
}

/// A session whose every call is looked at.
pub struct Session {
    pub client: Client,
    pub pid: i32,
}

impl Session {
    pub fn new(db: &Database) -> Session {
        let mut client = db
            .connect_with("SET statement_timeout = '1min'; SET harvest_fair.default_lease = '1d'");
        let pid = pid_of(&mut client);
        Session { client, pid }
    }

    /// The number of rows, or the SQLSTATE of the refusal, which must not be one of a fault.
    #[track_caller]
    pub fn call(&mut self, sql: &str, args: &[&(dyn ToSql + Sync)]) -> Result<u64, String> {
        let outcome = self.client.execute(sql, args);
        let Err(error) = outcome else {
            return Ok(outcome.unwrap_or_default());
        };
        let state = sqlstate_of(&error).to_owned();
        assert!(
            !state.is_empty(),
            "the server is gone: {sql}: {args:?}: {error:?}"
        );
        let faults = ["XX", "58", "53200", "57P"];
        assert!(
            !faults.iter().any(|fault| state.starts_with(fault)),
            "{sql}: {args:?}: {error:?}"
        );
        Err(state)
    }

    /// Accepted if and only if `valid`; refused with 22023.
    #[track_caller]
    pub fn judge(&mut self, valid: bool, sql: &str, args: &[&(dyn ToSql + Sync)]) {
        let outcome = self.call(sql, args);
        match &outcome {
            Ok(_) => assert!(valid, "was accepted: {sql}: {args:?}"),
            Err(state) => assert!(
                !valid && state == "22023",
                "{state}, valid: {valid}: {sql}: {args:?}"
            ),
        }
    }
}

#[test]
fn a_name_is_kept_as_it_is_or_refused() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    for i in 0..600 {
        let (queue, key) = if i % 3 == 0 {
            (input.name(255), "k".to_owned())
        } else {
            ("q".to_owned(), input.name(256))
        };
        let key_given = Some(&key);
        if queue.contains('\0') || key.contains('\0') {
            continue; // no text of Postgres'
        }
        let valid = name_is_valid(&queue, 255) && key_is_valid(&key);
        session.judge(
            valid,
            "SELECT fair_enqueue($1, jsonb_build_object('key', $2::text), $2)",
            &[&queue, &key_given],
        );
        if valid {
            let tasks = claim(&mut session.client, &queue, "w", 10);
            assert_eq!(tasks.len(), 1, "{queue:?} {key:?}");
            assert_eq!((&tasks[0].queue, &tasks[0].key), (&queue, &key));
            assert_eq!(tasks[0].payload, json!({ "key": key }));
            session.judge(
                true,
                "SELECT fair_set_weight($1, $2, 2)",
                &[&queue, &key_given],
            );
            session.judge(true, "SELECT fair_charge($1, $2)", &[&queue, &key_given]);
            session.judge(
                true,
                "SELECT fair_clear_weight($1, $2)",
                &[&queue, &key_given],
            );
        } else if name_is_valid(&queue, 255) && !key.is_empty() {
            // '' is the default key, which is charged as any other, and the table's word for it.
            session.judge(false, "SELECT fair_charge($1, $2)", &[&queue, &key_given]);
            session.judge(
                false,
                "SELECT fair_set_weight($1, $2, 2)",
                &[&queue, &key_given],
            );
            session.judge(
                false,
                "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ($1, $2)",
                &[&queue, &key_given],
            );
        }
    }
    let left: i64 = one(
        &mut session.client,
        "SELECT count(*) FROM harvest_fair.task WHERE state = 'pending'",
        &[],
    );
    assert_eq!(left, 0);
    assert_eq!(pid_of(&mut session.client), session.pid);
}

#[test]
fn a_number_is_within_its_range_or_refused() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    execute(
        &mut session.client,
        "SELECT fair_enqueue('q', fairness_key => 'k')",
    );
    for _ in 0..400 {
        let number = input.float();
        let weight = (0.001..=1000.0).contains(&number);
        let queue = "numbers";
        session.judge(
            weight,
            "SELECT fair_enqueue($1, weight => $2)",
            &[&queue, &number],
        );
        session.judge(
            weight,
            "SELECT fair_set_weight($1, 'k', $2)",
            &[&queue, &number],
        );
        session.judge(
            number > 0.0 && number <= 1e9,
            "SELECT fair_charge($1, 'k', $2)",
            &[&"charged", &number],
        );
        session.judge(
            (0.0..=1e9).contains(&number),
            "SELECT fair_complete(-1, -1, $1)",
            &[&number],
        );
        let whole = input.whole();
        session.judge(
            (1..=5).contains(&whole),
            "SELECT fair_enqueue($1, priority => $2)",
            &[&queue, &whole],
        );
        session.judge(
            whole >= 1,
            "SELECT fair_enqueue($1, max_attempts => $2)",
            &[&queue, &whole],
        );
        session.judge(
            (1..=1000).contains(&whole),
            "SELECT fair_claim('none'::text, 'w', $1)",
            &[&whole],
        );
        for state in states(&mut session.client, "charged") {
            assert!(state.pass.is_finite() && state.lag >= 0.0, "{state:?}");
        }
    }
}

#[test]
fn a_time_is_kept_as_it_is_and_a_task_is_claimed_from_then_on() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    for i in 0..150 {
        let queue = format!("q{}", i % 7);
        let time = input.time();
        // Some can be written, but not held: those Postgres itself refuses.
        let Ok(_) = session.call(
            "SELECT fair_enqueue($1, jsonb_build_object('time', $2::text), scheduled_at => $2::text::timestamptz)",
            &[&queue, &time],
        ) else {
            continue;
        };
        let kept: i64 = one(
            &mut session.client,
            "SELECT count(*) FROM harvest_fair.task
             WHERE queue = $1 AND payload ->> 'time' = $2 AND scheduled_at = $2::text::timestamptz",
            &[&queue, &time],
        );
        assert!(kept > 0, "{time}");
        let due: i64 = one(
            &mut session.client,
            "SELECT count(*) FROM harvest_fair.task WHERE queue = $1 AND state = 'pending' AND scheduled_at <= now()",
            &[&queue],
        );
        if input.0.random_bool(0.5) {
            let claimed = claim(&mut session.client, &queue, "w", 1000);
            assert_eq!(claimed.len() as i64, due, "{queue}");
            assert!(claimed.is_sorted_by_key(|task| {
                task.scheduled_at
                    .unwrap_or(SystemTime::UNIX_EPOCH - LONG_AGO)
            }));
        }
    }
}

/// Before every time that a task of these tests has, but -infinity.
const LONG_AGO: Duration = Duration::from_secs(300_000_000_000);

#[test]
fn a_duration_is_kept_or_refused() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    execute(
        &mut session.client,
        "SELECT fair_enqueue('q'); SELECT fair_claim('q', 'w')",
    );
    for _ in 0..300 {
        let length = input.interval();
        // What it comes to in days of 24 hours and months of 30 days; None where this Postgres has no such interval.
        let micros = session.client.query_one(
            "SELECT (extract(year FROM i) * 12 + extract(month FROM i)) * 30::float8 * 86400
                    + extract(day FROM i)::float8 * 86400 + extract(epoch FROM i - date_trunc('day', i))::float8
             FROM (SELECT $1::text::interval AS i) given WHERE isfinite($1::text::interval)",
            &[&length],
        );
        let seconds: Option<f64> = micros.ok().map(|row| row.get(0));
        for (sql, positive) in [
            ("SELECT fair_extend(1, 1, $1::text::interval)", true),
            (
                "SELECT fair_enqueue('pinned', sticky_worker => 'w', sticky_for => $1::text::interval)",
                true,
            ),
            ("SELECT fair_fail(1, -1, 'x', $1::text::interval)", false),
            ("SELECT fair_prune('q', $1::text::interval)", false),
        ] {
            match seconds {
                Some(s) => {
                    session.judge(if positive { s > 0.0 } else { s >= 0.0 }, sql, &[&length])
                }
                None => drop(session.call(sql, &[&length])),
            }
        }
        let consistent: bool = one(
            &mut session.client,
            "SELECT count(*) = 0 FROM harvest_fair.task
             WHERE queue = 'q' AND NOT (lease_until > now() - interval '1 hour' AND isfinite(lease_until))",
            &[],
        );
        assert!(consistent, "{length}");
    }
}

#[test]
fn settings_and_weights_of_any_shape_are_taken_or_refused() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    execute(
        &mut session.client,
        "SELECT fair_enqueue('q', fairness_key => 'a/b')",
    );
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..500 {
        let text = input.settings();
        for sql in [
            "SELECT fair_configure('q', $1::text::jsonb)",
            "INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', $1::text::jsonb)
             ON CONFLICT (queue) DO UPDATE SET settings = EXCLUDED.settings",
            "SELECT fair_set_weights('q', $1::text::jsonb)",
            "SELECT fair_preview('q', 'w', 5, $1::text::jsonb)",
        ] {
            match session.call(sql, &[&text]) {
                Ok(_) => taken += 1,
                Err(state) => {
                    // 22P02, 22003 and 54001 are Postgres' own: no jsonb.
                    let known = ["22023", "22004", "22P02", "22P05", "22003", "54001"];
                    assert!(known.contains(&state.as_str()), "{state}: {sql}: {text}");
                    refused += 1;
                }
            }
        }
        // Whatever was taken, the queue can be claimed from and shown.
        session.judge(true, "SELECT fair_queue('q')", &[]);
        session.judge(true, "SELECT fair_state('q')", &[]);
        session.judge(
            true,
            "SELECT fair_release(t.id, t.lease) FROM fair_claim('q', 'w') t",
            &[],
        );
    }
    assert!(
        taken > 20 && refused > 20,
        "{taken} taken, {refused} refused"
    );
    execute(&mut session.client, "TRUNCATE harvest_fair.queue");
    assert_eq!(claim(&mut session.client, "q", "w", 10).len(), 1);
}

#[test]
fn ids_and_leases_of_others_settle_nothing() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    let mut input = input();
    execute(
        &mut session.client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i % 3 FROM generate_series(1, 30) i;
         SELECT fair_claim('q', 'w', 20); SELECT fair_cancel(25);
         SELECT fair_complete(1, 1); SELECT fair_release(2, 1)",
    );
    let snapshot = |client: &mut Client| -> String {
        one(
            client,
            "SELECT md5(string_agg(task::text, '|' ORDER BY id)) FROM harvest_fair.task",
            &[],
        )
    };
    let before = snapshot(&mut session.client);
    let held: Vec<(i64, i64)> = session
        .client
        .query(
            "SELECT id, lease FROM harvest_fair.task WHERE state = 'running'",
            &[],
        )
        .expect("the running tasks")
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    for _ in 0..400 {
        let (id, lease) = (input.id(), input.id());
        if held.contains(&(id, lease)) {
            continue;
        }
        for sql in [
            "SELECT WHERE fair_complete($1::bigint, $2::bigint)",
            "SELECT WHERE fair_release($1::bigint, $2::bigint)",
            "SELECT WHERE fair_fail($1::bigint, $2::bigint, 'x') IS NOT NULL",
            "SELECT WHERE fair_extend($1::bigint, $2::bigint) IS NOT NULL",
            "SELECT fair_complete(ARRAY[$1, $1]::bigint[], ARRAY[$2, $2]::bigint[])",
            "SELECT fair_release(ARRAY[$1]::bigint[], ARRAY[$2]::bigint[])",
        ] {
            assert_eq!(
                session.call(sql, &[&id, &lease]),
                Ok(0),
                "{sql}: {id} {lease}"
            );
        }
        let ids: Vec<Option<i64>> = (0..input.0.random_range(0..4))
            .map(|_| input.maybe_id())
            .collect();
        let leases: Vec<Option<i64>> = (0..input.0.random_range(0..4))
            .map(|_| input.maybe_id())
            .collect();
        let fits = ids.len() == leases.len() && ids.iter().chain(&leases).all(Option::is_some);
        let stranger = ids.iter().zip(&leases).all(|(id, lease)| {
            !held
                .iter()
                .any(|(i, l)| (Some(*i), Some(*l)) == (*id, *lease))
        });
        if stranger {
            let outcome = session.call(
                "SELECT fair_complete($1::bigint[], $2::bigint[])",
                &[&ids, &leases],
            );
            match outcome {
                Ok(settled) => assert!(fits && settled == 0, "{ids:?} {leases:?} {held:?}"),
                Err(state) => assert!(
                    !fits && ["22004", "22023"].contains(&state.as_str()),
                    "{state}"
                ),
            }
        }
    }
    assert_eq!(snapshot(&mut session.client), before);
}

#[test]
fn a_payload_of_64_megabytes_comes_through_whole() {
    let db = cluster().database();
    let mut session = Session::new(&db);
    execute(&mut session.client, "SET statement_timeout = 0");
    let made: String = one(
        &mut session.client,
        "WITH big AS MATERIALIZED (SELECT jsonb_build_object('x', repeat('0123456789abcdef', 4194304)) AS payload),
              added AS (SELECT fair_enqueue('q', payload) FROM big)
         SELECT md5(payload::text) FROM big, added",
        &[],
    );
    let claimed: String = one(
        &mut session.client,
        "SELECT md5(payload::text) FROM fair_claim('q', 'w')",
        &[],
    );
    assert_eq!(claimed, made);
    session.judge(
        true,
        "SELECT fair_fail(id, lease, repeat('e', 67108864)) FROM harvest_fair.task",
        &[],
    );
}
