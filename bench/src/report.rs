//! What a run found, as bench/RESULTS.md.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use crate::Result;
use crate::contenders::{Contender, Fetched, RIVALS};
use crate::race::Track;

/// What a measure should come to.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
    /// Measured for comparison.
    Shown,
}

impl Target {
    fn met(self, value: f64) -> Option<bool> {
        match self {
            Target::AtMost(limit) => Some(value <= limit),
            Target::AtLeast(limit) => Some(value >= limit),
            Target::Shown => None,
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Finding {
    pub question: &'static str,
    pub case: String,
    pub ours: String,
    pub other: String,
    /// The number that is judged, and how it is written.
    pub value: f64,
    pub shown: String,
    pub p99: String,
    pub target: Target,
    /// How the target is written.
    pub wanted: String,
}

impl Finding {
    /// Our time against another's.
    pub fn times(
        question: &'static str,
        case: impl Into<String>,
        ours: &Track,
        other: &Track,
        target: Target,
    ) -> Finding {
        let ratio = ours.ratio(other);
        Finding {
            question,
            case: case.into(),
            ours: time(ours.median()),
            other: format!("{}: {}", other.label, time(other.median())),
            value: ratio,
            shown: times(ratio),
            p99: format!(
                "{} / {} = {}",
                time(ours.p99()),
                time(other.p99()),
                times(ours.p99_ratio(other))
            ),
            target,
            wanted: match target {
                Target::AtMost(limit) => format!("<= {limit}x"),
                Target::AtLeast(limit) => format!(">= {limit}x"),
                Target::Shown => "-".to_owned(),
            },
        }
    }

    /// How many times as fast as another.
    pub fn faster(
        question: &'static str,
        case: impl Into<String>,
        ours: &Track,
        other: &Track,
        at_least: f64,
    ) -> Finding {
        let faster = 1.0 / ours.ratio(other);
        Finding {
            value: faster,
            shown: format!("{faster:.0}x faster"),
            target: Target::AtLeast(at_least),
            wanted: format!(">= {at_least:.0}x faster"),
            ..Finding::times(question, case, ours, other, Target::Shown)
        }
    }

    /// A number of its own.
    pub fn number(
        question: &'static str,
        case: impl Into<String>,
        value: f64,
        shown: String,
        target: Target,
        wanted: impl Into<String>,
    ) -> Finding {
        Finding {
            question,
            case: case.into(),
            ours: shown.clone(),
            other: "-".to_owned(),
            value,
            shown,
            p99: "-".to_owned(),
            target,
            wanted: wanted.into(),
        }
    }

    /// For the terminal.
    pub fn sentence(&self) -> String {
        let other = match self.other.as_str() {
            "-" => String::new(),
            other => format!(" against {other}"),
        };
        format!(
            "{}, {}: {}{other}: {} (p99 {}; wanted {})",
            self.question, self.case, self.ours, self.shown, self.p99, self.wanted
        )
    }

    fn line(&self, judge: bool) -> String {
        let met = if judge {
            self.target.met(self.value)
        } else {
            None
        };
        let bold = |text: &str| {
            if met == Some(false) {
                format!("**{text}**")
            } else {
                text.to_owned()
            }
        };
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            bold(self.question),
            self.case,
            self.ours,
            self.other,
            bold(&self.shown),
            self.p99,
            self.wanted,
            match met {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "-",
            }
        )
    }
}

/// A question: what was found, and its picture.
pub struct Answer {
    /// The name of its picture and of its section in reasons.md.
    pub id: &'static str,
    pub title: &'static str,
    /// How it was measured.
    pub method: String,
    pub findings: Vec<Finding>,
    pub picture: String,
    pub tracks: Vec<Track>,
}

pub struct Run {
    pub quick: bool,
    pub machine: String,
    pub server: String,
    pub minutes: f64,
}

/// Writes the results, the pictures, and the times of all rounds.
pub fn write(
    directory: &Path,
    raw: &Path,
    run: &Run,
    answers: &[Answer],
    fetched: &Fetched,
    reasons: &str,
) -> Result<()> {
    let charts = directory.join("charts");
    std::fs::create_dir_all(&charts)?;
    std::fs::create_dir_all(raw)?;
    for answer in answers {
        std::fs::write(charts.join(format!("{}.svg", answer.id)), &answer.picture)?;
        let mut csv = String::from("series,round,call,microseconds\n");
        for track in &answer.tracks {
            for (round, times) in track.rounds.iter().enumerate() {
                for (call, time) in times.iter().enumerate() {
                    let _ = writeln!(csv, "{},{round},{call},{time:.1}", track.label);
                }
            }
        }
        std::fs::write(raw.join(format!("{}.csv", answer.id)), csv)?;
    }
    std::fs::write(
        directory.join("RESULTS.md"),
        page(run, answers, fetched, reasons),
    )?;
    Ok(())
}

fn page(run: &Run, answers: &[Answer], fetched: &Fetched, reasons: &str) -> String {
    let reasons = sections(reasons);
    let mut page = format!(
        "# Benchmark\n\n\
         Written by `make bench`, all in one run of {:.0} minutes. Do not edit: reasons for misses are in [reasons.md](reasons.md).\n\n\
         Machine: {}. Server: {}.\n\n",
        run.minutes, run.machine, run.server
    );
    page.push_str(
        "Everything runs on one private server and is measured by a client on the same machine, over the Unix socket, with prepared \
         statements. Each call is a transaction of its own and delivers its rows, payload included. Those who are compared take turns, \
         round by round, and change who begins. A time is the median of the rounds' medians; a ratio is the median of the rounds' \
         ratios; p99 is over all calls, and its ratio the median of five stretches of the run. A client \
         that measures alone is kept on one processor together with its server process (where there is `taskset`): waking a process on \
         another costs as much as a claim, and who has to is luck.\n\n\
         `fsync` and `synchronous_commit` are off for all, unless a line says otherwise: waiting for a disk would make all alike. \
         `autovacuum` and `jit` are off except in the last question, and each database is vacuumed, analyzed and checkpointed after it is loaded, \
         and queues of up to 200k rows are vacuumed before each round, which (a) needs and we do not. \
         Leases last a day, so that none runs out meanwhile. Claimed tasks are not completed unless a line says so.\n\n",
    );
    if run.quick {
        page.push_str("**This was a quick run: tiny sizes, to see that everything works. Its numbers mean nothing and nothing is judged.**\n\n");
    }
    page.push_str("## Results\n\n| question | case | harvest_fair | against | result | p99 | target | met |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for answer in answers {
        for finding in &answer.findings {
            let _ = writeln!(page, "{}", finding.line(!run.quick));
        }
    }
    for answer in answers {
        let _ = write!(
            page,
            "\n## {}\n\n{}\n\n![{}](charts/{}.svg)\n",
            answer.title, answer.method, answer.title, answer.id
        );
        let missed: Vec<&Finding> = answer
            .findings
            .iter()
            .filter(|finding| !run.quick && finding.target.met(finding.value) == Some(false))
            .collect();
        if !missed.is_empty() {
            let _ = writeln!(
                page,
                "\nMissed: {}. {}",
                missed
                    .iter()
                    .map(|finding| format!(
                        "{} ({}, wanted {})",
                        finding.case, finding.shown, finding.wanted
                    ))
                    .collect::<Vec<_>>()
                    .join("; "),
                reasons
                    .get(answer.id)
                    .map_or("No reason is known yet.", String::as_str)
            );
        }
    }
    page.push_str(&rivals(fetched));
    page
}

/// The text under each `## id`.
fn sections(reasons: &str) -> BTreeMap<String, String> {
    reasons
        .split("\n## ")
        .skip(1)
        .filter_map(|section| section.split_once('\n'))
        .map(|(id, text)| (id.trim().to_owned(), text.trim().to_owned()))
        .collect()
}

fn rivals(fetched: &Fetched) -> String {
    let mut text = String::from(
        "\n## Who is compared\n\n| | what | guarantees | does not |\n| --- | --- | --- | --- |\n",
    );
    for contender in std::iter::once(Contender::Fair).chain(RIVALS) {
        let [what, gives, lacks] = contender.describe();
        let missing = if fetched.has(contender) {
            ""
        } else {
            " (**could not be fetched for this run**)"
        };
        let _ = writeln!(
            text,
            "| {}{missing} | {what} | {gives} | {lacks} |",
            contender.name()
        );
    }
    let versions = fetched.versions();
    let versions: Vec<&str> = versions.lines().collect();
    if !versions.is_empty() {
        let _ = write!(text, "\nFetched for this run: {}.\n", versions.join(", "));
    }
    text
}

/// Microseconds as people read them.
pub fn time(micros: f64) -> String {
    let (value, unit) = if micros < 1_000.0 {
        (micros, "µs")
    } else if micros < 1e6 {
        (micros / 1e3, "ms")
    } else {
        (micros / 1e6, "s")
    };
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {unit}")
}

pub fn times(ratio: f64) -> String {
    if ratio < 0.1 {
        format!("1/{:.0}", 1.0 / ratio)
    } else if ratio >= 20.0 {
        format!("{ratio:.0}x")
    } else {
        format!("{ratio:.2}x")
    }
}

/// 1000000 as `1M`, 50000 as `50k`.
pub fn count(number: i64) -> String {
    match number {
        n if n >= 1_000_000 && n % 100_000 == 0 => format!("{}M", n as f64 / 1e6),
        n if n >= 1_000 && n % 100 == 0 => format!("{}k", n as f64 / 1e3),
        n => n.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(value: f64, target: Target) -> Finding {
        Finding::number("claim", "of 1", value, times(value), target, "<= 1.1x")
    }

    #[test]
    fn a_miss_stands_out_and_a_quick_run_judges_nothing() {
        let missed = finding(1.2, Target::AtMost(1.1));
        assert!(missed.line(true).contains("| **claim** | of 1 |"));
        assert!(missed.line(true).ends_with("| **no** |"));
        assert!(missed.line(false).ends_with("| - |"));
        assert!(!missed.line(false).contains("**"));
        assert!(
            finding(1.0, Target::AtMost(1.1))
                .line(true)
                .ends_with("| yes |")
        );
        assert!(
            finding(2.0, Target::AtLeast(1.1))
                .line(true)
                .ends_with("| yes |")
        );
    }

    #[test]
    fn a_reason_is_found_by_its_heading() {
        let reasons = sections("# Reasons\n\n## claim\n\nToo slow.\n\n## enqueue\nTrigger.\n");
        assert_eq!(reasons["claim"], "Too slow.");
        assert_eq!(reasons["enqueue"], "Trigger.");
    }

    #[test]
    fn numbers_have_the_precision_they_deserve() {
        assert_eq!(
            [7.25, 72.5, 725.0, 7_250.0, 7.25e6].map(time),
            ["7.25 µs", "72.5 µs", "725 µs", "7.25 ms", "7.25 s"]
        );
        assert_eq!(
            [256, 1_000, 50_000, 10_000_000].map(count),
            ["256", "1k", "50k", "10M"]
        );
    }
}
