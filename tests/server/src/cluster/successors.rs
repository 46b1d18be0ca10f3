//! Clusters that are made from another: a standby, and one of a later major version.

use std::path::Path;

use super::{Cluster, Options, initdb};
use crate::Environment;

impl Cluster {
    /// A standby of this server: started, and following it.
    pub fn standby(&self, options: Options) -> Cluster {
        let copy = |data: &Path| {
            self.environment.run(
                self.environment
                    .command(self.environment.program("pg_basebackup"))
                    .args([
                        "--write-recovery-conf",
                        "--checkpoint=fast",
                        "--no-sync",
                        "-U",
                        "postgres",
                        "-h",
                    ])
                    .arg(&self.socket_dir)
                    .arg("-D")
                    .arg(data),
            );
        };
        let standby = Cluster::make_from(self.environment, &options, false, copy);
        standby.start_server();
        standby
    }

    /// This cluster, whose server has been stopped, made one of a later major version by pg_upgrade, and started.
    pub fn upgraded(&self, environment: &'static Environment, options: Options) -> Cluster {
        let upgrade = |data: &Path| {
            // The library has to be there when the functions are made anew, so it must be preloaded by then.
            environment.run(
                initdb(environment)
                    .args([
                        "--no-data-checksums",
                        "-c",
                        "shared_preload_libraries=harvest_fair",
                        "-D",
                    ])
                    .arg(data),
            );
            environment.run(
                environment
                    .command("sh")
                    // It only names the log that says what was wrong.
                    .args([
                        "-c",
                        r#""$@" || { grep -h -A5 error: pg_upgrade_output.d/*/log/*_dump_*.log; exit 1; }"#,
                    ])
                    .arg("pg_upgrade")
                    .arg(environment.program("pg_upgrade"))
                    .current_dir(data)
                    .args(["--no-sync", "-U", "postgres", "-b"])
                    .arg(self.environment.bindir())
                    .arg("-B")
                    .arg(environment.bindir())
                    .arg("-d")
                    .arg(self.data())
                    .arg("-D")
                    .arg(data)
                    .arg("-s")
                    .arg(&self.socket_dir),
            );
        };
        let upgraded = Cluster::make_from(environment, &options, false, upgrade);
        upgraded.start_server();
        upgraded
    }

    /// Makes a standby the primary, and waits until it is.
    pub fn promote(&self) {
        self.environment.run(self.pg_ctl("promote").arg("-w"));
    }
}
