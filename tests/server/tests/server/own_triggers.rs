//! A user's own triggers on the extension's tables: what they do on their own counts like anybody's.

use harvest_fair_server_tests::{Cluster, claim, claim_one, enqueue, expect_error, flood, one};

use crate::policy_support::audit;
use crate::support::{differences, execute, state, unattended};

#[test]
fn what_a_trigger_makes_of_a_new_task_is_checked_and_noted() {
    let db = unattended().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE FUNCTION set_tenant() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN NEW.fairness_key := NEW.payload->>'tenant'; RETURN NEW; END $$;
         CREATE TRIGGER set_tenant BEFORE INSERT ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION set_tenant()",
    );
    let insert = |tenant: &str| {
        let payload = format!("jsonb_build_object('tenant', '{tenant}')");
        format!("INSERT INTO harvest_fair.task (queue, payload) VALUES ('q', {payload})")
    };
    let begins_or_ends = "fairness key \"bad \" begins or ends with whitespace";
    expect_error(&mut client, &insert("bad "), "22023", begins_or_ends, "");
    execute(&mut client, "SELECT FROM fair_claim('q', 'w')");
    execute(&mut client, &insert("good"));
    assert_eq!(differences(&mut client), [""; 0]);
    assert_eq!(claim_one(&mut client, "q").key, "good");
}

#[test]
fn a_trigger_that_gives_a_claimed_task_another_key_leaves_the_running_counts_right() {
    let db = unattended().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 2, "1 hour");
    execute(
        &mut client,
        "CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN NEW.fairness_key := 'b'; RETURN NEW; END $$;
         CREATE TRIGGER move BEFORE UPDATE ON harvest_fair.task FOR EACH ROW
             WHEN (NEW.state = 'running') EXECUTE FUNCTION move()",
    );
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    assert_eq!(differences(&mut client), [""; 0]);
    assert_eq!(state(&mut client, "q", "a").running, 0);
}

#[test]
fn a_trigger_that_keeps_a_running_task_from_being_deleted_leaves_its_running_count() {
    let db = unattended().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 2, "1 hour");
    execute(
        &mut client,
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER keep BEFORE DELETE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION keep()",
    );
    claim_one(&mut client, "q");
    execute(&mut client, "DELETE FROM harvest_fair.task");
    assert_eq!(state(&mut client, "q", "a").running, 1);
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn a_trigger_that_claims_leaves_the_running_count_of_the_outer_claim_right() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "outer", "a", 4, "1 hour");
    flood(&mut client, "inner", "b", 4, "1 hour");
    execute(
        &mut client,
        "CREATE FUNCTION claim_more() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM fair_claim('inner', 'w', 1); RETURN NEW; END $$;
         CREATE TRIGGER zz_claim_more BEFORE UPDATE ON harvest_fair.task FOR EACH ROW
             WHEN (NEW.queue = 'outer' AND NEW.state = 'running') EXECUTE FUNCTION claim_more()",
    );
    assert_eq!(claim(&mut client, "outer", "w", 3).len(), 3);
    assert_eq!(state(&mut client, "outer", "a").running, 3);
    assert_eq!(state(&mut client, "inner", "b").running, 3);
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn a_trigger_that_sets_another_task_running_by_hand_is_counted() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let other = enqueue(&mut client, "other", Some("b"));
    assert!(state(&mut client, "other", "b").eligible);
    flood(&mut client, "q", "a", 1, "1 hour");
    execute(
        &mut client,
        &format!(
            "CREATE FUNCTION start_other() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN UPDATE harvest_fair.task SET state = 'running' WHERE id = {other}; RETURN NEW; END $$;
             CREATE TRIGGER zz_start_other BEFORE UPDATE ON harvest_fair.task FOR EACH ROW
                 WHEN (NEW.queue = 'q' AND NEW.state = 'running') EXECUTE FUNCTION start_other()"
        ),
    );
    assert_eq!(claim(&mut client, "q", "w", 1).len(), 1);
    assert_eq!(state(&mut client, "other", "b").running, 1);
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn what_a_trigger_changes_while_a_function_sets_weights_is_audited_too() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE FUNCTION mirror() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN
                 INSERT INTO harvest_fair.weight VALUES ('mirror', NEW.fairness_key, NEW.weight);
                 PERFORM fair_set_weight('twice', NEW.fairness_key, NEW.weight * 2);
                 RETURN NULL;
             END $$;
         CREATE TRIGGER mirror AFTER INSERT ON harvest_fair.weight FOR EACH ROW
             WHEN (NEW.queue = 'q') EXECUTE FUNCTION mirror()",
    );
    execute(
        &mut client,
        r#"SELECT fair_set_weights('q', '{"a": 2, "b": 3}')"#,
    );
    let lines: i64 = one(
        &mut client,
        "SELECT count(*) FROM harvest_fair.audit WHERE queue = 'mirror' AND action = 'insert_weight'",
        &[],
    );
    assert_eq!(lines, 2, "{:#?}", audit(&mut client));
    let all: i64 = one(&mut client, "SELECT count(*) FROM harvest_fair.audit", &[]);
    assert_eq!(all, 5, "{:#?}", audit(&mut client));
}
