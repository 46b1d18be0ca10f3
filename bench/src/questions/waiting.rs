//! Workers that wait: how soon they have a new task, and what they cost while there is none.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::{Database, wait_until};

use super::Bench;
use crate::Result;
use crate::chart::{Lines, Series};
use crate::contenders::PAYLOAD;
use crate::processes::cpu_time;
use crate::race::{Track, micros, quantile};
use crate::report::{Answer, Finding, Target, time};

const PATIENCE: Duration = Duration::from_secs(60);
const WAITING: &str = "SELECT pid FROM pg_stat_activity
    WHERE application_name = 'waiter' AND state = 'active' AND wait_event_type IN ('Extension', 'IPC')";

fn pids(client: &mut postgres::Client) -> Vec<i32> {
    client
        .query(WAITING, &[])
        .map(|rows| rows.iter().map(|row| row.get(0)).collect())
        .unwrap_or_default()
}

fn connect_waiter(database: &Database) -> Result<postgres::Client> {
    let mut client = database.connect();
    client.batch_execute("SET application_name = 'waiter'")?;
    Ok(client)
}

/// From the moment the COMMIT is sent until the worker has the row.
fn wakes(bench: &Bench, database: &Database) -> Result<Track> {
    let mut producer = database.connect();
    let insert = producer.prepare(&format!(
        "INSERT INTO harvest_fair.task (queue, fairness_key, payload) VALUES ('q', 'k', '{PAYLOAD}')"
    ))?;
    let (sender, woken) = mpsc::channel();
    let mut client = connect_waiter(database)?;
    let wakes = bench.sizes.wakes;
    let worker = thread::spawn(move || -> Result<()> {
        let claim =
            client.prepare("SELECT id, payload FROM fair_claim('q'::text, 'w', 1, '60 s')")?;
        for _ in 0..wakes {
            let rows = client.query(&claim, &[])?;
            sender.send((Instant::now(), rows.len()))?;
        }
        Ok(())
    });
    let mut times = Vec::new();
    for _ in 0..wakes {
        wait_until("the worker sleeps", PATIENCE, || {
            pids(&mut producer).len() == 1
        });
        let mut transaction = producer.transaction()?;
        transaction.execute(&insert, &[])?;
        let committing = Instant::now();
        transaction.commit()?;
        let (at, rows) = woken.recv_timeout(PATIENCE)?;
        if rows != 1 {
            return Err("the worker woke up without a task".into());
        }
        times.push(micros(at.saturating_duration_since(committing)));
    }
    worker.join().map_err(|_| "the worker panicked")??;
    Ok(Track {
        label: "harvest_fair: commit to row".to_owned(),
        rounds: vec![times],
    })
}

/// Share of a core that many waiting sessions use together.
fn idle(bench: &Bench, database: &Database) -> Result<f64> {
    let mut watcher = database.connect();
    let sessions: Vec<_> = (0..bench.sizes.waiting)
        .map(|_| {
            let mut client = connect_waiter(database)?;
            // It ends when it is cancelled below.
            Ok(thread::Builder::new()
                .stack_size(256 * 1024)
                .spawn(move || {
                    client
                        .query(
                            "SELECT id FROM fair_claim('nothing'::text, 'w', 1, '10 min')",
                            &[],
                        )
                        .map(|rows| rows.len())
                })?)
        })
        .collect::<Result<_>>()?;
    wait_until("all sessions sleep", PATIENCE, || {
        pids(&mut watcher).len() == bench.sizes.waiting
    });
    let waiting = pids(&mut watcher);
    // Whatever it waits for, Postgres wakes a session once to report its statistics, ten seconds after its statement before.
    thread::sleep(Duration::from_secs(11));
    let before = cpu_time(&waiting)?;
    let start = Instant::now();
    thread::sleep(bench.sizes.idle_time);
    let share = (cpu_time(&waiting)? - before).as_secs_f64() / start.elapsed().as_secs_f64();
    watcher.execute(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'waiter'",
        &[],
    )?;
    for session in sessions {
        if !matches!(session.join(), Ok(Err(_))) {
            return Err("a waiting session was not cancelled".into());
        }
    }
    Ok(share)
}

pub fn waiting(bench: &Bench) -> Result<Vec<Answer>> {
    let database = bench.cluster.database();
    let track = wakes(bench, &database)?;
    let share = idle(bench, &database)?;
    let times = &track.rounds[0];
    let findings = vec![
        Finding {
            p99: time(track.p99()),
            ..Finding::number(
                "idle wait",
                format!("{} enqueues, one worker", times.len()),
                track.median(),
                time(track.median()),
                Target::AtMost(1_000.0),
                "median <= 1 ms",
            )
        },
        Finding::number(
            "idle wait, processor time",
            format!(
                "{} waiting sessions over {} s",
                bench.sizes.waiting,
                bench.sizes.idle_time.as_secs()
            ),
            share,
            format!("{:.3}% of a core", share * 100.0),
            Target::AtMost(0.005),
            "none (<= 0.5%)",
        ),
    ];
    let points = (1..=99)
        .map(|percent| {
            (
                f64::from(percent),
                quantile(times, f64::from(percent) / 100.0),
            )
        })
        .collect();
    let picture = Lines {
        title: "From the commit of an enqueue until a waiting worker has the row".to_owned(),
        x: "percentile".to_owned(),
        y: "time".to_owned(),
        x_log: false,
        y_log: true,
        x_text: |value| format!("{value:.0}"),
        y_text: time,
        series: vec![Series::new("harvest_fair", 0, points)],
    };
    Ok(vec![Answer {
        id: "idle-wait",
        title: "Waiting workers",
        method: "The clock starts when the producer sends its COMMIT, while the worker sleeps in `fair_claim` with `wait`. Processor time is that of \
                 the waiting sessions' own processes."
            .to_owned(),
        findings,
        picture: picture.draw(),
        tracks: vec![track],
    }])
}
