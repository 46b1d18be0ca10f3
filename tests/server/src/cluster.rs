//! One private server: start, stop, restart, crash.

mod successors;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use postgres::{Client, Config, NoTls};

use crate::watchdog::Watchdog;
use crate::{Database, Environment, holds_within};

const TAIL_LINES: usize = 60;
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Options {
    preload: bool,
    settings: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Options {
        let settings = [
            // Nothing here outlives the machine, so nothing has to reach the disk.
            ("fsync", "off"),
            ("max_connections", "100"),
            ("max_prepared_transactions", "10"),
            // One janitor for every database that tests use at the same time.
            ("max_worker_processes", "64"),
            ("shared_buffers", "256MB"),
            ("max_wal_size", "2GB"),
            ("log_line_prefix", "%m [%p] %d "),
        ];
        Options {
            preload: true,
            settings: settings.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec(),
        }
    }
}

impl Options {
    pub fn new() -> Options {
        Options::default()
    }

    /// A line of postgresql.conf; a later one for the same name wins.
    pub fn set(mut self, name: &str, value: impl ToString) -> Options {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Write through to the disk as a production server does.
    pub fn fsync(self, on: bool) -> Options {
        self.set("fsync", if on { "on" } else { "off" })
    }

    /// Leave harvest_fair out of shared_preload_libraries.
    pub fn without_preload(mut self) -> Options {
        self.preload = false;
        self
    }

    fn as_conf(&self, socket_dir: &Path) -> String {
        let mut conf = format!(
            "listen_addresses = ''\nunix_socket_directories = '{}'\n",
            socket_dir.display()
        );
        if self.preload {
            conf.push_str("shared_preload_libraries = 'harvest_fair'\n");
        }
        for (name, value) in &self.settings {
            let _ = writeln!(conf, "{name} = '{}'", value.replace('\'', "''"));
        }
        conf
    }
}

/// How a server is told to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Waits for the clients to leave.
    Smart,
    /// Disconnects them.
    Fast,
    /// Leaves the crash recovery to the next start.
    Immediate,
}

impl Shutdown {
    fn as_str(self) -> &'static str {
        match self {
            Shutdown::Smart => "smart",
            Shutdown::Fast => "fast",
            Shutdown::Immediate => "immediate",
        }
    }
}

/// A private server with its own data and socket directory. Dropping it stops the server and removes both; so does the
/// end of this process, however it comes. When the dropping thread panics, the end of the log is printed and the log kept.
pub struct Cluster {
    environment: &'static Environment,
    directory: PathBuf,
    socket_dir: PathBuf,
    watchdog: Option<Watchdog>,
    databases: AtomicUsize,
    shared: bool,
}

impl Cluster {
    /// Makes a cluster, starts its server and waits until it takes connections.
    pub fn start(options: Options) -> Cluster {
        Cluster::start_on(Environment::get(), options)
    }

    /// The same with the programs of another Postgres of the same version.
    pub fn start_on(environment: &'static Environment, options: Options) -> Cluster {
        let cluster = Cluster::make(environment, &options, false);
        cluster.start_server();
        cluster
    }

    /// The cluster that the tests of one binary share, started by the first that asks. Only for tests that leave the
    /// server running.
    pub fn shared() -> &'static Cluster {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        Cluster::shared_in(&SHARED, Options::default)
    }

    /// A shared cluster with settings of its own, kept in a static of the caller's.
    pub fn shared_in(
        cell: &'static OnceLock<Cluster>,
        options: impl FnOnce() -> Options,
    ) -> &'static Cluster {
        cell.get_or_init(|| {
            let cluster = Cluster::make(Environment::get(), &options(), true);
            cluster.start_server();
            cluster
        })
    }

    fn make(environment: &'static Environment, options: &Options, shared: bool) -> Cluster {
        let template = template(environment);
        Cluster::make_from(environment, options, shared, |data| {
            environment.run(environment.command("cp").arg("-a").arg(&template).arg(data));
        })
    }

    /// `fill` makes the data directory.
    fn make_from(
        environment: &'static Environment,
        options: &Options,
        shared: bool,
        fill: impl FnOnce(&Path),
    ) -> Cluster {
        let directory = environment.make_directory(environment.base(), "c");
        let socket_dir = environment.make_directory(environment.sockets(), "s");
        let data = directory.join("data");
        let watchdog = Watchdog::start(environment, &data, &[&directory, &socket_dir]);
        fill(&data);
        let cluster = Cluster {
            environment,
            directory,
            socket_dir,
            watchdog: Some(watchdog),
            databases: AtomicUsize::new(0),
            shared,
        };
        cluster.append_conf(&options.as_conf(&cluster.socket_dir));
        cluster
    }

    /// Appends lines to postgresql.conf; they count from the next reload or restart on.
    pub fn append_conf(&self, lines: &str) {
        let mut tee = self
            .environment
            .command("tee")
            .arg("-a")
            .arg(self.data().join("postgresql.conf"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("tee can be started");
        let mut stdin = tee.stdin.take().expect("tee's input is a pipe");
        std::io::Write::write_all(&mut stdin, lines.as_bytes()).expect("tee reads its input");
        drop(stdin);
        assert!(
            tee.wait().is_ok_and(|status| status.success()),
            "tee failed"
        );
    }

    /// Starts the server of a stopped cluster and waits until it takes connections.
    pub fn start_server(&self) {
        // -W: pg_ctl itself would look only every tenth of a second.
        let mut start = self.pg_ctl("start");
        start.arg("-W").arg("-l").arg(self.log_path());
        let status = start.stdin(Stdio::null()).stdout(Stdio::null()).status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "{start:?} failed"
        );
        if !holds_within(START_TIMEOUT, || self.try_connect("postgres").is_ok()) {
            panic!(
                "the server did not start within {START_TIMEOUT:?}:\n{}",
                self.log_tail("")
            );
        }
    }

    /// Stops the server and waits for its end.
    pub fn stop(&self, how: Shutdown) {
        self.environment.run(
            self.pg_ctl("stop")
                .args(["-w", "-t", "60", "-m", how.as_str()]),
        );
    }

    /// Tells the server to stop without waiting for it.
    pub fn begin_stop(&self, how: Shutdown) {
        self.environment
            .run(self.pg_ctl("stop").args(["-W", "-m", how.as_str()]));
    }

    pub fn restart(&self, how: Shutdown) {
        self.stop(how);
        self.start_server();
    }

    /// Makes the running server read its configuration again.
    pub fn reload(&self) {
        self.environment.run(&mut self.pg_ctl("reload"));
    }

    fn pg_ctl(&self, verb: &str) -> Command {
        let mut command = self.environment.command(self.environment.program("pg_ctl"));
        command.args(["-s", verb, "-D"]).arg(self.data());
        command
    }

    /// `kill -9`: no handler of the process runs. The server then restarts all of its processes by itself; see
    /// [`Cluster::wait_for_recovery`].
    pub fn kill_9(&self, pid: i32) {
        self.signal(pid, "KILL");
    }

    /// Sends a signal to one of the server's processes.
    pub fn signal(&self, pid: i32, signal: &str) {
        self.environment.run(self.environment.command("kill").args([
            "-s",
            signal,
            &pid.to_string(),
        ]));
    }

    /// From now on one of the server's processes can write into no file beyond `bytes`, as if its disk were full.
    pub fn limit_files(&self, pid: i32, bytes: u64) {
        self.environment
            .run(self.environment.command("prlimit").args([
                "--pid",
                &pid.to_string(),
                &format!("--fsize={bytes}"),
            ]));
    }

    /// Waits until the server takes connections again after a crash. `witness` is a connection from before it, which
    /// the crash ends: only then can a new connection be trusted to be one of the new life.
    pub fn wait_for_recovery(&self, mut witness: Client) {
        let ended = holds_within(START_TIMEOUT, || witness.batch_execute("SELECT 1").is_err());
        assert!(ended, "the crash did not end the other connections");
        let back = holds_within(START_TIMEOUT, || self.try_connect("postgres").is_ok());
        assert!(
            back,
            "no recovery within {START_TIMEOUT:?}:\n{}",
            self.log_tail("")
        );
    }

    /// How to connect as the superuser: a start for connections with settings of their own.
    pub fn config(&self, database: &str) -> Config {
        let mut config = Config::new();
        config
            .host_path(&self.socket_dir)
            .port(5432)
            .user("postgres")
            .dbname(database)
            .application_name(std::thread::current().name().unwrap_or("test"));
        config
    }

    pub fn try_connect(&self, database: &str) -> Result<Client, postgres::Error> {
        self.config(database).connect(NoTls)
    }

    /// A superuser's connection to a database.
    #[track_caller]
    pub fn connect_db(&self, database: &str) -> Client {
        self.try_connect(database).unwrap_or_else(|error| {
            panic!(
                "cannot connect to {database}: {error}\n{}",
                self.log_tail(database)
            )
        })
    }

    /// A superuser's connection to the database `postgres`, which has no extension.
    #[track_caller]
    pub fn connect(&self) -> Client {
        self.connect_db("postgres")
    }

    /// A fresh database with the extension, dropped with the value that is returned.
    #[track_caller]
    pub fn database(&self) -> Database<'_> {
        let database = self.empty_database();
        database
            .connect()
            .batch_execute("CREATE EXTENSION harvest_fair")
            .unwrap_or_else(|error| {
                panic!(
                    "CREATE EXTENSION: {error:?}\n{}",
                    self.log_tail(database.name())
                )
            });
        database
    }

    /// A fresh database without the extension.
    #[track_caller]
    pub fn empty_database(&self) -> Database<'_> {
        // From one template at a time: CREATE DATABASE refuses a template that somebody else is connected to.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn: MutexGuard<()> = ONE_AT_A_TIME
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let name = format!("t{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.connect()
            .batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0"))
            .unwrap_or_else(|error| panic!("CREATE DATABASE {name}: {error:?}"));
        Database::new(self, name)
    }

    pub fn environment(&self) -> &'static Environment {
        self.environment
    }

    pub fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        std::fs::read(self.log_path())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// The last lines of the log, of one database where it is named.
    pub(crate) fn log_tail(&self, database: &str) -> String {
        let log = self.log();
        let lines: Vec<&str> = match database {
            "" => log.lines().collect(),
            name => log
                .lines()
                .filter(|line| line.contains(&format!("] {name} ")))
                .collect(),
        };
        let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
        format!("--- the server's last words ---\n{tail}\n---")
    }

    /// Copies the log to where it outlives the cluster; returns the place.
    fn keep_log(&self) -> Option<PathBuf> {
        let name = self.directory.file_name()?.to_str()?;
        let kept = self.environment.base().join(format!("{name}.log"));
        std::fs::copy(self.log_path(), &kept).ok()?;
        Some(kept)
    }

    /// To be called while a test that used this cluster panics.
    pub(crate) fn mourn(&self, database: &str) {
        eprintln!("{}", self.log_tail(database));
        if let Some(kept) = self.keep_log() {
            eprintln!("the whole log: {}", kept.display());
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.shared {
            self.mourn("");
        }
        drop(self.watchdog.take());
    }
}

/// A data directory straight from initdb, made once for each version of Postgres and copied for each cluster.
fn template(environment: &Environment) -> PathBuf {
    static MAKING: Mutex<()> = Mutex::new(());
    let _turn = MAKING.lock().unwrap_or_else(|poison| poison.into_inner());
    let template = environment
        .base()
        .join(format!("template-{}", environment.version_slug()));
    if template.exists() {
        return template;
    }
    let fresh = environment.make_directory(environment.base(), "initdb");
    let data = fresh.join("data");
    environment.run(initdb(environment).arg("-D").arg(&data));
    // Renamed into place, so that nobody ever sees half a template; another process may have been faster.
    let renamed = environment
        .command("mv")
        .args(["-T", "-n"])
        .arg(&data)
        .arg(&template)
        .status();
    assert!(
        renamed.is_ok_and(|status| status.success()) || template.exists(),
        "cannot move {data:?} to {template:?}"
    );
    environment.run(environment.command("rm").arg("-rf").arg(&fresh));
    template
}

fn initdb(environment: &Environment) -> Command {
    let mut command = environment.command(environment.program("initdb"));
    command
        .args(["--no-sync", "--auth=trust", "--username=postgres"])
        .args(["--encoding=UTF8", "--locale=C"]);
    command
}
