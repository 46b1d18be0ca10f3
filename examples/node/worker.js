// A worker: node worker.js QUEUE [SLOTS]. DATABASE_URL says where the database is (default: libpq's own variables).
//
// Does SLOTS tasks at a time, each over a connection of its own. Put your own work into `work`.

import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';

// Waits for a task, but below a minute, since a wait holds a snapshot. An id may be beyond what a number holds: text.
const CLAIM = `SELECT id::text, lease::text, payload, extract(epoch FROM lease_until - clock_timestamp())::float8 AS seconds
  FROM fair_claim($1::text, $2, wait => '20 s')`;
const EXTEND = 'SELECT fair_extend($1, $2) IS NOT NULL AS held';
// Results that must be written just once belong into the transaction of this call: roll back if it is false.
const COMPLETE = 'SELECT fair_complete($1::bigint, $2::bigint, $3::float8) AS held';
// Pending again after a second, then two, four ... up to an hour; failed at max_attempts.
const FAIL = 'SELECT fair_fail($1, $2, $3) IS NOT NULL AS held';

const stopping = new AbortController();

// Does a task and returns its cost (null: the charge of the claim stands). Replace this. The signal fires when the lease
// is lost and the task runs elsewhere: stop.
async function work(payload, signal) {
  await sleep(1000 * (payload.seconds ?? 0), undefined, { signal });
  if (payload.error) throw new Error(payload.error);
  return payload.seconds ?? null;
}

class Worker {
  constructor(queue, name) {
    this.queue = queue;
    this.name = name;
  }

  async run() {
    while (!stopping.signal.aborted) {
      const task = await this.claim();
      if (task) await this.perform(task);
    }
    await this.client?.end();
  }

  async claim() {
    // A query can be cancelled only from another connection. Again, if that came before the claim had begun; a task that
    // was claimed nevertheless is done.
    const cancel = async () => {
      while (this.claiming) {
        await query('SELECT pg_cancel_backend($1)', [this.client?.processID]).catch(() => {});
        await sleep(1000, undefined, { ref: false });
      }
    };
    this.claiming = true;
    stopping.signal.addEventListener('abort', cancel);
    try {
      return await this.call(CLAIM, [this.queue, this.name]);
    } finally {
      this.claiming = false;
      stopping.signal.removeEventListener('abort', cancel);
    }
  }

  async perform({ id, lease, payload, seconds }) {
    const lost = new AbortController();
    let beat;
    const heartbeat = setInterval(() => {
      // One at a time, and over when the work is: the connection is then free for its outcome.
      beat ??= this.call(EXTEND, [id, lease]).then(({ held }) => {
        if (!held) lost.abort();
        beat = undefined;
      });
    }, 1000 * seconds / 3);
    const outcome = await work(payload, lost.signal)
      .then((cost) => [COMPLETE, cost], (error) => [FAIL, error.message])
      .finally(() => clearInterval(heartbeat));
    await beat;
    const { held } = await this.call(outcome[0], [id, lease, outcome[1]]);
    if (!held) console.error(`task ${id}: lease lost, it runs again`);
  }

  // The first row of a statement, repeated until the server has answered. A cancelled claim has none.
  async call(sql, values) {
    for (;;) {
      try {
        this.client ??= await connect();
        return (await this.client.query(sql, values)).rows[0];
      } catch (error) {
        if (this.claiming && stopping.signal.aborted) return undefined;
        // The connection was lost, or the server is full or shutting down. Anything else is a fault.
        if (error.severity && !/^(08|53|57)/.test(error.code)) throw error;
        console.error(`database: ${error.message}`);
        this.client?.end().catch(() => {});
        this.client = undefined;
        await sleep(1000);
      }
    }
  }
}

async function connect() {
  const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
  // The statement that runs reports the error too; this is for a connection that is lost while idle.
  client.on('error', (error) => console.error(`database: ${error.message}`));
  await client.connect();
  return client;
}

async function query(sql, values) {
  const client = await connect();
  try {
    return await client.query(sql, values);
  } finally {
    await client.end();
  }
}

const [queue, slots = 1] = process.argv.slice(2);
for (const signal of ['SIGTERM', 'SIGINT']) process.once(signal, () => stopping.abort());
await Promise.all(Array.from({ length: slots }, (_, slot) =>
  new Worker(queue, `${hostname()}:${process.pid}:${slot}`).run()));
