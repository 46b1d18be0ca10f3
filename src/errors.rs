//! Every error a user can meet: its SQLSTATE, its message, its hint.

use pgrx::pg_sys::panic::{CaughtError, ErrorReport, ErrorReportWithLevel};
use pgrx::prelude::*;

use crate::names::NameError;

/// Keeps stack traces to bugs. With `RUST_BACKTRACE` in the server's environment, pgrx puts one into the DETAIL of each error
/// that a statement of ours has met, as a user's mistake that the row trigger finds.
pub fn hook() {
    let of_pgrx = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let payload = panic.payload();
        // How pgrx passes an ERROR on, of Postgres' own or of ours.
        let is_error = payload.is::<CaughtError>()
            || payload.is::<ErrorReport>()
            || payload.is::<ErrorReportWithLevel>();
        if !is_error {
            of_pgrx(panic);
        }
    }));
}

/// A user's mistake, or a limit that was reached.
#[derive(Clone, Debug)]
pub enum Error {
    /// A queue name, key, worker name, priority, weight or cost that breaks its rule; the value as given.
    Name { value: String, broken: NameError },
    /// An argument that must not be NULL.
    Null { what: &'static str },
    /// `max_tasks` outside 1 to `harvest_fair.max_batch`.
    MaxTasks { value: i32, max: i32 },
    /// `max_attempts` below 1.
    MaxAttempts { value: i32 },
    /// A count of a task, to which each claim adds one, that is negative or near the end of its type.
    Counter {
        what: &'static str,
        value: i64,
        max: i64,
    },
    /// An interval that must not be negative (or must be positive).
    Duration {
        what: &'static str,
        value: String,
        positive: bool,
    },
    /// Arrays of one call that differ in length.
    ArrayLength {
        first: &'static str,
        first_len: usize,
        second: &'static str,
        second_len: usize,
    },
    /// An array with a NULL in it.
    ArrayNull { what: &'static str },
    /// A `parent_id` that no task has.
    UnknownParent { id: i64 },
    /// REPEATABLE READ or SERIALIZABLE.
    Isolation {
        function: &'static str,
        level: &'static str,
    },
    /// A call in a read-only transaction or on a standby.
    ReadOnly { function: &'static str },
    /// A comparison of board and tables within a transaction that has changed the tables.
    Uncommitted { function: &'static str },
    /// No memory for a copy of the board.
    NoMemory { keys: u32 },
    /// `sticky_for` without a `sticky_worker`.
    StickyFor,
    /// PREPARE TRANSACTION after a claim, a settlement, or a delete of what runs.
    Prepare,
    /// The 1,001st override of a queue.
    TooManyWeights { queue: String, max: usize },
    /// An override for the default key, whose weight is always 1.
    DefaultKeyWeight,
    /// A setting that no queue has.
    UnknownSetting { field: String, known: String },
    /// A setting whose value has the wrong type or range.
    Setting {
        field: String,
        value: String,
        expected: &'static str,
    },
    /// A jsonb argument that is not an object.
    NotAnObject { what: &'static str, value: String },
    /// A jsonb argument with a number or a depth beyond what can be held.
    Json { what: &'static str, reason: String },
    /// A weight in a jsonb object that is not a number.
    WeightType { key: String, value: String },
    /// A weight in a jsonb object that is out of range.
    WeightOfKey { key: String, value: f64 },
    /// No room for another queue on the board.
    TooManyQueues { queue: String, max: u32 },
    /// No room for another key on the board.
    BoardFull { key: String, max: u32 },
    /// The library was not preloaded.
    NotPreloaded,
    /// The extension's tables are not in this database.
    NotInstalled,
    /// A DBA has changed what the extension relies on: what is wrong, and how to put it right.
    Altered { what: String, mend: String },
}

/// A value as it is shown in a message: quoted, and cut where it is long.
pub fn quoted(value: &str) -> String {
    const SHOWN: usize = 100;
    let mut shown: String = value
        .chars()
        .take(SHOWN)
        .flat_map(char::escape_debug)
        .collect();
    if value.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    format!("\"{shown}\"")
}

impl Error {
    fn code(&self) -> PgSqlErrorCode {
        use PgSqlErrorCode::*;
        match self {
            Error::Null { .. } => ERRCODE_NULL_VALUE_NOT_ALLOWED,
            Error::ArrayLength { .. } => ERRCODE_INVALID_PARAMETER_VALUE,
            Error::ArrayNull { .. } => ERRCODE_NULL_VALUE_NOT_ALLOWED,
            Error::UnknownParent { .. } => ERRCODE_FOREIGN_KEY_VIOLATION,
            Error::Isolation { .. } | Error::Prepare => ERRCODE_FEATURE_NOT_SUPPORTED,
            Error::ReadOnly { .. } => ERRCODE_READ_ONLY_SQL_TRANSACTION,
            Error::Uncommitted { .. } => ERRCODE_ACTIVE_SQL_TRANSACTION,
            Error::NoMemory { .. } => ERRCODE_OUT_OF_MEMORY,
            Error::TooManyWeights { .. } => ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            Error::TooManyQueues { .. } | Error::BoardFull { .. } => {
                ERRCODE_CONFIGURATION_LIMIT_EXCEEDED
            }
            Error::NotPreloaded | Error::Altered { .. } => ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            Error::NotInstalled => ERRCODE_UNDEFINED_TABLE,
            Error::Name { .. }
            | Error::MaxTasks { .. }
            | Error::MaxAttempts { .. }
            | Error::Counter { .. }
            | Error::Duration { .. }
            | Error::StickyFor
            | Error::UnknownSetting { .. }
            | Error::Setting { .. }
            | Error::NotAnObject { .. }
            | Error::Json { .. }
            | Error::WeightType { .. }
            | Error::WeightOfKey { .. }
            | Error::DefaultKeyWeight => ERRCODE_INVALID_PARAMETER_VALUE,
        }
    }

    fn message(&self) -> String {
        match self {
            Error::Name { value, broken } => match broken {
                // These do not show the value themselves.
                NameError::Blank(_) | NameError::TooLong { .. } => {
                    format!("{}: {}", broken.message(), quoted(value))
                }
                _ => broken.message(),
            },
            Error::Null { what } => format!("{what} must not be null"),
            Error::MaxTasks { value, max } => {
                format!("max_tasks must be between 1 and {max}, not {value}")
            }
            Error::MaxAttempts { value } => format!("max_attempts must be at least 1, not {value}"),
            Error::Counter { what, value, .. } => format!("{what} {value} is out of range"),
            Error::Duration {
                what,
                value,
                positive: true,
            } => format!("{what} must be positive, not {value}"),
            Error::Duration {
                what,
                value,
                positive: false,
            } => format!("{what} must not be negative, not {value}"),
            Error::ArrayLength {
                first,
                first_len,
                second,
                second_len,
            } => {
                format!("{first} has {first_len} elements, but {second} has {second_len}")
            }
            Error::ArrayNull { what } => format!("{what} must not contain null"),
            Error::UnknownParent { id } => format!("parent task {id} does not exist"),
            Error::Isolation { function, level } => {
                format!("{function} needs isolation level read committed, not {level}")
            }
            Error::ReadOnly { function } => {
                format!("cannot execute {function} in a read-only transaction")
            }
            Error::Uncommitted { function } => {
                format!(
                    "{function} cannot run in a transaction that has changed tasks, weights or settings"
                )
            }
            Error::NoMemory { keys } => {
                format!("not enough memory for a copy of the board with its {keys} slots")
            }
            Error::Prepare => {
                "cannot prepare a transaction that has claimed or settled tasks, deleted running ones, or changed weights or settings"
                    .into()
            }
            Error::TooManyWeights { queue, max } => {
                format!("queue {} already has {max} weight overrides", quoted(queue))
            }
            Error::UnknownSetting { field, .. } => format!("unknown setting: {}", quoted(field)),
            Error::Setting { field, value, .. } => {
                format!("invalid value for setting {}: {value}", quoted(field))
            }
            Error::NotAnObject { what, value } => {
                format!("{what} must be a jsonb object, not {value}")
            }
            Error::Json { what, reason } => format!("{what} cannot be read: {reason}"),
            Error::WeightType { key, value } => format!(
                "weight of key {} must be a number or null, not {value}",
                quoted(key)
            ),
            Error::WeightOfKey { key, value } => {
                format!("weight {value} of key {} is out of range", quoted(key))
            }
            Error::StickyFor => "sticky_for needs a sticky_worker".into(),
            Error::DefaultKeyWeight => "the default key cannot have a weight override".into(),
            Error::TooManyQueues { queue, max } => {
                format!(
                    "no room on the board for queue {}: all {max} slots are in use",
                    quoted(queue)
                )
            }
            Error::BoardFull { key, max } => {
                format!(
                    "no room on the board for key {}: all {max} slots are in use",
                    quoted(key)
                )
            }
            Error::NotPreloaded => {
                "harvest_fair must be loaded through shared_preload_libraries".into()
            }
            Error::NotInstalled => {
                "the extension harvest_fair is not installed in this database".into()
            }
            Error::Altered { what, .. } => what.clone(),
        }
    }

    fn hint(&self) -> String {
        match self {
            Error::Name { broken, .. } => broken.hint(),
            Error::MaxTasks { .. } => "The upper limit is the setting harvest_fair.max_batch.".into(),
            Error::ArrayLength { .. } => "Give one element for each task.".into(),
            Error::UnknownParent { .. } => "A parent must have been enqueued before its children.".into(),
            Error::Isolation { .. } => {
                "Start the transaction with BEGIN ISOLATION LEVEL READ COMMITTED, or check default_transaction_isolation."
                    .into()
            }
            Error::Prepare => "Do so in a transaction of its own; one that only enqueues tasks can be prepared.".into(),
            Error::TooManyWeights { max, .. } => {
                format!("A queue can have {max} overrides. Clear one, or give tasks a weight of their own.")
            }
            Error::UnknownSetting { known, .. } => format!("The settings are {known}."),
            Error::Setting { expected, .. } => format!("It takes {expected}; null restores the default."),
            Error::NotAnObject { .. } => r#"Write it as '{"name": value}'."#.into(),
            Error::Json { .. } => "Numbers must fit double precision, and nesting has at most 127 levels.".into(),
            Error::WeightType { .. } | Error::WeightOfKey { .. } => {
                "Use a number from 0.001 to 1000, or null to clear the override.".into()
            }
            Error::StickyFor => "Name the worker that the task waits for.".into(),
            Error::DefaultKeyWeight => "Its weight is always 1. Give the tasks a fairness key.".into(),
            Error::TooManyQueues { .. } => "Raise harvest_fair.max_queues and restart the server.".into(),
            Error::BoardFull { .. } => "Raise harvest_fair.max_keys and restart the server.".into(),
            Error::NotPreloaded => {
                "Add harvest_fair to shared_preload_libraries in postgresql.conf and restart the server.".into()
            }
            Error::NotInstalled => "Run CREATE EXTENSION harvest_fair.".into(),
            Error::Altered { mend, .. } => mend.clone(),
            Error::Null { .. } => "Give a value.".into(),
            Error::MaxAttempts { .. } => "Give at least 1, or leave it out for 5.".into(),
            Error::Counter { max, .. } => format!("Give 0 to {max}, or leave it out: each claim adds one."),
            Error::Duration { positive: true, .. } => "Give an interval above zero, or leave it out.".into(),
            Error::Duration { positive: false, .. } => "Give an interval of zero or more, or leave it out.".into(),
            Error::ArrayNull { .. } => "Leave the element out.".into(),
            Error::Uncommitted { .. } => "Commit it first: until then the board does not know of the changes.".into(),
            Error::NoMemory { .. } => "Try again when the server has more memory to spare.".into(),
            Error::ReadOnly { .. } => "Connect to the primary, or start a transaction that is not read only.".into(),
        }
    }

    /// Raises the error.
    pub fn raise(self) -> ! {
        ErrorReport::from(self).report(PgLogLevel::ERROR);
        unreachable!("an ERROR does not return")
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message())
    }
}

impl From<Error> for ErrorReport {
    fn from(error: Error) -> ErrorReport {
        ErrorReport::new(error.code(), error.message(), "harvest_fair").set_hint(error.hint())
    }
}
