//! A ledger of tasks outside of the database: what was enqueued, handed out and completed, as far as clients were told.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use postgres::Client;

/// What a client knows of something that it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Yes,
    No,
    /// The answer never came.
    Unknown,
}

#[derive(Debug)]
struct Entry {
    enqueued: Told,
    /// The latest lease that a client was told of.
    held: Option<HandOut>,
    completed: Told,
    hand_outs: u32,
}

#[derive(Clone, Copy, Debug)]
struct HandOut {
    lease: i64,
    /// When the claim began.
    began: Instant,
    /// When the client was told.
    told: Instant,
    /// It has been given back since, or may have been.
    given_back: bool,
}

/// The tasks of one database.
pub struct Ledger {
    entries: Mutex<HashMap<i64, Entry>>,
    next: AtomicI64,
    lease: Duration,
}

impl Ledger {
    /// For tasks whose leases last `lease`.
    pub fn new(lease: Duration) -> Ledger {
        Ledger {
            entries: Mutex::default(),
            next: AtomicI64::new(1),
            lease,
        }
    }

    /// Ids for `n` new tasks. Until the commit is known to have worked, they may or may not come to be.
    pub fn new_ids(&self, n: i64) -> Vec<i64> {
        let first = self.next.fetch_add(n, Ordering::Relaxed);
        let ids: Vec<i64> = (first..first + n).collect();
        let mut entries = self.entries.lock().unwrap();
        for id in &ids {
            let entry = Entry {
                enqueued: Told::Unknown,
                held: None,
                completed: Told::No,
                hand_outs: 0,
            };
            entries.insert(*id, entry);
        }
        ids
    }

    pub fn enqueued(&self, ids: &[i64], told: Told) {
        let mut entries = self.entries.lock().unwrap();
        for id in ids {
            entries.get_mut(id).unwrap().enqueued = told;
        }
    }

    /// A committed claim that began at `began` has handed a task out. Clients may be told of it in another order than
    /// that of the leases.
    pub fn handed_out(&self, id: i64, lease: i64, began: Instant) {
        let mut entries = self.entries.lock().unwrap();
        let entry = entries
            .get_mut(&id)
            .unwrap_or_else(|| panic!("task {id} was never enqueued"));
        assert_ne!(entry.enqueued, Told::No, "task {id} was rolled back");
        let new = HandOut {
            lease,
            began,
            told: Instant::now(),
            given_back: false,
        };
        let (earlier, later) = match entry.held {
            Some(held) if held.lease > lease => (Some(new), held),
            held => {
                assert_ne!(entry.completed, Told::Yes, "task {id} had been completed");
                (held, new)
            }
        };
        entry.held = Some(later);
        entry.hand_outs += 1;
        let Some(earlier) = earlier else { return };
        assert_ne!(
            earlier.lease, later.lease,
            "task {id}: a lease was used twice"
        );
        let after = later.told.saturating_duration_since(earlier.began);
        assert!(
            earlier.given_back || after >= self.lease,
            "task {id} was handed out twice within {after:?}: {earlier:?}, {later:?}"
        );
    }

    /// A task is about to be given back, perhaps.
    pub fn gives_back(&self, id: i64, lease: i64) {
        let mut entries = self.entries.lock().unwrap();
        if let Some(held) = &mut entries.get_mut(&id).unwrap().held
            && held.lease == lease
        {
            held.given_back = true;
        }
    }

    pub fn completed(&self, id: i64, told: Told) {
        let mut entries = self.entries.lock().unwrap();
        let entry = entries.get_mut(&id).unwrap();
        match told {
            Told::Yes => {
                assert_ne!(entry.completed, Told::Yes, "task {id} was completed twice");
                entry.completed = Told::Yes;
            }
            Told::Unknown if entry.completed == Told::No => entry.completed = Told::Unknown,
            Told::Unknown | Told::No => {}
        }
    }

    /// Compares with the table while nobody works: each task is there in the state that its clients know of.
    pub fn assert_agrees(&self, client: &mut Client) -> String {
        let rows = client
            .query("SELECT id, state::text FROM harvest_fair.task", &[])
            .unwrap();
        let table: HashMap<i64, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let entries = self.entries.lock().unwrap();
        for id in table.keys() {
            assert!(entries.contains_key(id), "task {id} came from nowhere");
        }
        let (mut completed, mut again, mut unknown) = (0, 0, 0);
        for (id, entry) in entries.iter() {
            let state = table.get(id).map(String::as_str);
            match (entry.enqueued, entry.completed, state) {
                (Told::No, _, None) | (Told::Unknown, Told::No, None) => {}
                (Told::Yes | Told::Unknown, Told::Yes, Some("completed")) => completed += 1,
                (Told::Yes | Told::Unknown, Told::Unknown, Some(_)) => unknown += 1,
                (Told::Yes | Told::Unknown, Told::No, Some("pending" | "running")) => {}
                _ => panic!("task {id} is {state:?}, but the ledger has {entry:?}"),
            }
            again += u32::from(entry.hand_outs > 1);
        }
        assert!(completed > 0, "nothing was completed");
        format!(
            "{} tasks, {completed} completed, {unknown} perhaps, {again} handed out more than once",
            entries.len()
        )
    }
}
