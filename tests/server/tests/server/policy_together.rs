//! Policies beside each other, and beside fairness that is off, and queues that lose their slot.

use std::thread;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Options, PATIENCE, claim, claim_one, complete, count, enqueue,
    expect_error, flood, keys_of, one, wait_until,
};
use postgres::Client;

use crate::policy_support::{
    claim_by_id, configure, lease_of, preview, preview_then_claim, setting, waiting_for,
};
use crate::support::{
    assert_all_different, assert_between, assert_near, claims, clock, drain, execute, state,
};

#[test]
fn caps_rates_pins_and_the_pause_hold_with_fairness_off() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.fairness = off");
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 10, "1 hour");
    }
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'C', sticky_worker => 'me', sticky_for => '1 hour')",
    );
    let taken = claim(&mut client, "q", "w", 20);
    assert_eq!(
        (taken.len(), count(&taken, "A"), count(&taken, "B")),
        (4, 2, 2)
    );
    assert_eq!(keys_of(&claim(&mut client, "q", "me", 20)), ["C"]);
    configure(
        &mut client,
        "q",
        r#"{"key_max_running": null, "key_rate_limit": 0.001}"#,
    );
    assert!(claim(&mut client, "q", "w", 20).len() <= 2);
    configure(
        &mut client,
        "q",
        r#"{"key_rate_limit": null, "paused": true}"#,
    );
    assert!(claim(&mut client, "q", "w", 20).is_empty());
}

#[test]
fn a_key_s_own_weight_scales_its_rate_where_no_override_does() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'overridden', 2)");
    configure(&mut client, "q", r#"{"key_rate_limit": 2}"#);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, weight)
         SELECT 'q', k, 8 FROM generate_series(1, 50), (VALUES ('own'), ('overridden')) v (k)",
    );
    let burst = claim(&mut client, "q", "w", 100);
    assert_eq!((count(&burst, "own"), count(&burst, "overridden")), (16, 4));
}

#[test]
fn a_running_task_that_is_moved_to_another_key_takes_its_place_along() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    for key in ["A", "B"] {
        flood(&mut client, "q", key, 3, "1 hour");
    }
    let task = claim(&mut client, "q", "w", 1).remove(0);
    assert_eq!(task.key, "A");
    execute(
        &mut client,
        &format!(
            "UPDATE harvest_fair.task SET fairness_key = 'B' WHERE id = {}",
            task.id
        ),
    );
    assert_eq!(keys_of(&claim(&mut client, "q", "w", 5)), ["A"]);
    assert_eq!(waiting_for(&mut client, "q", "B"), "cap");
    assert!(complete(&mut client, &task));
    assert_eq!(keys_of(&claim(&mut client, "q", "w", 5)), ["B"]);
}

#[test]
fn a_renamed_row_of_settings_moves_them_to_the_other_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for queue in ["q", "r"] {
        flood(&mut client, queue, "A", 5, "1 hour");
        claim_one(&mut client, queue);
    }
    configure(&mut client, "q", r#"{"paused": true}"#);
    execute(
        &mut client,
        "UPDATE harvest_fair.queue SET queue = 'r' WHERE queue = 'q'",
    );
    claim_one(&mut client, "q");
    assert!(claim(&mut client, "r", "w", 1).is_empty());
}

#[test]
fn queues_that_take_another_s_slot_on_the_board_take_none_of_its_settings() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_queues", 2)
            .set("harvest_fair.prune_after", "1s")
            .set("harvest_fair.sweep_interval", "200ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    configure(
        &mut client,
        "first",
        r#"{"lease": 7000, "key_max_running": 1, "queue_weight": 5}"#,
    );
    for i in 0..6 {
        let queue = format!("other {i}");
        wait_until("there is room for the queue", PATIENCE, || {
            let sql = format!(
                "SELECT fair_enqueue('{queue}', fairness_key => 'A') FROM generate_series(1, 3)"
            );
            client.batch_execute(&sql).is_ok()
        });
        let mut tasks = Vec::new();
        wait_until("the queue's tasks are handed out", PATIENCE, || {
            tasks.extend(claim(&mut client, &queue, "w", 5));
            tasks.len() == 3
        });
        let lease = lease_of(&mut client, tasks[0].id);
        assert_ne!(lease, 7000.0, "{queue} has the first queue's lease");
        for task in &tasks {
            assert!(complete(&mut client, task));
        }
    }
    flood(&mut client, "first", "A", 3, "1 hour");
    let mut tasks = Vec::new();
    wait_until("the first queue is back", PATIENCE, || {
        tasks.extend(claim(&mut client, "first", "w", 5));
        !tasks.is_empty()
    });
    assert!(
        claim(&mut client, "first", "w", 5).is_empty(),
        "its cap was forgotten"
    );
    let lease = lease_of(&mut client, tasks[0].id);
    assert_eq!(lease, 7000.0);
}

#[test]
fn a_preview_is_exact_beside_limits_caps_pins_ageing_and_groups() {
    let db = Cluster::shared().database();
    let mut client = db
        .connect_with("SELECT fair_set_weight('q', 'a', 3); SELECT fair_set_weight('q', 'a/2', 4)");
    // Ages minutes away from where ageing lifts a task by one more priority.
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at, new_start)
         SELECT 'q', (ARRAY['a/1', 'a/2', 'b/1', 'c', ''])[1 + i % 5], 1 + i % 3, now() - (i % 4 * 600 + 250 + i * 7 % 100) * interval '1 s', i % 3 = 0
         FROM generate_series(1, 1000) i;
         SELECT fair_enqueue('q', fairness_key => 'c', sticky_worker => 'w', sticky_for => '1 hour')",
    );
    for settings in [
        "{}",
        r#"{"key_max_running": 60}"#,
        r#"{"group_separator": "/"}"#,
        r#"{"priority_aging": 600}"#,
        r#"{"group_separator": null}"#,
        r#"{"key_rate_limit": 0.0001}"#,
        r#"{"key_rate_limit": null, "rate_limit": 0.0001}"#,
    ] {
        configure(&mut client, "q", settings);
        for n in [1, 7, 40] {
            preview_then_claim(&mut client, "q", "w", n);
        }
    }
}

#[test]
fn batches_are_what_single_claims_would_have_been_under_every_policy() {
    let db = Cluster::shared().database();
    let mut client = db
        .connect_with("SELECT fair_set_weight('q', 'a', 3); SELECT fair_set_weight('q', 'a/2', 4)");
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at, new_start)
         SELECT 'q', (ARRAY['a/1', 'a/2', 'b/1', 'c', ''])[1 + i % 5], 1 + i % 3, now() - (i * 7 % 200 * 10 + 5) * interval '1 s', i % 4 = 0
         FROM generate_series(1, 600) i",
    );
    for settings in [
        "{}",
        r#"{"key_max_running": 9}"#,
        r#"{"key_max_running": null, "group_separator": "/"}"#,
        r#"{"priority_aging": 100000}"#,
        r#"{"group_separator": null}"#,
    ] {
        configure(&mut client, "q", settings);
        // A preview is what a batch would be; the single claims follow.
        let batch: Vec<i64> = preview(&mut client, "q", "w", 40, "")
            .iter()
            .map(|line| line.id)
            .collect();
        let single: Vec<i64> = (0..40)
            .flat_map(|_| claim(&mut client, "q", "w", 1))
            .map(|task| task.id)
            .collect();
        assert_eq!(batch, single, "{settings}");
        assert!(!batch.is_empty());
    }
}

#[test]
fn claimers_side_by_side_take_every_task_once_under_every_policy() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for (settings, separator) in [
        (r#"{"priority_aging": 60}"#, "ageing"),
        (
            r#"{"priority_aging": null, "group_separator": "/"}"#,
            "groups",
        ),
        (
            r#"{"priority_aging": 60, "group_separator": "/", "key_max_running": 1000}"#,
            "all",
        ),
    ] {
        configure(&mut client, "q", settings);
        execute(
            &mut client,
            "INSERT INTO harvest_fair.task (queue, fairness_key, priority, scheduled_at, new_start)
             SELECT 'q', 'g' || i % 3 || '/k' || i % 11, 1 + i % 5, now() - i % 300 * interval '1 s', i % 4 = 0
             FROM generate_series(1, 1500) i",
        );
        let all: Vec<ClaimedTask> = thread::scope(|scope| {
            let workers: Vec<_> = (0..6)
                .map(|_| scope.spawn(|| drain(&mut db.connect(), "q", 3)))
                .collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap())
                .collect()
        });
        assert_all_different(&all);
        let left = drain(&mut client, "q", 100).len();
        assert_eq!(all.len() + left, 1500, "{separator}");
    }
}

#[test]
fn odd_keys_have_groups_of_their_own() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    for key in ["/", "/x", "//", "a/", "a", "b"] {
        flood(&mut client, "q", key, 60, "1 hour");
    }
    let tasks = claims(&mut client, "q", 90, 1);
    let of = |keys: &[&str]| keys.iter().map(|key| count(&tasks, key)).sum::<usize>();
    assert_near(of(&["b"]), 30, 1, "claims of b");
    assert_near(of(&["a", "a/"]), 30, 1, "claims of a");
    assert_near(
        of(&["/", "/x", "//"]),
        30,
        1,
        "claims of the keys without a group's name",
    );
    assert_eq!(tasks.len() + drain(&mut client, "q", 50).len(), 360);
}

#[test]
fn a_separator_of_several_bytes_parts_keys_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"group_separator": "→"}"#);
    assert_eq!(setting(&mut client, "q", "group_separator").0, "\"→\"");
    for key in ["ä→1", "ä→2", "ö→1"] {
        flood(&mut client, "q", key, 60, "1 hour");
    }
    assert_near(
        count(&claims(&mut client, "q", 40, 1), "ö→1"),
        20,
        1,
        "claims of ö",
    );
}

#[test]
fn a_claim_by_id_charges_key_and_group() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    for key in ["a/1", "a/2", "b/1"] {
        flood(&mut client, "q", key, 60, "1 hour");
    }
    let ids: Vec<i64> = client
        .query(
            "SELECT id FROM harvest_fair.task WHERE fairness_key = 'a/1' ORDER BY id DESC LIMIT 10",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    for id in ids {
        assert_eq!(claim_by_id(&mut client, id, "w").len(), 1);
    }
    // b catches up with the group, and within it a/2 with a/1.
    let tasks = claims(&mut client, "q", 30, 1);
    assert_near(count(&tasks, "b/1"), 20, 1, "claims of b");
    assert_near(count(&tasks, "a/2"), 10, 1, "claims of a/2");
}

#[test]
fn a_cost_reported_by_one_key_counts_for_its_group() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    for key in ["a/1", "a/2", "b/1"] {
        flood(&mut client, "q", key, 400, "1 hour");
    }
    let mut work = std::collections::HashMap::new();
    for _ in 0..200 {
        let task = claim_one(&mut client, "q");
        let cost = match task.key.as_str() {
            "a/1" => 5.0,
            _ => 1.0,
        };
        assert!(crate::policy_support::complete_at_cost(
            &mut client,
            &task,
            cost
        ));
        *work.entry(task.key).or_insert(0.0) += cost;
    }
    let (a1, a2, b1) = (work["a/1"], work["a/2"], work["b/1"]);
    assert!((a1 - a2).abs() <= 10.0, "{work:?}");
    assert!((a1 + a2 - b1).abs() <= 12.0, "{work:?}");
}

#[test]
fn only_admins_change_policy() {
    let db = Cluster::shared().database();
    let mut admin = db.connect_with(
        "CREATE ROLE policy_worker LOGIN; CREATE ROLE policy_admin LOGIN;
         SELECT fair_grant('policy_worker', 'worker'); SELECT fair_grant('policy_worker', 'producer');
         SELECT fair_grant('policy_admin', 'admin')",
    );
    let calls = [
        r#"fair_configure('q', '{"lease": 9}')"#,
        "fair_queue('q')",
        "fair_pause('q')",
        "fair_resume('q')",
        "fair_set_weight('q', 'A', 2)",
        r#"fair_set_weights('q', '{"A": 3}')"#,
        "fair_weights('q')",
        "fair_clear_weight('q', 'A')",
        "fair_clear_weights('q')",
        "fair_preview('q', 'w', 1)",
        "fair_prune('q')",
        "fair_state('q')",
    ];
    let (mut worker, mut operator) = (
        db.connect_as("policy_worker"),
        db.connect_as("policy_admin"),
    );
    for call in calls {
        expect_error(&mut worker, &format!("SELECT {call}"), "42501", "", "");
        execute(&mut operator, &format!("SELECT {call}"));
    }
    for table in ["weight", "queue", "audit"] {
        expect_error(
            &mut worker,
            &format!("DELETE FROM harvest_fair.{table}"),
            "42501",
            "",
            "",
        );
        expect_error(
            &mut operator,
            &format!("DELETE FROM harvest_fair.{table}"),
            "42501",
            "",
            "",
        );
    }
    let id = enqueue(&mut worker, "q", Some("A"));
    assert_eq!(claim_by_id(&mut worker, id, "w").len(), 1);
    execute(
        &mut worker,
        "SELECT * FROM fair_claim(ARRAY['q', 'r'], 'w', 1)",
    );
    drop((worker, operator));
    execute(
        &mut admin,
        "DROP OWNED BY policy_worker, policy_admin; DROP ROLE policy_worker, policy_admin",
    );
}

#[test]
fn a_limit_on_an_idle_queue_grants_no_more_than_one_second_later() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_rate_limit": 5}"#);
    flood(&mut client, "q", "A", 50, "1 hour");
    claim(&mut client, "q", "w", 50);
    // Idle for much longer than a bucket takes to fill.
    execute(&mut client, "SELECT pg_sleep(2.5)");
    assert_eq!(claim(&mut client, "q", "w", 50).len(), 5);
    assert!(state(&mut client, "q", "A").lag >= 0.0);
}

#[test]
fn a_heartbeat_extends_by_the_queue_s_own_lease() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SET harvest_fair.default_lease = '500s'");
    configure(&mut client, "q", r#"{"lease": 40}"#);
    flood(&mut client, "q", "A", 1, "1 hour");
    let task = claim_one(&mut client, "q");
    let before = clock(&mut client);
    let until: f64 = one(
        &mut client,
        "SELECT extract(epoch FROM fair_extend($1, $2))::float8",
        &[&task.id, &task.lease],
    );
    let after = clock(&mut client);
    assert_between(until - 40.0, before, after, "the lease counts from");
}

#[test]
fn a_pinned_task_of_a_capped_key_holds_no_other_pinned_task_up() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", r#"{"key_max_running": 1}"#);
    enqueue(&mut client, "q", Some("A"));
    claim_one(&mut client, "q");
    let pin = |client: &mut Client, key: &str| -> i64 {
        one(
            client,
            "SELECT fair_enqueue('q', fairness_key => $1, sticky_worker => 'me', sticky_for => '1 hour')",
            &[&key],
        )
    };
    for _ in 0..5 {
        pin(&mut client, "A");
    }
    let of_b = pin(&mut client, "B");
    let ordinary = enqueue(&mut client, "q", Some("C"));
    let ids: Vec<i64> = (0..2)
        .flat_map(|_| claim(&mut client, "q", "me", 1))
        .map(|task| task.id)
        .collect();
    assert_eq!(ids, [of_b, ordinary]);
}
