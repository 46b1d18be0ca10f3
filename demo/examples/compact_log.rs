//! Makes `data/nasa-ipsc-1993.txt` from the archive's log in Standard Workload Format:
//!
//! ```sh
//! gunzip -c NASA-iPSC-1993-3.1-cln.swf.gz | cargo run -p harvest_fair_demo --example compact_log > demo/data/nasa-ipsc-1993.txt
//! ```

use std::error::Error;
use std::io::{self, BufRead, Write};

/// Places of the fields in a line of Standard Workload Format, counted from 0.
const SUBMIT: usize = 1;
const RUN: usize = 3;
const USER: usize = 11;

fn main() -> Result<(), Box<dyn Error>> {
    let mut jobs: Vec<[i64; 3]> = Vec::new();
    for (number, line) in io::stdin().lock().lines().enumerate() {
        let line = line?;
        if line.starts_with(';') || line.trim().is_empty() {
            continue;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let field = |place: usize| -> Result<i64, Box<dyn Error>> {
            let text = fields
                .get(place)
                .ok_or_else(|| format!("line {}: field {} is missing", number + 1, place + 1))?;
            let value = text.parse::<i64>().map_err(|error| {
                format!(
                    "line {}: field {}, '{text}': {error}",
                    number + 1,
                    place + 1
                )
            })?;
            if value < 0 {
                let message = format!("line {}: field {} is unknown", number + 1, place + 1);
                return Err(message.into());
            }
            Ok(value)
        };
        jobs.push([field(SUBMIT)?, field(RUN)?, field(USER)?]);
    }
    jobs.sort_by_key(|job| job[0]);

    let mut out = io::BufWriter::new(io::stdout().lock());
    writeln!(
        out,
        "# One job a line: seconds since the job before was submitted, run time in seconds, user. See README.md."
    )?;
    let mut before = 0;
    for [submit, run, user] in jobs {
        writeln!(out, "{} {run} {user}", submit - before)?;
        before = submit;
    }
    out.flush()?;
    Ok(())
}
