//! What providers are told by variables of the environment, as they take it no other way. The two ends of a connection
//! must have the same lengths, or refuse each other below the handshake, where nobody is told why. So a node has these,
//! whatever its environment had: who starts a program that opens an endpoint gives it these, or it sets them itself
//! when it opens its first.

use std::ffi::OsString;
use std::sync::Once;

/// Names and values:
///
/// - messages of `ofi_rxm` that go in one step: 32 KiB of data with what is around them, where 16 KiB is its own choice. What is longer
///   takes messages back and forth before it moves, and twice the processor time;
/// - receive buffers of such a length, which all connections share: 4096 is its own choice. TCP keeps what finds none. A connection that
///   breaks in the middle of a message takes one with it (libfabric 1.17), so a few are not enough: see `health.rs`.
const VARIABLES: [(&str, &str); 2] = [("FI_OFI_RXM_BUFFER_SIZE", "36864"), ("FI_OFI_RXM_MSG_RX_SIZE", "256")];

/// All of them: to be given to a program that this starts.
pub fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    VARIABLES.into_iter()
}

/// Those that are other in an environment.
fn missing(of: impl Fn(&str) -> Option<OsString>) -> impl Iterator<Item = (&'static str, &'static str)> {
    environment().filter(move |(name, value)| of(name).is_none_or(|has| has != *value))
}

/// Sets them, in a process that nobody gave them.
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
        let given = |name: &str| VARIABLES.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
        assert_eq!(missing(given).count(), 0);
        set();
        assert_eq!(missing(|name| std::env::var_os(name)).count(), 0);
    }
}
