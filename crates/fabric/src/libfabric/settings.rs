//! The settings of a libfabric endpoint.

use forebay_wire::limits::FRAME_BYTES_MAX;

/// How the user of an endpoint waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Waiting {
    /// By polling a descriptor.
    #[default]
    Events,
    /// By calling `progress` repeatedly, which saves the provider the cost of making a descriptor readable.
    Spinning,
}

/// The settings of a libfabric endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// A provider by libfabric's name, such as `tcp;ofi_rxm` or `verbs;ofi_rxm`. None selects the best that works.
    pub provider: Option<String>,
    /// Name or address at which peers reach this host, for providers over IP. None: the provider chooses.
    pub host: Option<String>,
    /// Port, for providers over IP. None: any free port.
    pub port: Option<u16>,
    /// How the user waits.
    pub waiting: Waiting,
    /// Bytes of the longest message.
    pub message_bytes: usize,
    /// Receive buffers. Each takes `message_bytes` of memory once it was used.
    pub receives: usize,
    /// The initial size of the address vector.
    pub peers_expected: usize,
    /// The longest piece of a transfer. The provider's limit applies too.
    pub piece_bytes: usize,
    /// Registers the endpoint's own buffers as verbs requires (FI_MR_LOCAL), even if the provider does not. So this
    /// code is tested on machines without such a network.
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
