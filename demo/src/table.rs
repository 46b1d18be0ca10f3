//! The comparison as a table on the terminal.

use std::fmt::Write;

use crate::comparison::{Comparison, Row};
use crate::text;

const NAME: usize = 30;

pub fn of(comparison: &Comparison) -> String {
    let mut rows = vec![Row {
        name: "the typical user".to_owned(),
        tasks: 0,
        waits: comparison.typical(),
    }];
    rows.extend(comparison.rows());

    let mut table = String::new();
    let _ = writeln!(
        table,
        "{:NAME$} {:>8}  {:^23}  {:^23}",
        "", "", "median wait", "95th percentile"
    );
    let _ = writeln!(
        table,
        "{:NAME$} {:>8}  {:>11} {:>11}  {:>11} {:>11}",
        "fairness", "claims", "off", "on", "off", "on"
    );
    let _ = writeln!(table, "{}", "-".repeat(NAME + 57));
    for row in rows {
        let claims = if row.tasks == 0 {
            String::new()
        } else {
            text::count(row.tasks)
        };
        let waits = row
            .waits
            .map(|waits| [text::ms(waits.median), text::ms(waits.p95)]);
        let _ = writeln!(
            table,
            "{:NAME$} {claims:>8}  {:>11} {:>11}  {:>11} {:>11}",
            row.name, waits.off[0], waits.on[0], waits.off[1], waits.on[1]
        );
    }
    let _ = writeln!(table, "{}", "-".repeat(NAME + 57));
    let _ = writeln!(
        table,
        "{:NAME$} {:>8}  {:>11.3} {:>11.3}",
        "Jain's index of service", "", comparison.jain.off, comparison.jain.on
    );
    let _ = writeln!(
        table,
        "\nJain's index is 1 when all users get, per fair share, the same service while they and others have tasks waiting.\n\
         The typical user: the median of the own medians and 95th percentiles of the {} others.",
        comparison.others().len()
    );
    table
}
