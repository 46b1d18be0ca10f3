//! Calls that are refused on an ordinary server, a case for each error; `errors.rs` provokes them.

/// A call that is refused: which error it provokes, as the source calls it, and the statements.
pub type Case = (&'static str, &'static str);

macro_rules! in_repeatable_read {
    ($sql:literal) => {
        concat!("BEGIN ISOLATION LEVEL REPEATABLE READ; ", $sql)
    };
}

/// On an ordinary server. Task 1 is running under lease 1.
pub const ORDINARY: &[Case] = &[
    ("Name Blank", "SELECT fair_enqueue('')"),
    ("Name Blank", "SELECT fair_enqueue('q', fairness_key => '')"),
    ("Name TooLong", "SELECT fair_enqueue(repeat('q', 256))"),
    (
        "Name TooLong",
        "SELECT fair_enqueue('q', fairness_key => repeat('k', 257))",
    ),
    ("Name OuterWhitespace", "SELECT fair_enqueue(' q')"),
    (
        "Name OuterWhitespace",
        "SELECT fair_enqueue('q', fairness_key => 'k ')",
    ),
    ("Name Dots", "SELECT fair_claim('..', 'w')"),
    ("Name Dots", "SELECT fair_charge('q', '.')"),
    ("Name Control", r"SELECT fair_weights(E'a\nb')"),
    (
        "Name Control",
        r"SELECT fair_enqueue('q', fairness_key => E'a\tb')",
    ),
    (
        "Name PriorityRange",
        "INSERT INTO harvest_fair.task (queue, priority) VALUES ('q', 6)",
    ),
    ("Name PriorityRange", "SELECT fair_lag('q', 0)"),
    ("Name WeightRange", "SELECT fair_enqueue('q', weight => 0)"),
    ("Name WeightRange", "SELECT fair_set_weight('q', 'k', 'NaN')"),
    ("Name ClaimCostRange", "SELECT fair_charge('q', 'k', 0)"),
    ("Name ReportedCostRange", "SELECT fair_complete(1, 1, -1)"),
    ("Null", "SELECT fair_enqueue(NULL)"),
    ("Null", "SELECT fair_claim('q', NULL)"),
    ("Null", "SELECT fair_claim('q', 'w', NULL)"),
    ("Null", "SELECT fair_claim(NULL::text[], 'w')"),
    ("Null", "SELECT fair_complete(NULL, 1)"),
    ("Null", "SELECT fair_complete(1, NULL)"),
    ("Null", "SELECT fair_release(NULL, ARRAY[1::bigint])"),
    ("Null", "SELECT fair_release(ARRAY[1::bigint], NULL)"),
    ("Null", "SELECT fair_charge('q', 'k', NULL)"),
    ("Null", "SELECT fair_charge('q', 'k', 1, NULL)"),
    ("Null", "SELECT fair_set_weight('q', NULL, 2)"),
    ("Null", "SELECT fair_set_weight('q', 'k', NULL)"),
    ("Null", "SELECT fair_set_weights('q', NULL)"),
    ("Null", "SELECT fair_configure('q', NULL)"),
    (
        "Null",
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER swallow BEFORE INSERT ON harvest_fair.task FOR EACH ROW EXECUTE FUNCTION swallow();
         SELECT fair_enqueue('q')",
    ),
    ("Name Blank", "SELECT fair_claim('q', '')"),
    ("Name Control", r"SELECT fair_claim_by_id(1, E'w\x07')"),
    (
        "Name TooLong",
        "SELECT fair_enqueue('q', sticky_worker => repeat('w', 256))",
    ),
    ("MaxTasks", "SELECT fair_claim('q', 'w', 0)"),
    ("MaxTasks", "SELECT fair_preview('q', 'w', 1001)"),
    ("MaxAttempts", "SELECT fair_enqueue('q', max_attempts => 0)"),
    (
        "Counter",
        "INSERT INTO harvest_fair.task (queue, attempt) VALUES ('q', 2147483647)",
    ),
    (
        "Counter",
        "INSERT INTO harvest_fair.task (queue, lease) VALUES ('q', -1)",
    ),
    ("Duration", "SELECT fair_claim('q', 'w', 1, '-1 s')"),
    ("Duration", "SELECT fair_fail(1, 1, 'x', '-1 s')"),
    ("Duration", "SELECT fair_extend(1, 1, '0')"),
    (
        "Duration",
        "SELECT fair_enqueue('q', sticky_worker => 'w', sticky_for => '-1 day')",
    ),
    ("Duration", "SELECT fair_prune('q', '-1 month')"),
    (
        "ArrayLength",
        "SELECT fair_complete(ARRAY[1, 2]::bigint[], ARRAY[1]::bigint[])",
    ),
    (
        "ArrayLength",
        "SELECT fair_complete(ARRAY[1]::bigint[], ARRAY[1]::bigint[], ARRAY[1, 2])",
    ),
    ("ArrayNull", "SELECT fair_claim(ARRAY['q', NULL], 'w')"),
    (
        "ArrayNull",
        "SELECT fair_complete(ARRAY[1, NULL]::bigint[], ARRAY[1, 1]::bigint[])",
    ),
    (
        "ArrayNull",
        "SELECT fair_release(ARRAY[1]::bigint[], ARRAY[NULL]::bigint[])",
    ),
    ("UnknownParent", "SELECT fair_enqueue('q', parent_id => 777)"),
    (
        "UnknownParent",
        "UPDATE harvest_fair.task SET parent_id = 999999999 WHERE id = 1",
    ),
    ("Isolation", in_repeatable_read!("SELECT fair_claim('q', 'w')")),
    (
        "Isolation",
        "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT fair_claim_by_id(1, 'w')",
    ),
    ("Isolation", in_repeatable_read!("SELECT fair_complete(1, 1)")),
    ("Isolation", in_repeatable_read!("SELECT fair_fail(1, 1, 'x')")),
    ("Isolation", in_repeatable_read!("SELECT fair_release(1, 1)")),
    ("Isolation", in_repeatable_read!("SELECT fair_extend(1, 1)")),
    ("Isolation", in_repeatable_read!("SELECT fair_cancel(1)")),
    ("Isolation", in_repeatable_read!("SELECT fair_retry(1)")),
    ("Isolation", in_repeatable_read!("SELECT fair_charge('q', 'k')")),
    (
        "Isolation",
        in_repeatable_read!("SELECT fair_preview('q', 'w', 1)"),
    ),
    (
        "ReadOnly",
        "BEGIN READ ONLY; SELECT fair_claim('q', 'w')",
    ),
    (
        "StickyFor",
        "SELECT fair_enqueue('q', sticky_for => '1 minute')",
    ),
    (
        "Prepare",
        "BEGIN; SELECT fair_complete(1, 1); PREPARE TRANSACTION 'errors'",
    ),
    (
        "Prepare",
        "BEGIN; DELETE FROM harvest_fair.task WHERE state = 'running'; PREPARE TRANSACTION 'errors'",
    ),
    (
        "TooManyWeights",
        "SELECT fair_set_weights('full', (SELECT jsonb_object_agg('k' || i, 2) FROM generate_series(1, 1000) i));
         SELECT fair_set_weight('full', 'k1001', 2)",
    ),
    ("DefaultKeyWeight", "SELECT fair_set_weight('q', '', 2)"),
    ("UnknownSetting", r#"SELECT fair_configure('q', '{"speed": 1}')"#),
    (
        "Setting queue_weight",
        r#"SELECT fair_configure('q', '{"queue_weight": -1}')"#,
    ),
    (
        "Setting rate_limit",
        r#"SELECT fair_configure('q', '{"rate_limit": 0}')"#,
    ),
    (
        "Setting key_rate_limit",
        r#"SELECT fair_configure('q', '{"key_rate_limit": "fast"}')"#,
    ),
    (
        "Setting key_max_running",
        r#"SELECT fair_configure('q', '{"key_max_running": 1.5}')"#,
    ),
    ("Setting lease", r#"SELECT fair_configure('q', '{"lease": 0}')"#),
    (
        "Setting priority_aging",
        r#"SELECT fair_configure('q', '{"priority_aging": "soon"}')"#,
    ),
    (
        "Setting new_start_handicap",
        r#"SELECT fair_configure('q', '{"new_start_handicap": "-1 s"}')"#,
    ),
    (
        "Setting charge",
        r#"SELECT fair_configure('q', '{"charge": "double"}')"#,
    ),
    (
        "Setting group_separator",
        r#"SELECT fair_configure('q', '{"group_separator": "::"}')"#,
    ),
    (
        "Setting paused",
        r#"SELECT fair_configure('q', '{"paused": "yes"}')"#,
    ),
    (
        "Setting retention",
        r#"INSERT INTO harvest_fair.queue (queue, settings) VALUES ('q', '{"retention": -1}')"#,
    ),
    ("NotAnObject", "SELECT fair_configure('q', '[]')"),
    ("NotAnObject", "SELECT fair_set_weights('q', '2')"),
    ("Json", r#"SELECT fair_set_weights('q', '{"k": 1e400}')"#),
    (
        "Json",
        "SELECT fair_configure('q', (repeat('[', 500) || repeat(']', 500))::jsonb)",
    ),
    (
        "WeightType",
        r#"SELECT fair_set_weights('q', '{"k": "2"}')"#,
    ),
    (
        "WeightOfKey",
        r#"SELECT fair_set_weights('q', '{"a": 1, "b": 2, "c": -1}')"#,
    ),
    (
        "WeightOfKey",
        r#"SELECT fair_preview('q', 'w', 1, '{"a": 1, "b": 2000}')"#,
    ),
    (
        "Altered",
        "ALTER INDEX harvest_fair.task_lane RENAME TO lane; SELECT fair_claim('q', 'w')",
    ),
    (
        "Altered",
        "ALTER TABLE harvest_fair.task RENAME COLUMN last_error TO error; SELECT fair_claim('q', 'w')",
    ),
    (
        "Altered",
        "ALTER TABLE harvest_fair.task ALTER COLUMN attempt TYPE bigint; SELECT fair_claim('q', 'w')",
    ),
    (
        "Altered",
        "ALTER TYPE harvest_fair.task_state RENAME VALUE 'failed' TO 'lost';
         ALTER TABLE harvest_fair.task SET (fillfactor = 90); SELECT fair_claim('q', 'w')",
    ),
    (
        "Uncommitted",
        "SELECT fair_enqueue('q'); SELECT FROM harvest_fair.check()",
    ),
    // Those that are raised by SQL.
    ("RAISE", "SELECT fair_grant(NULL, 'worker')"),
    ("RAISE", "SELECT fair_grant('postgres', NULL)"),
    ("RAISE", "SELECT fair_grant('postgres', 'emperor')"),
    // Not a call that the extension's own SQL allows.
    (
        "ereport",
        "CREATE FUNCTION bare() RETURNS int LANGUAGE c AS 'harvest_fair', 'admit_task'; SELECT bare()",
    ),
];
