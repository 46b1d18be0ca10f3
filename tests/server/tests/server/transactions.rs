//! Claims that do not commit: no task is lost or doubled, and the order goes on as if they had not been.

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Database, PATIENCE, claim, claim_one, count, enqueue, expect_error,
    flood, one, pending, pid_of, sqlstate_of, wait_until,
};
use postgres::{CancelToken, Client, NoTls};

use crate::support::{
    KeyState, assert_all_different, assert_near, brisk_options, claims, drain, execute, state,
    states, unattended, wait_for_expiry,
};

const KEYS: [(&str, f64); 3] = [("A", 1.0), ("B", 1.0), ("C", 2.0)];

const EACH: i64 = 100;

/// Two equal queues: in `q` a claim will be aborted, in `control` it will not be tried.
fn prepare(client: &mut Client) {
    for queue in ["q", "control"] {
        for (key, weight) in KEYS {
            execute(
                client,
                &format!("SELECT fair_set_weight('{queue}', '{key}', {weight})"),
            );
            flood(client, queue, key, EACH, "1 hour");
        }
        assert_eq!(claims(client, queue, 4, 5).len(), 20);
    }
}

/// What 100 claims of the queue where nothing was aborted are.
fn control(client: &mut Client) -> Vec<ClaimedTask> {
    claims(client, "control", 100, 1)
}

/// The queue goes on as the control does, and every task comes exactly once.
fn check(client: &mut Client, control: &[ClaimedTask]) {
    let next = claims(client, "q", 100, 1);
    for (key, _) in KEYS {
        assert_near(
            count(&next, key),
            count(control, key),
            1,
            &format!("claims of {key}"),
        );
    }
    let mut all = next;
    all.extend(drain(client, "q", 20));
    assert_all_different(&all);
    assert_eq!(all.len(), 3 * EACH as usize - 20, "tasks lost");
    assert_eq!(pending(client, "q"), 0);
}

/// Makes a claim stop in its midst: the update of the fifth row of this session waits for an advisory lock.
const STOP_MIDWAY: &str = "
    CREATE FUNCTION stop_midway() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        row_number int := coalesce(nullif(current_setting('test.row', true), ''), '0')::int + 1;
    BEGIN
        PERFORM set_config('test.row', row_number::text, false);
        IF row_number = 5 THEN
            PERFORM pg_advisory_xact_lock(42);
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER zz_stop_midway BEFORE UPDATE ON harvest_fair.task
        FOR EACH ROW WHEN (NEW.state = 'running' AND NEW.worker = 'victim') EXECUTE FUNCTION stop_midway()";

/// Starts a claim of 10 on its own connection, waits until it is in the midst of its rows, lets `interrupt` have the
/// victim's pid and a token to cancel it, and returns how the claim ended.
fn interrupt_midway(
    db: &Database,
    interrupt: impl FnOnce(i32, CancelToken),
) -> Result<u64, postgres::Error> {
    let mut holder = db.connect_with(STOP_MIDWAY);
    execute(&mut holder, "SELECT pg_advisory_lock(42)");
    let mut victim = db.connect();
    let pid = pid_of(&mut victim);
    let token = victim.cancel_token();
    let claiming = std::thread::spawn(move || {
        let result = victim.execute("SELECT fair_claim('q', 'victim', 10)", &[]);
        // An error is sent before the abort; the next answer comes after it.
        let _ = victim.batch_execute("");
        result
    });
    wait_until("the claim is in its midst", PATIENCE, || {
        one(
            &mut holder,
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'advisory'",
            &[&pid],
        )
    });
    interrupt(pid, token);
    claiming.join().expect("the claiming thread ends")
}

#[test]
fn a_rolled_back_claim_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let before = states(&mut client, "q");
    let mut transaction = client.transaction().unwrap();
    assert_eq!(claim(&mut transaction, "q", "w", 10).len(), 10);
    transaction.rollback().unwrap();
    let after = states(&mut client, "q");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(after.pass, before.pass.max(after.clock), "{after:?}");
        assert_eq!(after.running, before.running, "{after:?}");
    }
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_rolled_back_claim_gives_back_the_same_rows_in_the_same_order() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let mut transaction = client.transaction().unwrap();
    let undone = claim(&mut transaction, "q", "w", 30);
    transaction.rollback().unwrap();
    let again = claim(&mut client, "q", "w", 30);
    let order = |key: &str, tasks: &[ClaimedTask]| -> Vec<i64> {
        tasks
            .iter()
            .filter(|task| task.key == key)
            .map(|task| task.id)
            .take(6)
            .collect()
    };
    for (key, _) in KEYS {
        assert_eq!(order(key, &again), order(key, &undone), "{key}");
    }
}

#[test]
fn a_claim_undone_by_a_savepoint_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let mut transaction = client.transaction().unwrap();
    {
        let mut savepoint = transaction.savepoint("s").unwrap();
        assert_eq!(claim(&mut savepoint, "q", "w", 10).len(), 10);
        savepoint.rollback().unwrap();
    }
    transaction.commit().unwrap();
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn only_the_savepoint_that_was_rolled_back_is_undone() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    execute(
        &mut client,
        "BEGIN;
         SELECT fair_claim('q', 'kept', 1);
         SAVEPOINT a;
           SELECT fair_claim('q', 'kept', 1);
           SAVEPOINT b;
             SELECT fair_claim('q', 'undone', 2);
             SAVEPOINT c;
               SELECT fair_claim('q', 'undone', 2);
             RELEASE c;
           ROLLBACK TO b;
           SELECT fair_claim('q', 'kept', 1);
         RELEASE a;
         COMMIT",
    );
    let mut workers: Vec<String> = client
        .query(
            "SELECT worker FROM harvest_fair.task WHERE state = 'running'",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    workers.sort();
    assert_eq!(workers, ["kept", "kept", "kept"]);
    // The clock of a lone key has gone on with the claims that were undone, and a key is never put before the clock.
    let a = state(&mut client, "q", "A");
    assert_eq!((a.lag, a.running), (1.0, 3), "{a:?}");
    assert_eq!(drain(&mut client, "q", 3).len(), 7);
}

#[test]
fn a_claim_undone_by_an_exception_block_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    execute(
        &mut client,
        "DO $$ BEGIN
             PERFORM fair_claim('q', 'w', 10);
             RAISE EXCEPTION 'changed my mind';
         EXCEPTION WHEN OTHERS THEN NULL; END $$",
    );
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_savepoint_of_a_transaction_that_aborts_is_undone_once() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    execute(
        &mut client,
        "BEGIN; SAVEPOINT a; SELECT fair_claim('q', 'w', 10); RELEASE a; SAVEPOINT b; SELECT fair_claim('q', 'w', 10); ROLLBACK",
    );
    let control = control(&mut client);
    check(&mut client, &control);
    assert!(
        states(&mut client, "q")
            .iter()
            .all(|state| state.running >= 0)
    );
}

#[test]
fn an_aborted_batch_does_not_put_its_key_ahead_of_a_newcomer() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 1200, "1 hour");
    let mut transaction = client.transaction().unwrap();
    assert_eq!(claim(&mut transaction, "q", "w", 1000).len(), 1000);
    transaction.rollback().unwrap();
    flood(&mut client, "q", "B", 50, "1 min");
    let tasks = claims(&mut client, "q", 20, 1);
    assert_near(count(&tasks, "B"), 10, 1, "claims of the newcomer");
}

#[test]
fn others_claim_other_rows_while_a_claim_is_open_and_its_rows_once_it_is_undone() {
    let db = Cluster::shared().database();
    let (mut one, mut two) = (db.connect(), db.connect());
    flood(&mut one, "q", "A", 10, "1 hour");
    let mut transaction = one.transaction().unwrap();
    let open = claim(&mut transaction, "q", "w", 4);
    let others = drain(&mut two, "q", 2);
    assert_eq!(others.len(), 6);
    transaction.rollback().unwrap();
    let back = drain(&mut two, "q", 2);
    let ids = |tasks: &[ClaimedTask]| tasks.iter().map(|task| task.id).collect::<Vec<_>>();
    assert_eq!(ids(&back), ids(&open));
}

#[test]
fn a_claim_cancelled_in_its_midst_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let error = interrupt_midway(&db, |_, token| token.cancel_query(NoTls).unwrap()).unwrap_err();
    assert_eq!(sqlstate_of(&error), "57014");
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_claim_terminated_in_its_midst_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let result = interrupt_midway(&db, |pid, _| {
        let done: bool = one(
            &mut client,
            "SELECT pg_terminate_backend($1, 60000)",
            &[&pid],
        );
        assert!(done);
    });
    assert!(result.is_err());
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_claim_killed_in_its_midst_loses_nothing() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    prepare(&mut client);
    let control = control(&mut client);
    let witness = db.connect();
    let result = interrupt_midway(&db, |pid, _| cluster.kill_9(pid));
    assert!(result.is_err());
    cluster.wait_for_recovery(witness);
    let mut client = db.connect();
    check(&mut client, &control);
}

#[test]
fn a_claim_killed_before_its_commit_loses_nothing() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    prepare(&mut client);
    let control = control(&mut client);
    let witness = db.connect();
    let mut victim = db.connect();
    execute(&mut victim, "BEGIN");
    assert_eq!(claim(&mut victim, "q", "victim", 10).len(), 10);
    cluster.kill_9(pid_of(&mut victim));
    cluster.wait_for_recovery(witness);
    let mut client = db.connect();
    check(&mut client, &control);
}

#[test]
fn a_lease_reaped_in_a_savepoint_that_rolls_back_is_found_again_at_once() {
    let db = unattended().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '500 ms'");
    enqueue(&mut client, "q", Some("A"));
    let lost = claim_one(&mut client, "q");
    wait_for_expiry(&mut client, &lost);
    let mut transaction = client.transaction().unwrap();
    {
        let mut savepoint = transaction.savepoint("s").unwrap();
        assert_eq!(claim_one(&mut savepoint, "q").id, lost.id);
        savepoint.rollback().unwrap();
    }
    transaction.commit().unwrap();
    assert_eq!(claim_one(&mut client, "q").id, lost.id);
}

#[test]
fn an_error_after_a_claim_in_one_statement_undoes_it() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    expect_error(
        &mut client,
        "SELECT 1 / (count(*) - 10) FROM fair_claim('q', 'w', 10)",
        "22012",
        "",
        "",
    );
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_task_claimed_and_completed_in_a_transaction_that_rolls_back_is_pending_and_not_charged() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    let before = states(&mut client, "q");
    let mut transaction = client.transaction().unwrap();
    for task in claim(&mut transaction, "q", "w", 10) {
        let cost = "SELECT fair_complete($1::bigint, $2::bigint, 50)";
        assert!(one::<bool>(
            &mut transaction,
            cost,
            &[&task.id, &task.lease]
        ));
    }
    transaction.rollback().unwrap();
    let running = |states: Vec<KeyState>| -> Vec<i64> {
        states.into_iter().map(|state| state.running).collect()
    };
    assert_eq!(running(states(&mut client, "q")), running(before));
    let control = control(&mut client);
    check(&mut client, &control);
}

#[test]
fn a_transaction_with_a_claim_cannot_be_prepared_and_loses_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    prepare(&mut client);
    execute(&mut client, "BEGIN");
    assert_eq!(claim(&mut client, "q", "w", 10).len(), 10);
    let name = format!("claim in {}", db.name());
    expect_error(
        &mut client,
        &format!("PREPARE TRANSACTION '{name}'"),
        "0A000",
        "",
        "",
    );
    let _ = client.batch_execute("ROLLBACK");
    let control = control(&mut client);
    check(&mut client, &control);
}
