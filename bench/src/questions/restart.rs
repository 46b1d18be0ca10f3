//! How long the first claim takes after the server has restarted, and what a key takes of memory.

use std::time::{Duration, Instant};

use harvest_fair_server_tests::Shutdown;

use super::Bench;
use crate::Result;
use crate::chart::{Bar, Bars};
use crate::contenders::Contender::Fair;
use crate::place::Place;
use crate::race::{Track, micros};
use crate::report::{Answer, Finding, Target, count, time};

/// From the moment the server takes connections: connect, claim, have the row.
fn first_claim(bench: &Bench, place: &Place, queue: &str, how: Shutdown) -> Result<Duration> {
    bench.cluster.restart(how);
    let start = Instant::now();
    let rows = place.database.connect().query(&Fair.claim(queue, 1), &[])?;
    let taken = start.elapsed();
    if rows.len() == 1 {
        Ok(taken)
    } else {
        Err(format!("{} tasks after a restart", rows.len()).into())
    }
}

/// `queue` holds `sizes.large` rows of `keys` keys.
pub fn restart(bench: &Bench, place: &Place, queue: &str, keys: i64) -> Result<Answer> {
    let case = format!("{} rows, {} keys", count(bench.sizes.large), count(keys));
    let (mut findings, mut bars, mut tracks) = (Vec::new(), Vec::new(), Vec::new());
    for (name, how) in [
        ("stopped", Shutdown::Fast),
        ("crashed", Shutdown::Immediate),
    ] {
        let mut times = Vec::new();
        for _ in 0..bench.sizes.restarts {
            times.push(micros(first_claim(bench, place, queue, how)?));
        }
        let track = Track {
            label: format!("after the server has {name}"),
            rounds: vec![times],
        };
        let median = track.median();
        findings.push(Finding {
            p99: format!("slowest {}", time(track.p99())),
            ..Finding::number(
                "first claim after a restart",
                format!("{case}, server {name}"),
                median,
                time(median),
                Target::AtMost(1e6),
                "<= 1 s",
            )
        });
        bars.push(Bar::new(&track.label, median, time(median), 0));
        tracks.push(track);
    }
    let row = place.database.connect().query_one(
        "SELECT max(bytes_per_key)::float8,
             (SELECT sum(allocated_size)::float8 FROM pg_shmem_allocations WHERE name LIKE 'harvest_fair%'),
             max(max_keys)::bigint, current_setting('harvest_fair.max_queues')::bigint
         FROM harvest_fair.stats",
        &[],
    )?;
    let (bytes, all): (f64, f64) = (row.get(0), row.get(1));
    findings.push(Finding {
        ours: format!("{bytes:.0} bytes"),
        ..Finding::number(
            "memory per key",
            "an entry of the board, as harvest_fair.stats says",
            bytes,
            format!(
                "{bytes:.0} bytes; {:.1} MB in all, for {} keys and {} queues",
                all / 1024.0 / 1024.0,
                count(row.get(2)),
                count(row.get(3))
            ),
            Target::AtMost(512.0),
            "<= 512 bytes",
        )
    });
    Ok(Answer {
        id: "restart",
        title: "First claim after a restart",
        method: format!(
            "From when the server takes connections again until a new session has its task, {} times each. The first claim reads the \
             queue's keys into memory.",
            bench.sizes.restarts
        ),
        findings,
        picture: Bars {
            title: format!("First claim after a restart, {case}"),
            log: false,
            groups: vec![(String::new(), bars)],
        }
        .draw(),
        tracks,
    })
}
