//! Any number of workers that claim at the same time, in transactions that stay open until all of them have claimed. So
//! between two rounds nothing is under way, and what is promised can be checked to the tick, however slow the machine.

use std::thread;

use harvest_fair_server_tests::{ClaimedTask, Database};
use postgres::Client;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::support::execute;

/// How many workers each guarantee is tested with.
pub const CREWS: [usize; 4] = [1, 2, 8, 16];

/// One unit of virtual time.
const UNIT: f64 = 1e6;

pub const WEIGHTS: [f64; 8] = [0.001, 0.1, 0.5, 1.0, 2.0, 3.0, 7.0, 1000.0];

/// What a claim of this weight charges, in ticks.
pub fn step(weight: f64) -> i128 {
    (UNIT / weight).round().max(1.0) as i128
}

/// Another one in each run; `HF_SEED` makes it the one that was printed.
pub fn random() -> StdRng {
    let seed = std::env::var("HF_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    eprintln!("HF_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

pub struct Crew {
    workers: Vec<Client>,
}

impl Crew {
    pub fn new(db: &Database, size: usize) -> Crew {
        Crew {
            workers: (0..size).map(|_| db.connect()).collect(),
        }
    }

    pub fn size(&self) -> usize {
        self.workers.len()
    }

    /// Each worker, by its number, does the same in a transaction at the same time. All of them stay open.
    #[track_caller]
    pub fn all<R: Send>(&mut self, act: impl Fn(usize, &mut Client) -> R + Sync) -> Vec<R> {
        let act = &act;
        thread::scope(|scope| {
            let running: Vec<_> = self
                .workers
                .iter_mut()
                .enumerate()
                .map(|(number, client)| {
                    scope.spawn(move || {
                        execute(client, "BEGIN");
                        act(number, client)
                    })
                })
                .collect();
            running
                .into_iter()
                .map(|worker| worker.join().expect("the worker reports a failure itself"))
                .collect()
        })
    }

    /// Each worker claims `n` tasks at the same time, and holds them in an open transaction: what each got.
    #[track_caller]
    pub fn claim(&mut self, queue: &str, n: i32) -> Vec<Vec<ClaimedTask>> {
        self.all(|number, client| {
            harvest_fair_server_tests::claim(client, queue, &format!("w{number}"), n)
        })
    }

    /// Ends the open transactions, all at the same time: those of the workers that `aborts` names by a rollback.
    #[track_caller]
    pub fn end(&mut self, aborts: impl Fn(usize) -> bool + Sync) {
        let aborts = &aborts;
        thread::scope(|scope| {
            for (number, client) in self.workers.iter_mut().enumerate() {
                scope.spawn(move || {
                    execute(client, if aborts(number) { "ROLLBACK" } else { "COMMIT" });
                });
            }
        });
    }

    /// One round whose claims are all kept; the keys of what was claimed.
    #[track_caller]
    pub fn round(&mut self, queue: &str, n: i32) -> Vec<String> {
        let claimed = self.claim(queue, n);
        self.end(|_| false);
        claimed.into_iter().flatten().map(|task| task.key).collect()
    }
}

/// The keys that compete in one case, with their weights.
pub struct Field {
    pub queue: String,
    pub keys: Vec<(String, f64)>,
}

impl Field {
    /// `keys` get weights by chance, and `tasks` tasks each, all due since long ago.
    #[track_caller]
    pub fn new(
        client: &mut Client,
        random: &mut StdRng,
        queue: &str,
        keys: Vec<String>,
        tasks: usize,
    ) -> Field {
        let mut field = Field {
            queue: queue.to_owned(),
            keys: Vec::new(),
        };
        for key in keys {
            field.weigh(client, random, &key);
            field.enqueue(client, &key, tasks);
        }
        field
    }

    pub fn weigh(&mut self, client: &mut Client, random: &mut StdRng, name: &str) {
        let weight = *WEIGHTS.choose(random).expect("there are weights");
        client
            .execute(
                "SELECT fair_set_weight($1, $2, $3)",
                &[&self.queue, &name, &weight],
            )
            .unwrap_or_else(|error| panic!("fair_set_weight {name} {weight}: {error:?}"));
        self.keys.push((name.to_owned(), weight));
    }

    #[track_caller]
    pub fn enqueue(&self, client: &mut Client, name: &str, tasks: usize) {
        enqueue(client, &self.queue, name, tasks);
    }

    pub fn sum_of_weights(&self) -> f64 {
        self.keys.iter().map(|(_, weight)| weight).sum()
    }
}

#[track_caller]
pub fn enqueue(client: &mut Client, queue: &str, key: &str, tasks: usize) {
    client
        .execute(
            "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at)
             SELECT $1, $2, '2001-01-01' FROM generate_series(1, $3::bigint)",
            &[&queue, &key, &(tasks as i64)],
        )
        .unwrap_or_else(|error| panic!("enqueue {key}: {error:?}"));
}

/// `k0`, `k1` and so on: at most `most` of them.
pub fn some_keys(random: &mut StdRng, most: usize) -> Vec<String> {
    let count = random.random_range(2..=most);
    (0..count).map(|i| format!("k{i}")).collect()
}

/// For two of the competitors, how far one may get ahead of the other, and how far it got: over any interval between two
/// rounds, and from the start.
pub struct Race {
    names: (String, String),
    steps: (i128, i128),
    ahead: i128,
    most: i128,
    least: i128,
}

impl Race {
    /// One for each two of the keys.
    pub fn all(keys: &[(String, f64)]) -> Vec<Race> {
        let mut races = Vec::new();
        for (i, (a, weight_a)) in keys.iter().enumerate() {
            for (b, weight_b) in &keys[..i] {
                races.push(Race {
                    names: (a.clone(), b.clone()),
                    steps: (step(*weight_a), step(*weight_b)),
                    ahead: 0,
                    most: 0,
                    least: 0,
                });
            }
        }
        races
    }

    pub fn is_of(&self, name: &str) -> bool {
        self.names.0 == name || self.names.1 == name
    }

    /// `served` are the keys of a round.
    pub fn note(&mut self, served: &[String]) {
        for key in served {
            if *key == self.names.0 {
                self.ahead += self.steps.0;
            } else if *key == self.names.1 {
                self.ahead -= self.steps.1;
            }
        }
        self.most = self.most.max(self.ahead);
        self.least = self.least.min(self.ahead);
    }

    #[track_caller]
    pub fn check(&self, from_a_common_start: bool) {
        let (a, b) = self.steps;
        let (least, most, names) = (self.least, self.most, &self.names);
        assert!(most - least <= a + b, "{names:?}: {least}..{most} ticks");
        if from_a_common_start {
            assert!(
                most.max(-least) <= a.max(b),
                "{names:?}: {least}..{most} ticks from a common start"
            );
        }
    }
}
