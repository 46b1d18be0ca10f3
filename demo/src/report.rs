//! The report: one HTML file with its pictures in it, that needs nothing else.

mod stacks;
mod svg;
mod waits;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;
use std::iter;

use crate::comparison::{Both, Comparison, HEAVIEST};
use crate::log::{SECONDS_A_DAY, Scale, User, day_of};
use crate::measure::Served;
use crate::text;
use stacks::{Amount, Bins, Layers, Panel};
use svg::escape;

const STYLE: &str = include_str!("report/style.css");

/// Of every picture, in units that the browser scales to the page.
const WIDTH: f64 = 1080.0;
/// The close-up.
const DAYS: usize = 4;
const BINS_A_DAY: usize = 12;

pub fn page(comparison: &Comparison, scale: &Scale, workers: usize) -> String {
    let tasks: usize = comparison.users.iter().map(|(_, tasks)| tasks).sum();
    let users = comparison.users.len();
    let sentence = lead(comparison);

    let Both { off, on } = comparison.served;
    let heaviest: Vec<User> = comparison
        .heaviest()
        .iter()
        .map(|(user, _)| *user)
        .collect();
    let layers = Layers::new(heaviest, None);
    let months = Bins {
        from: 0.0,
        width: SECONDS_A_DAY / 2.0,
        count: 2 * (length(&comparison.served) * scale.speed / SECONDS_A_DAY).ceil() as usize,
    };
    let [waiting_off, waiting_on] = [("waiting, fairness off", off), ("waiting, fairness on", on)]
        .map(|(title, tasks)| Panel {
            title,
            unit: "tasks",
            tasks,
            amount: Amount::Waiting,
        });
    let season = stacks::figure(
        "Tasks waiting with fairness off and on",
        &[waiting_off, waiting_on],
        &layers,
        months,
        scale,
    );

    let days = busiest(off, scale);
    let flooders = heaviest_within(off, days, scale);
    let flood = {
        let shares = comparison
            .served
            .map(|tasks| share_of_claims(tasks, &flooders, days, scale));
        format!(
            "Who submitted, and whose tasks the claims were for: the {} users who submitted the most got {:.0}% of the claims with fairness off and {:.0}% with \
             fairness on.",
            flooders.len(),
            100.0 * shares.off,
            100.0 * shares.on
        )
    };
    let flooders = Layers::new(flooders, Some(&layers));
    let two_hours = format!("tasks in {} hours", 24 / BINS_A_DAY);
    let submitted = Panel {
        title: "submitted",
        unit: &two_hours,
        tasks: off,
        amount: Amount::Submitted,
    };
    let [claimed_off, claimed_on] = [("claimed, fairness off", off), ("claimed, fairness on", on)]
        .map(|(title, tasks)| Panel {
            title,
            unit: "% of claims",
            tasks,
            amount: Amount::ShareOfClaims,
        });
    let close_up = stacks::figure(
        "Submissions and claims on the busiest days",
        &[submitted, claimed_off, claimed_on],
        &flooders,
        days,
        scale,
    );

    format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>harvest_fair: {users} users, one queue</title>
<style>
{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="kicker">harvest_fair</p>
<h1>{users} users, one queue</h1>
<p class="lead">{sentence}</p>
</header>
{tiles}
<section>
<h2>How long each user waited</h2>
{waits}</section>
<section>
<h2>The busiest days, {first} to {last}</h2>
<p>{flood}</p>
{close_up}</section>
<section>
<h2>Three months of waiting</h2>
<p>Tasks that had been submitted and not yet claimed, and whose they were.</p>
{season}</section>
<section>
<h2>In numbers</h2>
{table}</section>
<footer>
<p>{tasks} jobs that {users} users submitted to the iPSC/860 of NASA Ames from October to December 1993, replayed on a private Postgres by {workers} workers that claim,
sleep for the run time and complete. One second of the replay is {speed} of 1993. Run times are cut at {longest} and stretched {stretch:.1}-fold against
the submit times, so that the workers are short on busy days.
Fairness off is plain due order: first come, first served.</p>
<p>Jain's index of service while backlogged: each claim made while n &ge; 2 users have tasks waiting is worth a fair share of 1/n to each of them; a user's service is the
claims received meanwhile per fair share; the index over the users, (&Sigma;x)&sup2; / (n&thinsp;&Sigma;x&sup2;), is 1 when all are equal. Users who were due less than one claim are left out.
The typical user is the median of the {others} others' own medians and 95th percentiles.</p>
<p>The log is from the Parallel Workloads Archive: logged by Bill Nitzberg, converted by Dror Feitelson.</p>
</footer>
</main>
</body>
</html>
"#,
        tiles = tiles(comparison),
        waits = waits::figure(comparison, scale),
        first = text::date(days.from),
        last = text::date(days.to() - 1.0),
        table = table(comparison),
        tasks = text::count(tasks),
        speed = text::log_time(scale.speed),
        longest = text::log_time(f64::from(scale.longest_run)),
        stretch = scale.stretch,
        others = comparison.others().len(),
    )
}

/// What can be said in a sentence. A number stays on the line of its unit.
fn lead(comparison: &Comparison) -> String {
    escape(&comparison.sentence()).replace(" ms", "&nbsp;ms")
}

/// The longer one of the two replays, in seconds.
fn length(served: &Both<&[Served]>) -> f64 {
    let last = served
        .off
        .iter()
        .chain(served.on)
        .map(|task| task.start)
        .max();
    last.unwrap_or(1) as f64 / 1e6
}

/// The days whose tasks waited longest in all.
fn busiest(tasks: &[Served], scale: &Scale) -> Bins {
    let mut waited: Vec<f64> = Vec::new();
    for task in tasks {
        let day = day_of(task.submit as f64 / 1e6 * scale.speed);
        if waited.len() <= day {
            waited.resize(day + 1, 0.0);
        }
        waited[day] += task.wait_ms();
    }
    let sums = waited
        .windows(DAYS)
        .map(|window| window.iter().sum::<f64>());
    let first = sums
        .enumerate()
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .map_or(0, |(day, _)| day);
    Bins {
        from: first as f64 * SECONDS_A_DAY,
        width: SECONDS_A_DAY / BINS_A_DAY as f64,
        count: DAYS * BINS_A_DAY,
    }
}

/// The users who submitted the most within the bins, the most first.
fn heaviest_within(tasks: &[Served], bins: Bins, scale: &Scale) -> Vec<User> {
    let mut counts: HashMap<User, usize> = HashMap::new();
    for task in tasks {
        if bins.of(task.submit as f64 / 1e6 * scale.speed).is_some() {
            *counts.entry(task.user).or_default() += 1;
        }
    }
    let mut users: Vec<(User, usize)> = counts.into_iter().collect();
    users.sort_by_key(|&(user, tasks)| (Reverse(tasks), user));
    users
        .into_iter()
        .take(HEAVIEST)
        .map(|(user, _)| user)
        .collect()
}

/// The share of the claims within the bins that were for tasks of these users.
fn share_of_claims(tasks: &[Served], users: &[User], bins: Bins, scale: &Scale) -> f64 {
    let within = tasks
        .iter()
        .filter(|task| bins.of(task.start as f64 / 1e6 * scale.speed).is_some());
    let (mut all, mut theirs) = (0.0, 0.0);
    for task in within {
        all += 1.0;
        theirs += f64::from(u8::from(users.contains(&task.user)));
    }
    theirs / f64::max(all, 1.0)
}

fn tiles(comparison: &Comparison) -> String {
    let typical = comparison.typical();
    let tiles = [
        (
            "typical user's median wait",
            typical.map(|waits| text::ms(waits.median)),
        ),
        (
            "typical user's 95th percentile",
            typical.map(|waits| text::ms(waits.p95)),
        ),
        (
            "Jain's index of service",
            comparison.jain.map(|index| format!("{index:.2}")),
        ),
    ];
    let mut html = String::from("<div class=\"tiles\">\n");
    for (name, Both { off, on }) in tiles {
        let _ = writeln!(
            html,
            r#"<div class="tile"><p class="name">{name}</p><p class="values"><span class="off">{off}<small>off</small></span><span class="arrow">&rarr;</span><span class="on">{on}<small>on</small></span></p></div>"#
        );
    }
    html.push_str("</div>");
    html
}

fn table(comparison: &Comparison) -> String {
    let mut html = String::from(
        "<table>\n<thead><tr><th></th><th></th><th colspan=\"2\">median wait</th><th colspan=\"2\">95th percentile</th></tr>\n\
         <tr><th></th><th>claims</th><th>off</th><th>on</th><th>off</th><th>on</th></tr></thead>\n<tbody>\n",
    );
    let typical = (
        "the typical user".to_owned(),
        String::new(),
        comparison.typical(),
    );
    let rows = comparison
        .rows()
        .into_iter()
        .map(|row| (row.name, text::count(row.tasks), row.waits));
    for (name, claims, waits) in iter::once(typical).chain(rows) {
        let [off, on] =
            [waits.off, waits.on].map(|waits| [text::ms(waits.median), text::ms(waits.p95)]);
        let _ = writeln!(
            html,
            r#"<tr><th>{name}</th><td>{claims}</td><td class="off">{}</td><td class="on">{}</td><td class="off">{}</td><td class="on">{}</td></tr>"#,
            off[0], on[0], off[1], on[1]
        );
    }
    let _ = writeln!(
        html,
        r#"<tr class="last"><th>Jain's index of service</th><td></td><td class="off">{:.3}</td><td class="on">{:.3}</td><td></td><td></td></tr>"#,
        comparison.jain.off, comparison.jain.on
    );
    html.push_str("</tbody>\n</table>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Two users flood the queue each day, ten others have a task now and then; a claim takes a second.
    fn replays() -> (Vec<Served>, Vec<Served>, Scale) {
        let mut tasks: Vec<Served> = Vec::new();
        for day in 0..20 {
            for place in 0..60 {
                let user = if place % 12 == 11 {
                    3 + (place / 12 + day) % 10
                } else {
                    1 + place % 2
                };
                let submit = day as u64 * 60_000_000 + place as u64;
                tasks.push(Served {
                    user: User(user),
                    submit,
                    start: submit + 1_000_000 * place as u64,
                });
            }
        }
        let mut fair = tasks.clone();
        for task in fair.iter_mut().filter(|task| task.user.0 > 2) {
            task.start = task.submit + 2_000;
        }
        let scale = Scale {
            speed: SECONDS_A_DAY / 60.0,
            stretch: 2.0,
            longest_run: 3_600,
        };
        assert!(Duration::from_micros(tasks[1_199].start).as_secs() >= 1_199);
        (tasks, fair, scale)
    }

    #[test]
    fn the_page_needs_nothing_else_and_shows_every_user() {
        let (off, on, scale) = replays();
        let comparison = Comparison::of(Both { off: &off, on: &on });
        let page = page(&comparison, &scale, 8);
        assert!(page.contains(&lead(&comparison)));
        for (user, tasks) in &comparison.users {
            assert!(
                page.contains(&format!("<title>{user}, {tasks} tasks: ")),
                "{user}"
            );
        }
        for foreign in [
            "<script", "http:", "https:", "@import", "url(", "NaN", "inf",
        ] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert_eq!(page.matches("<svg").count(), 3);
        assert_eq!(page.matches("</svg>").count(), 3);
        assert_eq!(page.matches("<g>").count(), page.matches("</g>").count());
    }
}
