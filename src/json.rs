//! jsonb, read with care: Postgres' own holds numbers and depths that no value here does.

use std::ffi::CStr;

use pgrx::pg_sys;
use serde_json::Value;

use crate::errors::Error;

/// How much of an unreadable value its error shows, in characters.
const SHOWN: usize = 60;

/// Reads a jsonb datum.
pub fn read(what: &'static str, jsonb: pg_sys::Datum) -> Result<Value, Error> {
    // SAFETY: the caller passes a jsonb; its output function gives a C string in the current memory context, copied by the
    // parser before anything else happens.
    let text = unsafe {
        CStr::from_ptr(pg_sys::OidOutputFunctionCall(
            pg_sys::Oid::from(pg_sys::F_JSONB_OUT),
            jsonb,
        ))
    };
    serde_json::from_slice(text.to_bytes()).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.split(" at line ").next().unwrap_or_default();
        let text = text.to_string_lossy();
        let start: String = text.chars().take(SHOWN).collect();
        let cut = if start.len() < text.len() { "..." } else { "" };
        Error::Json {
            what,
            reason: format!("{reason}: {start}{cut}"),
        }
    })
}

/// What was given, for the audit; nothing where it could not be read.
pub fn shown(given: &Option<Result<Value, Error>>) -> Option<Value> {
    given
        .as_ref()
        .and_then(|given| given.as_ref().ok())
        .cloned()
}
