//! Claims and completions write their rows directly where nobody else has a say in updates of the task table, and by
//! statements where a trigger or a rule has. Nobody can tell the one from the other by the rows.

use harvest_fair_server_tests::{
    Cluster, claim, complete, count, enqueue, expect_error, flood, one, pending, running,
};
use postgres::Client;

use crate::support::{BYSTANDER, KeyState, differences, drain, execute, fail, states, woken_by};

/// Every column of every task: instants by whether they are there, or how far from another one.
const ROWS: &str = "SELECT to_jsonb(t) - '{scheduled_at, sticky_until, lease_until, enqueued_at, started_at, finished_at}'::text[] ||
     jsonb_build_object('sticky_until', sticky_until IS NULL, 'lease', lease_until - started_at,
                        'started', started_at > scheduled_at, 'finished', finished_at >= started_at,
                        'enqueued', enqueued_at IS NOT NULL, 'bytes', pg_column_size(t))
     FROM harvest_fair.task t ORDER BY id";

/// What a day of work has left in a database.
#[derive(Debug, PartialEq)]
struct Traces {
    claimed: Vec<(i64, i32, i64, f64)>,
    rows: Vec<serde_json::Value>,
    states: Vec<KeyState>,
}

/// Tasks of every kind are claimed, completed, failed and claimed again.
fn work(client: &mut Client) -> Traces {
    execute(
        client,
        "ALTER TABLE harvest_fair.task ADD gone text DEFAULT repeat('x', 200), ADD number int DEFAULT 7;
         SELECT fair_set_weight('q', 'heavy', 4);
         INSERT INTO harvest_fair.task (queue, fairness_key, priority, weight, payload, new_start, scheduled_at, quota_key)
         SELECT 'q', 'k' || i % 5, 1 + i % 3, CASE WHEN i % 4 = 0 THEN 2.5 END,
                jsonb_build_object('n', i, 'big', CASE WHEN i % 7 = 0 THEN string_agg(md5(i || '-' || j), '') END),
                i % 6 = 0, now() - (1000 - i) * interval '1 min', CASE WHEN i % 9 = 0 THEN 'quota' END
         FROM generate_series(1, 60) i, generate_series(1, 400) j GROUP BY i;
         INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, sticky_until, scheduled_at)
         VALUES ('q', 'heavy', 'w', now() + interval '1 day', now() - interval '1 day');
         INSERT INTO harvest_fair.task (queue, fairness_key, parent_id, scheduled_at)
         SELECT 'q', NULL, 1, now() - interval '1 h' FROM generate_series(1, 5)",
    );
    execute(client, "ALTER TABLE harvest_fair.task DROP gone");
    let mut claimed = Vec::new();
    for n in [1, 7, 20, 1, 30] {
        let tasks = claim(client, "q", "w", n);
        assert_eq!(tasks.len(), n as usize);
        claimed.extend(tasks.iter().map(|t| (t.id, t.attempt, t.lease, t.lag)));
        let (ids, leases): (Vec<i64>, Vec<i64>) = tasks.iter().map(|t| (t.id, t.lease)).unzip();
        if n == 20 {
            // Every other one under a lease that is not its own; then half of the rest.
            let sql =
                "SELECT count(*) FROM fair_complete($1::bigint[], $2::bigint[], $3::float8[])";
            let costs: Vec<Option<f64>> =
                ids.iter().map(|id| (id % 3 == 0).then_some(3.0)).collect();
            let mixed: Vec<i64> = (0..20).map(|i| leases[i] + i as i64 % 2).collect();
            let settled: i64 = one(client, sql, &[&ids, &mixed, &costs]);
            assert_eq!(settled, 10);
            let (ids, leases) = (ids[..10].to_vec(), leases[..10].to_vec());
            let settled: i64 = one(client, sql, &[&ids, &leases, &costs[..10].to_vec()]);
            assert_eq!(settled, 5);
        } else if n == 7 {
            for task in &tasks {
                fail(client, task, Some("0"));
            }
        } else if n == 1 {
            assert!(complete(client, &tasks[0]));
            assert!(!complete(client, &tasks[0]));
        }
    }
    assert_eq!(differences(client), [""; 0]);
    Traces {
        claimed,
        rows: client
            .query(ROWS, &[])
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect(),
        states: states(client, "q"),
    }
}

#[test]
fn rows_are_the_same_whether_written_directly_or_by_statements() {
    let [direct, stated] = ["SELECT", BYSTANDER].map(|setup| {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(&mut client, setup);
        work(&mut client)
    });
    assert_eq!(direct, stated);
    let finished = direct.rows.iter().filter(|row| row["state"] == "completed");
    assert_eq!(finished.count(), 17);
}

#[test]
fn whoever_else_has_a_say_in_updates_is_heard() {
    let heard = "CREATE TABLE public.heard (who text);
         CREATE FUNCTION hear() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
             $$ BEGIN INSERT INTO public.heard VALUES (TG_NAME); RETURN NEW; END $$;";
    for (who, n) in [
        ("CREATE TRIGGER t BEFORE UPDATE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION hear()", 6),
        ("CREATE TRIGGER t AFTER UPDATE ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION hear()", 6),
        ("CREATE TRIGGER t AFTER UPDATE OF worker ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION hear()", 3),
        ("CREATE TRIGGER t AFTER UPDATE ON harvest_fair.task FOR EACH STATEMENT EXECUTE FUNCTION hear()", 2),
        ("CREATE TRIGGER t AFTER UPDATE ON harvest_fair.task REFERENCING NEW TABLE AS new
          FOR EACH STATEMENT EXECUTE FUNCTION hear()", 2),
        ("CREATE CONSTRAINT TRIGGER t AFTER UPDATE ON harvest_fair.task DEFERRABLE INITIALLY DEFERRED
          FOR EACH ROW EXECUTE FUNCTION hear()", 6),
        ("CREATE RULE t AS ON UPDATE TO harvest_fair.task DO ALSO INSERT INTO public.heard VALUES (NEW.state)", 6),
    ] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        flood(&mut client, "q", "a", 3, "1 hour");
        execute(&mut client, &format!("{heard} {who}"));
        let tasks = claim(&mut client, "q", "w", 3);
        let (ids, leases): (Vec<i64>, Vec<i64>) = tasks.iter().map(|t| (t.id, t.lease)).unzip();
        let sql = "SELECT count(*) FROM fair_complete($1::bigint[], $2::bigint[])";
        assert_eq!(one::<i64>(&mut client, sql, &[&ids, &leases]), 3, "{who}");
        let times: i64 = one(&mut client, "SELECT count(*) FROM public.heard", &[]);
        assert_eq!(times, n, "{who}");
        assert_eq!(differences(&mut client), [""; 0], "{who}");
    }
}

#[test]
fn a_constraint_that_is_checked_at_commit_is_checked_of_claims() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 3, "1 hour");
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task ADD CONSTRAINT one_each UNIQUE (worker) DEFERRABLE INITIALLY DEFERRED",
    );
    assert_eq!(claim(&mut client, "q", "first", 1).len(), 1);
    let taken = "duplicate key value violates unique constraint \"one_each\"";
    expect_error(
        &mut client,
        "SELECT fair_claim('q', 'second', 2)",
        "23505",
        taken,
        "",
    );
    assert_eq!(pending(&mut client, "q"), 2);
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn rows_of_a_table_that_inherits_are_left_alone() {
    for setup in ["SELECT", BYSTANDER] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(&mut client, setup);
        flood(&mut client, "q", "a", 4, "1 hour");
        // Its rows stand at the same places as those of the task table.
        execute(
            &mut client,
            "CREATE TABLE public.child () INHERITS (harvest_fair.task);
             INSERT INTO public.child SELECT * FROM ONLY harvest_fair.task",
        );
        let tasks = claim(&mut client, "q", "w", 4);
        assert!(complete(&mut client, &tasks[0]));
        fail(&mut client, &tasks[1], Some("0"));
        let sql = "SELECT fair_release($1::bigint, $2::bigint)";
        assert!(one::<bool>(
            &mut client,
            sql,
            &[&tasks[2].id, &tasks[2].lease]
        ));
        let touched = "SELECT count(*) FROM public.child WHERE (state, attempt) <> ('pending', 0)";
        assert_eq!(one::<i64>(&mut client, touched, &[]), 0);
        assert_eq!(
            one::<i64>(&mut client, "SELECT count(*) FROM public.child", &[]),
            4
        );
    }
}

#[test]
fn claims_go_on_while_what_postgres_knows_of_the_table_is_made_anew() {
    let db = Cluster::shared().database();
    let (mut client, mut dba) = (db.connect(), db.connect());
    flood(&mut client, "q", "a", 3_000, "1 hour");
    std::thread::scope(|scope| {
        let claimer = scope.spawn(|| drain(&mut client, "q", 10));
        while !claimer.is_finished() {
            execute(
                &mut dba,
                "GRANT SELECT ON harvest_fair.task TO public; REVOKE SELECT ON harvest_fair.task FROM public;
                 ANALYZE harvest_fair.task",
            );
        }
        assert_eq!(claimer.join().unwrap().len(), 3_000);
    });
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn added_columns_and_indexes_are_kept_up_and_constraints_are_checked() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 40, "1 hour");
    execute(
        &mut client,
        "ALTER TABLE harvest_fair.task ADD gone int, ADD note text DEFAULT 'none',
             ADD label text GENERATED ALWAYS AS (fairness_key || coalesce('@' || worker, '')) STORED,
             ADD CONSTRAINT no_stranger CHECK (worker <> 'stranger');
         ALTER TABLE harvest_fair.task DROP gone;
         CREATE INDEX by_label ON harvest_fair.task (label);
         CREATE INDEX by_length ON harvest_fair.task (length(worker)) WHERE state = 'running';
         CREATE UNIQUE INDEX one_at_a_time ON harvest_fair.task (worker) WHERE state = 'running' AND worker LIKE 'single%'",
    );
    assert_eq!(claim(&mut client, "q", "worker", 10).len(), 10);
    let by_index = |client: &mut Client, condition: &str| -> i64 {
        execute(client, "SET enable_seqscan = off");
        let found = one(
            client,
            &format!("SELECT count(*) FROM harvest_fair.task WHERE {condition}"),
            &[],
        );
        execute(client, "RESET enable_seqscan");
        found
    };
    assert_eq!(by_index(&mut client, "label = 'a@worker'"), 10);
    assert_eq!(
        by_index(&mut client, "length(worker) = 6 AND state = 'running'"),
        10
    );
    assert_eq!(by_index(&mut client, "note = 'none' AND label = 'a'"), 30);

    let refused = "new row for relation \"task\" violates check constraint \"no_stranger\"";
    expect_error(
        &mut client,
        "SELECT fair_claim('q', 'stranger', 2)",
        "23514",
        refused,
        "",
    );
    assert_eq!(claim(&mut client, "q", "single", 1).len(), 1);
    let taken = "duplicate key value violates unique constraint \"one_at_a_time\"";
    expect_error(
        &mut client,
        "SELECT fair_claim('q', 'single', 1)",
        "23505",
        taken,
        "",
    );
    assert_eq!(
        (running(&mut client, "q"), pending(&mut client, "q")),
        (11, 29)
    );
    assert_eq!(differences(&mut client), [""; 0]);
    assert_eq!(count(&drain(&mut client, "q", 5), "a"), 29);
}

#[test]
fn what_a_call_has_written_is_seen_by_the_next_one_in_the_same_statement() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 7, "1 hour");
    let sql = "SELECT count(DISTINCT id) FROM fair_claim('q', 'w', 2) AS a FULL JOIN fair_claim('q', 'w', 2) AS b USING (id)";
    assert_eq!(one::<i64>(&mut client, sql, &[]), 4);
    let extended = "SELECT fair_extend(id, lease) IS NOT NULL FROM fair_claim('q', 'w', 1)";
    assert!(one::<bool>(&mut client, extended, &[]));
    let task = claim(&mut client, "q", "w", 1).remove(0);
    let row = client
        .query_one(
            "SELECT fair_complete($1::bigint, $2::bigint), fair_extend($1, $2) IS NOT NULL, fair_complete($1::bigint, $2::bigint), fair_release($1, $2)",
            &[&task.id, &task.lease],
        );
    let row = row.unwrap_or_else(|error| panic!("{error:?}"));
    let seen: [bool; 4] = [0, 1, 2, 3].map(|i| row.get(i));
    assert_eq!(seen, [true, false, false, false]);
    assert_eq!(differences(&mut client), [""; 0]);
}

#[test]
fn a_statement_does_not_pass_over_rows_that_a_call_within_it_has_written() {
    for setup in ["SELECT", BYSTANDER] {
        let db = Cluster::shared().database();
        let mut client = db.connect();
        execute(&mut client, setup);
        flood(&mut client, "q", "a", 5, "1 hour");
        const HINT: &str = "Consider using an AFTER trigger instead of a BEFORE trigger to propagate changes to other rows.";
        let modified = "was already modified by an operation triggered by the current command";
        for sql in [
            "WITH c AS (SELECT * FROM fair_claim('q', 'w', 5)) DELETE FROM harvest_fair.task t USING c WHERE t.id = c.id",
            "WITH c AS (SELECT * FROM fair_claim('q', 'w', 1)) DELETE FROM harvest_fair.task t USING c WHERE t.id = c.id",
            "UPDATE harvest_fair.task t SET last_error = 'x' FROM fair_claim_by_id(1, 'w') c WHERE t.id = c.id",
        ] {
            expect_error(&mut client, sql, "27000", modified, HINT);
        }
        assert_eq!(pending(&mut client, "q"), 5);
        let task = claim(&mut client, "q", "w", 1).remove(0);
        let sql = format!(
            "DELETE FROM harvest_fair.task WHERE id = {0} AND fair_complete({0}, {1})",
            task.id, task.lease
        );
        expect_error(&mut client, &sql, "27000", modified, HINT);
        assert_eq!(running(&mut client, "q"), 1);
        assert_eq!(differences(&mut client), [""; 0]);
    }
}

#[test]
fn functions_of_constraints_see_what_is_committed_when_a_waiting_worker_gets_its_task() {
    let db = Cluster::shared().database();
    execute(
        &mut db.connect(),
        "CREATE TABLE public.open (yes boolean); INSERT INTO public.open VALUES (false);
         CREATE FUNCTION public.is_open() RETURNS boolean STABLE LANGUAGE plpgsql AS
             $$ BEGIN RETURN (SELECT yes FROM public.open); END $$;
         ALTER TABLE harvest_fair.task ADD CHECK (state <> 'running' OR public.is_open())",
    );
    let task = woken_by(&db, "w", |client| {
        let mut transaction = client.transaction().unwrap();
        transaction
            .execute("UPDATE public.open SET yes = true", &[])
            .unwrap();
        enqueue(&mut transaction, "q", Some("a"));
        transaction.commit().unwrap();
    });
    assert_eq!(task.key, "a");
}

#[test]
fn a_claim_that_is_undone_takes_its_direct_writes_back() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let id = enqueue(&mut client, "q", Some("a"));
    let mut transaction = client.transaction().unwrap();
    let task = claim(&mut transaction, "q", "w", 1).remove(0);
    let mut inner = transaction.transaction().unwrap();
    assert!(complete(&mut inner, &task));
    inner.rollback().unwrap();
    // In the same transaction, of what it has itself written.
    assert!(complete(&mut transaction, &task));
    assert!(!complete(&mut transaction, &task));
    transaction.rollback().unwrap();
    let again = claim(&mut client, "q", "w", 1).remove(0);
    assert_eq!((again.id, again.attempt), (id, 1));
    assert!(complete(&mut client, &again));
    assert_eq!(differences(&mut client), [""; 0]);
}
