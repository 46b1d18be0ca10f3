//! All SQL about the task table and what belongs to it. Every name and operator carries its schema: the functions
//! that run these are SECURITY DEFINER, and a caller's search_path must not change what they mean.

use pgrx::pg_sys::{self, Oid};

use crate::spi::Statement;

const BOOL: Oid = pg_sys::BOOLOID;
const INT2: Oid = pg_sys::INT2OID;
const INT4: Oid = pg_sys::INT4OID;
const INT8: Oid = pg_sys::INT8OID;
const FLOAT8: Oid = pg_sys::FLOAT8OID;
const TEXT: Oid = pg_sys::TEXTOID;
const TEXTS: Oid = pg_sys::TEXTARRAYOID;
const JSONB: Oid = pg_sys::JSONBOID;
const TIME: Oid = pg_sys::TIMESTAMPTZOID;
const TID: Oid = pg_sys::TIDOID;
const TIDS: Oid = Oid::from_u32(1010);
const INT2S: Oid = Oid::from_u32(1005);
const INT8S: Oid = pg_sys::INT8ARRAYOID;

/// Adds a task; the row trigger validates it and resolves what is NULL.
pub static ENQUEUE: Statement = Statement {
    sql: "INSERT INTO harvest_fair.task \
          (queue, payload, fairness_key, priority, weight, scheduled_at, parent_id, quota_key, sticky_worker, \
           sticky_until, new_start, max_attempts) \
          VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) RETURNING id",
    args: &[
        TEXT, JSONB, TEXT, INT2, FLOAT8, TIME, INT8, TEXT, TEXT, TIME, BOOL, INT4,
    ],
};

macro_rules! claim_sql {
    ($condition:literal) => {
        concat!(
            "UPDATE ONLY harvest_fair.task SET state = 'running', worker = $2, attempt = least(attempt, 2147483646) OPERATOR(pg_catalog.+) 1, \
             lease = least(coalesce(lease, 0), 9223372036854775806) OPERATOR(pg_catalog.+) 1, lease_until = $3, started_at = $4, \
             finished_at = NULL, charged = $5 WHERE ctid ",
            $condition,
            " RETURNING id, queue, fairness_key, priority, payload, attempt, lease, lease_until, scheduled_at, parent_id"
        )
    };
}

/// Hands one locked row to a worker.
pub static CLAIM_ONE: Statement = Statement {
    sql: claim_sql!("OPERATOR(pg_catalog.=) $1"),
    args: &[TID, TEXT, TIME, TIME, FLOAT8],
};
/// Hands several locked rows to a worker.
pub static CLAIM_MANY: Statement = Statement {
    sql: claim_sql!("OPERATOR(pg_catalog.=) ANY ($1)"),
    args: &[TIDS, TEXT, TIME, TIME, FLOAT8],
};

/// Ends locked tasks that their workers have completed. Like every end of a claim but a release, it makes the claim a kept
/// one, after which a task is no new start.
pub static COMPLETE: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'completed', finished_at = $2, lease_until = NULL, new_start = false \
          WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
    args: &[TIDS, TIME],
};

/// Puts a locked task back after a failure.
pub static RETRY_LATER: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'pending', scheduled_at = $2, last_error = $3, worker = NULL, \
          lease_until = NULL, new_start = false WHERE ctid OPERATOR(pg_catalog.=) $1",
    args: &[TID, TIME, TEXT],
};

/// Ends a locked task that has failed for good.
pub static FAIL: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'failed', finished_at = $2, last_error = $3, lease_until = NULL, \
          new_start = false \
          WHERE ctid OPERATOR(pg_catalog.=) $1",
    args: &[TID, TIME, TEXT],
};

/// Gives locked tasks back as if they had not been claimed.
pub static RELEASE: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'pending', attempt = greatest(attempt, 1) OPERATOR(pg_catalog.-) 1, worker = NULL, \
          lease_until = NULL, started_at = NULL, charged = NULL WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
    args: &[TIDS],
};

/// Moves the end of a locked task's lease.
pub static EXTEND: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET lease_until = $2 WHERE ctid OPERATOR(pg_catalog.=) $1",
    args: &[TID, TIME],
};

/// Cancels a locked pending task.
pub static CANCEL: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'cancelled', finished_at = $2 WHERE ctid OPERATOR(pg_catalog.=) $1",
    args: &[TID, TIME],
};

/// Makes a locked failed or cancelled task pending again.
pub static RETRY: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET state = 'pending', attempt = 0, scheduled_at = $2, finished_at = NULL, \
          worker = NULL WHERE ctid OPERATOR(pg_catalog.=) $1",
    args: &[TID, TIME],
};

/// Takes locked tasks back whose leases have run out.
pub static REAP: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET \
          state = CASE WHEN attempt OPERATOR(pg_catalog.>=) max_attempts THEN 'failed'::harvest_fair.task_state \
                       ELSE 'pending'::harvest_fair.task_state END, \
          finished_at = CASE WHEN attempt OPERATOR(pg_catalog.>=) max_attempts THEN $2 END, \
          last_error = 'lease expired', worker = NULL, lease_until = NULL, new_start = false \
          WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
    args: &[TIDS, TIME],
};

/// Makes locked pinned tasks whose pin has ended ordinary ones.
pub static UNPIN: Statement = Statement {
    sql: "UPDATE ONLY harvest_fair.task SET sticky_worker = NULL, sticky_until = NULL \
          WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
    args: &[TIDS],
};

/// Deletes a batch of tasks that were finished before a time.
pub static DELETE_FINISHED: Statement = Statement {
    sql: "DELETE FROM ONLY harvest_fair.task WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
    args: &[TIDS],
};

/// The weight overrides of a queue.
pub static OVERRIDES: Statement = Statement {
    sql: "SELECT w.fairness_key, w.weight FROM harvest_fair.weight w WHERE w.queue OPERATOR(pg_catalog.=) $1",
    args: &[TEXT],
};

/// The last snapshot of a queue's passes.
pub static KEY_STATES: Statement = Statement {
    sql: "SELECT k.priority, k.fairness_key, k.pass, k.last_start FROM harvest_fair.key_state k \
          WHERE k.queue OPERATOR(pg_catalog.=) $1",
    args: &[TEXT],
};

/// Writes passes into the snapshot: $1 queue, then one array a column.
pub static FLUSH: Statement = Statement {
    sql: "INSERT INTO harvest_fair.key_state AS k (queue, priority, fairness_key, pass, last_start) \
          SELECT $1, u.priority, u.fairness_key, u.pass, u.last_start \
          FROM ROWS FROM (pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4), pg_catalog.unnest($5)) \
               AS u (priority, fairness_key, pass, last_start) \
          ON CONFLICT (queue, priority, fairness_key) DO UPDATE \
          SET pass = excluded.pass, last_start = excluded.last_start, updated_at = pg_catalog.now()",
    args: &[TEXT, INT2S, TEXTS, INT8S, INT8S],
};

/// Forgets the snapshot of a tier, before it is written anew.
pub static FORGET_TIER: Statement = Statement {
    sql: "DELETE FROM harvest_fair.key_state k WHERE k.queue OPERATOR(pg_catalog.=) $1 \
          AND k.priority OPERATOR(pg_catalog.=) $2",
    args: &[TEXT, INT2],
};

/// Forgets keys in the snapshot: $1 queue, then one array a column.
pub static FORGET_KEYS: Statement = Statement {
    sql: "DELETE FROM harvest_fair.key_state k \
          USING ROWS FROM (pg_catalog.unnest($2), pg_catalog.unnest($3)) AS u (priority, fairness_key) \
          WHERE k.queue OPERATOR(pg_catalog.=) $1 AND k.priority OPERATOR(pg_catalog.=) u.priority \
          AND k.fairness_key OPERATOR(pg_catalog.=) u.fairness_key",
    args: &[TEXT, INT2S, TEXTS],
};

/// Keeps two sessions from adding overrides of a queue at the same time.
pub static LOCK_WEIGHTS: Statement = Statement {
    sql: "SELECT pg_catalog.pg_advisory_xact_lock($1, pg_catalog.hashtext($2))",
    args: &[INT4, TEXT],
};

/// How many other keys of a queue have an override.
pub static COUNT_WEIGHTS: Statement = Statement {
    sql: "SELECT pg_catalog.count(*) FROM harvest_fair.weight w WHERE w.queue OPERATOR(pg_catalog.=) $1 \
          AND w.fairness_key OPERATOR(pg_catalog.<>) $2",
    args: &[TEXT, TEXT],
};

/// The override of a key.
pub static GET_WEIGHT: Statement = Statement {
    sql: "SELECT w.weight FROM harvest_fair.weight w WHERE w.queue OPERATOR(pg_catalog.=) $1 \
          AND w.fairness_key OPERATOR(pg_catalog.=) $2",
    args: &[TEXT, TEXT],
};

/// Sets an override and returns its row.
pub static SET_WEIGHT: Statement = Statement {
    sql: "INSERT INTO harvest_fair.weight AS w (queue, fairness_key, weight, reason) VALUES ($1, $2, $3, $4) \
          ON CONFLICT (queue, fairness_key) DO UPDATE SET weight = excluded.weight, reason = excluded.reason, \
          updated_by = excluded.updated_by, updated_at = excluded.updated_at \
          RETURNING w.queue, w.fairness_key, w.weight, w.reason, w.updated_by, w.updated_at",
    args: &[TEXT, TEXT, FLOAT8, TEXT],
};

/// Clears an override and returns its row.
pub static CLEAR_WEIGHT: Statement = Statement {
    sql: "DELETE FROM harvest_fair.weight w WHERE w.queue OPERATOR(pg_catalog.=) $1 \
          AND w.fairness_key OPERATOR(pg_catalog.=) $2 \
          RETURNING w.queue, w.fairness_key, w.weight, w.reason, w.updated_by, w.updated_at",
    args: &[TEXT, TEXT],
};

/// The overrides of a queue, by key.
pub static LIST_WEIGHTS: Statement = Statement {
    sql: "SELECT w.queue, w.fairness_key, w.weight, w.reason, w.updated_by, w.updated_at FROM harvest_fair.weight w \
          WHERE w.queue OPERATOR(pg_catalog.=) $1 ORDER BY w.fairness_key",
    args: &[TEXT],
};

/// Writes a change of policy into the audit.
pub static AUDIT: Statement = Statement {
    sql: "INSERT INTO harvest_fair.audit (action, queue, fairness_key, old, new, reason) \
          VALUES ($1, $2, $3, $4, $5, $6)",
    args: &[TEXT, TEXT, TEXT, JSONB, JSONB, TEXT],
};

/// Writes a refused change into the audit.
pub static AUDIT_REFUSED: Statement = Statement {
    sql: "INSERT INTO harvest_fair.audit (at, actor, action, queue, fairness_key, new, reason, status, error) \
          VALUES ($1, $2, $3, $4, $5, $6, $7, 'rejected', $8)",
    args: &[TIME, TEXT, TEXT, TEXT, TEXT, JSONB, TEXT, TEXT],
};

/// Writes the audit of a TRUNCATE of all overrides: a row for each queue that has some.
pub static AUDIT_TRUNCATED_WEIGHTS: Statement = Statement {
    sql: "INSERT INTO harvest_fair.audit (action, queue, old) \
          SELECT 'truncate_weight', w.queue, pg_catalog.jsonb_object_agg(w.fairness_key, w.weight) \
          FROM harvest_fair.weight w GROUP BY w.queue ORDER BY w.queue",
    args: &[],
};

/// Writes the audit of a TRUNCATE of all settings: a row for each queue that has some.
pub static AUDIT_TRUNCATED_SETTINGS: Statement = Statement {
    sql: "INSERT INTO harvest_fair.audit (action, queue, old) \
          SELECT 'truncate_queue', q.queue, q.settings FROM harvest_fair.queue q ORDER BY q.queue",
    args: &[],
};

/// Makes sure that a queue has a row of settings, and locks it.
pub static OPEN_SETTINGS: Statement = Statement {
    sql: "INSERT INTO harvest_fair.queue AS q (queue) VALUES ($1) \
          ON CONFLICT (queue) DO UPDATE SET settings = q.settings",
    args: &[TEXT],
};

/// The settings of a queue.
pub static GET_SETTINGS: Statement = Statement {
    sql: "SELECT q.settings FROM harvest_fair.queue q WHERE q.queue OPERATOR(pg_catalog.=) $1",
    args: &[TEXT],
};

/// Sets the settings of a queue whose row is locked.
pub static SET_SETTINGS: Statement = Statement {
    sql: "UPDATE harvest_fair.queue q SET settings = $2, updated_by = SESSION_USER, updated_at = pg_catalog.now() \
          WHERE q.queue OPERATOR(pg_catalog.=) $1",
    args: &[TEXT, JSONB],
};

/// Clears all overrides of a queue and returns them.
pub static CLEAR_WEIGHTS: Statement = Statement {
    sql: "DELETE FROM harvest_fair.weight w WHERE w.queue OPERATOR(pg_catalog.=) $1 \
          RETURNING w.queue, w.fairness_key, w.weight, w.reason, w.updated_by, w.updated_at",
    args: &[TEXT],
};

/// The pending tasks of each key of a queue: due, and due later.
pub static BACKLOG: Statement = Statement {
    sql: "SELECT fairness_key, \
          pg_catalog.count(*) FILTER (WHERE scheduled_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()), \
          pg_catalog.count(*) FILTER (WHERE scheduled_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) \
          FROM harvest_fair.task WHERE queue OPERATOR(pg_catalog.=) $1 AND state OPERATOR(pg_catalog.=) 'pending' \
          GROUP BY fairness_key",
    args: &[TEXT],
};
