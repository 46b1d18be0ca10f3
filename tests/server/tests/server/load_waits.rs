//! A queue is loaded by one session while others wait for it: whatever holds up or ends the load, no wait is for ever.

use std::thread::{self, JoinHandle};

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, PATIENCE, claim, flood, one, pid_of, sqlstate_of, try_claim,
    wait_until,
};
use postgres::{CancelToken, Client};

use crate::support::{brisk_options, execute, stat};

/// A session that claims one task.
struct Claiming {
    pid: i32,
    token: CancelToken,
    thread: JoinHandle<Result<Vec<ClaimedTask>, postgres::Error>>,
}

impl Claiming {
    fn end(self) -> Result<Vec<ClaimedTask>, postgres::Error> {
        self.thread.join().expect("the claiming thread ends")
    }
}

/// Starts a claim that cannot go on, and returns once it waits for a lock.
fn start_stuck(db: &Database, watcher: &mut Client) -> Claiming {
    let mut client = db.connect_with("SET statement_timeout = '60 s'");
    let (pid, token) = (pid_of(&mut client), client.cancel_token());
    let thread = thread::spawn(move || try_claim(&mut client, "q", "w", 1));
    wait_until("the claim waits", PATIENCE, || {
        one(
            watcher,
            "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)",
            &[&pid],
        )
    });
    Claiming { pid, token, thread }
}

/// A queue with tasks that nobody has loaded, and a session with a lock that holds up every load.
fn held_up(db: &Database) -> Client {
    let mut holder = db.connect_with("SET statement_timeout = '60 s'");
    flood(&mut holder, "q", "a", 6, "1 hour");
    execute(
        &mut holder,
        "BEGIN; LOCK TABLE harvest_fair.weight IN ACCESS EXCLUSIVE MODE",
    );
    holder
}

#[test]
fn a_load_in_a_circle_of_waits_is_a_deadlock_that_ends() {
    let cluster = Cluster::start(brisk_options().set("deadlock_timeout", "100ms"));
    let db = cluster.database();
    let mut watcher = db.connect();
    let mut holder = held_up(&db);
    let loader = start_stuck(&db, &mut watcher);
    let holders = try_claim(&mut holder, "q", "w", 1);
    execute(&mut holder, "ROLLBACK");
    let ends = [holders, loader.end()];
    let (claimed, failed): (Vec<_>, Vec<_>) = ends.into_iter().partition(Result::is_ok);
    assert_eq!(claimed.len(), 1, "{failed:?}");
    assert_eq!(claimed[0].as_ref().unwrap().len(), 1);
    let error = failed[0].as_ref().unwrap_err();
    assert_eq!(sqlstate_of(error), "40P01", "{error:?}");
    assert_eq!(claim(&mut holder, "q", "w", 5).len(), 5);
}

#[test]
fn a_load_that_is_cancelled_is_taken_over_by_one_that_waits_for_it() {
    let db = Cluster::shared().database();
    let mut watcher = db.connect();
    let mut holder = held_up(&db);
    let loader = start_stuck(&db, &mut watcher);
    let heir = start_stuck(&db, &mut watcher);
    loader
        .token
        .cancel_query(postgres::NoTls)
        .expect("a request");
    let pid = loader.pid;
    let error = loader.end().expect_err("the loader was cancelled");
    assert_eq!(sqlstate_of(&error), "57014", "{pid}: {error:?}");
    execute(&mut holder, "COMMIT");
    assert_eq!(heir.end().expect("nothing is in the way").len(), 1);
    assert_eq!(claim(&mut holder, "q", "w", 6).len(), 5);
}

#[test]
fn a_claim_that_waits_for_a_load_obeys_lock_timeout() {
    let db = Cluster::shared().database();
    let mut watcher = db.connect();
    let mut holder = held_up(&db);
    let loader = start_stuck(&db, &mut watcher);
    let mut hurried =
        db.connect_with("SET lock_timeout = '200 ms'; SET statement_timeout = '20 s'");
    let error = try_claim(&mut hurried, "q", "w", 1).expect_err("the load takes longer");
    assert_eq!(sqlstate_of(&error), "55P03", "{error:?}");
    execute(&mut holder, "COMMIT");
    assert_eq!(loader.end().expect("nothing is in the way").len(), 1);
    assert_eq!(claim(&mut hurried, "q", "w", 6).len(), 5);
}

#[test]
fn a_wait_after_a_truncate_in_the_same_transaction_sleeps() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 6, "1 hour");
    execute(&mut client, "BEGIN; TRUNCATE harvest_fair.task");
    execute(
        &mut client,
        "SELECT FROM fair_claim('q', 'w', 1, interval '1 s')",
    );
    let rounds = stat(&mut client, "q", "empty_claims");
    assert!(rounds < 50, "{rounds} rounds in a second");
    execute(&mut client, "ROLLBACK");
    assert_eq!(claim(&mut client, "q", "w", 6).len(), 6);
}
