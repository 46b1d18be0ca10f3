//! What all actors share.

use std::collections::BTreeSet;

use harvest_fair_core_tests::harness::{MemoryBoard, Session, Stored, Table, key, priority};
use harvest_fair_core_tests::sfq::{Memory, Order, QueueId, Row, claim};
use harvest_fair_core_tests::stage::Dice;

pub const KEYS: [&str; 4] = ["", "a", "b", "c"];

pub struct World {
    pub board: MemoryBoard,
    pub queue: QueueId,
    pub table: Table,
    pub now: i64,
    next_id: i64,
    /// Tasks whose claim has committed.
    done: BTreeSet<i64>,
    enqueued: usize,
    /// Rows that a stranger deleted.
    pub deleted: usize,
}

impl World {
    pub fn new() -> Self {
        let mut board = MemoryBoard::new(1, 64);
        let queue = board.open("q");
        World {
            board,
            queue,
            table: Table::default(),
            now: 1_000,
            next_id: 1,
            done: BTreeSet::new(),
            enqueued: 0,
            deleted: 0,
        }
    }

    /// A row that is not committed yet.
    pub fn insert(&mut self, name: &str, due: i64, weight: Option<f64>) -> i64 {
        let id = self.next_id;
        self.next_id += 1;
        self.enqueued += 1;
        let stored = Stored {
            visible: false,
            ..Stored::new(3, name, 0, due, weight)
        };
        self.table.rows.insert(id, stored);
        id
    }

    /// Others see it from now on.
    pub fn show(&mut self, id: i64) {
        self.table.rows.get_mut(&id).expect("an own row").visible = true;
    }

    /// A row that was there before everything else.
    pub fn put(&mut self, name: &str, due: i64, weight: Option<f64>) -> i64 {
        let id = self.insert(name, due, weight);
        self.show(id);
        self.note(name, self.table.row(id));
        id
    }

    /// What a commit's callback does with an enqueued, or moved, row.
    pub fn note(&mut self, name: &str, row: Row) {
        let mut sched = self.board.sched();
        sched
            .note(self.queue, priority(3), &key(name), 0, row, self.now)
            .expect("room");
    }

    pub fn finish(&mut self, id: i64) {
        assert!(
            self.table.rows.remove(&id).is_some(),
            "task {id} is no longer there"
        );
        assert!(self.done.insert(id), "task {id} was claimed twice");
    }

    pub fn free_row(&self, dice: &mut Dice) -> Option<i64> {
        let free = |(&id, row): (&i64, &Stored)| (row.visible && row.lock.is_none()).then_some(id);
        let ids: Vec<i64> = self.table.rows.iter().filter_map(free).collect();
        dice.pick(&ids).copied()
    }

    /// Claims whatever is left, and checks that everything enqueued was claimed exactly once or deleted.
    pub fn drain(mut self) {
        self.now += 1_000;
        let (queue, now) = (self.queue, self.now);
        for row in self.table.rows.values() {
            assert!(row.lock.is_none(), "somebody still holds a lock");
        }
        let mut rows = Session::new(&mut self.table, 0);
        let mut claimed = Vec::new();
        claim(
            &mut self.board,
            &mut rows,
            &mut Memory::default(),
            queue,
            Order::Fair,
            10_000,
            now,
            &mut claimed,
        )
        .unwrap();
        for claimed in claimed {
            self.board.sched().kept(&claimed.charge, now);
            self.finish(claimed.handle);
        }
        assert!(self.table.rows.is_empty(), "lost: {:?}", self.table.rows);
        assert_eq!(self.done.len() + self.deleted, self.enqueued);
        let sched = self.board.sched();
        sched.check().unwrap();
        sched.entries(queue, |entry| {
            assert_eq!(entry.in_flight, 0, "{:?} keeps claims in flight", entry.key);
            assert_eq!(sched.running(queue, &entry.key), entry.running);
        });
    }
}
