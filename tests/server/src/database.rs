//! One database of a cluster, for one test.

use postgres::{Client, NoTls};

use crate::Cluster;

/// A database that is dropped with this value. When the test panics, what the server logged about it is printed.
pub struct Database<'c> {
    cluster: &'c Cluster,
    name: String,
}

impl<'c> Database<'c> {
    pub(crate) fn new(cluster: &'c Cluster, name: String) -> Database<'c> {
        Database { cluster, name }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn cluster(&self) -> &'c Cluster {
        self.cluster
    }

    /// A superuser's connection.
    #[track_caller]
    pub fn connect(&self) -> Client {
        self.cluster.connect_db(&self.name)
    }

    /// A connection of another role.
    #[track_caller]
    pub fn connect_as(&self, role: &str) -> Client {
        self.cluster
            .config(&self.name)
            .user(role)
            .connect(NoTls)
            .unwrap_or_else(|error| panic!("{role} cannot connect: {error}"))
    }

    /// A superuser's connection that runs `sql` first.
    #[track_caller]
    pub fn connect_with(&self, sql: &str) -> Client {
        let mut client = self.connect();
        client
            .batch_execute(sql)
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        client
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.cluster.mourn(&self.name);
        }
        // Not every test leaves its server running.
        if let Ok(mut client) = self.cluster.try_connect("postgres") {
            let _ = client.batch_execute(&format!(
                "DROP DATABASE IF EXISTS {} WITH (FORCE)",
                self.name
            ));
        }
    }
}

/// The process that serves a connection.
pub fn pid_of(client: &mut Client) -> i32 {
    client
        .query_one("SELECT pg_backend_pid()", &[])
        .expect("a pid")
        .get(0)
}
