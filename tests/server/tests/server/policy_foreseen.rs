//! Random small queues with every rule at once: what the preview says is what the claims then return, in order.

use harvest_fair_server_tests::{Cluster, Options, claim, one};
use postgres::Client;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::policy_support::{configure, preview};
use crate::support::execute;

const SEEDS: std::ops::Range<u64> = 0..12;
const QUEUES_A_SEED: usize = 25;
const KEYS: [&str; 9] = ["", "a", "a/1", "a/2", "b/1", "b/2", "c", "d/1", "d/1/x"];
const NAMES: [&str; 6] = ["a", "a/1", "b", "b/2", "c", "d"];
const WEIGHTS: [f64; 5] = [0.5, 1.0, 2.0, 3.0, 10.0];
const WORKER: &str = "me";

struct Random<'c> {
    client: &'c mut Client,
    /// Holds rows, now and then.
    holder: &'c mut Client,
    queue: String,
    random: StdRng,
    /// Keys have a cap; then no lease runs out, since its task counts until the lease is taken back.
    capped: bool,
    /// Keys have groups; then nobody holds rows, since which of two level groups goes first may hang on what a call has met.
    grouped: bool,
    /// What was done, for a look at it when the two differ.
    history: Vec<String>,
}

impl Random<'_> {
    fn run(&mut self, sql: String) {
        self.history.push(sql.clone());
        execute(self.client, &sql);
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.random.random_ratio(1, n)
    }

    fn key(&mut self) -> &'static str {
        KEYS.choose(&mut self.random).unwrap()
    }

    fn settings(&mut self) {
        let mut fields = Vec::new();
        if self.grouped {
            fields.push(r#""group_separator": "/""#.to_owned());
        }
        if self.capped {
            let cap = self.random.random_range(1..=3);
            fields.push(format!(r#""key_max_running": {cap}"#));
        }
        // Limits that give no token back while the test runs.
        if self.one_in(5) {
            fields.push(r#""key_rate_limit": 0.0001"#.to_owned());
        }
        if self.one_in(15) {
            fields.push(r#""rate_limit": 0.0001"#.to_owned());
        }
        if self.one_in(3) {
            fields.push(r#""priority_aging": 1000"#.to_owned());
        }
        if self.one_in(3) {
            fields.push(r#""new_start_handicap": 700"#.to_owned());
        }
        let settings = format!("{{{}}}", fields.join(", "));
        self.history.push(format!("configure {settings}"));
        configure(self.client, &self.queue, &settings);
    }

    fn insert(&mut self, rows: usize) {
        let values: Vec<String> = (0..rows)
            .map(|_| {
                let due = if self.one_in(10) {
                    "now() + interval '1 hour'".to_owned()
                } else {
                    // Far from the instants at which ageing lifts a task by one more priority.
                    let steps = self.random.random_range(0..5) * 1000;
                    format!(
                        "now() - interval '{} s'",
                        steps + self.random.random_range(100..900)
                    )
                };
                let weight = if self.one_in(4) {
                    WEIGHTS.choose(&mut self.random).unwrap().to_string()
                } else {
                    "NULL".to_owned()
                };
                let (worker, until) = match self.random.random_range(0..12) {
                    0 => ("'me'", "NULL"),
                    1 => ("'me'", "now() + interval '1 hour'"),
                    2 => ("'you'", "now() + interval '1 hour'"),
                    3 => ("'you'", "now() - interval '1 s'"),
                    4 => ("'me'", "now() - interval '1 s'"),
                    _ => ("NULL", "NULL"),
                };
                let key = self.key();
                format!(
                    "('{}', '{key}', {}, {weight}, {}, {due}, {worker}, {until})",
                    self.queue,
                    [1, 2, 3, 3, 3, 4].choose(&mut self.random).unwrap(),
                    self.random.random_ratio(1, 4),
                )
            })
            .collect();
        self.run(format!(
            "INSERT INTO harvest_fair.task
                (queue, fairness_key, priority, weight, new_start, scheduled_at, sticky_worker, sticky_until)
             VALUES {}",
            values.join(", ")
        ));
    }

    /// Some keys in debt, some tasks running, some over.
    fn live(&mut self) {
        for _ in 0..self.random.random_range(0..4) {
            let (queue, key) = (self.queue.clone(), self.key());
            let cost = WEIGHTS.choose(&mut self.random).unwrap();
            let priority = self.random.random_range(2..=3);
            self.run(format!(
                "SELECT fair_charge('{queue}', nullif('{key}', ''), {cost}, {priority})"
            ));
        }
        for _ in 0..self.random.random_range(0..4) {
            let n = self.random.random_range(1..=4);
            let worker = *["me", "you", "other"].choose(&mut self.random).unwrap();
            self.history.push(format!("claim {n} as {worker}"));
            for task in claim(self.client, &self.queue, worker, n) {
                let (id, lease) = (task.id, task.lease);
                match self.random.random_range(0..6) {
                    0 => self.run(format!("SELECT fair_complete({id}, {lease}, 3)")),
                    1 => self.run(format!("SELECT fair_release({id}, {lease})")),
                    2 => self.run(format!("SELECT fair_fail({id}, {lease}, 'x', '0')")),
                    3 if !self.capped => self.run(format!(
                        "UPDATE harvest_fair.task SET lease_until = now() - interval '1 s' WHERE id = {id}"
                    )),
                    _ => {}
                }
            }
        }
    }

    fn weights(&mut self) -> String {
        let fields: Vec<String> = (0..self.random.random_range(1..=3))
            .map(|_| {
                let weight = WEIGHTS.choose(&mut self.random).unwrap();
                let name = NAMES.choose(&mut self.random).unwrap();
                if self.random.random_ratio(1, 4) {
                    format!(r#""{name}": null"#)
                } else {
                    format!(r#""{name}": {weight}"#)
                }
            })
            .collect();
        format!("{{{}}}", fields.join(", "))
    }

    fn set_weights(&mut self, weights: &str) {
        let queue = self.queue.clone();
        self.run(format!("SELECT fair_set_weights('{queue}', '{weights}')"));
    }

    /// Some rows are held by another session; a key's share, as foreign keys take it, is no hindrance.
    fn hold(&mut self) {
        let (fifth, how) = (
            self.random.random_range(0..5),
            *["UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"]
                .choose(&mut self.random)
                .unwrap(),
        );
        let sql = format!(
            "SELECT id FROM harvest_fair.task WHERE queue = '{}' AND state = 'pending' AND id % 5 = {fifth}
             AND (sticky_worker IS NULL OR sticky_until > now()) FOR {how}",
            self.queue
        );
        self.history.push(format!("another session: {sql}"));
        execute(self.holder, &sql);
    }

    /// A preview, and then as many claims, in a batch, one by one, or in between.
    fn compare(&mut self) {
        execute(self.holder, "BEGIN");
        if !self.grouped && self.one_in(3) {
            self.hold();
        }
        let n = self.random.random_range(1..=25);
        let hypothetical = if self.one_in(3) {
            self.weights()
        } else {
            String::new()
        };
        let lines = preview(self.client, &self.queue, WORKER, n, &hypothetical);
        let foreseen: Vec<i64> = lines.iter().map(|line| line.id).collect();
        self.history.push(format!("preview {n} {hypothetical}"));
        for line in &lines {
            self.history.push(format!("  {line:?}"));
        }
        if !hypothetical.is_empty() {
            self.set_weights(&hypothetical);
        }
        let most = *[1, 3, 25].choose(&mut self.random).unwrap();
        let (mut came, mut left) = (Vec::new(), n);
        while left > 0 {
            let size = left.min(most);
            let tasks = claim(self.client, &self.queue, WORKER, size);
            came.extend(tasks.iter().map(|task| task.id));
            left -= size;
        }
        execute(self.holder, "ROLLBACK");
        assert_eq!(foreseen, came, "the preview of {n}, then claims of {most}");
    }

    fn play(&mut self) {
        let rows = self.random.random_range(1..=30);
        if self.one_in(2) {
            self.settings();
        }
        self.insert(rows);
        if self.one_in(2) {
            let weights = self.weights();
            self.set_weights(&weights);
        }
        self.live();
        if self.one_in(2) {
            self.settings();
        }
        if self.one_in(2) {
            self.insert(5);
        }
        for _ in 0..3 {
            self.compare();
        }
    }
}

#[test]
fn previews_of_random_queues_are_what_claims_then_return() {
    // Without a janitor: what it is about to put back at some instant, neither a preview nor a claim can see.
    let cluster = Cluster::start(
        Options::new()
            .set("max_worker_processes", 0)
            .set("harvest_fair.max_queues", 4096)
            .set("harvest_fair.max_keys", 100_000),
    );
    let db = cluster.database();
    let (mut client, mut holder) = (db.connect(), db.connect());
    let mut foreseen: i64 = 0;
    for seed in SEEDS {
        for i in 0..QUEUES_A_SEED {
            let queue = format!("{seed} {i}");
            let mut dice = StdRng::seed_from_u64(seed * QUEUES_A_SEED as u64 + i as u64);
            let mut random = Random {
                client: &mut client,
                holder: &mut holder,
                queue: queue.clone(),
                capped: dice.random_ratio(1, 3),
                grouped: dice.random_ratio(1, 2),
                random: dice,
                history: Vec::new(),
            };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| random.play()));
            if let Err(panic) = result {
                eprintln!("seed {seed}, queue {i}:\n{}", random.history.join("\n"));
                std::panic::resume_unwind(panic);
            }
            foreseen += one::<i64>(
                &mut client,
                "SELECT count(*) FROM harvest_fair.task WHERE queue = $1 AND worker = $2",
                &[&queue, &WORKER],
            );
        }
        eprintln!("seed {seed}: {foreseen} claims foreseen so far");
    }
    assert!(foreseen > 1000, "only {foreseen} claims");
}
