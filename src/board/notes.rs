//! What a transaction has noted of pending rows: the first one of each lane, which the board learns of when others can see it.

use std::collections::HashMap;

use super::on_commit::{QueueRef, Wake, find_live};
use super::{shmem, stored_key};
use crate::names::Priority;
use crate::sfq::{Noted, QueueId, Row, Sched};

/// Notes (and what else goes key by key) put on the board under one hold of the lock: a bulk load must not stop the claims of
/// others.
pub const NOTES_A_HOLD: usize = 256;

struct Note {
    queue: QueueRef,
    priority: Priority,
    key: String,
    band: u8,
    row: Row,
}

impl Note {
    fn put(&self, sched: &mut Sched, queue: QueueId, now: i64) -> Option<Noted> {
        let key = stored_key(&self.key);
        sched
            .note(queue, self.priority, &key, self.band, self.row, now)
            .ok()
    }
}

/// All of a transaction.
#[derive(Default)]
pub struct Notes {
    lanes: HashMap<Box<[u8]>, Note>,
    /// Reused to build their keys.
    scratch: Vec<u8>,
}

impl Notes {
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub fn clear(&mut self) {
        self.lanes.clear();
    }

    /// Costs no allocation for a lane that has been noted before.
    pub fn add(
        &mut self,
        scope: u64,
        queue: &str,
        priority: Priority,
        key: &str,
        band: u8,
        row: Row,
    ) {
        self.scratch.clear();
        self.scratch.extend_from_slice(&scope.to_ne_bytes());
        self.scratch
            .extend_from_slice(&[priority.get(), band, queue.len() as u8]);
        self.scratch.extend_from_slice(queue.as_bytes());
        self.scratch.extend_from_slice(key.as_bytes());
        if let Some(known) = self.lanes.get_mut(self.scratch.as_slice()) {
            if row.pos < known.row.pos {
                known.row = row;
            }
            return;
        }
        let queue = QueueRef {
            scope,
            name: queue.to_owned(),
        };
        let note = Note {
            queue,
            priority,
            key: key.to_owned(),
            band,
            row,
        };
        self.lanes
            .insert(self.scratch.clone().into_boxed_slice(), note);
    }

    /// Puts those of one queue on the board, and keeps them.
    pub fn put_early(&self, queue: QueueId, name: &QueueRef, now: i64) {
        if self.is_empty() {
            return;
        }
        shmem::with(|sched| {
            for note in self.lanes.values().filter(|note| note.queue == *name) {
                // A full board is dealt with at commit.
                let _ = note.put(sched, queue, now);
            }
        });
    }

    /// Puts all on the board; adds whom to wake.
    pub fn put(&mut self, now: i64, wakes: &mut Vec<Wake>) {
        let notes: Vec<Note> = self.lanes.drain().map(|(_, note)| note).collect();
        for notes in notes.chunks(NOTES_A_HOLD) {
            shmem::with(|sched| {
                for note in notes {
                    // A queue that nobody has loaded finds its rows when it is.
                    let Some(queue) = find_live(sched, &note.queue) else {
                        continue;
                    };
                    let timer = sched.next_timer(queue);
                    match note.put(sched, queue, now) {
                        Some(Noted { eligible: true, .. }) => wakes.push(Wake::One(queue)),
                        // Whoever waits must look at the clock anew when the next timer has come nearer.
                        Some(Noted { wake: Some(at), .. }) if timer.is_none_or(|t| at < t) => {
                            wakes.push(Wake::All(queue))
                        }
                        // A full board has counted the row; the sweep tries again.
                        Some(_) | None => {}
                    }
                }
            });
        }
    }
}
