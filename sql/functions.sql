-- Public functions, in the order a client calls them. They are installed in the schema of CREATE EXTENSION.
-- Each is SECURITY DEFINER; the SQL inside the library names every object and operator with its schema.

-- Enqueue ----------------------------------------------------------------------------------------

CREATE FUNCTION fair_enqueue(
    queue text, payload jsonb DEFAULT '{}', fairness_key text DEFAULT NULL, priority integer DEFAULT NULL,
    weight float8 DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL, parent_id bigint DEFAULT NULL,
    quota_key text DEFAULT NULL, sticky_worker text DEFAULT NULL, sticky_for interval DEFAULT NULL,
    new_start boolean DEFAULT false, max_attempts integer DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_enqueue_wrapper';
COMMENT ON FUNCTION fair_enqueue(text, jsonb, text, integer, float8, timestamptz, bigint, text, text, interval, boolean, integer) IS
    'Adds a task to a queue and returns its id; claimable once the transaction commits and scheduled_at has come';

-- Claim ------------------------------------------------------------------------------------------

CREATE FUNCTION fair_claim(queue text, worker text, max_tasks integer DEFAULT 1, wait interval DEFAULT NULL)
RETURNS SETOF harvest_fair.claimed_task LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_claim';
COMMENT ON FUNCTION fair_claim(text, text, integer, interval) IS
    'Claims up to max_tasks tasks in weighted fair order; with wait, sleeps until there is one or the time is over';

CREATE FUNCTION fair_claim(queues text[], worker text, max_tasks integer DEFAULT 1, wait interval DEFAULT NULL)
RETURNS SETOF harvest_fair.claimed_task LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_claim_any';
COMMENT ON FUNCTION fair_claim(text[], text, integer, interval) IS
    'Claims from several queues, one at a time in an order drawn anew for each call';

CREATE FUNCTION fair_claim_by_id(id bigint, worker text)
RETURNS SETOF harvest_fair.claimed_task LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_claim_by_id';
COMMENT ON FUNCTION fair_claim_by_id(bigint, text) IS
    'Claims one task by its id, if it is claimable now: no order, but its key is charged';

-- Settle -----------------------------------------------------------------------------------------

CREATE FUNCTION fair_complete(id bigint, lease bigint, cost float8 DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_complete_wrapper';
COMMENT ON FUNCTION fair_complete(bigint, bigint, float8) IS
    'Marks a claimed task as completed; a cost corrects what its key was charged; false if the lease is no longer held';

CREATE FUNCTION fair_complete(ids bigint[], leases bigint[], costs float8[] DEFAULT NULL)
RETURNS SETOF bigint LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_complete_many_wrapper';
COMMENT ON FUNCTION fair_complete(bigint[], bigint[], float8[]) IS 'Completes many tasks at once; returns the ids whose lease was still held';

CREATE FUNCTION fair_fail(id bigint, lease bigint, error text, retry_in interval DEFAULT NULL)
RETURNS harvest_fair.task_state LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_fail_wrapper';
COMMENT ON FUNCTION fair_fail(bigint, bigint, text, interval) IS
    'Reports a failure: ''pending'' again after retry_in (default: doubling from 1 s to 1 h, with jitter), ''failed'' at max_attempts, null if the lease is no longer held';

CREATE FUNCTION fair_release(id bigint, lease bigint)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_release_wrapper';
COMMENT ON FUNCTION fair_release(bigint, bigint) IS
    'Gives a claimed task back: it is pending again, its charge is undone and the attempt is not counted; false if the lease is no longer held';

CREATE FUNCTION fair_release(ids bigint[], leases bigint[])
RETURNS SETOF bigint LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_release_many_wrapper';
COMMENT ON FUNCTION fair_release(bigint[], bigint[]) IS 'Gives many tasks back at once; returns the ids whose lease was still held';

CREATE FUNCTION fair_extend(id bigint, lease bigint, lease_for interval DEFAULT NULL)
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_extend_wrapper';
COMMENT ON FUNCTION fair_extend(bigint, bigint, interval) IS
    'Extends a lease (a heartbeat) and returns its new end; null if it is no longer held';

CREATE FUNCTION fair_cancel(id bigint)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_cancel_wrapper';
COMMENT ON FUNCTION fair_cancel(bigint) IS 'Cancels a pending task; false if it is not pending';

CREATE FUNCTION fair_retry(id bigint)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_retry_wrapper';
COMMENT ON FUNCTION fair_retry(bigint) IS 'Makes a failed or cancelled task pending again, its attempts reset; false if it is neither';

-- Dispatchers with a claim query of their own ----------------------------------------------------

CREATE FUNCTION fair_charge(queue text, fairness_key text, cost float8 DEFAULT 1, priority integer DEFAULT 3)
RETURNS TABLE (queue text, fairness_key text, priority smallint, weight float8, start float8, pass float8, clock float8, lag float8)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_charge_wrapper';
COMMENT ON FUNCTION fair_charge(text, text, float8, integer) IS
    'Charges a key as a claim of that cost would, in units of virtual time; never moves the clock; undone when the transaction aborts';

CREATE FUNCTION fair_lag(queue text, priority integer DEFAULT NULL)
RETURNS TABLE (queue text, priority smallint, fairness_key text, weight float8, pass float8, clock float8, lag float8)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_lag_wrapper';
COMMENT ON FUNCTION fair_lag(text, integer) IS
    'The lag map of a queue: how far each key on the board is ahead of its tier''s clock, in units; a key that is missing has lag 0';

-- Policy -----------------------------------------------------------------------------------------

CREATE FUNCTION fair_set_weight(queue text, fairness_key text, weight float8, reason text DEFAULT NULL)
RETURNS SETOF harvest_fair.weight LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_set_weight_wrapper';
COMMENT ON FUNCTION fair_set_weight(text, text, float8, text) IS
    'Sets the weight of a key in a queue, 0.001 to 1000; in force at the next claim, for its whole backlog';

CREATE FUNCTION fair_set_weights(queue text, weights jsonb, reason text DEFAULT NULL)
RETURNS SETOF harvest_fair.weight LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_set_weights_wrapper';
COMMENT ON FUNCTION fair_set_weights(text, jsonb, text) IS
    'Sets the weights of several keys, all or none: {"key": weight}; null clears one. Returns the rows that were set or cleared';

CREATE FUNCTION fair_clear_weight(queue text, fairness_key text, reason text DEFAULT NULL)
RETURNS SETOF harvest_fair.weight LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_clear_weight_wrapper';
COMMENT ON FUNCTION fair_clear_weight(text, text, text) IS 'Removes the override of a key and returns it, if there was one';

CREATE FUNCTION fair_clear_weights(queue text, reason text DEFAULT NULL)
RETURNS SETOF harvest_fair.weight LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_clear_weights_wrapper';
COMMENT ON FUNCTION fair_clear_weights(text, text) IS 'Removes all overrides of a queue and returns them';

CREATE FUNCTION fair_weights(queue text)
RETURNS SETOF harvest_fair.weight LANGUAGE c STABLE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_weights_wrapper';
COMMENT ON FUNCTION fair_weights(text) IS 'The weight overrides of a queue, by key';

CREATE FUNCTION fair_configure(queue text, settings jsonb, reason text DEFAULT NULL)
RETURNS TABLE (setting text, value jsonb, source text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_configure_wrapper';
COMMENT ON FUNCTION fair_configure(text, jsonb, text) IS
    'Changes settings of a queue, in force at the next claim; null resets one. Returns the effective settings';

CREATE FUNCTION fair_queue(queue text)
RETURNS TABLE (setting text, value jsonb, source text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_queue_wrapper';
COMMENT ON FUNCTION fair_queue(text) IS
    'The effective settings of a queue and where each comes from: set, guc or default; durations in seconds';

CREATE FUNCTION fair_pause(queue text, reason text DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_pause_wrapper';
COMMENT ON FUNCTION fair_pause(text, text) IS 'Stops claims from a queue; running tasks go on. False if it was paused already';

CREATE FUNCTION fair_resume(queue text, reason text DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_resume_wrapper';
COMMENT ON FUNCTION fair_resume(text, text) IS 'Lets claims from a paused queue go on. False if it was not paused';

CREATE FUNCTION fair_prune(queue text DEFAULT NULL, idle_for interval DEFAULT NULL, preview boolean DEFAULT false)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_prune_wrapper';
COMMENT ON FUNCTION fair_prune(text, interval, boolean) IS
    'Forgets keys that have been idle so long (default: harvest_fair.prune_after), and their debt; returns how many, each counted once a tier';

-- Observe ----------------------------------------------------------------------------------------

CREATE FUNCTION fair_state(queue text DEFAULT NULL)
RETURNS TABLE (queue text, priority smallint, fairness_key text, weight float8, pass float8, last_start float8, clock float8, lag float8,
    running bigint, eligible boolean, waiting_for text, head_scheduled_at timestamptz,
    fairness_group text, group_weight float8, group_pass float8, group_lag float8)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_state_wrapper';
COMMENT ON FUNCTION fair_state(text) IS
    'Each key on the board, per queue and tier; pass, last_start, clock and lag in units; waiting_for says why a key is not eligible; in a queue with groups, pass, last_start, clock and lag are those within the group';

CREATE FUNCTION fair_preview(queue text, worker text, max_tasks integer, weights jsonb DEFAULT NULL)
RETURNS TABLE ("position" integer, id bigint, fairness_key text, priority smallint, pass float8, lag float8, reason text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_preview_wrapper';
COMMENT ON FUNCTION fair_preview(text, text, integer, jsonb) IS
    'What the next claims of a worker would be and why, claiming nothing; under hypothetical weights if given, null unsets one';

CREATE FUNCTION harvest_fair.board_stats()
RETURNS TABLE (queue text, claims bigint, refunds bigint, empty_claims bigint, missed_wakeups bigint, full_rejections bigint,
    evictions bigint, keys bigint, load_ms float8, waiting bigint,
    expired_leases bigint, runnable_keys bigint, capped_keys bigint, limited_keys bigint, paused_keys bigint, future_keys bigint, running_keys bigint,
    bytes_per_key bigint, max_keys bigint, free_keys bigint, reloads bigint, audit_overflow bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'board_stats_wrapper';
COMMENT ON FUNCTION harvest_fair.board_stats() IS 'The rows of the view harvest_fair.stats';

CREATE VIEW harvest_fair.stats AS SELECT * FROM harvest_fair.board_stats();
COMMENT ON VIEW harvest_fair.stats IS
    'Counters per queue since the server started: claims, refunds, empty claims, missed wake-ups healed by the sweep, keys on the board, load time, how many of the keys can be claimed, are held back or run something; and the board''s size';

CREATE FUNCTION harvest_fair.board_tenant_stats()
RETURNS TABLE (queue text, fairness_key text, weight float8, claims bigint, completions bigint, failures bigint, served_cost float8,
    wait_median float8, wait_p95 float8, share float8, fair_share float8, head_age float8, waiting_for text, running bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'board_tenant_stats_wrapper';
COMMENT ON FUNCTION harvest_fair.board_tenant_stats() IS 'What the board knows for the view harvest_fair.tenant_stats';

-- Postgres leaves the join out where none of its columns is asked for, since a queue and key find one row of it at the most: then
-- nothing is read but the board. It must stay so for one queue, too: with the table's collation on both sides, the name of the queue
-- would reach the table, and the join could no longer be left out.
CREATE VIEW harvest_fair.tenant_stats AS
SELECT b.queue, b.fairness_key, b.weight, b.claims, b.completions, b.failures, b.served_cost, b.wait_median, b.wait_p95, b.share,
    b.fair_share, b.head_age, b.waiting_for,
    CASE WHEN b.waiting_for OPERATOR(pg_catalog.=) ANY (ARRAY['cap', 'rate', 'paused']) THEN 0 ELSE COALESCE(t.due, 0) END AS runnable,
    CASE WHEN b.waiting_for OPERATOR(pg_catalog.=) 'cap' THEN COALESCE(t.due, 0) ELSE 0 END AS capped,
    CASE WHEN b.waiting_for OPERATOR(pg_catalog.=) 'rate' THEN COALESCE(t.due, 0) ELSE 0 END AS limited,
    CASE WHEN b.waiting_for OPERATOR(pg_catalog.=) 'paused' THEN COALESCE(t.due, 0) ELSE 0 END AS paused,
    COALESCE(t.future, 0) AS future, b.running
FROM harvest_fair.board_tenant_stats() b
LEFT JOIN (
    SELECT p.queue, p.fairness_key,
        pg_catalog.count(*) FILTER (WHERE p.scheduled_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()) AS due,
        pg_catalog.count(*) FILTER (WHERE p.scheduled_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) AS future
    FROM harvest_fair.task p WHERE p.state OPERATOR(pg_catalog.=) 'pending' GROUP BY p.queue, p.fairness_key
) t ON t.queue OPERATOR(pg_catalog.=) b.queue AND t.fairness_key OPERATOR(pg_catalog.=) b.fairness_key;
COMMENT ON VIEW harvest_fair.tenant_stats IS
    'What each key of the queues on the board got since it came there, and how many of its tasks can be claimed, are held back, are due later or run; times in seconds';

CREATE FUNCTION fair_chart(queue text)
RETURNS TABLE (chart text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'fair_chart_wrapper';
COMMENT ON FUNCTION fair_chart(text) IS
    'A bar chart of what each key of a queue got in the last minute, with its fair share, weight, waits, backlog and running tasks';

CREATE FUNCTION harvest_fair.check()
RETURNS TABLE (queue text, priority smallint, fairness_key text, what text, on_board text, in_table text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SECURITY DEFINER AS 'MODULE_PATHNAME', 'check_wrapper';
COMMENT ON FUNCTION harvest_fair.check() IS
    'Compares the board with the tables of this database: a row for each difference that is not merely under way, none when all is well';

-- Access -----------------------------------------------------------------------------------------

CREATE FUNCTION fair_grant(role regrole, bundle text)
RETURNS void LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp AS $fair_grant$
DECLARE
    -- Grants are data: which function belongs to which bundle.
    granted CONSTANT text[] := ARRAY[
        ['producer', '@extschema@.fair_enqueue(text, jsonb, text, integer, float8, timestamptz, bigint, text, text, interval, boolean, integer)'],
        ['worker', '@extschema@.fair_claim(text, text, integer, interval)'],
        ['worker', '@extschema@.fair_claim(text[], text, integer, interval)'],
        ['worker', '@extschema@.fair_claim_by_id(bigint, text)'],
        ['worker', '@extschema@.fair_complete(bigint, bigint, float8)'],
        ['worker', '@extschema@.fair_complete(bigint[], bigint[], float8[])'],
        ['worker', '@extschema@.fair_fail(bigint, bigint, text, interval)'],
        ['worker', '@extschema@.fair_release(bigint, bigint)'],
        ['worker', '@extschema@.fair_release(bigint[], bigint[])'],
        ['worker', '@extschema@.fair_extend(bigint, bigint, interval)'],
        ['worker', '@extschema@.fair_charge(text, text, float8, integer)'],
        ['worker', '@extschema@.fair_lag(text, integer)'],
        ['admin', '@extschema@.fair_cancel(bigint)'],
        ['admin', '@extschema@.fair_retry(bigint)'],
        ['admin', '@extschema@.fair_lag(text, integer)'],
        ['admin', '@extschema@.fair_set_weight(text, text, float8, text)'],
        ['admin', '@extschema@.fair_set_weights(text, jsonb, text)'],
        ['admin', '@extschema@.fair_clear_weight(text, text, text)'],
        ['admin', '@extschema@.fair_clear_weights(text, text)'],
        ['admin', '@extschema@.fair_configure(text, jsonb, text)'],
        ['admin', '@extschema@.fair_queue(text)'],
        ['admin', '@extschema@.fair_pause(text, text)'],
        ['admin', '@extschema@.fair_resume(text, text)'],
        ['admin', '@extschema@.fair_prune(text, interval, boolean)'],
        ['admin', '@extschema@.fair_weights(text)'],
        ['admin', '@extschema@.fair_state(text)'],
        ['admin', '@extschema@.fair_preview(text, text, integer, jsonb)'],
        ['admin', '@extschema@.fair_chart(text)'],
        ['admin', 'harvest_fair.board_stats()'],
        ['admin', 'harvest_fair.board_tenant_stats()'],
        ['admin', 'harvest_fair.check()']
    ];
    i integer;
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION 'role must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'Name a role, as in fair_grant(''app'', ''worker'').';
    END IF;
    IF bundle IS NULL THEN
        RAISE EXCEPTION 'bundle must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'The bundles are producer, worker and admin.';
    END IF;
    IF bundle NOT IN ('producer', 'worker', 'admin') THEN
        RAISE EXCEPTION 'unknown bundle: %', pg_catalog.quote_literal(bundle)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The bundles are producer, worker and admin.';
    END IF;
    EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA harvest_fair TO %s', role);
    -- Everybody has it on public, which the caller need not own.
    IF NOT pg_catalog.has_schema_privilege(role, '@extschema@'::pg_catalog.regnamespace, 'USAGE') THEN
        EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA @extschema@ TO %s', role);
    END IF;
    FOR i IN 1 .. pg_catalog.array_length(granted, 1) LOOP
        IF granted[i][1] = bundle THEN
            EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s', granted[i][2], role);
        END IF;
    END LOOP;
    IF bundle = 'producer' THEN
        -- Not the columns of a task's later life: a producer enqueues, and no more.
        EXECUTE pg_catalog.format('GRANT INSERT (queue, fairness_key, quota_key, priority, weight, new_start, sticky_worker, '
            'sticky_until, payload, scheduled_at, parent_id, max_attempts) ON harvest_fair.task TO %s', role);
    ELSIF bundle = 'admin' THEN
        EXECUTE pg_catalog.format('GRANT SELECT ON ALL TABLES IN SCHEMA harvest_fair TO %s', role);
    END IF;
END
$fair_grant$;
COMMENT ON FUNCTION fair_grant(regrole, text) IS
    'Grants a role what it needs as ''producer'' (enqueue), ''worker'' (claim and settle) or ''admin'' (weights, state, cancel, read the tables)';

DO $revoke$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN
        SELECT p.oid FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_depend d ON d.objid OPERATOR(pg_catalog.=) p.oid AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
        JOIN pg_catalog.pg_extension e ON e.oid OPERATOR(pg_catalog.=) d.refobjid AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
        WHERE e.extname OPERATOR(pg_catalog.=) 'harvest_fair' AND d.deptype OPERATOR(pg_catalog.=) 'e'
    LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END
$revoke$;
