//! A version of a task's row, as a trigger sees it: its columns, and those that the trigger fills in.

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::catalog::{Catalog, column};
use crate::board::QueueRef;

/// The columns of one row version.
pub struct Fields {
    values: [pg_sys::Datum; column::COUNT],
    nulls: [bool; column::COUNT],
}

impl Fields {
    pub fn of(tuple: pg_sys::HeapTuple, descriptor: pg_sys::TupleDesc) -> Fields {
        let mut fields = Fields {
            values: [pg_sys::Datum::from(0); column::COUNT],
            nulls: [true; column::COUNT],
        };
        // SAFETY: tuple and descriptor belong together; a DBA may have added columns, which get room of their own.
        unsafe {
            let columns = (*descriptor).natts as usize;
            if columns <= column::COUNT {
                pg_sys::heap_deform_tuple(
                    tuple,
                    descriptor,
                    fields.values.as_mut_ptr(),
                    fields.nulls.as_mut_ptr(),
                );
            } else {
                let mut values = vec![pg_sys::Datum::from(0); columns];
                let mut nulls = vec![true; columns];
                pg_sys::heap_deform_tuple(
                    tuple,
                    descriptor,
                    values.as_mut_ptr(),
                    nulls.as_mut_ptr(),
                );
                fields.values.copy_from_slice(&values[..column::COUNT]);
                fields.nulls.copy_from_slice(&nulls[..column::COUNT]);
            }
        }
        fields
    }

    pub fn is_null(&self, column: usize) -> bool {
        self.nulls[column - 1]
    }

    pub fn get<T: FromDatum>(&self, column: usize) -> Option<T> {
        // SAFETY: callers name the Rust type of the column.
        unsafe { T::from_datum(self.values[column - 1], self.nulls[column - 1]) }
    }

    pub fn text(&self, column: usize) -> Option<&str> {
        // SAFETY: callers name text columns; the datum lives as long as the row version.
        unsafe { <&str>::from_datum(self.values[column - 1], self.nulls[column - 1]) }
    }

    pub fn micros(&self, column: usize) -> Option<i64> {
        (!self.is_null(column)).then(|| self.values[column - 1].value() as i64)
    }

    pub fn is(&self, state: pg_sys::Oid) -> bool {
        self.get::<pg_sys::Oid>(column::STATE) == Some(state)
    }

    pub fn id(&self) -> i64 {
        self.get(column::ID).unwrap_or(i64::MAX)
    }

    pub fn queue(&self) -> &str {
        self.text(column::QUEUE).unwrap_or("")
    }

    pub fn queue_ref(&self, catalog: &Catalog) -> QueueRef {
        QueueRef {
            scope: catalog.scope(),
            name: self.queue().to_owned(),
        }
    }

    pub fn key(&self) -> &str {
        self.text(column::FAIRNESS_KEY).unwrap_or("")
    }

    pub fn priority(&self) -> i16 {
        self.get(column::PRIORITY).unwrap_or(3)
    }

    pub fn weight(&self) -> Option<f64> {
        self.get(column::WEIGHT)
    }

    pub fn band(&self) -> u8 {
        u8::from(self.get(column::NEW_START).unwrap_or(false))
    }

    pub fn due(&self) -> i64 {
        self.micros(column::SCHEDULED_AT).unwrap_or(i64::MAX)
    }

    pub fn sticky_until(&self) -> Option<i64> {
        self.micros(column::STICKY_UNTIL)
    }

    pub fn lease_until(&self) -> Option<i64> {
        self.micros(column::LEASE_UNTIL)
    }

    pub fn parent_id(&self) -> Option<i64> {
        self.get(column::PARENT_ID)
    }

    pub fn attempt(&self) -> i32 {
        self.get(column::ATTEMPT).unwrap_or(0)
    }

    pub fn lease(&self) -> Option<i64> {
        self.get(column::LEASE)
    }

    pub fn max_attempts(&self) -> i32 {
        self.get(column::MAX_ATTEMPTS).unwrap_or(1)
    }
}

/// Columns that the trigger fills in.
#[derive(Default)]
pub struct Changes {
    columns: Vec<i32>,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Changes {
    pub fn set(&mut self, row: &mut Fields, column: usize, value: Option<pg_sys::Datum>) {
        let datum = value.unwrap_or(pg_sys::Datum::from(0));
        row.values[column - 1] = datum;
        row.nulls[column - 1] = value.is_none();
        self.columns.push(column as i32);
        self.values.push(datum);
        self.nulls.push(value.is_none());
    }

    pub fn apply(
        self,
        tuple: pg_sys::HeapTuple,
        descriptor: pg_sys::TupleDesc,
    ) -> pg_sys::HeapTuple {
        if self.columns.is_empty() {
            return tuple;
        }
        // SAFETY: the three arrays have one element a changed column, and live through the call, which only reads them
        // (the older headers do not say so).
        unsafe {
            pg_sys::heap_modify_tuple_by_cols(
                tuple,
                descriptor,
                self.columns.len() as i32,
                self.columns.as_ptr().cast_mut(),
                self.values.as_ptr().cast_mut(),
                self.nulls.as_ptr().cast_mut(),
            )
        }
    }
}
