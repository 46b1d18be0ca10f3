//! Keys of any length, and what becomes of long ones when there is no room for their text.

use harvest_fair_core_tests::harness::{LONG_KEY, MemoryBoard, Shop, key, names_on, priority, row};
use harvest_fair_core_tests::sfq::{Full, Next, Order, Snapshot};

/// A key of so many bytes, which shares its beginning with all others and is told from them by its end.
fn named(bytes: usize) -> String {
    let end = if bytes < 4 {
        "xyz"[..bytes].to_owned()
    } else {
        format!("{bytes:04}")
    };
    let mut name = "ä".repeat((bytes - end.len()) / 2);
    if (bytes - end.len()) % 2 == 1 {
        name.insert(0, '-');
    }
    name + &end
}

#[test]
fn keys_of_any_length_stay_what_they_are() {
    let mut shop = Shop::new(1_024);
    let mut names: Vec<String> = (1..=256).map(named).collect();
    for name in &names {
        assert!(name.len() <= 256);
        shop.enqueue(name, 2);
    }
    names.sort();
    let queue = shop.queue;
    assert_eq!(names_on(&shop.board.sched(), queue), names);
    let foreseen = shop.preview(256, &[]);
    let mut foreseen: Vec<&str> = foreseen.iter().map(|claim| claim.key.as_str()).collect();
    foreseen.sort();
    assert_eq!(foreseen, names);
    let mut served = shop.keys(1, 256);
    served.sort();
    assert_eq!(served, names);
    let mut memory = Snapshot::new(2, 1_024).unwrap();
    let mut copy = memory.board(2, 1_024).unwrap();
    shop.board.sched().copy_to(&mut copy);
    assert_eq!(names_on(&copy, queue), names);
    copy.check().unwrap();
    let mut dirty = Vec::new();
    shop.board.sched().take_dirty(queue, &mut dirty, 1_000);
    let mut dirty: Vec<&str> = dirty.iter().map(|entry| entry.key.as_str()).collect();
    dirty.sort();
    assert_eq!(dirty, names);
    shop.board.sched().check().unwrap();
    shop.board.sched().drop_queue(queue);
    let mut sched = shop.board.sched();
    sched.check().unwrap();
    assert_eq!(sched.usage().keys, 0);
    sched.wipe();
    sched.check().unwrap();
}

#[test]
fn a_long_key_without_room_for_its_text_is_refused_until_an_idle_one_gives_its_up() {
    let mut board = MemoryBoard::new(1, 8);
    let queue = board.open("q");
    let tier = priority(3);
    let mut sched = board.sched();
    let other = LONG_KEY.replace('0', "z");
    let (first, second) = (key(LONG_KEY), key(&other));
    sched.note(queue, tier, &first, 0, row(0, 1), 10).unwrap();
    let refused = sched.note(queue, tier, &second, 0, row(0, 2), 10);
    assert_eq!(refused, Err(Full::Keys));
    assert_eq!(sched.counters(queue).full_rejections, 1);
    sched.check().unwrap();
    // Short keys have room, and none of them would make any.
    sched
        .note(queue, tier, &key("a"), 0, row(0, 3), 10)
        .unwrap();
    for name in [LONG_KEY, "a"] {
        let pick = sched.pick(queue, 10, Order::Fair, &[]).unwrap();
        sched.confirm(&pick, true, Next::End, 10);
        assert_eq!(sched.key_of(&pick).unwrap().as_str(), name);
        sched.kept(&pick.charge(row(0, 1)), 10);
    }
    sched.running_delta(queue, &key("a"), -1, 10);
    assert!(sched.note(queue, tier, &second, 0, row(0, 2), 10).is_err());
    sched.running_delta(queue, &first, -1, 10);
    sched.note(queue, tier, &second, 0, row(0, 2), 10).unwrap();
    assert_eq!(sched.counters(queue).evictions, 1);
    assert_eq!(
        names_on(&sched, queue),
        ["a", other.as_str()].map(str::to_owned)
    );
    sched.check().unwrap();
}
