//! Who may do what, and what a hostile session cannot do.

use std::sync::atomic::{AtomicUsize, Ordering};

use harvest_fair_server_tests::{
    Cluster, Database, claim_one, complete, enqueue, expect_refusal, flood, keys_of, one,
};
use postgres::Client;

use crate::support::{drain, execute};

/// Roles belong to the whole cluster, so each test has its own, dropped with its database.
struct Role<'d> {
    db: &'d Database<'d>,
    name: String,
}

impl<'d> Role<'d> {
    fn new(db: &'d Database<'d>, bundle: Option<&str>) -> Role<'d> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("role{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut admin = db.connect();
        execute(&mut admin, &format!("CREATE ROLE {name} LOGIN"));
        if let Some(bundle) = bundle {
            execute(
                &mut admin,
                &format!("SELECT fair_grant('{name}', '{bundle}')"),
            );
        }
        Role { db, name }
    }

    fn connect(&self) -> Client {
        self.db.connect_as(&self.name)
    }
}

impl Drop for Role<'_> {
    fn drop(&mut self) {
        if let Ok(mut admin) = self.db.cluster().try_connect(self.db.name()) {
            let _ = admin.batch_execute(&format!("DROP OWNED BY {0}; DROP ROLE {0}", self.name));
        }
    }
}

/// Calls that the bundles are made for, with the bundles that may make them. `$id` and `$lease` are of a running task.
const CALLS: [(&str, &[&str]); 25] = [
    (
        "SELECT fair_enqueue('q', fairness_key => 'A')",
        &["producer"],
    ),
    (
        "INSERT INTO harvest_fair.task (queue, fairness_key) VALUES ('q', 'A')",
        &["producer"],
    ),
    ("SELECT * FROM fair_claim('q', 'w', 1)", &["worker"]),
    ("SELECT * FROM fair_claim(ARRAY['q'], 'w', 1)", &["worker"]),
    ("SELECT fair_extend($id, $lease)", &["worker"]),
    ("SELECT fair_complete($id, $lease)", &["worker"]),
    (
        "SELECT fair_complete(ARRAY[$id]::bigint[], ARRAY[$lease]::bigint[])",
        &["worker"],
    ),
    ("SELECT fair_fail($id, $lease, 'x')", &["worker"]),
    ("SELECT fair_release($id, $lease)", &["worker"]),
    (
        "SELECT fair_release(ARRAY[$id]::bigint[], ARRAY[$lease]::bigint[])",
        &["worker"],
    ),
    ("SELECT fair_charge('q', 'A')", &["worker"]),
    ("SELECT * FROM fair_lag('q')", &["worker", "admin"]),
    ("SELECT fair_set_weight('q', 'A', 2)", &["admin"]),
    ("SELECT fair_weights('q')", &["admin"]),
    ("SELECT fair_clear_weight('q', 'A')", &["admin"]),
    ("SELECT fair_cancel(4711)", &["admin"]),
    ("SELECT fair_retry(4711)", &["admin"]),
    ("SELECT * FROM fair_state('q')", &["admin"]),
    ("SELECT * FROM harvest_fair.check()", &["admin"]),
    ("SELECT * FROM harvest_fair.stats", &["admin"]),
    ("SELECT * FROM harvest_fair.tenant_stats", &["admin"]),
    ("SELECT * FROM fair_chart('q')", &["admin"]),
    ("SELECT * FROM harvest_fair.task", &["admin"]),
    ("SELECT * FROM harvest_fair.weight", &["admin"]),
    ("SELECT * FROM harvest_fair.audit", &["admin"]),
];

/// What nobody but the owner may do.
const FORBIDDEN: [&str; 9] = [
    "UPDATE harvest_fair.task SET priority = 1",
    "DELETE FROM harvest_fair.task",
    "TRUNCATE harvest_fair.task",
    "INSERT INTO harvest_fair.weight (queue, fairness_key, weight) VALUES ('q', 'A', 2)",
    "DELETE FROM harvest_fair.audit",
    "UPDATE harvest_fair.key_state SET pass = 0",
    "SELECT fair_grant(current_user::regrole, 'admin')",
    "SET harvest_fair.fairness = off",
    "DROP EXTENSION harvest_fair",
];

#[test]
fn each_bundle_allows_its_calls_and_no_others() {
    let db = Cluster::shared().database();
    let mut owner = db.connect();
    for bundle in [Some("producer"), Some("worker"), Some("admin"), None] {
        let role = Role::new(&db, bundle);
        let mut client = role.connect();
        for (call, allowed) in CALLS {
            enqueue(&mut owner, "q", Some("A"));
            let task = claim_one(&mut owner, "q");
            let call = call
                .replace("$id", &task.id.to_string())
                .replace("$lease", &task.lease.to_string());
            if bundle.is_some_and(|bundle| allowed.contains(&bundle)) {
                execute(&mut client, &call);
            } else {
                let refusal = expect_refusal(&mut client, &call);
                assert_eq!(refusal.sqlstate, "42501", "{bundle:?}: {call}: {refusal:?}");
            }
        }
        for call in FORBIDDEN {
            let refusal = expect_refusal(&mut client, call);
            assert_eq!(refusal.sqlstate, "42501", "{bundle:?}: {call}: {refusal:?}");
        }
    }
}

#[test]
fn a_role_without_a_bundle_may_execute_nothing() {
    let db = Cluster::shared().database();
    let role = Role::new(&db, None);
    let open: Vec<String> = db
        .connect()
        .query(
            "SELECT p.oid::regprocedure::text FROM pg_proc p
             JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
             JOIN pg_extension e ON d.refobjid = e.oid AND e.extname = 'harvest_fair'
             WHERE has_function_privilege($1, p.oid, 'EXECUTE')",
            &[&role.name],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn the_extension_creates_no_roles() {
    let cluster = Cluster::shared();
    let db = cluster.empty_database();
    let mut client = db.connect();
    let roles =
        "SELECT count(*) FROM pg_roles WHERE rolname LIKE '%fair%' OR rolname LIKE '%harvest%'";
    execute(&mut client, "CREATE EXTENSION harvest_fair");
    assert_eq!(one::<i64>(&mut client, roles, &[]), 0);
}

#[test]
fn a_whole_service_runs_on_the_bundles_alone() {
    let db = Cluster::shared().database();
    let (producer, worker, admin) = (
        Role::new(&db, Some("producer")),
        Role::new(&db, Some("worker")),
        Role::new(&db, Some("admin")),
    );
    let (mut producer, mut worker, mut admin) =
        (producer.connect(), worker.connect(), admin.connect());
    execute(
        &mut admin,
        "SELECT fair_set_weight('q', 'A', 3, 'pays more')",
    );
    let parent = enqueue(&mut producer, "q", Some("A"));
    flood(&mut producer, "q", "B", 2, "1 s");
    let child: i64 = one(
        &mut producer,
        "SELECT fair_enqueue('q', parent_id => $1)",
        &[&parent],
    );
    assert!(child > parent);
    let tasks = drain(&mut worker, "q", 1);
    assert_eq!(tasks.len(), 4);
    for task in &tasks {
        assert!(complete(&mut worker, task));
    }
    let by: String = one(&mut admin, "SELECT updated_by FROM fair_weights('q')", &[]);
    assert!(by.starts_with("role"), "the weight was set by {by}");
    let done: i64 = one(
        &mut admin,
        "SELECT count(*) FROM harvest_fair.task WHERE state = 'completed'",
        &[],
    );
    assert_eq!(done, 4);
}

#[test]
fn bundles_reach_functions_in_a_schema_of_their_own() {
    let db = Cluster::shared().empty_database();
    let mut owner = db.connect();
    execute(
        &mut owner,
        "CREATE SCHEMA \"my jobs\"; CREATE EXTENSION harvest_fair SCHEMA \"my jobs\"",
    );
    for (bundle, call) in [
        ("producer", "fair_enqueue('q', fairness_key => 'A')"),
        ("worker", "fair_claim('q', 'w')"),
        ("admin", "fair_state('q')"),
    ] {
        let role = Role::new(&db, None);
        let call = format!("SELECT count(*) FROM \"my jobs\".{call}");
        let refusal = expect_refusal(&mut role.connect(), &call);
        assert_eq!(refusal.sqlstate, "42501", "{bundle}: {refusal:?}");
        execute(
            &mut owner,
            &format!("SELECT \"my jobs\".fair_grant('{}', '{bundle}')", role.name),
        );
        execute(&mut role.connect(), &call);
    }
}

#[test]
fn a_producer_cannot_write_the_workers_fields() {
    let db = Cluster::shared().database();
    let producer = Role::new(&db, Some("producer"));
    let mut client = producer.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key, quota_key, priority, weight, new_start, payload,
             scheduled_at, parent_id, max_attempts)
         VALUES ('q', 'A', NULL, 2, 3, false, '{}', now(), NULL, 7)",
    );
    for (column, value) in [
        ("id", "7"),
        ("state", "'running'"),
        ("state", "'completed'"),
        ("lease", "1"),
        ("lease_until", "'infinity'"),
        ("attempt", "-100"),
        ("worker", "'w'"),
        ("charged", "-5"),
        ("enqueued_at", "now()"),
    ] {
        let sql = format!("INSERT INTO harvest_fair.task (queue, {column}) VALUES ('q', {value})");
        let refusal = expect_refusal(&mut client, &sql);
        assert_eq!(refusal.sqlstate, "42501", "{sql}: {refusal:?}");
    }
    for column in ["priority", "weight"] {
        let sql = format!("INSERT INTO harvest_fair.task (queue, {column}) VALUES ('q', 30000)");
        assert_eq!(expect_refusal(&mut client, &sql).sqlstate, "22023");
    }
}

#[test]
fn the_right_to_turn_fairness_off_can_be_granted() {
    let db = Cluster::shared().database();
    let role = Role::new(&db, Some("worker"));
    let mut client = role.connect();
    let off = "SET harvest_fair.fairness = off";
    assert_eq!(expect_refusal(&mut client, off).sqlstate, "42501");
    execute(
        &mut db.connect(),
        &format!(
            "GRANT SET ON PARAMETER harvest_fair.fairness TO {}",
            role.name
        ),
    );
    execute(&mut client, off);
}

/// Objects that a hostile user puts in front of the real ones. Whoever calls one of them gets an error, so that the
/// extension's calls succeed only if they call none.
fn trap(client: &mut Client) {
    execute(
        client,
        "CREATE SCHEMA evil;
         CREATE FUNCTION evil.caught() RETURNS text LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'hijacked'; END $$;
         CREATE TABLE evil.task (id bigint); CREATE TABLE evil.weight (id bigint); CREATE TABLE evil.queue (id bigint);
         CREATE TABLE evil.key_state (id bigint); CREATE TABLE evil.audit (id bigint);
         CREATE TYPE evil.task_state AS ENUM ('hijacked');
         CREATE TYPE evil.claimed_task AS (hijacked int);
         CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT evil.caught()::timestamptz';
         CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT evil.caught()::timestamptz';
         CREATE FUNCTION evil.count(anyelement) RETURNS bigint LANGUAGE sql AS 'SELECT evil.caught()::bigint';
         CREATE FUNCTION evil.format(text, VARIADIC text[]) RETURNS text LANGUAGE sql AS 'SELECT evil.caught()';
         CREATE FUNCTION evil.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT evil.caught()::bigint'",
    );
    for (kind, operators) in [
        ("text", ["=", "<>", "<", ">", "<=", ">=", "||"].as_slice()),
        ("bigint", &["=", "<>", "<", ">", "<=", ">=", "+", "-"]),
        ("integer", &["=", "<>", "<", ">", "<=", ">=", "+", "-"]),
        ("smallint", &["=", "<>", "<", ">", "<=", ">="]),
        (
            "float8",
            &["=", "<>", "<", ">", "<=", ">=", "+", "-", "*", "/"],
        ),
        ("boolean", &["=", "<>", "<", ">", "<=", ">="]),
        ("timestamptz", &["=", "<>", "<", ">", "<=", ">="]),
        ("name", &["=", "<>"]),
        ("oid", &["=", "<>"]),
        ("tid", &["=", "<>"]),
        ("evil.task_state", &["="]),
        ("harvest_fair.task_state", &["=", "<>"]),
    ] {
        for operator in operators {
            execute(
                client,
                &format!(
                    "CREATE OR REPLACE FUNCTION evil.op(a {kind}, b {kind}) RETURNS boolean LANGUAGE plpgsql AS
                         $$ BEGIN RAISE EXCEPTION 'hijacked by an operator'; END $$;
                     CREATE OPERATOR evil.{operator} (FUNCTION = evil.op, LEFTARG = {kind}, RIGHTARG = {kind})"
                ),
            );
        }
    }
}

#[test]
fn a_hostile_search_path_changes_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    trap(&mut client);
    execute(&mut client, "SET search_path = evil, public, pg_catalog");
    // The trap works.
    assert_eq!(
        expect_refusal(&mut client, "SELECT 'a'::text = 'b'::text").message,
        "hijacked by an operator"
    );
    assert_eq!(
        expect_refusal(&mut client, "SELECT now()").message,
        "hijacked"
    );
    for sql in [
        "SELECT fair_enqueue('q', fairness_key => 'A', priority => '2'::smallint, weight => 2)",
        "SELECT fair_enqueue('q', parent_id => '1', quota_key => 'quota')",
        "INSERT INTO harvest_fair.task (queue, fairness_key, quota_key) VALUES ('q', 'B', 'quota'), ('q', NULL, NULL)",
        "UPDATE harvest_fair.task SET payload = '{\"touched\": true}'",
        "SELECT fair_set_weight('q', 'A', 3, 'because')",
        "SELECT * FROM fair_weights('q')",
        "SELECT fair_clear_weight('q', 'A')",
        "SELECT * FROM fair_lag('q')",
        "SELECT fair_charge('q', 'C', '1', '3'::smallint)",
        "SELECT * FROM fair_state()",
        "SELECT * FROM harvest_fair.stats",
        "SELECT * FROM harvest_fair.tenant_stats",
        "SELECT * FROM fair_chart('q')",
        "SELECT fair_cancel('4711')",
        "SELECT fair_retry('4711')",
    ] {
        execute(&mut client, sql);
    }
    let claimed: Vec<(i64, i64)> = client
        .query(
            "SELECT id, lease FROM fair_claim('q', 'w', 4, '1 ms'::interval)",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    assert_eq!(claimed.len(), 4);
    let (id, lease) = claimed[0];
    for sql in [
        format!("SELECT fair_extend('{id}', '{lease}', '1 min'::interval)"),
        format!("SELECT fair_release({id}, {lease})"),
        "SELECT * FROM fair_claim('q', 'w')".to_owned(),
    ] {
        execute(&mut client, &sql);
    }
    let mut honest = db.connect();
    let lease: i64 = one(
        &mut honest,
        "SELECT lease FROM harvest_fair.task WHERE id = $1",
        &[&id],
    );
    execute(
        &mut client,
        &format!("SELECT fair_complete({id}, {lease}, '2')"),
    );
    let (id, lease) = claimed[1];
    execute(
        &mut client,
        &format!("SELECT fair_fail('{id}', '{lease}', 'x', '0'::interval)"),
    );
    let (ids, leases) = (
        format!("'{{{},{}}}'::bigint[]", claimed[2].0, claimed[3].0),
        format!("'{{{},{}}}'::bigint[]", claimed[2].1, claimed[3].1),
    );
    execute(
        &mut client,
        &format!("SELECT fair_complete({ids}, {leases})"),
    );
    let states: String = one(
        &mut honest,
        "SELECT string_agg(state::text, ' ' ORDER BY state) FROM harvest_fair.task",
        &[],
    );
    assert_eq!(states, "pending completed completed completed");
    let role = Role::new(&db, None);
    execute(
        &mut client,
        &format!("SELECT fair_grant('{}', 'admin')", role.name),
    );
    execute(&mut role.connect(), "SELECT * FROM fair_state('q')");
}

#[test]
fn hostile_temporary_tables_change_nothing() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    execute(
        &mut client,
        "CREATE TEMP TABLE task (LIKE harvest_fair.task); CREATE TEMP TABLE weight (LIKE harvest_fair.weight);
         CREATE TEMP TABLE pg_class (hijacked int)",
    );
    enqueue(&mut client, "q", Some("A"));
    assert_eq!(keys_of(&drain(&mut client, "q", 1)), ["A"]);
}

#[test]
fn hostile_names_are_only_names() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    let nasty = "x'); DELETE FROM harvest_fair.task; --\"$$%s\\";
    enqueue(&mut client, nasty, Some(nasty));
    execute(&mut client, "SET standard_conforming_strings = off");
    let tasks = harvest_fair_server_tests::claim(&mut client, nasty, nasty, 1);
    assert_eq!(keys_of(&tasks), [nasty]);
    let worker: String = one(&mut client, "SELECT worker FROM harvest_fair.task", &[]);
    assert_eq!(worker, nasty);
    execute(&mut client, "RESET standard_conforming_strings");
    let listed: i64 = one(
        &mut client,
        "SELECT count(*) FROM fair_state($1)",
        &[&nasty],
    );
    assert_eq!(listed, 1);
}

#[test]
fn a_worker_can_settle_only_what_it_holds() {
    let db = Cluster::shared().database();
    let worker = Role::new(&db, Some("worker"));
    let mut client = db.connect();
    flood(&mut client, "q", "A", 2, "1 s");
    let task = claim_one(&mut client, "q");
    let mut thief = worker.connect();
    let mut guessed = task.clone();
    for lease in [-1, 0, 1, task.lease - 1, task.lease + 1] {
        guessed.lease = lease;
        if lease != task.lease {
            assert!(!complete(&mut thief, &guessed), "lease {lease}");
        }
    }
    assert!(complete(&mut client, &task));
}
