//! One look at the board and the tables: what is not the same in both.

use std::collections::HashMap;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys;
use pgrx::prelude::ToIsoString;

use super::state::of_scope;
use crate::board::{BoardSettings, now, shmem, stored_key, stored_priority};
use crate::sfq::{KeyView, QueueId, QueueState, Row, Sched, Snapshot};
use crate::tasks::catalog::column;
use crate::tasks::load::{read_overrides, read_settings};
use crate::tasks::pinned::NEVER;
use crate::tasks::rules;
use crate::tasks::table::{TaskTable, Tid};

/// How much later than it should the board may look for what has run out (µs).
const LATE: i64 = 1_000_000;
/// Rows that are looked at for one that nobody holds.
const LOOK_AT: usize = 100;

/// Something that is not the same on the board and in the tables.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Difference {
    pub queue: Option<String>,
    pub priority: Option<i16>,
    pub key: Option<String>,
    pub what: String,
    pub on_board: Option<String>,
    pub in_table: Option<String>,
    /// Changes when something happens at this place of the board, even if it looks the same afterwards.
    pub stamp: u32,
}

/// A key of a queue on the board.
struct Known {
    running: i32,
    changes: u16,
    in_flight: u32,
    weight: Option<f64>,
}

/// A queue of the board, being compared.
struct Compared<'a> {
    table: &'a TaskTable,
    board: &'a Sched<'a>,
    queue: QueueId,
    name: &'a str,
    keys: HashMap<String, Known>,
    found: &'a mut Vec<Difference>,
}

/// Compares the loaded queues of this database. One that is not loaded is read from the tables when it is.
pub fn look(table: &TaskTable, memory: &mut Snapshot) -> Vec<Difference> {
    let mut found = Vec::new();
    let queues = of_scope(table.catalog.scope());
    let Some(board) = shmem::snapshot(memory) else {
        return found;
    };
    let is_quiet = nobody_else_is_at_work();
    let mut keys: HashMap<QueueId, HashMap<String, Known>> = HashMap::new();
    board.keys(|queue, view| {
        let known = Known::of(&view);
        let name = view.key.as_str().to_owned();
        keys.entry(queue).or_default().insert(name, known);
    });
    for (queue, name) in &queues {
        if board.queue_state(*queue) != Some(QueueState::Loaded) {
            continue;
        }
        let mut compared = Compared {
            table,
            board: &board,
            queue: *queue,
            name,
            keys: keys.remove(queue).unwrap_or_default(),
            found: &mut found,
        };
        compared.order();
        compared.settings();
        compared.weights();
        compared.lanes();
        compared.running();
        compared.due();
        if is_quiet {
            compared.in_flight();
        }
    }
    found
}

/// Whether no other session of this database is within a transaction.
fn nobody_else_is_at_work() -> bool {
    let mut count = 0;
    // SAFETY: gives a list in the current memory context; the count is written before it returns.
    unsafe {
        let none = pg_sys::InvalidTransactionId;
        let list = pg_sys::GetCurrentVirtualXIDs(none, false, false, 0, &mut count);
        pg_sys::pfree(list.cast());
    }
    count == 0
}

impl Known {
    fn of(view: &KeyView<'_>) -> Known {
        Known {
            running: view.running,
            changes: view.changes,
            in_flight: view.in_flight,
            weight: view.weight,
        }
    }
}

impl Compared<'_> {
    fn report(
        &mut self,
        key: Option<&str>,
        what: &str,
        on_board: Option<String>,
        in_table: Option<String>,
    ) -> &mut Difference {
        self.found.push(Difference {
            queue: Some(self.name.to_owned()),
            priority: None,
            key: key.map(str::to_owned),
            what: what.to_owned(),
            on_board,
            in_table,
            stamp: 0,
        });
        let last = self.found.len() - 1;
        &mut self.found[last]
    }

    /// The core's own check of order, clocks and passes.
    fn order(&mut self) {
        if let Some(fault) = self.board.fault_of(self.queue) {
            self.report(None, "order", Some(fault), None);
        }
    }

    fn settings(&mut self) {
        let on_board = shown(&BoardSettings::of(self.board, self.queue));
        let in_table = shown(&read_settings(self.name));
        for ((setting, on_board), (_, in_table)) in on_board.into_iter().zip(in_table) {
            if on_board != in_table {
                self.report(None, &format!("setting {setting}"), on_board, in_table);
            }
        }
    }

    fn weights(&mut self) {
        let stored: HashMap<String, f64> = read_overrides(self.name).into_iter().collect();
        let mut both: HashMap<String, (Option<f64>, Option<f64>)> = HashMap::new();
        for (key, known) in &self.keys {
            both.insert(key.clone(), (known.weight, None));
        }
        for (key, weight) in stored {
            both.entry(key).or_default().1 = Some(weight);
        }
        for (key, (on_board, in_table)) in both {
            if on_board != in_table {
                let text = |weight: Option<f64>| weight.map(|weight| weight.to_string());
                self.report(Some(&key), "weight", text(on_board), text(in_table));
            }
        }
    }

    /// A pending row must be at or after its lane's cursor, and its key must not sleep longer than until it is due.
    fn lanes(&mut self) {
        let mut firsts: Vec<(i16, String, u8, Row)> = Vec::new();
        self.table
            .walk_lanes(self.name, |priority, key, band, row| {
                firsts.push((priority, key.to_owned(), band, row));
            });
        for (priority, key, band, row) in firsts {
            if rules::unservable(priority, &key).is_some() {
                continue;
            }
            if self.keys.get(&key).is_some_and(|known| known.in_flight > 0) {
                continue;
            }
            let lane = self.board.lane_view(
                self.queue,
                stored_priority(priority),
                &stored_key(&key),
                band,
            );
            let (on_board, stamp) = match lane {
                None => ("unknown".to_owned(), 0),
                Some(lane) if !lane.is_open => ("no task".to_owned(), lane.generation),
                Some(lane) if row.pos < lane.cursor => (
                    format!(
                        "none before task {} due {}",
                        lane.cursor.id,
                        time(lane.cursor.due)
                    ),
                    lane.generation,
                ),
                Some(lane) if row.pos < lane.head && !lane.is_held => (
                    format!("none before {}", time(lane.head.due)),
                    lane.generation,
                ),
                Some(_) => continue,
            };
            let in_table = format!("task {} due {}", row.pos.id, time(row.pos.due));
            let difference = self.report(Some(&key), "pending", Some(on_board), Some(in_table));
            difference.priority = Some(priority);
            difference.stamp = stamp;
        }
    }

    /// Running counts, and caps: of the tasks of a key that run, none beyond the cap may have been started since it is set.
    fn running(&mut self) {
        let mut started: HashMap<String, Vec<i64>> = HashMap::new();
        self.table.leases(self.name, |row| {
            let key: String = row.get(column::FAIRNESS_KEY).unwrap_or_default();
            let at = row.micros(column::STARTED_AT).unwrap_or(i64::MIN);
            started.entry(key).or_default().push(at);
            true
        });
        let cap = self.board.policy(self.queue).key_max_running;
        let since = shmem::extras(self.queue).since();
        for (key, started) in &mut started {
            started.sort_unstable();
            let beyond = cap
                .and_then(|cap| started.get(cap as usize..))
                .unwrap_or(&[]);
            let late = beyond.iter().filter(|at| **at > since).count();
            if let (Some(cap), 1..) = (cap, late) {
                let in_table = format!("{} running", started.len());
                self.report(Some(key), "cap", Some(cap.to_string()), Some(in_table));
            }
            self.keys.entry(key.clone()).or_insert(Known {
                running: 0,
                changes: 0,
                in_flight: 0,
                weight: None,
            });
        }
        let mut wrong = Vec::new();
        for (key, known) in &self.keys {
            let in_table = started.get(key).map_or(0, Vec::len);
            if known.in_flight == 0 && usize::try_from(known.running) != Ok(in_table) {
                wrong.push((key.clone(), known.running, in_table, known.changes));
            }
        }
        for (key, on_board, in_table, changes) in wrong {
            let text = (Some(on_board.to_string()), Some(in_table.to_string()));
            let difference = self.report(Some(&key), "running", text.0, text.1);
            difference.stamp = changes.into();
        }
    }

    /// The board must look for expired leases and ended pins in time, and know that there are pinned rows at all.
    fn due(&mut self) {
        let mut leases = Vec::new();
        self.table.leases(self.name, |row| {
            let until = row.micros(column::LEASE_UNTIL).unwrap_or(i64::MAX);
            leases.push((until, row.tid()));
            leases.len() < LOOK_AT
        });
        self.compare_due("lease", self.board.lease_due(self.queue), leases);
        let mut pins = Vec::new();
        self.table.pins(self.name, |tid, until| {
            pins.push((until, tid));
        });
        pins.sort_unstable_by_key(|(until, _)| *until);
        pins.truncate(LOOK_AT);
        self.compare_due("pin", self.board.unpin_due(self.queue), pins);
    }

    fn compare_due(&mut self, what: &str, on_board: i64, rows: Vec<(i64, Tid)>) {
        // A row that somebody holds is being settled or taken back.
        let free = rows.into_iter().find(|(_, tid)| !self.table.is_held(*tid));
        let Some((until, _)) = free else { return };
        if on_board > until.max(now().saturating_add(LATE)) {
            let text = |at: i64| Some(if at >= NEVER { "none".into() } else { time(at) });
            let in_table = if until == NEVER {
                Some("for good".into())
            } else {
                text(until)
            };
            self.report(None, &format!("first {what}"), text(on_board), in_table);
        }
    }

    /// No claim can be under way while nobody is at work.
    fn in_flight(&mut self) {
        let claims = |(key, known): (&String, &Known)| {
            (known.in_flight > 0).then(|| (key.clone(), known.in_flight))
        };
        let left: Vec<(String, u32)> = self.keys.iter().filter_map(claims).collect();
        for (key, in_flight) in left {
            self.report(
                Some(&key),
                "under way",
                Some(in_flight.to_string()),
                Some("0".into()),
            );
        }
    }
}

/// The settings that the board knows, as text.
fn shown(settings: &BoardSettings) -> [(&'static str, Option<String>); 10] {
    let BoardSettings {
        policy,
        lease,
        queue_weight,
    } = settings;
    let number = |n: Option<f64>| n.map(|n| n.to_string());
    let seconds = |micros: i64| Some(format!("{} s", micros as f64 / 1e6));
    [
        ("queue_weight", number(*queue_weight)),
        ("rate_limit", number(policy.rate_limit)),
        ("key_rate_limit", number(policy.key_rate_limit)),
        (
            "key_max_running",
            policy.key_max_running.map(|cap| cap.to_string()),
        ),
        ("lease", lease.and_then(seconds)),
        (
            "priority_aging",
            seconds(policy.aging).filter(|_| policy.aging > 0),
        ),
        ("new_start_handicap", seconds(policy.handicap)),
        (
            "charge",
            Some(
                if policy.by_seconds {
                    "seconds"
                } else {
                    "claims"
                }
                .into(),
            ),
        ),
        ("group_separator", policy.separator.map(String::from)),
        ("paused", Some(policy.paused.to_string())),
    ]
}

/// A point in time as text.
fn time(micros: i64) -> String {
    match TimestampWithTimeZone::try_from(micros) {
        Ok(at) => at.to_iso_string(),
        Err(_) => "never".into(),
    }
}
