//! What a claim costs.

use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Cluster, Database, claim_one};
use postgres::{Client, Statement};

use crate::{median, quantile, turn};

/// Tasks of `keys` keys, due long ago.
fn fill(client: &mut Client, queue: &str, rows: i64, keys: i64) {
    client
        .execute(
            "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
             SELECT $1, 'k' || i % $3::bigint, now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, $2::bigint) i",
            &[&queue, &rows, &keys],
        )
        .unwrap();
}

fn timed(client: &mut Client, statement: &Statement, queue: &str) -> Duration {
    let start = Instant::now();
    let rows = client.query(statement, &[&queue]).unwrap();
    let taken = start.elapsed();
    assert_eq!(rows.len(), 1);
    taken
}

const FAIR_CLAIM: &str =
    "SELECT id, fairness_key, payload, attempt, lease FROM fair_claim($1::text, 'w', 1)";

/// What a queue without fairness would be: an equal table with the one index that its order needs instead of the lanes'.
const PLAIN_TABLE: &str = "
    CREATE TABLE plain (LIKE harvest_fair.task INCLUDING ALL);
    DO $$ DECLARE lanes text; BEGIN
        SELECT indexrelid::regclass INTO STRICT lanes FROM pg_index
        WHERE indrelid = 'plain'::regclass AND pg_get_indexdef(indexrelid) LIKE '%new_start%';
        EXECUTE 'DROP INDEX ' || lanes;
    END $$;
    CREATE INDEX plain_order ON plain (queue, priority, scheduled_at, id) WHERE state = 'pending' AND sticky_worker IS NULL;
    INSERT INTO plain OVERRIDING SYSTEM VALUE SELECT * FROM harvest_fair.task;
    VACUUM ANALYZE plain;
    VACUUM ANALYZE harvest_fair.task";

const PLAIN_CLAIM: &str = "
    UPDATE plain SET state = 'running', worker = 'w', attempt = attempt + 1, lease = coalesce(lease, 0) + 1,
        lease_until = now() + interval '1 min', started_at = now(), charged = 1
    WHERE id = (SELECT id FROM plain
                WHERE queue = $1::text AND state = 'pending' AND sticky_worker IS NULL AND scheduled_at <= now()
                ORDER BY priority, scheduled_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, fairness_key, payload, attempt, lease";

fn run_each(client: &mut Client, statements: &str) {
    // VACUUM cannot run in the implicit transaction of several statements.
    let mut rest = statements;
    while let Some(end) = rest.find("VACUUM") {
        client.batch_execute(&rest[..end]).unwrap();
        let line_end = rest[end..]
            .find('\n')
            .map_or(rest.len(), |length| end + length);
        client
            .batch_execute(rest[end..line_end].trim_end_matches(';'))
            .unwrap();
        rest = &rest[line_end..];
    }
    client.batch_execute(rest).unwrap();
}

#[test]
fn a_claim_costs_at_most_twice_a_plain_skip_locked_claim() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    fill(&mut client, "q", 100_000, 100);
    run_each(&mut client, PLAIN_TABLE);
    let (mut fair_client, mut plain_client) = (db.connect(), db.connect());
    let fair_claim = fair_client.prepare(FAIR_CLAIM).unwrap();
    let plain_claim = plain_client.prepare(PLAIN_CLAIM).unwrap();
    let (mut fair, mut plain) = (Vec::new(), Vec::new());
    for round in 0..2_200 {
        let (f, p) = if round % 2 == 0 {
            let f = timed(&mut fair_client, &fair_claim, "q");
            (f, timed(&mut plain_client, &plain_claim, "q"))
        } else {
            let p = timed(&mut plain_client, &plain_claim, "q");
            (timed(&mut fair_client, &fair_claim, "q"), p)
        };
        // The first claims load the board and plan the statements.
        if round >= 200 {
            fair.push(f);
            plain.push(p);
        }
    }
    let (fair, plain) = (median(&fair), median(&plain));
    println!("claim of 1 at 100,000 rows and 100 keys: fair {fair:?}, plain SKIP LOCKED {plain:?}");
    assert!(fair <= plain * 2, "fair {fair:?}, plain {plain:?}");
}

/// Medians of claims on two queues, taken in turns.
fn compare(db: &Database, one: &str, other: &str, rounds: usize) -> (Duration, Duration) {
    let mut client = db.connect();
    let statement = client.prepare(FAIR_CLAIM).unwrap();
    for queue in [one, other].repeat(20) {
        timed(&mut client, &statement, queue);
    }
    let (mut of_one, mut of_other) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        of_one.push(timed(&mut client, &statement, one));
        of_other.push(timed(&mut client, &statement, other));
    }
    (median(&of_one), median(&of_other))
}

#[test]
fn a_claim_costs_the_same_with_ten_keys_and_with_ten_thousand() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    fill(&mut client, "small", 1_000, 10);
    fill(&mut client, "large", 100_000, 10_000);
    let (small, large) = compare(&db, "small", "large", 500);
    println!(
        "claim of 1: {small:?} at 1,000 rows and 10 keys, {large:?} at 100,000 rows and 10,000 keys"
    );
    assert!(large <= small * 2, "small {small:?}, large {large:?}");
}

#[test]
fn a_claim_costs_the_same_after_twenty_thousand_claims_under_an_old_snapshot() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    fill(&mut client, "used", 22_000, 100);
    fill(&mut client, "fresh", 22_000, 100);
    let mut old = db.connect();
    old.batch_execute(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM harvest_fair.task",
    )
    .unwrap();
    let statement = client.prepare(FAIR_CLAIM).unwrap();
    for _ in 0..20_000 {
        timed(&mut client, &statement, "used");
    }
    // In turns, so that whatever else the machine does slows both down.
    let (used, fresh) = compare(&db, "used", "fresh", 1_000);
    println!(
        "claim of 1 under an old snapshot: {fresh:?} where none was claimed, {used:?} after 20,000 claims"
    );
    assert!(used <= fresh * 3 / 2, "fresh {fresh:?}, used {used:?}");
}

#[test]
fn eight_sessions_at_once_wait_for_a_claim_no_longer_than_twice_as_long_as_for_a_plain_one() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    fill(&mut client, "q", 6_000, 30);
    run_each(&mut client, PLAIN_TABLE);
    let all = Mutex::new((Vec::new(), Vec::new()));
    let ready = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = db.connect();
                let fair_claim = client.prepare(FAIR_CLAIM).unwrap();
                let plain_claim = client.prepare(PLAIN_CLAIM).unwrap();
                let (mut fair, mut plain) = (Vec::new(), Vec::new());
                timed(&mut client, &fair_claim, "q");
                timed(&mut client, &plain_claim, "q");
                ready.wait();
                // In turns, so that whatever else the machine does slows both down.
                for _ in 0..500 {
                    fair.push(timed(&mut client, &fair_claim, "q"));
                    plain.push(timed(&mut client, &plain_claim, "q"));
                }
                let mut all = all.lock().unwrap();
                all.0.extend(fair);
                all.1.extend(plain);
            });
        }
    });
    let (fair, plain) = all.into_inner().unwrap();
    println!(
        "claim of 1 by 8 sessions at once: median {:?}, 95th percentile {:?}; plain SKIP LOCKED {:?}, {:?}",
        median(&fair),
        quantile(&fair, 0.95),
        median(&plain),
        quantile(&plain, 0.95),
    );
    let (fair, plain) = (median(&fair), median(&plain));
    assert!(fair <= plain * 2, "fair {fair:?}, plain {plain:?}");
    claim_one(&mut client, "q");
}
