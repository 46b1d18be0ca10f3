//! Output that is compared with a committed file.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder or file below `tests/`.
pub fn tests_folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A file's text.
#[track_caller]
pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Panics with the difference where a file holds something else. With `HF_ACCEPT` set, what came out is what will be
/// expected.
#[track_caller]
pub fn expect_output(expected: &Path, actual: &str) {
    if std::env::var_os("HF_ACCEPT").is_some() {
        fs::write(expected, actual).expect("the folder of expected output is writable");
    }
    if read(expected) != actual {
        panic!(
            "not as in {} (-: expected, +: what came):\n{}",
            expected.display(),
            difference(expected, actual)
        );
    }
}

/// What `diff` says, or where there is none, all that came.
fn difference(expected: &Path, actual: &str) -> String {
    let diff = Command::new("diff")
        .arg("-u")
        .arg(expected)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut diff) = diff else {
        return actual.to_owned();
    };
    // It may know enough before it has read everything.
    let _ = diff
        .stdin
        .take()
        .expect("a pipe")
        .write_all(actual.as_bytes());
    let output = diff.wait_with_output().expect("its end is seen");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
