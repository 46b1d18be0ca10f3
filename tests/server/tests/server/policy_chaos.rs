//! Operators who change everything while workers work: nothing is lost, nothing is done twice, and the board stays true.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{
    Cluster, Database, Options, PATIENCE, claim, complete, flood, one, pending, running,
    sqlstate_of, wait_until,
};
use rand::Rng;
use rand::seq::IndexedRandom;

use crate::policy_support::{complete_at_cost, preview, release};
use crate::support::{brisk, drain, execute, states};

const TASKS: i64 = 6_000;

const CHANGES: [&str; 16] = [
    r#"SELECT fair_configure('q', '{"group_separator": "/"}')"#,
    r#"SELECT fair_configure('q', '{"group_separator": null}')"#,
    r#"SELECT fair_configure('q', '{"priority_aging": 20}')"#,
    r#"SELECT fair_configure('q', '{"priority_aging": null}')"#,
    r#"SELECT fair_configure('q', '{"key_max_running": 3}')"#,
    r#"SELECT fair_configure('q', '{"key_max_running": null}')"#,
    r#"SELECT fair_configure('q', '{"key_rate_limit": 100, "rate_limit": 800}')"#,
    r#"SELECT fair_configure('q', '{"key_rate_limit": null, "rate_limit": null}')"#,
    r#"SELECT fair_configure('q', '{"charge": "seconds", "new_start_handicap": 5}')"#,
    r#"SELECT fair_configure('q', '{"charge": null, "new_start_handicap": null}')"#,
    "SELECT fair_pause('q'); SELECT fair_resume('q')",
    r#"SELECT fair_set_weights('q', '{"g1": 3, "g1/k2": 0.5, "g2/k3": 7}')"#,
    "SELECT fair_clear_weights('q')",
    "SELECT fair_prune('q', interval '0')",
    "SELECT count(*) FROM fair_preview('q', 'w0', 50)",
    "BEGIN; SELECT fair_pause('q'); SELECT fair_set_weight('q', 'g2', 5); ROLLBACK",
];

fn enqueue_mixed(client: &mut postgres::Client, tasks: i64) {
    execute(
        client,
        &format!(
            "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at, new_start, max_attempts, sticky_worker, sticky_until)
             SELECT 'q', 'g' || i % 4 || '/k' || i % 13, 1 + i % 5, now() + (i % 400 - 396) * interval '1 s', i % 7 = 0, 1000,
                    CASE WHEN i % 50 = 0 THEN 'w' || i % 6 END, CASE WHEN i % 50 = 0 THEN now() + interval '3 s' END
             FROM generate_series(1, {tasks}) i"
        ),
    );
}

/// Six workers claim, complete, release, fail and abort for as long as operators change the policy; returns the ids of
/// the tasks that were completed, each as often as it was.
fn mayhem(db: &Database, length: Duration) -> Vec<i64> {
    let (stop, done) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for worker in 0..6 {
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                let (mut rng, mut client, name) = (rand::rng(), db.connect(), format!("w{worker}"));
                while !stop.load(Ordering::Relaxed) {
                    let mut transaction = client.transaction().unwrap();
                    let tasks = claim(&mut transaction, "q", &name, rng.random_range(1..8));
                    if rng.random_bool(0.15) {
                        transaction.rollback().unwrap();
                        continue;
                    }
                    transaction.commit().unwrap();
                    for task in &tasks {
                        let completed = match rng.random_range(0..10) {
                            0..5 => complete(&mut client, task),
                            5..7 => complete_at_cost(&mut client, task, rng.random_range(0.0..5.0)),
                            7 | 8 => {
                                assert!(release(&mut client, task));
                                false
                            }
                            _ => {
                                execute(
                                    &mut client,
                                    &format!(
                                        "SELECT fair_fail({}, {}, 'x', '20 ms')",
                                        task.id, task.lease
                                    ),
                                );
                                false
                            }
                        };
                        if completed {
                            done.lock().unwrap().push(task.id);
                        }
                    }
                }
            });
        }
        for _ in 0..2 {
            let stop = &stop;
            scope.spawn(move || {
                let (mut rng, mut client) = (rand::rng(), db.connect());
                while !stop.load(Ordering::Relaxed) {
                    let change = CHANGES.choose(&mut rng).unwrap();
                    if let Err(error) = client.batch_execute(change) {
                        // Two operators may meet on the rows of weights.
                        assert_eq!(sqlstate_of(&error), "40P01", "{change}: {error:?}");
                    }
                    thread::sleep(Duration::from_millis(rng.random_range(0..15)));
                }
            });
        }
        let deadline = Instant::now() + length;
        let mut observer = db.connect();
        while Instant::now() < deadline {
            for state in states(&mut observer, "q") {
                assert!(state.lag >= 0.0 && state.running >= 0, "{state:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    done.into_inner().unwrap()
}

#[test]
fn changes_of_every_policy_under_load_lose_nothing_and_repeat_nothing() {
    let db = brisk().database();
    let mut client = db.connect();
    enqueue_mixed(&mut client, TASKS);
    let mut done = mayhem(&db, Duration::from_secs(7));
    assert!(done.len() > 200, "only {} were done", done.len());
    execute(&mut client, "DELETE FROM harvest_fair.queue");
    // What the board says is running is what the table says.
    let board: i64 = states_running(&mut client);
    assert_eq!(board, running(&mut client, "q"));
    wait_until("everything is done", PATIENCE, || {
        for worker in 0..6 {
            for task in claim(&mut client, "q", &format!("w{worker}"), 1000) {
                assert!(complete(&mut client, &task));
                done.push(task.id);
            }
        }
        pending(&mut client, "q") == 0
    });
    done.sort_unstable();
    let all = done.len();
    done.dedup();
    assert_eq!((all, done.len()), (TASKS as usize, TASKS as usize));
    assert_eq!(running(&mut client, "q"), 0);
    assert_eq!(states_running(&mut client), 0);
    let reloads: i64 = one(
        &mut client,
        "SELECT coalesce(max(reloads), 0)::bigint FROM harvest_fair.stats",
        &[],
    );
    assert_eq!(reloads, 0, "an error inside the critical section");
}

/// The running tasks of a queue as the board counts them; a key counts the same in all of its tiers.
#[track_caller]
fn states_running(client: &mut postgres::Client) -> i64 {
    one(
        client,
        "SELECT coalesce(sum(running), 0)::bigint FROM (SELECT fairness_key, max(running) AS running FROM fair_state('q') GROUP BY 1) s",
        &[],
    )
}

#[test]
fn a_crash_amid_changes_loses_nothing() {
    let cluster = Cluster::start(Options::new().set("harvest_fair.sweep_interval", "1s"));
    let db = cluster.database();
    let mut client = db.connect();
    enqueue_mixed(&mut client, 2_000);
    let done = mayhem(&db, Duration::from_secs(2)).len() as i64;
    drop(client);
    cluster.restart(harvest_fair_server_tests::Shutdown::Immediate);
    let mut client = db.connect();
    execute(&mut client, "TRUNCATE harvest_fair.queue");
    let (mut rest, left_running) = (0, running(&mut client, "q"));
    wait_until("the rest is claimed", PATIENCE, || {
        for worker in 0..6 {
            rest += claim(&mut client, "q", &format!("w{worker}"), 1000).len() as i64;
        }
        pending(&mut client, "q") == 0
    });
    assert_eq!(done + left_running + rest, 2_000);
}

#[test]
fn what_is_idle_is_forgotten_by_itself_and_the_clock_never_falls() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.prune_after", "1s")
            .set("harvest_fair.sweep_interval", "200ms")
            .set("harvest_fair.flush_interval", "200ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    for key in ["idle", "busy"] {
        flood(&mut client, "q", key, 30, "1 hour");
    }
    for task in claim(&mut client, "q", "w", 40) {
        assert!(complete(&mut client, &task));
    }
    execute(
        &mut client,
        "DELETE FROM harvest_fair.task WHERE fairness_key = 'idle' AND state = 'pending'",
    );
    // The board learns of the deletion when it looks for the rows.
    let mut taken = preview(&mut client, "q", "w", 5, "").len();
    taken += claim(&mut client, "q", "w", 3).len();
    assert!(taken > 0);
    let clock = states(&mut client, "q")
        .iter()
        .map(|state| state.clock)
        .fold(0.0, f64::max);
    wait_until("the idle key is forgotten", PATIENCE, || {
        let known = states(&mut client, "q");
        let clock_now = known.iter().map(|state| state.clock).fold(0.0, f64::max);
        assert!(
            clock_now >= clock,
            "the clock fell from {clock} to {clock_now}"
        );
        known.iter().all(|state| state.key == "busy")
    });
    // An empty tier forgets everything.
    for task in drain(&mut client, "q", 50) {
        assert!(complete(&mut client, &task));
    }
    execute(
        &mut client,
        "SELECT fair_complete(id, lease) FROM harvest_fair.task WHERE state = 'running'",
    );
    wait_until("all are forgotten", PATIENCE, || {
        states(&mut client, "q").is_empty()
    });
    wait_until("the snapshot forgets them too", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 0 FROM harvest_fair.key_state",
            &[],
        )
    });
}
