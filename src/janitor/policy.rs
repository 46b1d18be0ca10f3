//! Weights and settings of which the board was not told: changed by a session without triggers, or set while it had no
//! room for the key.

use std::collections::HashMap;

use crate::board::{self, BoardSettings, now, stored_key};
use crate::names::Weight;
use crate::sfq::QueueId;
use crate::tasks::load::{read_overrides, read_settings};

/// What a queue has on the board and, otherwise, in the tables.
#[derive(Default, PartialEq)]
pub struct Stale {
    settings: Option<(BoardSettings, BoardSettings)>,
    weights: Vec<(String, Option<f64>, Option<f64>)>,
}

impl Stale {
    pub fn is_empty(&self) -> bool {
        *self == Stale::default()
    }
}

/// Looks for what differs; `weights`: the overrides that the board has. It may be on its way to the board.
pub fn find_stale(queue: QueueId, name: &str, mut weights: HashMap<String, f64>) -> Stale {
    let on_board = board::with(|sched| BoardSettings::of(sched, queue));
    let in_table = read_settings(name);
    let mut stale = Stale::default();
    if on_board != in_table {
        stale.settings = Some((on_board, in_table));
    }
    for (key, in_table) in read_overrides(name) {
        let on_board = weights.remove(&key);
        if on_board != Some(in_table) {
            stale.weights.push((key, on_board, Some(in_table)));
        }
    }
    let cleared = weights.into_iter();
    let cleared = cleared.map(|(key, on_board)| (key, Some(on_board), None));
    stale.weights.extend(cleared);
    stale
}

/// Tells the board what it still has not been told: of how much.
pub fn tell(queue: QueueId, name: &str, stale: Stale) -> usize {
    let mut told = 0;
    if let Some((old, new)) = stale.settings
        && read_settings(name) == new
    {
        board::with(|sched| {
            // Unless a session has told it something else meanwhile.
            if BoardSettings::of(sched, queue) == old {
                new.put(sched, queue, now());
                told += 1;
            }
        });
    }
    if stale.weights.is_empty() {
        return told;
    }
    let in_table: HashMap<String, f64> = read_overrides(name).into_iter().collect();
    board::with(|sched| {
        for (key, old, new) in stale.weights {
            let name = stored_key(&key);
            if in_table.get(&key).copied() == new && sched.override_of(queue, &name) == old {
                let weight = new.and_then(|weight| Weight::new(weight).ok());
                // Without room for the key: another time.
                told += usize::from(sched.set_override(queue, &name, weight).is_ok());
            }
        }
    });
    told
}
