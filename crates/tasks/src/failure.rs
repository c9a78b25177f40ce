//! An error as JSON.

use forebay_types::{Code, Error};
use serde::{Deserialize, Serialize};

/// An [`Error`] between processes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The number of its [`Code`].
    pub code: u16,
    /// What was tried.
    pub what: String,
    /// Why it failed.
    #[serde(default)]
    pub why: String,
    /// What the user can do.
    #[serde(default)]
    pub cure: String,
}

impl From<&Error> for Failure {
    fn from(e: &Error) -> Failure {
        Failure { code: e.code as u16, what: e.what.clone(), why: e.why.clone(), cure: e.cure.clone() }
    }
}

impl From<Failure> for Error {
    fn from(f: Failure) -> Error {
        Error { code: Code::from_u16(f.code), what: f.what, why: f.why, cure: f.cure }
    }
}
