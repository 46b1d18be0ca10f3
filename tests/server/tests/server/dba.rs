//! Direct changes of task rows by a DBA are respected at the next claim.

use harvest_fair_server_tests::{
    Cluster, PATIENCE, claim, claim_one, count, enqueue, flood, keys_of, one, wait_until,
};
use postgres::Client;

use crate::support::{
    assert_all_different, assert_near, brisk_options, claims, differences, drain, execute, state,
};

fn with_backlog(client: &mut Client) {
    flood(client, "q", "A", 10, "1 hour");
    flood(client, "q", "B", 10, "1 min");
}

fn heads(client: &mut Client, n: usize) -> Vec<(String, i64)> {
    claims(client, "q", n, 1)
        .into_iter()
        .map(|task| (task.key, task.id))
        .collect()
}

#[test]
fn a_running_task_put_back_to_pending_is_claimed_again() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    with_backlog(&mut client);
    let taken = claims(&mut client, "q", 4, 1);
    execute(
        &mut dba,
        "UPDATE harvest_fair.task SET state = 'pending' WHERE state = 'running'",
    );
    let rest = drain(&mut client, "q", 3);
    assert_eq!(rest.len(), 20);
    assert_all_different(&rest);
    let firsts: Vec<i64> = heads_of(&rest, "A", 2)
        .into_iter()
        .chain(heads_of(&rest, "B", 2))
        .collect();
    for task in &taken {
        assert!(
            firsts.contains(&task.id),
            "{} did not go first again",
            task.id
        );
    }
}

fn heads_of(tasks: &[harvest_fair_server_tests::ClaimedTask], key: &str, n: usize) -> Vec<i64> {
    tasks
        .iter()
        .filter(|task| task.key == key)
        .take(n)
        .map(|task| task.id)
        .collect()
}

#[test]
fn a_completed_task_put_back_to_pending_is_claimed_again() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    let task = claim_one(&mut client, "q");
    assert!(harvest_fair_server_tests::complete(&mut client, &task));
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET state = 'pending'",
    );
    assert_eq!(claim_one(&mut client, "q").id, id);
}

#[test]
fn a_raised_priority_goes_first() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    claim_one(&mut client, "q");
    let last: i64 = one(&mut client, "SELECT max(id) FROM harvest_fair.task", &[]);
    execute(
        &mut client,
        &format!("UPDATE harvest_fair.task SET priority = 1 WHERE id = {last}"),
    );
    assert_eq!(claim_one(&mut client, "q").id, last);
    assert_eq!(drain(&mut client, "q", 5).len(), 18);
}

#[test]
fn a_lowered_priority_goes_last() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    let first: i64 = one(&mut client, "SELECT min(id) FROM harvest_fair.task", &[]);
    execute(
        &mut client,
        &format!("UPDATE harvest_fair.task SET priority = 5 WHERE id = {first}"),
    );
    let tasks = drain(&mut client, "q", 1);
    assert_eq!(tasks.len(), 20);
    assert_eq!(tasks[19].id, first);
}

#[test]
fn a_whole_backlog_moved_to_another_key_counts_as_that_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET fairness_key = 'C' WHERE fairness_key = 'A'",
    );
    let tasks = claims(&mut client, "q", 10, 1);
    assert_near(count(&tasks, "C"), 5, 1, "claims of C");
    assert_near(count(&tasks, "B"), 5, 1, "claims of B");
    assert_eq!(drain(&mut client, "q", 3).len(), 10);
}

#[test]
fn a_row_moved_to_another_queue_is_claimed_there() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    execute(&mut client, "UPDATE harvest_fair.task SET queue = 'other'");
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    assert_eq!(claim_one(&mut client, "other").id, id);
}

#[test]
fn a_postponed_head_waits_and_the_next_row_goes() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 2, "1 hour");
    let ids: Vec<i64> = client
        .query("SELECT id FROM harvest_fair.task ORDER BY id", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET scheduled_at = now() + interval '1 day' WHERE id = {}",
            ids[0]
        ),
    );
    assert_eq!(claim_one(&mut client, "q").id, ids[1]);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
    execute(
        &mut client,
        "UPDATE harvest_fair.task SET scheduled_at = now() WHERE state = 'pending'",
    );
    assert_eq!(claim_one(&mut client, "q").id, ids[0]);
}

#[test]
fn a_row_brought_forward_overtakes_its_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 10, "1 hour");
    claims(&mut client, "q", 3, 1);
    let last: i64 = one(&mut client, "SELECT max(id) FROM harvest_fair.task", &[]);
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET scheduled_at = now() - interval '1 day' WHERE id = {last}"
        ),
    );
    assert_eq!(claim_one(&mut client, "q").id, last);
    assert_eq!(drain(&mut client, "q", 4).len(), 6);
}

#[test]
fn deleted_rows_are_passed_over_and_not_charged() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    claims(&mut client, "q", 2, 1);
    execute(
        &mut client,
        "DELETE FROM harvest_fair.task WHERE fairness_key = 'A' AND state = 'pending'
         AND id < (SELECT max(id) FROM harvest_fair.task WHERE fairness_key = 'A')",
    );
    let tasks = drain(&mut client, "q", 1);
    assert_eq!((count(&tasks, "A"), count(&tasks, "B")), (1, 9));
    assert_eq!(
        tasks[..2].iter().filter(|task| task.key == "A").count(),
        1,
        "{:?}",
        keys_of(&tasks)
    );
    assert_eq!(state(&mut client, "q", "A").pass, 2.0);
}

#[test]
fn a_truncated_table_is_empty_and_works_on() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    claims(&mut client, "q", 3, 1);
    execute(&mut client, "TRUNCATE harvest_fair.task");
    assert!(claim(&mut client, "q", "w", 5).is_empty());
    with_backlog(&mut client);
    let tasks = drain(&mut client, "q", 1);
    assert_eq!(tasks.len(), 20);
    let running: i64 = one(
        &mut client,
        "SELECT coalesce(sum(running), 0)::bigint FROM fair_state('q')",
        &[],
    );
    assert_eq!(running, 20, "what ran before the TRUNCATE still counts");
}

#[test]
fn a_truncate_that_is_rolled_back_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    execute(&mut client, "BEGIN; TRUNCATE harvest_fair.task; ROLLBACK");
    assert_eq!(drain(&mut client, "q", 3).len(), 20);
}

#[test]
fn a_rolled_back_change_of_a_row_loses_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    with_backlog(&mut client);
    for change in [
        "priority = 1",
        "fairness_key = 'C'",
        "scheduled_at = now() + interval '1 day'",
        "state = 'completed'",
    ] {
        execute(
            &mut client,
            &format!("BEGIN; UPDATE harvest_fair.task SET {change}; ROLLBACK"),
        );
    }
    let order = heads(&mut client, 4);
    assert_eq!(order.iter().filter(|(key, _)| key == "A").count(), 2);
    assert_eq!(drain(&mut client, "q", 3).len(), 16);
}

#[test]
fn a_row_that_somebody_locks_is_passed_over_and_served_later() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    flood(&mut client, "q", "A", 5, "1 hour");
    let mut transaction = dba.transaction().unwrap();
    let held: i64 = transaction
        .query_one(
            "SELECT id FROM harvest_fair.task ORDER BY id LIMIT 1 FOR UPDATE",
            &[],
        )
        .unwrap()
        .get(0);
    let tasks = drain(&mut client, "q", 2);
    assert_eq!(tasks.len(), 4);
    assert!(tasks.iter().all(|task| task.id != held));
    transaction.rollback().unwrap();
    assert_eq!(claim_one(&mut client, "q").id, held);
}

#[test]
fn a_key_whose_only_row_is_locked_does_not_hold_up_others_nor_pay() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    let held = enqueue(&mut client, "q", Some("A"));
    flood(&mut client, "q", "B", 5, "1 min");
    let mut transaction = dba.transaction().unwrap();
    transaction
        .execute(
            "SELECT FROM harvest_fair.task WHERE id = $1 FOR UPDATE",
            &[&held],
        )
        .unwrap();
    assert_eq!(keys_of(&drain(&mut client, "q", 2)), ["B"; 5]);
    transaction.commit().unwrap();
    assert_eq!(claim_one(&mut client, "q").id, held);
    // It waited at the clock all the while, and was charged for the one claim that succeeded.
    assert_eq!(state(&mut client, "q", "A").lag, 1.0);
}

#[test]
fn an_invalid_direct_change_is_refused() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("A"));
    for (change, value) in [
        ("queue = ' x'", " x"),
        ("fairness_key = '..'", ".."),
        ("priority = 9", "9"),
        ("weight = -1", "-1"),
    ] {
        harvest_fair_server_tests::expect_error(
            &mut client,
            &format!("UPDATE harvest_fair.task SET {change} WHERE id = {id}"),
            "22023",
            value,
            "",
        );
    }
    assert_eq!(claim_one(&mut client, "q").key, "A");
}

#[test]
fn a_locked_row_is_served_as_soon_as_it_is_free_though_its_key_has_a_later_task() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() + interval '1 hour')",
    );
    let due = enqueue(&mut client, "q", Some("A"));
    let mut transaction = dba.transaction().unwrap();
    transaction
        .execute(
            "SELECT FROM harvest_fair.task WHERE id = $1 FOR UPDATE",
            &[&due],
        )
        .unwrap();
    assert!(drain(&mut client, "q", 1).is_empty());
    transaction.rollback().unwrap();
    assert_eq!(claim_one(&mut client, "q").id, due);
}

#[test]
fn queues_whose_tasks_were_all_deleted_give_their_place_to_others() {
    let cluster = Cluster::start(brisk_options().set("harvest_fair.max_queues", 3));
    let db = cluster.database();
    let mut client = db.connect();
    for delete in [
        "DELETE FROM harvest_fair.task",
        "TRUNCATE harvest_fair.task",
    ] {
        for queue in ["a", "b", "c"] {
            flood(&mut client, queue, "k", 2, "1 hour");
            flood(&mut client, queue, "later", 2, "-1 hour");
            execute(&mut client, &format!("SELECT fair_lag('{queue}')"));
        }
        execute(&mut client, delete);
        wait_until("the board knows that they are empty", PATIENCE, || {
            let busy =
                "SELECT count(*) FROM fair_state() WHERE eligible OR waiting_for IS NOT NULL";
            one::<i64>(&mut client, busy, &[]) == 0
        });
        enqueue(&mut client, "d", Some("k"));
        assert_eq!(claim(&mut client, "d", "w", 5).len(), 1, "{delete}");
        execute(&mut client, "DELETE FROM harvest_fair.task");
    }
}

#[test]
fn a_pin_until_infinity_is_one_for_good() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    // The first is found when the queue is loaded, the second is noted by an insert, the third by an update.
    for way in 0..3 {
        let id: i64 = one(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, sticky_until)
             VALUES ('q', 'A', 'me', 'infinity') RETURNING id",
            &[],
        );
        if way == 2 {
            execute(
                &mut client,
                "UPDATE harvest_fair.task SET sticky_until = NULL WHERE state = 'pending';
                 UPDATE harvest_fair.task SET sticky_until = 'infinity' WHERE state = 'pending'",
            );
        }
        assert!(claim(&mut client, "q", "other", 1).is_empty());
        assert_eq!(differences(&mut client), [""; 0]);
        let mine = claim(&mut client, "q", "me", 1);
        assert_eq!(mine.iter().map(|task| task.id).collect::<Vec<_>>(), [id]);
    }
}
