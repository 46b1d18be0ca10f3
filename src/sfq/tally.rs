//! What has happened to one key: counts, served cost, and how long its tasks waited. No clock: times are given.

use super::records::WAIT_BUCKETS;

const MINUTE: i64 = 60_000_000;
/// Where the second bucket of the waits begins, in microseconds; each further one begins at twice that of the one before.
const FIRST_BOUND: i64 = 1_000;

/// How an attempt came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    /// Failed for good, or was put back with the attempt counted: a failure or a lease that ran out.
    Failed,
}

/// Everything is counted from when the key came onto the board.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    pub claims: u64,
    pub completions: u64,
    /// The cost charged for what was claimed, corrections and refunds included.
    pub served: f64,
    pub failures: u32,
    /// The number of the minute in which `this_minute` was served.
    minute: u32,
    this_minute: f32,
    last_minute: f32,
    waits: [u16; WAIT_BUCKETS],
}

impl Tally {
    /// A claim was kept, of a task that had waited so long (in microseconds) and cost so much.
    pub fn claimed(&mut self, waited: i64, cost: f64, now: i64) {
        self.claims = self.claims.saturating_add(1);
        self.serve(cost, now);
        let bucket = bucket_of(waited);
        if self.waits.get(bucket) == Some(&u16::MAX) {
            // Old waits fade.
            self.waits.iter_mut().for_each(|count| *count /= 2);
        }
        if let Some(count) = self.waits.get_mut(bucket) {
            *count = count.saturating_add(1);
        }
    }

    /// Cost was charged, or below zero given back.
    pub fn serve(&mut self, cost: f64, now: i64) {
        if !cost.is_finite() {
            return;
        }
        self.served = (self.served + cost).max(0.0);
        let minute = minute_of(now);
        // A minute that lies further ahead than the next is a clock that has been set back since.
        if minute > self.minute || self.minute - minute > 1 {
            let follows = minute.checked_sub(1) == Some(self.minute);
            self.last_minute = if follows { self.this_minute } else { 0.0 };
            self.this_minute = 0.0;
            self.minute = minute;
        }
        self.this_minute += cost as f32;
    }

    pub fn ended(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Completed => self.completions = self.completions.saturating_add(1),
            Outcome::Failed => self.failures = self.failures.saturating_add(1),
        }
    }

    /// The cost served in the minute before `now`: what was served in the minute before this one is taken to have been
    /// spread over it evenly.
    pub fn lately(&self, now: i64) -> f64 {
        let gone = now.rem_euclid(MINUTE) as f64 / MINUTE as f64;
        let (this, last) = match minute_of(now).checked_sub(self.minute) {
            None | Some(0) => (self.this_minute, self.last_minute),
            Some(1) => (0.0, self.this_minute),
            Some(_) => (0.0, 0.0),
        };
        (f64::from(last) * (1.0 - gone) + f64::from(this)).max(0.0)
    }

    /// The wait, in seconds, that a share `q` of the claims did not exceed; the last bucket answers with its beginning.
    pub fn wait(&self, q: f64) -> Option<f64> {
        let total: u32 = self.waits.iter().map(|&count| u32::from(count)).sum();
        if total == 0 {
            return None;
        }
        let wanted = q.clamp(0.0, 1.0) * f64::from(total);
        let mut before = 0.0;
        let mut at = 0.0;
        for (bucket, &count) in self
            .waits
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
        {
            let part = ((wanted - before) / f64::from(count)).clamp(0.0, 1.0);
            at = within(bucket, part);
            before += f64::from(count);
            if before >= wanted {
                break;
            }
        }
        Some(at)
    }

    /// Whether anything was counted.
    pub fn is_empty(&self) -> bool {
        *self == Tally::default()
    }
}

fn minute_of(now: i64) -> u32 {
    u32::try_from(now.div_euclid(MINUTE).max(0)).unwrap_or(u32::MAX)
}

fn bucket_of(waited: i64) -> usize {
    let bounds = (waited / FIRST_BOUND).max(0) as u64;
    let bucket = (u64::BITS - bounds.leading_zeros()) as usize;
    bucket.min(WAIT_BUCKETS - 1)
}

/// Seconds at a part of a bucket, which are taken to be spread evenly over the logarithm of the wait.
fn within(bucket: usize, part: f64) -> f64 {
    let unit = FIRST_BOUND as f64 / 1e6;
    match bucket.checked_sub(1) {
        None => unit * part,
        Some(doublings) if bucket == WAIT_BUCKETS - 1 => unit * 2f64.powi(doublings as i32),
        Some(doublings) => unit * 2f64.powf(doublings as f64 + part),
    }
}
