//! `fair_chart`: what people read in psql.

use harvest_fair_server_tests::{Cluster, claim, expect_error, flood};
use postgres::Client;

use crate::support::execute;

fn chart(client: &mut Client) -> Vec<String> {
    client
        .query("SELECT chart FROM fair_chart('q')", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect()
}

#[test]
fn a_chart_shows_each_keys_share_weight_wait_and_backlog() {
    let db = Cluster::shared().database();
    let mut client = db.connect_with("SELECT fair_set_weight('q', 'gold', 3)");
    execute(
        &mut client,
        "SELECT fair_configure('q', '{\"key_max_running\": 60}')",
    );
    flood(&mut client, "q", "free", 1_000, "1 hour");
    flood(&mut client, "q", "gold", 100, "1 hour");
    claim(&mut client, "q", "w", 80);
    let lines = chart(&mut client);
    assert_eq!(lines.len(), 3, "{lines:#?}");
    assert!(
        lines[0].ends_with("share  fair weight    wait     p95  backlog   run"),
        "{}",
        lines[0]
    );
    // The mark of the fair share stands at the end of a bar that is as long as is fair.
    let bars = ["█".repeat(19) + "│", "█".repeat(6) + "│"];
    for (line, (key, bar, rest)) in lines[1..].iter().zip([
        ("gold", &bars[0], "75%   75%      3"),
        ("free", &bars[1], "25%   25%      1"),
    ]) {
        let start = format!("{key:19} {bar:20}   {rest}");
        assert!(line.starts_with(&start), "{line}\n{start}");
    }
    assert!(lines[1].ends_with("       40    60 cap"), "{}", lines[1]);
    assert!(lines[2].ends_with("      980    20"), "{}", lines[2]);
    // An hour or a bit more, as near as the histogram tells.
    assert!(
        lines[2].contains(" min ") || lines[2].contains(" h "),
        "{}",
        lines[2]
    );
}

#[test]
fn a_chart_fits_a_screen_whatever_the_keys_and_their_number() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    for key in [
        "日本語のとても長いお客様の名前",
        "e\u{301}a\u{308}o",
        &"x".repeat(200),
    ] {
        flood(&mut client, "q", key, 1, "1 min");
    }
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue, fairness_key) SELECT 'q', 'key' || i FROM generate_series(1, 60) i",
    );
    execute(
        &mut client,
        "INSERT INTO harvest_fair.task (queue) VALUES ('q')",
    );
    claim(&mut client, "q", "w", 3);
    let lines = chart(&mut client);
    assert_eq!(lines.len(), 42);
    assert_eq!(lines[41], "… 24 more keys");
    let find = |start: &str| {
        let line = lines.iter().find(|line| line.starts_with(start));
        line.unwrap_or_else(|| panic!("{start}: {lines:#?}"))
    };
    find("xxxxxxxxx…xxxxxxxxx ");
    // Nine columns before and after the dots; a wide character takes two, and what is left is filled up.
    find("日本語の…様の名前   ");
    find(&format!("e\u{301}a\u{308}o{} ", " ".repeat(16)));
    for line in &lines {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn a_chart_needs_the_name_of_a_queue() {
    let db = Cluster::shared().database();
    let mut client = db.connect();
    expect_error(&mut client, "SELECT fair_chart(NULL)", "22004", "queue", "");
    expect_error(
        &mut client,
        "SELECT fair_chart('')",
        "22023",
        "queue name",
        "",
    );
    let lines = chart(&mut client);
    assert_eq!(lines.len(), 1);
}
