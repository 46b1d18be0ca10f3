//! What fuzz tests pass to the extension: mostly what lies just within and just beyond a limit.

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::Value;

use crate::policy_support::SETTINGS;

/// A source of input, repeated by its seed.
pub struct Input(pub StdRng);

/// The rule for names, as the manual gives it.
pub fn name_is_valid(name: &str, longest: usize) -> bool {
    !name.is_empty()
        && name.len() <= longest
        && name.trim() == name
        && !name.chars().any(char::is_control)
        && name != "."
        && name != ".."
}

/// The rule for keys.
pub fn key_is_valid(key: &str) -> bool {
    name_is_valid(key, 256)
}

const PIECES: &[&str] = &[
    "a",
    "Z",
    "0",
    "é",
    "ß",
    "Ω",
    "ж",
    "中",
    "한",
    "🦀",
    "👩‍👩‍👧",
    "e\u{301}",
    "\u{200b}",
    "\u{feff}",
    "\u{202e}",
    "\u{fffd}",
    "\u{10ffff}",
    "\u{e000}",
    "'",
    "\"",
    "\\",
    "/",
    "%",
    "$1",
    "--",
    ";",
    "{",
    "}",
    ".",
    "..",
    ",",
    "*",
    "NULL",
];
const SPACES: &[&str] = &[" ", "\u{a0}", "\u{2003}", "\u{3000}", "\u{1680}"];
const CONTROLS: &[&str] = &[
    "\n", "\t", "\r", "\u{1}", "\u{7f}", "\u{85}", "\u{9f}", "\u{b}", "\0",
];

impl Input {
    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        of.choose(&mut self.0).expect("there is something")
    }

    /// A name or key around the limit of `longest` bytes, or a short one.
    pub fn name(&mut self, longest: usize) -> String {
        let mut name = String::new();
        let wanted = match self.0.random_range(0..4) {
            0 => longest - 3 + self.0.random_range(0..6),
            _ => self.0.random_range(0..12),
        };
        while name.len() < wanted {
            let piece = match self.0.random_range(0..60) {
                0 => self.pick(SPACES),
                1 => self.pick(CONTROLS),
                2..30 => self.pick(&["x", "y", "z"]),
                _ => self.pick(PIECES),
            };
            name.push_str(piece);
        }
        match self.0.random_range(0..30) {
            0 => format!(" {name}"),
            1 => format!("{name}\u{a0}"),
            2 => (*self.pick(&["", ".", "..", "...", " ", "\u{3000}"])).to_owned(),
            _ => name,
        }
    }

    pub fn maybe_key(&mut self) -> Option<String> {
        match self.0.random_range(0..10) {
            0 => None,
            1 => Some(self.name(256)),
            _ => Some((*self.pick(&["a", "b", "c/1", "c/2", "é"])).to_owned()),
        }
    }

    pub fn worker(&mut self) -> Option<String> {
        match self.0.random_range(0..12) {
            0 => None,
            1 => Some(self.name(255)),
            _ => Some((*self.pick(&["w", "v"])).to_owned()),
        }
    }

    pub fn float(&mut self) -> f64 {
        const EDGES: &[f64] = &[
            0.0,
            -0.0,
            0.001,
            0.000_999_999,
            1000.0,
            1_000.000_001,
            1e9,
            1_000_000_001.0,
            1.0,
            -1.0,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            1e-9,
        ];
        match self.0.random_range(0..3) {
            0 => *self.pick(EDGES),
            1 => self.0.random_range(0.0..1100.0),
            _ => f64::from_bits(self.0.random()),
        }
    }

    /// Mostly a number that a call takes.
    pub fn maybe_float(&mut self) -> Option<f64> {
        match self.0.random_range(0..10) {
            0..3 => None,
            3 => Some(self.float()),
            _ => Some(self.0.random_range(0.001..1000.0)),
        }
    }

    pub fn whole(&mut self) -> i32 {
        const EDGES: &[i32] = &[0, 1, 5, 6, 1000, 1001, -1, i32::MAX, i32::MIN];
        match self.0.random_range(0..2) {
            0 => *self.pick(EDGES),
            _ => self.0.random_range(-3..10),
        }
    }

    /// Mostly a number that a call takes.
    pub fn small(&mut self) -> Option<i32> {
        match self.0.random_range(0..10) {
            0 => None,
            1 => Some(self.whole()),
            _ => Some(self.0.random_range(1..6)),
        }
    }

    /// Mostly of a task that exists, if some dozens do.
    pub fn id(&mut self) -> i64 {
        match self.0.random_range(0..8) {
            0 => *self.pick(&[0, -1, i64::MIN, i64::MAX, 1 << 32]),
            1..4 => self.0.random_range(0..3),
            _ => self.0.random_range(0..40),
        }
    }

    pub fn maybe_id(&mut self) -> Option<i64> {
        self.0.random_bool(0.8).then(|| self.id())
    }

    pub fn time(&mut self) -> String {
        const TIMES: &[&str] = &[
            "infinity",
            "-infinity",
            "4713-01-01 00:00:00+00 BC",
            "4714-11-24 00:00:00+00 BC",
            "4714-11-23 00:00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "294277-01-01 00:00:00+00",
            "0001-01-01 00:00:00+00 BC",
            "1970-01-01 00:00:00+00",
            "2000-01-01 00:00:00+00",
            "1999-12-31 23:59:59.999999+00",
            "epoch",
            "yesterday",
            "tomorrow",
        ];
        match self.0.random_range(0..3) {
            0 => format!("{}-01-01", self.0.random_range(1..9999)),
            _ => (*self.pick(TIMES)).to_owned(),
        }
    }

    pub fn maybe_time(&mut self) -> Option<String> {
        self.0.random_bool(0.4).then(|| self.time())
    }

    pub fn interval(&mut self) -> String {
        const LENGTHS: &[&str] = &[
            "0",
            "1 us",
            "-1 us",
            "1 s",
            "-1 s",
            "1 month -30 days",
            "1 month -31 days",
            "-1 month 31 days",
            "1 day -24 hours",
            "1 day -24 hours -1 us",
            "178000000 years",
            "-178000000 years",
            "2147483647 days",
            "-2147483648 days",
            "2562047788 hours",
            "-2562047788 hours",
            "infinity",
            "-infinity",
            "10 ms",
            "1 hour",
        ];
        (*self.pick(LENGTHS)).to_owned()
    }

    pub fn maybe_interval(&mut self) -> Option<String> {
        self.0.random_bool(0.6).then(|| self.interval())
    }

    /// A jsonb value of some depth.
    pub fn value(&mut self, depth: u32) -> Value {
        match self.0.random_range(0..if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => Value::Bool(self.0.random()),
            2 => Value::from(self.whole()),
            3 => Value::from(self.float()),
            4 => Value::from(self.name(20).replace('\0', "")),
            5 => (0..self.0.random_range(0..4))
                .map(|_| self.value(depth - 1))
                .collect(),
            _ => {
                let fields = (0..self.0.random_range(0..4))
                    .map(|_| (self.name(20).replace('\0', ""), self.value(depth - 1)));
                Value::Object(fields.collect())
            }
        }
    }

    /// The text of a jsonb that may be settings, or weights.
    pub fn settings(&mut self) -> String {
        const VALUES: &[&str] = &[
            "1",
            "0",
            "-1",
            "1e400",
            "-1e400",
            "1e-400",
            "0.5",
            "4294967295",
            "4294967296",
            "1e6",
            "1000001",
            "null",
            "true",
            "false",
            "\"seconds\"",
            "\"claims\"",
            "\"/\"",
            "\"\\u0000\"",
            "\" \"",
            "\"1 day\"",
            "\"-1 s\"",
            "\"infinity\"",
            "\"178000000 years\"",
            "\"\"",
            "[]",
            "{}",
            "{\"a\": [1, {\"b\": null}]}",
            "1e15",
            "9223372036854775807",
            "99999999999999999999999999",
        ];
        let fields = [&SETTINGS[..], &["a/b", "é", ""]].concat();
        match self.0.random_range(0..12) {
            0 => (*self.pick(VALUES)).to_owned(),
            1 => {
                let depth = *self.pick(&[100, 126, 127, 128, 129, 1000, 100_000]);
                let nested = "[".repeat(depth) + &"]".repeat(depth);
                format!("{{\"{}\": {nested}}}", self.pick(&fields))
            }
            2 => self.value(4).to_string(),
            _ => {
                let set: Vec<String> = (0..self.0.random_range(0..4))
                    .map(|_| format!("\"{}\": {}", self.pick(&fields), self.pick(VALUES)))
                    .collect();
                format!("{{{}}}", set.join(", "))
            }
        }
    }
}
