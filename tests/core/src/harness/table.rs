//! A task table in a map, and what one session sees of it.

use std::collections::BTreeMap;

use super::priority;
use crate::names::Priority;
use crate::sfq::{Charge, Lane, Locked, Pick, Row, RowPos, Rows};

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

impl Stored {
    /// A committed row.
    pub fn new(tier: u8, key: &str, band: u8, due: i64, weight: Option<f64>) -> Self {
        Stored {
            priority: priority(tier),
            key: key.into(),
            band,
            due,
            weight,
            visible: true,
            lock: None,
            claimed: false,
        }
    }
}

/// The pending rows of one queue, by id; claimed ones until their transaction commits.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub rows: BTreeMap<i64, Stored>,
    /// Looks at a lane, of all sessions.
    pub probes: usize,
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

    /// Locks the version of a row that stood at `pos` in a lane, if it still does.
    pub fn lock_pending(&mut self, owner: Owner, lane: &Lane, id: i64, pos: RowPos) -> Locked {
        let stands = self.rows.get(&id).is_some_and(|row| {
            (row.priority, row.band, row.due) == (lane.priority, lane.band, pos.due)
                && row.key == lane.key.as_str()
                && !(row.claimed && row.lock == Some(owner))
        });
        if stands {
            self.lock(owner, id)
        } else {
            Locked::Gone
        }
    }

    /// Locks a row.
    pub fn lock(&mut self, owner: Owner, id: i64) -> Locked {
        match self.rows.get_mut(&id) {
            Some(row) if row.lock.is_none_or(|other| other == owner) => {
                row.lock = Some(owner);
                Locked::Yes
            }
            Some(_) => Locked::Held,
            None => Locked::Gone,
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
}

impl<'t> Session<'t> {
    pub fn new(table: &'t mut Table, owner: Owner) -> Self {
        Session {
            table,
            owner,
            under_way: 0,
            remembered: Vec::new(),
        }
    }
}

impl Rows for Session<'_> {
    type Error = String;
    type Handle = i64;

    fn probe(
        &mut self,
        lane: &Lane,
        from: RowPos,
        want: usize,
        out: &mut Vec<(Row, Self::Handle)>,
    ) -> Result<bool, String> {
        self.table.probes += 1;
        Ok(self.table.probe(self.owner, lane, from, want, out))
    }

    fn lock(&mut self, lane: &Lane, row: &Row, handle: &Self::Handle) -> Result<Locked, String> {
        Ok(self.table.lock_pending(self.owner, lane, *handle, row.pos))
    }

    fn picked(&mut self, _pick: &Pick) {
        self.under_way += 1;
    }

    fn settled(&mut self, charge: Option<Charge>) {
        self.under_way -= 1;
        self.remembered.extend(charge);
    }
}
