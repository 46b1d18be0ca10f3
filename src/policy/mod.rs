//! What an operator sets: weights and the settings of queues, and the record of who did.

pub mod audit;
pub mod prune;
mod queue_rows;
pub mod queues;
mod rows;
pub mod settings;
mod weight_rows;
pub mod weights;
