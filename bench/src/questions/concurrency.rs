//! Claims a second of many clients at once.

use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::runtime::{self, Runtime};
use tokio::task::LocalSet;
use tokio_postgres::{Client, Config, NoTls, Statement};

use super::Bench;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::Contender::{Fair, Plain};
use crate::place::Place;
use crate::race::{Track, median};
use crate::report::{Answer, Finding, Target, count};

/// What two measures of the same thing differ by on a machine that others use too.
const NOISE: f64 = 0.05;
/// The least that a session can write and commit: how far this falls is the machine's part, and Postgres'.
const LEAST: &str = "INSERT INTO least VALUES (1) RETURNING one";

/// Sessions that all run the same statement, driven by one thread: as many threads as clients would take the server's time.
struct Sessions {
    runtime: Runtime,
    tasks: LocalSet,
    sessions: Vec<Rc<(Client, Statement)>>,
}

impl Sessions {
    fn open(config: &Config, sql: &str, count: usize) -> Result<Sessions> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let tasks = LocalSet::new();
        let opened = tasks.block_on(&runtime, async {
            let mut sessions = Vec::new();
            for _ in 0..count {
                let (client, connection) = config.connect(NoTls).await?;
                tokio::task::spawn_local(connection);
                let statement = client.prepare(sql).await?;
                // The first call plans, and fills caches.
                client.query(&statement, &[]).await?;
                sessions.push(Rc::new((client, statement)));
            }
            Result::Ok(sessions)
        });
        Ok(Sessions {
            sessions: opened?,
            runtime,
            tasks,
        })
    }

    /// Rows a second that the first `clients` of them get together, one a call.
    fn throughput(&self, clients: usize, time: Duration) -> Result<f64> {
        self.tasks.block_on(&self.runtime, async {
            let start = Instant::now();
            let running: Vec<_> = self.sessions[..clients]
                .iter()
                .map(|session| {
                    let session = Rc::clone(session);
                    tokio::task::spawn_local(async move {
                        let (client, statement) = &*session;
                        let mut calls = 0;
                        while start.elapsed() < time {
                            if client.query(statement, &[]).await?.len() != 1 {
                                return Err("a call came back empty".into());
                            }
                            calls += 1;
                        }
                        Result::Ok(calls)
                    })
                })
                .collect();
            let mut calls = 0;
            for one in running {
                calls += one.await??;
            }
            Ok(f64::from(calls) / start.elapsed().as_secs_f64())
        })
    }
}

/// Of the best with fewer clients, what is left with more: the least over all steps.
fn holds(by_clients: &[f64]) -> f64 {
    let (mut best, mut least) = (0.0_f64, f64::INFINITY);
    for rate in by_clients {
        if best > 0.0 {
            least = least.min(rate / best);
        }
        best = best.max(*rate);
    }
    least
}

pub fn concurrency(bench: &Bench) -> Result<Vec<Answer>> {
    let sizes = bench.sizes;
    let most = sizes.clients.last().copied().unwrap_or(1);
    let pair = [Fair, Plain];
    let (place, _) = Place::open(bench.cluster, bench.fetched, &pair)?;
    let queue = |keys: i64| format!("keys-{keys}");
    for keys in sizes.client_keys {
        place.fill(&pair, &queue(*keys), sizes.large, *keys)?;
    }
    place.settle()?;
    let mut cleaner = place.database.connect();
    cleaner.batch_execute("CREATE TABLE least (one int)")?;
    let mut config = Config::new();
    config
        .host_path(bench.cluster.socket_dir())
        .user("postgres")
        .dbname(place.database.name());
    let (mut findings, mut series, mut tracks) = (Vec::new(), Vec::new(), Vec::new());
    for (colour, keys) in sizes.client_keys.iter().enumerate() {
        let [fair, plain] = pair.map(|contender| place.claim(contender, &queue(*keys), 1));
        let sessions = [fair?, plain?, LEAST.to_owned()]
            .iter()
            .map(|sql| Sessions::open(&config, sql, most))
            .collect::<Result<Vec<_>>>()?;
        // By who runs and level, the calls a second of each round.
        let mut rates = vec![vec![Vec::new(); sizes.clients.len()]; sessions.len()];
        for round in 0..sizes.client_rounds {
            for contender in pair {
                contender.vacuum(&mut cleaner)?;
            }
            for (level, n) in sizes.clients.iter().enumerate() {
                for turn in 0..sessions.len() {
                    let who = (round + level + turn) % sessions.len();
                    rates[who][level].push(sessions[who].throughput(*n, sizes.client_time)?);
                }
            }
        }
        for (level, n) in sizes.clients.iter().enumerate() {
            let [fair, plain] = [&rates[0][level], &rates[1][level]];
            let ratios: Vec<f64> = fair.iter().zip(plain).map(|(a, b)| a / b).collect();
            let ratio = median(&ratios);
            findings.push(Finding {
                ours: format!("{:.0}/s", median(fair)),
                other: format!("{}: {:.0}/s", Plain.name(), median(plain)),
                ..Finding::number(
                    "concurrent claims",
                    format!("{n} clients, {} rows, {keys} keys", count(sizes.large)),
                    ratio,
                    format!("{ratio:.2}x as many"),
                    Target::AtLeast(1.0),
                    ">= 1x as many",
                )
            });
        }
        let medians: Vec<Vec<f64>> = rates
            .iter()
            .map(|levels| levels.iter().map(|rounds| median(rounds)).collect())
            .collect();
        let [ours, theirs, least] = [0, 1, 2].map(|who| holds(&medians[who]));
        findings.push(Finding {
            other: format!("{}: {theirs:.2}; an INSERT: {least:.2}", Plain.name()),
            ..Finding::number(
                "concurrent claims do not fall",
                format!("up to {most} clients, {keys} keys"),
                ours,
                format!("{ours:.2} of the best with fewer clients"),
                Target::AtLeast(1.0 - NOISE),
                format!(">= 1, less {NOISE} for noise"),
            )
        });
        let of_keys = format!("{keys} {}", if *keys == 1 { "key" } else { "keys" });
        for (who, name) in ["fair", "(a)"].into_iter().enumerate() {
            let points = sizes.clients.iter().zip(&medians[who]);
            let points = points.map(|(n, rate)| (*n as f64, *rate)).collect();
            let line = Series::new(format!("{name}, {of_keys}"), colour, points);
            series.push(if who == 0 { line } else { line.dashed() });
        }
        for (who, name) in [Fair.name(), Plain.name(), LEAST].into_iter().enumerate() {
            for (n, rounds) in sizes.clients.iter().zip(&rates[who]) {
                tracks.push(Track {
                    label: format!("{name} a second: {n} clients {of_keys}"),
                    rounds: rounds.iter().map(|rate| vec![*rate]).collect(),
                });
            }
        }
    }
    Ok(vec![Answer {
        id: "concurrency",
        title: "Concurrent claims",
        method: format!(
            "Claims of 1 by sessions as fast as they can, {} rounds of {} ms for each number of clients, in turns, with a VACUUM before each round. One thread drives all \
             clients, on the processors of the server. INSERTs of one number in the same turns show what more of them cost the cheapest write.",
            sizes.client_rounds,
            sizes.client_time.as_millis()
        ),
        findings,
        picture: Lines {
            title: "Claims a second by number of clients; dashed: (a) plain SKIP LOCKED".to_owned(),
            x: "clients".to_owned(),
            y: "claims a second".to_owned(),
            x_log: true,
            y_log: false,
            x_text: |value| format!("{value:.0}"),
            y_text: |value| count(value as i64),
            series,
        }
        .draw(),
        tracks,
    }])
}
