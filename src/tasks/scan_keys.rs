//! Scan keys: where an index scan begins and how far it goes.

use pgrx::pg_sys;

/// Scan keys, with room for the members of one row comparison.
pub struct Keys {
    pub keys: Vec<pg_sys::ScanKeyData>,
    members: Vec<pg_sys::ScanKeyData>,
}

pub const EQUAL: u16 = pg_sys::BTEqualStrategyNumber as u16;
pub const AT_LEAST: u16 = pg_sys::BTGreaterEqualStrategyNumber as u16;
pub const AFTER: u16 = pg_sys::BTGreaterStrategyNumber as u16;
pub const AT_MOST: u16 = pg_sys::BTLessEqualStrategyNumber as u16;

pub fn entry(
    attribute: i16,
    strategy: u16,
    flags: u32,
    collation: pg_sys::Oid,
    function: u32,
    value: pg_sys::Datum,
) -> pg_sys::ScanKeyData {
    let mut key = pg_sys::ScanKeyData::default();
    // SAFETY: fills the record that it is given; `function` is a built-in comparison of the column's type.
    unsafe {
        pg_sys::ScanKeyEntryInitialize(
            &mut key,
            flags as i32,
            attribute,
            strategy,
            pg_sys::InvalidOid,
            collation,
            pg_sys::Oid::from(function),
            value,
        );
    }
    key
}

pub fn text(value: &str) -> pg_sys::Datum {
    // SAFETY: copies `value` into a text of the current memory context.
    unsafe {
        pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(
            value.as_ptr().cast(),
            value.len() as i32,
        ))
    }
}

impl Keys {
    pub fn new() -> Keys {
        Keys {
            keys: Vec::with_capacity(6),
            members: Vec::with_capacity(3),
        }
    }

    pub fn text(mut self, attribute: i16, value: &str) -> Keys {
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            pg_sys::C_COLLATION_OID,
            pg_sys::F_TEXTEQ,
            text(value),
        ));
        self
    }

    pub fn int2(mut self, attribute: i16, value: i16) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_INT2EQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    pub fn int8(mut self, attribute: i16, value: i64) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_INT8EQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    pub fn bool(mut self, attribute: i16, value: bool) -> Keys {
        let zero = pg_sys::InvalidOid;
        self.keys.push(entry(
            attribute,
            EQUAL,
            0,
            zero,
            pg_sys::F_BOOLEQ,
            pg_sys::Datum::from(value),
        ));
        self
    }

    pub fn time_at_most(self, attribute: i16, value: i64) -> Keys {
        self.time(attribute, AT_MOST, pg_sys::F_TIMESTAMPTZ_LE, value)
    }

    pub fn time_after(self, attribute: i16, value: i64) -> Keys {
        self.time(attribute, AFTER, pg_sys::F_TIMESTAMPTZ_GT, value)
    }

    fn time(mut self, attribute: i16, strategy: u16, function: u32, value: i64) -> Keys {
        let (zero, value) = (pg_sys::InvalidOid, pg_sys::Datum::from(value));
        self.keys
            .push(entry(attribute, strategy, 0, zero, function, value));
        self
    }

    /// A member of the row comparison that ends the key: comparison function of the column's operator class.
    pub fn member(
        mut self,
        attribute: i16,
        strategy: u16,
        collation: pg_sys::Oid,
        function: u32,
        value: pg_sys::Datum,
    ) -> Keys {
        self.members.push(entry(
            attribute,
            strategy,
            pg_sys::SK_ROW_MEMBER,
            collation,
            function,
            value,
        ));
        self
    }

    /// Turns the members into one row comparison.
    pub fn row(mut self) -> Keys {
        if let Some(last) = self.members.last_mut() {
            last.sk_flags |= pg_sys::SK_ROW_END as i32;
        }
        if let Some(first) = self.members.first() {
            let header = pg_sys::ScanKeyData {
                sk_flags: pg_sys::SK_ROW_HEADER as i32,
                sk_attno: first.sk_attno,
                sk_strategy: first.sk_strategy,
                sk_argument: pg_sys::Datum::from(self.members.as_ptr()),
                ..Default::default()
            };
            self.keys.push(header);
        }
        self
    }
}
