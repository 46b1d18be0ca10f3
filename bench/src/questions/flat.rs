//! Does a claim cost more in a larger queue, or with more keys?

use harvest_fair_server_tests::Shutdown;

use super::Bench;
use super::claims::{Supply, tagged};
use super::restart;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::Contender::{self, Fair, FullScan, PgmqGrouped, Plain};
use crate::place::Place;
use crate::race::{Track, race};
use crate::report::{Answer, Finding, Target, count, time, times};

const KEYS: i64 = 100;
const FLAT: Target = Target::AtMost(1.3);

pub fn flat(bench: &Bench) -> Result<Vec<Answer>> {
    let rows = rows(bench)?;
    let [keys, restart] = keys(bench)?;
    Ok(vec![rows, keys, restart])
}

/// Slowest against fastest, whichever size that is.
fn spread(question: &'static str, of: &str, tracks: &[&Track], target: Target) -> Finding {
    let medians: Vec<f64> = tracks.iter().map(|track| track.median()).collect();
    let slowest = tracks
        .iter()
        .max_by(|a, b| a.median().total_cmp(&b.median()));
    let fastest = tracks
        .iter()
        .min_by(|a, b| a.median().total_cmp(&b.median()));
    let ratio = match (slowest, fastest) {
        (Some(slowest), Some(fastest)) => slowest.ratio(fastest),
        _ => f64::NAN,
    };
    Finding {
        ours: medians
            .iter()
            .map(|median| time(*median))
            .collect::<Vec<_>>()
            .join(", "),
        p99: tracks
            .iter()
            .map(|track| time(track.p99()))
            .collect::<Vec<_>>()
            .join(", "),
        ..Finding::number(
            question,
            of,
            ratio,
            times(ratio),
            target,
            match target {
                Target::Shown => "-",
                _ => "slowest / fastest <= 1.3x",
            },
        )
    }
}

fn sized(numbers: &[i64]) -> String {
    numbers
        .iter()
        .map(|number| count(*number))
        .collect::<Vec<_>>()
        .join(", ")
}

fn rows(bench: &Bench) -> Result<Answer> {
    // A database for each size: so is every index only as deep as its own size makes it.
    let mut stages = Vec::new();
    for rows in bench.sizes.flat_rows {
        let contenders: &[Contender] = if *rows <= bench.sizes.flat_slow_rows {
            &[Fair, Plain, FullScan, PgmqGrouped]
        } else {
            &[Fair, Plain]
        };
        let (place, present) = Place::open(bench.cluster, bench.fetched, contenders)?;
        place.fill(&present, "q", *rows, KEYS)?;
        place.settle()?;
        stages.push((*rows, place, present));
    }
    let (mut quick, mut slow) = (Vec::new(), Vec::new());
    let (mut quick_of, mut slow_of) = (Vec::new(), Vec::new());
    for (rows, place, present) in &stages {
        for contender in present {
            let is_slow = matches!(contender, FullScan | PgmqGrouped);
            let mut supply = Supply::new(place, *contender, "q", *rows, KEYS);
            let runner = place
                .runner(
                    *contender,
                    contender.name(),
                    "q",
                    1,
                    (bench.sizes.calls / 2).max(2),
                )?
                .refilled(move |rows| supply.add(rows));
            if is_slow {
                slow.push(runner);
                slow_of.push((*rows, *contender));
            } else {
                quick.push(runner);
                quick_of.push((*rows, *contender));
            }
        }
    }
    let quick_tracks = race(&mut quick, bench.sizes.rounds)?;
    for runner in &mut slow {
        runner.fit(bench.sizes.slow_round)?;
    }
    let slow_tracks = race(&mut slow, 3)?;
    let measured: Vec<(i64, Contender, &Track)> = quick_of
        .into_iter()
        .zip(&quick_tracks)
        .chain(slow_of.into_iter().zip(&slow_tracks))
        .map(|((rows, contender), track)| (rows, contender, track))
        .collect();

    let of = |contender: Contender| -> Vec<(i64, &Track)> {
        measured
            .iter()
            .filter(|(_, who, _)| *who == contender)
            .map(|(rows, _, track)| (*rows, *track))
            .collect()
    };
    let tracks =
        |contender| -> Vec<&Track> { of(contender).into_iter().map(|(_, track)| track).collect() };
    let case = format!("{} rows, {KEYS} keys", sized(bench.sizes.flat_rows));
    let mut findings = vec![spread("flat in rows", &case, &tracks(Fair), FLAT)];
    for rival in [Plain, FullScan, PgmqGrouped] {
        if !of(rival).is_empty() {
            let of = of(rival);
            let sizes: Vec<i64> = of.iter().map(|(rows, _)| *rows).collect();
            findings.push(spread(
                "flat in rows, the rival",
                &format!("{}: {} rows", rival.name(), sized(&sizes)),
                &tracks(rival),
                Target::Shown,
            ));
        }
    }
    let series = [Fair, Plain, FullScan, PgmqGrouped]
        .into_iter()
        .filter(|contender| !of(*contender).is_empty())
        .map(|contender| {
            let points = of(contender)
                .into_iter()
                .map(|(rows, track)| (rows as f64, track.median()))
                .collect();
            Series::new(contender.name(), contender.colour(), points)
        })
        .collect();
    Ok(Answer {
        id: "flat-rows",
        title: "Flat in rows",
        method: format!(
            "A claim of 1, a database for each size, all in turns. (b) and (c) up to {} rows: beyond, one claim of theirs takes seconds.",
            count(bench.sizes.flat_slow_rows)
        ),
        findings,
        picture: lines(
            "One claim by size of the backlog, 100 keys",
            "pending rows",
            series,
        ),
        tracks: measured
            .iter()
            .map(|(rows, _, track)| Track {
                label: format!("{}: {} rows", track.label, count(*rows)),
                rounds: track.rounds.clone(),
            })
            .collect(),
    })
}

fn lines(title: &str, x: &str, series: Vec<Series>) -> String {
    Lines {
        title: title.to_owned(),
        x: x.to_owned(),
        y: "time of a claim".to_owned(),
        x_log: true,
        y_log: true,
        x_text: |value| count(value.round() as i64),
        y_text: time,
        series,
    }
    .draw()
}

/// Flat in keys; and a restart with the most of them.
fn keys(bench: &Bench) -> Result<[Answer; 2]> {
    let rows = bench.sizes.large;
    let (place, _) = Place::open(bench.cluster, bench.fetched, &[Fair])?;
    let queue = |keys: i64| format!("keys-{keys}");
    for keys in bench.sizes.flat_keys {
        place.fill(&[Fair], &queue(*keys), rows, *keys)?;
    }
    place.settle()?;
    let mut runners = Vec::new();
    for keys in bench.sizes.flat_keys {
        let mut supply = Supply::new(&place, Fair, &queue(*keys), rows, *keys);
        runners.push(
            place
                .runner(
                    Fair,
                    format!("{} keys", count(*keys)),
                    &queue(*keys),
                    1,
                    bench.sizes.calls,
                )?
                .refilled(move |rows| supply.add(rows)),
        );
    }
    let tracks = race(&mut runners, bench.sizes.rounds)?;
    drop(runners);
    let points = bench
        .sizes
        .flat_keys
        .iter()
        .zip(&tracks)
        .map(|(keys, track)| (*keys as f64, track.median()))
        .collect();
    let case = format!(
        "{} keys, {} rows each",
        sized(bench.sizes.flat_keys),
        count(rows)
    );
    let flat = Answer {
        id: "flat-keys",
        title: "Flat in keys",
        method: "A claim of 1. One table, a queue for each number of keys, all in turns."
            .to_owned(),
        findings: vec![spread(
            "flat in keys",
            &case,
            &tracks.iter().collect::<Vec<_>>(),
            FLAT,
        )],
        picture: lines(
            "One claim by number of keys",
            "keys with work",
            vec![Series::new("harvest_fair", 0, points)],
        ),
        tracks: tagged(tracks, "harvest_fair").collect(),
    };
    let most = bench.sizes.flat_keys.last().copied().unwrap_or(KEYS);
    bench.cluster.restart(Shutdown::Fast);
    let restart = restart::restart(bench, &place, &queue(most), most)?;
    Ok([flat, restart])
}
