//! Random workloads on a live server, followed row by row by the naive oracle.

use harvest_fair_server_tests::{ClaimedTask, claim, one};
use postgres::{Client, GenericClient};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::naive::{Pick, Queue, State, Task};
use crate::support::restless;

const WORKLOADS: u64 = 200;
const STEPS: usize = 60;
const KEYS: [&str; 6] = ["", "a", "b", "c", "d", "e"];
const WEIGHTS: [f64; 8] = [0.001, 0.1, 0.5, 1.0, 2.0, 3.0, 7.0, 1000.0];

struct Workload<'c> {
    client: &'c mut Client,
    queue: String,
    model: Queue,
    random: StdRng,
    batches: bool,
    /// Running tasks, with their leases.
    running: Vec<ClaimedTask>,
    /// What was done, for a look at it when the two differ.
    history: Vec<String>,
}

fn picks(tasks: &[ClaimedTask]) -> Vec<Pick> {
    tasks
        .iter()
        .map(|task| Pick {
            id: task.id,
            weight: task.weight,
            lag: task.lag,
        })
        .collect()
}

impl Workload<'_> {
    fn insert(&mut self) {
        let rows = self.random.random_range(1..=6);
        let values: Vec<String> = (0..rows)
            .map(|_| {
                let due = match self.random.random_range(0..10) {
                    0 => "now() + interval '1 day'".to_owned(),
                    // Few different times, so that ties are common.
                    _ => format!(
                        "date_trunc('day', now()) - interval '{} s'",
                        self.random.random_range(0..60)
                    ),
                };
                let weight = match self.random.random_range(0..4) {
                    0 => WEIGHTS.choose(&mut self.random).unwrap().to_string(),
                    _ => "NULL".to_owned(),
                };
                format!(
                    "('{}', '{}', {}, {}, {}, {due})",
                    self.queue,
                    KEYS.choose(&mut self.random).unwrap(),
                    [1, 2, 3, 3, 3, 3].choose(&mut self.random).unwrap(),
                    weight,
                    self.random.random_ratio(1, 8),
                )
            })
            .collect();
        let sql = format!(
            "INSERT INTO harvest_fair.task (queue, fairness_key, priority, weight, new_start, scheduled_at) VALUES {} RETURNING id",
            values.join(", ")
        );
        let ids: Vec<i64> = self
            .client
            .query(&sql, &[])
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        for (id, row) in ids.into_iter().zip(&values) {
            self.history.push(format!("insert {id} {row}"));
            self.read(id);
        }
    }

    /// Takes a task as it stands in the table into the model.
    fn read(&mut self, id: i64) {
        let row = self
            .client
            .query_one(
                "SELECT fairness_key, priority, weight, new_start, (extract(epoch FROM scheduled_at) * 1e6)::bigint,
                        scheduled_at <= now()
                 FROM harvest_fair.task WHERE id = $1",
                &[&id],
            )
            .unwrap();
        let task = Task {
            key: row.get(0),
            priority: row.get(1),
            weight: row.get(2),
            new_start: row.get(3),
            due: row.get(4),
            is_due: row.get(5),
            state: State::Pending,
            step: 0,
        };
        self.model.tasks.insert(id, task);
    }

    /// Claims and compares row by row; the model has then claimed too.
    fn claim_in(
        client: &mut impl GenericClient,
        model: &mut Queue,
        queue: &str,
        sizes: &[i32],
    ) -> Vec<ClaimedTask> {
        let mut all = Vec::new();
        for n in sizes {
            let tasks = claim(client, queue, "w", *n);
            let expected: Vec<Pick> = (0..*n).map_while(|_| model.claim()).collect();
            assert_eq!(picks(&tasks), expected, "a claim of {n}");
            all.extend(tasks);
        }
        all
    }

    /// The same number of tasks, in one call or in as many.
    fn sizes(&mut self) -> Vec<i32> {
        let n = self.random.random_range(1..=8);
        if self.batches {
            vec![n]
        } else {
            vec![1; n as usize]
        }
    }

    fn claim(&mut self) {
        let sizes = self.sizes();
        self.history.push(format!("claim {sizes:?}"));
        let tasks = Workload::claim_in(self.client, &mut self.model, &self.queue, &sizes);
        self.history.push(format!("  {:?}", picks(&tasks)));
        self.running.extend(tasks);
    }

    fn claim_and_abort(&mut self) {
        let sizes = self.sizes();
        let kept_sizes = self.sizes();
        let mut transaction = self.client.transaction().unwrap();
        if self.random.random() {
            self.history.push(format!("claim {sizes:?} and roll back"));
            let tasks = Workload::claim_in(&mut transaction, &mut self.model, &self.queue, &sizes);
            transaction.rollback().unwrap();
            self.model.abort(&picks(&tasks));
            return;
        }
        self.history.push(format!(
            "claim {sizes:?}, roll back to savepoint, claim {kept_sizes:?}"
        ));
        let mut savepoint = transaction.savepoint("s").unwrap();
        let tasks = Workload::claim_in(&mut savepoint, &mut self.model, &self.queue, &sizes);
        savepoint.rollback().unwrap();
        self.model.abort(&picks(&tasks));
        let kept = Workload::claim_in(&mut transaction, &mut self.model, &self.queue, &kept_sizes);
        transaction.commit().unwrap();
        self.running.extend(kept);
    }

    fn some_running(&mut self) -> Option<ClaimedTask> {
        if self.running.is_empty() {
            return None;
        }
        let i = self.random.random_range(0..self.running.len());
        Some(self.running.swap_remove(i))
    }

    fn settle(&mut self) {
        let Some(task) = self.some_running() else {
            return;
        };
        let (id, lease) = (task.id, task.lease);
        let way = self.random.random_range(0..4);
        self.history.push(format!("settle {id} in way {way}"));
        match way {
            0 => {
                assert!(one::<bool>(
                    self.client,
                    "SELECT fair_release($1::bigint, $2::bigint)",
                    &[&id, &lease]
                ));
                self.model.release(id);
            }
            1 => {
                let state: String = one(
                    self.client,
                    "SELECT fair_fail($1::bigint, $2::bigint, 'x', '0')::text",
                    &[&id, &lease],
                );
                if state == "pending" {
                    self.read(id);
                } else {
                    self.model.tasks.get_mut(&id).unwrap().state = State::Done;
                }
            }
            2 => {
                let cost = *[0.0, 0.5, 1.0, 3.0, 20.0].choose(&mut self.random).unwrap();
                assert!(one::<bool>(
                    self.client,
                    "SELECT fair_complete($1::bigint, $2::bigint, $3)",
                    &[&id, &lease, &cost]
                ));
                self.model.complete(id, cost);
            }
            _ => {
                assert!(one::<bool>(
                    self.client,
                    "SELECT fair_complete($1::bigint, $2::bigint)",
                    &[&id, &lease]
                ));
                self.model.complete(id, 1.0);
            }
        }
    }

    fn change_weight(&mut self) {
        let key = (*KEYS[1..].choose(&mut self.random).unwrap()).to_owned();
        if self.random.random_ratio(1, 4) {
            self.client
                .execute("SELECT fair_clear_weight($1, $2)", &[&self.queue, &key])
                .unwrap();
            self.model.overrides.remove(&key);
        } else {
            let weight = *WEIGHTS.choose(&mut self.random).unwrap();
            self.client
                .execute(
                    "SELECT fair_set_weight($1, $2, $3)",
                    &[&self.queue, &key, &weight],
                )
                .unwrap();
            self.model.overrides.insert(key.clone(), weight);
        }
        // What tasks of the key were charged at the old weight is not given back here: DESIGN leaves open at which.
        self.running.retain(|task| task.key != key);
        self.history.push(format!(
            "weight of {key} is {:?}",
            self.model.overrides.get(&key)
        ));
    }

    /// A DBA's hand in the table.
    fn meddle(&mut self) {
        let pending: Vec<i64> = self
            .model
            .tasks
            .iter()
            .filter(|(_, task)| task.state == State::Pending)
            .map(|(id, _)| *id)
            .collect();
        let Some(id) = pending.choose(&mut self.random).copied() else {
            return;
        };
        let change = match self.random.random_range(0..6) {
            0 => {
                self.client
                    .execute("DELETE FROM harvest_fair.task WHERE id = $1", &[&id])
                    .unwrap();
                self.model.tasks.remove(&id);
                self.history.push(format!("delete {id}"));
                return;
            }
            1 => format!("priority = {}", self.random.random_range(1..=5)),
            2 => format!(
                "fairness_key = '{}'",
                KEYS.choose(&mut self.random).unwrap()
            ),
            3 => "scheduled_at = now() + interval '1 day'".to_owned(),
            4 => format!("weight = {}", WEIGHTS.choose(&mut self.random).unwrap()),
            _ => format!(
                "scheduled_at = date_trunc('day', now()) - interval '{} s'",
                self.random.random_range(0..60)
            ),
        };
        let sql = format!("UPDATE harvest_fair.task SET {change} WHERE id = {id}");
        self.history.push(sql.clone());
        self.client.batch_execute(&sql).unwrap();
        self.read(id);
    }

    fn put_back(&mut self) {
        let Some(task) = self.some_running() else {
            return;
        };
        let sql = "UPDATE harvest_fair.task SET state = 'pending' WHERE id = $1";
        self.history.push(format!("put back {}", task.id));
        self.client.execute(sql, &[&task.id]).unwrap();
        self.read(task.id);
    }

    fn step(&mut self) {
        match self.random.random_range(0..20) {
            0..=5 => self.insert(),
            6..=11 => self.claim(),
            12..=13 => self.claim_and_abort(),
            14..=15 => self.settle(),
            16 => self.change_weight(),
            17..=18 => self.meddle(),
            _ => self.put_back(),
        }
    }

    /// The passes of all keys that have claimable work agree, and the clocks of their tiers.
    fn compare(&mut self) {
        let expected = self.model.passes();
        let actual: Vec<(i16, String, f64, f64)> = self
            .client
            .query(
                "SELECT priority, fairness_key, pass, clock FROM fair_state($1) ORDER BY priority, fairness_key",
                &[&self.queue],
            )
            .unwrap()
            .iter()
            .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
            // The board may not know yet that a key's last row is gone.
            .filter(|(priority, key, ..): &(i16, String, f64, f64)| {
                expected.iter().any(|(p, k, ..)| p == priority && k == key)
            })
            .collect();
        assert_eq!(actual, expected);
    }

    /// Every pick agrees until nothing is left.
    fn finish(&mut self) {
        let size = if self.batches { 16 } else { 1 };
        loop {
            let tasks = Workload::claim_in(self.client, &mut self.model, &self.queue, &[size]);
            self.compare();
            if tasks.is_empty() {
                break;
            }
        }
    }
}

fn follow(batches: bool) {
    let db = restless().database();
    let mut client = db.connect();
    for seed in 0..WORKLOADS / 2 {
        let seed = seed * 2 + u64::from(batches);
        let mut workload = Workload {
            client: &mut client,
            queue: format!("workload {seed}"),
            model: Queue::default(),
            random: StdRng::seed_from_u64(seed),
            batches,
            running: Vec::new(),
            history: Vec::new(),
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // A queue is loaded, and its tiers rebased, when it is first touched.
            assert!(claim(workload.client, &workload.queue, "w", 1).is_empty());
            for _ in 0..STEPS {
                workload.step();
                workload.model.notice();
                // Not after every step: looking must not be what keeps the board right.
                if workload.random.random_ratio(1, 3) {
                    workload.compare();
                }
            }
            workload.finish();
        }));
        if let Err(panic) = result {
            eprintln!(
                "workload {seed} differs from the model after:\n{}",
                workload.history.join("\n")
            );
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn random_workloads_follow_the_model_singly() {
    follow(false);
}

#[test]
fn random_workloads_follow_the_model_in_batches() {
    follow(true);
}
