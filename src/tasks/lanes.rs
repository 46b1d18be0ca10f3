//! A walk over the lanes of a queue, for whoever must know them all: the load, the sweep, the check.
//!
//! To descend the index anew for each lane would read a page each time, where many lanes share one. So the walk steps over
//! what is left of a lane, in the index alone; only a lane that goes on and on is left by a descent.

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::scan_keys::{AFTER, Keys, text};
use super::table::TaskTable;
use crate::pg_compat;
use crate::sfq::Row;
use crate::spi;

/// Index entries of a lane that are stepped over before the index is descended anew: a page and a half of them.
const STEPS: usize = 200;
/// Columns of the index.
const COLUMNS: usize = 6;

/// A lane of the queue, by its index columns.
#[derive(Clone, PartialEq, Eq)]
struct Lane {
    priority: i16,
    key: String,
    band: bool,
}

/// The first columns of the index entry that the scan stands at, which live as long as it stands there.
struct Entry<'a> {
    priority: i16,
    key: &'a str,
    band: bool,
}

impl Entry<'_> {
    fn is_of(&self, lane: &Lane) -> bool {
        (self.priority, self.band) == (lane.priority, lane.band) && self.key == lane.key
    }

    /// # Safety
    /// The scan was asked for index entries, and stands at one of the index of lanes.
    unsafe fn at(scan: pg_sys::IndexScanDesc) -> Self {
        let mut values = [pg_sys::Datum::from(0); COLUMNS];
        let mut nulls = [true; COLUMNS];
        // SAFETY: as the caller promises; the index has this many columns, the second to the fourth of which are of these
        // types, and not null.
        unsafe {
            let entry = (*scan).xs_itup;
            pg_sys::index_deform_tuple(
                entry,
                (*scan).xs_itupdesc,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            Entry {
                priority: i16::from_datum(values[1], nulls[1]).unwrap_or(3),
                key: <&str>::from_datum(values[2], nulls[2]).unwrap_or(""),
                band: bool::from_datum(values[3], nulls[3]).unwrap_or(false),
            }
        }
    }
}

impl TaskTable {
    /// Visits the first row of each lane of a queue, in index order.
    pub fn walk_lanes(&self, queue: &str, mut each: impl FnMut(i16, &str, u8, Row)) {
        let mut last: Option<Lane> = None;
        while !self.walk_on(queue, &mut last, &mut each) {}
    }

    /// Walks on behind the lane `last` until it is worth while to descend the index anew. True at the end.
    fn walk_on(
        &self,
        queue: &str,
        last: &mut Option<Lane>,
        each: &mut impl FnMut(i16, &str, u8, Row),
    ) -> bool {
        let mut keys = behind(queue, last.as_ref());
        let count = keys.keys.len() as i32;
        let forward = pg_sys::ScanDirection::ForwardScanDirection;
        let mut ended = false;
        // SAFETY: the table is open and locked, so the index is there; the snapshot is registered while the scan is in use;
        // the row comparison's members live in `keys` through the scan. An ERROR leaves all to the resource owner.
        unsafe {
            let snapshot = if self.as_others.get() {
                spi::snapshot_of_others()
            } else {
                pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot())
            };
            let index = pg_sys::index_open(self.catalog.lane, pg_sys::AccessShareLock as i32);
            let scan = pg_compat::index_beginscan(self.table, index, snapshot, count);
            (*scan).xs_want_itup = true;
            pg_sys::index_rescan(scan, keys.keys.as_mut_ptr(), count, std::ptr::null_mut(), 0);
            let mut steps = 0;
            loop {
                if pg_sys::index_getnext_tid(scan, forward).is_null() {
                    ended = true;
                    break;
                }
                let entry = Entry::at(scan);
                if last.as_ref().is_some_and(|last| entry.is_of(last)) {
                    steps += 1;
                    if steps > STEPS {
                        break;
                    }
                    continue;
                }
                if !pg_sys::index_fetch_heap(scan, self.slot) {
                    // A row that is gone, or not there yet.
                    continue;
                }
                each(entry.priority, entry.key, u8::from(entry.band), self.row());
                steps = 0;
                *last = Some(Lane {
                    priority: entry.priority,
                    key: entry.key.to_owned(),
                    band: entry.band,
                });
                pgrx::check_for_interrupts!();
            }
            pg_sys::index_endscan(scan);
            pg_sys::index_close(index, pg_sys::AccessShareLock as i32);
            pg_sys::UnregisterSnapshot(snapshot);
        }
        ended
    }
}

/// The entries of a queue behind a lane.
fn behind(queue: &str, last: Option<&Lane>) -> Keys {
    let keys = Keys::new().text(1, queue);
    let Some(Lane {
        priority,
        key,
        band,
    }) = last
    else {
        return keys;
    };
    let none = pg_sys::InvalidOid;
    let (priority, band) = (pg_sys::Datum::from(*priority), pg_sys::Datum::from(*band));
    keys.member(2, AFTER, none, pg_sys::F_BTINT2CMP, priority)
        .member(
            3,
            AFTER,
            pg_sys::C_COLLATION_OID,
            pg_sys::F_BTTEXTCMP,
            text(key),
        )
        .member(4, AFTER, none, pg_sys::F_BTBOOLCMP, band)
        .row()
}
