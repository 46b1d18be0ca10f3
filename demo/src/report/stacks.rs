//! Stacked areas over time: how much of something each of a few users had, and all the others together.

use std::collections::HashMap;

use super::WIDTH;
use super::svg::{Anchor, Axis, Drawing, round_step};
use crate::log::{SECONDS_A_DAY, Scale, User};
use crate::measure::Served;
use crate::text;

/// Colours that can be told apart, for the users that have one of their own.
const COLOURS: [&str; 10] = [
    "#2a6f97", "#e39b3b", "#7b5ea7", "#c8553d", "#52a088", "#d88aa5", "#8a9a3b", "#5b8def",
    "#9c6b4e", "#3d405b",
];
const OTHERS_COLOUR: &str = "#ccd3da";

const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const PANEL: f64 = 132.0;
const GAP: f64 = 36.0;
const BOTTOM: f64 = 26.0;
/// Every day is named where no more than this many are shown.
const FEW_DAYS: f64 = 10.0;

/// A stretch of the log, in equal parts. Times are seconds of the log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bins {
    pub from: f64,
    pub width: f64,
    pub count: usize,
}

impl Bins {
    pub fn to(&self) -> f64 {
        self.from + self.width * self.count as f64
    }

    pub fn of(&self, seconds: f64) -> Option<usize> {
        let bin = ((seconds - self.from) / self.width).floor();
        (bin >= 0.0 && bin < self.count as f64).then_some(bin as usize)
    }
}

/// Who is drawn in a colour of their own; all the others share one.
pub struct Layers {
    users: Vec<User>,
    colours: HashMap<User, &'static str>,
}

impl Layers {
    /// The first of `users` lies at the bottom of a stack. Each keeps the colour that `known` gives it.
    pub fn new(users: Vec<User>, known: Option<&Layers>) -> Layers {
        let mut colours = known
            .map(|layers| layers.colours.clone())
            .unwrap_or_default();
        for user in &users {
            let next = COLOURS[colours.len() % COLOURS.len()];
            colours.entry(*user).or_insert(next);
        }
        Layers { users, colours }
    }

    fn count(&self) -> usize {
        self.users.len() + 1
    }

    fn of(&self, user: User) -> usize {
        let named = self.users.iter().position(|named| *named == user);
        named.unwrap_or(self.users.len())
    }

    fn colour(&self, layer: usize) -> &'static str {
        let user = self.users.get(layer);
        user.and_then(|user| self.colours.get(user))
            .copied()
            .unwrap_or(OTHERS_COLOUR)
    }

    fn name(&self, layer: usize) -> String {
        let user = self.users.get(layer);
        user.map_or_else(|| "all others".to_owned(), User::to_string)
    }
}

/// What is stacked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// Tasks submitted within a bin.
    Submitted,
    /// Of the tasks claimed within a bin, whose they were.
    ShareOfClaims,
    /// Tasks that were waiting, on average over a bin.
    Waiting,
}

pub struct Panel<'a> {
    pub title: &'a str,
    pub unit: &'a str,
    pub tasks: &'a [Served],
    pub amount: Amount,
}

/// For each layer the height of its upper edge in each bin.
type Stack = Vec<Vec<f64>>;

impl Panel<'_> {
    fn stack(&self, layers: &Layers, bins: Bins, scale: &Scale) -> Stack {
        let mut tops = vec![vec![0.0; bins.count]; layers.count()];
        let mut add = |user: User, bin: usize, amount: f64| {
            for line in &mut tops[layers.of(user)..] {
                line[bin] += amount;
            }
        };
        for task in self.tasks {
            let [submit, start] =
                [task.submit, task.start].map(|time| time as f64 / 1e6 * scale.speed);
            match self.amount {
                Amount::Submitted => bins
                    .of(submit)
                    .into_iter()
                    .for_each(|bin| add(task.user, bin, 1.0)),
                Amount::ShareOfClaims => {
                    bins.of(start)
                        .into_iter()
                        .for_each(|bin| add(task.user, bin, 1.0));
                }
                Amount::Waiting => {
                    let first = ((submit - bins.from) / bins.width).floor().max(0.0) as usize;
                    for bin in first..bins.count {
                        let from = bins.from + bins.width * bin as f64;
                        if from >= start {
                            break;
                        }
                        let overlap = start.min(from + bins.width) - submit.max(from);
                        add(task.user, bin, overlap.max(0.0) / bins.width);
                    }
                }
            }
        }
        if self.amount == Amount::ShareOfClaims {
            let claims = tops.last().cloned().unwrap_or_default();
            for line in &mut tops {
                for (height, claims) in line.iter_mut().zip(&claims) {
                    *height = if *claims > 0.0 {
                        100.0 * *height / claims
                    } else {
                        0.0
                    };
                }
            }
        }
        tops
    }
}

/// The panels one below the other, on the same axis of time. Those of the same amount have the same scale.
pub fn figure(title: &str, panels: &[Panel], layers: &Layers, bins: Bins, scale: &Scale) -> String {
    let height = TOP + panels.len() as f64 * (PANEL + GAP) + BOTTOM;
    let mut drawing = Drawing::new(WIDTH, height, title);
    let across = Axis {
        values: (bins.from, bins.to()),
        places: (LEFT, WIDTH - RIGHT),
    };
    let stacks: Vec<Stack> = panels
        .iter()
        .map(|panel| panel.stack(layers, bins, scale))
        .collect();
    let highest = |amount: Amount| {
        let alike = panels
            .iter()
            .zip(&stacks)
            .filter(|(panel, _)| panel.amount == amount);
        let edges = alike.filter_map(|(_, stack)| stack.last()).flatten();
        edges.copied().fold(1.0, f64::max)
    };

    legend(&mut drawing, layers);
    for (place, (panel, stack)) in panels.iter().zip(&stacks).enumerate() {
        let top = TOP + GAP + place as f64 * (PANEL + GAP);
        let up = Axis {
            values: (0.0, highest(panel.amount)),
            places: (top + PANEL, top),
        };
        drawing.text("panel", Anchor::Start, (LEFT, top - 9.0), panel.title);
        drawing.text("axis", Anchor::End, (WIDTH - RIGHT, top - 9.0), panel.unit);
        grid(&mut drawing, up);
        for (layer, upper) in stack.iter().enumerate() {
            let lower = layer.checked_sub(1).map(|below| stack[below].as_slice());
            let d = outline(upper, lower, bins, across, up);
            drawing.path(&format!(r#"fill="{}""#, layers.colour(layer)), &d);
        }
        days(&mut drawing, bins, across, up, place + 1 == panels.len());
    }
    drawing.finish()
}

/// The outline between two edges of a stack, flat within each bin.
fn outline(upper: &[f64], lower: Option<&[f64]>, bins: Bins, across: Axis, up: Axis) -> String {
    let edge = |bin: usize| across.place(bins.from + bins.width * bin as f64);
    let mut d = format!("M{:.1} {:.1}", edge(0), up.place(0.0));
    for (bin, height) in upper.iter().enumerate() {
        d.push_str(&format!("V{:.1}H{:.1}", up.place(*height), edge(bin + 1)));
    }
    for bin in (0..upper.len()).rev() {
        let height = lower.map_or(0.0, |lower| lower[bin]);
        d.push_str(&format!("V{:.1}H{:.1}", up.place(height), edge(bin)));
    }
    d.push('Z');
    d
}

fn grid(drawing: &mut Drawing, up: Axis) {
    let step = round_step(up.values.1, 4.0);
    let mut tick = 0.0;
    while tick <= up.values.1 {
        let y = up.place(tick);
        drawing.line("grid", (LEFT, y), (WIDTH - RIGHT, y));
        drawing.text(
            "tick",
            Anchor::End,
            (LEFT - 8.0, y + 4.0),
            &text::count(tick as usize),
        );
        tick += step;
    }
}

/// Marks the days, or the first and the middle of the months where many days are shown.
fn days(drawing: &mut Drawing, bins: Bins, across: Axis, up: Axis, named: bool) {
    let (base, top) = up.places;
    drawing.line("base", (LEFT, base), (WIDTH - RIGHT, base));
    let few = bins.to() - bins.from <= FEW_DAYS * SECONDS_A_DAY;
    let mut day = (bins.from / SECONDS_A_DAY).ceil();
    while day * SECONDS_A_DAY < bins.to() {
        let (x, date) = (
            across.place(day * SECONDS_A_DAY),
            text::date(day * SECONDS_A_DAY),
        );
        let begins_month = date.starts_with("1 ");
        if few || begins_month || date.starts_with("15 ") {
            let reach = if few || begins_month { top } else { base };
            drawing.line("day", (x, reach), (x, base + 5.0));
            if named {
                drawing.text("tick", Anchor::Start, (x + 3.0, base + 17.0), &date);
            }
        }
        day += 1.0;
    }
}

fn legend(drawing: &mut Drawing, layers: &Layers) {
    for layer in 0..layers.count() {
        let x = LEFT + 92.0 * layer as f64;
        let look = format!(r#"rx="2" fill="{}""#, layers.colour(layer));
        drawing.rect(&look, (x, TOP - 21.0), (13.0, 13.0));
        drawing.text(
            "legend",
            Anchor::Start,
            (x + 19.0, TOP - 10.0),
            &layers.name(layer),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINS: Bins = Bins {
        from: 0.0,
        width: 10.0,
        count: 3,
    };

    /// One second of the log is one of the replay.
    fn stack(amount: Amount) -> Stack {
        let scale = Scale {
            speed: 1.0,
            stretch: 1.0,
            longest_run: 1,
        };
        let task = |user, submit: u64, start: u64| Served {
            user: User(user),
            submit: submit * 1_000_000,
            start: start * 1_000_000,
        };
        let tasks = [
            task(1, 0, 5),
            task(1, 0, 15),
            task(2, 5, 25),
            task(3, 12, 99),
        ];
        let panel = Panel {
            title: "",
            unit: "",
            tasks: &tasks,
            amount,
        };
        panel.stack(&Layers::new(vec![User(2), User(1)], None), BINS, &scale)
    }

    #[test]
    fn tasks_are_counted_where_they_happen_and_layers_lie_on_each_other() {
        let submitted = [[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [3.0, 1.0, 0.0]];
        assert_eq!(stack(Amount::Submitted), submitted);
        let shares = [
            [0.0, 0.0, 100.0],
            [100.0, 100.0, 100.0],
            [100.0, 100.0, 100.0],
        ];
        assert_eq!(stack(Amount::ShareOfClaims), shares);
    }

    #[test]
    fn waiting_is_an_average_over_each_bin() {
        let waiting = [[0.5, 1.0, 0.5], [2.0, 1.5, 0.5], [2.0, 2.3, 1.5]];
        assert_eq!(stack(Amount::Waiting), waiting);
    }

    #[test]
    fn a_user_keeps_its_colour_from_one_picture_to_the_next() {
        let first = Layers::new(vec![User(4), User(15)], None);
        let second = Layers::new(vec![User(23), User(15)], Some(&first));
        assert_eq!(second.colour(1), first.colour(1));
        assert!(![first.colour(0), first.colour(1), OTHERS_COLOUR].contains(&second.colour(0)));
    }
}
