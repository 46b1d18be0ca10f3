//! Every error that the extension can raise, provoked and compared word for word with `tests/errors/all.txt`; and what the
//! source can raise, read from the source, so that no error is left out.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use harvest_fair_server_tests::{Cluster, Options, expect_refusal};
use postgres::Client;

use crate::error_cases::{Case, ORDINARY};
use crate::expected::{expect_output, read, tests_folder};
use crate::support::{execute, states};

/// What is provoked, and how it was refused.
#[derive(Default)]
struct Report {
    text: String,
    labels: BTreeSet<&'static str>,
}

impl Report {
    /// Runs each case in a transaction of its own, which is undone.
    fn provoke(&mut self, client: &mut Client, cases: &[Case]) {
        for (label, sql) in cases {
            let begun = sql.starts_with("BEGIN");
            let whole = if begun {
                (*sql).to_owned()
            } else {
                format!("BEGIN; {sql}")
            };
            let refusal = expect_refusal(client, &whole);
            execute(client, "ROLLBACK");
            assert!(!refusal.sqlstate.starts_with("XX"), "{refusal:?}");
            let sql: Vec<&str> = sql.lines().map(str::trim).collect();
            let _ = writeln!(self.text, "{label}: {}", sql.join(" "));
            let _ = writeln!(self.text, "  {}: {}", refusal.sqlstate, refusal.message);
            for (name, value) in [("DETAIL", &refusal.detail), ("HINT", &refusal.hint)] {
                if !value.is_empty() {
                    let _ = writeln!(self.text, "  {name}: {value}");
                }
            }
            self.text.push('\n');
            self.labels.insert(label);
        }
    }
}

fn provoke_all() -> Report {
    let mut report = Report::default();
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_enqueue('q'); SELECT fair_claim('q', 'w')");
    report.provoke(&mut client, ORDINARY);

    let empty = Cluster::shared().empty_database();
    let bare = "CREATE FUNCTION bare(bigint, bigint) RETURNS boolean LANGUAGE c AS 'harvest_fair', 'fair_release_wrapper';
                SELECT bare(1, 1)";
    report.provoke(&mut empty.connect(), &[("NotInstalled", bare)]);

    let mut client = Cluster::shared().connect();
    execute(
        &mut client,
        "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0",
    );
    report.provoke(
        &mut Cluster::shared().connect_db("latin"),
        &[("RAISE", "CREATE EXTENSION harvest_fair")],
    );
    execute(&mut client, "DROP DATABASE latin WITH (FORCE)");

    let bare = Cluster::start(Options::new().without_preload());
    let db = bare.empty_database();
    let create = &[("NotPreloaded", "CREATE EXTENSION harvest_fair")];
    report.provoke(&mut db.connect(), create);

    let small = Options::new()
        .set("harvest_fair.max_queues", 1)
        .set("harvest_fair.max_keys", 16);
    let small = Cluster::start(small);
    let db = small.database();
    let mut client = db.connect();
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'k' || i FROM generate_series(1, 40) i;
         INSERT INTO harvest_fair.task (queue, fairness_key, id) VALUES ('q', 'last', 1000)",
    );
    // Loaded in the order of the keys, after the commit: the last one finds no room.
    execute(&mut client, "SELECT fair_claim('q', 'w')");
    assert!(!states(&mut client, "q").is_empty());
    report.provoke(
        &mut client,
        &[
            ("TooManyQueues", "SELECT fair_claim('other', 'w')"),
            ("BoardFull", "SELECT fair_charge('q', 'late')"),
            ("BoardFull", "SELECT fair_claim_by_id(1000, 'w')"),
        ],
    );
    report
}

/// The Rust and SQL of the extension: path and text of each file.
fn source() -> Vec<(String, String)> {
    fn collect(folder: &Path, files: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).expect("a folder of the source") {
            let path = entry.expect("a file").path();
            if path.is_dir() {
                collect(&path, files);
            } else {
                files.push((path.display().to_string(), read(&path)));
            }
        }
    }
    let mut files = Vec::new();
    for folder in ["../src", "../sql"] {
        collect(&tests_folder(folder), &mut files);
    }
    files
}

/// The text of one file of the source.
fn file<'s>(source: &'s [(String, String)], name: &str) -> &'s str {
    let found = source.iter().find(|(path, _)| path.ends_with(name));
    &found.unwrap_or_else(|| panic!("no {name}")).1
}

/// What stands between `before` and the next `after`, wherever it does.
fn between<'s>(text: &'s str, before: &str, after: &str) -> Vec<&'s str> {
    text.split(before)
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(after)?.0))
        .collect()
}

/// The variants of an enum.
fn variants<'s>(source: &'s str, name: &str) -> Vec<&'s str> {
    let body = between(source, &format!("pub enum {name} {{\n"), "\n}\n");
    assert_eq!(body.len(), 1, "the enum {name}");
    body[0]
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(char::is_uppercase))
        .map(|line| {
            let end = line.find(|c: char| !c.is_alphanumeric());
            &line[..end.unwrap_or(line.len())]
        })
        .collect()
}

/// Whether a message is one that this format string makes.
fn made_by(format: &str, placeholder: &str, message: &str) -> bool {
    let mut rest = message;
    let mut first = true;
    for piece in format.split(placeholder) {
        match rest.find(piece) {
            Some(at) if !first || at == 0 => rest = &rest[at + piece.len()..],
            _ => return false,
        }
        first = false;
    }
    true
}

#[test]
fn every_error_is_raised_with_the_expected_words() {
    let report = provoke_all();
    every_error_of_the_source_is_in(&report);
    expect_output(&tests_folder("errors/all.txt"), &report.text);
}

fn every_error_of_the_source_is_in(report: &Report) {
    let source = source();
    let mut missing = Vec::new();
    let mut want = |found: bool, what: String| {
        if !found {
            missing.push(what);
        }
    };
    let provoked = |label: &str| report.labels.iter().any(|known| known == &label);
    let said = |text: &str| report.text.contains(text);

    for variant in variants(file(&source, "src/errors.rs"), "Error") {
        let found = match variant {
            "Name" | "Setting" => continue,
            // The server would have to be out of memory.
            "NoMemory" => continue,
            _ => provoked(variant),
        };
        want(found, format!("Error::{variant}"));
    }
    for variant in variants(file(&source, "src/names.rs"), "NameError") {
        want(
            provoked(&format!("Name {variant}")),
            format!("NameError::{variant}"),
        );
    }
    let fields = between(
        file(&source, "policy/settings.rs"),
        "pub const FIELDS",
        "];",
    )[0];
    for field in between(fields, "    \"", "\"") {
        want(
            provoked(&format!("Setting {field}")),
            format!("the setting {field}"),
        );
    }
    for (path, text) in &source {
        let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let spaceless = text.replace("( \"", "(\"");
        for what in between(&spaceless, "required(\"", "\"") {
            want(
                said(&format!("{what} must not be null")),
                format!("null for {what}"),
            );
        }
        for what in between(&spaceless, " duration(\"", "\"") {
            let (positive, negative) = (
                format!("{what} must be positive"),
                format!("{what} must not be negative"),
            );
            want(
                said(&positive) || said(&negative),
                format!("duration {what}"),
            );
        }
        for function in between(&spaceless, "check_transaction(\"", "\"") {
            want(
                said(&format!("{function} needs isolation level")),
                format!("isolation level of {function}"),
            );
        }
        for format in between(&text, "RAISE EXCEPTION '", "'") {
            let found = report.text.lines().any(|line| {
                let message = line.split_once(": ").map_or("", |(_, message)| message);
                made_by(format, "%", message)
            });
            want(found, format!("RAISE EXCEPTION '{format}'"));
        }
        // What is raised past the list of errors: known here, and nowhere else.
        let elsewhere = [
            "ereport!(",
            "error!(",
            "panic!(",
            "unreachable!(",
            "unimplemented!(",
            "todo!(",
            "ErrorReport::new(",
        ];
        for raising in elsewhere {
            let sites = text.matches(raising).count();
            let known = KNOWN
                .iter()
                .filter(|(file, what, _)| path.ends_with(file) && *what == raising)
                .count();
            want(
                sites == known,
                format!("{path}: {sites} of {raising}, of which {known} are known"),
            );
        }
    }
    assert!(
        missing.is_empty(),
        "not provoked here: {missing:#?}\nAdd a case for each."
    );
}

/// Where something is raised by other means than an `Error`, and why it is no user's mistake without a case above.
const KNOWN: &[(&str, &str, &str)] = &[
    ("src/errors.rs", "unreachable!(", "follows the raising"),
    ("src/errors.rs", "ErrorReport::new(", "every Error"),
    ("src/trigger.rs", "ereport!(", "provoked above"),
    (
        "src/janitor/guard.rs",
        "unreachable!(",
        "a closure that has run",
    ),
    ("src/janitor.rs", "ErrorReport::new(", "a warning"),
    ("src/tasks/reap.rs", "ErrorReport::new(", "a warning"),
    ("src/janitor/news.rs", "ErrorReport::new(", "a warning"),
    ("src/janitor/retention.rs", "ereport!(", "a warning"),
    ("src/board/shmem.rs", "error!(", "the server does not start"),
    (
        "src/spi.rs",
        "error!(",
        "a statement of ours that SPI refuses",
    ),
    (
        "src/spi.rs",
        "error!(",
        "a statement of ours that does not parse",
    ),
];
