//! What a queue's settings do, with the figures that are promised for them.

mod aging;
mod groups;
mod limits;
mod preview;

use std::collections::BTreeMap;

use harvest_fair_core_tests::harness::{Shop, key, priority};
use harvest_fair_core_tests::sfq::{Policy, Waiting};

/// Claims whatever can be claimed, waking by the queue's timers only, until `until`. Keys in order, with the times.
fn run(shop: &mut Shop, until: i64) -> Vec<(i64, String)> {
    let mut log = Vec::new();
    loop {
        while let Some(served) = shop.claim(1).pop() {
            log.push((shop.now, served.key.as_str().to_string()));
        }
        let queue = shop.queue;
        match shop.board.sched().next_timer(queue) {
            Some(at) if at <= until => {
                assert!(at > shop.now, "a timer in the past");
                shop.now = at;
            }
            _ => {
                shop.now = until;
                return log;
            }
        }
    }
}

fn keys_of(log: &[(i64, String)]) -> Vec<String> {
    log.iter().map(|(_, key)| key.clone()).collect()
}

fn waiting_for(shop: &mut Shop) -> BTreeMap<(u8, String), Option<Waiting>> {
    let (queue, now) = (shop.queue, shop.now);
    let mut seen = BTreeMap::new();
    let mut sched = shop.board.sched();
    sched.advance(queue, now);
    sched.entries(queue, |entry| {
        let name = (entry.priority.get(), entry.key.as_str().to_string());
        seen.insert(name, entry.waiting_for);
    });
    seen
}

#[test]
fn a_claim_is_charged_what_its_keys_tasks_took_on_average_when_a_queue_charges_by_seconds() {
    let mut shop = Shop::with(Policy {
        by_seconds: true,
        ..Policy::default()
    });
    shop.enqueue("a", 4);
    let queue = shop.queue;
    assert_eq!(shop.claim(1)[0].charged, 1.0, "nothing was measured yet");
    shop.board.sched().measured(queue, &key("a"), 34.0);
    assert_eq!(shop.claim(1)[0].charged, 34.0);
    shop.board.sched().measured(queue, &key("a"), 4.0);
    let charged = shop.claim(1)[0].charged;
    assert!(4.0 < charged && charged < 34.0, "{charged}");
    shop.configure(Policy::default());
    assert_eq!(shop.claim(1)[0].charged, 1.0);
}

#[test]
fn worker_time_is_shared_when_a_queue_charges_by_seconds() {
    let mut shop = Shop::with(Policy {
        by_seconds: true,
        ..Policy::default()
    });
    shop.enqueue("long", 400);
    shop.enqueue("short", 3_000);
    let mut workers: [Option<(i64, String, f64)>; 8] = Default::default();
    let mut worked = BTreeMap::<String, i64>::new();
    let queue = shop.queue;
    for now in 0..600 {
        for worker in &mut workers {
            if let Some((until, name, charged)) = worker.take() {
                if until > now {
                    *worker = Some((until, name, charged));
                    continue;
                }
                let took = if name == "long" { 34.0 } else { 1.0 };
                let mut sched = shop.board.sched();
                sched.correct_cost(queue, priority(3), &key(&name), took - charged, None);
                sched.measured(queue, &key(&name), took);
                shop.end(&name, 1);
            }
            if let Some(served) = shop.claim(1).pop() {
                let name = served.key.as_str().to_string();
                let took = if name == "long" { 34 } else { 1 };
                *worked.entry(name.clone()).or_default() += took;
                *worker = Some((now + took, name, served.charged));
            }
        }
    }
    let share = worked["long"] as f64 / (worked["long"] + worked["short"]) as f64;
    assert!((0.45..=0.55).contains(&share), "{share}: {worked:?}");
}
