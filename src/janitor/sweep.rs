//! The sweep: finds pending rows that the board does not know of (prepared transactions, sessions without triggers, keys
//! for which the board had no room), and running counts, weights and settings that differ from the tables.
//!
//! A row that looks missed may just be on its way: claimed but not committed, or committed by a session that has not
//! yet told the board. So what looks missed is looked at again after a pause, and healed if it is still there, nobody
//! holds it, and nothing has happened in its lane.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::guard::{for_each, guarded, of_queue, round};
use super::news;
use super::policy::{find_stale, tell};
use crate::board::{self, now, shmem, stored_key, stored_priority, wait};
use crate::errors::Error;
use crate::observe::state::of_scope;
use crate::sfq::{QueueId, QueueState, Row, RunningCount, Sched};
use crate::tasks::load::{load_if_free, schedule_reaping};
use crate::tasks::probe::LaneKey;
use crate::tasks::rules;
use crate::tasks::table::{TaskTable, TupleLock};

/// How long a row must look missed.
const PAUSE: Duration = Duration::from_millis(50);
/// Lanes closed under one hold of the lock.
const LANES_A_HOLD: usize = 256;

struct Suspect {
    priority: i16,
    key: String,
    band: u8,
    row: Row,
    generation: u32,
}

/// What the board knows of a queue besides its tiers.
#[derive(Default)]
struct Aside {
    weights: HashMap<String, f64>,
    /// Keys with running tasks that stand in no tier.
    running: Vec<String>,
}

/// Sweeps all queues of a database. True if the board had no room for something.
pub fn sweep(scope: u64) -> bool {
    let mut in_table = Vec::new();
    guarded("look for queues", || {
        in_table = round(|| TaskTable::open().map_or_else(|_| Vec::new(), |table| table.queues()));
    });
    for_each("load the tasks", &in_table, String::as_str, |name| {
        let Ok(table) = TaskTable::open() else { return };
        // A queue for which the board has no room stays in the table until there is.
        if let Err(broken @ Error::Name { .. }) = load_if_free(&table, name) {
            news::broken(name, Some(&broken));
        }
    });
    let queues = of_scope(scope);
    let mut asides = HashMap::<QueueId, Aside>::new();
    board::with(|sched| {
        sched.keys(|queue, view| {
            let running = view.is_aside && view.running > 0;
            if !running && view.weight.is_none() {
                return;
            }
            let (aside, key) = (asides.entry(queue).or_default(), view.key.as_str());
            if let Some(weight) = view.weight {
                aside.weights.insert(key.to_owned(), weight);
            }
            if running {
                aside.running.push(key.to_owned());
            }
        });
    });
    let mut full = false;
    for (queue, name) in queues {
        if super::stopping() {
            break;
        }
        if board::with(|sched| sched.queue_state(queue)) != Some(QueueState::Loaded) {
            continue;
        }
        let aside = asides.remove(&queue).unwrap_or_default();
        guarded(&of_queue("find missed tasks", &name), || {
            full |= sweep_queue(queue, &name, aside);
        });
    }
    full
}

fn sweep_queue(queue: QueueId, name: &str, aside: Aside) -> bool {
    let Some((missed, miscounts, stale)) = round(|| {
        let table = TaskTable::open().ok()?;
        if schedule_reaping(&table, queue, name) {
            // Some may be new, as those of prepared transactions: whoever waits looks anew.
            shmem::extras(queue).count_pins();
            wait::wake_all(queue);
        }
        Some((
            find_missed(&table, queue, name),
            find_miscounted(&table, queue, name, &aside.running),
            find_stale(queue, name, aside.weights),
        ))
    }) else {
        return false;
    };
    let Missed { suspects, broken } = missed;
    news::broken(name, broken.as_ref());
    if suspects.is_empty() && miscounts.is_empty() && stale.is_empty() {
        news::full(name, false);
        news::healed(name, 0, 0);
        return false;
    }
    let until = Instant::now() + PAUSE;
    while Instant::now() < until && !super::stopping() {
        super::pause(until.saturating_duration_since(Instant::now()));
    }
    let mut healed = 0;
    let mut set = 0;
    let mut left_out = 0;
    round(|| {
        let Ok(table) = TaskTable::open() else { return };
        for suspect in &suspects {
            match heal(&table, queue, name, suspect) {
                Heal::Healed => healed += 1,
                Heal::NoRoom => left_out += 1,
                Heal::NotMissed => {}
            }
        }
        set += recount(&table, queue, name, &miscounts);
        set += tell(queue, name, stale);
    });
    if healed + set > 0 {
        wait::wake_all(queue);
    }
    news::full(name, left_out > 0);
    news::healed(name, healed, set);
    left_out > 0
}

/// Lanes whose first row the board does not know of, and why another one can never stand there.
struct Missed {
    suspects: Vec<Suspect>,
    broken: Option<Error>,
}

/// What [`sweep_queue`] looks at again. Lanes of which the board alone knows are closed: their rows were
/// deleted, or moved by somebody whom no trigger watches.
fn find_missed(table: &TaskTable, queue: QueueId, name: &str) -> Missed {
    let (mut suspects, mut broken) = (Vec::new(), None);
    // Before the table is looked at: what becomes visible meanwhile shows in the lanes' generations.
    let open = board::with(|sched| sched.open_lanes(queue));
    let mut seen = HashSet::new();
    table.walk_lanes(name, |priority, key, band, row| {
        if let Some(error) = rules::unservable(priority, key) {
            broken.get_or_insert(error);
            return;
        }
        let (tier, stored) = (stored_priority(priority), stored_key(key));
        let missed = board::with(|sched| {
            seen.extend(sched.lane_of(queue, tier, &stored, band));
            sched.missed(queue, tier, &stored, band, row.pos)
        });
        if let Some(generation) = missed {
            suspects.push(Suspect {
                priority,
                key: key.to_owned(),
                band,
                row,
                generation,
            });
        }
    });
    let now = now();
    for lanes in open.chunks(LANES_A_HOLD) {
        board::with(|sched| {
            for open in lanes.iter().filter(|open| !seen.contains(&open.lane)) {
                sched.close_unseen(open, now);
            }
        });
    }
    Missed { suspects, broken }
}

enum Heal {
    Healed,
    NotMissed,
    NoRoom,
}

/// Puts a lane on the board if its first row is still missed.
fn heal(table: &TaskTable, queue: QueueId, name: &str, suspect: &Suspect) -> Heal {
    let (priority, key) = (stored_priority(suspect.priority), stored_key(&suspect.key));
    let still = |sched: &mut Sched| {
        sched.missed(queue, priority, &key, suspect.band, suspect.row.pos)
            == Some(suspect.generation)
    };
    let (missed, room) = board::with(|sched| (still(sched), sched.has_room()));
    if !missed {
        return Heal::NotMissed;
    }
    if !room {
        return Heal::NoRoom;
    }
    let lane = LaneKey {
        queue: name,
        priority: suspect.priority,
        key: &suspect.key,
        band: suspect.band,
    };
    let mut rows = Vec::with_capacity(1);
    table.probe(&lane, suspect.row.pos, 1, &mut rows);
    let Some((row, tid)) = rows.pop().filter(|(row, _)| row.pos == suspect.row.pos) else {
        return Heal::NotMissed;
    };
    // A row that a claim holds is not missed.
    let TupleLock::Locked(_) = table.lock_or_skip(tid) else {
        return Heal::NotMissed;
    };
    board::with(|sched| {
        if !still(sched) {
            return Heal::NotMissed;
        }
        if sched
            .note(queue, priority, &key, suspect.band, row, now())
            .is_err()
        {
            return Heal::NoRoom;
        }
        sched.counters(queue).missed_wakeups += 1;
        Heal::Healed
    })
}

/// A key whose running count on the board is not the table's.
struct Miscount {
    /// What the board had before the table was read.
    board: RunningCount,
    table: i32,
}

/// Keys whose running count differs from the table, while no claim of theirs is under way.
fn find_miscounted<'k>(
    table: &TaskTable,
    queue: QueueId,
    name: &str,
    aside: impl IntoIterator<Item = &'k String>,
) -> HashMap<String, Miscount> {
    // The board first: what changes while the table is read shows in its counts' changes.
    let mut board_counts = HashMap::<String, RunningCount>::new();
    board::with(|sched| {
        sched.entries(queue, |entry| {
            let count = sched.running_count(queue, &entry.key);
            board_counts.insert(entry.key.as_str().to_owned(), count);
        });
        for key in aside {
            let count = sched.running_count(queue, &stored_key(key));
            board_counts.insert(key.clone(), count);
        }
    });
    let mut table_counts = HashMap::<String, i32>::new();
    table.running(name, |key| {
        *table_counts.entry(key.to_owned()).or_default() += 1
    });
    for key in table_counts.keys() {
        board_counts
            .entry(key.clone())
            .or_insert_with(|| board::with(|sched| sched.running_count(queue, &stored_key(key))));
    }
    board_counts
        .into_iter()
        .filter_map(|(key, board)| {
            let table = table_counts.get(&key).copied().unwrap_or(0);
            (board.running != table && !board.in_flight).then_some((key, Miscount { board, table }))
        })
        .collect()
}

/// Sets the counts that differ in the same way as before, and have not changed on the board since. How many.
fn recount(
    table: &TaskTable,
    queue: QueueId,
    name: &str,
    before: &HashMap<String, Miscount>,
) -> usize {
    if before.is_empty() {
        return 0;
    }
    let again = find_miscounted(table, queue, name, before.keys());
    let mut set = 0;
    board::with(|sched| {
        for (key, miscount) in before {
            if again
                .get(key)
                .is_some_and(|now| now.table == miscount.table)
                && sched.recount(queue, &stored_key(key), miscount.board, miscount.table)
            {
                set += 1;
            }
        }
    });
    set
}
