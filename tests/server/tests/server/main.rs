//! Everything that can run side by side with other tests: one binary, one shared server, a database for each test.
//! What measures time stands in the `measured` binary, where tests run one after another.

mod harness;
