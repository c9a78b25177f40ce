//! A node's identity, and the timeouts and limits of its calls.

use std::time::Duration;

use forebay_types::NodeId;
use forebay_wire::{PROTOCOL_MAX, PROTOCOL_MIN};

/// What a node's Hello says about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The pool's random id.
    pub pool: [u8; 16],
    /// This node's number.
    pub node: NodeId,
    /// Capacity of its targets.
    pub capacity_bytes: u64,
}

/// Timeouts and limits. The defaults suit a cluster where messages take microseconds, and where a loaded host may stop
/// a live daemon for a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallsSettings {
    /// The interval of heartbeats on a link that is up and otherwise idle.
    pub heartbeat: Duration,
    /// After this silence a new link is made beside the old one.
    pub quiet: Duration,
    /// A node without a link for this time is unreachable, and its calls fail. If it is known to be down already, its
    /// calls fail after `quiet`. An incoming link is dropped after this silence, a proven one after twice this time.
    pub unreachable: Duration,
    /// A call without an answer is sent again after this time.
    pub resend: Duration,
    /// First and longest pause between two sends of a Hello.
    pub retry: (Duration, Duration),
    /// The endpoint's timeout for each message.
    pub send_timeout: Duration,
    /// Calls in progress.
    pub calls_max: usize,
    /// Calls in progress to one node. A node refuses a request with [`Code::Busy`] if it has twice this number of
    /// unanswered requests on the link. This bounds the memory that a peer can use.
    ///
    /// [`Code::Busy`]: forebay_types::Code::Busy
    pub calls_per_node: usize,
    /// Incoming links, proven or not.
    pub incoming_max: usize,
    /// The ID of this node's data, the upper half of its incarnation. By it peers recognize a node that restarted
    /// without its data, and refuse it ([`crate::Calls::expect_data`]). Never 0. None if the node has no data that
    /// matter.
    pub data: Option<u32>,
    /// Oldest and newest protocol version that the node offers. Tests of the refusal of other versions change it.
    pub protocols: (u16, u16),
    /// For tests: microseconds that are added to the clock sent to peers, as on a host with a wrong clock.
    pub clock_ahead_us: i64,
    /// For simulations: nonces, link numbers and incarnations derive from the seed, and the endpoint's clock is used.
    pub seed: Option<u64>,
}

impl Default for CallsSettings {
    fn default() -> CallsSettings {
        CallsSettings {
            heartbeat: Duration::from_millis(250),
            quiet: Duration::from_millis(1000),
            unreachable: Duration::from_secs(5),
            resend: Duration::from_secs(2),
            retry: (Duration::from_millis(50), Duration::from_millis(1000)),
            send_timeout: Duration::from_secs(2),
            calls_max: 65_536,
            calls_per_node: 1024,
            incoming_max: 16_384,
            data: None,
            protocols: (PROTOCOL_MIN, PROTOCOL_MAX),
            clock_ahead_us: 0,
            seed: None,
        }
    }
}

impl CallsSettings {
    /// The interval at which timers are checked.
    pub(super) fn tick(&self) -> Duration {
        (self.heartbeat / 8).min(self.retry.0 / 4).clamp(Duration::from_millis(1), Duration::from_millis(50))
    }
}

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Messages received, each of one frame or several.
    pub messages_in: u64,
    /// Frames received.
    pub frames_in: u64,
    /// Frames without the right MAC.
    pub forged: u64,
    /// Frames received before or too late, and answers to handshakes that are no longer in progress.
    pub replayed: u64,
    /// Frames of unknown links, and malformed frames.
    pub unusable: u64,
    /// Requests received again while they were being served.
    pub repeated: u64,
    /// Calls that were sent more than once.
    pub resent: u64,
    /// Outgoing links made.
    pub links_made: u64,
    /// How often the endpoint closed and opened everything again, because it had stopped receiving.
    pub opened_again: u64,
}
