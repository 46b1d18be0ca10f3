//! The README does what it says: its statements are run in order, and each output is compared with the one it shows.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use harvest_fair_server_tests::{Cluster, Database, Options, PATIENCE, holds_within};

const README: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"));

/// One block of SQL, and the output that stands below it.
struct Example {
    /// Where it begins in the README.
    line: usize,
    sql: String,
    shown: Option<String>,
}

/// The blocks of SQL in order. A text block belongs to the block of SQL that it follows.
fn examples(readme: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut follows_sql = false;
    let mut lines = readme.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let mut body = || {
            lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .map(|line| format!("{line}\n"))
                .collect::<String>()
        };
        match line {
            "" => {}
            "```sql" => {
                let (line, sql) = (index + 2, body());
                let shown = None;
                examples.push(Example { line, sql, shown });
                follows_sql = true;
            }
            "```text" => {
                let text = body();
                if let Some(example) = examples.last_mut().filter(|_| follows_sql) {
                    example.shown = Some(text);
                }
                follows_sql = false;
            }
            _ => {
                if line.starts_with("```") {
                    body();
                }
                follows_sql = false;
            }
        }
    }
    examples
}

/// What the README moves rows out of: a queue of pgmq as far as its table goes. Three messages wait, one of which a reader has
/// given up, one is in hand, and one is sent with a delay.
const A_QUEUE_OF_PGMQ: &str = r#"
    CREATE SCHEMA pgmq;
    CREATE TABLE pgmq.q_resize (
        msg_id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
        read_ct int NOT NULL DEFAULT 0,
        enqueued_at timestamptz NOT NULL DEFAULT now(),
        last_read_at timestamptz,
        vt timestamptz NOT NULL,
        message jsonb,
        headers jsonb
    );
    INSERT INTO pgmq.q_resize (read_ct, vt, message, headers) VALUES
        (0, now(), '{"n": 1}', '{"x-pgmq-group": "acme"}'),
        (1, now(), '{"n": 2}', '{"x-pgmq-group": "acme"}'),
        (0, now(), '{"n": 3}', '{"x-pgmq-group": "bolt"}'),
        (1, now() + interval '1 day', '{"n": 4}', '{"x-pgmq-group": "bolt"}'),
        (0, now() + interval '1 day', '{"n": 5}', NULL)"#;

/// What psql prints, results before errors, without the blanks with which it fills lines up.
fn psql(database: &Database, sql: &str) -> String {
    let environment = database.cluster().environment();
    let mut psql = environment
        .command(environment.program("psql"))
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1"])
        .args(["-U", "postgres", "-p", "5432", "-d", database.name(), "-h"])
        .arg(database.cluster().socket_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("psql can be started");
    // A block is shorter than what a pipe holds, so psql need not be read meanwhile.
    let mut stdin = psql.stdin.take().expect("psql's input is a pipe");
    stdin.write_all(sql.as_bytes()).expect("psql reads");
    drop(stdin);
    let output = psql.wait_with_output().expect("psql ends");
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8(printed).expect("psql writes UTF-8");
    printed
        .trim_end()
        .lines()
        .fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "{}", line.trim_end());
            text
        })
}

/// Both texts side by side, line by line: `-` is shown by the README and not printed, `+` the other way round.
fn difference(shown: &str, printed: &str) -> String {
    let (mut shown, mut printed) = (shown.lines(), printed.lines());
    let mut difference = String::new();
    loop {
        let pair = (shown.next(), printed.next());
        if pair == (None, None) {
            return difference;
        }
        if pair.0 == pair.1 {
            let _ = writeln!(difference, "  {}", pair.0.unwrap_or(""));
            continue;
        }
        for (sign, line) in [('-', pair.0), ('+', pair.1)] {
            if let Some(line) = line {
                let _ = writeln!(difference, "{sign} {line}");
            }
        }
    }
}

#[test]
fn each_statement_of_the_readme_prints_what_the_readme_shows() {
    // The README makes roles, and they belong to a whole server. On a slow machine no lease may run out meanwhile.
    let cluster = Cluster::start(Options::new().set("harvest_fair.default_lease", "1h"));
    let database = cluster.empty_database();
    database
        .connect()
        .batch_execute(A_QUEUE_OF_PGMQ)
        .expect("a queue of pgmq");
    let mut faults = String::new();
    for Example { line, sql, shown } in examples(README) {
        let mut printed = psql(&database, &sql);
        if let Some(shown) = &shown {
            // Refused changes reach the audit a little later. Reading again what is only read does no harm.
            if sql.contains("FROM harvest_fair.audit") {
                holds_within(PATIENCE, || {
                    printed = psql(&database, &sql);
                    printed == *shown
                });
            }
        }
        // Where the README shows nothing, there may be output; an error only where it is shown.
        let expected = match &shown {
            Some(shown) => shown,
            None if printed.contains("ERROR:") => "",
            None => continue,
        };
        if printed != *expected {
            let difference = difference(expected, &printed);
            let _ = writeln!(faults, "README.md:{line}\n{sql}\n{difference}");
        }
    }
    assert!(
        faults.is_empty(),
        "shown (-) and printed (+) differ\n\n{faults}"
    );
}

/// Whether a text has a word, with something else than a letter, a digit or `_` on either side of it.
fn has_word(text: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(part_of_word) && !text[at + word.len()..].starts_with(part_of_word)
    })
}

#[test]
fn the_readme_lists_and_uses_each_function_and_each_setting() {
    let database = Cluster::shared().database();
    let mut client = database.connect();
    let mut names = |sql: &str| -> Vec<String> {
        let rows = client.query(sql, &[]).expect("a list of names");
        rows.iter().map(|row| row.get(0)).collect()
    };
    let functions = names(
        "SELECT DISTINCT proname::text FROM pg_proc WHERE proname LIKE 'fair\\_%' \
         AND pronamespace = 'public'::regnamespace",
    );
    let settings = names("SELECT setting FROM fair_queue('q')");
    let parameters =
        names("SELECT substr(name, 14) FROM pg_settings WHERE name LIKE 'harvest\\_fair.%'");
    let counters = names(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = 'harvest_fair.stats'::regclass \
         AND attnum > 0 AND attname <> 'queue'",
    );
    let sql: String = examples(README).into_iter().map(|e| e.sql).collect();
    let tables: String = README
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| line.split('|').nth(1))
        .collect();
    let mut missing = Vec::new();
    for name in functions.iter().chain(&settings) {
        if !has_word(&sql, name) {
            missing.push(format!("an example of {name}"));
        }
    }
    for name in [&functions, &settings, &parameters, &counters]
        .into_iter()
        .flatten()
    {
        if !has_word(&tables, name) {
            missing.push(format!("{name} in a table"));
        }
    }
    assert!(functions.len() > 20 && settings.len() > 8, "found too few");
    assert!(missing.is_empty(), "the README lacks {missing:#?}");
}

/// The name by which links reach a heading.
fn anchor(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn each_link_of_the_readme_leads_to_a_heading_or_a_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut prose = String::new();
    let mut in_block = false;
    for line in README.lines() {
        in_block ^= line.starts_with("```");
        if !in_block {
            let _ = writeln!(prose, "{line}");
        }
    }
    let anchors: Vec<String> = prose
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .collect();
    let links: Vec<&str> = prose
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(link, _)| link)
        .collect();
    let broken: Vec<&&str> = links
        .iter()
        .filter(|link| match link.strip_prefix('#') {
            Some(name) => !anchors.iter().any(|anchor| anchor == name),
            None => !root.join(link).exists(),
        })
        .collect();
    assert!(links.len() > 50, "found too few: {links:?}");
    assert!(broken.is_empty(), "lead nowhere: {broken:?}");
    let mut once = anchors.clone();
    once.sort();
    once.dedup();
    assert_eq!(once.len(), anchors.len(), "two headings have one anchor");
}
