-- What the specs share: run once in the database of each spec, before isolationtester.

-- Each permutation has a queue of its own, so that none inherits another's passes.
CREATE SEQUENCE turn;
CREATE FUNCTION q() RETURNS text LANGUAGE sql AS $$ SELECT 'q' || last_value FROM turn $$;

-- Starts a permutation.
CREATE FUNCTION fresh() RETURNS void LANGUAGE sql AS $$ SELECT nextval('turn') $$;

-- Adds n tasks of a key, numbered after those that it has: a1, a2, ... in due order.
CREATE FUNCTION add(key text, n int, gated boolean DEFAULT false) RETURNS void LANGUAGE sql AS $$
    INSERT INTO harvest_fair.task (queue, fairness_key, payload, scheduled_at)
    SELECT q(), key, jsonb_build_object('name', key || place, 'gated', gated),
           now() - interval '1 hour' + place * interval '1 second'
    FROM (SELECT i + (SELECT count(*) FROM harvest_fair.task WHERE queue = q() AND fairness_key = key) AS place
          FROM generate_series(1, n) i) places
$$;

-- One call of fair_claim: the names of the tasks, in pick order.
CREATE FUNCTION claim(worker text, n int, wait interval DEFAULT NULL) RETURNS text LANGUAGE sql AS $$
    SELECT coalesce(string_agg(payload ->> 'name', ' '), 'nothing') FROM fair_claim(q(), worker, n, wait)
$$;

-- Settles what a worker holds.
CREATE FUNCTION complete(worker_name text) RETURNS SETOF bigint LANGUAGE sql AS $$
    SELECT fair_complete(array_agg(id), array_agg(lease)) FROM harvest_fair.task
    WHERE queue = q() AND state = 'running' AND worker = worker_name
$$;
CREATE FUNCTION release(worker_name text) RETURNS SETOF bigint LANGUAGE sql AS $$
    SELECT fair_release(array_agg(id), array_agg(lease)) FROM harvest_fair.task
    WHERE queue = q() AND state = 'running' AND worker = worker_name
$$;

-- Where every task stands, as this session sees it.
CREATE FUNCTION tasks() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg((payload ->> 'name') || ' ' || state || coalesce(' ' || CASE state WHEN 'running' THEN worker END, ''),
                      ', ' ORDER BY payload ->> 'name')
    FROM harvest_fair.task WHERE queue = q()
$$;

-- How far keys are ahead of the clock: what open claims charge shows to all. Not the others, which the board may forget.
CREATE FUNCTION lags() RETURNS text LANGUAGE sql AS $$
    SELECT coalesce(string_agg(fairness_key || ' ' || lag, ', ' ORDER BY fairness_key), 'none') FROM fair_lag(q()) WHERE lag > 0
$$;

-- How many tasks of a key count as running.
CREATE FUNCTION runs() RETURNS text LANGUAGE sql AS $$
    SELECT coalesce(string_agg(fairness_key || ' ' || running, ', ' ORDER BY fairness_key), 'none') FROM fair_state(q()) WHERE running > 0
$$;

-- How many tasks of a key may run at once. (isolationtester takes no closing brace inside a step.)
CREATE FUNCTION cap(n int) RETURNS void LANGUAGE sql AS $$
    SELECT fair_configure(q(), jsonb_build_object('key_max_running', n))
$$;
