//! Everything that can run side by side with other tests: one binary, one shared server, a database for each test.
//! What measures time stands in the `measured` binary, where tests run one after another.

mod bad_input;
mod board;
mod chaos;
mod concurrency;
mod dba;
mod dump;
mod enqueue;
mod harness;
mod janitor;
mod life;
mod maintenance;
mod naive;
mod observe;
mod order;
mod planner;
mod policy_aging;
mod policy_audit;
mod policy_caps;
mod policy_cost;
mod policy_groups;
mod policy_pins;
mod policy_preview;
mod policy_queues;
mod policy_rates;
mod policy_settings;
mod policy_support;
mod policy_weights;
mod readme;
mod security;
mod standby;
mod support;
mod transactions;
mod waiting;
mod weights;
mod workloads;
