//! Groups: with a separator, a customer has one share however many keys it invents.

use std::collections::HashSet;

use harvest_fair_server_tests::{
    ClaimedTask, Cluster, Options, PATIENCE, Shutdown, claim, claim_one, complete, count, enqueue,
    flood, pending, wait_until,
};
use postgres::Client;

use crate::policy_support::{configure, preview, preview_then_claim};
use crate::support::{assert_all_different, assert_near, claims, drain, execute};

const SEPARATED: &str = r#"{"group_separator": "/"}"#;

/// Claims of `v/x` while a fresh key of the other customer arrives before each of `times` claims.
#[track_caller]
fn claims_of_the_victim(client: &mut Client, times: usize) -> usize {
    flood(client, "q", "v/x", 1000, "1 hour");
    let mut of_victim = 0;
    for i in 0..times {
        enqueue(client, "q", Some(&format!("a/{i}")));
        of_victim += usize::from(claim_one(client, "q").key == "v/x");
    }
    of_victim
}

#[test]
fn a_customer_that_invents_keys_gets_one_customer_s_share() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    assert_near(
        claims_of_the_victim(&mut client, 1000),
        500,
        2,
        "claims of the victim",
    );
}

#[test]
fn without_a_separator_invented_keys_crowd_the_victim_out() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let of_victim = claims_of_the_victim(&mut client, 300);
    assert!(of_victim <= 5, "{of_victim} of 300 for the victim");
}

#[test]
fn weights_of_groups_and_of_keys_within_them_multiply() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "v": 1, "a/p": 2, "a/q": 1}')"#,
    );
    for key in ["a/p", "a/q", "v"] {
        flood(&mut client, "q", key, 500, "1 hour");
    }
    let tasks = claims(&mut client, "q", 400, 1);
    assert_near(count(&tasks, "a/p"), 200, 2, "claims of a/p");
    assert_near(count(&tasks, "a/q"), 100, 2, "claims of a/q");
    assert_near(count(&tasks, "v"), 100, 2, "claims of v");
}

#[test]
fn only_the_first_separator_parts_a_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    for key in ["a/x/1", "a/x/2", "a/y", "b/x/1"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let tasks = claims(&mut client, "q", 120, 1);
    assert_near(count(&tasks, "b/x/1"), 60, 1, "claims of b");
    for key in ["a/x/1", "a/x/2", "a/y"] {
        assert_near(count(&tasks, key), 20, 1, key);
    }
}

#[test]
fn a_key_without_the_separator_is_its_group_s_only_key() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue) SELECT 'q' FROM generate_series(1, 200)",
    );
    for key in ["solo", "a/1", "a/2"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    let tasks = claims(&mut client, "q", 120, 1);
    for (key, share) in [("", 40), ("solo", 40), ("a/1", 20), ("a/2", 20)] {
        assert_near(count(&tasks, key), share, 1, key);
    }
}

#[test]
fn switching_groups_on_and_off_with_a_backlog_counts_at_the_next_claim_and_loses_nothing() {
    let db = Cluster::shared().database();
    let (mut client, mut admin) = (db.connect(), db.connect());
    for key in ["a/1", "a/2", "a/3", "v/x"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    let mut all: Vec<ClaimedTask> = Vec::new();
    for (round, settings, of_victim) in [
        (0, "{}", 20),
        (1, SEPARATED, 40),
        (2, r#"{"group_separator": null}"#, 20),
        (3, SEPARATED, 40),
        (4, r#"{"group_separator": ":"}"#, 20),
    ] {
        configure(&mut admin, "q", settings);
        let tasks = claims(&mut client, "q", 80, 1);
        assert_near(
            count(&tasks, "v/x"),
            of_victim,
            2,
            &format!("claims of the victim in round {round}"),
        );
        all.extend(tasks);
    }
    all.extend(drain(&mut client, "q", 100));
    assert_all_different(&all);
    assert_eq!(all.len(), 1200);
    assert_eq!(pending(&mut client, "q"), 0);
}

#[test]
fn a_switch_while_claims_are_open_loses_nothing() {
    let db = Cluster::shared().database();
    let (mut client, mut other, mut admin) = (db.connect(), db.connect(), db.connect());
    for key in ["a/1", "a/2", "v/x"] {
        flood(&mut client, "q", key, 50, "1 hour");
    }
    let mut kept = other.transaction().unwrap();
    let mut all = claim(&mut kept, "q", "w", 20);
    let mut undone = client.transaction().unwrap();
    claim(&mut undone, "q", "w", 20);
    configure(&mut admin, "q", SEPARATED);
    undone.rollback().unwrap();
    kept.commit().unwrap();
    all.extend(drain(&mut client, "q", 7));
    assert_all_different(&all);
    assert_eq!(all.len(), 150);
}

#[test]
fn a_preview_is_exact_among_groups() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "a/p": 2, "b/2": 5}')"#,
    );
    for key in ["a/p", "a/q", "b/1", "b/2", "b/3", "c"] {
        flood(&mut client, "q", key, 30, "1 hour");
    }
    claims(&mut client, "q", 5, 3);
    for n in [1, 10, 60, 200] {
        preview_then_claim(&mut client, "q", "w", n);
    }
}

#[test]
fn a_batch_among_groups_is_what_single_claims_would_have_been() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "b/2": 5}')"#,
    );
    for key in ["a/p", "a/q", "b/1", "b/2", "c"] {
        flood(&mut client, "q", key, 30, "1 hour");
    }
    // A preview is what a batch would be.
    let batch: Vec<i64> = preview(&mut client, "q", "w", 50, "")
        .iter()
        .map(|line| line.id)
        .collect();
    let single: Vec<i64> = (0..50).map(|_| claim_one(&mut client, "q").id).collect();
    assert_eq!(batch, single);
}

#[test]
fn a_group_that_was_idle_comes_back_without_credit() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    flood(&mut client, "q", "busy/1", 300, "1 hour");
    flood(&mut client, "q", "idle/1", 5, "1 hour");
    claims(&mut client, "q", 100, 1);
    for i in 0..20 {
        flood(&mut client, "q", &format!("idle/{i}"), 20, "2 hours");
    }
    assert_near(
        count(&claims(&mut client, "q", 40, 1), "busy/1"),
        20,
        1,
        "claims of the busy group",
    );
}

#[test]
fn groups_outlive_a_restart() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    for key in ["a/1", "a/2", "a/3", "v/x"] {
        flood(&mut client, "q", key, 300, "1 hour");
    }
    claims(&mut client, "q", 10, 1);
    cluster.restart(Shutdown::Immediate);
    let mut client = db.connect();
    let tasks = claims(&mut client, "q", 80, 1);
    assert_near(
        count(&tasks, "v/x"),
        40,
        3,
        "claims of the victim after a crash",
    );
    let rest = drain(&mut client, "q", 100);
    let ids: HashSet<i64> = tasks.iter().chain(&rest).map(|task| task.id).collect();
    assert_eq!(ids.len(), 1190);
}

#[test]
fn switching_groups_on_a_full_board_loses_nothing() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 16)
            .set("harvest_fair.sweep_interval", "200ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    for i in 0..16 {
        flood(&mut client, "q", &format!("g{i}/k"), 5, "1 hour");
    }
    let mut all = claims(&mut client, "q", 8, 1);
    for settings in [SEPARATED, r#"{"group_separator": null}"#, SEPARATED] {
        configure(&mut client, "q", settings);
        all.extend(claim(&mut client, "q", "w", 8));
    }
    for task in &all {
        assert!(complete(&mut client, task));
    }
    flood(&mut client, "q", "one more/k", 5, "1 hour");
    // Whoever found no room has its turn once others are done.
    wait_until("every task has been claimed", PATIENCE, || {
        let tasks = claim(&mut client, "q", "w", 50);
        for task in &tasks {
            assert!(complete(&mut client, task));
        }
        all.extend(tasks);
        pending(&mut client, "q") == 0
    });
    assert_all_different(&all);
    assert_eq!(all.len(), 85);
}

/// `fair_state` with its groups: "key group weight pass lag | pass within, lag within", by key.
#[track_caller]
fn group_states(client: &mut Client) -> Vec<String> {
    client
        .query(
            "SELECT concat_ws(' ', fairness_key, coalesce(fairness_group, '-'), coalesce(group_weight::text, '-'),
                              coalesce(group_pass::text, '-'), coalesce(group_lag::text, '-'), '|', pass, lag)
             FROM fair_state('q') ORDER BY fairness_key",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect()
}

#[test]
fn the_state_shows_each_key_s_group_and_where_it_stands() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in ["a/p", "a/q", "v"] {
        flood(&mut client, "q", key, 50, "1 hour");
    }
    assert_eq!(
        group_states(&mut client),
        ["a/p - - - - | 0 0", "a/q - - - - | 0 0", "v - - - - | 0 0"]
    );
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 2, "a/q": 4}')"#,
    );
    let keys: Vec<String> = claims(&mut client, "q", 4, 1)
        .into_iter()
        .map(|task| task.key)
        .collect();
    assert_eq!(keys, ["a/p", "v", "a/q", "a/q"]);
    assert_eq!(
        group_states(&mut client),
        [
            // Three claims at weight 2; the last one started at 1, which is the clock.
            "a/p a 2 1.5 0.5 | 1 0.75",
            "a/q a 2 1.5 0.5 | 0.5 0.25",
            "v v 1 1 0 | 1 1",
        ]
    );
    configure(&mut client, "q", r#"{"group_separator": null}"#);
    assert!(
        group_states(&mut client)
            .iter()
            .all(|row| row.contains(" - - - - |"))
    );
}

#[test]
fn the_preview_gives_the_group_s_lag_and_pass_and_the_key_s_within_it() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(&mut client, r#"SELECT fair_set_weights('q', '{"a": 2}')"#);
    for key in ["a/p", "a/q", "v"] {
        flood(&mut client, "q", key, 50, "1 hour");
    }
    execute(
        &mut client,
        "SELECT fair_enqueue('q', fairness_key => 'a/q', sticky_worker => 'w')",
    );
    let (lines, _) = preview_then_claim(&mut client, "q", "w", 5);
    let reasons: Vec<&str> = lines.iter().map(|line| line.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "pinned to w, group a: lag 0, pass 0, key: lag 0, pass 0",
            "priority 3, group v: lag 0, pass 0, key: lag 0, pass 0",
            "priority 3, group a: lag 0, pass 0.5, key: lag 0, pass 0",
            "priority 3, group a: lag 0, pass 1, key: lag 0, pass 1",
            "priority 3, group v: lag 0, pass 1, key: lag 0, pass 1",
        ]
    );
}

#[test]
fn an_orderly_restart_keeps_the_shares_of_groups_and_of_the_keys_in_them() {
    let cluster = Cluster::start(Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "a/1": 2, "v/x": 0.5}')"#,
    );
    for key in ["a/1", "a/2", "a/3", "v/x", "v/y", "solo"] {
        flood(&mut client, "q", key, 100, "1 hour");
    }
    claims(&mut client, "q", 23, 1);
    let shares = |tasks: &[ClaimedTask]| -> Vec<usize> {
        ["a/1", "a/2", "a/3", "v/x", "v/y", "solo"]
            .map(|key| count(tasks, key))
            .to_vec()
    };
    let foreseen: Vec<String> = preview(&mut client, "q", "w", 100, "")
        .into_iter()
        .map(|line| line.key)
        .collect();
    cluster.restart(Shutdown::Fast);
    let mut client = db.connect();
    let tasks = claims(&mut client, "q", 100, 1);
    for (key, share) in ["a/1", "a/2", "a/3", "v/x", "v/y", "solo"]
        .iter()
        .zip(shares(&tasks))
    {
        let before = foreseen.iter().filter(|other| other == key).count();
        assert_near(share, before, 1, key);
    }
}

#[test]
fn a_group_on_a_full_board_keeps_its_share_beside_one_that_invents_keys() {
    let cluster = Cluster::start(
        Options::new()
            .set("harvest_fair.max_keys", 20)
            .set("harvest_fair.sweep_interval", "200ms"),
    );
    let db = cluster.database();
    let mut client = db.connect();
    configure(&mut client, "q", SEPARATED);
    flood(&mut client, "q", "v/x", 100, "1 hour");
    let mut all = claims(&mut client, "q", 1, 1);
    for i in 0..60 {
        flood(&mut client, "q", &format!("a/{i}"), 3, "1 hour");
    }
    let tasks = claims(&mut client, "q", 40, 1);
    assert_near(count(&tasks, "v/x"), 20, 2, "claims of the victim");
    all.extend(tasks);
    for task in &all {
        assert!(complete(&mut client, task));
    }
    // Whoever found no room has its turn once others are done.
    wait_until("every task has been claimed", PATIENCE, || {
        for task in claim(&mut client, "q", "w", 10) {
            assert!(complete(&mut client, &task));
            all.push(task);
        }
        pending(&mut client, "q") == 0
    });
    assert_all_different(&all);
    assert_eq!(all.len(), 280);
}
