//! The two replays side by side, and what can be said of them in a sentence.

use std::collections::{BTreeMap, HashSet};

use crate::log::User;
use crate::measure::{Served, Waits, fairness_index, waits_by_user};
use crate::text;

/// How many of the users with the most tasks are shown by name.
pub const HEAVIEST: usize = 5;

/// One of something for each of the two replays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Both<T> {
    pub off: T,
    pub on: T,
}

impl<T> Both<T> {
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Both<U> {
        Both {
            off: f(self.off),
            on: f(self.on),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Row {
    pub name: String,
    pub tasks: usize,
    pub waits: Both<Waits>,
}

pub struct Comparison<'a> {
    pub served: Both<&'a [Served]>,
    /// Every user with the number of tasks, the most first.
    pub users: Vec<(User, usize)>,
    pub waits: Both<BTreeMap<User, Waits>>,
    pub jain: Both<f64>,
}

impl<'a> Comparison<'a> {
    pub fn of(served: Both<&'a [Served]>) -> Comparison<'a> {
        let mut tasks: BTreeMap<User, usize> = BTreeMap::new();
        for task in served.on {
            *tasks.entry(task.user).or_default() += 1;
        }
        let mut users: Vec<(User, usize)> = tasks.into_iter().collect();
        users.sort_by_key(|&(user, tasks)| (std::cmp::Reverse(tasks), user));
        Comparison {
            served,
            users,
            waits: served.map(waits_by_user),
            // Where nobody ever had to share there is nothing to be unfair about.
            jain: served.map(|served| fairness_index(served).unwrap_or(1.0)),
        }
    }

    pub fn heaviest(&self) -> &[(User, usize)] {
        &self.users[..HEAVIEST.min(self.users.len())]
    }

    pub fn others(&self) -> &[(User, usize)] {
        &self.users[self.heaviest().len()..]
    }

    pub fn waits_of(&self, user: User) -> Both<Waits> {
        let of = |waits: &BTreeMap<User, Waits>| waits.get(&user).copied().unwrap_or_default();
        Both {
            off: of(&self.waits.off),
            on: of(&self.waits.on),
        }
    }

    /// The heaviest users one by one, then the tasks of all the others as if they were one user's.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = self
            .heaviest()
            .iter()
            .map(|&(user, tasks)| Row {
                name: user.to_string(),
                tasks,
                waits: self.waits_of(user),
            })
            .collect();
        let others: HashSet<User> = self.others().iter().map(|&(user, _)| user).collect();
        let waits = self.served.map(|served| {
            let theirs = served.iter().filter(|task| others.contains(&task.user));
            Waits::of(theirs.map(Served::wait_ms).collect())
        });
        rows.push(Row {
            name: format!("the {} others", others.len()),
            tasks: self.others().iter().map(|(_, tasks)| tasks).sum(),
            waits,
        });
        rows
    }

    /// The median over the other users of each one's own median and 95th percentile: every user counts once.
    pub fn typical(&self) -> Both<Waits> {
        let middle = |pick: fn(&Both<Waits>) -> f64| {
            Waits::of(
                self.others()
                    .iter()
                    .map(|&(user, _)| pick(&self.waits_of(user)))
                    .collect(),
            )
            .median
        };
        Both {
            off: Waits {
                median: middle(|w| w.off.median),
                p95: middle(|w| w.off.p95),
            },
            on: Waits {
                median: middle(|w| w.on.median),
                p95: middle(|w| w.on.p95),
            },
        }
    }

    /// What the picture shows.
    pub fn sentence(&self) -> String {
        let shorter = self
            .users
            .iter()
            .map(|&(user, _)| self.waits_of(user))
            .filter(|waits| waits.on.median < waits.off.median)
            .count();
        let typical = self.typical();
        let mut parts = vec![
            format!(
                "{shorter} of {} users wait less at the median",
                self.users.len()
            ),
            format!(
                "the typical user's median wait {} from {} to {}",
                went(typical.off.median, typical.on.median),
                text::ms(typical.off.median),
                text::ms(typical.on.median)
            ),
        ];
        if let Some((user, waits)) = self.payer() {
            parts.push(format!(
                "that of {user}, one of the heaviest, {} from {} to {}",
                went(waits.off.median, waits.on.median),
                text::ms(waits.off.median),
                text::ms(waits.on.median)
            ));
        }
        format!(
            "With fairness on, {}, and Jain's index of service {} from {:.2} to {:.2}.",
            parts.join(", "),
            went(self.jain.off, self.jain.on),
            self.jain.off,
            self.jain.on
        )
    }

    /// The one of the heaviest users whose median wait grew the most.
    fn payer(&self) -> Option<(User, Both<Waits>)> {
        let growth = |waits: &Both<Waits>| waits.on.median - waits.off.median;
        self.heaviest()
            .iter()
            .map(|&(user, _)| (user, self.waits_of(user)))
            .filter(|(_, waits)| growth(waits) > 0.0)
            .max_by(|(_, a), (_, b)| growth(a).total_cmp(&growth(b)))
    }
}

fn went(before: f64, after: f64) -> &'static str {
    if after < before { "falls" } else { "rises" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// User 1 has ten tasks, users 2 to 7 one each, all there at 0; one claim each millisecond, in this order of users.
    fn in_order(order: impl IntoIterator<Item = u16>) -> Vec<Served> {
        let starts = (1..).map(|ms| ms * 1_000);
        order
            .into_iter()
            .zip(starts)
            .map(|(user, start)| Served {
                user: User(user),
                submit: 0,
                start,
            })
            .collect()
    }

    fn example() -> (Vec<Served>, Vec<Served>) {
        let flood = std::iter::repeat_n(1, 10);
        (
            in_order(flood.clone().chain(2..=7)),
            in_order((1..=7).chain(flood.skip(1))),
        )
    }

    #[test]
    fn the_heaviest_stand_alone_and_the_rest_together() {
        let (off, on) = example();
        let comparison = Comparison::of(Both { off: &off, on: &on });
        let rows = comparison.rows();
        let names: Vec<(&str, usize)> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.tasks))
            .collect();
        let users = [
            ("user 1", 10),
            ("user 2", 1),
            ("user 3", 1),
            ("user 4", 1),
            ("user 5", 1),
            ("the 2 others", 2),
        ];
        assert_eq!(names, users);
        assert_eq!(
            rows[0].waits,
            Both {
                off: Waits {
                    median: 5.0,
                    p95: 10.0
                },
                on: Waits {
                    median: 11.0,
                    p95: 16.0
                }
            }
        );
        assert_eq!(
            rows[5].waits,
            Both {
                off: Waits {
                    median: 15.0,
                    p95: 16.0
                },
                on: Waits {
                    median: 6.0,
                    p95: 7.0
                }
            }
        );
    }

    #[test]
    fn the_sentence_says_which_way_it_went() {
        let (off, on) = example();
        let sentence = Comparison::of(Both { off: &off, on: &on }).sentence();
        assert!(sentence.contains("6 of 7 users wait less"), "{sentence}");
        assert!(
            sentence.contains("median wait falls from 15 ms to 6.0 ms"),
            "{sentence}"
        );
        assert!(
            sentence.contains("user 1, one of the heaviest, rises from 5.0 ms to 11 ms"),
            "{sentence}"
        );
        assert!(sentence.contains("service rises from"), "{sentence}");
        let worse = Comparison::of(Both { off: &on, on: &off }).sentence();
        assert!(
            worse.contains("median wait rises from 6.0 ms to 15 ms"),
            "{worse}"
        );
        assert!(
            worse.contains("0 of 7 users wait less") || worse.contains("1 of 7 users wait less"),
            "{worse}"
        );
        assert!(worse.contains("service falls from"), "{worse}");
    }
}
