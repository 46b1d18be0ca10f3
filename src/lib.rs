//! Weighted fair job queues: Postgres keeps the rows, shared memory keeps the order.

pgrx::pg_module_magic!();
