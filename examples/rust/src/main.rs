//! A worker: `cargo run --release -- QUEUE`. DATABASE_URL says where the database is.
//!
//! One process does one task at a time: start as many as you like. Put your own work into `work`.

use std::{pin::pin, time::Duration};

use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{sleep, timeout};
use tokio_postgres::{Client, Error, NoTls, Row, types::ToSql};

/// Waits for a task, but below a minute, since a wait holds a snapshot.
const CLAIM: &str = "SELECT id, lease, payload, extract(epoch FROM lease_until - clock_timestamp())::float8 \
    FROM fair_claim($1::text, $2, wait => '20 s')";
const EXTEND: &str = "SELECT fair_extend($1, $2) IS NOT NULL";
/// Results to be written just once belong in the transaction of this call: roll back if it is false.
const COMPLETE: &str = "SELECT fair_complete($1::bigint, $2::bigint, $3::float8)";
/// Pending again after a second, then two, four ... up to an hour; failed at max_attempts.
const FAIL: &str = "SELECT fair_fail($1, $2, $3) IS NOT NULL";

/// Does a task and returns its cost (None: the charge of the claim stands). Replace this.
async fn work(payload: Value) -> Result<Option<f64>, String> {
    let seconds = payload["seconds"].as_f64();
    sleep(Duration::from_secs_f64(seconds.unwrap_or(0.0))).await;
    match payload["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(seconds),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let queue = std::env::args().nth(1).ok_or("usage: worker QUEUE")?;
    let name = format!("worker-{}", std::process::id());
    let mut worker = Worker {
        client: connect().await?,
        terminate: signal(SignalKind::terminate())?,
        stopping: false,
    };
    while !worker.stopping {
        match worker.claim(&queue, &name).await {
            Ok(Some(task)) => worker.perform(&task).await,
            Err(error) if !worker.stopping => worker.recover(error).await,
            _ => {}
        }
        let signal = timeout(Duration::ZERO, worker.terminate.recv()).await;
        worker.stopping |= signal.is_ok();
    }
    Ok(())
}

struct Worker {
    client: Client,
    terminate: Signal,
    stopping: bool,
}

impl Worker {
    /// The next task. SIGTERM cancels the wait for it; what was claimed nevertheless is done.
    async fn claim(&mut self, queue: &str, name: &str) -> Result<Option<Row>, Error> {
        let values: [&(dyn ToSql + Sync); 2] = [&queue, &name];
        let mut claim = pin!(self.client.query_opt(CLAIM, &values));
        loop {
            tokio::select! {
                task = &mut claim => return task,
                _ = self.terminate.recv(), if !self.stopping => self.stopping = true,
            }
            let _ = self.client.cancel_token().cancel_query(NoTls).await;
        }
    }

    async fn perform(&mut self, task: &Row) {
        let (id, lease): (i64, i64) = (task.get(0), task.get(1));
        let beat = Duration::from_secs_f64(task.get::<_, f64>(3).max(0.0) / 3.0);
        let mut work = tokio::spawn(work(task.get(2)));
        let result = loop {
            tokio::select! {
                result = &mut work => break result.unwrap_or_else(|panic| Err(panic.to_string())),
                () = sleep(beat) => if !self.call(EXTEND, &[&id, &lease]).await { work.abort() },
            }
        };
        let held = match result {
            Ok(cost) => self.call(COMPLETE, &[&id, &lease, &cost]).await,
            Err(error) => self.call(FAIL, &[&id, &lease, &error]).await,
        };
        if !held {
            eprintln!("task {id}: lease lost, it runs again");
        }
    }

    /// Runs a statement until the server has answered.
    async fn call(&mut self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> bool {
        loop {
            match self.client.query_one(sql, values).await {
                Ok(row) => return row.get(0),
                Err(error) => self.recover(error).await,
            }
        }
    }

    /// Connects again when the connection was lost or the server shuts down. Else panics.
    async fn recover(&mut self, error: Error) {
        let passes = error
            .code()
            .is_none_or(|code| code.code().starts_with("57"));
        assert!(passes, "{error:?}");
        while let Err(error) = connect().await.map(|client| self.client = client) {
            eprintln!("database: {error}");
            sleep(Duration::from_secs(1)).await;
        }
    }
}

async fn connect() -> Result<Client, Error> {
    let url = std::env::var("DATABASE_URL").unwrap_or_default();
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}
