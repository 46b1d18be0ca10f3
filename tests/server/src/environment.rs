//! Which Postgres, as whom, and where its files go.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The longest path of a Unix socket, less the `/.s.PGSQL.5432` that Postgres appends.
const LONGEST_SOCKET_DIR: usize = 107 - "/.s.PGSQL.5432".len();

/// Where server programs are, who runs them, and the directory below which clusters are made.
#[derive(Clone)]
pub struct Environment {
    bindir: PathBuf,
    run_as: Vec<String>,
    base: PathBuf,
    sockets: PathBuf,
    version: String,
}

impl Environment {
    /// Read once from the process environment.
    pub fn get() -> &'static Environment {
        static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
        ENVIRONMENT.get_or_init(Environment::read)
    }

    fn read() -> Environment {
        let bindir = match std::env::var_os("HF_PG_BINDIR") {
            Some(dir) => PathBuf::from(dir),
            None => PathBuf::from(output_of(Command::new("pg_config").arg("--bindir"))),
        };
        let version = version_of(&bindir);
        let run_as = run_as();
        let (base, sockets) = directories(&run_as);
        Environment {
            bindir,
            run_as,
            base,
            sockets,
            version,
        }
    }

    /// Another Postgres, by its `bin` directory. Never freed: few tests ask for one.
    pub fn with_bindir(&self, bindir: PathBuf) -> &'static Environment {
        let version = version_of(&bindir);
        Box::leak(Box::new(Environment {
            bindir,
            version,
            ..self.clone()
        }))
    }

    /// What `pg_config` says.
    pub fn pg_config(&self, what: &str) -> String {
        output_of(self.command(self.program("pg_config")).arg(what))
    }

    /// The major version, such as 18.
    pub fn major(&self) -> u32 {
        let digits: String = self
            .version
            .chars()
            .skip_while(|c| !c.is_ascii_digit())
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().expect("postgres --version names a version")
    }

    /// The version line as a file name.
    pub(crate) fn version_slug(&self) -> String {
        self.version
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || c == '.' {
                    c
                } else {
                    '_'
                }
            })
            .collect()
    }

    /// The directory below which clusters are made.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The directory below which socket directories are made: short enough for a socket's path.
    pub(crate) fn sockets(&self) -> &Path {
        &self.sockets
    }

    /// Where Postgres' own programs are.
    pub fn bindir(&self) -> &Path {
        &self.bindir
    }

    /// The path of one of Postgres' own programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bindir.join(name)
    }

    /// Any command, run as the user who owns the clusters.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = prefixed(&self.run_as, program);
        // As on a server where somebody looks for a bug: no error shows a stack trace for that.
        command.env("RUST_BACKTRACE", "1");
        command.current_dir("/");
        command
    }

    /// Runs a command of the cluster's owner to its end; panics with its output when it fails.
    pub fn run(&self, command: &mut Command) {
        output_of(command);
    }

    /// A new directory `NAME-xxxxxx` in `parent`, owned by the cluster's owner.
    pub(crate) fn make_directory(&self, parent: &Path, name: &str) -> PathBuf {
        PathBuf::from(output_of(
            self.command("mktemp")
                .arg("-d")
                .arg(parent.join(format!("{name}-XXXXXX"))),
        ))
    }
}

fn version_of(bindir: &Path) -> String {
    output_of(Command::new(bindir.join("postgres")).arg("--version"))
}

fn prefixed(prefix: &[String], program: impl AsRef<OsStr>) -> Command {
    match prefix.split_first() {
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
        None => Command::new(program),
    }
}

fn run_as() -> Vec<String> {
    match std::env::var("HF_RUNAS") {
        Ok(prefix) => prefix.split_whitespace().map(str::to_owned).collect(),
        Err(_) if is_root() => [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--",
        ]
        .map(str::to_owned)
        .to_vec(),
        Err(_) => Vec::new(),
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// The directory of clusters and that of sockets: what `make` prepared, else below the cache. A cache that the clusters'
/// owner cannot enter (a repository in root's home) is no use to it, and a deep one is too long for a socket.
fn directories(run_as: &[String]) -> (PathBuf, PathBuf) {
    let temporary = std::env::temp_dir().join("harvest_fair-tests");
    let cache = match std::env::var_os("HF_CACHE") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"),
    };
    let base = first_usable(
        run_as,
        [
            of_make("HF_RUN"),
            Some(cache.join("clusters")),
            Some(temporary.clone()),
        ],
    )
    .expect("neither the cache nor the temporary directory can hold a cluster");
    let short = |dir: &PathBuf| dir.join("s-XXXXXX").as_os_str().len() <= LONGEST_SOCKET_DIR;
    let sockets = first_usable(
        run_as,
        [of_make("HF_SOCKETS"), Some(base.clone()), Some(temporary)].map(|dir| dir.filter(short)),
    )
    .expect("no writable directory has a path short enough for a socket");
    (base, sockets)
}

fn of_make(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from)
}

fn first_usable<const N: usize>(run_as: &[String], dirs: [Option<PathBuf>; N]) -> Option<PathBuf> {
    dirs.into_iter()
        .flatten()
        .find_map(|dir| usable(&dir, run_as))
}

/// Makes `dir` if need be; its absolute path if the clusters' owner can make files there.
fn usable(dir: &Path, run_as: &[String]) -> Option<PathBuf> {
    let writable = |dir: &Path| {
        prefixed(run_as, "test")
            .arg("-w")
            .arg(dir)
            .status()
            .is_ok_and(|status| status.success())
    };
    fs::create_dir_all(dir).ok()?;
    let dir = dir.canonicalize().ok()?;
    if !writable(&dir) && is_root() {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).ok()?;
    }
    writable(&dir).then_some(dir)
}

/// What a command printed, trimmed; panics with all of its output when it fails.
fn output_of(command: &mut Command) -> String {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
