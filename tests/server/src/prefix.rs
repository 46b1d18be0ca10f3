//! A copy of an installed Postgres, to put other files into than those of the extension that is installed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Environment;

/// The directories of Postgres' programs, libraries and shared files, laid out as they are in the original, since Postgres
/// finds one from the other. The programs are copied, the rest is links to the original. Removed with this value.
pub struct Prefix {
    environment: &'static Environment,
    root: PathBuf,
    library: PathBuf,
    share: PathBuf,
}

impl Prefix {
    /// A copy of the Postgres in use, without any file of this extension.
    pub fn without_extension() -> Prefix {
        let original = Environment::get();
        let original_of = |what| PathBuf::from(original.pg_config(what));
        let dirs = ["--bindir", "--pkglibdir", "--sharedir"].map(original_of);
        let common = common_ancestor(&dirs);
        let root = original.make_directory(original.base(), "prefix");
        let [bin, library, share] = dirs.map(|dir| {
            let tail = dir.strip_prefix(&common).expect("it is below its ancestor");
            let copy = root.join(tail);
            original.run(original.command("mkdir").arg("-p").arg(&copy));
            // A program looks for the others where it really lies.
            let how = if tail.ends_with("bin") { "-r" } else { "-rs" };
            original.run(
                original
                    .command("cp")
                    .args([how, "-T"])
                    .arg(&dir)
                    .arg(&copy),
            );
            copy
        });
        let prefix = Prefix {
            environment: original.with_bindir(bin),
            root,
            library,
            share,
        };
        for file in prefix.extension_files() {
            remove(&file);
        }
        remove(&prefix.library());
        prefix
    }

    /// A copy of the Postgres in use, with the extension.
    pub fn with_extension() -> Prefix {
        let original = Environment::get();
        let prefix = Prefix::without_extension();
        let library = PathBuf::from(original.pg_config("--pkglibdir")).join("harvest_fair.so");
        install(&library, &prefix.library());
        let share = PathBuf::from(original.pg_config("--sharedir")).join("extension");
        for file in files_of_extension(&share) {
            let name = file.file_name().expect("a file has a name");
            install(&file, &prefix.extension_dir().join(name));
        }
        prefix
    }

    /// The copy as a place to start servers from.
    pub fn environment(&self) -> &'static Environment {
        self.environment
    }

    /// Where the library of the extension belongs.
    pub fn library(&self) -> PathBuf {
        self.library.join("harvest_fair.so")
    }

    /// Where control files and scripts belong.
    pub fn extension_dir(&self) -> PathBuf {
        self.share.join("extension")
    }

    /// The control file and the scripts of the extension.
    pub fn extension_files(&self) -> Vec<PathBuf> {
        files_of_extension(&self.extension_dir())
    }

    /// Writes a control file or script, in place of the one of that name.
    pub fn write(&self, name: &str, content: &str) {
        let path = self.extension_dir().join(name);
        remove(&path);
        fs::write(&path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn files_of_extension(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries
        .map(|entry| entry.expect("a directory can be read").path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| {
                name == "harvest_fair.control" || name.starts_with("harvest_fair--")
            })
        })
        .collect()
}

/// Copies a file so that the servers' owner can read it.
pub fn install(from: &Path, to: &Path) {
    remove(to);
    fs::copy(from, to)
        .unwrap_or_else(|error| panic!("{} to {}: {error}", from.display(), to.display()));
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            panic!("{}: {error}", path.display())
        }
        _ => {}
    }
}

fn common_ancestor(paths: &[PathBuf]) -> PathBuf {
    let mut ancestor = paths[0].clone();
    while !paths.iter().all(|path| path.starts_with(&ancestor)) {
        ancestor.pop();
    }
    ancestor
}
