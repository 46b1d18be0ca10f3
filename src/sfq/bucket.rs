//! A token bucket: a limited right to claim, which comes back with time. It holds one second's worth of tokens, at
//! least one, and starts full.

/// How far time must have gone back for it to be the clock on the wall that was set back, and not two callers that read
/// it in one order and came here in the other.
const CLOCK_SET_BACK: i64 = 10_000_000;
const MICROS: f64 = 1_000_000.0;
/// A token that lacks no more than this is whole: the rest is rounding.
const WHOLE: f64 = 1.0 - 1e-9;

/// The tokens that were there at an instant. The rate is that of the caller, who settles before it changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    tokens: f64,
    at: i64,
}

impl Bucket {
    /// Full at any rate.
    pub const FULL: Bucket = Bucket {
        tokens: f64::INFINITY,
        at: i64::MIN,
    };

    /// Adds what has come in until `now`, at `rate` tokens a second. NaN is no limit: nothing is counted.
    pub fn settle(&mut self, rate: f64, now: i64) {
        if rate.is_nan() {
            return;
        }
        let passed = now.saturating_sub(self.at);
        if passed > 0 {
            self.tokens += passed as f64 * rate / MICROS;
            self.at = now;
        } else if passed < -CLOCK_SET_BACK {
            self.at = now;
        }
        self.fill(self.tokens, rate);
    }

    /// A bucket that is full stays full if its capacity grows.
    fn fill(&mut self, tokens: f64, rate: f64) {
        self.tokens = if tokens < capacity(rate) {
            tokens
        } else {
            f64::INFINITY
        };
    }

    pub fn is_same(&self, other: &Bucket) -> bool {
        (self.tokens.to_bits(), self.at) == (other.tokens.to_bits(), other.at)
    }

    /// Whether there is a token, as of the last time it was settled.
    pub fn has_token(&self) -> bool {
        self.tokens >= WHOLE
    }

    /// Takes a token, if there is one or not: a claim that was allowed while none was needed stays allowed.
    pub fn take(&mut self, rate: f64) {
        if !rate.is_nan() {
            self.tokens = (self.tokens.min(capacity(rate)) - 1.0).max(0.0);
        }
    }

    /// Gives a token back.
    pub fn give_back(&mut self, rate: f64) {
        if !rate.is_nan() {
            self.fill(self.tokens + 1.0, rate);
        }
    }

    /// When there will be a token at `rate`; `i64::MAX`: never.
    pub fn ready_at(&self, rate: f64) -> i64 {
        if self.has_token() {
            return self.at;
        }
        let missing = ((1.0 - self.tokens) * MICROS / rate).ceil();
        // A time that is no number or beyond all times becomes the last one.
        if missing < i64::MAX as f64 {
            self.at.saturating_add((missing as i64).max(1))
        } else {
            i64::MAX
        }
    }
}

fn capacity(rate: f64) -> f64 {
    rate.max(1.0)
}
