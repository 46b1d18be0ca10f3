//! What holds the janitor up, or makes one of its transactions fail, costs nothing that it was about to write, and never
//! holds up the server.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use harvest_fair_server_tests::{
    Cluster, PATIENCE, Shutdown, claim, claim_one, flood, holds_within, one, wait_until,
};
use postgres::{Client, NoTls};

use crate::support::{brisk, brisk_options, claims, execute};

fn saved_passes(client: &mut Client) -> i64 {
    one(
        client,
        "SELECT count(*) FROM harvest_fair.key_state WHERE pass = 3000000",
        &[],
    )
}

#[test]
fn passes_that_could_not_be_saved_are_saved_the_next_time() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON harvest_fair.key_state FOR EACH ROW EXECUTE FUNCTION refuse()",
    );
    flood(&mut client, "q", "a", 20, "1 hour");
    claims(&mut client, "q", 3, 1);
    wait_until("the janitor says what it cannot do", PATIENCE, || {
        cluster
            .log()
            .contains("the janitor cannot save passes of queue \"q\": not now")
    });
    execute(&mut client, "DROP TRIGGER refuse ON harvest_fair.key_state");
    wait_until("the passes are saved", PATIENCE, || {
        saved_passes(&mut client) == 1
    });
}

#[test]
fn refused_changes_that_could_not_be_audited_are_audited_the_next_time() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect_with(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON harvest_fair.audit FOR EACH ROW EXECUTE FUNCTION refuse()",
    );
    let refused = client.batch_execute("SELECT fair_set_weight('q', 'a', -1)");
    assert!(refused.is_err());
    wait_until("the janitor says what it cannot do", PATIENCE, || {
        cluster
            .log()
            .contains("the janitor cannot write refused changes to the audit: not now")
    });
    execute(&mut client, "DROP TRIGGER refuse ON harvest_fair.audit");
    wait_until("the refused change is audited", PATIENCE, || {
        one(
            &mut client,
            "SELECT count(*) = 1 FROM harvest_fair.audit WHERE status = 'rejected'",
            &[],
        )
    });
}

#[test]
fn a_fast_shutdown_does_not_wait_for_a_lock_that_a_prepared_transaction_holds() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 20, "1 hour");
    execute(
        &mut client,
        "BEGIN; LOCK TABLE harvest_fair.key_state IN ACCESS EXCLUSIVE MODE; PREPARE TRANSACTION 'holder'",
    );
    let mut claimer = db.connect_with("SELECT FROM fair_state()");
    drop(client);
    // The queue is loaded from the locked table, so nobody gets at it; its janitor waits too.
    let waits = "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
                                WHERE backend_type = 'harvest_fair janitor' AND NOT granted)";
    wait_until("the janitor waits for the lock", PATIENCE, || {
        one(&mut claimer, waits, &[])
    });
    cluster.begin_stop(Shutdown::Fast);
    let pid_file = cluster.data().join("postmaster.pid");
    let ended = holds_within(PATIENCE, || !pid_file.exists());
    assert!(ended, "the server is still there");
}

#[test]
fn passes_are_saved_and_the_server_can_stop_while_no_synchronous_standby_is_there() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = cluster
        .config(db.name())
        .options("-c synchronous_commit=local")
        .connect(NoTls)
        .expect("a connection");
    flood(&mut client, "q", "a", 20, "1 hour");
    cluster.append_conf("synchronous_standby_names = 'gone'\n");
    cluster.reload();
    wait_until("commits wait for a standby", PATIENCE, || {
        one(
            &mut client,
            "SELECT current_setting('synchronous_standby_names') = 'gone'",
            &[],
        )
    });
    for _ in 0..3 {
        claim_one(&mut client, "q");
    }
    let saved = holds_within(PATIENCE, || saved_passes(&mut client) == 1);
    cluster.begin_stop(Shutdown::Fast);
    let pid_file = cluster.data().join("postmaster.pid");
    let ended = holds_within(PATIENCE, || !pid_file.exists());
    if !ended {
        cluster.stop(Shutdown::Immediate);
    }
    assert!(saved && ended, "saved: {saved}, ended: {ended}");
}

#[test]
fn passes_are_saved_once_a_time_though_claims_never_pause() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 100_000, "1 hour");
    claims(&mut client, "q", 1, 1);
    let stop = AtomicBool::new(false);
    let saved = thread::scope(|scope| {
        for _ in 0..4 {
            let mut claimer = db.connect_with("SET synchronous_commit = off");
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    claim(&mut claimer, "q", "w", 1);
                }
            });
        }
        let mut last = 0;
        let saved = (0..4).all(|_| {
            holds_within(PATIENCE, || {
                let now: i64 = one(
                    &mut client,
                    "SELECT coalesce(max(pass), 0) FROM harvest_fair.key_state",
                    &[],
                );
                std::mem::replace(&mut last, now) < now
            })
        });
        stop.store(true, Ordering::Relaxed);
        saved
    });
    assert!(saved, "passes are not saved while claims go on");
    // Some 150 versions of a row fill a page.
    let size: i64 = one(
        &mut client,
        "SELECT pg_relation_size('harvest_fair.key_state')",
        &[],
    );
    assert_eq!(size, 8192, "versions of one row");
}

#[test]
fn a_cancel_does_not_end_the_janitor() {
    let cluster = Cluster::start(brisk_options());
    let db = cluster.database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 20, "1 hour");
    claims(&mut client, "q", 2, 1);
    let janitor = |client: &mut Client| -> Option<i32> {
        let sql =
            "SELECT max(pid) FROM pg_stat_activity WHERE backend_type = 'harvest_fair janitor'";
        one(client, sql, &[])
    };
    wait_until("there is a janitor", PATIENCE, || {
        janitor(&mut client).is_some()
    });
    let pid = janitor(&mut client);
    for _ in 0..20 {
        execute(
            &mut client,
            "SELECT pg_cancel_backend(pid), pg_sleep(0.05) FROM pg_stat_activity
             WHERE backend_type = 'harvest_fair janitor'",
        );
    }
    claims(&mut client, "q", 1, 1);
    wait_until("the passes are saved", PATIENCE, || {
        saved_passes(&mut client) == 1
    });
    assert_eq!(janitor(&mut client), pid, "another one");
}

#[test]
fn what_the_janitor_writes_counts_for_autovacuum() {
    let db = brisk().database();
    let mut client = db.connect();
    flood(&mut client, "q", "a", 20, "1 hour");
    claims(&mut client, "q", 3, 1);
    wait_until("the statistics know of it", PATIENCE, || {
        one(
            &mut client,
            "SELECT n_tup_ins > 0 FROM pg_stat_all_tables WHERE relid = 'harvest_fair.key_state'::regclass",
            &[],
        )
    });
}
