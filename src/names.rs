//! Validated names and numbers. A value of one of these types exists only if it obeys the rules, so nothing
//! behind this door checks again.

use std::borrow::Cow;
use std::fmt;

/// Longest queue name, in bytes.
pub const MAX_QUEUE_BYTES: usize = 255;
/// Longest name of a worker, in bytes.
pub const MAX_WORKER_BYTES: usize = 255;
/// Longest fairness key, in bytes.
pub const MAX_KEY_BYTES: usize = 256;
/// Largest cost of one task, in units.
pub const MAX_COST: f64 = 1e9;
/// Smallest weight of a key.
pub const MIN_WEIGHT: f64 = 0.001;
/// Largest weight of a key.
pub const MAX_WEIGHT: f64 = 1000.0;

/// Which kind of name a [`NameError`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Queue,
    Key,
    Worker,
}

impl Subject {
    fn noun(self) -> &'static str {
        match self {
            Subject::Queue => "queue name",
            Subject::Key => "fairness key",
            Subject::Worker => "worker name",
        }
    }

    fn limit(self) -> usize {
        match self {
            Subject::Queue => MAX_QUEUE_BYTES,
            Subject::Key => MAX_KEY_BYTES,
            Subject::Worker => MAX_WORKER_BYTES,
        }
    }
}

/// The rule that a rejected name or number broke, with the value that broke it.
#[derive(Clone, Debug, PartialEq)]
pub enum NameError {
    /// Empty, or nothing but whitespace.
    Blank(Subject),
    /// More bytes than the limit.
    TooLong { subject: Subject, bytes: usize },
    /// Whitespace at the beginning or the end.
    OuterWhitespace { subject: Subject, value: String },
    /// `.` or `..`, which path-like tools would resolve.
    Dots { subject: Subject, value: String },
    /// A control character anywhere.
    Control { subject: Subject, value: String },
    /// A priority outside 1 to 5.
    PriorityRange(i64),
    /// A weight outside 0.001 to 1000, or not a number.
    WeightRange(f64),
    /// The cost of a claim that is not above 0 and at most 1e9.
    ClaimCostRange(f64),
    /// A reported cost that is not between 0 and 1e9.
    ReportedCostRange(f64),
}

impl NameError {
    /// One line that names the wrong value; lower case, no full stop.
    pub fn message(&self) -> String {
        match self {
            NameError::Blank(subject) => format!("{} must not be blank", subject.noun()),
            NameError::TooLong { subject, bytes } => {
                format!("{} is too long: {bytes} bytes", subject.noun())
            }
            NameError::OuterWhitespace { subject, value } => {
                format!(
                    "{} {value:?} begins or ends with whitespace",
                    subject.noun()
                )
            }
            NameError::Dots { subject, value } => {
                format!("{} must not be {value:?}", subject.noun())
            }
            NameError::Control { subject, value } => {
                format!("{} {value:?} contains a control character", subject.noun())
            }
            NameError::PriorityRange(value) => format!("priority {value} is out of range"),
            NameError::WeightRange(value) => format!("weight {value} is out of range"),
            NameError::ClaimCostRange(value) | NameError::ReportedCostRange(value) => {
                format!("cost {value} is out of range")
            }
        }
    }

    /// How to mend it.
    pub fn hint(&self) -> String {
        match self {
            NameError::Blank(Subject::Key) => {
                "Use null for a task without a key, or a name of 1 to 256 bytes.".into()
            }
            NameError::Blank(subject) => format!("Use a name of 1 to {} bytes.", subject.limit()),
            NameError::TooLong { subject, .. } => {
                format!("Use at most {} bytes.", subject.limit())
            }
            NameError::OuterWhitespace { .. } => {
                "Trim it: names that look alike must be alike.".into()
            }
            NameError::Dots { .. } => "Use any other name.".into(),
            NameError::Control { .. } => "Use printable characters.".into(),
            NameError::PriorityRange(_) => "Use 1 (first) to 5 (last).".into(),
            NameError::WeightRange(_) => "Use a number from 0.001 to 1000.".into(),
            NameError::ClaimCostRange(_) => "Use a number above 0 and at most 1e9.".into(),
            NameError::ReportedCostRange(_) => "Use a number from 0 to 1e9.".into(),
        }
    }
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for NameError {}

fn check(subject: Subject, name: &str) -> Result<(), NameError> {
    if name.len() > subject.limit() {
        return Err(NameError::TooLong {
            subject,
            bytes: name.len(),
        });
    }
    // Nearly every real name is printable ASCII: decided in one pass over the bytes.
    let plain = name.bytes().all(|byte| byte.is_ascii_graphic());
    if plain && !name.is_empty() {
        return match name {
            "." | ".." if subject != Subject::Worker => Err(NameError::Dots {
                subject,
                value: name.into(),
            }),
            _ => Ok(()),
        };
    }
    let trimmed = name.trim_matches(char::is_whitespace);
    if trimmed.is_empty() {
        return Err(NameError::Blank(subject));
    }
    if name.chars().any(char::is_control) {
        return Err(NameError::Control {
            subject,
            value: name.into(),
        });
    }
    if trimmed.len() != name.len() {
        return Err(NameError::OuterWhitespace {
            subject,
            value: name.into(),
        });
    }
    Ok(())
}

/// The name of a queue: 1 to 255 bytes, no outer whitespace, no control character, not `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueName<'a>(Cow<'a, str>);

impl<'a> QueueName<'a> {
    /// Checks `name` against every rule.
    pub fn parse(name: impl Into<Cow<'a, str>>) -> Result<Self, NameError> {
        let name = name.into();
        check(Subject::Queue, &name)?;
        Ok(QueueName(name))
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Display for QueueName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Checks the name of a worker: 1 to 255 bytes, no outer whitespace, no control character.
pub fn check_worker(name: &str) -> Result<(), NameError> {
    check(Subject::Worker, name)
}

/// The tenant of a task: 1 to 256 bytes, no outer whitespace, no control character, not `.` or `..`; or the
/// default key (`""`), which only [`FairnessKey::default_key`] and [`FairnessKey::stored`] give.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FairnessKey<'a>(Cow<'a, str>);

impl<'a> FairnessKey<'a> {
    /// The key of tasks that have none. Its weight is always 1.
    pub const fn default_key() -> Self {
        FairnessKey(Cow::Borrowed(""))
    }

    /// Checks `key` against every rule; an empty key is an error.
    pub fn parse(key: impl Into<Cow<'a, str>>) -> Result<Self, NameError> {
        let key = key.into();
        check(Subject::Key, &key)?;
        Ok(FairnessKey(key))
    }

    /// A key as it stands in the tables, which admit only valid ones; `""` is the default key.
    pub fn stored(key: &'a str) -> Self {
        FairnessKey(Cow::Borrowed(key))
    }

    /// A key that the scheduling core holds, which was valid when it went in.
    pub(crate) fn trusted(key: &'a [u8]) -> Self {
        FairnessKey(String::from_utf8_lossy(key))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub fn into_owned(self) -> FairnessKey<'static> {
        FairnessKey(Cow::Owned(self.0.into_owned()))
    }
}

impl fmt::Display for FairnessKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A priority: 1 (first) to 5 (last), 3 by default. Strict: a lower number always goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Priority(u8);

impl Priority {
    /// How many there are.
    pub const COUNT: usize = 5;
    /// All of them, the most urgent first.
    pub const ALL: [Priority; Self::COUNT] = [
        Priority(1),
        Priority(2),
        Priority(3),
        Priority(4),
        Priority(5),
    ];

    pub fn new(value: i64) -> Result<Self, NameError> {
        match value {
            1..=5 => Ok(Priority(value as u8)),
            _ => Err(NameError::PriorityRange(value)),
        }
    }

    pub fn get(self) -> u8 {
        self.0
    }

    /// 0 for priority 1, and so on.
    pub fn index(self) -> usize {
        usize::from(self.0) - 1
    }
}

impl Default for Priority {
    fn default() -> Self {
        Priority(3)
    }
}

/// A key's weight: a finite number from 0.001 to 1000. Shares are proportional to it.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Weight(f64);

impl Weight {
    pub fn new(value: f64) -> Result<Self, NameError> {
        if (MIN_WEIGHT..=MAX_WEIGHT).contains(&value) {
            Ok(Weight(value))
        } else {
            Err(NameError::WeightRange(value))
        }
    }

    pub fn get(self) -> f64 {
        self.0
    }
}

/// What a task costs, in units.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Cost(f64);

impl Cost {
    /// The cost charged by a claim: above 0, so that virtual time grows at every claim.
    pub fn of_claim(value: f64) -> Result<Self, NameError> {
        if value > 0.0 && value <= MAX_COST {
            Ok(Cost(value))
        } else {
            Err(NameError::ClaimCostRange(value))
        }
    }

    /// The cost that a worker reports when it completes a task: 0 is allowed.
    pub fn reported(value: f64) -> Result<Self, NameError> {
        if (0.0..=MAX_COST).contains(&value) {
            Ok(Cost(value))
        } else {
            Err(NameError::ReportedCostRange(value))
        }
    }
}
