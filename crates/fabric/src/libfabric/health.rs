//! The health of an endpoint: the state of its sockets, and the message to itself that is in flight.

use std::net::IpAddr;
use std::time::Duration;

use super::sockets::Sockets;

/// The shortest time until the next opening: normally, and if the opening before was within `reopen::REOPEN_SOON`.
pub(super) const REOPEN_PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(4));
/// First and longest pause between two attempts to open an endpoint that could not be opened again.
pub(super) const OPEN_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
/// The token and the tag of a message to itself.
pub(super) const PROBE: u64 = u64::MAX;

/// The health of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Health {
    pub(super) sockets: Option<Sockets>,
    pub(super) looked_at: Duration,
    pub(super) probe: Option<Probe>,
    pub(super) probed_at: Duration,
    pub(super) reopened_at: Option<Duration>,
    pub(super) pause: Duration,
    pub(super) opened_again: u64,
    /// When to try again to open the endpoint, and the pause after that attempt. None while it is open.
    pub(super) open_retry: Option<(Duration, Duration)>,
    pub(super) told_at: Option<Duration>,
    /// Connections that were broken since the last log line about them.
    pub(super) broken: usize,
    pub(super) said_at: Option<Duration>,
}

/// A message to itself that is in flight.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) nonce: u64,
    pub(super) sent_at: Duration,
    pub(super) calls: u32,
}

impl Health {
    /// The health check. Only providers that use TCP sockets need it.
    pub(super) fn of(provider: &str, address: &[u8]) -> Health {
        let by_tcp = provider.split(';').any(|part| part == "tcp" || part == "net");
        Health {
            sockets: Sockets::of(address).filter(|_| by_tcp),
            pause: REOPEN_PAUSE.0,
            ..Health::default()
        }
    }

    pub(super) fn admit(&mut self, host: IpAddr) {
        if let Some(sockets) = &mut self.sockets {
            sockets.admit(host);
        }
    }

    /// Handles a message with the tag of probes, which any sender may have sent.
    pub(super) fn probe_came(&mut self, bytes: &[u8]) {
        if self.probe.as_ref().is_some_and(|probe| bytes == probe.nonce.to_ne_bytes()) {
            self.probe = None;
        }
    }
}
