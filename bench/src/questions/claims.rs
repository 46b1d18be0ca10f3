//! What a claim costs next to (a), alone and with its completion.

use std::cell::RefCell;

use postgres::{Client, Statement};

use super::Bench;
use crate::Result;
use crate::chart::{Bar, Bars};
use crate::contenders::Contender::{self, Fair, Plain};
use crate::contenders::RIVALS;
use crate::place::{Claimer, Place};
use crate::processes::pin_session;
use crate::race::{Runner, Track, race};
use crate::report::{Answer, Finding, Target, count, time};

const BATCHES: [usize; 3] = [1, 10, 100];
const KEYS: i64 = 100;
const PAIR: [Contender; 2] = [Fair, Plain];

/// So that a round of large batches is not much longer than one of single claims.
fn calls(bench: &Bench, n: usize) -> usize {
    match n {
        1 => bench.sizes.calls,
        10 => (bench.sizes.calls / 2).max(2),
        _ => (bench.sizes.calls / 8).max(2),
    }
}

/// Up to this size a queue is vacuumed with each supply; larger ones lose too little of it in a run to need it.
const VACUUMED: i64 = 200_000;

/// Adds tasks behind those that are there.
pub struct Supply {
    client: Client,
    contender: Contender,
    queue: String,
    next: i64,
    keys: i64,
    vacuumed: bool,
}

impl Supply {
    pub fn new(place: &Place, contender: Contender, queue: &str, rows: i64, keys: i64) -> Supply {
        Supply {
            client: place.database.connect(),
            contender,
            queue: queue.to_owned(),
            next: rows + 1,
            keys,
            vacuumed: rows <= VACUUMED,
        }
    }

    pub fn add(&mut self, rows: usize) -> Result<()> {
        let rows = rows as i64;
        self.contender
            .load(&mut self.client, &self.queue, self.next, rows, self.keys)?;
        self.next += rows;
        if self.vacuumed {
            self.contender.vacuum(&mut self.client)?;
        }
        Ok(())
    }
}

/// Claims and completes what it has claimed: two calls, two transactions.
struct Worker {
    claimer: Claimer,
    complete: Statement,
    one: bool,
}

impl Worker {
    fn new(place: &Place, contender: Contender, n: usize) -> Result<Worker> {
        let mut claimer = place.claimer(contender, "q", n)?;
        let sql = match (contender, n) {
            (Fair, 1) => "SELECT fair_complete($1::bigint, $2::bigint)",
            (Fair, _) => "SELECT fair_complete($1::bigint[], $2::bigint[])",
            (_, 1) => {
                "UPDATE plain t SET state = 'completed', finished_at = now(), lease_until = NULL
                 WHERE id = $1::bigint AND lease = $2::bigint AND state = 'running' RETURNING true"
            }
            _ => {
                "UPDATE plain t SET state = 'completed', finished_at = now(), lease_until = NULL
                 FROM unnest($1::bigint[], $2::bigint[]) AS done (id, lease)
                 WHERE t.id = done.id AND t.lease = done.lease AND t.state = 'running' RETURNING t.id"
            }
        };
        pin_session(claimer.client());
        // Best for both: planned once.
        claimer
            .client()
            .batch_execute("SET plan_cache_mode = force_generic_plan")?;
        Ok(Worker {
            complete: claimer.client().prepare(sql)?,
            claimer,
            one: n == 1,
        })
    }

    fn work(&mut self) -> Result<usize> {
        let (ids, leases) = self.claimer.claim_leases()?;
        let rows = if self.one {
            let rows = self
                .claimer
                .client()
                .query(&self.complete, &[&ids[0], &leases[0]])?;
            rows.iter().filter(|row| row.get::<_, bool>(0)).count()
        } else {
            self.claimer
                .client()
                .query(&self.complete, &[&ids, &leases])?
                .len()
        };
        Ok(rows)
    }
}

fn compare(
    bench: &Bench,
    place: &Place,
    n: usize,
    mut call: impl FnMut(Contender) -> Result<Box<dyn FnMut() -> Result<usize>>>,
) -> Result<Vec<Track>> {
    let supplies: Vec<RefCell<Supply>> = PAIR
        .iter()
        .map(|contender| RefCell::new(Supply::new(place, *contender, "q", bench.sizes.rows, KEYS)))
        .collect();
    let mut runners = Vec::new();
    for (contender, supply) in PAIR.into_iter().zip(&supplies) {
        let call = call(contender)?;
        runners.push(
            Runner::new(contender.name(), calls(bench, n), n, call)
                .refilled(|rows| supply.borrow_mut().add(rows)),
        );
    }
    race(&mut runners, bench.sizes.rounds)
}

pub fn claims(bench: &Bench) -> Result<Vec<Answer>> {
    Ok(vec![claim(bench)?, complete(bench)?])
}

fn stage<'a>(bench: &'a Bench) -> Result<Place<'a>> {
    let (place, _) = Place::open(bench.cluster, bench.fetched, &PAIR)?;
    place.fill(&PAIR, "q", bench.sizes.rows, KEYS)?;
    place.settle()?;
    Ok(place)
}

fn claim(bench: &Bench) -> Result<Answer> {
    let case = |n: usize| format!("{n} of {} rows, {KEYS} keys", count(bench.sizes.rows));
    let (mut findings, mut groups, mut all) = (Vec::new(), Vec::new(), Vec::new());
    let place = stage(bench)?;
    for n in BATCHES {
        let tracks = compare(bench, &place, n, |contender| {
            let mut claimer = place.claimer(contender, "q", n)?;
            pin_session(claimer.client());
            Ok(Box::new(move || claimer.claim()))
        })?;
        let [fair, plain] = [&tracks[0], &tracks[1]];
        findings.push(Finding::times(
            "claim",
            case(n),
            fair,
            plain,
            Target::AtMost(1.10),
        ));
        if n == 1 {
            let ratio = fair.p99_ratio(plain);
            findings.push(Finding {
                ours: time(fair.p99()),
                other: format!("{}: {}", plain.label, time(plain.p99())),
                p99: "-".to_owned(),
                ..Finding::number(
                    "claim, p99",
                    case(n),
                    ratio,
                    format!("{ratio:.2}x"),
                    Target::AtMost(1.25),
                    "<= 1.25x",
                )
            });
        }
        groups.push((format!("claim of {n}"), bars(&tracks)));
        all.extend(tagged(tracks, &format!("claim of {n}")));
    }

    // For the reader who wonders what the disk adds.
    bench.cluster.append_conf("fsync = on\n");
    bench.cluster.reload();
    let place = stage(bench)?;
    let tracks = compare(bench, &place, 1, |contender| {
        let mut claimer = place.claimer(contender, "q", 1)?;
        pin_session(claimer.client());
        claimer
            .client()
            .batch_execute("SET synchronous_commit = on")?;
        Ok(Box::new(move || claimer.claim()))
    });
    bench.cluster.append_conf("fsync = off\n");
    bench.cluster.reload();
    let tracks = tracks?;
    findings.push(Finding::times(
        "claim",
        format!("{}, fsync and synchronous_commit on", case(1)),
        &tracks[0],
        &tracks[1],
        Target::Shown,
    ));
    groups.push(("claim of 1, written to disk".to_owned(), bars(&tracks)));
    all.extend(tagged(tracks, "claim of 1 to disk"));
    Ok(Answer {
        id: "claim",
        title: "A claim against plain SKIP LOCKED",
        method: "One client each, in turns. What a round has claimed is added before the next, so the backlog stays.".to_owned(),
        findings,
        picture: Bars {
            title: format!("One claim, {} rows, {KEYS} keys", count(bench.sizes.rows)),
            log: false,
            groups,
        }
        .draw(),
        tracks: all,
    })
}

fn complete(bench: &Bench) -> Result<Answer> {
    let place = stage(bench)?;
    let (mut findings, mut groups, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for n in BATCHES {
        let tracks = compare(bench, &place, n, |contender| {
            let mut worker = Worker::new(&place, contender, n)?;
            Ok(Box::new(move || worker.work()))
        })?;
        findings.push(Finding::times(
            "claim + complete",
            format!("{n} of {} rows, {KEYS} keys", count(bench.sizes.rows)),
            &tracks[0],
            &tracks[1],
            Target::AtMost(1.10),
        ));
        groups.push((format!("claim and complete {n}"), bars(&tracks)));
        all.extend(tagged(tracks, &format!("claim and complete {n}")));
    }
    Ok(Answer {
        id: "claim-complete",
        title: "Claim and complete",
        method: "As above, and each call is followed by another that completes what was claimed: `fair_complete` with ids and leases, \
                 and for (a) an UPDATE that checks the lease too."
            .to_owned(),
        findings,
        picture: Bars {
            title: format!("Claim and complete, {} rows, {KEYS} keys", count(bench.sizes.rows)),
            log: false,
            groups,
        }
        .draw(),
        tracks: all,
    })
}

/// A bar for each, in the colour that its contender has everywhere.
pub fn bars(tracks: &[Track]) -> Vec<Bar> {
    tracks
        .iter()
        .enumerate()
        .map(|(place, track)| {
            let colour = RIVALS
                .iter()
                .find(|rival| rival.name() == track.label)
                .map_or(place, |rival| rival.colour());
            Bar::new(&track.label, track.median(), time(track.median()), colour)
        })
        .collect()
}

/// The same tracks under a name that says of which case they are.
pub fn tagged(tracks: Vec<Track>, case: &str) -> impl Iterator<Item = Track> {
    tracks.into_iter().map(move |track| Track {
        label: format!("{}: {case}", track.label),
        ..track
    })
}
