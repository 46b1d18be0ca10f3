//! What the kernel says of server processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use harvest_fair_server_tests::pid_of;
use postgres::Client;

use crate::Result;

/// Puts a session's server process on the one processor of [`Pinned`]. Where the kernel puts client and server else decides
/// more about the time of a call than what is measured: waking a process on another processor costs as much as a claim.
pub fn pin_session(client: &mut Client) {
    pin(pid_of(client), &one_processor());
}

/// While it lives, the main thread stays on one processor. Threads that it starts meanwhile do so too.
pub struct Pinned(());

impl Pinned {
    pub fn begin() -> Pinned {
        pin(std::process::id() as i32, &one_processor());
        Pinned(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        pin(std::process::id() as i32, &every_processor());
    }
}

fn pin(pid: i32, processors: &str) {
    // Without taskset the numbers are noisier, and that is all.
    let _ = Command::new("taskset")
        .args(["-c", "-p", processors, &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// What this process was given; asked for before the first pin.
fn every_processor() -> String {
    static ALL: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    ALL.get_or_init(allowed).clone()
}

/// The last one: the first has most of the interrupts.
fn one_processor() -> String {
    every_processor()
        .rsplit([',', '-'])
        .next()
        .unwrap_or("0")
        .to_owned()
}

fn allowed() -> String {
    std::fs::read_to_string("/proc/self/status")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .map_or_else(|| "0".to_owned(), |list| list.trim().to_owned())
}

/// Time that these processes have spent on a processor, together.
pub fn cpu_time(pids: &[i32]) -> Result<Duration> {
    let mut nanos = 0;
    for pid in pids {
        let path = format!("/proc/{pid}/schedstat");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let on_cpu: u64 = text
            .split_whitespace()
            .next()
            .ok_or("an empty schedstat")?
            .parse()?;
        nanos += on_cpu;
    }
    Ok(Duration::from_nanos(nanos))
}

/// The machine in a few words.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| -> String {
        text.lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split_once(':'))
            .map_or_else(|| "?".to_owned(), |(_, value)| value.trim().to_owned())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kilobytes: f64 = field(&read("/proc/meminfo"), "MemTotal")
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or(f64::NAN);
    format!(
        "{} ({cores} cores), {:.0} GB of memory, Linux {}",
        field(&read("/proc/cpuinfo"), "model name"),
        kilobytes / 1024.0 / 1024.0,
        read("/proc/sys/kernel/osrelease").trim()
    )
}

/// How busy the machine is (the load average of a minute).
pub fn load() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_whitespace().next().map(str::to_owned))
        .unwrap_or_else(|| "?".to_owned())
}
