//! Cases from the field that no other theme has word for word. `tests/README.md` says where each of the others is.

use harvest_fair_server_tests::{Cluster, claim, complete, enqueue, flood, keys_of};

use crate::policy_support::configure;
use crate::support::{drain, execute};

#[test]
fn a_more_urgent_task_of_a_key_whose_place_an_open_claim_holds_waits_and_an_abort_admits_exactly_one()
 {
    let db = Cluster::shared().database();
    let (mut first, mut second) = (db.connect(), db.connect());
    configure(&mut second, "q", r#"{"key_max_running": 1}"#);
    flood(&mut second, "q", "A", 3, "1 hour");
    let mut open = first.transaction().unwrap();
    assert_eq!(keys_of(&claim(&mut open, "q", "w", 1)), ["A"]);
    assert!(claim(&mut second, "q", "w", 10).is_empty());
    enqueue(&mut second, "q", Some("B"));
    assert_eq!(keys_of(&claim(&mut second, "q", "w", 10)), ["B"]);
    execute(
        &mut second,
        "SELECT fair_enqueue('q', fairness_key => 'A', priority => 1)",
    );
    assert!(claim(&mut second, "q", "w", 10).is_empty());
    open.rollback().unwrap();
    let admitted = claim(&mut second, "q", "w", 10);
    assert_eq!(keys_of(&admitted), ["A"]);
    assert_eq!(admitted[0].priority, 1);
}

#[test]
fn a_task_that_commits_late_is_served_within_the_cap_that_others_of_its_key_have_filled() {
    let db = Cluster::shared().database();
    let (mut late, mut client) = (db.connect(), db.connect());
    configure(&mut client, "q", r#"{"key_max_running": 2}"#);
    let mut open = late.transaction().unwrap();
    let last = enqueue(&mut open, "q", Some("A"));
    for _ in 0..4 {
        enqueue(&mut client, "q", Some("A"));
    }
    let mut running = drain(&mut client, "q", 10);
    assert_eq!(running.len(), 2);
    open.commit().unwrap();
    assert!(claim(&mut client, "q", "w", 10).is_empty());
    let mut served = running.clone();
    while let Some(task) = running.pop() {
        assert!(complete(&mut client, &task));
        let next = claim(&mut client, "q", "w", 10);
        assert!(next.len() <= 1, "more than 2 would run: {next:?}");
        served.extend(next.clone());
        running.extend(next);
    }
    assert_eq!(served.len(), 5);
    assert!(served.iter().any(|task| task.id == last));
}
