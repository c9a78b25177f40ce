//! How an endpoint of libfabric is opened.

use forebay_wire::limits::FRAME_BYTES_MAX;

/// How a user of the endpoint waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Waiting {
    /// By a descriptor to poll.
    #[default]
    Events,
    /// By calling `progress` again and again: the provider is spared what makes a descriptor readable.
    Spinning,
}

/// How an endpoint is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// A provider by libfabric's name, such as `tcp;ofi_rxm` or `verbs;ofi_rxm`; None takes the best that works.
    pub provider: Option<String>,
    /// Name or address of this host, as peers reach it, for providers over IP; None: the provider's choice.
    pub host: Option<String>,
    /// Port, for providers over IP; None: any.
    pub port: Option<u16>,
    /// How it is waited for.
    pub waiting: Waiting,
    /// Bytes of the longest message.
    pub message_bytes: usize,
    /// Buffers for messages that come. Each takes `message_bytes` once it was used.
    pub receives: usize,
    /// Peers that the address vector has room for at first.
    pub peers_expected: usize,
    /// Transfers are cut into pieces of at most so many bytes, beside what the provider asks for.
    pub piece_bytes: usize,
    /// Registers buffers of our own as verbs wants it (FI_MR_LOCAL), also where the provider does not ask for it: so
    /// that this is tested on machines without such a network.
    pub register_local: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            provider: None,
            host: None,
            port: None,
            waiting: Waiting::Events,
            message_bytes: FRAME_BYTES_MAX,
            receives: 64,
            peers_expected: 64,
            piece_bytes: 16 << 20,
            register_local: false,
        }
    }
}
