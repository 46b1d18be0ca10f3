//! What an operator sets: weights and the settings of queues, and the record of who did.

pub mod audit;
pub mod prune;
pub mod queues;
pub mod settings;
mod weight_rows;
pub mod weights;
