//! The picture of each user's waits, off beside on.

use super::WIDTH;
use super::svg::{Anchor, Axis, Drawing};
use crate::comparison::{Both, Comparison};
use crate::log::{Scale, User};
use crate::measure::Waits;
use crate::text;

const HEIGHT: f64 = 450.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 84.0;
/// No wait is drawn below this many milliseconds: it is what a claim itself takes.
const FLOOR: f64 = 1.0;

pub fn figure(comparison: &Comparison, scale: &Scale) -> String {
    let mut drawing = Drawing::new(WIDTH, HEIGHT, "Wait of each user with fairness off and on");
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let longest = comparison
        .waits
        .off
        .values()
        .chain(comparison.waits.on.values());
    let longest = longest.map(|waits| waits.p95).fold(10.0 * FLOOR, f64::max);
    let axis = Axis {
        values: (FLOOR.log10(), longest.log10() + 0.08),
        places: (bottom, TOP),
    };
    let height_of = |wait: f64| axis.place(wait.max(FLOOR).log10());

    let mut tick = FLOOR;
    while tick <= longest {
        let y = height_of(tick);
        drawing.line("grid", (LEFT, y), (right, y));
        let label = if tick < 1_000.0 {
            format!("{tick:.0} ms")
        } else {
            format!("{:.0} s", tick / 1e3)
        };
        drawing.text("tick", Anchor::End, (LEFT - 8.0, y + 4.0), &label);
        let of_1993 = text::log_time(tick / 1e3 * scale.speed);
        drawing.text("tick", Anchor::Start, (right + 8.0, y + 4.0), &of_1993);
        for minor in 2..10 {
            let wait = tick * f64::from(minor);
            if wait < longest {
                let y = height_of(wait);
                drawing.line("grid minor", (LEFT, y), (right, y));
            }
        }
        tick *= 10.0;
    }
    drawing.text("axis", Anchor::Start, (8.0, TOP - 18.0), "wait");
    drawing.text(
        "axis",
        Anchor::End,
        (WIDTH - 8.0, TOP - 18.0),
        "in 1993's time",
    );

    // The heaviest as everywhere; the others so that the eye can follow their waits.
    let mut others = comparison.others().to_vec();
    others.sort_by(|(a, _), (b, _)| {
        let median = |user: &User| comparison.waits_of(*user).off.median;
        median(b).total_cmp(&median(a))
    });
    let heaviest = comparison.heaviest().len();
    // One place stays empty between the two kinds.
    let slot = (right - LEFT) / (comparison.users.len() + 1) as f64;
    for (place, &(user, tasks)) in comparison.heaviest().iter().chain(&others).enumerate() {
        let place = place + usize::from(place >= heaviest);
        let x = LEFT + slot * (place as f64 + 0.5);
        let waits = comparison.waits_of(user);
        drawing.begin_group(&format!(
            "{user}, {} tasks: median {} off, {} on; 95th percentile {} off, {} on",
            text::count(tasks),
            text::ms(waits.off.median),
            text::ms(waits.on.median),
            text::ms(waits.off.p95),
            text::ms(waits.on.p95)
        ));
        let span = (slot * 0.21).min(4.0);
        let marks = Both {
            off: (x - span, "off", waits.off),
            on: (x + span, "on", waits.on),
        };
        for (x, class, Waits { median, p95 }) in [marks.off, marks.on] {
            drawing.line(
                &format!("reach {class}"),
                (x, height_of(median)),
                (x, height_of(p95)),
            );
            drawing.circle(&format!("dot {class}"), (x, height_of(median)), 3.1);
        }
        drawing.end_group();
        drawing.text(
            "small",
            Anchor::Middle,
            (x, bottom + 16.0),
            &user.0.to_string(),
        );
    }
    drawing.line("base", (LEFT, bottom), (right, bottom));

    let split = LEFT + slot * (heaviest as f64 + 0.5);
    drawing.line("split", (split, TOP - 6.0), (split, bottom + 40.0));
    let under = bottom + 38.0;
    drawing.text(
        "axis",
        Anchor::Middle,
        ((LEFT + split) / 2.0, under),
        "most tasks",
    );
    drawing.text(
        "axis",
        Anchor::Middle,
        ((split + right) / 2.0, under),
        &format!(
            "the {} other users, by their median wait with fairness off",
            others.len()
        ),
    );
    legend(&mut drawing, right);
    drawing.finish()
}

fn legend(drawing: &mut Drawing, right: f64) {
    let y = HEIGHT - 8.0;
    let keys = [("off", "fairness off"), ("on", "fairness on")];
    for (place, (class, name)) in keys.into_iter().enumerate() {
        let x = LEFT + 10.0 + 130.0 * place as f64;
        drawing.line(&format!("reach {class}"), (x, y - 13.0), (x, y - 1.0));
        drawing.circle(&format!("dot {class}"), (x, y - 1.0), 3.6);
        drawing.text("legend", Anchor::Start, (x + 10.0, y), name);
    }
    let how = "dot: the user's median wait; line: up to the 95th percentile; logarithmic scale";
    drawing.text("note", Anchor::End, (right, y), how);
}
