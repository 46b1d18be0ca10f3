//! What a refused statement must say.

use postgres::{Client, Error};

/// The fields of a server's error that tests look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    pub sqlstate: String,
    pub message: String,
    pub detail: String,
    pub hint: String,
}

impl Refusal {
    #[track_caller]
    fn of(error: &Error) -> Refusal {
        let error = error
            .as_db_error()
            .unwrap_or_else(|| panic!("not an error of the server: {error:?}"));
        Refusal {
            sqlstate: error.code().code().to_owned(),
            message: error.message().to_owned(),
            detail: error.detail().unwrap_or_default().to_owned(),
            hint: error.hint().unwrap_or_default().to_owned(),
        }
    }
}

/// The SQLSTATE of a server's error; empty when the connection itself failed.
pub fn sqlstate_of(error: &Error) -> &str {
    error.code().map_or("", |code| code.code())
}

/// Runs a statement that must be refused, and returns how. By then its effects are undone for other sessions, too: the
/// server sends an error before it aborts, and only then takes the next statement.
#[track_caller]
pub fn expect_refusal(client: &mut Client, sql: &str) -> Refusal {
    match client.batch_execute(sql) {
        Ok(()) => panic!("was not refused: {sql}"),
        Err(error) => {
            let _ = client.batch_execute("");
            Refusal::of(&error)
        }
    }
}

/// Runs a statement that must be refused with this SQLSTATE, a message that holds `message` and a hint that holds
/// `hint`. An empty `hint` asks for nothing.
#[track_caller]
pub fn expect_error(
    client: &mut Client,
    sql: &str,
    sqlstate: &str,
    message: &str,
    hint: &str,
) -> Refusal {
    let refusal = expect_refusal(client, sql);
    assert_eq!(refusal.sqlstate, sqlstate, "{sql}: {refusal:?}");
    assert!(
        refusal.message.contains(message),
        "{sql}: no {message:?} in {refusal:?}"
    );
    assert!(
        refusal.hint.contains(hint),
        "{sql}: no hint with {hint:?} in {refusal:?}"
    );
    refusal
}
