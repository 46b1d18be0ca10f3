//! What of the board outlives a restart, and a server that is started without the library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use harvest_fair_server_tests::{
    Cluster, Options, PATIENCE, Shutdown, claim, claim_one, complete, count, enqueue,
    expect_refusal, flood, keys_of, one, pending, wait_until,
};
use postgres::Client;

use crate::policy_support::release;
use crate::support::{
    assert_all_different, assert_near, brisk_options, claims, drain, execute, state, states,
};

/// How far the keys of a queue are ahead of the hindmost: what of their passes outlives a restart, since a tier is rebased
/// when it is loaded, and a claim that has been undone may have moved the clock.
fn lags(client: &mut Client) -> Vec<(String, f64)> {
    let states = states(client, "q");
    let least = states
        .iter()
        .map(|state| state.pass)
        .fold(f64::INFINITY, f64::min);
    states
        .into_iter()
        .map(|state| (state.key, state.pass - least))
        .collect()
}

fn restart_keeps_the_lags(how: Shutdown) {
    let cluster = Cluster::start(Options::new().set("harvest_fair.flush_interval", "500ms"));
    let db = cluster.database();
    let mut client = db.connect();
    for (key, weight) in [("A", 1.0), ("B", 0.25), ("C", 0.125)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 100, "1 hour");
    }
    claims(&mut client, "q", 17, 1);
    let before = lags(&mut client);
    assert!(
        before.iter().any(|(_, lag)| *lag > 1.0),
        "nobody is in debt: {before:?}"
    );
    if how == Shutdown::Immediate {
        wait_until("the board is flushed", PATIENCE, || is_flushed(&mut client));
    }
    drop(client);
    cluster.restart(how);
    let mut client = db.connect();
    // The first claim undone, the board is as it was.
    let first = claim_one(&mut client, "q");
    assert!(release(&mut client, &first));
    assert_eq!(lags(&mut client), before);
    assert_eq!(drain(&mut client, "q", 50).len(), 283);
}

/// Whether key_state holds every pass of the board.
fn is_flushed(client: &mut Client) -> bool {
    one(
        client,
        "SELECT NOT EXISTS (
             SELECT FROM fair_state('q') s LEFT JOIN harvest_fair.key_state k USING (queue, priority, fairness_key)
             WHERE k.pass IS DISTINCT FROM round(s.pass * 1e6)::bigint)",
        &[],
    )
}

#[test]
fn a_smart_restart_keeps_the_lags() {
    restart_keeps_the_lags(Shutdown::Smart);
}

#[test]
fn a_fast_restart_keeps_the_lags() {
    restart_keeps_the_lags(Shutdown::Fast);
}

#[test]
fn an_immediate_restart_keeps_the_lags_of_the_last_flush() {
    restart_keeps_the_lags(Shutdown::Immediate);
}

#[test]
fn a_crash_between_flushes_forgives_little_and_loses_nothing() {
    let cluster = Cluster::start(Options::new().set("harvest_fair.flush_interval", "1h"));
    let db = cluster.database();
    let mut client = db.connect();
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    let before = claims(&mut client, "q", 31, 1);
    drop(client);
    cluster.restart(Shutdown::Immediate);
    let mut client = db.connect();
    let after = claims(&mut client, "q", 40, 1);
    assert_near(count(&after, "A"), 20, 1, "claims of A");
    let mut all = [before, after].concat();
    all.extend(drain(&mut client, "q", 50));
    assert_all_different(&all);
    assert_eq!(all.len(), 200);
}

#[test]
fn running_tasks_are_counted_again_after_a_restart() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    let tasks = claim(&mut client, "q", "w", 4);
    drop(client);
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    claim_one(&mut client, "q");
    assert_eq!(state(&mut client, "q", "A").running, 5);
    for task in &tasks {
        assert!(complete(&mut client, task));
    }
    assert_eq!(state(&mut client, "q", "A").running, 1);
}

#[test]
fn a_restart_under_load_loses_nothing() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.default_lease", "1h"));
    let db = cluster.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, max_attempts)
         SELECT 'q', 'k' || i % 7, 100 FROM generate_series(1, 2000) i",
    );
    drop(client);
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                let (db, stop) = (&db, &stop);
                scope.spawn(move || {
                    let mut client = db.connect();
                    while !stop.load(Ordering::Relaxed)
                        && client
                            .query(
                                "SELECT fair_complete(id, lease) FROM fair_claim('q', 'w', 2)",
                                &[],
                            )
                            .is_ok()
                    {}
                });
            }
            let mut watcher = db.connect();
            let enough = if how == Shutdown::Fast { 200 } else { 600 };
            wait_until("some are done", PATIENCE, || {
                one(
                    &mut watcher,
                    "SELECT count(*) >= $1 FROM harvest_fair.task WHERE state = 'completed'",
                    &[&(enough as i64)],
                )
            });
            cluster.stop(how);
            stop.store(true, Ordering::Relaxed);
        });
        cluster.start_server();
    }
    let mut client = db.connect();
    let left = pending(&mut client, "q");
    assert_eq!(drain(&mut client, "q", 100).len() as i64, left);
    let states: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.task WHERE state IN ('completed', 'running')",
        &[],
    );
    assert_eq!(states, 2000);
}

#[test]
fn a_first_claim_finds_what_was_enqueued_long_before() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    for priority in 1..=5 {
        execute(
            &mut client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, priority, new_start, scheduled_at)
                 SELECT 'q', 'k' || i % 3, {priority}, i % 2 = 0, now() - i * interval '1 min'
                 FROM generate_series(1, 12) i;
                 INSERT INTO harvest_fair.task (queue, priority, scheduled_at)
                 VALUES ('q', {priority}, now() + interval '1 day')"
            ),
        );
    }
    drop(client);
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    let tasks = drain(&mut client, "q", 8);
    assert_eq!(tasks.len(), 60);
    assert!(tasks.is_sorted_by_key(|task| task.priority));
    assert_eq!(pending(&mut client, "q"), 5);
}

/// That a statement is refused by a server without the library, and that it says what to do.
#[track_caller]
fn expect_preload_hint(client: &mut Client, sql: &str) {
    let refusal = expect_refusal(client, sql);
    assert_ne!(refusal.sqlstate, "XX000", "{refusal:?}");
    assert!(
        refusal.hint.contains("shared_preload_libraries"),
        "{refusal:?}"
    );
}

#[test]
fn without_shared_preload_libraries_create_extension_says_what_to_do() {
    let cluster = Cluster::start(Options::new().without_preload());
    let db = cluster.empty_database();
    let mut client = db.connect();
    expect_preload_hint(&mut client, "CREATE EXTENSION harvest_fair");
    let schemas: i64 = one(
        &mut client,
        "SELECT count(*) FROM pg_namespace WHERE nspname = 'harvest_fair'",
        &[],
    );
    assert_eq!(schemas, 0);
}

#[test]
fn a_server_that_lost_the_preload_refuses_to_claim_and_loses_nothing() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    enqueue(&mut client, "q", Some("A"));
    drop(client);
    cluster.append_conf("shared_preload_libraries = ''\n");
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    for sql in ["SELECT fair_claim('q', 'w', 1)", "SELECT fair_state('q')"] {
        expect_preload_hint(&mut client, sql);
    }
    drop(client);
    cluster.append_conf("shared_preload_libraries = 'harvest_fair'\n");
    cluster.restart(Shutdown::Fast);
    assert_eq!(keys_of(&drain(&mut db.connect(), "q", 1)), ["A"]);
}
