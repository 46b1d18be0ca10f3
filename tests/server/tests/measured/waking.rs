//! How fast a waiting worker wakes up.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use harvest_fair_server_tests::{
    Cluster, PATIENCE, claim_waiting, enqueue, one, pid_of, wait_until,
};

use crate::{quantile, turn};

const AT_ONCE: Duration = Duration::from_millis(50);

#[test]
fn a_waiting_worker_wakes_at_once_when_an_enqueue_commits() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut producer = db.connect();
    let mut worker = db.connect();
    let pid = pid_of(&mut worker);
    let mut delays = Vec::new();
    for _ in 0..20 {
        let waiting = thread::spawn(move || {
            let tasks = claim_waiting(&mut worker, "q", "w", 1, "60 s");
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
    }
    let slow = quantile(&delays, 0.9);
    println!(
        "from the commit of an enqueue to the worker's row: {:?}, 90th percentile {slow:?}",
        quantile(&delays, 0.5)
    );
    assert!(slow < AT_ONCE, "{delays:?}");
}

#[test]
fn a_waiting_worker_wakes_at_once_when_a_row_becomes_due() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let mut delays = Vec::new();
    for _ in 0..10 {
        let due: SystemTime = one(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, scheduled_at) VALUES ('q', now() + interval '200 ms')
             RETURNING scheduled_at",
            &[],
        );
        let tasks = claim_waiting(&mut client, "q", "w", 1, "60 s");
        let now = SystemTime::now();
        assert_eq!(tasks.len(), 1);
        delays.push(
            now.duration_since(due)
                .expect("the row came before it was due"),
        );
    }
    let slow = quantile(&delays, 0.9);
    println!(
        "from the due time to the worker's row: {:?}, 90th percentile {slow:?}",
        quantile(&delays, 0.5)
    );
    assert!(slow < AT_ONCE, "{delays:?}");
}

#[test]
fn a_waiting_worker_is_cancelled_at_once() {
    let _turn = turn();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    client
        .batch_execute("SET statement_timeout = '200 ms'")
        .unwrap();
    let start = Instant::now();
    assert!(
        client
            .batch_execute("SELECT fair_claim('q', 'w', 1, '60 s')")
            .is_err()
    );
    let taken = start.elapsed();
    assert!(taken < Duration::from_millis(200) + AT_ONCE, "{taken:?}");
}
