//! Who is compared: harvest_fair, and what one would use instead, from (a) to (g).

use std::path::PathBuf;

use postgres::Client;

use crate::Result;

/// About a hundred bytes, as a small task has.
pub const PAYLOAD: &str = r#"{"to": "ann@example.com", "template": "receipt", "locale": "en", "order": 1234567, "copy": false}"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    Fair,
    Plain,
    FullScan,
    Pgmq,
    PgmqGrouped,
    Procrastinate,
    Absurd,
    Stamped,
    Ranked,
}

use Contender::*;

pub const RIVALS: [Contender; 8] = [
    Plain,
    FullScan,
    Pgmq,
    PgmqGrouped,
    Procrastinate,
    Absurd,
    Stamped,
    Ranked,
];

/// Of the tables that are like ours: the same columns, the same indexes but for the one that gives the order.
const LIKE_OURS: &str = "
    CREATE TABLE {table} (LIKE harvest_fair.task INCLUDING ALL);
    DO $$ DECLARE lanes text; BEGIN
        SELECT indexrelid::regclass INTO STRICT lanes FROM pg_index
        WHERE indrelid = '{table}'::regclass AND pg_get_indexdef(indexrelid) LIKE '%new_start%';
        EXECUTE 'DROP INDEX ' || lanes;
    END $$;";

/// What a claim changes and delivers, the same for all tables that are like ours.
const TAKE: &str = "
    UPDATE {table} t SET state = 'running', worker = 'w', attempt = attempt + 1, lease = coalesce(lease, 0) + 1,
        lease_until = now() + interval '1 day', started_at = now(), finished_at = NULL, charged = 1
    FROM picked WHERE t.id = picked.id
    RETURNING t.id, t.fairness_key, t.payload, t.attempt, t.lease, t.lease_until, t.scheduled_at";

impl Contender {
    pub fn name(self) -> &'static str {
        match self {
            Fair => "harvest_fair",
            Plain => "(a) plain SKIP LOCKED",
            FullScan => "(b) full scan with lag",
            Pgmq => "(c) pgmq.read",
            PgmqGrouped => "(c) pgmq.read_grouped_rr",
            Procrastinate => "(d) procrastinate",
            Absurd => "(e) absurd",
            Stamped => "(f) stamped at enqueue",
            Ranked => "(g) ranked in the batch",
        }
    }

    /// Its place among the colours of the pictures.
    pub fn colour(self) -> usize {
        self as usize
    }

    /// What it is, what it guarantees, and what it does not.
    pub fn describe(self) -> [&'static str; 3] {
        match self {
            Fair => [
                "`fair_claim`",
                "weighted fair order over the whole backlog, for any number of concurrent workers; priorities; leases; a weight \
                 change acts on the backlog at the next claim",
                "-",
            ],
            Plain => [
                "one statement on a table equal to ours, with an index on (queue, priority, scheduled_at, id) in place of the lanes': \
                 a materialized CTE picks with `LIMIT n FOR UPDATE SKIP LOCKED`, an UPDATE takes",
                "each task to one worker; priorities; leases as ours",
                "no fairness: a flood is served first. Slows down while an old snapshot is held",
            ],
            FullScan => [
                "our own rules in SQL: the backlog joined with `fair_lag`, sorted, `LIMIT 1 FOR UPDATE SKIP LOCKED`, charged with \
                 `fair_charge` in the same statement",
                "weighted fair order for one worker at a time",
                "sorts the whole backlog for each claim. Concurrent workers read the same lag and pick the same key",
            ],
            Pgmq => [
                "`pgmq.read`, the SQL bundled in the crate `pgmq`",
                "each message to one reader until its time-out",
                "no fairness, no priorities",
            ],
            PgmqGrouped => [
                "`pgmq.read_grouped_rr`, from the same crate",
                "round robin over groups within one read; order within a group",
                "no weights, no memory between reads. Reads the whole queue for each claim; a group whose first message is being \
                 worked on is not served",
            ],
            Procrastinate => [
                "`procrastinate_fetch_job_v2`, the SQL in the wheel `procrastinate`",
                "each job to one worker; priorities; one job at a time for each lock; a log of events (which it writes here)",
                "no fairness, one job a call",
            ],
            Absurd => [
                "`absurd.claim_task`, the SQL in the wheel `absurdctl`",
                "each run to one worker with a lease; retries, checkpoints and events of durable workflows (it does more than a queue)",
                "no fairness, no priorities",
            ],
            Stamped => [
                "as (a), ordered by a sequence number that each task got at enqueue: its turn within its key",
                "round robin in the order of the stamps",
                "what is stamped stays: a weight change does not act on the backlog, and a cancelled task leaves a hole. Producers of a key \
                 wait for each other at its counter (the stamps are given here, not counted)",
            ],
            Ranked => [
                "the keys by a loose index scan, n first rows of each, ranked by row_number() / weight within the batch",
                "weighted shares within one batch, in one priority",
                "no memory between batches: with a claim of 1, the key with the oldest task is always served. Concurrent workers pick the same \
                 rows and come back short. Costs what there are keys",
            ],
        }
    }

    /// Where the SQL of a rival comes from that is fetched.
    pub fn fetched(self) -> Option<&'static str> {
        match self {
            Pgmq | PgmqGrouped => Some("pgmq.sql"),
            Procrastinate => Some("procrastinate.sql"),
            Absurd => Some("absurd.sql"),
            _ => None,
        }
    }

    /// Where its tasks are.
    pub fn tables(self) -> &'static str {
        match self {
            Fair => "harvest_fair.task",
            Plain => "plain",
            FullScan => "full_scan",
            Stamped => "stamped",
            Ranked => "ranked",
            Pgmq => "pgmq.q_read",
            PgmqGrouped => "pgmq.q_grouped",
            Procrastinate => "procrastinate_jobs",
            Absurd => "absurd.t_q, absurd.r_q",
        }
    }

    /// Removes dead rows and index entries, as autovacuum would sooner or later: an order that begins at the oldest task steps
    /// over all of them.
    pub fn vacuum(self, client: &mut Client) -> Result<()> {
        client.batch_execute(&format!(
            "VACUUM (INDEX_CLEANUP ON, TRUNCATE OFF) {}",
            self.tables()
        ))?;
        Ok(())
    }

    /// The most tasks that a claim may ask for.
    pub fn max_batch(self) -> usize {
        match self {
            Procrastinate | FullScan => 1,
            _ => usize::MAX,
        }
    }

    /// Makes tables and functions.
    pub fn install(self, client: &mut Client, fetched: &Fetched) -> Result<()> {
        let like_ours =
            |table: &str, order: &str| format!("{} {order}", LIKE_OURS.replace("{table}", table));
        let sql = match self {
            Fair => return Ok(()),
            Plain => like_ours("plain", &order_of("plain", "scheduled_at")),
            FullScan => like_ours("full_scan", &order_of("full_scan", "scheduled_at")),
            Stamped => like_ours(
                "stamped",
                &format!(
                    "ALTER TABLE stamped ADD COLUMN stamp bigint; {}",
                    order_of("stamped", "stamp")
                ),
            ),
            // It uses the lanes' index too.
            Ranked => "CREATE TABLE ranked (LIKE harvest_fair.task INCLUDING ALL)".to_owned(),
            // A queue for each function: what one has read holds up the other.
            Pgmq => fetched.once(
                client,
                self,
                "to_regclass('pgmq.meta')",
                "SELECT pgmq.create('read')",
            )?,
            PgmqGrouped => fetched.once(
                client,
                self,
                "to_regclass('pgmq.meta')",
                "SELECT pgmq.create('grouped')",
            )?,
            Procrastinate => fetched.once(
                client,
                self,
                "to_regclass('procrastinate_jobs')",
                "INSERT INTO procrastinate_workers DEFAULT VALUES",
            )?,
            Absurd => fetched.once(
                client,
                self,
                "to_regclass('absurd.queues')",
                "SELECT absurd.create_queue('q')",
            )?,
        };
        client.batch_execute(&sql)?;
        Ok(())
    }

    /// Adds tasks of a queue, due long ago, in the order of their numbers; keys in turns. `first` is the number of the first.
    pub fn load(
        self,
        client: &mut Client,
        queue: &str,
        first: i64,
        rows: i64,
        keys: i64,
    ) -> Result<()> {
        let due = "now() - interval '1 day' + i * interval '1 ms'";
        let from = format!(
            "FROM generate_series({first}::bigint, {}::bigint) i",
            first + rows - 1
        );
        let ours = |table: &str| {
            format!(
                "INSERT INTO {table} (queue, fairness_key, priority, payload, scheduled_at)
                 SELECT '{queue}', 'k' || i % {keys}, 3, '{PAYLOAD}', {due} {from}"
            )
        };
        let sql = match self {
            Fair => ours("harvest_fair.task"),
            Plain => ours("plain"),
            FullScan => ours("full_scan"),
            Ranked => ours("ranked"),
            Stamped => format!(
                "INSERT INTO stamped (queue, fairness_key, priority, payload, scheduled_at, stamp)
                 SELECT '{queue}', 'k' || i % {keys}, 3, '{PAYLOAD}', {due}, i / {keys} {from}"
            ),
            Pgmq | PgmqGrouped => format!(
                "INSERT INTO pgmq.q_{} (vt, message, headers)
                 SELECT {due}, '{PAYLOAD}', jsonb_build_object('x-pgmq-group', 'k' || i % {keys}) {from}",
                if self == Pgmq { "read" } else { "grouped" }
            ),
            Procrastinate => format!(
                "INSERT INTO procrastinate_jobs (queue_name, task_name, args) SELECT '{queue}', 'k' || i % {keys}, '{PAYLOAD}' {from}"
            ),
            Absurd => format!(
                "SELECT count(*) {from}, LATERAL absurd.spawn_task('{queue}', 'k' || i % {keys}, '{PAYLOAD}')"
            ),
        };
        client.batch_execute(&sql)?;
        Ok(())
    }

    /// Adds the tasks that a database starts with. Ours come as after a restart: the board reads them when the queue is first
    /// touched.
    pub fn fill(self, client: &mut Client, queue: &str, rows: i64, keys: i64) -> Result<()> {
        if self != Fair {
            return self.load(client, queue, 1, rows, keys);
        }
        client.batch_execute("ALTER TABLE harvest_fair.task DISABLE TRIGGER zzz_admit")?;
        self.load(client, queue, 1, rows, keys)?;
        client.batch_execute("ALTER TABLE harvest_fair.task ENABLE TRIGGER zzz_admit")?;
        Ok(())
    }

    /// One statement that claims `n` tasks and delivers them with their payload.
    pub fn claim(self, queue: &str, n: usize) -> String {
        let pending = format!(
            "t.queue = '{queue}' AND t.state = 'pending' AND t.sticky_worker IS NULL AND t.scheduled_at <= now()"
        );
        let first = |table: &str, order: &str| {
            format!(
                "WITH picked AS MATERIALIZED (
                     SELECT t.id FROM {table} t WHERE {pending} ORDER BY t.priority, t.{order}, t.id LIMIT {n} FOR UPDATE SKIP LOCKED)
                 {}",
                TAKE.replace("{table}", table)
            )
        };
        match self {
            Fair => format!(
                "SELECT id, fairness_key, payload, attempt, lease, lease_until, scheduled_at FROM fair_claim('{queue}'::text, 'w', {n})"
            ),
            Plain => first("plain", "scheduled_at"),
            Stamped => first("stamped", "stamp"),
            FullScan => format!(
                "WITH picked AS MATERIALIZED (
                     SELECT t.id FROM full_scan t LEFT JOIN fair_lag('{queue}') l USING (queue, priority, fairness_key)
                     WHERE {pending}
                     ORDER BY t.priority, coalesce(l.lag, 0), t.scheduled_at, t.id LIMIT {n} FOR UPDATE OF t SKIP LOCKED),
                 claimed AS ({})
                 SELECT claimed.*, charge.pass FROM claimed, LATERAL fair_charge('{queue}', claimed.fairness_key) charge",
                TAKE.replace("{table}", "full_scan")
            ),
            Ranked => {
                let lane = format!("{pending} AND t.priority = 3 AND NOT t.new_start");
                format!(
                    "WITH RECURSIVE keys AS (
                         (SELECT t.fairness_key FROM ranked t WHERE {lane} ORDER BY t.fairness_key LIMIT 1)
                         UNION ALL
                         SELECT (SELECT t.fairness_key FROM ranked t WHERE {lane} AND t.fairness_key > keys.fairness_key
                                 ORDER BY t.fairness_key LIMIT 1)
                         FROM keys WHERE keys.fairness_key IS NOT NULL),
                     heads AS (
                         SELECT head.id, head.scheduled_at,
                             row_number() OVER (PARTITION BY head.fairness_key ORDER BY head.scheduled_at, head.id)
                                 / coalesce(head.weight, 1) AS rank
                         FROM keys CROSS JOIN LATERAL (
                             SELECT t.id, t.fairness_key, t.scheduled_at, t.weight FROM ranked t
                             WHERE {lane} AND t.fairness_key = keys.fairness_key ORDER BY t.scheduled_at, t.id LIMIT {n}) head),
                     top AS MATERIALIZED (SELECT id FROM heads ORDER BY rank, scheduled_at, id LIMIT {n}),
                     picked AS MATERIALIZED (SELECT t.id FROM ranked t JOIN top USING (id) FOR UPDATE OF t SKIP LOCKED)
                     {}",
                    TAKE.replace("{table}", "ranked")
                )
            }
            Pgmq => format!("SELECT * FROM pgmq.read('read', 86400, {n})"),
            PgmqGrouped => format!("SELECT * FROM pgmq.read_grouped_rr('grouped', 86400, {n})"),
            Procrastinate => format!(
                "SELECT * FROM procrastinate_fetch_job_v2(ARRAY['{queue}']::varchar[], 1) WHERE id IS NOT NULL"
            ),
            Absurd => format!("SELECT * FROM absurd.claim_task('{queue}', 'w', 86400, {n})"),
        }
    }

    /// What the worker must have done before the next claim can be served; not measured.
    pub fn between_claims(self) -> Option<&'static str> {
        // A group whose first message is out is not served.
        (self == PgmqGrouped).then_some("DELETE FROM pgmq.q_grouped WHERE vt > now()")
    }
}

fn order_of(table: &str, order: &str) -> String {
    format!(
        "CREATE INDEX {table}_order ON {table} (queue, priority, {order}, id) WHERE state = 'pending' AND sticky_worker IS NULL"
    )
}

/// The SQL of rivals that scripts/bench.sh has fetched.
pub struct Fetched {
    directory: Option<PathBuf>,
}

impl Fetched {
    pub fn find() -> Fetched {
        Fetched {
            directory: std::env::var_os("HF_BENCH_RIVALS").map(PathBuf::from),
        }
    }

    pub fn has(&self, contender: Contender) -> bool {
        let Some(file) = contender.fetched() else {
            return true;
        };
        self.directory
            .as_ref()
            .is_some_and(|directory| directory.join(file).is_file())
    }

    /// What was fetched, one a line.
    pub fn versions(&self) -> String {
        self.directory
            .as_ref()
            .and_then(|directory| std::fs::read_to_string(directory.join("versions")).ok())
            .unwrap_or_default()
    }

    /// Runs the fetched script unless its first object is there already; gives back what is to be run after.
    fn once(
        &self,
        client: &mut Client,
        contender: Contender,
        object: &str,
        then: &str,
    ) -> Result<String> {
        let there: bool = client
            .query_one(&format!("SELECT {object} IS NOT NULL"), &[])?
            .get(0);
        if !there {
            let file = contender.fetched().unwrap_or_default();
            let directory = self.directory.as_ref().ok_or("nothing was fetched")?;
            let script = std::fs::read_to_string(directory.join(file))?;
            client.batch_execute(&script)?;
        }
        Ok(then.to_owned())
    }
}
