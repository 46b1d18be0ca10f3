//! Numbers and dates as people read them.

use crate::log::{SECONDS_A_DAY, day_of};

/// Months of the log, and the day of the log each begins on.
const MONTHS: [(&str, usize); 3] = [("October", 0), ("November", 31), ("December", 61)];

/// 18239 as `18,239`.
pub fn count(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Milliseconds to the precision that a wait has: `0.8 ms`, `42 ms`, `1,250 ms`.
pub fn ms(wait: f64) -> String {
    if wait < 9.95 {
        format!("{wait:.1} ms")
    } else {
        format!("{} ms", count(wait.round() as usize))
    }
}

/// Seconds of the log in the unit that fits: `38 minutes`, `6.3 hours`, `2.6 days`.
pub fn log_time(seconds: f64) -> String {
    let (value, unit) = if seconds < 3_600.0 {
        (seconds / 60.0, "minutes")
    } else if seconds < SECONDS_A_DAY {
        (seconds / 3_600.0, "hours")
    } else {
        (seconds / SECONDS_A_DAY, "days")
    };
    if value < 9.95 {
        format!("{value:.1} {unit}")
    } else {
        format!("{value:.0} {unit}")
    }
}

/// The day that a second of the log lies on, such as `7 November`.
pub fn date(seconds: f64) -> String {
    let day = day_of(seconds);
    let month = MONTHS.iter().rev().find(|(_, first)| *first <= day);
    let (name, first) = month.unwrap_or(&MONTHS[0]);
    format!("{} {name}", day - first + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let texts = [0, 999, 1_000, 18_239, 1_234_567].map(count);
        assert_eq!(texts, ["0", "999", "1,000", "18,239", "1,234,567"]);
    }

    #[test]
    fn waits_have_the_precision_they_deserve() {
        assert_eq!(
            [0.84, 9.97, 1_249.6].map(ms),
            ["0.8 ms", "10 ms", "1,250 ms"]
        );
    }

    #[test]
    fn log_time_has_a_fitting_unit() {
        let texts = [227.0, 22_680.0, 226_800.0, 2_268_000.0].map(log_time);
        assert_eq!(texts, ["3.8 minutes", "6.3 hours", "2.6 days", "26 days"]);
    }

    #[test]
    fn the_log_starts_on_the_first_of_october() {
        let day = |days: f64| date(days * SECONDS_A_DAY);
        assert_eq!(day(0.0), "1 October");
        assert_eq!(day(30.99), "31 October");
        assert_eq!(day(31.0), "1 November");
        assert_eq!([day(91.5), day(92.1)], ["31 December"; 2]);
    }
}
