//! Taking turns: whoever is compared is measured in the same rounds, so that what disturbs one disturbs the other.

use std::time::{Duration, Instant};

use crate::Result;
use crate::processes::Pinned;

/// One of those who take turns.
pub struct Runner<'a> {
    label: String,
    /// Calls in a round.
    calls: usize,
    /// Rows that each call must deliver.
    rows: usize,
    call: Box<dyn FnMut() -> Result<usize> + 'a>,
    /// Done after each call, and not measured.
    after: Option<Box<dyn FnMut() -> Result<()> + 'a>>,
    /// Done before each round, and not measured.
    refill: Option<Box<dyn FnMut(usize) -> Result<()> + 'a>>,
}

impl<'a> Runner<'a> {
    pub fn new(
        label: impl Into<String>,
        calls: usize,
        rows: usize,
        call: impl FnMut() -> Result<usize> + 'a,
    ) -> Runner<'a> {
        Runner {
            label: label.into(),
            calls,
            rows,
            call: Box::new(call),
            after: None,
            refill: None,
        }
    }

    pub fn cleaned(mut self, after: impl FnMut() -> Result<()> + 'a) -> Runner<'a> {
        self.after = Some(Box::new(after));
        self
    }

    /// Puts back as many rows as a round takes.
    pub fn refilled(mut self, refill: impl FnMut(usize) -> Result<()> + 'a) -> Runner<'a> {
        self.refill = Some(Box::new(refill));
        self
    }

    /// Calls once; the time in microseconds.
    fn once(&mut self) -> Result<f64> {
        let start = Instant::now();
        let rows = (self.call)()?;
        let taken = start.elapsed();
        if rows != self.rows {
            return Err(format!(
                "{}: a call delivered {rows} rows instead of {}",
                self.label, self.rows
            )
            .into());
        }
        if let Some(after) = &mut self.after {
            after()?;
        }
        Ok(micros(taken))
    }

    fn refill(&mut self, calls: usize) -> Result<()> {
        match &mut self.refill {
            Some(refill) => refill(calls * self.rows),
            None => Ok(()),
        }
    }

    /// Fits the calls of a round to a time, so that a slow runner does not hold up the others.
    pub fn fit(&mut self, round: Duration) -> Result<()> {
        self.refill(2)?;
        // The first plans and fills caches.
        self.once()?;
        self.calls = ((micros(round) / self.once()?) as usize).clamp(1, self.calls);
        Ok(())
    }
}

/// The times of one runner, in microseconds, by round.
#[derive(Clone, Debug, Default)]
pub struct Track {
    pub label: String,
    pub rounds: Vec<Vec<f64>>,
}

impl Track {
    pub fn medians(&self) -> Vec<f64> {
        self.rounds.iter().map(|round| median(round)).collect()
    }

    /// The median of the medians of the rounds.
    pub fn median(&self) -> f64 {
        median(&self.medians())
    }

    /// Over all rounds together.
    pub fn p99(&self) -> f64 {
        quantile(&self.rounds.concat(), 0.99)
    }

    pub fn calls(&self) -> usize {
        self.rounds.iter().map(Vec::len).sum()
    }

    /// How many times as long as the other: the median over the rounds, each compared with its own.
    pub fn ratio(&self, other: &Track) -> f64 {
        let ratios: Vec<f64> = self
            .medians()
            .iter()
            .zip(other.medians())
            .map(|(one, other)| one / other)
            .collect();
        median(&ratios)
    }

    /// The same for the 99th percentile, in stretches of rounds: one round is too short to have one.
    pub fn p99_ratio(&self, other: &Track) -> f64 {
        let stretch = self.rounds.len().div_ceil(5).max(1);
        let of = |track: &Track| -> Vec<f64> {
            track
                .rounds
                .chunks(stretch)
                .map(|rounds| quantile(&rounds.concat(), 0.99))
                .collect()
        };
        let ratios: Vec<f64> = of(self)
            .iter()
            .zip(of(other))
            .map(|(one, other)| one / other)
            .collect();
        median(&ratios)
    }
}

/// Rounds in which each runner has its turn; who begins changes with each.
pub fn race(runners: &mut [Runner], rounds: usize) -> Result<Vec<Track>> {
    let _pinned = Pinned::begin();
    let mut tracks: Vec<Track> = runners
        .iter()
        .map(|runner| Track {
            label: runner.label.clone(),
            rounds: Vec::with_capacity(rounds),
        })
        .collect();
    // The first calls of a session plan statements and fill caches.
    for runner in runners.iter_mut() {
        let calls = runner.calls.min(30);
        if calls == 1 {
            continue;
        }
        runner.refill(calls)?;
        for _ in 0..calls {
            runner.once()?;
        }
    }
    let count = runners.len();
    for round in 0..rounds {
        for turn in 0..count {
            let runner = &mut runners[(round + turn) % count];
            runner.refill(runner.calls)?;
            let times = (0..runner.calls)
                .map(|_| runner.once())
                .collect::<Result<_>>()?;
            tracks[(round + turn) % count].rounds.push(times);
        }
    }
    Ok(tracks)
}

pub fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The smallest value that at least this share of the values does not exceed; NaN of none.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn a_quantile_is_a_value_of_the_nearest_rank() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(median(&values), 50.0);
        assert_eq!(quantile(&values, 0.99), 99.0);
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn runners_take_turns_and_each_begins_in_its_turn() {
        let order = RefCell::new(String::new());
        let runner = |name: char| {
            let order = &order;
            Runner::new(name, 1, 1, move || {
                order.borrow_mut().push(name);
                Ok(1)
            })
        };
        let tracks = race(&mut [runner('a'), runner('b')], 3).expect("nothing fails");
        // Whoever makes one call a round is not warmed up.
        assert_eq!(*order.borrow(), "abbaab");
        assert_eq!(tracks.iter().map(Track::calls).collect::<Vec<_>>(), [3, 3]);
    }

    #[test]
    fn a_call_that_delivers_too_little_is_an_error() {
        let mut short = [Runner::new("short", 1, 2, || Ok(1))];
        let error = race(&mut short, 1).expect_err("one row is missing");
        assert!(error.to_string().contains("1 rows instead of 2"), "{error}");
    }

    #[test]
    fn rounds_are_compared_each_with_its_own() {
        let track = |rounds: &[f64]| Track {
            label: String::new(),
            rounds: rounds.iter().map(|time| vec![*time]).collect(),
        };
        // The machine was ten times as slow in the second round.
        assert_eq!(
            track(&[2.0, 20.0, 2.0]).ratio(&track(&[1.0, 10.0, 1.0])),
            2.0
        );
    }
}
