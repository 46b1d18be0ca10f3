//! Refused changes on their way into the audit: a small ring in shared memory. The transaction of a refused change aborts,
//! so it cannot write the audit row itself.

/// Refused changes that wait for the janitor, at most; what comes on top is counted.
pub const RING: usize = 64;
/// Texts of one refused change: actor, action, queue, key, new value, reason, error.
pub const TEXTS: usize = 7;
const BYTES: usize = 2_000;
/// Longest piece of one text that is kept, with the mark of the cut.
const LONGEST: usize = BYTES / TEXTS;
const CUT: &str = "...";

/// One refused change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Refused {
    scope: u64,
    at: i64,
    lengths: [u16; TEXTS],
    bytes: [u8; BYTES],
}

impl Refused {
    /// A change refused at `at` (µs); long texts are cut, and end in three dots then.
    pub fn new(scope: u64, at: i64, texts: [&str; TEXTS]) -> Refused {
        let mut refused = Refused {
            scope,
            at,
            lengths: [0; TEXTS],
            bytes: [0; BYTES],
        };
        let mut start = 0;
        for (text, length) in texts.iter().zip(&mut refused.lengths) {
            let (mut end, mark) = if text.len() > LONGEST {
                (LONGEST - CUT.len(), CUT)
            } else {
                (text.len(), "")
            };
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            for piece in [&text[..end], mark] {
                let stop = start + piece.len();
                refused.bytes[start..stop].copy_from_slice(piece.as_bytes());
                *length += piece.len() as u16;
                start = stop;
            }
        }
        refused
    }

    /// When it was refused (µs).
    pub fn at(&self) -> i64 {
        self.at
    }

    /// Its texts.
    pub fn texts(&self) -> [String; TEXTS] {
        let mut start = 0;
        self.lengths.map(|length| {
            let end = (start + usize::from(length)).min(BYTES);
            let text = String::from_utf8_lossy(&self.bytes[start.min(end)..end]).into_owned();
            start = end;
            text
        })
    }
}

/// The ring; all zeros is an empty one.
#[repr(C)]
pub struct Ring {
    used: usize,
    overflowed: u64,
    entries: [Refused; RING],
}

impl Ring {
    /// Adds an entry, or counts it where there is no room.
    pub fn push(&mut self, refused: &Refused) {
        match self.entries.get_mut(self.used) {
            Some(entry) => {
                *entry = *refused;
                self.used += 1;
            }
            None => self.overflowed += 1,
        }
    }

    /// Takes out the entries of one database.
    pub fn take(&mut self, scope: u64) -> Vec<Refused> {
        let used = self.used.min(RING);
        let mut taken = Vec::new();
        let mut kept = 0;
        for i in 0..used {
            if self.entries[i].scope == scope {
                taken.push(self.entries[i]);
            } else {
                self.entries[kept] = self.entries[i];
                kept += 1;
            }
        }
        self.used = kept;
        taken
    }

    /// How many found no room since the server started.
    pub fn overflowed(&self) -> u64 {
        self.overflowed
    }
}
