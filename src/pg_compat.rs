//! What differs between Postgres 15, 16, 17 and 18.

use pgrx::pg_sys;

/// Whether there is a setting transaction_timeout, which came with Postgres 17.
pub const HAS_TRANSACTION_TIMEOUT: bool = cfg!(any(feature = "pg17", feature = "pg18"));

/// Begins an index scan; Postgres 18 added an argument for its instrumentation.
///
/// # Safety
/// Both relations are open with a lock, the snapshot is registered.
pub unsafe fn index_beginscan(
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    // SAFETY: as the caller promises.
    unsafe {
        #[cfg(feature = "pg18")]
        return pg_sys::index_beginscan(table, index, snapshot, std::ptr::null_mut(), keys, 0);
        #[cfg(not(feature = "pg18"))]
        return pg_sys::index_beginscan(table, index, snapshot, keys, 0);
    }
}

/// A column of a row descriptor, counted from 0; Postgres 18 keeps them elsewhere.
///
/// # Safety
/// The descriptor is a live one, and has the column.
pub unsafe fn attribute(
    descriptor: pg_sys::TupleDesc,
    at: usize,
) -> *const pg_sys::FormData_pg_attribute {
    // SAFETY: as the caller promises.
    unsafe {
        #[cfg(feature = "pg18")]
        return pg_sys::TupleDescAttr(descriptor, at as i32);
        #[cfg(not(feature = "pg18"))]
        return (*descriptor).attrs.as_ptr().add(at);
    }
}
