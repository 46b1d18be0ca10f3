//! The line that shows how far a replay is.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::text;

const BAR: usize = 30;
/// Between two lines where the line cannot be written again in place.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct Progress {
    title: String,
    total: usize,
    in_place: bool,
    shown: Option<Instant>,
}

impl Progress {
    pub fn new(title: String, total: usize) -> Progress {
        let in_place = io::stdout().is_terminal();
        Progress {
            title,
            total,
            in_place,
            shown: None,
        }
    }

    /// How often it is worth while to call [`Progress::show`].
    pub fn interval(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// `log_seconds` is the time that has come in the log.
    pub fn show(&mut self, log_seconds: f64, claimed: usize, waiting: usize) {
        let now = Instant::now();
        if !self.in_place && self.shown.is_some_and(|shown| now - shown < PATIENCE) {
            return;
        }
        self.shown = Some(now);
        let done = BAR * claimed / self.total.max(1);
        let line = format!(
            "  {}  [{}{}]  {:<11} {:>6} of {} claimed, {:>5} waiting",
            self.title,
            "#".repeat(done),
            ".".repeat(BAR - done),
            text::date(log_seconds),
            text::count(claimed),
            text::count(self.total),
            text::count(waiting),
        );
        self.print(&line, !self.in_place);
    }

    pub fn finish(&mut self, elapsed: Duration) {
        let line = format!(
            "  {}  {} tasks claimed and completed in {:.1} s",
            self.title,
            text::count(self.total),
            elapsed.as_secs_f64()
        );
        self.print(&line, true);
    }

    /// Leaves the line as it is, for the error that follows.
    pub fn give_up(&mut self) {
        if self.in_place {
            println!();
        }
    }

    fn print(&self, line: &str, ends: bool) {
        let mut out = io::stdout().lock();
        let start = if self.in_place { "\r\x1b[K" } else { "" };
        let end = if ends { "\n" } else { "" };
        // A progress line that cannot be written is no reason to stop.
        let _ = write!(out, "{start}{line}{end}");
        let _ = out.flush();
    }
}
