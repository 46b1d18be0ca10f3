//! The report: one HTML file with its pictures in it.
use crate::comparison::Comparison;
use crate::log::Scale;
pub fn page(comparison: &Comparison, _scale: &Scale, _workers: usize) -> String {
    comparison.sentence()
}
