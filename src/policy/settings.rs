//! The settings of a queue: one jsonb object in harvest_fair.queue, checked field by field.

use pgrx::pg_sys;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::board::BoardSettings;
use crate::config;
use crate::errors::Error;
use crate::sfq::Policy;

const MICROS_PER_S: f64 = 1e6;
const DEFAULT_HANDICAP: i64 = 30_000_000;
/// Largest rate and largest weight of a queue.
const MAX_RATE: f64 = 1e6;
const MAX_QUEUE_WEIGHT: f64 = 1e6;

/// The settings that a queue can have, in the order in which they are shown.
pub const FIELDS: [&str; 11] = [
    "queue_weight",
    "rate_limit",
    "key_rate_limit",
    "key_max_running",
    "lease",
    "priority_aging",
    "new_start_handicap",
    "charge",
    "group_separator",
    "paused",
    "retention",
];

/// What is set for a queue; `None`: the default holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Share of first looks in a claim from several queues; 0: last.
    pub queue_weight: Option<f64>,
    /// Claims per second of the queue.
    pub rate_limit: Option<f64>,
    /// Claims per second of each key, times its weight.
    pub key_rate_limit: Option<f64>,
    /// Most running tasks of a key.
    pub key_max_running: Option<u32>,
    /// Length of a lease (µs).
    pub lease: Option<i64>,
    /// Waiting time that lifts a task by one priority (µs).
    pub priority_aging: Option<i64>,
    /// How much later a new start sorts (µs).
    pub new_start_handicap: Option<i64>,
    /// Whether a claim is charged the seconds it is expected to run.
    pub by_seconds: Option<bool>,
    /// What ends the group's part of a key.
    pub group_separator: Option<char>,
    /// Nothing is claimed.
    pub paused: Option<bool>,
    /// How long finished tasks are kept (µs).
    pub retention: Option<i64>,
}

fn typed<T: DeserializeOwned>(
    field: &str,
    value: &Value,
    expected: &'static str,
) -> Result<T, Error> {
    T::deserialize(value).map_err(|_| wrong(field, value, expected))
}

fn wrong(field: &str, value: &Value, expected: &'static str) -> Error {
    Error::Setting {
        field: field.to_owned(),
        value: value.to_string(),
        expected,
    }
}

fn number(
    field: &str,
    value: &Value,
    min: f64,
    max: f64,
    expected: &'static str,
) -> Result<f64, Error> {
    let number: f64 = typed(field, value, expected)?;
    if number >= min && number <= max {
        Ok(number)
    } else {
        Err(wrong(field, value, expected))
    }
}

/// A duration: interval text, or a number of seconds.
fn duration(field: &str, value: &Value, positive: bool) -> Result<i64, Error> {
    let expected = if positive {
        "interval text like \"10 s\" or a number of seconds, above zero"
    } else {
        "interval text like \"10 s\" or a number of seconds, zero or more"
    };
    let micros = match value {
        Value::Number(seconds) => {
            let micros = seconds.as_f64().unwrap_or(f64::MAX) * MICROS_PER_S;
            // NaN cannot be: it is no JSON number.
            if micros.abs() >= i64::MAX as f64 / 2.0 {
                return Err(wrong(field, value, expected));
            }
            micros.round() as i64
        }
        Value::String(text) => interval(text).ok_or_else(|| wrong(field, value, expected))?,
        _ => return Err(wrong(field, value, expected)),
    };
    if micros < 0 || (positive && micros == 0) {
        Err(wrong(field, value, expected))
    } else {
        Ok(micros)
    }
}

/// Interval text as Postgres reads it, in microseconds.
fn interval(text: &str) -> Option<i64> {
    let text = std::ffi::CString::new(text).ok()?;
    // SAFETY: interval_in takes a C string, a type and a modifier; its error is caught, and it holds no resource.
    let parse = || unsafe {
        let datum = pg_sys::OidInputFunctionCall(
            pg_sys::Oid::from(pg_sys::F_INTERVAL_IN),
            text.as_ptr().cast_mut(),
            pg_sys::InvalidOid,
            -1,
        );
        <pgrx::datum::Interval as pgrx::FromDatum>::from_datum(datum, false)
            .map(|i| crate::tasks::micros(&i))
    };
    pgrx::PgTryBuilder::new(parse)
        .catch_others(|_| None)
        .execute()
}

impl Settings {
    /// Reads what is stored; every field was checked when it was set.
    pub fn read(stored: &Map<String, Value>) -> Result<Settings, Error> {
        let mut settings = Settings::default();
        for (field, value) in stored {
            settings.set(field, value)?;
        }
        Ok(settings)
    }

    /// Sets one field from its jsonb value; null is the default.
    pub fn set(&mut self, field: &str, value: &Value) -> Result<(), Error> {
        let given = (!value.is_null()).then_some(value);
        match field {
            "queue_weight" => {
                let check = |v| {
                    number(
                        field,
                        v,
                        0.0,
                        MAX_QUEUE_WEIGHT,
                        "a number from 0 to 1000000",
                    )
                };
                self.queue_weight = given.map(check).transpose()?;
            }
            "rate_limit" => self.rate_limit = given.map(|v| rate(field, v)).transpose()?,
            "key_rate_limit" => self.key_rate_limit = given.map(|v| rate(field, v)).transpose()?,
            "key_max_running" => {
                const EXPECTED: &str = "a whole number, zero or more";
                let check = |v| typed::<u32>(field, v, EXPECTED);
                self.key_max_running = given.map(check).transpose()?;
            }
            "lease" => self.lease = given.map(|v| duration(field, v, true)).transpose()?,
            "priority_aging" => {
                self.priority_aging = given.map(|v| duration(field, v, true)).transpose()?
            }
            "new_start_handicap" => {
                self.new_start_handicap = given.map(|v| duration(field, v, false)).transpose()?
            }
            "charge" => {
                let check = |v: &Value| match v.as_str() {
                    Some("claims") => Ok(false),
                    Some("seconds") => Ok(true),
                    _ => Err(wrong(field, v, "\"claims\" or \"seconds\"")),
                };
                self.by_seconds = given.map(check).transpose()?;
            }
            "group_separator" => {
                self.group_separator = given.map(|v| separator(field, v)).transpose()?
            }
            "paused" => {
                self.paused = given
                    .map(|v| typed(field, v, "true or false"))
                    .transpose()?
            }
            "retention" => self.retention = given.map(|v| duration(field, v, false)).transpose()?,
            _ => {
                return Err(Error::UnknownSetting {
                    field: field.to_owned(),
                    known: FIELDS.join(", "),
                });
            }
        }
        Ok(())
    }

    /// What the board needs to know.
    pub fn on_board(&self) -> BoardSettings {
        BoardSettings {
            policy: Policy {
                key_max_running: self.key_max_running,
                rate_limit: self.rate_limit,
                key_rate_limit: self.key_rate_limit,
                aging: self.priority_aging.unwrap_or(0),
                handicap: self.new_start_handicap.unwrap_or(DEFAULT_HANDICAP),
                paused: self.paused.unwrap_or(false),
                separator: self.group_separator,
                by_seconds: self.by_seconds.unwrap_or(false),
            },
            lease: self.lease,
            queue_weight: self.queue_weight,
        }
    }

    /// Each setting's effective value and where it comes from: `set`, `guc` or `default`.
    pub fn effective(&self) -> Vec<(&'static str, Value, &'static str)> {
        let seconds = |micros: i64| Value::from(micros as f64 / MICROS_PER_S);
        let source = |set: bool, otherwise: &'static str| if set { "set" } else { otherwise };
        FIELDS
            .iter()
            .map(|field| {
                let (value, source) = match *field {
                    "queue_weight" => (
                        Value::from(self.queue_weight.unwrap_or(1.0)),
                        source(self.queue_weight.is_some(), "default"),
                    ),
                    "rate_limit" => (
                        Value::from(self.rate_limit),
                        source(self.rate_limit.is_some(), "default"),
                    ),
                    "key_rate_limit" => (
                        Value::from(self.key_rate_limit),
                        source(self.key_rate_limit.is_some(), "default"),
                    ),
                    "key_max_running" => (
                        Value::from(self.key_max_running),
                        source(self.key_max_running.is_some(), "default"),
                    ),
                    "lease" => (
                        seconds(self.lease.unwrap_or_else(config::default_lease)),
                        source(self.lease.is_some(), "guc"),
                    ),
                    "priority_aging" => (
                        self.priority_aging.map_or(Value::Null, seconds),
                        source(self.priority_aging.is_some(), "default"),
                    ),
                    "new_start_handicap" => (
                        seconds(self.new_start_handicap.unwrap_or(DEFAULT_HANDICAP)),
                        source(self.new_start_handicap.is_some(), "default"),
                    ),
                    "charge" => (
                        Value::from(if self.by_seconds == Some(true) {
                            "seconds"
                        } else {
                            "claims"
                        }),
                        source(self.by_seconds.is_some(), "default"),
                    ),
                    "group_separator" => (
                        self.group_separator
                            .map_or(Value::Null, |c| Value::from(c.to_string())),
                        source(self.group_separator.is_some(), "default"),
                    ),
                    "paused" => (
                        Value::from(self.paused.unwrap_or(false)),
                        source(self.paused.is_some(), "default"),
                    ),
                    _ => (
                        self.retention
                            .or_else(config::retention)
                            .map_or(Value::Null, seconds),
                        source(self.retention.is_some(), "guc"),
                    ),
                };
                (*field, value, source)
            })
            .collect()
    }
}

fn rate(field: &str, value: &Value) -> Result<f64, Error> {
    const EXPECTED: &str = "a number above 0 and at most 1000000";
    number(field, value, f64::MIN_POSITIVE, MAX_RATE, EXPECTED)
}

fn separator(field: &str, value: &Value) -> Result<char, Error> {
    const EXPECTED: &str = "one visible character";
    let text: String = typed(field, value, EXPECTED)?;
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (Some(c), None) if !c.is_control() && !c.is_whitespace() => Ok(c),
        _ => Err(wrong(field, value, EXPECTED)),
    }
}
