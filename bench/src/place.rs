//! Where a comparison takes place: a fresh database with equal data for all who take part.

use std::cell::RefCell;
use std::rc::Rc;

use harvest_fair_server_tests::{Cluster, Database};
use postgres::{Client, Statement};

use crate::Result;
use crate::contenders::{Contender, Fetched};
use crate::processes::pin_session;
use crate::race::Runner;

pub struct Place<'c> {
    pub database: Database<'c>,
}

impl<'c> Place<'c> {
    /// A database in which the contenders are installed, and those of them that could be had.
    pub fn open(
        cluster: &'c Cluster,
        fetched: &Fetched,
        contenders: &[Contender],
    ) -> Result<(Place<'c>, Vec<Contender>)> {
        let place = Place {
            database: cluster.database(),
        };
        let present: Vec<Contender> = contenders
            .iter()
            .copied()
            .filter(|contender| fetched.has(*contender))
            .collect();
        let mut client = place.database.connect();
        for contender in &present {
            contender
                .install(&mut client, fetched)
                .map_err(|error| format!("{}: {error}", contender.name()))?;
        }
        Ok((place, present))
    }

    /// Loads the same tasks for each, and puts the database to rest.
    pub fn fill(&self, contenders: &[Contender], queue: &str, rows: i64, keys: i64) -> Result<()> {
        let mut client = self.database.connect();
        for contender in contenders {
            contender.fill(&mut client, queue, rows, keys)?;
        }
        Ok(())
    }

    /// To be called once everything is loaded: nothing of it should be left to do while others are measured.
    pub fn settle(&self) -> Result<()> {
        let mut client = self.database.connect();
        client.batch_execute("VACUUM (ANALYZE)")?;
        client.batch_execute("CHECKPOINT")?;
        Ok(())
    }

    /// The statement that claims `n` tasks; the rival's with a good plan.
    pub fn claim(&self, contender: Contender, queue: &str, n: usize) -> Result<String> {
        let sql = contender.claim(queue, n);
        if contender == Contender::Plain {
            expect_index(&mut self.database.connect(), &sql)?;
        }
        Ok(sql)
    }

    pub fn claimer(&self, contender: Contender, queue: &str, n: usize) -> Result<Claimer> {
        let mut client = self.database.connect();
        let sql = self.claim(contender, queue, n)?;
        Ok(Claimer {
            statement: client.prepare(&sql)?,
            cleanup: contender
                .between_claims()
                .map(|sql| client.prepare(sql))
                .transpose()?,
            client,
        })
    }

    /// A runner that claims `n` tasks a call.
    pub fn runner(
        &self,
        contender: Contender,
        label: impl Into<String>,
        queue: &str,
        n: usize,
        calls: usize,
    ) -> Result<Runner<'static>> {
        let mut claimer = self.claimer(contender, queue, n)?;
        pin_session(claimer.client());
        let claimer = Rc::new(RefCell::new(claimer));
        let same = Rc::clone(&claimer);
        let runner = Runner::new(label, calls, n, move || claimer.borrow_mut().claim());
        Ok(match contender.between_claims() {
            Some(_) => runner.cleaned(move || same.borrow_mut().clean()),
            None => runner,
        })
    }
}

/// The rival must be at its best: a plan that sorts the backlog would be ours to win against.
fn expect_index(client: &mut Client, sql: &str) -> Result<()> {
    let plan: Vec<String> = client
        .query(&format!("EXPLAIN {sql}"), &[])?
        .iter()
        .map(|row| row.get(0))
        .collect();
    let plan = plan.join("\n");
    if plan.contains("plain_order") && !plan.contains("Sort") {
        Ok(())
    } else {
        Err(format!("the plain claim has a bad plan:\n{plan}").into())
    }
}

/// A session that claims, with its statement prepared.
pub struct Claimer {
    client: Client,
    statement: Statement,
    cleanup: Option<Statement>,
}

impl Claimer {
    /// Claims once; the tasks that came.
    pub fn claim(&mut self) -> Result<usize> {
        Ok(self.client.query(&self.statement, &[])?.len())
    }

    /// Claims once; id and lease of the tasks that came.
    pub fn claim_leases(&mut self) -> Result<(Vec<i64>, Vec<i64>)> {
        let rows = self.client.query(&self.statement, &[])?;
        Ok(rows
            .iter()
            .map(|row| (row.get::<_, i64>("id"), row.get::<_, i64>("lease")))
            .unzip())
    }

    /// What must be done before the next claim, outside the measured time.
    pub fn clean(&mut self) -> Result<()> {
        if let Some(cleanup) = &self.cleanup {
            self.client.execute(cleanup, &[])?;
        }
        Ok(())
    }

    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }
}
