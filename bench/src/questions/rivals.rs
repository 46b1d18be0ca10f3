//! Next to all rivals, and next to the fair ones at the sizes that they find hard.

use super::Bench;
use super::claims::{Supply, bars, tagged};
use crate::Result;
use crate::chart::Bars;
use crate::contenders::Contender::{self, Fair, FullScan, PgmqGrouped, Stamped};
use crate::contenders::RIVALS;
use crate::place::Place;
use crate::race::{Track, race};
use crate::report::{Answer, Finding, Target, count};

const KEYS: i64 = 100;

struct Case {
    n: usize,
    rows: i64,
    keys: i64,
}

/// Claims by those who are there, in turns. The slow ones make fewer calls in a round.
fn measure(bench: &Bench, contenders: &[Contender], case: &Case) -> Result<Vec<Track>> {
    let (place, present) = Place::open(bench.cluster, bench.fetched, contenders)?;
    place.fill(&present, "q", case.rows, case.keys)?;
    place.settle()?;
    claims_of(bench, &place, &present, case)
}

fn claims_of(
    bench: &Bench,
    place: &Place,
    present: &[Contender],
    case: &Case,
) -> Result<Vec<Track>> {
    let calls = (bench.sizes.calls / if case.n == 1 { 2 } else { 10 }).max(2);
    let mut runners = Vec::new();
    for contender in present.iter().filter(|c| c.max_batch() >= case.n) {
        let mut supply = Supply::new(place, *contender, "q", case.rows, case.keys);
        let mut runner = place
            .runner(*contender, contender.name(), "q", case.n, calls)?
            .refilled(move |rows| supply.add(rows));
        runner.fit(bench.sizes.slow_round)?;
        runners.push(runner);
    }
    race(&mut runners, (bench.sizes.rounds / 2).max(2))
}

/// Everybody, claiming 1, 10 and 100.
pub fn all(bench: &Bench) -> Result<Vec<Answer>> {
    let contenders: Vec<Contender> = std::iter::once(Fair).chain(RIVALS).collect();
    let rows = bench.sizes.rows;
    let (place, present) = Place::open(bench.cluster, bench.fetched, &contenders)?;
    place.fill(&present, "q", rows, KEYS)?;
    place.settle()?;
    let (mut findings, mut groups, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    for n in [1, 10, 100] {
        let case = Case {
            n,
            rows,
            keys: KEYS,
        };
        let tracks = claims_of(bench, &place, &present, &case)?;
        for other in &tracks[1..] {
            findings.push(Finding::times(
                "claim, all rivals",
                format!("{n} of {} rows, {KEYS} keys", count(rows)),
                &tracks[0],
                other,
                Target::Shown,
            ));
        }
        groups.push((format!("claim of {n}"), bars(&tracks)));
        raw.extend(tagged(tracks, &format!("claim of {n}")));
    }
    Ok(vec![Answer {
        id: "rivals",
        title: "A claim against each rival",
        method: "One client each, in turns; those that need more than a round's time make fewer calls. Tables of (a), (b), (f) and (g) have \
                 the columns of ours; (c), (d) and (e) have their own. (b) and (d) claim one task a call. What `pgmq.read_grouped_rr` has read \
                 is deleted, outside the measured time, since it serves no group whose first message is out."
            .to_owned(),
        findings,
        picture: Bars {
            title: format!("One claim, {} rows, {KEYS} keys", count(rows)),
            log: true,
            groups,
        }
        .draw(),
        tracks: raw,
    }])
}

/// One rival at several sizes.
fn against(
    bench: &Bench,
    rival: Contender,
    cases: &[Case],
    finding: impl Fn(&Case, &Track, &Track) -> Finding,
    answer: Answer,
) -> Result<Vec<Answer>> {
    let (mut findings, mut groups, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    if bench.fetched.has(rival) {
        for case in cases {
            let tracks = measure(bench, &[Fair, rival], case)?;
            findings.push(finding(case, &tracks[0], &tracks[1]));
            let heading = format!("{} rows, {} keys", count(case.rows), count(case.keys));
            groups.push((heading.clone(), bars(&tracks)));
            raw.extend(tagged(tracks, &heading));
        }
    }
    let picture = Bars {
        title: format!("One claim: harvest_fair and {}", rival.name()),
        log: true,
        groups,
    };
    Ok(vec![Answer {
        findings,
        picture: picture.draw(),
        tracks: raw,
        ..answer
    }])
}

fn blank(id: &'static str, title: &'static str, method: &str) -> Answer {
    Answer {
        id,
        title,
        method: method.to_owned(),
        findings: Vec::new(),
        picture: String::new(),
        tracks: Vec::new(),
    }
}

fn case_text(case: &Case) -> String {
    format!(
        "{} of {} rows, {} keys",
        case.n,
        count(case.rows),
        count(case.keys)
    )
}

pub fn full_scan(bench: &Bench) -> Result<Vec<Answer>> {
    let case = Case {
        n: 1,
        rows: bench.sizes.rows,
        keys: bench.sizes.full_scan_keys,
    };
    against(
        bench,
        FullScan,
        &[case],
        |case, fair, other| Finding::faster("against (b)", case_text(case), fair, other, 300.0),
        blank(
            "full-scan",
            "Against our rules in SQL",
            "One queue. (b) reads `fair_lag` and charges with `fair_charge`, which cost it microseconds: the rest is the sort.",
        ),
    )
}

pub fn grouped(bench: &Bench) -> Result<Vec<Answer>> {
    let cases: Vec<Case> = bench
        .sizes
        .groups
        .iter()
        .map(|groups| Case {
            n: 1,
            rows: bench.sizes.rows,
            keys: *groups,
        })
        .collect();
    against(
        bench,
        PgmqGrouped,
        &cases,
        |case, fair, other| {
            Finding::faster("against (c) grouped", case_text(case), fair, other, 300.0)
        },
        blank(
            "grouped",
            "Against pgmq's grouped read",
            "A group is a key. What was read is deleted outside the measured time.",
        ),
    )
}

pub fn stamped(bench: &Bench) -> Result<Vec<Answer>> {
    let cases: Vec<Case> = bench
        .sizes
        .stamped_rows
        .iter()
        .map(|rows| Case {
            n: 1,
            rows: *rows,
            keys: KEYS,
        })
        .collect();
    against(
        bench,
        Stamped,
        &cases,
        |case, fair, other| {
            Finding::times(
                "against (f)",
                case_text(case),
                fair,
                other,
                Target::AtMost(1.2),
            )
        },
        blank(
            "stamped",
            "Against a stamp given at enqueue",
            "The claim alone: the stamps are part of the data, and what it costs to count them at enqueue is not measured.",
        ),
    )
}
