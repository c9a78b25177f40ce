//! Errors: a stable code for each kind, its errno, and the one struct that crosses crate borders.

use std::fmt;

/// Why an operation failed. Codes are stable: they travel by ring and wire and are printed by `--json`. On hot paths
/// the code alone is the error; an [`Error`] adds text for people.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Code {
    /// No such entry, inode, task or pool.
    NotFound = 1,
    /// The name exists already.
    Exists = 2,
    /// A component that must be a directory is not one.
    NotDirectory = 3,
    /// The operation does not apply to a directory.
    IsDirectory = 4,
    /// The directory has entries.
    NotEmpty = 5,
    /// A component exceeds 255 bytes or a path 4095.
    NameTooLong = 6,
    /// The target or the shard is full.
    NoSpace = 7,
    /// The medium or the pool failed.
    Io = 8,
    /// The caller's identity does not allow it (EPERM).
    NotPermitted = 9,
    /// The mode bits do not allow it (EACCES).
    AccessDenied = 10,
    /// An argument is not valid.
    Invalid = 11,
    /// Too many symbolic links.
    TooManySymlinks = 12,
    /// The inode has the largest possible number of links.
    TooManyLinks = 13,
    /// Source and destination are not in one file system.
    CrossDevice = 14,
    /// No such extended attribute.
    NoAttribute = 15,
    /// The caller's buffer is too small.
    Range = 16,
    /// The value, request or list is too large.
    TooBig = 17,
    /// The file system does not support this operation.
    NotSupported = 18,
    /// The inode existed and was removed.
    Stale = 19,
    /// It is in use: a mount point, a pool that is up.
    Busy = 20,
    /// A deadline passed.
    TimedOut = 21,
    /// The pool's daemon is gone and did not come back.
    PoolGone = 22,
    /// Stored or received bytes contradict themselves.
    Corrupt = 23,
    /// The pool was written by a newer Forebay.
    NewerFormat = 24,
    /// A value does not fit its type.
    Overflow = 25,
    /// A message could not be decoded.
    Malformed = 26,
    /// Interrupted by a signal.
    Interrupted = 27,
    /// The descriptor is not open, or not open for this operation.
    BadDescriptor = 28,
    /// Too few descriptors, threads, or other resources that are counted, except memory.
    NoResources = 29,
    /// The session is not known: attach again.
    UnknownSession = 30,
    /// A file that a running program executes cannot be written.
    TextBusy = 31,
    /// A pointer of the caller is invalid.
    Fault = 32,
    /// The file is too large for the medium.
    FileTooLarge = 33,
    /// Read-only file system.
    ReadOnly = 34,
    /// No such device or address: an open of a socket, or of a FIFO without a reader.
    NoDevice = 35,
    /// The directory is wide, and the request must name one of its parts ([`crate::Refusal::Wide`]). Only between
    /// daemons; programs never get it.
    Wide = 36,
    /// Out of memory or address space.
    NoMemory = 37,
    /// The directory has names in its backing store that are not in the pool yet: the daemon waits for them, and applies
    /// the request again. Programs get it only for changes over several nodes.
    NotListed = 38,
}

impl Code {
    /// Every code, for tests that walk all mappings.
    pub const ALL: [Code; 38] = [
        Code::NotFound,
        Code::Exists,
        Code::NotDirectory,
        Code::IsDirectory,
        Code::NotEmpty,
        Code::NameTooLong,
        Code::NoSpace,
        Code::Io,
        Code::NotPermitted,
        Code::AccessDenied,
        Code::Invalid,
        Code::TooManySymlinks,
        Code::TooManyLinks,
        Code::CrossDevice,
        Code::NoAttribute,
        Code::Range,
        Code::TooBig,
        Code::NotSupported,
        Code::Stale,
        Code::Busy,
        Code::TimedOut,
        Code::PoolGone,
        Code::Corrupt,
        Code::NewerFormat,
        Code::Overflow,
        Code::Malformed,
        Code::Interrupted,
        Code::BadDescriptor,
        Code::NoResources,
        Code::UnknownSession,
        Code::TextBusy,
        Code::Fault,
        Code::FileTooLarge,
        Code::ReadOnly,
        Code::NoDevice,
        Code::Wide,
        Code::NoMemory,
        Code::NotListed,
    ];

    /// The code for a number that came by ring or wire; [`Code::Malformed`] for unknown numbers.
    pub fn from_u16(v: u16) -> Code {
        v.checked_sub(1).and_then(|i| Code::ALL.get(i as usize).copied()).unwrap_or(Code::Malformed)
    }

    /// The Linux errno (x86-64 and aarch64 values) that a system call would return.
    pub fn errno(self) -> i32 {
        match self {
            Code::NotFound => 2,
            Code::Exists => 17,
            Code::NotDirectory => 20,
            Code::IsDirectory => 21,
            Code::NotEmpty => 39,
            Code::NameTooLong => 36,
            Code::NoSpace => 28,
            Code::Io => 5,
            Code::NotPermitted => 1,
            Code::AccessDenied => 13,
            Code::Invalid => 22,
            Code::TooManySymlinks => 40,
            Code::TooManyLinks => 31,
            Code::CrossDevice => 18,
            Code::NoAttribute => 61,
            Code::Range => 34,
            Code::TooBig => 7,
            Code::NotSupported => 95,
            Code::Stale => 116,
            Code::Busy => 16,
            Code::TimedOut => 5,
            Code::PoolGone => 5,
            Code::Corrupt => 5,
            Code::NewerFormat => 5,
            Code::Overflow => 75,
            Code::Malformed => 5,
            Code::Interrupted => 4,
            Code::BadDescriptor => 9,
            Code::NoResources => 24,
            Code::UnknownSession => 5,
            Code::TextBusy => 26,
            Code::Fault => 14,
            Code::FileTooLarge => 27,
            Code::ReadOnly => 30,
            Code::NoDevice => 6,
            Code::Wide => 5,
            Code::NoMemory => 12,
            Code::NotListed => 16,
        }
    }

    /// The code nearest to an errno from the kernel; [`Code::Io`] for unknown ones.
    pub fn from_errno(errno: i32) -> Code {
        match errno {
            1 => Code::NotPermitted,
            2 => Code::NotFound,
            4 => Code::Interrupted,
            6 | 19 => Code::NoDevice,
            7 => Code::TooBig,
            9 => Code::BadDescriptor,
            12 => Code::NoMemory,
            23 | 24 => Code::NoResources,
            13 => Code::AccessDenied,
            14 => Code::Fault,
            16 => Code::Busy,
            17 => Code::Exists,
            18 => Code::CrossDevice,
            20 => Code::NotDirectory,
            21 => Code::IsDirectory,
            22 => Code::Invalid,
            26 => Code::TextBusy,
            27 => Code::FileTooLarge,
            28 | 122 => Code::NoSpace,
            30 => Code::ReadOnly,
            31 => Code::TooManyLinks,
            34 => Code::Range,
            36 => Code::NameTooLong,
            39 => Code::NotEmpty,
            40 => Code::TooManySymlinks,
            61 => Code::NoAttribute,
            75 => Code::Overflow,
            38 | 95 => Code::NotSupported,
            110 => Code::TimedOut,
            116 => Code::Stale,
            _ => Code::Io,
        }
    }

    /// The code's name in `--json` output: stable, lower case with hyphens.
    pub fn name(self) -> &'static str {
        match self {
            Code::NotFound => "not-found",
            Code::Exists => "exists",
            Code::NotDirectory => "not-a-directory",
            Code::IsDirectory => "is-a-directory",
            Code::NotEmpty => "not-empty",
            Code::NameTooLong => "name-too-long",
            Code::NoSpace => "no-space",
            Code::Io => "io",
            Code::NotPermitted => "not-permitted",
            Code::AccessDenied => "access-denied",
            Code::Invalid => "invalid",
            Code::TooManySymlinks => "too-many-symlinks",
            Code::TooManyLinks => "too-many-links",
            Code::CrossDevice => "cross-device",
            Code::NoAttribute => "no-attribute",
            Code::Range => "range",
            Code::TooBig => "too-big",
            Code::NotSupported => "not-supported",
            Code::Stale => "stale",
            Code::Busy => "busy",
            Code::TimedOut => "timed-out",
            Code::PoolGone => "pool-gone",
            Code::Corrupt => "corrupt",
            Code::NewerFormat => "newer-format",
            Code::Overflow => "overflow",
            Code::Malformed => "malformed",
            Code::Interrupted => "interrupted",
            Code::BadDescriptor => "bad-descriptor",
            Code::NoResources => "no-resources",
            Code::UnknownSession => "unknown-session",
            Code::TextBusy => "text-busy",
            Code::Fault => "fault",
            Code::FileTooLarge => "file-too-large",
            Code::ReadOnly => "read-only",
            Code::NoDevice => "no-device",
            Code::Wide => "wide",
            Code::NoMemory => "no-memory",
            Code::NotListed => "not-listed",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An error with text: what was tried, on what, why it failed, and what the user can do. It crosses crate borders
/// wherever a person may read it; hot paths carry only the [`Code`].
#[derive(Debug)]
pub struct Error {
    /// The stable code.
    pub code: Code,
    /// What was tried and on what, e.g. `cannot open pool /tmp/p`.
    pub what: String,
    /// Why it failed, e.g. `Permission denied`; may be empty.
    pub why: String,
    /// What the user can do; may be empty.
    pub cure: String,
}

/// A result whose error has text.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a code and what was tried.
    pub fn new(code: Code, what: impl Into<String>) -> Error {
        Error { code, what: what.into(), why: String::new(), cure: String::new() }
    }

    /// Adds the reason.
    pub fn why(mut self, why: impl fmt::Display) -> Error {
        self.why = why.to_string();
        self
    }

    /// Adds what the user can do.
    pub fn cure(mut self, cure: impl Into<String>) -> Error {
        self.cure = cure.into();
        self
    }

    /// An I/O error in the operation `what`: the code from its errno, the system's text as the reason.
    pub fn io(what: impl Into<String>, e: &std::io::Error) -> Error {
        let code = e.raw_os_error().map_or(Code::Io, Code::from_errno);
        Error::new(code, what).why(e)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.why.is_empty() {
            write!(f, ": {}", self.code)?;
        } else {
            write!(f, ": {}", self.why)?;
        }
        if !self.cure.is_empty() {
            write!(f, "\n  hint: {}", self.cure)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_every_number_round_trips() {
        for (i, code) in Code::ALL.iter().enumerate() {
            assert_eq!(*code as u16, i as u16 + 1, "ALL must be in numeric order");
            assert_eq!(Code::from_u16(*code as u16), *code);
            assert!(code.errno() > 0);
        }
        assert_eq!(Code::from_u16(0), Code::Malformed);
        assert_eq!(Code::from_u16(9999), Code::Malformed);
    }

    #[test]
    fn code_names_are_distinct() {
        let mut names: Vec<_> = Code::ALL.iter().map(|c| c.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
    }

    #[test]
    fn errno_round_trips_where_it_is_not_eio() {
        for code in Code::ALL {
            if code.errno() != 5 {
                assert_eq!(Code::from_errno(code.errno()).errno(), code.errno(), "{code}");
            }
        }
    }
}
