//! Claims a second of many clients at once.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use super::Bench;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::Contender::{self, Fair, Plain};
use crate::place::{Claimer, Place};
use crate::race::{Track, median};
use crate::report::{Answer, Finding, Target, count};

const PAIR: [Contender; 2] = [Fair, Plain];
/// What two measures of the same thing differ by on a machine that others use too.
const NOISE: f64 = 0.05;

/// Claims a second of these clients together.
fn throughput(clients: &mut [Claimer], time: Duration) -> Result<f64> {
    let ready = Barrier::new(clients.len());
    let start = Instant::now();
    let done: Vec<Result<(usize, Instant, Instant)>> = thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                let ready = &ready;
                scope.spawn(move || {
                    ready.wait();
                    let start = Instant::now();
                    let mut claims = 0;
                    while start.elapsed() < time {
                        if client.claim()? != 1 {
                            return Err("a claim came back empty".into());
                        }
                        claims += 1;
                    }
                    Ok((claims, start, Instant::now()))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a client panicked".into()))
            })
            .collect()
    });
    let (mut claims, mut first, mut last) = (0, None, start);
    for one in done {
        let (n, began, ended) = one?;
        claims += n;
        first = Some(first.map_or(began, |first: Instant| first.min(began)));
        last = last.max(ended);
    }
    let elapsed = last.duration_since(first.unwrap_or(start));
    Ok(claims as f64 / elapsed.as_secs_f64())
}

pub fn concurrency(bench: &Bench) -> Result<Vec<Answer>> {
    let sizes = bench.sizes;
    let most = sizes.clients.last().copied().unwrap_or(1);
    let (place, _) = Place::open(bench.cluster, bench.fetched, &PAIR)?;
    let queue = |keys: i64| format!("keys-{keys}");
    for keys in sizes.client_keys {
        place.fill(&PAIR, &queue(*keys), sizes.large, *keys)?;
    }
    place.settle()?;
    let mut cleaner = place.database.connect();
    let (mut findings, mut series, mut tracks) = (Vec::new(), Vec::new(), Vec::new());
    for (colour, keys) in sizes.client_keys.iter().enumerate() {
        let mut clients = Vec::new();
        for contender in PAIR {
            let mut of: Vec<Claimer> = (0..most)
                .map(|_| place.claimer(contender, &queue(*keys), 1))
                .collect::<Result<_>>()?;
            for client in &mut of {
                client.claim()?;
            }
            clients.push(of);
        }
        // By level and contender, the claims a second of each round.
        let mut rates = vec![[Vec::new(), Vec::new()]; sizes.clients.len()];
        for round in 0..sizes.client_rounds {
            for contender in PAIR {
                contender.vacuum(&mut cleaner)?;
            }
            for (level, n) in sizes.clients.iter().enumerate() {
                for turn in 0..2 {
                    let who = (round + level + turn) % 2;
                    let rate = throughput(&mut clients[who][..*n], sizes.client_time)?;
                    rates[level][who].push(rate);
                }
            }
        }
        let mut best: f64 = 0.0;
        let mut holds = f64::INFINITY;
        for (n, [fair, plain]) in sizes.clients.iter().zip(&rates) {
            let ratios: Vec<f64> = fair.iter().zip(plain).map(|(a, b)| a / b).collect();
            let (ours, theirs, ratio) = (median(fair), median(plain), median(&ratios));
            if best > 0.0 {
                holds = holds.min(ours / best);
            }
            best = best.max(ours);
            findings.push(Finding {
                ours: format!("{ours:.0}/s"),
                other: format!("{}: {theirs:.0}/s", Plain.name()),
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
        findings.push(Finding::number(
            "concurrent claims do not fall",
            format!("up to {most} clients, {keys} keys"),
            holds,
            format!("{holds:.2} of the best with fewer clients"),
            Target::AtLeast(1.0 - NOISE),
            format!(">= 1, less {NOISE} for noise"),
        ));
        for (who, contender) in PAIR.iter().enumerate() {
            let points = sizes
                .clients
                .iter()
                .zip(&rates)
                .map(|(n, rates)| (*n as f64, median(&rates[who])))
                .collect();
            let line = Series::new(
                format!(
                    "{}, {keys} {}",
                    if who == 0 { "fair" } else { "(a)" },
                    if *keys == 1 { "key" } else { "keys" }
                ),
                colour,
                points,
            );
            series.push(if who == 0 { line } else { line.dashed() });
            for (n, rates) in sizes.clients.iter().zip(&rates) {
                tracks.push(Track {
                    label: format!(
                        "{} claims a second: {n} clients {keys} keys",
                        contender.name()
                    ),
                    rounds: rates[who].iter().map(|rate| vec![*rate]).collect(),
                });
            }
        }
    }
    Ok(vec![Answer {
        id: "concurrency",
        title: "Concurrent claims",
        method: format!(
            "Claims of 1 by as many sessions as they can, {} rounds of {} ms for each number of clients, in turns, with a VACUUM before each round. Clients and server share the \
             processors.",
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
