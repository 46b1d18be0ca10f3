//! `fair_chart`: what each key of a queue gets, as text for people.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::CString;

use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use super::tenants::{TenantRow, rows};
use crate::janitor;
use crate::spi;
use crate::tasks::catalog::Catalog;
use crate::tasks::claim::check_primary;
use crate::tasks::functions::{queue_name, required};
use crate::tasks::load::ensure_loaded;
use crate::tasks::statements as sql;
use crate::tasks::table::TaskTable;

/// Keys that have a line of their own.
const MOST_LINES: usize = 40;
/// Columns of the screen for a key, and for a bar.
const KEY_WIDTH: usize = 19;
const BAR_WIDTH: usize = 20;

/// `fair_chart(queue)`.
#[pg_extern(sql = false)]
fn fair_chart(
    queue: Option<&str>,
) -> Result<TableIterator<'static, (name!(chart, String),)>, ErrorReport> {
    let name = required("queue", queue)?;
    queue_name(name)?;
    check_primary("fair_chart")?;
    let catalog = Catalog::get()?;
    janitor::ensure_running(&catalog);
    ensure_loaded(&TaskTable::open()?, name)?;
    let mut keys = rows(catalog.scope());
    keys.retain(|row| row.queue == name);
    let backlog = backlog(name);
    let lines = chart(keys, &backlog).into_iter().map(|line| (line,));
    Ok(TableIterator::new(lines))
}

/// The pending tasks of each key: due, and due later.
fn backlog(queue: &str) -> HashMap<String, (i64, i64)> {
    spi::connect(|spi| {
        let found = spi.run(&sql::BACKLOG, &[queue.into_datum()]);
        (0..found.len())
            .filter_map(|row| {
                let counts = (found.get(row, 2)?, found.get(row, 3)?);
                Some((found.get(row, 1)?, counts))
            })
            .collect()
    })
}

fn chart(mut keys: Vec<TenantRow>, backlog: &HashMap<String, (i64, i64)>) -> Vec<String> {
    keys.sort_by(|a, b| {
        let most = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
        most(a.lately, b.lately)
            .then(most(a.served, b.served))
            .then_with(|| a.key.cmp(&b.key))
    });
    let shares = keys.iter().flat_map(|row| [row.share, row.fair_share]);
    let scale = shares.flatten().fold(0.0, f64::max);
    let mut lines = vec![line(
        "key",
        "last minute (│ fair)",
        ["share", "fair", "weight", "wait", "p95", "backlog", "run"].map(str::to_owned),
        "",
    )];
    for row in keys.iter().take(MOST_LINES) {
        let (due, later) = backlog.get(&row.key).copied().unwrap_or_default();
        let held_back = row.waiting_for.map_or("", |waiting| waiting.as_str());
        let key = match row.key.as_str() {
            "" => "(default key)",
            key => key,
        };
        lines.push(line(
            key,
            &bar(row.share, row.fair_share, scale),
            [
                percent(row.share),
                percent(row.fair_share),
                short(row.weight),
                row.wait_median.map_or_else(String::new, seconds),
                row.wait_p95.map_or_else(String::new, seconds),
                count(due + later),
                count(row.running),
            ],
            held_back,
        ));
    }
    let more = keys.len().saturating_sub(MOST_LINES);
    if more > 0 {
        lines.push(format!("… {more} more keys"));
    }
    lines
}

fn line(key: &str, bar: &str, numbers: [String; 7], held_back: &str) -> String {
    let mut line = fitted(key, KEY_WIDTH);
    line.push(' ');
    line.push_str(&fitted(bar, BAR_WIDTH));
    for (number, width) in numbers.iter().zip([5, 5, 6, 7, 7, 8, 5]) {
        line.push_str(&format!(" {number:>width$}"));
    }
    line.push(' ');
    line.push_str(held_back);
    line.truncate(line.trim_end().len());
    line
}

/// A bar in eighths of a character, with a mark where it would end if the share were fair.
fn bar(share: Option<f64>, fair: Option<f64>, scale: f64) -> String {
    const PARTS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let length = |share: f64| share / scale * BAR_WIDTH as f64;
    let eighths = share.map_or(0, |share| (length(share) * 8.0).round() as usize);
    let mut cells: Vec<char> = vec!['█'; eighths / 8];
    cells.extend(
        (eighths % 8)
            .checked_sub(1)
            .and_then(|part| PARTS.get(part)),
    );
    cells.resize(BAR_WIDTH, ' ');
    if let Some(fair) = fair {
        let at = (length(fair).round() as usize).saturating_sub(1);
        if let Some(cell) = cells.get_mut(at) {
            *cell = '│';
        }
    }
    cells.into_iter().collect()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(String::new, |share| match share * 100.0 {
        percent if percent > 0.0 && percent < 1.0 => "<1%".into(),
        percent => format!("{percent:.0}%"),
    })
}

/// Three digits, as far as a number needs them.
fn short(number: f64) -> String {
    if number >= 10.0 {
        format!("{number:.0}")
    } else if number >= 0.1 {
        let text = format!("{number:.2}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        format!("{number:.3}")
    }
}

/// A length of time, for people.
fn seconds(seconds: f64) -> String {
    const UNITS: [(f64, &str); 4] = [(86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")];
    let unit = UNITS.iter().find(|(length, _)| seconds >= *length);
    let (number, unit) = match unit {
        Some((length, unit)) => (seconds / length, *unit),
        None => (seconds * 1000.0, "ms"),
    };
    let digits = usize::from(number < 10.0 && unit != "ms");
    format!("{number:.digits$} {unit}")
}

/// A number of tasks, for people.
fn count(tasks: i64) -> String {
    let thousands = tasks as f64 / 1e3;
    match tasks {
        ..100_000 => tasks.to_string(),
        100_000..10_000_000 => format!("{thousands:.0}k"),
        _ => format!("{:.0}M", thousands / 1e3),
    }
}

/// Text as wide as so many columns of the screen: filled up with blanks, or shortened in the middle.
fn fitted(text: &str, width: usize) -> String {
    let widths: Vec<(char, usize)> = text.chars().map(|c| (c, width_of(c))).collect();
    let total: usize = widths.iter().map(|(_, width)| width).sum();
    if total <= width {
        return format!("{text}{}", " ".repeat(width - total));
    }
    let (front, back) = (width / 2, width - width / 2 - 1);
    let (head, used) = prefix(widths.iter(), front);
    let (tail, also) = prefix(widths.iter().rev(), back);
    let tail: String = tail.chars().rev().collect();
    format!("{head}…{tail}{}", " ".repeat(width - 1 - used - also))
}

/// What of some characters fits into so many columns, and how many it takes.
fn prefix<'c>(chars: impl Iterator<Item = &'c (char, usize)>, most: usize) -> (String, usize) {
    let (mut text, mut used) = (String::new(), 0);
    for (c, width) in chars {
        if used + width > most {
            break;
        }
        text.push(*c);
        used += width;
    }
    (text, used)
}

/// Columns of the screen that a character takes, as psql counts them: none for one that combines with the one before, two for
/// a wide one.
fn width_of(c: char) -> usize {
    let Ok(text) = CString::new(c.to_string()) else {
        return 0;
    };
    // SAFETY: one whole character of UTF-8, which is the encoding of every database with this extension.
    let width = unsafe { pg_sys::pg_dsplen(text.as_ptr()) };
    usize::try_from(width).unwrap_or(0)
}
