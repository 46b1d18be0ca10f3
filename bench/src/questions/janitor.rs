//! A steady load for minutes: what the janitor takes, and whether table and indexes stop growing.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::Database;

use super::Bench;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::PAYLOAD;
use crate::processes::cpu_time;
use crate::report::{Answer, Finding, Target};

/// Tasks of one call, and threads for producing and for working.
const BATCH: i64 = 10;
const THREADS: i64 = 2;
const MEGABYTE: f64 = 1024.0 * 1024.0;

/// Calls `work` at a steady rate until told to stop; behind schedule, it does not rest.
fn steadily(
    stop: &AtomicBool,
    every: Duration,
    mut work: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        work()?;
        next += every;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

fn produce(
    bench: &Bench,
    database: &Database,
    stop: &AtomicBool,
    every: Duration,
    seed: i64,
) -> Result<()> {
    let mut client = database.connect();
    let insert = client.prepare(&format!(
        "INSERT INTO harvest_fair.task (queue, fairness_key, payload)
         SELECT 'q', 'k' || ($1::bigint + i) % {}, '{PAYLOAD}' FROM generate_series(1, {BATCH}) i",
        bench.sizes.janitor_keys
    ))?;
    let mut next = seed * bench.sizes.janitor_keys / THREADS;
    steadily(stop, every, || {
        next += BATCH;
        client.execute(&insert, &[&next])?;
        Ok(())
    })
}

fn work(database: &Database, stop: &AtomicBool, every: Duration, done: &AtomicUsize) -> Result<()> {
    let mut client = database.connect();
    let claim = client.prepare(&format!(
        "SELECT id, lease, payload FROM fair_claim('q'::text, 'w', {BATCH})"
    ))?;
    let complete = client.prepare("SELECT fair_complete($1::bigint[], $2::bigint[])")?;
    steadily(stop, every, || {
        let rows = client.query(&claim, &[])?;
        let (ids, leases): (Vec<i64>, Vec<i64>) = rows
            .iter()
            .map(|row| (row.get::<_, i64>(0), row.get::<_, i64>(1)))
            .unzip();
        if !ids.is_empty() {
            done.fetch_add(
                client.query(&complete, &[&ids, &leases])?.len(),
                Ordering::Relaxed,
            );
        }
        Ok(())
    })
}

struct Sample {
    second: f64,
    table: f64,
    indexes: f64,
}

pub fn janitor(bench: &Bench) -> Result<Vec<Answer>> {
    let sizes = bench.sizes;
    let length = sizes.janitor_time;
    // A twentieth of the run, so that what is deleted is reused many times over.
    let retention = (length.as_secs() / 20).max(1);
    bench.cluster.append_conf(&format!(
        "autovacuum = on\nautovacuum_naptime = '1 s'\nharvest_fair.retention = '{retention} s'\n"
    ));
    bench.cluster.reload();
    let database = bench.cluster.database();
    let mut watcher = database.connect();
    watcher.execute("SELECT count(*) FROM fair_claim('q'::text, 'w')", &[])?;
    harvest_fair_server_tests::wait_until("the janitor is there", Duration::from_secs(20), || {
        janitor_pid(&mut watcher).is_some()
    });
    let pid = janitor_pid(&mut watcher).ok_or("no janitor")?;

    let every = Duration::from_secs_f64((BATCH * THREADS) as f64 / sizes.janitor_rate as f64);
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let start = Instant::now();
    let before = cpu_time(&[pid])?;
    let mut samples = Vec::new();
    let crew: Vec<Result<()>> = thread::scope(|scope| {
        let (stop, done, database) = (&stop, &done, &database);
        let crew: Vec<_> = (0..THREADS)
            .flat_map(|n| {
                [
                    scope.spawn(move || produce(bench, database, stop, every, n)),
                    scope.spawn(move || work(database, stop, every, done)),
                ]
            })
            .collect();
        while start.elapsed() < length {
            thread::sleep(length / 100);
            match sample(&mut watcher, start) {
                Ok(sample) => samples.push(sample),
                Err(_) => break,
            }
        }
        stop.store(true, Ordering::Relaxed);
        crew.into_iter()
            .map(|one| {
                one.join()
                    .unwrap_or_else(|_| Err("a client panicked".into()))
            })
            .collect()
    });
    let elapsed = start.elapsed().as_secs_f64();
    let share = (cpu_time(&[pid])? - before).as_secs_f64() / elapsed;
    crew.into_iter().collect::<Result<()>>()?;
    bench.cluster.append_conf("autovacuum = off\n");
    bench.cluster.reload();

    let rate = done.load(Ordering::Relaxed) as f64 / elapsed;
    let half: Vec<&Sample> = samples
        .iter()
        .filter(|s| s.second > elapsed / 2.0)
        .collect();
    let growth = |size: fn(&Sample) -> f64| match (half.first(), half.last()) {
        (Some(first), Some(last)) => size(last) / size(first),
        _ => f64::NAN,
    };
    let case = format!(
        "{rate:.0} claims/s for {elapsed:.0} s, {} keys",
        sizes.janitor_keys
    );
    let mut findings = vec![Finding::number(
        "janitor",
        &case,
        share,
        format!("{:.2}% of a core", share * 100.0),
        Target::AtMost(0.02),
        "<= 2% of a core",
    )];
    for (name, size) in [
        ("table", (|s| s.table) as fn(&Sample) -> f64),
        ("indexes", |s| s.indexes),
    ] {
        let growth = growth(size);
        findings.push(Finding {
            ours: samples
                .last()
                .map_or_else(String::new, |last| format!("{:.0} MB", size(last))),
            ..Finding::number(
                "sizes level off",
                format!("{name}: end against half time, tasks kept {retention} s"),
                growth,
                format!("{growth:.2}x"),
                Target::AtMost(1.1),
                "<= 1.1x",
            )
        });
    }
    let points = |size: fn(&Sample) -> f64| samples.iter().map(|s| (s.second, size(s))).collect();
    let picture = Lines {
        title: format!("Sizes under a steady load ({case})"),
        x: "seconds".to_owned(),
        y: "MB".to_owned(),
        x_log: false,
        y_log: false,
        x_text: |value| format!("{value:.0}"),
        y_text: |value| {
            if value.fract() == 0.0 {
                format!("{value:.0}")
            } else {
                format!("{value:.1}")
            }
        },
        series: vec![
            Series::new("table", 0, points(|s| s.table)),
            Series::new("indexes", 1, points(|s| s.indexes)),
        ],
    };
    Ok(vec![Answer {
        id: "janitor",
        title: "A steady load",
        method: format!(
            "{THREADS} producers and {THREADS} workers, {BATCH} tasks a call, each task enqueued, claimed and completed; autovacuum is on, finished tasks are \
             kept for {retention} s. The janitor's time is that of its own process."
        ),
        findings,
        picture: picture.draw(),
        tracks: Vec::new(),
    }])
}

fn janitor_pid(client: &mut postgres::Client) -> Option<i32> {
    client
        .query_opt(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'harvest_fair janitor' AND datname = current_database()",
            &[],
        )
        .ok()?
        .map(|row| row.get(0))
}

fn sample(client: &mut postgres::Client, start: Instant) -> Result<Sample> {
    let row = client.query_one(
        "SELECT pg_table_size('harvest_fair.task')::float8, pg_indexes_size('harvest_fair.task')::float8",
        &[],
    )?;
    Ok(Sample {
        second: start.elapsed().as_secs_f64(),
        table: row.get::<_, f64>(0) / MEGABYTE,
        indexes: row.get::<_, f64>(1) / MEGABYTE,
    })
}
