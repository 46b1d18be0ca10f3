//! What a replay showed: waits, and how evenly the users were served.

use std::collections::{BTreeMap, BTreeSet};

use crate::log::User;

/// One task of a replay. Times are microseconds since its start.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    pub user: User,
    pub submit: u64,
    pub start: u64,
}

impl Served {
    pub fn wait_ms(&self) -> f64 {
        self.start.saturating_sub(self.submit) as f64 / 1e3
    }
}

/// Median and 95th percentile of some waits, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    pub median: f64,
    pub p95: f64,
}

impl Waits {
    pub fn of(mut waits: Vec<f64>) -> Waits {
        waits.sort_by(f64::total_cmp);
        Waits {
            median: percentile(&waits, 0.5),
            p95: percentile(&waits, 0.95),
        }
    }
}

/// The smallest of the sorted values that at least this share of them does not exceed (the nearest rank); 0 of none.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

pub fn waits_by_user(served: &[Served]) -> BTreeMap<User, Waits> {
    let mut waits: BTreeMap<User, Vec<f64>> = BTreeMap::new();
    for task in served {
        waits.entry(task.user).or_default().push(task.wait_ms());
    }
    waits
        .into_iter()
        .map(|(user, waits)| (user, Waits::of(waits)))
        .collect()
}

/// Jain's index, (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything; none of nothing.
pub fn jain(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|x| x * x).sum();
    (squares > 0.0).then(|| sum * sum / (values.len() as f64 * squares))
}

/// What a user got and was due while at least one other user had tasks waiting too, in claims.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Service {
    pub received: f64,
    pub fair_share: f64,
}

/// Each claim that is made while n >= 2 users have tasks waiting counts 1 for the user it served, and is worth a fair share
/// of 1/n to each of the n.
pub fn service_while_backlogged(served: &[Served]) -> BTreeMap<User, Service> {
    let submits = served.iter().map(|task| (task.submit, false, task.user));
    let starts = served.iter().map(|task| (task.start, true, task.user));
    let mut events: Vec<(u64, bool, User)> = submits.chain(starts).collect();
    events.sort_unstable();

    let mut waiting: BTreeMap<User, usize> = BTreeMap::new();
    let mut backlogged: BTreeSet<User> = BTreeSet::new();
    let mut service: BTreeMap<User, Service> = BTreeMap::new();
    for (_, starts, user) in events {
        let tasks = waiting.entry(user).or_default();
        if !starts {
            *tasks += 1;
            backlogged.insert(user);
            continue;
        }
        if backlogged.len() >= 2 {
            service.entry(user).or_default().received += 1.0;
            for other in &backlogged {
                service.entry(*other).or_default().fair_share += 1.0 / backlogged.len() as f64;
            }
        }
        *tasks = tasks.saturating_sub(1);
        if *tasks == 0 {
            backlogged.remove(&user);
        }
    }
    service
}

/// Jain's index over users of service received while backlogged, per fair share. Users who were due less than one claim are left
/// out: whatever they got, it could not have been their share.
pub fn fairness_index(served: &[Served]) -> Option<f64> {
    let shares: Vec<f64> = service_while_backlogged(served)
        .values()
        .filter(|service| service.fair_share >= 1.0)
        .map(|service| service.received / service.fair_share)
        .collect();
    jain(&shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(tasks: &[(u16, u64, u64)]) -> Vec<Served> {
        tasks
            .iter()
            .map(|&(user, submit, start)| Served {
                user: User(user),
                submit,
                start,
            })
            .collect()
    }

    /// `each` tasks of both user 1 and user 2, all there at 0; a claim a tick, in this order of users.
    fn race(order: &[u16]) -> Vec<Served> {
        let tasks: Vec<(u16, u64, u64)> = order
            .iter()
            .zip(1..)
            .map(|(&user, start)| (user, 0, start))
            .collect();
        served(&tasks)
    }

    #[test]
    fn a_percentile_is_a_value_of_the_nearest_rank() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.5), 10.0);
        assert_eq!(percentile(&values, 0.95), 19.0);
        assert_eq!(percentile(&values, 1.0), 20.0);
        assert_eq!(percentile(&values[..1], 0.95), 1.0);
        assert_eq!(percentile(&values[..1], 0.0), 1.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }

    #[test]
    fn waits_are_sorted_before_they_are_ranked() {
        let waits = Waits::of(vec![9.0, 1.0, 5.0]);
        assert_eq!(
            waits,
            Waits {
                median: 5.0,
                p95: 9.0
            }
        );
    }

    #[test]
    fn a_wait_is_milliseconds_from_submit_to_start_for_each_user() {
        let tasks = served(&[(1, 1_000, 3_500), (2, 0, 7_000), (1, 2_000, 2_000)]);
        let waits = waits_by_user(&tasks);
        assert_eq!(
            waits[&User(1)],
            Waits {
                median: 0.0,
                p95: 2.5
            }
        );
        assert_eq!(
            waits[&User(2)],
            Waits {
                median: 7.0,
                p95: 7.0
            }
        );
    }

    #[test]
    fn jain_is_one_for_equals_and_one_nth_for_a_monopoly() {
        assert_eq!(jain(&[3.0, 3.0, 3.0, 3.0]), Some(1.0));
        assert_eq!(jain(&[5.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[1.0, 2.0, 3.0]), Some(36.0 / 42.0));
        assert_eq!(jain(&[]), None);
        assert_eq!(jain(&[0.0, 0.0]), None);
    }

    #[test]
    fn taking_turns_is_fair_and_a_flood_served_first_is_not() {
        let fair = fairness_index(&race(&[1, 2, 1, 2, 1, 2, 1, 2])).expect("both are backlogged");
        let flood = fairness_index(&race(&[1, 1, 1, 1, 2, 2, 2, 2])).expect("both are backlogged");
        assert!(fair > 0.97, "{fair}");
        assert_eq!(flood, 0.5);
    }

    #[test]
    fn service_counts_only_while_two_users_wait() {
        // User 1 has two tasks at 0, user 2 one at 10. The claims at 5 and 30 are made for a lone user.
        let tasks = served(&[(1, 0, 5), (1, 0, 20), (2, 10, 30)]);
        let service = service_while_backlogged(&tasks);
        assert_eq!(
            service[&User(1)],
            Service {
                received: 1.0,
                fair_share: 0.5
            }
        );
        assert_eq!(
            service[&User(2)],
            Service {
                received: 0.0,
                fair_share: 0.5
            }
        );
    }
}
