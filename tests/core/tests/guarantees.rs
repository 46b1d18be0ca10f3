//! Each row of the table of guarantees, for every weight and from every starting clock. A failure prints the smallest case
//! that fails, and the seed that draws it again. `PROPTEST_CASES` says how many cases instead of 10,000.

use harvest_fair_core_tests::harness::{
    SECOND, Served, Shop, WEIGHTS, cases, count, ids, key, priority, row,
};
use harvest_fair_core_tests::sfq::{Policy, QueueId, Ticks};
use proptest::prelude::*;

const CLOCKS: [i64; 5] = [0, 1 << 20, 1 << 44, 1 << 53, 1 << 60];

fn clocks() -> impl Strategy<Value = i64> {
    proptest::sample::select(&CLOCKS[..])
}

/// Weights of some keys.
fn crowd(most: usize) -> impl Strategy<Value = Vec<f64>> {
    proptest::collection::vec(proptest::sample::select(&WEIGHTS[..]), 1..=most)
}

fn name(i: usize) -> String {
    format!("k{i}")
}

/// A queue at `clock` in which each key has `tasks` tasks.
fn backlogged(clock: i64, weights: &[f64], tasks: usize) -> Shop {
    let mut shop = Shop::at_clock(clock);
    for (i, &weight) in weights.iter().enumerate() {
        shop.weigh(&name(i), weight);
        shop.enqueue(&name(i), tasks);
    }
    shop
}

/// What one claim of weight `weight` costs, in ticks.
fn step(weight: f64) -> i128 {
    i128::from(Ticks::step(1.0, weight).get())
}

/// For two keys, the most and the least that one is ahead of the other, in ticks, at any time of `keys`.
fn spread(keys: &[String], i: usize, j: usize, weights: &[f64]) -> (i128, i128) {
    let (mut ahead, mut most, mut least) = (0, 0, 0);
    for key in keys {
        if *key == name(i) {
            ahead += step(weights[i]);
        } else if *key == name(j) {
            ahead -= step(weights[j]);
        }
        most = most.max(ahead);
        least = least.min(ahead);
    }
    (least, most)
}

fn set_policy(shop: &mut Shop, policy: &Policy) {
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().set_policy(queue, policy, now);
}

fn cap(shop: &mut Shop, key_max_running: Option<u32>) {
    let policy = Policy {
        key_max_running,
        ..Policy::default()
    };
    set_policy(shop, &policy);
}

/// A task of the key is done.
fn complete(shop: &mut Shop, name: &str) {
    let (queue, now) = (shop.queue, shop.now);
    shop.board.sched().running_delta(queue, &key(name), -1, now);
}

/// The key that is back has no credit at first, and then no more than its share.
fn comes_back_without_a_burst(
    shop: &mut Shop,
    me: usize,
    weights: &[f64],
) -> Result<(), TestCaseError> {
    let clock = shop.clock(3);
    let pass = shop
        .waiting()
        .into_iter()
        .find(|(key, _)| *key == name(me))
        .map(|(_, pass)| pass);
    prop_assert!(pass >= Some(clock), "credit: {pass:?} before {clock:?}");
    let keys = shop.keys(40, 1);
    for i in (0..weights.len()).filter(|i| *i != me) {
        let (least, most) = spread(&keys, me, i, weights);
        prop_assert!(
            most - least <= step(weights[me]) + step(weights[i]),
            "{least}..{most}"
        );
    }
    Ok(())
}

/// What somebody does under a cap.
#[derive(Clone, Debug)]
enum Act {
    /// Claims so many in a transaction that stays open.
    Claim(usize),
    /// One of the open transactions ends.
    Commit(usize),
    Abort(usize),
    /// One of the running tasks does.
    Complete(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => (1..6usize).prop_map(Act::Claim),
        1 => any::<usize>().prop_map(Act::Commit),
        1 => any::<usize>().prop_map(Act::Abort),
        2 => any::<usize>().prop_map(Act::Complete),
    ];
    proptest::collection::vec(act, 1..40)
}

/// Takes one of several out, if there is one.
fn take<T>(all: &mut Vec<T>, which: usize) -> Option<T> {
    (!all.is_empty()).then(|| all.swap_remove(which % all.len()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(10_000), ..ProptestConfig::default() })]

    #[test]
    fn a_newcomer_waits_at_most_one_claim_per_other_key(
        clock in clocks(), weights in crowd(12), before in 0..40usize, batch in 1..9usize,
    ) {
        let mut shop = backlogged(clock, &weights, 60);
        shop.keys(before / batch, batch);
        shop.enqueue("newcomer", 1);
        let keys = shop.keys(weights.len() + 1, 1);
        prop_assert_eq!(count(&keys, "newcomer"), 1, "{:?}", keys);
    }

    #[test]
    fn two_keys_never_differ_by_more_than_a_claim_of_each(
        clock in clocks(), weights in crowd(6), batch in 1..9usize,
    ) {
        let mut shop = backlogged(clock, &weights, 70);
        let keys = shop.keys(64 / batch, batch);
        for i in 0..weights.len() {
            for j in 0..i {
                let (least, most) = spread(&keys, i, j, &weights);
                let (a, b) = (step(weights[i]), step(weights[j]));
                // Over any interval; and from the common start.
                prop_assert!(most - least <= a + b, "{i} and {j}: {least}..{most}");
                prop_assert!(most.max(-least) <= a.max(b), "{i} and {j}: {least}..{most}");
            }
        }
    }

    #[test]
    fn no_key_starves(clock in clocks(), weights in crowd(8)) {
        let mut shop = backlogged(clock, &weights, 70);
        let keys = shop.keys(64, 1);
        let sum: f64 = weights.iter().sum();
        for n in 1..=keys.len() {
            for (i, weight) in weights.iter().enumerate() {
                let least = (n as f64 - weights.len() as f64 + 1.0) * weight / sum - 1.0;
                let served = count(&keys[..n], &name(i)) as f64;
                // Steps are rounded to whole ticks, which over so few claims comes to far less than this.
                prop_assert!(served >= least - 1e-3, "{i} of {weights:?} after {n}: {served} < {least}");
            }
        }
    }

    #[test]
    fn a_key_that_was_idle_comes_back_with_no_credit_and_no_burst(
        clock in clocks(), weights in crowd(5), mine in proptest::sample::select(&WEIGHTS[..]),
        first in 0..4usize, away in 0..30usize,
    ) {
        let mut shop = backlogged(clock, &weights, 70);
        let me = weights.len();
        let mut weights = weights;
        weights.push(mine);
        shop.weigh(&name(me), mine);
        shop.enqueue(&name(me), first);
        shop.keys(away, 1);
        shop.enqueue(&name(me), 70);
        comes_back_without_a_burst(&mut shop, me, &weights)?;
    }

    #[test]
    fn a_key_that_was_gated_comes_back_with_no_credit_and_no_burst(
        clock in clocks(), weights in crowd(5), gated in 0..5usize, away in 0..30usize,
    ) {
        let mut shop = backlogged(clock, &weights, 70);
        let gated = gated % weights.len();
        cap(&mut shop, Some(1));
        // At its cap: what it runs stays, what others run is completed at once.
        for _ in 0..away {
            for served in shop.claim(1) {
                if served.key.as_str() != name(gated) {
                    complete(&mut shop, served.key.as_str());
                }
            }
        }
        cap(&mut shop, None);
        comes_back_without_a_burst(&mut shop, gated, &weights)?;
    }

    #[test]
    fn the_clock_never_falls_and_never_passes_a_waiting_key(
        clock in clocks(), weights in crowd(6), aborted in proptest::collection::vec(any::<bool>(), 1..40),
    ) {
        let mut shop = backlogged(clock, &weights, 80);
        let mut last = shop.clock(3);
        for abort in aborted {
            let served = shop.claim_open(2);
            if abort { shop.abort(&served) } else { shop.commit(&served) }
            let now = shop.clock(3);
            // A rebase starts the clock anew, and all passes with it.
            prop_assert!(now >= last || last >= Ticks::REBASE_AT, "{now:?} after {last:?}");
            for (key, pass) in shop.waiting() {
                prop_assert!(pass >= now, "{key} at {pass:?}, clock {now:?}");
            }
            last = now;
        }
    }

    #[test]
    fn a_claim_out_of_lag_order_never_changes_the_order_of_two_waiting_keys(
        clock in clocks(), weights in crowd(8), before in 0..30usize, aside in 0..8usize, tier in 2..4u8,
    ) {
        let mut shop = backlogged(clock, &weights, 60);
        shop.keys(before, 1);
        let aside = name(aside % weights.len());
        let mut order = shop.waiting();
        let clock = shop.clock(3);
        let (queue, now) = (shop.queue, shop.now);
        shop.board.sched().take_aside(queue, priority(tier), &key(&aside), row(now, 1 << 50), now).unwrap();
        let mut after = shop.waiting();
        prop_assert_eq!(shop.clock(3), clock);
        for passes in [&mut order, &mut after] {
            passes.retain(|(key, _)| tier != 3 || *key != aside);
            passes.sort();
        }
        prop_assert_eq!(order, after);
    }

    #[test]
    fn undo_puts_the_key_back_where_it_was_or_at_the_clock(
        clock in clocks(), weights in crowd(6), before in 0..30usize, held in 1..9usize, meanwhile in 0..20usize,
    ) {
        let mut shop = backlogged(clock, &weights, 80);
        shop.keys(before, 1);
        let at_first = shop.waiting();
        let aborted = shop.claim_open(held);
        let claimed = shop.waiting();
        shop.keys(meanwhile, 1);
        let mut others = shop.waiting();
        shop.abort(&aborted);
        let mut after = shop.waiting();
        let clock = shop.clock(3);
        if clock >= Ticks::REBASE_AT || at_first.iter().any(|(_, pass)| *pass >= Ticks::REBASE_AT) {
            // Passes from before and after a rebase do not compare.
            return Ok(());
        }
        let find = |passes: &[(String, Ticks)], name: &str| {
            passes.iter().find(|(key, _)| key == name).map(|(_, pass)| *pass).unwrap()
        };
        let aborted_keys: Vec<&str> = aborted.iter().map(|served| served.key.as_str()).collect();
        for (name, pass) in &after {
            if aborted_keys.contains(&name.as_str()) {
                let charged = find(&claimed, name).minus(find(&at_first, name));
                let back = find(&others, name).minus(charged);
                prop_assert_eq!(*pass, back.max(clock));
            }
        }
        for passes in [&mut others, &mut after] {
            passes.retain(|(key, _)| !aborted_keys.contains(&key.as_str()));
            passes.sort();
        }
        prop_assert_eq!(others, after);
    }

    #[test]
    fn groups_get_one_share_each_however_many_keys_they_have(
        groups in proptest::collection::vec((proptest::sample::select(&WEIGHTS[..]), 1..5usize), 2..6),
    ) {
        let mut shop = Shop::default();
        set_policy(&mut shop, &Policy { separator: Some('/'), ..Policy::default() });
        let weights: Vec<f64> = groups.iter().map(|(weight, _)| *weight).collect();
        for (i, (weight, members)) in groups.iter().enumerate() {
            shop.weigh(&name(i), *weight);
            for member in 0..*members {
                shop.enqueue(&format!("{}/{member}", name(i)), 40);
            }
        }
        let group_of = |key: &String| key.split('/').next().unwrap_or_default().to_owned();
        let served: Vec<String> = shop.keys(30, 1).iter().map(group_of).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..weights.len() {
            for j in 0..i {
                let (least, most) = spread(&served, i, j, &weights);
                let (a, b) = (step(weights[i]), step(weights[j]));
                prop_assert!(most - least <= a + b, "{i} and {j}: {least}..{most}");
                prop_assert!(most.max(-least) <= a.max(b), "{i} and {j}: {least}..{most}");
            }
            for n in 1..=served.len() {
                let least = (n as f64 - weights.len() as f64 + 1.0) * weights[i] / sum - 1.0;
                let got = count(&served[..n], &name(i)) as f64;
                prop_assert!(got >= least - 1e-3, "{i} of {weights:?} after {n}: {got} < {least}");
            }
        }
        shop.enqueue("newcomer/1", 1);
        let next = shop.keys(groups.len() + 1, 1);
        prop_assert_eq!(count(&next, "newcomer/1"), 1, "{:?}", next);
    }

    #[test]
    fn running_counts_never_exceed_their_caps(
        clock in clocks(), weights in crowd(5), most in 0..5u32, acts in acts(),
    ) {
        let mut shop = backlogged(clock, &weights, 12);
        cap(&mut shop, Some(most));
        let mut open: Vec<Vec<Served>> = Vec::new();
        let mut running: Vec<String> = Vec::new();
        for act in acts {
            match act {
                Act::Claim(n) => open.push(shop.claim_open(n)),
                Act::Commit(which) => {
                    for served in take(&mut open, which).into_iter().flatten() {
                        running.push(served.key.as_str().to_owned());
                        shop.commit(&[served]);
                    }
                }
                Act::Abort(which) => {
                    if let Some(served) = take(&mut open, which) {
                        shop.abort(&served);
                    }
                }
                Act::Complete(which) => {
                    if let Some(name) = take(&mut running, which) {
                        complete(&mut shop, &name);
                    }
                }
            }
            for i in 0..weights.len() {
                let claimed = open.iter().flatten().filter(|served| served.key.as_str() == name(i)).count();
                let holds = (claimed + count(&running, &name(i))) as i32;
                prop_assert!(holds <= most as i32, "{holds} of {}, cap {most}", name(i));
                let queue = shop.queue;
                prop_assert_eq!(shop.board.sched().running(queue, &key(&name(i))), holds);
            }
        }
    }

    #[test]
    fn one_key_alone_is_served_by_claim_order_due_time_then_id(
        rows in proptest::collection::vec((0..90i64, 0..2u8), 1..40), batch in 1..7usize,
    ) {
        let mut shop = Shop::default();
        let mut expected: Vec<(i64, i64)> = rows
            .into_iter()
            .map(|(ago, band)| {
                let due = shop.now - ago * SECOND;
                let id = shop.add("k", 3, band, due, None);
                (due + i64::from(band) * 30 * SECOND, id)
            })
            .collect();
        expected.sort();
        let mut claimed = Vec::new();
        for _ in 0..expected.len() {
            claimed.extend(ids(&shop.claim(batch)));
        }
        prop_assert_eq!(claimed, expected.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    }

    #[test]
    fn a_claim_on_one_queue_changes_nothing_in_another(weights in crowd(6), claims in 1..40usize) {
        let mut shop = backlogged(0, &weights, 60);
        let other = shop.board.open("other");
        for i in 0..weights.len() {
            let now = shop.now;
            shop.board.sched().note(other, priority(3), &key(&name(i)), 0, row(0, i as i64), now).unwrap();
        }
        let view = |shop: &mut Shop, queue: QueueId| {
            let mut lines = Vec::new();
            shop.board.sched().entries(queue, |entry| lines.push(format!("{entry:?}")));
            lines.sort();
            lines
        };
        let before = view(&mut shop, other);
        shop.keys(claims, 1);
        prop_assert_eq!(before, view(&mut shop, other));
    }

    #[test]
    fn a_batch_is_the_same_as_its_claims_one_by_one(
        clock in clocks(), weights in crowd(6), tasks in 1..20usize, n in 1..60usize,
    ) {
        let mut together = backlogged(clock, &weights, tasks);
        let mut one_by_one = backlogged(clock, &weights, tasks);
        let singles: Vec<i64> = (0..n).flat_map(|_| ids(&one_by_one.claim(1))).collect();
        prop_assert_eq!(ids(&together.claim(n)), singles);
    }
}
