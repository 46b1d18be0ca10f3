//! What the kernel says of server processes.

use std::time::Duration;

use crate::Result;

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
