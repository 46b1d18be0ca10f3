//! What is counted of a key.

use harvest_fair_core_tests::harness::{SECOND, Shop, cases, key, priority};
use harvest_fair_core_tests::sfq::{Order, Outcome, Policy, Tally, TenantView, Waiting};
use proptest::prelude::*;

const MINUTE: i64 = 60 * SECOND;

/// All keys at once.
const ALL: (u32, u32) = (0, u32::MAX);

/// What is seen of a key.
fn seen<R>(shop: &mut Shop, name: &str, look: impl Fn(&TenantView<'_>) -> R) -> R {
    let now = shop.now;
    let mut seen = None;
    shop.board.sched().tenants(1, now, ALL, |view| {
        if view.key.as_str() == name {
            seen = Some(look(&view));
        }
    });
    seen.expect("the board knows the key")
}

#[test]
fn what_is_kept_is_counted_and_what_is_given_back_is_not() {
    let mut shop = Shop::default();
    shop.load();
    shop.enqueue("a", 9);
    let kept = shop.claim(3);
    assert_eq!(kept.len(), 3);
    let open = shop.claim_open(2);
    shop.abort(&open);
    let tally = |shop: &mut Shop| seen(shop, "a", |view| view.tally);
    let before = tally(&mut shop);
    assert_eq!((before.claims, before.served), (3, 3.0));
    let (queue, tier, now) = (shop.queue, priority(3), shop.now);
    let mut sched = shop.board.sched();
    sched.ended(queue, &key("a"), Outcome::Completed);
    sched.correct_cost(queue, tier, &key("a"), 4.0, None);
    sched.ended(queue, &key("a"), Outcome::Failed);
    sched.refund(queue, tier, &key("a"), 1.0, None);
    let charged = sched
        .charge(queue, tier, &key("a"), 7.0, None, now)
        .unwrap();
    sched.undo_charge(&charged);
    sched
        .charge(queue, tier, &key("a"), 0.5, None, now)
        .unwrap();
    let after = tally(&mut shop);
    assert_eq!((after.claims, after.completions, after.failures), (3, 1, 1));
    assert_eq!(after.served, 6.5);
    assert_eq!(after.lately(now), 6.5);
}

#[test]
fn without_fairness_each_claim_counts_for_one() {
    let mut shop = Shop::default();
    shop.load();
    shop.enqueue("a", 4);
    let served = shop.claim_in(Order::Due, 3);
    shop.commit(&served);
    let tally = seen(&mut shop, "a", |view| view.tally);
    assert_eq!((tally.claims, tally.served), (3, 3.0));
}

#[test]
fn a_claim_waits_from_its_due_time_until_it_is_picked() {
    let mut shop = Shop::default();
    shop.load();
    let due = shop.now - 10 * SECOND;
    shop.add("a", 3, 0, due, None);
    let claimed = shop.claim_open(1);
    // The transaction stays open for a minute, in which nobody waits.
    shop.now += MINUTE;
    shop.commit(&claimed);
    let wait = seen(&mut shop, "a", |view| view.tally.wait(0.5)).unwrap();
    assert!((8.0..17.0).contains(&wait), "{wait}");
}

#[test]
fn a_key_is_seen_once_with_what_holds_it_back() {
    let mut shop = Shop::with(Policy {
        key_max_running: Some(2),
        ..Policy::default()
    });
    shop.load();
    for tier in [1, 4] {
        for id in 0..3 {
            shop.add("a", tier, 0, shop.now - 5 * SECOND + id, Some(2.0));
        }
    }
    shop.add("later", 3, 0, shop.now + MINUTE, None);
    shop.weigh("unused", 3.0);
    let now = shop.now;
    let mut views = Vec::new();
    let look = |view: TenantView<'_>| (view.key.as_str().to_owned(), view.eligible, view.weight);
    shop.board
        .sched()
        .tenants(1, now, ALL, |view| views.push(look(view)));
    views.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(
        views,
        [("a".into(), true, 2.0), ("later".into(), false, 1.0)]
    );
    shop.claim(2);
    let (waiting, running) = seen(&mut shop, "a", |view| (view.waiting_for, view.running));
    assert_eq!((waiting, running), (Some(Waiting::Cap), 2));
    assert_eq!(
        seen(&mut shop, "a", |view| view.head_due),
        Some(now - 5 * SECOND)
    );
    let later = seen(&mut shop, "later", |view| (view.waiting_for, view.head_due));
    assert_eq!(later, (Some(Waiting::Future), None));
    shop.board
        .sched()
        .tenants(2, now, ALL, |_| panic!("of another scope"));
}

#[test]
fn keys_are_seen_once_each_however_many_are_looked_at_in_one_go() {
    let mut shop = Shop::default();
    shop.load();
    let names: Vec<String> = (0..23).map(|i| format!("k{i:02}")).collect();
    for name in &names {
        shop.enqueue(name, 1);
    }
    let now = shop.now;
    for most in [1, 7, 23, 24, 64, 100] {
        let mut found = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let mut sched = shop.board.sched();
            next = sched.tenants(1, now, (from, most), |view| {
                found.push(view.key.as_str().to_owned());
            });
        }
        found.sort();
        assert_eq!(found, names, "{most} in one go");
    }
}

#[test]
fn what_was_served_counts_for_a_minute() {
    let mut tally = Tally::default();
    let start = 100 * MINUTE;
    for second in 0..60 {
        tally.serve(1.0, start + second * SECOND);
    }
    let lately = |at| tally.lately(start + at);
    assert_eq!(lately(59 * SECOND), 60.0);
    assert_eq!(lately(MINUTE), 60.0);
    assert_eq!(lately(MINUTE + 15 * SECOND), 45.0);
    assert_eq!(lately(2 * MINUTE), 0.0);
    assert_eq!(lately(-9 * MINUTE), 60.0);
    // A clock that was set back starts anew.
    tally.serve(2.0, start - 9 * MINUTE);
    assert_eq!(tally.lately(start - 9 * MINUTE), 2.0);
    // More given back than is left of it.
    tally.serve(-80.0, start - 9 * MINUTE);
    assert_eq!((tally.served, tally.lately(start - 9 * MINUTE)), (0.0, 0.0));
    tally.serve(f64::NAN, start);
    assert_eq!(tally.served, 0.0);
}

#[test]
fn old_waits_fade() {
    let mut tally = Tally::default();
    for _ in 0..200_000 {
        tally.claimed(SECOND, 1.0, 0);
    }
    for _ in 0..100_000 {
        tally.claimed(MINUTE, 1.0, 0);
    }
    assert!(tally.wait(0.5).unwrap() > 30.0);
    assert_eq!(tally.claims, 300_000);
}

#[test]
fn waits_beyond_all_bounds_stay_in_bounds() {
    let mut tally = Tally::default();
    assert_eq!(tally.wait(0.5), None);
    tally.claimed(-5, 1.0, 0);
    tally.claimed(i64::MIN, 1.0, i64::MIN);
    assert!(tally.wait(1.0).unwrap() <= 0.001);
    for _ in 0..9 {
        tally.claimed(i64::MAX, 1.0, i64::MAX);
    }
    // 18.6 hours or more.
    assert_eq!(tally.wait(0.95), Some(67_108.864));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(2_000), ..ProptestConfig::default() })]

    #[test]
    fn a_quantile_is_off_by_less_than_its_double(
        waits in proptest::collection::vec(1_000..40_000_000_000i64, 1..200),
        q in 0.0..1.0f64,
    ) {
        let mut tally = Tally::default();
        for &wait in &waits {
            tally.claimed(wait, 1.0, 0);
        }
        let mut sorted = waits.clone();
        sorted.sort_unstable();
        let rank = ((q * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len()) - 1;
        let exact = sorted[rank] as f64 / 1e6;
        let told = tally.wait(q).unwrap();
        prop_assert!(told >= exact / 2.01 && told <= exact * 2.01, "{} for {}", told, exact);
    }
}
