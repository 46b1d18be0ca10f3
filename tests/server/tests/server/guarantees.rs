//! Each row of the table of guarantees on a live server, with 1, 2, 8 and 16 claimers at the same time and keys, weights and
//! calls drawn by chance. A failure prints its seed, and `HF_SEED` draws the same again. `core/tests/guarantees.rs` proves
//! the same rows on the core alone, by tens of thousands of cases.

use std::collections::BTreeMap;

use harvest_fair_server_tests::{ClaimedTask, Cluster, Database, one};
use postgres::Client;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::crew::{CREWS, Crew, Field, Race, enqueue, random, some_keys, step};
use crate::policy_support::{claim_by_id, configure};
use crate::support::{KeyState, execute, state, states, states_at, task_field};

/// One case, in a queue of its own.
struct Case<'a> {
    db: &'a Database<'a>,
    client: &'a mut Client,
    crew: &'a mut Crew,
    random: &'a mut StdRng,
    queue: String,
}

/// `cases` cases with each number of claimers.
fn prove(cases: usize, case: impl Fn(Case)) {
    let mut random = random();
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for size in CREWS {
        let mut crew = Crew::new(&db, size);
        for round in 0..cases {
            eprintln!("{size} claimers, case {round}");
            case(Case {
                db: &db,
                client: &mut client,
                crew: &mut crew,
                random: &mut random,
                queue: format!("{size} claimers, case {round}"),
            });
        }
    }
}

impl Case<'_> {
    /// A field of at most `most` keys with enough tasks for `claims` claims of each.
    fn field(&mut self, most: usize, claims: usize) -> Field {
        let keys = some_keys(self.random, most);
        Field::new(self.client, self.random, &self.queue, keys, claims)
    }

    /// The tasks of one call.
    fn batch(&mut self) -> i32 {
        *[1, 1, 2, 5].choose(self.random).unwrap()
    }

    /// How many rounds of such calls claim `claims` tasks or a few more; no less than one.
    fn rounds(&self, claims: usize, batch: i32) -> usize {
        claims.div_ceil(self.crew.size() * batch as usize).max(1)
    }

    /// Some claims, up to `most` of them or a few more.
    fn warm_up(&mut self, most: usize) {
        let claims = self.random.random_range(0..most);
        for _ in 0..self.rounds(claims, 1) {
            self.crew.round(&self.queue, 1);
        }
    }

    /// The most tasks that so many rounds can claim.
    fn room(&self, claims: usize) -> usize {
        claims + 16 * 5
    }
}

fn count(keys: &[String], name: &str) -> usize {
    keys.iter().filter(|key| *key == name).count()
}

#[test]
fn a_newcomer_waits_at_most_one_claim_per_other_key() {
    prove(4, |mut case| {
        let room = case.room(60);
        let field = case.field(9, room + 16 * 9);
        case.warm_up(60);
        enqueue(case.client, &case.queue, "newcomer", 1);
        // The first round after which one claim of each other key, and its own, have surely been made.
        let served: Vec<String> = (0..case.rounds(field.keys.len() + 1, 1))
            .flat_map(|_| case.crew.round(&case.queue, 1))
            .collect();
        assert_eq!(count(&served, "newcomer"), 1, "{served:?}");
    });
}

#[test]
fn two_keys_never_differ_by_more_than_a_claim_of_each() {
    prove(3, |mut case| {
        let room = case.room(80);
        let field = case.field(5, room);
        let mut races = Race::all(&field.keys);
        let batch = case.batch();
        for _ in 0..case.rounds(80, batch) {
            let served = case.crew.round(&case.queue, batch);
            for race in &mut races {
                race.note(&served);
                race.check(true);
            }
        }
    });
}

#[test]
fn no_key_starves() {
    prove(3, |mut case| {
        let room = case.room(80);
        let field = case.field(6, room);
        let (keys, sum) = (field.keys.len() as f64, field.sum_of_weights());
        let mut served = Vec::new();
        for _ in 0..case.rounds(80, 1) {
            served.extend(case.crew.round(&case.queue, 1));
            for (key, weight) in &field.keys {
                let least = (served.len() as f64 - keys + 1.0) * weight / sum - 1.0;
                let got = count(&served, key) as f64;
                // Steps are whole ticks.
                assert!(got >= least - 1e-3, "{key}: {got} < {least} of {served:?}");
            }
        }
    });
}

/// The returning key has no credit at first, and from then on no more than its share.
fn comes_back_without_a_burst(case: &mut Case, field: &Field, name: &str) {
    let back = state(case.client, &case.queue, name);
    assert!(back.eligible && back.pass >= back.clock, "credit: {back:?}");
    let mut races = Race::all(&field.keys);
    races.retain(|race| race.is_of(name));
    for _ in 0..case.rounds(50, 1) {
        let served = case.crew.round(&case.queue, 1);
        for race in &mut races {
            race.note(&served);
            race.check(false);
        }
    }
}

#[test]
fn a_key_that_was_idle_comes_back_with_no_credit_and_no_burst() {
    prove(3, |mut case| {
        let room = case.room(40) + case.room(50);
        let mut field = case.field(4, room);
        field.weigh(case.client, case.random, "idler");
        let first = case.random.random_range(0..4);
        field.enqueue(case.client, "idler", first);
        case.warm_up(40);
        field.enqueue(case.client, "idler", room);
        comes_back_without_a_burst(&mut case, &field, "idler");
    });
}

#[test]
fn a_key_that_was_gated_comes_back_with_no_credit_and_no_burst() {
    prove(3, |mut case| {
        let room = case.room(40) + case.room(50);
        let field = case.field(4, room);
        let gated = field.keys[0].0.clone();
        // At its cap: what it runs stays, what others run is completed at once.
        configure(case.client, &case.queue, r#"{"key_max_running": 1}"#);
        for _ in 0..40 {
            case.crew.round(&case.queue, 1);
            execute(
                case.client,
                &format!(
                    "SELECT fair_complete(id, lease) FROM harvest_fair.task
                     WHERE queue = '{}' AND state = 'running' AND fairness_key <> '{gated}'",
                    case.queue
                ),
            );
        }
        configure(case.client, &case.queue, r#"{"key_max_running": null}"#);
        comes_back_without_a_burst(&mut case, &field, &gated);
    });
}

/// Without what a key's last claim leaves behind on the board.
fn passes(states: &[KeyState]) -> BTreeMap<String, f64> {
    states
        .iter()
        .map(|state| (state.key.clone(), state.pass))
        .collect()
}

#[test]
fn the_clock_never_falls_and_never_passes_a_waiting_key() {
    prove(3, |mut case| {
        let room = case.room(80);
        case.field(5, room);
        let batch = case.batch();
        let mut last = 0.0;
        let mut look = |client: &mut Client| {
            for state in states(client, &case.queue) {
                assert!(state.clock >= last, "{state:?} after {last}");
                assert!(!state.eligible || state.pass >= state.clock, "{state:?}");
                last = state.clock;
            }
        };
        for _ in 0..case.rounds(80, batch) {
            let aborted: Vec<bool> = (0..16).map(|_| case.random.random()).collect();
            case.crew.claim(&case.queue, batch);
            look(case.client);
            case.crew.end(|number| aborted[number]);
            look(case.client);
        }
    });
}

#[test]
fn claims_out_of_lag_order_never_change_the_order_of_two_waiting_keys() {
    prove(3, |mut case| {
        let room = case.room(30);
        case.field(6, room);
        case.warm_up(30);
        // For each worker one task of `k0` by its id, one that is pinned to it, and a more urgent one.
        let queue = &case.queue;
        execute(
            case.client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, sticky_worker, sticky_until, scheduled_at)
                 SELECT '{queue}', 'k0', 'w' || i, 'infinity', '2001-01-01' FROM generate_series(0, 15) i"
            ),
        );
        let ids: Vec<i64> = case
            .client
            .query(
                "SELECT id FROM harvest_fair.task WHERE queue = $1 AND fairness_key = 'k0' AND state = 'pending'
                 AND sticky_worker IS NULL ORDER BY id DESC LIMIT 16",
                &[queue],
            )
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        let before = states(case.client, queue);
        let mut aside: Vec<i64> = Vec::new();
        for by_id in [true, false] {
            let claimed = case.crew.all(|number, client| match by_id {
                true => claim_by_id(client, ids[number], "w"),
                false => harvest_fair_server_tests::claim(client, queue, &format!("w{number}"), 1)
                    .iter()
                    .map(|task| (task.id, task.lease))
                    .collect(),
            });
            case.crew.end(|_| false);
            aside.extend(claimed.iter().flatten().map(|(id, _)| *id));
        }
        assert_eq!(aside.len(), 2 * case.crew.size());
        for id in &aside {
            assert_eq!(task_field(case.client, *id, "fairness_key").unwrap(), "k0");
        }
        execute(
            case.client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, priority)
                 SELECT '{queue}', 'k1', 1 FROM generate_series(1, {})",
                case.crew.size()
            ),
        );
        let urgent = case.crew.claim(queue, 1).concat();
        case.crew.end(|_| false);
        assert!(urgent.iter().all(|task| task.priority == 1), "{urgent:?}");

        let priority_3 = |states: &[KeyState]| -> Vec<KeyState> {
            let mut states = states.to_vec();
            states.retain(|state| state.key != "k0");
            states
        };
        let after: Vec<KeyState> = states_at(case.client, queue, 3);
        assert_eq!(after[0].clock, before[0].clock);
        assert_eq!(passes(&priority_3(&after)), passes(&priority_3(&before)));
        // And the key that was served aside pays for it.
        let charged = after[0].pass - before[0].pass;
        let expected = step(after[0].weight) as f64 * aside.len() as f64 / 1e6;
        assert!(
            (charged - expected).abs() < 1e-6,
            "{charged}, not {expected}"
        );
    });
}

#[test]
fn undo_puts_the_key_back_where_it_was_or_at_the_clock() {
    prove(4, |mut case| {
        let room = case.room(40) + case.room(40);
        let field = case.field(6, room);
        case.warm_up(40);
        let before = passes(&states(case.client, &case.queue));
        let batch = case.batch();
        let aborted: Vec<bool> = (0..16).map(|_| case.random.random_ratio(2, 3)).collect();
        let claimed = case.crew.claim(&case.queue, batch);
        case.crew.end(|number| aborted[number]);
        let after = states(case.client, &case.queue);
        for (key, weight) in &field.keys {
            let kept = (0..case.crew.size())
                .filter(|number| !aborted[*number])
                .flat_map(|number| &claimed[number])
                .filter(|task| task.key == *key)
                .count();
            let state = after.iter().find(|state| state.key == *key).unwrap();
            let paid = before[key] + kept as f64 * step(*weight) as f64 / 1e6;
            let expected = paid.max(state.clock);
            assert!(
                (state.pass - expected).abs() <= 1e-9 * expected.max(1.0),
                "{state:?}, not {expected}: {kept} kept, before {before:?}"
            );
            assert!(state.eligible, "{state:?}");
        }
    });
}

#[test]
fn groups_get_one_share_each_however_many_keys_they_have() {
    prove(3, |case| {
        configure(case.client, &case.queue, r#"{"group_separator": "/"}"#);
        let room = case.room(80);
        let mut field = Field {
            queue: case.queue.clone(),
            keys: Vec::new(),
        };
        for name in some_keys(case.random, 5) {
            // The weight of the group.
            field.weigh(case.client, case.random, &name);
            for member in 0..case.random.random_range(1..=6) {
                field.enqueue(case.client, &format!("{name}/{member}"), room);
            }
        }
        let group = |served: Vec<String>| -> Vec<String> {
            let first = |key: &String| key.split('/').next().unwrap().to_owned();
            served.iter().map(first).collect()
        };
        let (groups, sum) = (field.keys.len() as f64, field.sum_of_weights());
        let mut races = Race::all(&field.keys);
        let mut all = Vec::new();
        for _ in 0..case.rounds(80, 1) {
            let served = group(case.crew.round(&case.queue, 1));
            for race in &mut races {
                race.note(&served);
                race.check(true);
            }
            all.extend(served);
            for (name, weight) in &field.keys {
                let least = (all.len() as f64 - groups + 1.0) * weight / sum - 1.0;
                assert!(count(&all, name) as f64 >= least - 1e-3, "{name}: {all:?}");
            }
        }
        enqueue(case.client, &case.queue, "newcomer/1", 1);
        let served: Vec<String> = (0..case.rounds(field.keys.len() + 1, 1))
            .flat_map(|_| case.crew.round(&case.queue, 1))
            .collect();
        assert_eq!(count(&group(served), "newcomer"), 1);
    });
}

#[test]
fn one_key_alone_is_served_by_claim_order_due_time_then_id() {
    prove(4, |case| {
        // Few different times, so that ties are common; a new start counts as due half a minute later.
        let values: Vec<String> = (0..60)
            .map(|_| {
                let ago = case.random.random_range(0..40) * 5;
                let new_start: bool = case.random.random();
                format!(
                    "('{}', 'k', '2001-01-01'::timestamptz - interval '{ago} s', {new_start})",
                    case.queue
                )
            })
            .collect();
        execute(
            case.client,
            &format!(
                "INSERT INTO harvest_fair.task (queue, fairness_key, scheduled_at, new_start) VALUES {}",
                values.join(", ")
            ),
        );
        let order: Vec<i64> = case
            .client
            .query(
                "SELECT id FROM harvest_fair.task WHERE queue = $1
                 ORDER BY scheduled_at + CASE WHEN new_start THEN interval '30 s' ELSE '0' END, id",
                &[&case.queue],
            )
            .unwrap()
            .iter()
            .map(|row| row.get(0))
            .collect();
        let batch = *[1, 3].choose(case.random).unwrap();
        let mut left = order.as_slice();
        while !left.is_empty() {
            let claimed = case.crew.claim(&case.queue, batch);
            case.crew.end(|_| false);
            // Each in its call, and all of them together, had what came first.
            let (next, rest) = left.split_at(left.len().min(case.crew.size() * batch as usize));
            let place = |task: &ClaimedTask| next.iter().position(|id| *id == task.id);
            for call in &claimed {
                assert!(call.iter().map(place).is_sorted(), "{call:?}");
            }
            let mut got: Vec<i64> = claimed.concat().iter().map(|task| task.id).collect();
            let mut next = next.to_vec();
            got.sort_unstable();
            next.sort_unstable();
            assert_eq!(got, next);
            left = rest;
        }
    });
}

#[test]
fn a_claim_on_one_queue_changes_nothing_in_another() {
    prove(2, |mut case| {
        let room = case.room(40);
        case.field(6, room);
        let other = format!("not {}", case.queue);
        let keys = some_keys(case.random, 6);
        Field::new(case.client, case.random, &other, keys, 5);
        case.crew.round(&other, 1);
        let look = |client: &mut Client| {
            let counters: String = one(
                client,
                "SELECT (s.claims, s.refunds, s.empty_claims)::text FROM harvest_fair.stats s WHERE queue = $1",
                &[&other],
            );
            (states(client, &other), counters)
        };
        let before = look(case.client);
        for abort in [false, true] {
            for _ in 0..case.rounds(20, 1) {
                case.crew.claim(&case.queue, 1);
                assert_eq!(look(case.client), before);
                case.crew.end(|_| abort);
            }
        }
        assert_eq!(look(case.client), before);
    });
}

#[test]
fn running_counts_never_exceed_their_caps() {
    prove(3, |mut case| {
        let room = case.room(60);
        let field = case.field(5, room);
        let cap = case.random.random_range(1..=4);
        configure(
            case.client,
            &case.queue,
            &format!(r#"{{"key_max_running": {cap}}}"#),
        );
        let mut running: Vec<ClaimedTask> = Vec::new();
        for _ in 0..6 {
            let batch = case.batch();
            let aborted: Vec<bool> = (0..16).map(|_| case.random.random()).collect();
            let claimed = case.crew.claim(&case.queue, batch);
            // Open claims count: these and those that run.
            for (key, _) in &field.keys {
                let open = claimed.concat().iter().filter(|t| t.key == *key).count() as i64;
                let ours = running.iter().filter(|task| task.key == *key).count() as i64;
                assert!(open + ours <= cap, "{key}: {open} and {ours}, cap {cap}");
                let state = state(case.client, &case.queue, key);
                assert_eq!(state.running, open + ours, "{state:?}");
                assert_eq!(state.eligible, open + ours < cap, "{state:?}");
            }
            case.crew.end(|number| aborted[number]);
            for (_, tasks) in (0..).zip(claimed).filter(|(n, _)| !aborted[*n as usize]) {
                running.extend(tasks);
            }
            // Some of them end, two sessions at a time.
            let mut other = case.db.connect();
            running.retain(|task| {
                let ends = case.random.random_bool(0.4);
                if ends {
                    let client = if task.id % 2 == 0 {
                        &mut *case.client
                    } else {
                        &mut other
                    };
                    assert!(harvest_fair_server_tests::complete(client, task));
                }
                !ends
            });
        }
    });
}
