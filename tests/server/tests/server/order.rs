//! Who is next.

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, PATIENCE, claim, claim_one, complete, count, enqueue, flood, keys_of,
    one, wait_until,
};

use crate::support::{assert_all_different, assert_near, claims, drain, execute, state, states};

/// Keys k1, k2, k4 and the default key, 15 rows each, due in turns.
const REFERENCE_ROWS: &str = "
    INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at, weight)
    SELECT 'q', key, now() - interval '1 hour' + (4 * i + j) * interval '10 ms', own_weight
    FROM generate_series(0, 14) i,
         (VALUES (0, 'k1', 1), (1, 'k2', 2), (2, 'k4', 4), (3, '', 1)) k (j, key, own_weight)";

const REFERENCE_START: [&str; 18] = [
    "k1", "k2", "k4", "", "k4", "k2", "k4", "k4", "k1", "", "k2", "k4", "k4", "k2", "k4", "k4",
    "k1", "",
];

fn check_reference(client: &mut postgres::Client, tasks: &[ClaimedTask]) {
    assert_eq!(keys_of(&tasks[..18]), REFERENCE_START);
    assert_eq!(tasks.len(), 60);
    assert_all_different(tasks);
    let passes: Vec<(String, f64, f64)> = states(client, "q")
        .into_iter()
        .map(|state| (state.key, state.pass, state.clock))
        .collect();
    let expected = [("", 15.0), ("k1", 15.0), ("k2", 7.5), ("k4", 3.75)];
    assert_eq!(
        passes,
        expected.map(|(key, pass)| (key.to_owned(), pass, 14.0))
    );
}

#[test]
fn the_reference_sequence_is_followed_with_weights_set_for_the_keys() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'k1', 1), fair_set_weight('q', 'k2', 2), fair_set_weight('q', 'k4', 4)",
    );
    execute(
        &mut client,
        &REFERENCE_ROWS.replace("own_weight\n", "NULL\n"),
    );
    let tasks = claims(&mut client, "q", 60, 1);
    check_reference(&mut client, &tasks);
}

#[test]
fn the_reference_sequence_is_followed_with_weights_of_the_tasks() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(&mut client, REFERENCE_ROWS);
    let tasks = claims(&mut client, "q", 60, 1);
    check_reference(&mut client, &tasks);
}

#[test]
fn the_reference_sequence_is_followed_in_batches() {
    for n in [2, 7, 60] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(&mut client, REFERENCE_ROWS);
        let tasks = drain(&mut client, "q", n);
        check_reference(&mut client, &tasks);
    }
}

#[test]
fn a_newcomer_passes_a_flood_within_two_claims() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 200, "1 hour");
    assert_eq!(claim_one(&mut client, "q").key, "A");
    enqueue(&mut client, "q", Some("B"));
    let next = claims(&mut client, "q", 2, 1);
    assert_eq!(count(&next, "B"), 1, "{:?}", keys_of(&next));
}

#[test]
fn a_newcomer_waits_out_a_flood_with_fairness_off() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.fairness = off");
    flood(&mut client, "q", "A", 200, "1 hour");
    assert_eq!(claim_one(&mut client, "q").key, "A");
    enqueue(&mut client, "q", Some("B"));
    let next = claims(&mut client, "q", 200, 1);
    assert_eq!(count(&next[..199], "A"), 199);
    assert_eq!(next[199].key, "B");
}

#[test]
fn claims_with_fairness_off_charge_nothing_and_go_by_priority_and_due_time() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         SELECT 'q', 'k' || i % 3, 2 + i % 2, now() - i * interval '1 s' FROM generate_series(1, 60) i",
    );
    execute(&mut client, "SET harvest_fair.fairness = off");
    let mut by_due: Vec<(i16, i64)> = client
        .query(
            "SELECT priority, id FROM harvest_fair.task ORDER BY priority, scheduled_at, id",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    by_due.truncate(45);
    let mut tasks = claims(&mut client, "q", 15, 1);
    tasks.extend(claims(&mut client, "q", 3, 10));
    let order: Vec<(i16, i64)> = tasks.iter().map(|task| (task.priority, task.id)).collect();
    assert_eq!(order, by_due);
    for state in states(&mut client, "q") {
        assert_eq!((state.pass, state.clock), (0.0, 0.0), "{state:?}");
    }
}

#[test]
fn an_older_flood_and_a_short_queue_share_equally_whether_completed_or_not() {
    for completing in [false, true] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        flood(&mut client, "q", "A", 1000, "1 hour");
        flood(&mut client, "q", "B", 100, "1 min");
        let mut tasks = Vec::new();
        for _ in 0..40 {
            let task = claim_one(&mut client, "q");
            if completing {
                assert!(complete(&mut client, &task));
            }
            tasks.push(task);
        }
        assert_near(count(&tasks, "A"), 20, 1, "claims of A");
        assert_near(count(&tasks, "B"), 20, 1, "claims of B");
    }
}

#[test]
fn shares_follow_the_weights_in_claims_of_any_size() {
    for n in [1, 2, 3] {
        let db = Cluster::shared().database();
        let mut client = db.connect_with("SELECT fair_set_weight('q', 'heavy', 3)");
        flood(&mut client, "q", "heavy", 500, "1 hour");
        flood(&mut client, "q", "light", 500, "1 hour");
        let mut tasks = claims(&mut client, "q", 402 / n, n as i32);
        tasks.truncate(400);
        assert_near(
            count(&tasks, "heavy"),
            300,
            2,
            &format!("of weight 3 in claims of {n}"),
        );
        assert_near(
            count(&tasks, "light"),
            100,
            2,
            &format!("of weight 1 in claims of {n}"),
        );
    }
}

#[test]
fn three_weights_keep_their_proportion_in_claims_of_four() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (key, weight) in [("five", 5.0), ("three", 3.0), ("one", 1.0)] {
        execute(
            &mut client,
            &format!("SELECT fair_set_weight('q', '{key}', {weight})"),
        );
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let tasks = claims(&mut client, "q", 45, 4);
    assert_near(count(&tasks, "five"), 100, 1, "of weight 5");
    assert_near(count(&tasks, "three"), 60, 1, "of weight 3");
    assert_near(count(&tasks, "one"), 20, 1, "of weight 1");
}

#[test]
fn rows_of_one_insert_come_in_the_order_of_insertion() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, payload)
         SELECT 'q', 'k' || i % 3, jsonb_build_object('i', i) FROM generate_series(1, 90) i",
    );
    let tasks = drain(&mut client, "q", 7);
    for key in ["k0", "k1", "k2"] {
        let order: Vec<i64> = tasks
            .iter()
            .filter(|task| task.key == key)
            .map(|task| task.payload["i"].as_i64().unwrap())
            .collect();
        assert_eq!(order.len(), 30);
        assert!(order.is_sorted(), "{key}: {order:?}");
    }
}

#[test]
fn five_thousand_equal_keys_are_served_once_each_in_the_order_of_their_ids() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key)
         SELECT 'q', 'k' || md5(i::text) FROM generate_series(1, 5000) i",
    );
    let tasks = claims(&mut client, "q", 5, 1000);
    let ids: Vec<i64> = tasks.iter().map(|task| task.id).collect();
    assert_eq!(ids.len(), 5000);
    assert!(ids.is_sorted());
    assert!(tasks.iter().all(|task| task.lag == 0.0));
}

#[test]
fn a_claim_is_full_as_long_as_there_is_work_however_few_keys_have_it() {
    for keys in [2, 3, 1] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(
            &mut client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key)
                 SELECT 'q', 'k' || i % {keys} FROM generate_series(1, 60) i"
            ),
        );
        for _ in 0..12 {
            assert_eq!(claim(&mut client, "q", "w", 5).len(), 5);
        }
        assert_eq!(claim(&mut client, "q", "w", 5).len(), 0);
    }
}

#[test]
fn a_row_due_now_is_served_although_an_earlier_row_of_its_key_is_due_later() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'A', scheduled_at => now() + interval '1 hour')",
    );
    let second = enqueue(&mut client, "q", Some("A"));
    assert_eq!(claim_one(&mut client, "q").id, second);
    assert!(claim(&mut client, "q", "w", 1).is_empty());
}

#[test]
fn an_urgent_key_leaves_the_others_their_equal_shares() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "B", 200, "2 hours");
    flood(&mut client, "q", "C", 200, "1 hour");
    let mut rest = Vec::new();
    for _ in 0..100 {
        execute(
            &mut client,
            "SELECT fair_enqueue('q', fairness_key => 'A', priority => 1::smallint)",
        );
        assert_eq!(claim_one(&mut client, "q").key, "A");
        rest.push(claim_one(&mut client, "q"));
    }
    assert_near(count(&rest, "B"), 50, 1, "claims of B");
    assert_near(count(&rest, "C"), 50, 1, "claims of C");
}

#[test]
fn priorities_are_strict() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at)
         SELECT 'q', 'k' || i % 4, 1 + i % 5, now() - i * interval '1 s' FROM generate_series(1, 200) i",
    );
    let tasks = drain(&mut client, "q", 9);
    assert_eq!(tasks.len(), 200);
    assert!(tasks.is_sorted_by_key(|task| task.priority));
}

#[test]
fn a_key_has_one_share_for_each_priority() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority)
         SELECT 'q', 'A', 1 FROM generate_series(1, 30)",
    );
    assert_eq!(drain(&mut client, "q", 10).len(), 30);
    flood(&mut client, "q", "A", 20, "1 hour");
    flood(&mut client, "q", "B", 20, "1 min");
    // What A was charged at priority 1 is not held against it at priority 3.
    let tasks = claims(&mut client, "q", 10, 1);
    assert_near(count(&tasks, "A"), 5, 1, "claims of A");
}

#[test]
fn future_rows_become_due_by_themselves() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id: i64 = one(
        &mut client,
        "SELECT fair_enqueue('q', scheduled_at => clock_timestamp() + interval '400 ms')",
        &[],
    );
    let mut got = Vec::new();
    wait_until("the row is due", PATIENCE, || {
        got = claim(&mut client, "q", "w", 1);
        !got.is_empty()
    });
    assert_eq!(got[0].id, id);
    let early = "SELECT started_at < scheduled_at FROM harvest_fair.task WHERE id = $1";
    assert!(!one::<bool>(&mut client, early, &[&id]));
}

#[test]
fn rows_due_at_infinity_stay_and_rows_due_since_ever_come_first() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 3, "100 years");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
         VALUES ('q', 'A', 'infinity'), ('q', 'A', '-infinity')",
    );
    let tasks = drain(&mut client, "q", 2);
    assert_eq!(tasks.len(), 4);
    assert_eq!(tasks[0].scheduled_at, None);
    assert!(tasks[1..].iter().all(|task| task.scheduled_at.is_some()));
}

#[test]
fn an_idle_key_comes_back_without_credit() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "B", 1, "1 hour");
    assert_eq!(claim_one(&mut client, "q").key, "B");
    flood(&mut client, "q", "A", 600, "1 hour");
    claims(&mut client, "q", 300, 1);
    flood(&mut client, "q", "B", 100, "2 hours");
    let tasks = claims(&mut client, "q", 40, 1);
    assert_near(count(&tasks, "B"), 20, 1, "claims of B");
    let clock = state(&mut client, "q", "A").clock;
    assert!(clock > 250.0, "the clock stood still: {clock}");
}

#[test]
fn a_trickle_below_its_share_earns_no_burst() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "A", 1200, "1 hour");
    for i in 0..1000 {
        if i % 10 == 0 {
            enqueue(&mut client, "q", Some("B"));
        }
        claim_one(&mut client, "q");
    }
    flood(&mut client, "q", "B", 200, "2 hours");
    let tasks = claims(&mut client, "q", 100, 1);
    assert_near(count(&tasks, "B"), 50, 1, "claims of B");
}

#[test]
fn queues_do_not_change_each_other() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for queue in ["one", "two"] {
        flood(&mut client, queue, "A", 20, "1 hour");
        flood(&mut client, queue, "B", 20, "1 min");
    }
    let alone = keys_of(&claims(&mut client, "one", 20, 1)).join(" ");
    let after = keys_of(&claims(&mut client, "two", 20, 1)).join(" ");
    assert_eq!(alone, after);
    assert_eq!(
        state(&mut client, "two", "A").pass,
        state(&mut client, "one", "A").pass
    );
}

#[test]
fn a_batch_is_what_single_claims_would_have_been() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for queue in ["singly", "batch"] {
        execute(
            &mut client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, weight, scheduled_at, payload)
                 SELECT '{queue}', 'k' || (i * i) % 7, 0.5 + i % 3, now() - (i * 37 % 100) * interval '1 s',
                        to_jsonb(i)
                 FROM generate_series(1, 200) i"
            ),
        );
    }
    let singly = claims(&mut client, "singly", 200, 1);
    let batch = drain(&mut client, "batch", 64);
    let of = |tasks: &[ClaimedTask]| -> Vec<(i64, f64)> {
        tasks
            .iter()
            .map(|task| (task.payload.as_i64().unwrap(), task.lag))
            .collect()
    };
    assert_eq!(of(&singly), of(&batch));
}

#[test]
fn new_start_rows_sort_as_if_due_half_a_minute_later() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, new_start, scheduled_at, payload) VALUES
             ('q', 'A', true, now() - interval '100 s', '\"start\"'),
             ('q', 'A', false, now() - interval '80 s', '\"before\"'),
             ('q', 'A', false, now() - interval '60 s', '\"after\"')",
    );
    let order: Vec<_> = drain(&mut client, "q", 1)
        .into_iter()
        .map(|task| task.payload)
        .collect();
    assert_eq!(order, ["before", "start", "after"]);
}

#[test]
fn an_array_of_queues_is_served_queue_by_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for queue in ["one", "two", "three"] {
        flood(&mut client, queue, "A", 10, "1 hour");
    }
    let mut served = Vec::new();
    loop {
        let rows = client
            .query(
                "SELECT queue FROM fair_claim(ARRAY['one', 'two', 'empty'], 'w', 4)",
                &[],
            )
            .unwrap();
        let queues: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        if queues.is_empty() {
            break;
        }
        served.extend(queues);
    }
    for (queue, expected) in [("one", 10), ("two", 10), ("three", 0)] {
        assert_eq!(
            served.iter().filter(|name| *name == queue).count(),
            expected,
            "{queue}"
        );
    }
}
