//! Who claims what while the other's transaction is open: the specs of `tests/isolation`, each step by step by Postgres' own
//! isolationtester, against the output that is expected.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harvest_fair_server_tests::Environment;

use crate::expected::{expect_output, read, tests_folder};
use crate::support::{brisk, execute};

/// Each spec is a test of its name.
macro_rules! specs {
    ($($name:ident)*) => {
        const SPECS: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

specs! {
    cap_open_claim
    claim_delete
    claim_release
    claim_row_lock
    claim_savepoint
    claim_truncate
    claim_update
    enqueue_closing
    isolation_levels
    prepare_transaction
    two_claimers_one_key
    two_claimers_two_keys
}

#[test]
fn every_spec_is_run() {
    let mut found: Vec<String> = fs::read_dir(tests_folder("isolation/specs"))
        .expect("tests/isolation/specs")
        .map(|file| file.expect("a file").path())
        .map(|file| {
            let name = file.file_stem().expect("a name");
            name.to_string_lossy().into_owned()
        })
        .collect();
    found.sort();
    assert_eq!(found, SPECS);
}

/// Runs a spec in a database of its own, and compares.
fn check(name: &str) {
    // Its janitor comes round every second: what only the sweep finds is found soon.
    let db = brisk().database();
    execute(
        &mut db.connect(),
        &read(&tests_folder("isolation/prelude.sql")),
    );
    let spec = read(&tests_folder(&format!("isolation/specs/{name}.spec")));
    let connection = format!(
        "host='{}' port=5432 user=postgres dbname={}",
        db.cluster().socket_dir().display(),
        db.name()
    );
    let actual = output_of(Command::new(isolationtester()).arg(connection), &spec);
    expect_output(
        &tests_folder(&format!("isolation/expected/{name}.out")),
        &actual,
    );
}

/// Postgres installs it beside what extensions are built with.
fn isolationtester() -> PathBuf {
    let pg_config = Environment::get().program("pg_config");
    let pgxs = Command::new(&pg_config)
        .arg("--pgxs")
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", pg_config.display()));
    let makefile = PathBuf::from(String::from_utf8_lossy(&pgxs.stdout).trim());
    let source = makefile
        .parent()
        .and_then(Path::parent)
        .unwrap_or_else(|| panic!("pg_config --pgxs: {}", makefile.display()));
    source.join("test/isolation/isolationtester")
}

/// Runs a program with `input`; panics where it fails or complains.
fn output_of(program: &mut Command, input: &str) -> String {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A step that hangs ends with an error of its own.
        .env("PGISOLATIONTIMEOUT", "120")
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?}: {error}"));
    // It reads all of the spec before it prints anything.
    child
        .stdin
        .take()
        .expect("a pipe")
        .write_all(input.as_bytes())
        .expect("the spec is read");
    let output = child.wait_with_output().expect("its end is seen");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && stderr.is_empty(),
        "{program:?}: {}\n{stderr}\n{stdout}",
        output.status
    );
    stdout
}
