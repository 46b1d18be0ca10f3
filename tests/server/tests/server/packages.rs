//! What is given away: the Debian package and the source archive.
//!
//! HF_DEB and HF_DIST name them, as `make test` has built them from this source for the Postgres in use. Without them, or
//! without dpkg, the tests say so and pass.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harvest_fair_server_tests::{
    Cluster, Environment, Options, Prefix, claim, complete, enqueue, install, keys_of, one,
};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The file that a variable names.
fn built(variable: &str) -> Option<PathBuf> {
    let file = std::env::var_os(variable).map(PathBuf::from);
    if file.is_none() {
        println!("{variable} is not set: what it names is not tested here");
    }
    file
}

/// What a command printed; panics with all of its output when it fails.
#[track_caller]
fn output_of(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("it prints UTF-8")
}

/// The regular files below a folder, by their path from it.
fn files_below(folder: &Path) -> Vec<String> {
    let list = output_of(
        Command::new("find")
            .arg(folder)
            .args(["-type", "f", "-printf", "%P\n"]),
    );
    let mut files: Vec<String> = list.lines().map(str::to_owned).collect();
    files.sort();
    files
}

/// A root folder with a dpkg of its own, which knows what is installed here, and Postgres of this major version.
struct Root(PathBuf);

impl Root {
    fn new(major: u32) -> Root {
        let name = format!("harvest_fair-root-{}", std::process::id());
        let root = Root(std::env::temp_dir().join(name));
        let dpkg = root.0.join("var/lib/dpkg");
        for folder in ["info", "updates", "triggers"] {
            std::fs::create_dir_all(dpkg.join(folder)).expect("a folder can be made");
        }
        let here = std::fs::read_to_string("/var/lib/dpkg/status").expect("dpkg is used here");
        let here: String = here
            .split_inclusive("\n\n")
            .filter(|package| !package.starts_with("Package: postgresql"))
            .collect();
        let postgres = format!(
            "\nPackage: postgresql-{major}\nStatus: install ok installed\nMaintainer: x\nArchitecture: all\n\
             Version: {major}.0-1\nDescription: a stand-in\n"
        );
        std::fs::write(dpkg.join("status"), here + &postgres).expect("a file can be written");
        root
    }

    #[track_caller]
    fn dpkg(&self, arguments: &[&str]) {
        let mut dpkg = Command::new("dpkg");
        dpkg.arg(format!("--root={}", self.0.display()))
            .args(arguments);
        output_of(&mut dpkg);
    }

    /// What is installed in it.
    fn files(&self) -> Vec<String> {
        let all = files_below(&self.0);
        all.into_iter()
            .filter(|file| !file.starts_with("var/lib/dpkg"))
            .collect()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_debian_package_gives_a_bare_postgres_the_extension_and_takes_it_away_again() {
    let Some(deb) = built("HF_DEB") else { return };
    let major = Environment::get().major();
    let (deb, package) = (
        deb.to_str().expect("UTF-8"),
        format!("postgresql-{major}-harvest-fair"),
    );
    let root = Root::new(major);
    // As another user than root, dpkg may not give files to root: then they are only unpacked.
    let is_root = output_of(Command::new("id").arg("-u")).trim() == "0";
    if is_root {
        root.dpkg(&["-i", deb]);
    } else {
        output_of(Command::new("dpkg-deb").args(["-x", deb]).arg(&root.0));
    }

    let library = format!("usr/lib/postgresql/{major}/lib/harvest_fair.so");
    let share = format!("usr/share/postgresql/{major}/extension/");
    let doc = format!("usr/share/doc/{package}/");
    let files = root.files();
    for file in [
        "README.md.gz",
        "changelog.gz",
        "copyright",
        "examples/python/worker.py",
    ] {
        assert!(
            files.contains(&format!("{doc}{file}")),
            "no {file} in {files:#?}"
        );
    }
    let licence =
        std::fs::read_to_string(root.0.join(format!("{doc}copyright"))).expect("it can be read");
    assert!(
        licence.contains("WITHOUT FEE") || licence.contains("without fee"),
        "{licence}"
    );
    let sections = output_of(
        Command::new("readelf")
            .args(["-SW"])
            .arg(root.0.join(&library)),
    );
    assert!(!sections.contains(".debug_info"), "it is not stripped");
    // Debian's Postgres looks for them right there.
    let bindir = Environment::get().bindir();
    if bindir.ends_with(format!("usr/lib/postgresql/{major}/bin")) {
        assert!(
            Environment::get()
                .pg_config("--pkglibdir")
                .ends_with(&format!("usr/lib/postgresql/{major}/lib"))
        );
        assert!(
            Environment::get()
                .pg_config("--sharedir")
                .ends_with(&format!("usr/share/postgresql/{major}"))
        );
    }

    let prefix = Prefix::without_extension();
    install(&root.0.join(&library), &prefix.library());
    let scripts: Vec<&String> = files
        .iter()
        .filter(|file| file.starts_with(&share))
        .collect();
    assert!(scripts.len() >= 2, "{files:#?}");
    for script in scripts {
        let name = script.strip_prefix(&share).expect("it starts so");
        install(&root.0.join(script), &prefix.extension_dir().join(name));
    }
    let cluster = Cluster::start_on(prefix.environment(), Options::new());
    let db = cluster.database();
    let mut client = db.connect();
    for key in ["A", "A", "B"] {
        enqueue(&mut client, "q", Some(key));
    }
    let tasks = claim(&mut client, "q", "w", 3);
    assert_eq!(keys_of(&tasks), ["A", "B", "A"]);
    assert!(complete(&mut client, &tasks[0]));
    let version: String = one(
        &mut client,
        "SELECT extversion FROM pg_extension WHERE extname = 'harvest_fair'",
        &[],
    );
    let name = Path::new(deb)
        .file_name()
        .and_then(|name| name.to_str())
        .expect("UTF-8");
    assert!(
        name.starts_with(&format!("{package}_{version}-1_")),
        "{name}"
    );
    // The image is made from the package of this name.
    let dockerfile = std::fs::read_to_string(format!("{ROOT}/Dockerfile")).expect("it can be read");
    assert!(dockerfile.contains("COPY dist/postgresql-${PG_MAJOR}-harvest-fair_*.deb "));

    if is_root {
        root.dpkg(&["-r", &package]);
        assert_eq!(root.files(), [] as [&str; 0]);
    }
}

#[test]
fn the_source_archive_is_what_is_committed_with_a_meta_json_of_the_same_version() {
    let Some(archive) = built("HF_DIST") else {
        return;
    };
    let names = "import json, sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(json.dumps([n for n in z.namelist() if n[-1] != '/']))";
    let names = output_of(Command::new("python3").args(["-c", names]).arg(&archive));
    let names: Vec<String> = serde_json::from_str(&names).expect("a list of names");
    let committed = output_of(Command::new("git").args([
        "-C",
        ROOT,
        "ls-tree",
        "-r",
        "--name-only",
        "--full-tree",
        "HEAD",
    ]));
    let version: String = one(
        &mut Cluster::shared().connect(),
        "SELECT default_version FROM pg_available_extensions WHERE name = 'harvest_fair'",
        &[],
    );
    let mut expected: Vec<String> = committed
        .lines()
        .chain(["META.json"])
        .map(|file| format!("harvest_fair-{version}/{file}"))
        .collect();
    let mut names = names;
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    let meta =
        "import sys, zipfile; print(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())";
    let meta = output_of(
        Command::new("python3")
            .args(["-c", meta])
            .arg(&archive)
            .arg(format!("harvest_fair-{version}/META.json")),
    );
    let meta: Value = serde_json::from_str(&meta).expect("META.json is JSON");
    assert_eq!(meta["version"], version.as_str());
    assert_eq!(
        meta["provides"]["harvest_fair"]["version"],
        version.as_str()
    );
}

#[test]
fn a_meta_json_that_pgxn_would_refuse_is_refused() {
    let good = std::fs::read_to_string(format!("{ROOT}/META.json.in")).expect("it can be read");
    let good = good
        .replace("@VERSION@", "1.2.3")
        .replace("@RELEASE_STATUS@", "stable");
    let good: Value = serde_json::from_str(&good).expect("it is JSON");
    let folder = std::env::temp_dir().join(format!("harvest_fair-meta-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("sql")).expect("a folder can be made");
    for file in ["README.md", "sql/harvest_fair--1.2.3.sql"] {
        std::fs::write(folder.join(file), "").expect("a file can be written");
    }
    let complaint = |change: &dyn Fn(&mut Value)| {
        let mut meta = good.clone();
        change(&mut meta);
        let file = folder.join("META.json");
        std::fs::write(&file, meta.to_string()).expect("a file can be written");
        let check = Command::new("python3")
            .arg(format!("{ROOT}/scripts/check-meta.py"))
            .arg(&file)
            .arg(&folder)
            .output()
            .expect("python3 is there");
        let said = String::from_utf8_lossy(&check.stderr).into_owned();
        assert_eq!(check.status.success(), said.is_empty(), "{said}");
        said
    };
    assert_eq!(complaint(&|_| {}), "");
    for field in [
        "name",
        "abstract",
        "version",
        "maintainer",
        "license",
        "provides",
        "meta-spec",
    ] {
        let said = complaint(&|meta| {
            meta.as_object_mut().expect("an object").remove(field);
        });
        assert!(said.contains(field), "without {field}: {said}");
    }
    assert!(complaint(&|meta| meta["version"] = "1.2".into()).contains("version"));
    assert!(complaint(&|meta| meta["licence"] = "x".into()).contains("licence"));
    assert!(
        complaint(&|meta| meta["provides"]["harvest_fair"]["file"] = "x".into()).contains("file x")
    );
    let _ = std::fs::remove_dir_all(&folder);
}
