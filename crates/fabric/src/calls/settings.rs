//! Who a node is, and the times that its calls keep.

use std::time::Duration;

use forebay_types::NodeId;
use forebay_wire::{PROTOCOL_MAX, PROTOCOL_MIN};

/// What a node tells its peers of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The pool's random id.
    pub pool: [u8; 16],
    /// This node's number.
    pub node: NodeId,
    /// Bytes that its targets give.
    pub capacity_bytes: u64,
}

/// Times and bounds. The defaults suit a cluster, whose messages take microseconds and whose daemons may be stopped for
/// a second by a loaded host without being dead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallsSettings {
    /// A link that is up says so to its other end this often, when it says nothing else.
    pub heartbeat: Duration,
    /// Silence after which a link is made anew beside the old one.
    pub quiet: Duration,
    /// A node that has no link for so long is unreachable: its calls fail. Also the silence after which an asker is
    /// gone.
    pub unreachable: Duration,
    /// A call that was sent and not answered is sent again after so long.
    pub resend: Duration,
    /// First and longest pause between attempts to make a link.
    pub retry: (Duration, Duration),
    /// What the endpoint has not sent by then has failed.
    pub send_timeout: Duration,
    /// Calls under way.
    pub calls_max: usize,
    /// Calls under way to one node. A node that has twice as many of another's unanswered refuses more with
    /// [`Code::Busy`]: what a peer can make us keep is bounded.
    ///
    /// [`Code::Busy`]: forebay_types::Code::Busy
    pub calls_per_node: usize,
    /// Links of others, proven or not.
    pub incoming_max: usize,
    /// Which data this node has: the upper half of its incarnation, so that peers tell a node that came back from one
    /// that came back without its data, under whose number they hear nobody ([`crate::Calls::expect_data`]). Never 0;
    /// none: it has none that matter.
    pub data: Option<u32>,
    /// Oldest and newest protocol that it says to speak: of another version, in tests of what is said to such.
    pub protocols: (u16, u16),
    /// How far the clock that it tells is ahead of this host's, in microseconds: of a host whose clock is wrong, in
    /// tests.
    pub clock_ahead_us: i64,
    /// Simulations: nonces, link numbers and incarnations come from it, and the clock is the endpoint's.
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
    /// How often timers are looked at.
    pub(super) fn tick(&self) -> Duration {
        (self.heartbeat / 8).min(self.retry.0 / 4).clamp(Duration::from_millis(1), Duration::from_millis(50))
    }
}

/// What happened so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Messages that came, of one frame or several.
    pub messages_in: u64,
    /// Frames that came.
    pub frames_in: u64,
    /// Frames without the right MAC.
    pub forged: u64,
    /// Frames that came before, or too late, and answers to handshakes that were given up.
    pub replayed: u64,
    /// Frames of unknown links and of no sound form.
    pub unusable: u64,
    /// Requests that came again while they were being served.
    pub repeated: u64,
    /// Calls that were sent more than once.
    pub resent: u64,
    /// Links that were made.
    pub links_made: u64,
    /// How often the endpoint was opened anew, because it was deaf.
    pub opened_again: u64,
}
