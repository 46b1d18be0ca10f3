//! The log of jobs, and the scale at which it is replayed.

use std::time::Duration;

use crate::Result;

const NASA: &str = include_str!("../data/nasa-ipsc-1993.txt");

pub const SECONDS_A_DAY: f64 = 86_400.0;
/// From 1 October to 31 December.
const DAYS: usize = 92;

/// The day of the log, counted from 0, that a second of it lies on. Summer time ended in October, so that the last day
/// has an hour more.
pub fn day_of(seconds: f64) -> usize {
    ((seconds / SECONDS_A_DAY) as usize).min(DAYS - 1)
}

/// A user of the log; the fairness key of the user's tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User(pub u16);

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "user {}", self.0)
    }
}

impl User {
    pub fn key(self) -> String {
        format!("user-{}", self.0)
    }
}

/// One line of the log. Times are seconds of the log; `submit` counts from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    pub submit: u32,
    pub run: u32,
    pub user: User,
}

/// The log in the order of submission.
pub fn nasa() -> Result<Vec<Job>> {
    parse(NASA)
}

fn parse(text: &str) -> Result<Vec<Job>> {
    let mut submit = 0;
    let mut jobs = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.starts_with('#') {
            continue;
        }
        let job = parse_line(line, submit)
            .ok_or_else(|| format!("line {} of the log is not a job: '{line}'", number + 1))?;
        submit = job.submit;
        jobs.push(job);
    }
    Ok(jobs)
}

fn parse_line(line: &str, before: u32) -> Option<Job> {
    let mut fields = line.split(' ');
    let job = Job {
        submit: before.checked_add(fields.next()?.parse().ok()?)?,
        run: fields.next()?.parse().ok()?,
        user: User(fields.next()?.parse().ok()?),
    };
    fields.next().is_none().then_some(job)
}

/// How the log's months become a replay's seconds. Submit times and run times have a scale each: the machine of the log
/// was far bigger than our few workers, so how busy they are is chosen, not given.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Seconds of the log that pass in a second of the replay.
    pub speed: f64,
    /// How much longer a run time is, against the submit times, than it was.
    pub stretch: f64,
    /// Run times are cut to this many seconds of the log: one of the longest would block a worker for a week.
    pub longest_run: u32,
}

impl Scale {
    /// The scale at which `jobs` are submitted within `length` and ask `workers` for `load` of their time.
    pub fn fit(
        jobs: &[Job],
        length: Duration,
        workers: usize,
        load: f64,
        longest_run: u32,
    ) -> Scale {
        let span = f64::from(jobs.last().map_or(1, |job| job.submit.max(1)));
        let work: f64 = jobs
            .iter()
            .map(|job| f64::from(job.run.min(longest_run)))
            .sum();
        Scale {
            speed: span / length.as_secs_f64(),
            stretch: load * workers as f64 * span / work.max(1.0),
            longest_run,
        }
    }

    pub fn submit(&self, job: &Job) -> Duration {
        Duration::from_secs_f64(f64::from(job.submit) / self.speed)
    }

    pub fn run(&self, job: &Job) -> Duration {
        let run = f64::from(job.run.min(self.longest_run));
        Duration::from_secs_f64(run * self.stretch / self.speed)
    }

    /// The worker time asked for on each day of the log, as a share of what `workers` have.
    pub fn load_by_day(&self, jobs: &[Job], workers: usize) -> Vec<f64> {
        let mut days = vec![0.0; DAYS];
        for job in jobs {
            let run = f64::from(job.run.min(self.longest_run));
            days[day_of(f64::from(job.submit))] +=
                run * self.stretch / (SECONDS_A_DAY * workers as f64);
        }
        days
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_holds_every_job_and_user_in_order() {
        let jobs = nasa().expect("the log is readable");
        let users: std::collections::HashSet<User> = jobs.iter().map(|job| job.user).collect();
        assert_eq!((jobs.len(), users.len()), (18_239, 69));
        assert!(jobs.is_sorted_by_key(|job| job.submit));
        assert_eq!(
            jobs[1],
            Job {
                submit: 1460,
                run: 3726,
                user: User(1)
            }
        );
    }

    #[test]
    fn a_line_that_is_not_a_job_is_named() {
        let error =
            parse("# seconds run user\n0 5 1\n7 x 2\n").expect_err("line 3 has no run time");
        assert_eq!(error.to_string(), "line 3 of the log is not a job: '7 x 2'");
        assert!(parse("0 5\n").is_err());
        assert!(parse("0 5 1 9\n").is_err());
    }

    #[test]
    fn the_load_of_the_days_adds_up_to_that_of_the_log() {
        let jobs = nasa().expect("the log is readable");
        let scale = Scale::fit(&jobs, Duration::from_secs(35), 8, 0.7, 3_600);
        let span = f64::from(jobs[jobs.len() - 1].submit) / SECONDS_A_DAY;
        let load = scale.load_by_day(&jobs, 8).iter().sum::<f64>() / span;
        assert!((load - 0.7).abs() < 1e-9, "{load}");
    }

    #[test]
    fn the_scale_fits_length_and_load() {
        let jobs = parse("0 100 1\n500 900 2\n500 100 1\n").expect("three jobs");
        let length = Duration::from_secs(10);
        let scale = Scale::fit(&jobs, length, 2, 0.5, 300);
        assert_eq!(scale.submit(&jobs[2]), length);
        let asked: f64 = jobs.iter().map(|job| scale.run(job).as_secs_f64()).sum();
        assert!((asked - 0.5 * 2.0 * 10.0).abs() < 1e-6, "{asked}");
        assert_eq!(
            scale.run(&jobs[1]),
            scale.run(&Job {
                run: 300,
                ..jobs[0]
            })
        );
    }
}
