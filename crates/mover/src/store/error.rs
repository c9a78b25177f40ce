//! Errors of stores: the error of Forebay, and whether the same call may succeed when it is repeated.

use std::fmt;

use forebay_types::{Code, Error};
use rustix::io::Errno;

/// A failure of a store.
///
/// [`Code::NoSpace`] is not transient: a repeated call fails until space is freed at the store. [`Code::Stale`] from
/// `read` says that the object is not of the expected version.
#[derive(Debug)]
pub struct StoreError {
    /// What was tried, on what, why it failed, and what the user can do. It never contains credentials.
    pub error: Error,
    /// True if the cause may pass by itself (the store is busy, unreachable, answers late): retry later, unchanged.
    /// An operation that failed so may have taken effect, or may still do so.
    pub is_transient: bool,
    /// True if it was the pool that failed, while the store did what it had to.
    pub is_of_pool: bool,
}

/// The result of a store's call.
pub type StoreResult<T> = Result<T, StoreError>;

impl StoreError {
    /// A failure that repeating does not cure.
    pub fn lasting(code: Code, what: impl Into<String>) -> StoreError {
        StoreError { error: Error::new(code, what), is_transient: false, is_of_pool: false }
    }

    /// A failure of the pool during a call of a store: no sign that anything is wrong with the store.
    pub fn of_pool(code: Code, what: impl Into<String>) -> StoreError {
        StoreError { is_of_pool: true, ..StoreError::lasting(code, what) }
    }

    /// A failure that may pass by itself.
    pub fn transient(code: Code, what: impl Into<String>) -> StoreError {
        StoreError { is_transient: true, ..StoreError::lasting(code, what) }
    }

    /// The failure of a system call.
    pub(crate) fn system(what: impl Into<String>, errno: Errno) -> StoreError {
        let why = std::io::Error::from_raw_os_error(errno.raw_os_error());
        let why = why.to_string();
        // Without " (os error 5)": people read it.
        let why = why.split(" (os error").next().unwrap_or_default();
        let code = Code::from_errno(errno.raw_os_error());
        StoreError { is_transient: passes_by_itself(errno), ..StoreError::lasting(code, what).why(why) }
    }

    /// Adds the reason.
    pub fn why(mut self, why: impl fmt::Display) -> StoreError {
        self.error = self.error.why(why);
        self
    }

    /// Adds what the user can do.
    pub fn cure(mut self, cure: impl Into<String>) -> StoreError {
        self.error = self.error.cure(cure);
        self
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        self.error.code
    }
}

/// True for errors of network file systems whose server is away, and for shortages of resources. EIO is one: mounts
/// with a time limit (`soft`) report it when the server does not answer.
fn passes_by_itself(errno: Errno) -> bool {
    const TRANSIENT: [Errno; 19] = [
        Errno::IO,
        Errno::INTR,
        Errno::AGAIN,
        Errno::NOMEM,
        Errno::BUSY,
        Errno::NFILE,
        Errno::MFILE,
        Errno::TXTBSY,
        Errno::STALE,
        Errno::TIMEDOUT,
        Errno::CONNREFUSED,
        Errno::CONNRESET,
        Errno::CONNABORTED,
        Errno::NOTCONN,
        Errno::HOSTDOWN,
        Errno::HOSTUNREACH,
        Errno::NETUNREACH,
        Errno::NETDOWN,
        Errno::REMOTEIO,
    ];
    TRANSIENT.contains(&errno)
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for StoreError {}

impl From<StoreError> for Error {
    fn from(e: StoreError) -> Error {
        match e.error.code {
            // The store is busy. In the pool the code means that a program is.
            Code::Busy => Error { code: Code::Io, ..e.error },
            _ => e.error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_error_says_whether_it_passes() {
        let away = StoreError::system("cannot list s/a", Errno::HOSTUNREACH);
        assert!(away.is_transient);
        assert_eq!(away.to_string(), "cannot list s/a: No route to host");
        let full = StoreError::system("cannot upload s/a", Errno::DQUOT);
        assert_eq!((full.code(), full.is_transient), (Code::NoSpace, false));
    }
}
