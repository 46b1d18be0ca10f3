//! Cleans up after a cluster even when the process that started it was killed: a shell that waits for the end of its
//! standard input, which the kernel closes with the process.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::Environment;

/// `$1` data directory, `$2` pg_ctl; the rest is removed at the end.
const SCRIPT: &str = r#"
read -r _
data=$1 pg_ctl=$2
shift 2
if [ -e "$data/postmaster.pid" ]; then "$pg_ctl" stop -D "$data" -m immediate -s -t 30 >/dev/null 2>&1; fi
rm -rf "$@"
"#;

pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Watches over a cluster: when this process ends, or the watchdog is dropped, its server is stopped and its
    /// directories are removed.
    pub(crate) fn start(environment: &Environment, data: &Path, remove: &[&Path]) -> Watchdog {
        let child = environment
            .command("sh")
            .args(["-c", SCRIPT, "watchdog"])
            .arg(data)
            .arg(environment.program("pg_ctl"))
            .args(remove)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C at the terminal must not take the watchdog along with the tests.
            .process_group(0)
            .spawn()
            .expect("a shell can be started");
        Watchdog(child)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
