//! One replay of the log against a real server: a producer that submits at the scaled times, and workers that claim, sleep for
//! the scaled run time and complete.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvest_fair_server_tests::Database;
use postgres::{Client, NoTls};

use crate::Result;
use crate::log::{Job, Scale};
use crate::measure::Served;
use crate::progress::Progress;

/// How long the workers may take for what is left when the last job has been submitted.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the producer looks whether it has to stop, when nothing is to be submitted.
const GLANCE: Duration = Duration::from_millis(200);

const ENQUEUE: &str = "INSERT INTO harvest_fair.task (queue, fairness_key, payload)
    SELECT 'nasa', key, jsonb_build_object('job', job)
    FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS due (key, job, place) ORDER BY place";
const CLAIM: &str =
    "SELECT id, lease, (payload->>'job')::int4 FROM fair_claim('nasa', $1, 1, wait => '1 s')";
const COMPLETE: &str = "SELECT fair_complete($1::bigint, $2::bigint)";

/// What one replay showed.
pub struct Replay {
    pub served: Vec<Served>,
    /// How far the producer was behind the log at worst.
    pub producer_late: Duration,
    /// What a task that was waiting cost a worker beyond its run time, on average: claim, completion, and whatever else
    /// kept the machine. The two replays can be compared only where it is about the same.
    pub overhead: Duration,
}

/// What the threads of a replay share.
struct Shared<'a> {
    jobs: &'a [Job],
    scale: &'a Scale,
    began: Instant,
    /// For each job when it was submitted and started, in microseconds since the replay began.
    submits: Vec<AtomicU64>,
    starts: Vec<AtomicU64>,
    submitted: AtomicUsize,
    claimed: AtomicUsize,
    completed: AtomicUsize,
    failed: AtomicBool,
    /// Tasks whose worker found them waiting, and the microseconds they took beyond their run times.
    found_waiting: AtomicU64,
    beyond_run: AtomicU64,
}

impl Shared<'_> {
    fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn is_over(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
            || self.claimed.load(Ordering::Relaxed) >= self.jobs.len()
    }

    fn waiting(&self) -> usize {
        let submitted = self.submitted.load(Ordering::Relaxed);
        submitted.saturating_sub(self.claimed.load(Ordering::Relaxed))
    }

    /// A part of the replay that fails ends the others too.
    fn noting_failure<T>(&self, part: impl FnOnce() -> Result<T>) -> Result<T> {
        part().inspect_err(|_| self.failed.store(true, Ordering::Relaxed))
    }
}

/// Replays `jobs` in a fresh database with this many workers.
pub fn replay(
    database: &Database,
    jobs: &[Job],
    scale: &Scale,
    workers: usize,
    fairness: bool,
) -> Result<Replay> {
    let producer = connect(database, "producer")?;
    let mut clients = Vec::new();
    for number in 1..=workers {
        let name = format!("worker-{number}");
        let mut client = connect(database, &name)?;
        client.batch_execute(&format!("SET harvest_fair.fairness = {}", on_off(fairness)))?;
        clients.push((name, client));
    }

    let shared = Shared {
        jobs,
        scale,
        began: Instant::now(),
        submits: jobs.iter().map(|_| AtomicU64::new(0)).collect(),
        starts: jobs.iter().map(|_| AtomicU64::new(0)).collect(),
        submitted: AtomicUsize::new(0),
        claimed: AtomicUsize::new(0),
        completed: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        found_waiting: AtomicU64::new(0),
        beyond_run: AtomicU64::new(0),
    };
    let shared = &shared;
    let producer_late = thread::scope(|scope| {
        let producer = scope.spawn(move || shared.noting_failure(|| produce(producer, shared)));
        let workers: Vec<_> = clients
            .into_iter()
            .map(|(name, client)| {
                scope.spawn(move || shared.noting_failure(|| work(client, &name, shared)))
            })
            .collect();
        let watched = shared.noting_failure(|| watch(shared, fairness));
        let mut ended: Vec<Result<()>> = workers.into_iter().map(join).collect();
        let late = join(producer);
        ended.push(watched);
        ended.into_iter().collect::<Result<()>>().and(late)
    })?;

    let load = |times: &[AtomicU64], job: usize| times[job].load(Ordering::Relaxed);
    let served = jobs.iter().enumerate().map(|(number, job)| Served {
        user: job.user,
        submit: load(&shared.submits, number),
        start: load(&shared.starts, number),
    });
    Ok(Replay {
        served: served.collect(),
        producer_late,
        overhead: Duration::from_micros(
            shared.beyond_run.load(Ordering::Relaxed)
                / shared.found_waiting.load(Ordering::Relaxed).max(1),
        ),
    })
}

pub fn on_off(fairness: bool) -> &'static str {
    if fairness { "on" } else { "off" }
}

fn connect(database: &Database, name: &str) -> Result<Client> {
    let mut config = database.cluster().config(database.name());
    let mut client = config.application_name(name).connect(NoTls)?;
    // The order of claims is on show here, not the speed of this machine's disk.
    client.batch_execute("SET synchronous_commit = off")?;
    Ok(client)
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .unwrap_or_else(|_| Err("a thread of the replay panicked".into()))
}

/// Submits every job when its time has come; all that are due by then in one statement. Returns how late the latest was.
fn produce(mut client: Client, shared: &Shared) -> Result<Duration> {
    let enqueue = client.prepare(ENQUEUE)?;
    let mut latest = Duration::ZERO;
    let mut next = 0;
    while let Some(job) = shared.jobs.get(next) {
        if shared.failed.load(Ordering::Relaxed) {
            break;
        }
        let now = shared.began.elapsed();
        let due = shared.scale.submit(job);
        if due > now {
            thread::sleep((due - now).min(GLANCE));
            continue;
        }
        latest = latest.max(now - due);
        let batch = shared.jobs[next..]
            .iter()
            .take_while(|job| shared.scale.submit(job) <= now)
            .count();
        let keys: Vec<String> = shared.jobs[next..next + batch]
            .iter()
            .map(|job| job.user.key())
            .collect();
        let numbers: Vec<i32> = (next..next + batch).map(|number| number as i32).collect();
        for number in next..next + batch {
            shared.submits[number].store(shared.now(), Ordering::Relaxed);
        }
        client.execute(&enqueue, &[&keys, &numbers])?;
        next += batch;
        shared.submitted.store(next, Ordering::Relaxed);
    }
    Ok(latest)
}

fn work(mut client: Client, name: &str, shared: &Shared) -> Result<()> {
    let claim = client.prepare(CLAIM)?;
    let complete = client.prepare(COMPLETE)?;
    while !shared.is_over() {
        let turn = Instant::now();
        let found_waiting = shared.waiting() > 0;
        for task in client.query(&claim, &[&name])? {
            let (id, lease, number): (i64, i64, i32) =
                (task.try_get(0)?, task.try_get(1)?, task.try_get(2)?);
            let number = number as usize;
            let (Some(job), Some(start)) = (shared.jobs.get(number), shared.starts.get(number))
            else {
                return Err(format!("{name} claimed a task of no job of the log: {number}").into());
            };
            if start.swap(shared.now().max(1), Ordering::Relaxed) != 0 {
                return Err(format!("job {number} was claimed a second time, by {name}").into());
            }
            shared.claimed.fetch_add(1, Ordering::Relaxed);
            let run = shared.scale.run(job);
            thread::sleep(run);
            let completed: bool = client.query_one(&complete, &[&id, &lease])?.try_get(0)?;
            if !completed {
                return Err(format!("{name} lost the lease of task {id}").into());
            }
            shared.completed.fetch_add(1, Ordering::Relaxed);
            if found_waiting {
                let beyond = turn.elapsed().saturating_sub(run).as_micros() as u64;
                shared.beyond_run.fetch_add(beyond, Ordering::Relaxed);
                shared.found_waiting.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

/// Shows how far the replay is until all is completed, or a part of it has failed.
fn watch(shared: &Shared, fairness: bool) -> Result<()> {
    let title = format!("fairness {:<3}", on_off(fairness));
    let mut progress = Progress::new(title, shared.jobs.len());
    let last = shared.jobs.last();
    let submitted_by = last.map_or(Duration::ZERO, |job| shared.scale.submit(job));
    loop {
        let elapsed = shared.began.elapsed();
        let (claimed, waiting) = (shared.claimed.load(Ordering::Relaxed), shared.waiting());
        let in_the_log = elapsed.min(submitted_by).as_secs_f64() * shared.scale.speed;
        progress.show(in_the_log, claimed, waiting);
        if shared.completed.load(Ordering::Relaxed) == shared.jobs.len() {
            progress.finish(elapsed);
            return Ok(());
        }
        if shared.failed.load(Ordering::Relaxed) {
            progress.give_up();
            return Ok(());
        }
        if elapsed > submitted_by + DRAIN_TIMEOUT {
            progress.give_up();
            return Err(format!(
                "{waiting} tasks still wait {} s after the last was submitted",
                DRAIN_TIMEOUT.as_secs()
            )
            .into());
        }
        thread::sleep(progress.interval());
    }
}
