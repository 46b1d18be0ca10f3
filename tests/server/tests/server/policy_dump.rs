//! A dump carries the policy along.

use harvest_fair_server_tests::{Cluster, flood, one};
use postgres::Client;

use crate::dump::dump_and_restore;
use crate::policy_support::{audit, configure};
use crate::support::{assert_all_different, assert_near, claims, drain, execute};

/// Everything of the policy that a dump carries.
#[track_caller]
fn policy(client: &mut Client) -> String {
    one(
        client,
        "SELECT concat((SELECT jsonb_agg(a ORDER BY id) FROM harvest_fair.audit a),
                       (SELECT jsonb_agg(w ORDER BY queue, fairness_key) FROM harvest_fair.weight w),
                       (SELECT jsonb_agg(q ORDER BY queue) FROM harvest_fair.queue q))",
        &[],
    )
}

#[test]
fn no_way_to_restore_makes_audit_rows_up() {
    let cluster = Cluster::shared();
    let old = cluster.database();
    let mut client = old.connect();
    execute(
        &mut client,
        "SELECT fair_set_weight('q', 'A', 2, 'by function');
         INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'B', 3);
         SELECT fair_pause('q');
         INSERT INTO harvest_fair.queue (queue, settings) VALUES ('r', '{\"lease\": 9}')",
    );
    let before = policy(&mut client);
    for (options, into_empty) in [
        (&[][..], true),
        (&["--inserts"], true),
        (&["--data-only"], false),
        (&["--data-only", "--column-inserts"], false),
        (&["--data-only", "--disable-triggers"], false),
    ] {
        let new = if into_empty {
            cluster.empty_database()
        } else {
            cluster.database()
        };
        dump_and_restore(&old, &new, options);
        let mut restored = new.connect();
        assert_eq!(policy(&mut restored), before, "{options:?}");
        execute(&mut restored, "SELECT fair_clear_weight('q', 'A')");
        assert_eq!(audit(&mut restored).len(), audit(&mut client).len() + 1);
    }
}

#[test]
fn a_restored_queue_with_groups_goes_on_by_groups_and_has_every_task() {
    let cluster = Cluster::shared();
    let (old, new) = (cluster.database(), cluster.empty_database());
    let mut client = old.connect();
    configure(&mut client, "q", r#"{"group_separator": "/"}"#);
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 3, "a/p": 2}')"#,
    );
    for key in ["a/p", "a/q", "v"] {
        flood(&mut client, "q", key, 200, "1 hour");
    }
    assert_eq!(claims(&mut client, "q", 5, 8).len(), 40);
    dump_and_restore(&old, &new, &[]);

    let mut restored = new.connect();
    let groups: String = one(
        &mut restored,
        "SELECT string_agg(concat_ws(' ', fairness_key, fairness_group, group_weight), ', ' ORDER BY fairness_key)
         FROM fair_state('q')",
        &[],
    );
    assert_eq!(groups, "a/p a 3, a/q a 3, v v 1");
    let mut tasks = claims(&mut restored, "q", 80, 1);
    let of = |key: &str| tasks.iter().filter(|task| task.key == key).count();
    for (key, share) in [("a/p", 40), ("a/q", 20), ("v", 20)] {
        assert_near(of(key), share, 1, key);
    }
    tasks.extend(drain(&mut restored, "q", 100));
    assert_all_different(&tasks);
    assert_eq!(tasks.len(), 560);
}
