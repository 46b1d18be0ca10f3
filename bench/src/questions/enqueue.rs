//! What the trigger costs those who enqueue.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use harvest_fair_server_tests::Database;
use postgres::Client;

use super::Bench;
use super::claims::{bars, tagged};
use crate::Result;
use crate::chart::Bars;
use crate::contenders::PAYLOAD;
use crate::processes::pin_session;
use crate::race::{Runner, Track, micros, race};
use crate::report::{Answer, Finding, Target, count};

const TABLES: [(&str, &str); 2] = [
    ("harvest_fair", "harvest_fair.task"),
    ("the same table without the trigger", "bare"),
];
const KEYS: i64 = 100;

fn insert(table: &str) -> String {
    format!(
        "INSERT INTO {table} (queue, fairness_key, priority, payload) VALUES ('q', $1, 3, '{PAYLOAD}')"
    )
}

/// An enqueue by one session, with keys in turns.
struct Producer {
    client: Client,
    statement: postgres::Statement,
    next: i64,
}

impl Producer {
    fn new(database: &Database, table: &str) -> Result<Producer> {
        let mut client = database.connect();
        Ok(Producer {
            statement: client.prepare(&insert(table))?,
            client,
            next: 0,
        })
    }

    fn enqueue(&mut self) -> Result<usize> {
        self.next += 1;
        let key = format!("k{}", self.next % KEYS);
        Ok(self.client.execute(&self.statement, &[&key])? as usize)
    }
}

fn single(bench: &Bench, database: &Database) -> Result<Vec<Track>> {
    let mut runners = Vec::new();
    for (name, table) in TABLES {
        let mut producer = Producer::new(database, table)?;
        pin_session(&mut producer.client);
        runners.push(Runner::new(name, bench.sizes.calls, 1, move || {
            producer.enqueue()
        }));
    }
    race(&mut runners, bench.sizes.rounds)
}

/// Time for each row of all producers together, by round.
fn many(bench: &Bench, database: &Database) -> Result<Vec<Track>> {
    let producers = bench.sizes.producers;
    let each = bench.sizes.calls;
    let mut crews = Vec::new();
    for (_, table) in TABLES {
        let crew: Vec<Producer> = (0..producers)
            .map(|_| Producer::new(database, table))
            .collect::<Result<_>>()?;
        crews.push(crew);
    }
    let work = |crew: &mut Vec<Producer>| -> Result<f64> {
        let ready = Barrier::new(producers + 1);
        let (start, results) = thread::scope(|scope| {
            let threads: Vec<_> = crew
                .iter_mut()
                .map(|producer| {
                    let ready = &ready;
                    scope.spawn(move || -> Result<()> {
                        ready.wait();
                        for _ in 0..each {
                            producer.enqueue()?;
                        }
                        Ok(())
                    })
                })
                .collect();
            ready.wait();
            let start = Instant::now();
            let results: Vec<Result<()>> = threads
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err("a producer panicked".into()))
                })
                .collect();
            (start, results)
        });
        let taken = start.elapsed();
        results.into_iter().collect::<Result<()>>()?;
        Ok(micros(taken) / (producers * each) as f64)
    };
    let mut tracks = TABLES.map(|(name, _)| Track {
        label: name.to_owned(),
        rounds: Vec::new(),
    });
    for round in 0..bench.sizes.rounds {
        for turn in 0..2 {
            let who = (round + turn) % 2;
            let time = work(&mut crews[who])?;
            tracks[who].rounds.push(vec![time]);
        }
    }
    Ok(tracks.to_vec())
}

/// The whole of a COPY from a file beside the server, by round.
fn copy(bench: &Bench, database: &Database) -> Result<Vec<Track>> {
    let file = database.cluster().data().join("tasks.copy");
    let mut client = database.connect();
    client.batch_execute(&format!(
        "COPY (SELECT 'q', 'k' || i % {KEYS}, 3, '{PAYLOAD}' FROM generate_series(1, {}) i) TO '{}'",
        bench.sizes.copied,
        file.display()
    ))?;
    let mut tracks = TABLES.map(|(name, _)| Track {
        label: name.to_owned(),
        rounds: Vec::new(),
    });
    for round in 0..bench.sizes.copy_rounds {
        for turn in 0..2 {
            let who = (round + turn) % 2;
            let table = TABLES[who].1;
            client.batch_execute(&format!("TRUNCATE {table}"))?;
            client.batch_execute("CHECKPOINT")?;
            let start = Instant::now();
            let rows = client.execute(
                &format!(
                    "COPY {table} (queue, fairness_key, priority, payload) FROM '{}'",
                    file.display()
                ),
                &[],
            )?;
            let taken = micros(start.elapsed());
            if rows as i64 != bench.sizes.copied {
                return Err(format!("COPY took {rows} rows").into());
            }
            tracks[who].rounds.push(vec![taken]);
        }
    }
    Ok(tracks.to_vec())
}

pub fn enqueue(bench: &Bench) -> Result<Vec<Answer>> {
    let database = bench.cluster.database();
    database.connect().batch_execute(
        "CREATE TABLE bare (LIKE harvest_fair.task INCLUDING ALL); SELECT count(*) FROM fair_claim('q', 'w')",
    )?;
    let (mut findings, mut groups, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    let cases = [
        ("single INSERTs".to_owned(), single(bench, &database)?, 1.2),
        (
            format!(
                "INSERTs by {} clients, time for each row",
                bench.sizes.producers
            ),
            many(bench, &database)?,
            1.2,
        ),
        (
            format!("{} rows by one COPY", count(bench.sizes.copied)),
            copy(bench, &database)?,
            1.4,
        ),
    ];
    for (case, tracks, limit) in cases {
        findings.push(Finding::times(
            "enqueue",
            &case,
            &tracks[0],
            &tracks[1],
            Target::AtMost(limit),
        ));
        groups.push((case.clone(), bars(&tracks)));
        raw.extend(tagged(tracks, &case));
    }
    Ok(vec![Answer {
        id: "enqueue",
        title: "Enqueue",
        method: format!(
            "Into our table, and into one that is like it in columns and indexes but has no trigger; {KEYS} keys, in turns. The queue is on the board. \
             COPY reads a file on the server's disk into an empty table after a checkpoint."
        ),
        findings,
        picture: Bars {
            title: "Enqueue with the trigger and without".to_owned(),
            log: true,
            groups,
        }
        .draw(),
        tracks: raw,
    }])
}
