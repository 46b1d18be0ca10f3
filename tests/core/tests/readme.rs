//! The tests that `tests/README.md` names as proofs exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Each Rust test below `folder` as `file::name`.
fn tests_below(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder of tests") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            tests_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            // What stands in the main file of a program is named by the program.
            let main = path.ends_with("main.rs");
            let named = path.parent().filter(|_| main).unwrap_or(&path);
            let file = named.file_stem().expect("a name").to_string_lossy();
            for line in fs::read_to_string(&path).expect("a source").lines() {
                if let Some((name, _)) = line
                    .trim()
                    .strip_prefix("fn ")
                    .and_then(|rest| rest.split_once('('))
                {
                    found.insert(format!("{file}::{name}"));
                }
            }
        }
    }
}

#[test]
fn each_proof_that_the_readme_names_exists() {
    let mut found = BTreeSet::new();
    tests_below(&tests_folder(), &mut found);
    let specs = fs::read_dir(tests_folder().join("isolation/specs")).expect("the specs");
    for spec in specs {
        let path = spec.expect("an entry").path();
        found.insert(format!(
            "isolation::{}",
            path.file_stem().expect("a name").to_string_lossy()
        ));
    }
    let readme = fs::read_to_string(tests_folder().join("README.md")).expect("tests/README.md");
    let named: Vec<&str> = readme
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| {
            code.contains("::")
                && code
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "_:".contains(c))
        })
        .collect();
    assert!(named.len() > 50, "{named:?}");
    let missing: Vec<&str> = named
        .into_iter()
        .filter(|name| !found.contains(*name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
