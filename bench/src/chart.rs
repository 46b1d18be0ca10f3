//! Pictures: lines over an axis, and bars. Plain SVG files that need nothing else.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 50.0;
const PLOT: f64 = 300.0;
const BAR: f64 = 20.0;
const NAMES: f64 = 230.0;
/// Ours is the first, and the strongest.
const COLOURS: [&str; 9] = [
    "#0b6e4f", "#c8553d", "#3d6fb4", "#9a6fb0", "#b8860b", "#5a6b7b", "#d17a9b", "#6b8e23",
    "#444444",
];

pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    pub colour: usize,
    pub dashed: bool,
}

impl Series {
    pub fn new(name: impl Into<String>, colour: usize, points: Vec<(f64, f64)>) -> Series {
        Series {
            name: name.into(),
            points,
            colour,
            dashed: false,
        }
    }

    pub fn dashed(mut self) -> Series {
        self.dashed = true;
        self
    }
}

pub struct Lines {
    pub title: String,
    pub x: String,
    pub y: String,
    pub x_log: bool,
    pub y_log: bool,
    pub x_text: fn(f64) -> String,
    pub y_text: fn(f64) -> String,
    pub series: Vec<Series>,
}

impl Lines {
    pub fn draw(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let xs = Axis::over(points().map(|p| p.0), self.x_log, (LEFT, WIDTH - RIGHT));
        let ys = Axis::over(points().map(|p| p.1), self.y_log, (TOP + PLOT, TOP));
        let mut svg = String::new();
        for tick in ys.ticks() {
            let y = ys.place(tick);
            line(&mut svg, "grid", (LEFT, y), (WIDTH - RIGHT, y));
            text(&mut svg, "end", (LEFT - 8.0, y + 4.0), &(self.y_text)(tick));
        }
        for tick in xs.ticks() {
            let x = xs.place(tick);
            line(&mut svg, "grid", (x, TOP), (x, TOP + PLOT));
            text(
                &mut svg,
                "middle",
                (x, TOP + PLOT + 18.0),
                &(self.x_text)(tick),
            );
        }
        text(
            &mut svg,
            "middle",
            ((LEFT + WIDTH - RIGHT) / 2.0, TOP + PLOT + 38.0),
            &self.x,
        );
        text(&mut svg, "start", (10.0, TOP - 10.0), &self.y);
        let mut labels = Vec::new();
        for series in &self.series {
            let colour = COLOURS[series.colour % COLOURS.len()];
            let dash = if series.dashed {
                r#" stroke-dasharray="5 4""#
            } else {
                ""
            };
            let path: Vec<String> = series
                .points
                .iter()
                .map(|point| format!("{:.1},{:.1}", xs.place(point.0), ys.place(point.1)))
                .collect();
            let _ = writeln!(
                svg,
                r#"<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{}"/>"#,
                path.join(" ")
            );
            if series.points.len() <= 12 {
                for point in &series.points {
                    let (x, y) = (xs.place(point.0), ys.place(point.1));
                    let _ = writeln!(
                        svg,
                        r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#
                    );
                }
            }
            if let Some(last) = series.points.last() {
                labels.push((xs.place(last.0), ys.place(last.1), colour, &series.name));
            }
        }
        // Names stand at the ends of their lines, and give way to each other.
        labels.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut free = f64::MIN;
        for (x, y, colour, name) in labels {
            let y = (y + 4.0).max(free);
            free = y + 15.0;
            let x = x.max(WIDTH - RIGHT) + 8.0;
            let _ = writeln!(
                svg,
                r#"<text x="{x:.1}" y="{y:.1}" fill="{colour}">{}</text>"#,
                escape(name)
            );
        }
        page(&self.title, TOP + PLOT + 52.0, &svg)
    }
}

/// One bar.
pub struct Bar {
    pub name: String,
    pub value: f64,
    pub text: String,
    pub colour: usize,
}

impl Bar {
    pub fn new(name: impl Into<String>, value: f64, text: String, colour: usize) -> Bar {
        Bar {
            name: name.into(),
            value,
            text,
            colour,
        }
    }
}

/// Bars in groups, each with a heading.
pub struct Bars {
    pub title: String,
    pub log: bool,
    pub groups: Vec<(String, Vec<Bar>)>,
}

impl Bars {
    pub fn draw(&self) -> String {
        let values = || {
            self.groups
                .iter()
                .flat_map(|group| &group.1)
                .map(|bar| bar.value)
        };
        let axis = if self.log {
            // From half of the shortest, so that it shows.
            let low = values().fold(f64::MAX, f64::min) / 2.0;
            let high = values().fold(f64::MIN_POSITIVE, f64::max);
            Axis {
                low,
                high: high.max(low * 2.0),
                log: true,
                places: (NAMES, WIDTH - 110.0),
            }
        } else {
            Axis::over(values(), false, (NAMES, WIDTH - 110.0))
        };
        let mut svg = String::new();
        let mut y = TOP;
        for (heading, bars) in &self.groups {
            if !heading.is_empty() {
                let _ = writeln!(
                    svg,
                    r#"<text x="10" y="{:.1}" font-weight="600">{}</text>"#,
                    y + 14.0,
                    escape(heading)
                );
                y += 22.0;
            }
            for bar in bars {
                let end = axis.place(bar.value).max(NAMES + 1.0);
                let colour = COLOURS[bar.colour % COLOURS.len()];
                text(&mut svg, "end", (NAMES - 8.0, y + 14.0), &bar.name);
                let _ = writeln!(
                    svg,
                    r#"<rect x="{NAMES}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{colour}"/>"#,
                    y + 2.0,
                    end - NAMES,
                    BAR - 4.0
                );
                text(&mut svg, "start", (end + 6.0, y + 14.0), &bar.text);
                y += BAR;
            }
            y += 8.0;
        }
        if self.log {
            text(&mut svg, "start", (10.0, y + 12.0), "logarithmic scale");
            y += 18.0;
        }
        page(&self.title, y + 8.0, &svg)
    }
}

struct Axis {
    low: f64,
    high: f64,
    log: bool,
    places: (f64, f64),
}

impl Axis {
    /// From 0 where it is linear.
    fn over(values: impl Iterator<Item = f64>, log: bool, places: (f64, f64)) -> Axis {
        let finite: Vec<f64> = values
            .filter(|value| value.is_finite() && (!log || *value > 0.0))
            .collect();
        let mut low = finite.iter().copied().fold(f64::MAX, f64::min);
        let mut high = finite.iter().copied().fold(f64::MIN, f64::max);
        if finite.is_empty() {
            (low, high) = (1.0, 2.0);
        }
        if log {
            // A flat line must look flat, and none stands on the edge.
            let room = if high < low * 10.0 { 2.0 } else { 1.15 };
            (low, high) = (low / room, high * room);
        } else {
            low = low.min(0.0);
            high = if high > low { high * 1.05 } else { low + 1.0 };
        }
        Axis {
            low,
            high,
            log,
            places,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.places.0 + share * (self.places.1 - self.places.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let mut ticks = Vec::new();
            let wide = self.high / self.low > 100.0;
            let mut decade = 10f64.powf(self.low.log10().floor());
            while decade <= self.high * 1.001 {
                for factor in if wide { &[1.0][..] } else { &[1.0, 2.0, 5.0] } {
                    let tick = decade * factor;
                    if tick >= self.low * 0.999 && tick <= self.high * 1.001 {
                        ticks.push(tick);
                    }
                }
                decade *= 10.0;
            }
            return ticks;
        }
        let raw = (self.high - self.low) / 5.0;
        let decade = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|factor| factor * decade)
            .into_iter()
            .find(|step| *step >= raw)
            .unwrap_or(10.0 * decade);
        (0..)
            .map(|i| self.low + f64::from(i) * step)
            .take_while(|tick| *tick <= self.high)
            .collect()
    }
}

fn line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
    );
}

fn text(svg: &mut String, anchor: &str, (x, y): (f64, f64), words: &str) {
    let _ = writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
        escape(words)
    );
}

fn page(title: &str, height: f64, body: &str) -> String {
    let title = escape(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
         role=\"img\" aria-label=\"{title}\">\n\
         <style>text {{ font-family: system-ui, sans-serif; font-size: 12px }} .grid {{ stroke: #e4e4e4 }}</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#fff\"/>\n\
         <text x=\"10\" y=\"22\" font-weight=\"600\">{title}</text>\n{body}</svg>\n"
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_ticks_at_decades() {
        let axis = Axis::over([1_000.0, 10_000_000.0].into_iter(), true, (0.0, 4.0));
        assert_eq!(axis.ticks(), [1e3, 1e4, 1e5, 1e6, 1e7]);
        // In the middle, whatever room there is at the ends.
        assert!((axis.place(1e5) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_linear_axis_begins_at_zero() {
        let axis = Axis::over([40.0, 100.0].into_iter(), false, (0.0, 105.0));
        assert_eq!(axis.ticks(), [0.0, 50.0, 100.0]);
        assert!((axis.place(100.0) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn texts_cannot_break_the_picture() {
        let bars = Bars {
            title: "<&>".to_owned(),
            log: false,
            groups: vec![(
                String::new(),
                vec![Bar::new("a < b", 1.0, "\"1\"".to_owned(), 0)],
            )],
        };
        let svg = bars.draw();
        assert!(
            svg.contains("&lt;&amp;&gt;")
                && svg.contains("a &lt; b")
                && svg.contains("&quot;1&quot;")
        );
    }
}
