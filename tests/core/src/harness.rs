//! A board in plain memory and a task table in a map, to drive the core without a server.

use std::collections::BTreeMap;

use crate::names::Weight;
use crate::names::{FairnessKey, Priority, QueueName};
use crate::sfq::{
    Board, Charge, Claimed, Lane, Locked, Order, Pick, QueueId, Row, RowPos, Rows, Sched, Ticks,
    claim,
};

/// A board whose lock nobody else wants.
pub struct MemoryBoard {
    bytes: Vec<u8>,
    start: usize,
}

impl MemoryBoard {
    pub fn new(max_queues: u32, max_keys: u32) -> Self {
        let mut bytes = vec![0; Sched::bytes_needed(max_queues, max_keys) + 64];
        let start = bytes.as_ptr().align_offset(64);
        Sched::init(&mut bytes[start..], max_queues, max_keys).expect("the region is large enough");
        MemoryBoard { bytes, start }
    }

    /// The scheduling core in it.
    pub fn sched(&mut self) -> Sched<'_> {
        Sched::attach(&mut self.bytes[self.start..]).expect("the region is set up")
    }

    /// Opens a queue by name, in scope 1.
    pub fn open(&mut self, name: &str) -> QueueId {
        let name = QueueName::parse(name).expect("a valid name");
        self.sched().open_queue(1, &name).expect("room for a queue")
    }
}

impl Board for MemoryBoard {
    fn with<R>(&mut self, act: impl FnOnce(&mut Sched<'_>) -> R) -> R {
        act(&mut self.sched())
    }
}

/// Who holds a lock on a row.
pub type Owner = u32;

/// A row of the table.
#[derive(Clone, Debug)]
pub struct Stored {
    pub priority: Priority,
    pub key: String,
    pub band: u8,
    pub due: i64,
    pub weight: Option<f64>,
    /// Committed: others see it.
    pub visible: bool,
    pub lock: Option<Owner>,
    /// The holder of the lock has made it a running row, which only it sees so far.
    pub claimed: bool,
}

/// The pending rows of one queue, by id; claimed ones until their transaction commits.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub rows: BTreeMap<i64, Stored>,
}

impl Table {
    pub fn row(&self, id: i64) -> Row {
        let stored = &self.rows[&id];
        Row {
            pos: RowPos::new(stored.due, id),
            weight: stored.weight,
        }
    }

    /// What `owner` sees of a lane, and whether that is all there is.
    pub fn probe(
        &self,
        owner: Owner,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, i64)>,
    ) -> bool {
        let mut seen: Vec<(Row, i64)> = self
            .rows
            .iter()
            .filter(|(_, row)| row.visible && !(row.claimed && row.lock == Some(owner)))
            .filter(|(_, row)| (row.priority, row.band) == (lane.priority, lane.band))
            .filter(|(_, row)| row.key == lane.key.as_str())
            .map(|(&id, _)| (self.row(id), id))
            .filter(|(row, _)| row.pos >= from)
            .collect();
        seen.sort_by_key(|(row, _)| row.pos);
        let end = seen.len() <= want;
        seen.truncate(want);
        out.extend(seen);
        end
    }

    /// Locks the version of a row that stood at `pos`.
    pub fn lock(&mut self, owner: Owner, id: i64, pos: RowPos) -> Locked {
        match self.rows.get_mut(&id) {
            Some(row) if row.due == pos.due => match row.lock {
                Some(other) if other != owner => Locked::Held,
                _ => {
                    row.lock = Some(owner);
                    Locked::Yes
                }
            },
            _ => Locked::Gone,
        }
    }

    /// The owner's transaction makes the rows that it has locked running ones.
    pub fn mark_claimed(&mut self, id: i64) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.claimed = true;
        }
    }

    /// The owner's transaction has aborted: all its locks are released.
    pub fn release_all(&mut self, owner: Owner) {
        for row in self.rows.values_mut().filter(|row| row.lock == Some(owner)) {
            row.lock = None;
            row.claimed = false;
        }
    }

    /// The claim's transaction has aborted.
    pub fn give_back(&mut self, id: i64) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.lock = None;
            row.claimed = false;
        }
    }
}

/// One session's view of a table.
pub struct Session<'t> {
    pub table: &'t mut Table,
    pub owner: Owner,
    /// Picks less outcomes; 0 whenever no call is under way.
    pub under_way: i32,
    pub remembered: Vec<Charge>,
    pub probes: usize,
}

impl<'t> Session<'t> {
    pub fn new(table: &'t mut Table, owner: Owner) -> Self {
        Session {
            table,
            owner,
            under_way: 0,
            remembered: Vec::new(),
            probes: 0,
        }
    }
}

impl Rows for Session<'_> {
    type Error = String;
    type Handle = (i64, RowPos);

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Self::Handle)>,
    ) -> Result<bool, String> {
        self.probes += 1;
        let mut seen = Vec::new();
        let end = self.table.probe(self.owner, lane, from, want, &mut seen);
        out.extend(seen.into_iter().map(|(row, id)| (row, (id, row.pos))));
        Ok(end)
    }

    fn lock(&mut self, handle: &Self::Handle) -> Result<Locked, String> {
        Ok(self.table.lock(self.owner, handle.0, handle.1))
    }

    fn picked(&mut self, _pick: &Pick) {
        self.under_way += 1;
    }

    fn settled(&mut self, charge: Option<Charge>) {
        self.under_way -= 1;
        self.remembered.extend(charge);
    }
}

/// A key as the core takes it; `""` is the default key.
pub fn key(name: &str) -> FairnessKey<'_> {
    FairnessKey::stored(name)
}

pub fn priority(value: u8) -> Priority {
    Priority::new(i64::from(value)).expect("a valid priority")
}

/// One queue whose claims are committed at once.
pub struct Shop {
    pub board: MemoryBoard,
    pub queue: QueueId,
    pub table: Table,
    pub now: i64,
    next_id: i64,
}

impl Default for Shop {
    fn default() -> Self {
        Shop::new(64)
    }
}

/// What one claim was charged.
pub type Served = Claimed<(i64, RowPos)>;

impl Shop {
    pub fn new(max_keys: u32) -> Self {
        let mut board = MemoryBoard::new(2, max_keys);
        let queue = board.open("q");
        Shop {
            board,
            queue,
            table: Table::default(),
            now: 1 << 40,
            next_id: 1,
        }
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
        let stored = Stored {
            priority: priority(tier),
            key: name.into(),
            band,
            due,
            weight,
            visible: true,
            lock: None,
            claimed: false,
        };
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
        let mut rows = Session::new(&mut self.table, 0);
        let mut served = Vec::new();
        claim(
            &mut self.board,
            &mut rows,
            self.queue,
            Order::Fair,
            n,
            self.now,
            &mut served,
        )
        .expect("the table never fails");
        for served in &served {
            self.table.mark_claimed(served.handle.0);
        }
        served
    }

    pub fn commit(&mut self, served: &[Served]) {
        for served in served {
            self.table.rows.remove(&served.handle.0);
            self.board.sched().kept(&served.charge, self.now);
        }
    }

    pub fn abort(&mut self, served: &[Served]) {
        for served in served.iter().rev() {
            self.table.give_back(served.handle.0);
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

/// How often `name` is among `keys`.
pub fn count(keys: &[String], name: &str) -> usize {
    keys.iter().filter(|key| *key == name).count()
}
