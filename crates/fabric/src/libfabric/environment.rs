//! Settings of providers that can only be passed in environment variables. Both ends of a connection must have the same
//! buffer size. Otherwise they refuse each other below the handshake, where no error reaches a user. And nothing but calls of
//! the endpoint may store bytes ([`Limits::copies`](crate::Limits::copies)). So every node has these values, whatever its
//! environment was (docs/network.md): the parent of a program that opens an endpoint sets them for it, or the
//! program sets them itself when it opens its first endpoint.
//!
//! The daemon's supervisor sets them for the worker. So the worker, which has threads when it opens its endpoint, does
//! not change its environment. Any other program has to open its first endpoint before a thread of it may read the
//! environment by libc, because libc does not lock the environment.

use std::ffi::OsString;
use std::sync::Once;

/// Names and values:
///
/// - The longest message that `ofi_rxm` sends in one step: 32 KiB of data with its headers. Its default is 16 KiB. A
///   longer message first takes a handshake, and twice the processor time.
/// - The number of receive buffers of that size, which all connections share. Its default is 4096. Messages that find
///   no free buffer wait in TCP. A connection that breaks in the middle of a message takes one buffer with it
///   (libfabric 1.17), so a few are not enough: see `reopen.rs`.
/// - No thread of the provider makes progress, and the kernel none by io_uring: either stores bytes at any time, also those
///   of a transfer that is late ([`Direction::ReadInTime`](crate::Direction::ReadInTime)).
const VARIABLES: [(&str, &str); 5] = [
    ("FI_OFI_RXM_BUFFER_SIZE", "36864"),
    ("FI_OFI_RXM_MSG_RX_SIZE", "256"),
    ("FI_OFI_RXM_DATA_AUTO_PROGRESS", "0"),
    ("FI_TCP_IO_URING", "0"),
    ("FI_NET_IO_URING", "0"),
];

/// All variables, for the environment of a program to be started.
pub fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    VARIABLES.into_iter()
}

/// The variables that are absent or different in an environment.
fn missing(of: impl Fn(&str) -> Option<OsString>) -> impl Iterator<Item = (&'static str, &'static str)> {
    environment().filter(move |(name, value)| of(name).is_none_or(|has| has != *value))
}

/// Sets the variables in this process, unless its parent did. Changes nothing in a worker, see the module.
pub(super) fn set() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        missing(|name| std::env::var_os(name)).for_each(|(name, value)| std::env::set_var(name, value))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_of_another_length_is_none_and_the_same_is_left_alone() {
        assert_eq!(missing(|_| None).collect::<Vec<_>>(), VARIABLES);
        assert_eq!(missing(|_| Some("16384".into())).collect::<Vec<_>>(), VARIABLES);
        let one = missing(|name| (name != "FI_TCP_IO_URING").then_some("0".into()));
        assert_eq!(one.count(), 3);
        let given = |name: &str| VARIABLES.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
        assert_eq!(missing(given).count(), 0);
        set();
        assert_eq!(missing(|name| std::env::var_os(name)).count(), 0);
    }
}
