//! Claims while an old snapshot keeps dead rows and index entries alive.

use std::time::{Duration, Instant};

use super::Bench;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::Contender::{self, Fair, Plain};
use crate::place::{Claimer, Place};
use crate::processes::{Pinned, pin_session};
use crate::race::{Track, median, micros, quantile};
use crate::report::{Answer, Finding, Target, count, time, times};

const KEYS: i64 = 100;
const PAIR: [Contender; 2] = [Fair, Plain];

fn chunk(claimer: &mut Claimer, claims: usize) -> Result<Vec<f64>> {
    (0..claims)
        .map(|_| {
            let start = Instant::now();
            let rows = claimer.claim()?;
            let taken = micros(start.elapsed());
            if rows == 1 {
                Ok(taken)
            } else {
                Err("a claim came back empty".into())
            }
        })
        .collect()
}

pub fn held(bench: &Bench) -> Result<Vec<Answer>> {
    let sizes = bench.sizes;
    let claims = sizes.held_claims + sizes.held_chunk;
    let rows = (claims + claims / 5) as i64;
    let (place, _) = Place::open(bench.cluster, bench.fetched, &PAIR)?;
    place.fill(&PAIR, "q", rows, KEYS)?;
    place.settle()?;
    let mut claimers = [place.claimer(Fair, "q", 1)?, place.claimer(Plain, "q", 1)?];
    let _pinned = Pinned::begin();
    for claimer in &mut claimers {
        pin_session(claimer.client());
        chunk(claimer, sizes.held_chunk.min(100))?;
    }
    let mut old = place.database.connect();
    old.batch_execute(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM harvest_fair.task; SELECT count(*) FROM plain",
    )?;
    let mut tracks = PAIR.map(|contender| Track {
        label: contender.name().to_owned(),
        rounds: Vec::new(),
    });
    let mut spent = [Duration::ZERO; 2];
    let chunks = sizes.held_claims / sizes.held_chunk;
    for _ in 0..chunks {
        for who in 0..2 {
            if who == 1 && spent[1] > sizes.held_patience {
                continue;
            }
            let start = Instant::now();
            let times = chunk(&mut claimers[who], sizes.held_chunk)?;
            spent[who] += start.elapsed();
            tracks[who].rounds.push(times);
        }
    }
    old.batch_execute("COMMIT")?;
    let [fair, plain] = &tracks;
    // One turn may meet a moment in which the machine did something else: five turns at each end.
    let growth = |track: &Track| {
        let turns = (track.rounds.len() / 2).clamp(1, 5);
        let first = &track.rounds[..turns.min(track.rounds.len())];
        let last = &track.rounds[track.rounds.len().saturating_sub(turns)..];
        let middle = |rounds: &[Vec<f64>]| {
            median(&rounds.iter().map(|round| median(round)).collect::<Vec<_>>())
        };
        let slow = |rounds: &[Vec<f64>]| time(quantile(&rounds.concat(), 0.99));
        (
            middle(first),
            middle(last),
            format!("{} -> {}", slow(first), slow(last)),
        )
    };
    let (first, last, p99) = growth(fair);
    let ours = Finding {
        ours: format!("{} -> {}", time(first), time(last)),
        p99,
        ..Finding::number(
            "held snapshot",
            format!(
                "{} claims, the last turns of {} against the first",
                count(fair.calls() as i64),
                sizes.held_chunk
            ),
            last / first,
            times(last / first),
            Target::AtMost(1.3),
            "<= 1.3x",
        )
    };
    let (first, last, p99) = growth(plain);
    let theirs = Finding {
        ours: "-".to_owned(),
        other: format!("{}: {} -> {}", Plain.name(), time(first), time(last)),
        p99,
        ..Finding::number(
            "held snapshot, the rival",
            format!("(a), {} claims", count(plain.calls() as i64)),
            last / first,
            times(last / first),
            Target::Shown,
            "-",
        )
    };
    let line = |track: &Track, colour| {
        let points = track
            .medians()
            .iter()
            .enumerate()
            .map(|(i, median)| ((i + 1) as f64 * sizes.held_chunk as f64, *median))
            .collect();
        Series::new(&track.label, colour, points)
    };
    let picture = Lines {
        title: "One claim while another session holds an old snapshot".to_owned(),
        x: "claims since the snapshot".to_owned(),
        y: "time of a claim".to_owned(),
        x_log: false,
        y_log: true,
        x_text: |value| count(value as i64),
        y_text: time,
        series: vec![line(fair, 0), line(plain, 1)],
    };
    Ok(vec![Answer {
        id: "held-snapshot",
        title: "Claims under a held snapshot",
        method: format!(
            "Claims of 1 in turns of {}, {rows} rows and {KEYS} keys, while a REPEATABLE READ transaction stays open. The first five turns are compared with the last \
             five. The claims of (a) end after {} s of them.",
            sizes.held_chunk,
            sizes.held_patience.as_secs()
        ),
        findings: vec![ours, theirs],
        picture: picture.draw(),
        tracks: tracks.to_vec(),
    }])
}
