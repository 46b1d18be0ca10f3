//! The few pieces of SVG that the pictures are made of.

use std::fmt::{Display, Write};

/// A drawing that grows element by element.
pub struct Drawing {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

/// Where a text is held.
#[derive(Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    fn as_str(self) -> &'static str {
        match self {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        }
    }
}

impl Drawing {
    /// `title` is read out to those who cannot see the drawing.
    pub fn new(width: f64, height: f64, title: &str) -> Drawing {
        Drawing {
            width,
            height,
            title: escape(title),
            body: String::new(),
        }
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(format_args!(
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        ));
    }

    pub fn circle(&mut self, class: &str, (x, y): (f64, f64), radius: f64) {
        self.push(format_args!(
            r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"/>"#
        ));
    }

    pub fn rect(&mut self, attributes: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
        self.push(format_args!(
            r#"<rect {attributes} x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}"/>"#
        ));
    }

    pub fn path(&mut self, attributes: &str, d: &str) {
        self.push(format_args!(r#"<path {attributes} d="{d}"/>"#));
    }

    pub fn text(&mut self, class: &str, anchor: Anchor, (x, y): (f64, f64), text: &str) {
        let anchor = anchor.as_str();
        let text = escape(text);
        self.push(format_args!(
            r#"<text class="{class}" text-anchor="{anchor}" x="{x:.1}" y="{y:.1}">{text}</text>"#
        ));
    }

    /// What follows until [`Drawing::end_group`] shows `tip` when it is pointed at.
    pub fn begin_group(&mut self, tip: &str) {
        let tip = escape(tip);
        self.push(format_args!("<g><title>{tip}</title>"));
    }

    pub fn end_group(&mut self) {
        self.push("</g>");
    }

    fn push(&mut self, element: impl Display) {
        let _ = writeln!(self.body, "{element}");
    }

    pub fn finish(self) -> String {
        let Drawing {
            width,
            height,
            title,
            body,
        } = self;
        format!(
            "<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{title}\">\n{body}</svg>\n"
        )
    }
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A stretch of values laid on a stretch of the drawing.
#[derive(Clone, Copy)]
pub struct Axis {
    pub values: (f64, f64),
    pub places: (f64, f64),
}

impl Axis {
    pub fn place(&self, value: f64) -> f64 {
        let share = (value - self.values.0) / (self.values.1 - self.values.0);
        self.places.0 + share * (self.places.1 - self.places.0)
    }
}

/// A round step that cuts `0..max` into at most `parts`.
pub fn round_step(max: f64, parts: f64) -> f64 {
    let raw = (max / parts).max(f64::MIN_POSITIVE);
    let decade = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * decade)
        .into_iter()
        .find(|step| *step >= raw * 0.999_999)
        .unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few_enough() {
        let steps =
            [(400.0, 4.0), (401.0, 4.0), (37.0, 4.0), (0.9, 3.0)].map(|(m, n)| round_step(m, n));
        assert_eq!(steps, [100.0, 200.0, 10.0, 0.5]);
    }

    #[test]
    fn an_axis_may_run_upwards() {
        let axis = Axis {
            values: (0.0, 10.0),
            places: (200.0, 100.0),
        };
        assert_eq!(
            (axis.place(0.0), axis.place(2.5), axis.place(10.0)),
            (200.0, 175.0, 100.0)
        );
    }

    #[test]
    fn texts_cannot_break_the_drawing() {
        let mut drawing = Drawing::new(10.0, 10.0, "a \"quoted\" title");
        drawing.text("label", Anchor::Middle, (0.0, 0.0), "<b> & co");
        let svg = drawing.finish();
        assert!(
            svg.contains("&lt;b&gt; &amp; co") && svg.contains("a &quot;quoted&quot; title"),
            "{svg}"
        );
    }
}
