//! What providers are told by variables of the environment, as they take it no other way. What is set already stays.
//!
//! The two ends of a connection must have the same length, or refuse each other: who starts a program that opens an endpoint gives it these, or it sets them
//! itself when it opens its first.

use std::sync::Once;

/// Names and values:
///
/// - messages of `ofi_rxm` that go in one step: 32 KiB of data with what is around them, where 16 KiB is its own choice. What is longer
///   takes messages back and forth before it moves, and twice the processor time;
/// - receive buffers of such a length that each connection has: 128 is its own choice. TCP keeps what finds none.
const VARIABLES: [(&str, &str); 2] = [("FI_OFI_RXM_BUFFER_SIZE", "36864"), ("FI_OFI_RXM_MSG_RX_SIZE", "32")];

/// Those that are not set in this process: to be given to one that this starts.
pub fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none())
}

/// Sets them, in a process that nobody gave them.
pub(super) fn set() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| environment().for_each(|(name, value)| std::env::set_var(name, value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_given_to_nobody() {
        set();
        assert_eq!(environment().count(), 0);
        assert!(VARIABLES.iter().all(|(name, _)| std::env::var_os(name).is_some()));
    }
}
