//! How fast a waiting worker wakes up. Each wake-up is measured beside one of Postgres' own, as fast as the machine allows
//! at that moment; medians, since a wake-up now and then has to wait for a processor.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use harvest_fair_server_tests::{
    Cluster, LONG, PATIENCE, claim_waiting, enqueue, one, pid_of, wait_until,
};
use postgres::Client;

use crate::{median, turn};

const AT_ONCE: Duration = Duration::from_millis(50);
const ROUNDS: usize = 20;

/// How much longer than asked for Postgres slept, as the client saw it.
fn oversleep(client: &mut Client) -> Duration {
    let start = Instant::now();
    client.batch_execute("SELECT pg_sleep(0.1)").unwrap();
    start.elapsed().saturating_sub(Duration::from_millis(100))
}

#[track_caller]
fn assert_at_once(what: &str, delays: &[Duration], baseline: &[Duration]) {
    let (delay, own) = (median(delays), median(baseline));
    println!("{what}: {delay:?} (median); Postgres' own sleep ends {own:?} late");
    assert!(delay < AT_ONCE + own * 5, "{delays:?}, {baseline:?}");
}

#[test]
fn a_waiting_worker_wakes_at_once_when_an_enqueue_commits() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut producer = db.connect();
    let mut worker = db.connect();
    let pid = pid_of(&mut worker);
    let (mut delays, mut baseline) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let waiting = thread::spawn(move || {
            let tasks = claim_waiting(&mut worker, "q", "w", 1, LONG);
            (worker, tasks, Instant::now())
        });
        wait_until("the worker sleeps", PATIENCE, || {
            one(
                &mut producer,
                "SELECT coalesce((SELECT state = 'active' AND wait_event_type IN ('Extension', 'IPC')
                                  FROM pg_stat_activity WHERE pid = $1), false)",
                &[&pid],
            )
        });
        let mut transaction = producer.transaction().unwrap();
        let id = enqueue(&mut transaction, "q", Some("A"));
        let committing = Instant::now();
        transaction.commit().unwrap();
        let (returned, tasks, woken) = waiting.join().unwrap();
        worker = returned;
        assert_eq!(tasks.len(), 1);
        assert_eq!(tasks[0].id, id);
        delays.push(woken.saturating_duration_since(committing));
        baseline.push(oversleep(&mut producer));
    }
    assert_at_once(
        "from the commit of an enqueue to the worker's row",
        &delays,
        &baseline,
    );
}

#[test]
fn a_waiting_worker_wakes_at_once_when_a_row_becomes_due() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let (mut delays, mut baseline) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let due: SystemTime = one(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, scheduled_at) VALUES ('q', now() + interval '200 ms')
             RETURNING scheduled_at",
            &[],
        );
        let tasks = claim_waiting(&mut client, "q", "w", 1, LONG);
        let now = SystemTime::now();
        assert_eq!(tasks.len(), 1);
        delays.push(
            now.duration_since(due)
                .expect("the row came before it was due"),
        );
        baseline.push(oversleep(&mut client));
    }
    assert_at_once("from the due time to the worker's row", &delays, &baseline);
}

#[test]
fn a_waiting_worker_is_cancelled_at_once() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    client
        .batch_execute("SET statement_timeout = '200 ms'")
        .unwrap();
    let mut beyond = |statement: &str| {
        let start = Instant::now();
        assert!(client.batch_execute(statement).is_err());
        start.elapsed().saturating_sub(Duration::from_millis(200))
    };
    let (mut delays, mut baseline) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        delays.push(beyond("SELECT fair_claim('q', 'w', 1, '60 s')"));
        baseline.push(beyond("SELECT pg_sleep(60)"));
    }
    assert_at_once("from the timeout to the error", &delays, &baseline);
}
