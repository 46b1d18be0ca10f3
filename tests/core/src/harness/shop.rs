//! One queue, its board and its table, to be driven by few words.

use super::{MemoryBoard, Session, Stored, Table, key, priority};
use crate::names::{FairnessKey, Weight};
use crate::sfq::{Claimed, Memory, Order, Policy, QueueId, Ticks, claim, preview};

/// One queue whose claims are committed at once.
pub struct Shop {
    pub board: MemoryBoard,
    pub queue: QueueId,
    pub table: Table,
    /// What its one session remembers.
    memory: Memory<i64>,
    pub now: i64,
    next_id: i64,
}

impl Default for Shop {
    fn default() -> Self {
        Shop::new(64)
    }
}

/// What one claim was charged.
pub type Served = Claimed<i64>;

impl Shop {
    pub fn new(max_keys: u32) -> Self {
        let mut board = MemoryBoard::new(2, max_keys);
        let queue = board.open("q");
        Shop {
            board,
            queue,
            table: Table::default(),
            memory: Memory::default(),
            now: 1 << 40,
            next_id: 1,
        }
    }

    /// A shop with settings.
    pub fn with(policy: Policy) -> Self {
        let mut shop = Shop::new(1_024);
        shop.configure(policy);
        shop
    }

    /// A shop whose priority 3 has its clock at `clock`.
    pub fn at_clock(clock: i64) -> Self {
        let mut shop = Shop::default();
        let ticks = Ticks::new(clock);
        let (queue, now) = (shop.queue, shop.now);
        let mut sched = shop.board.sched();
        sched
            .restore(queue, priority(3), &key("warm-up"), ticks, ticks, now)
            .expect("room");
        shop.enqueue("warm-up", 1);
        shop.claim(1);
        assert_eq!(shop.clock(3).get(), clock);
        shop
    }

    /// Ends the load of the queue: only then is it shown to observers.
    pub fn load(&mut self) {
        let queue = self.queue;
        self.board.sched().finish_load(queue);
    }

    pub fn configure(&mut self, policy: Policy) {
        let (queue, now) = (self.queue, self.now);
        self.board.sched().set_policy(queue, &policy, now);
    }

    pub fn clock(&mut self, tier: u8) -> Ticks {
        let queue = self.queue;
        self.board.sched().clock(queue, priority(tier))
    }

    /// Sets the queue's weight for a key.
    pub fn weigh(&mut self, name: &str, weight: f64) {
        let (queue, weight) = (self.queue, Weight::new(weight).expect("a valid weight"));
        self.board
            .sched()
            .set_override(queue, &key(name), Some(weight))
            .expect("room");
    }

    /// `count` tasks of priority 3, all due since the same instant.
    pub fn enqueue(&mut self, name: &str, count: usize) {
        for _ in 0..count {
            self.add(name, 3, 0, self.now - 1, None);
        }
    }

    /// One committed task; its id.
    pub fn add(&mut self, name: &str, tier: u8, band: u8, due: i64, weight: Option<f64>) -> i64 {
        let id = self.next_id;
        self.next_id += 1;
        let stored = Stored::new(tier, name, band, due, weight);
        self.table.rows.insert(id, stored);
        let row = self.table.row(id);
        let (queue, now) = (self.queue, self.now);
        let mut sched = self.board.sched();
        sched
            .note(queue, priority(tier), &key(name), band, row, now)
            .expect("room");
        id
    }

    /// One call for `n` tasks, in a transaction that stays open.
    pub fn claim_open(&mut self, n: usize) -> Vec<Served> {
        self.claim_in(Order::Fair, n)
    }

    /// The same in another order.
    pub fn claim_in(&mut self, order: Order, n: usize) -> Vec<Served> {
        let mut rows = Session::new(&mut self.table, 0);
        let mut served = Vec::new();
        claim(
            &mut self.board,
            &mut rows,
            &mut self.memory,
            self.queue,
            order,
            n,
            self.now,
            &mut served,
        )
        .expect("the table never fails");
        for served in &served {
            self.table.mark_claimed(served.handle);
        }
        served
    }

    /// The next `n` tasks, were the weights these; nothing is claimed.
    pub fn preview(
        &mut self,
        n: usize,
        weights: &[(FairnessKey<'_>, Option<Weight>)],
    ) -> Vec<Served> {
        let mut table = self.table.clone();
        let mut rows = Session::new(&mut table, 7);
        let mut seen = Vec::new();
        preview(
            &mut self.board,
            &mut rows,
            self.queue,
            Order::Fair,
            n,
            self.now,
            weights,
            (0, &mut |_, _| 0),
            &mut seen,
        )
        .expect("the table never fails");
        seen
    }

    /// `count` claimed tasks of a key no longer run.
    pub fn end(&mut self, name: &str, count: i32) {
        let (queue, now) = (self.queue, self.now);
        let mut sched = self.board.sched();
        sched.running_delta(queue, &key(name), -count, now);
    }

    pub fn commit(&mut self, served: &[Served]) {
        for served in served {
            self.table.rows.remove(&served.handle);
            self.board.sched().kept(&served.charge, self.now);
        }
    }

    pub fn abort(&mut self, served: &[Served]) {
        for served in served.iter().rev() {
            self.table.give_back(served.handle);
            self.board.sched().undo(&served.charge, self.now);
        }
    }

    /// One call for `n` tasks, committed.
    pub fn claim(&mut self, n: usize) -> Vec<Served> {
        let served = self.claim_open(n);
        self.commit(&served);
        served
    }

    /// The keys of `calls` calls for `n` tasks each.
    pub fn keys(&mut self, calls: usize, n: usize) -> Vec<String> {
        let served = (0..calls).flat_map(|_| self.claim(n)).collect::<Vec<_>>();
        served
            .iter()
            .map(|served| served.key.as_str().to_string())
            .collect()
    }

    /// Key and pass of all that are eligible in priority 3, in no order.
    pub fn waiting(&mut self) -> Vec<(String, Ticks)> {
        let mut waiting = Vec::new();
        let queue = self.queue;
        self.board.sched().entries(queue, |entry| {
            if entry.eligible && entry.priority == priority(3) {
                waiting.push((entry.key.as_str().to_string(), entry.pass));
            }
        });
        waiting
    }
}

/// Which tasks.
pub fn ids(served: &[Served]) -> Vec<i64> {
    served.iter().map(|served| served.handle).collect()
}
