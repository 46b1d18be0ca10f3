//! What an operator sets: weights.

pub mod weights;
