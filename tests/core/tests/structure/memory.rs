//! What the board remembers of its keys, and for how long: a full board, idle keys, restarts, and clocks that start anew.

use harvest_fair_core_tests::harness::{
    MemoryBoard, Shop, key, names_on, passes_on, priority, row,
};
use harvest_fair_core_tests::sfq::{Full, Next, Order, QueueState, Ticks};

#[test]
fn a_full_board_gives_up_idle_keys_but_never_one_with_work() {
    let mut board = MemoryBoard::new(1, 3);
    let queue = board.open("q");
    let tier = priority(3);
    let mut sched = board.sched();
    for (id, name) in (1..).zip(["a", "b", "c"]) {
        sched
            .note(queue, tier, &key(name), 0, row(0, id), 10)
            .unwrap();
    }
    assert_eq!(
        sched.note(queue, tier, &key("d"), 0, row(0, 4), 10),
        Err(Full::Keys)
    );
    assert_eq!(sched.counters(queue).full_rejections, 1);
    // A claim in flight is work, too.
    let pick = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
    sched.confirm(&pick, true, Next::End, 10);
    assert_eq!(
        sched.note(queue, tier, &key("d"), 0, row(0, 4), 10),
        Err(Full::Keys)
    );
    sched.kept(&pick.charge(row(0, 1)), 10);
    // It still runs, so its count must stay, and with it the record that another key would need.
    assert!(
        sched
            .note(queue, tier, &key("d"), 0, row(0, 4), 10)
            .is_err()
    );
    assert_eq!(sched.counters(queue).evictions, 0);
    sched.running_delta(queue, &key("a"), -1, 10);
    assert!(sched.note(queue, tier, &key("d"), 0, row(0, 4), 10).is_ok());
    assert_eq!(sched.counters(queue).evictions, 1);
    assert_eq!(names_on(&sched, queue), ["b", "c", "d"]);
    sched.check().unwrap();
}

#[test]
fn a_key_without_debt_is_evicted_before_one_with() {
    let mut shop = Shop::new(3);
    shop.enqueue("debtor", 1);
    shop.claim(1);
    shop.enqueue("a", 2);
    shop.claim(2);
    // The debtor was idle first, but owes its claim; "a" has been overtaken by the clock.
    shop.enqueue("b", 3);
    let (queue, now) = (shop.queue, shop.now);
    let mut sched = shop.board.sched();
    for name in ["debtor", "a"] {
        sched.set_running(queue, &key(name), 0);
    }
    sched.correct_cost(queue, priority(3), &key("debtor"), 5.0, None);
    sched.correct_cost(queue, priority(3), &key("a"), -2.0, None);
    sched
        .note(queue, priority(3), &key("new"), 0, row(0, 99), now)
        .unwrap();
    assert_eq!(names_on(&sched, queue), ["b", "debtor", "new"]);
}

#[test]
fn idle_keys_are_forgotten_in_time_and_an_idle_tier_starts_anew() {
    let mut shop = Shop::default();
    shop.enqueue("a", 3);
    shop.enqueue("b", 2);
    shop.claim(4);
    let (queue, hour) = (shop.queue, 3_600_000_000);
    let forget = |shop: &mut Shop, preview| {
        let mut gone = Vec::new();
        let count = shop
            .board
            .sched()
            .forget(queue, shop.now, hour, preview, &mut gone);
        assert_eq!(count as usize, gone.len());
        gone.len()
    };
    assert_eq!(forget(&mut shop, false), 0);
    shop.now += hour;
    // "b" has nothing pending, but two tasks run.
    assert_eq!(forget(&mut shop, false), 0);
    shop.end("b", 2);
    shop.now += hour - 1;
    assert_eq!(forget(&mut shop, false), 0);
    shop.now += 1;
    assert_eq!(forget(&mut shop, true), 1);
    assert_eq!(forget(&mut shop, false), 1);
    assert!(shop.clock(3) > Ticks::ZERO);
    shop.claim(1);
    shop.end("a", 3);
    shop.now += hour;
    assert_eq!(forget(&mut shop, false), 1);
    assert_eq!(shop.clock(3), Ticks::ZERO);
    assert!(shop.board.sched().take_rewrite(queue, priority(3)));
    assert_eq!(shop.board.sched().usage().keys, 0);
    shop.board.sched().check().unwrap();
}

#[test]
fn a_restart_restores_lags_from_the_snapshot() {
    let mut shop = Shop::default();
    shop.weigh("b", 4.0);
    shop.enqueue("a", 40);
    shop.enqueue("b", 40);
    shop.claim(33);
    let queue = shop.queue;
    let mut snapshot = Vec::new();
    shop.board.sched().take_dirty(queue, &mut snapshot, 1);
    shop.board.sched().take_dirty(queue, &mut snapshot, 100);
    assert_eq!(snapshot.len(), 2);
    let mut again = Vec::new();
    shop.board.sched().take_dirty(queue, &mut again, 100);
    assert!(again.is_empty());
    shop.board.sched().mark_dirty(queue, &snapshot);
    shop.board.sched().take_dirty(queue, &mut again, 100);
    assert_eq!(again.len(), 2);

    let mut after = Shop::default();
    let (queue, now) = (after.queue, after.now);
    after
        .board
        .sched()
        .set_queue_state(queue, QueueState::Loading);
    // Rows, one of them of a key that was never charged, are found before, between and after the persisted passes.
    after.weigh("b", 4.0);
    after.enqueue("a", 40);
    after.enqueue("new", 1);
    for saved in &snapshot {
        let mut sched = after.board.sched();
        sched
            .restore(
                queue,
                saved.priority,
                &saved.key,
                saved.pass,
                saved.last_start,
                now,
            )
            .unwrap();
    }
    after.enqueue("b", 40);
    let charged = after
        .board
        .sched()
        .charge(queue, priority(3), &key("busy"), 5.0, None, now);
    assert!(charged.is_ok());
    after.board.sched().finish_load(queue);
    let passes = passes_on(&after.board.sched(), queue);
    // A charge made while loading counts from the clock, which starts anew at 0.
    assert!(passes.contains(&("busy".into(), 5.0)), "{passes:?}");
    after.board.sched().check().unwrap();
    assert_eq!(
        after.board.sched().queue_state(queue),
        Some(QueueState::Loaded)
    );
    assert!(after.board.sched().take_rewrite(queue, priority(3)));
    assert_eq!(after.clock(3), Ticks::ZERO);
    let clock = shop.clock(3);
    let before: Vec<_> = shop
        .waiting()
        .into_iter()
        .map(|(name, pass)| (name, pass.minus(clock)))
        .collect();
    for (name, pass) in after.waiting() {
        let lag = before
            .iter()
            .find(|(other, _)| *other == name)
            .map(|(_, lag)| *lag);
        assert_eq!(pass, lag.unwrap_or(Ticks::ZERO), "{name}");
    }
    assert_eq!(after.keys(1, 1), ["new"]);
    assert_eq!(after.keys(10, 1), shop.keys(10, 1));
}

#[test]
fn a_tier_starts_anew_at_zero_before_its_clock_could_overflow() {
    let mut shop = Shop::at_clock(1 << 60);
    shop.weigh("light", 0.001);
    shop.enqueue("light", 1);
    shop.enqueue("a", 2);
    let served = shop.claim(3);
    let starts: Vec<f64> = served.iter().map(|served| served.start.units()).collect();
    assert_eq!(starts, [0.0, 0.0, 1.0]);
    assert_eq!(shop.clock(3).units(), 1.0);
    let queue = shop.queue;
    assert!(shop.board.sched().take_rewrite(queue, priority(3)));
    let mut snapshot = Vec::new();
    shop.board.sched().take_dirty(queue, &mut snapshot, 100);
    // "warm-up", which carried the clock there, is one claim ahead of where the clock was.
    let mut lags: Vec<(&str, f64)> = snapshot
        .iter()
        .map(|saved| (saved.key.as_str(), saved.pass.units()))
        .collect();
    lags.sort_by(|a, b| a.0.cmp(b.0));
    assert_eq!(lags, [("a", 2.0), ("light", 1_000.0), ("warm-up", 1.0)]);
}
