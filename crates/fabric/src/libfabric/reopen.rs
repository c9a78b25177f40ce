//! Detects that the provider of an endpoint no longer receives anything, and opens the endpoint again.
//!
//! The tcp provider of libfabric 1.17 accepts what hosts without the pool's secret send, and does not survive all of
//! it. The receive buffers of ofi_rxm are one pool for all connections, and the buffer of a connection that breaks in
//! the middle of a message is not returned. Without buffers the provider reads no connection, does not see the end of
//! one, and its descriptor stays readable. Two signs show this from outside, and each of them suffices: bytes lie
//! unread for seconds, or a message of this endpoint to itself does not arrive. The endpoint sends one when its user
//! receives nothing ([`Endpoint::suspect`]).
//!
//! An endpoint that was opened again has the same port, the same memory under the same keys, and the same peers.
//! Operations in flight have failed, which the users of the endpoint survive like any other loss.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric_sys::*;
use forebay_types::{Code, Error, Result};

use super::health::{Probe, OPEN_RETRY, PROBE, REOPEN_PAUSE};
use super::open::Objects;
use super::operation::{Operation, Registration, Send as Sending, Work};
use super::settings::Settings;
use super::sockets::host_and_port;
use super::state::{LibfabricEndpoint, Report, PAUSE};
use crate::endpoint::{Endpoint, Peer};

/// The interval at which sockets are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A message to itself is lost if it was not received within this time and this number of calls of `progress`. Time
/// alone does not suffice, as the process may have been stopped.
const PROBE_COMES_WITHIN: Duration = Duration::from_secs(2);
const PROBE_CALLS: u32 = 50;
/// The pause between two probes.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// If the last opening was less than this ago, the longer pause of `REOPEN_PAUSE` applies.
const REOPEN_SOON: Duration = Duration::from_secs(60);
/// The shortest time between two log lines about other hosts' behaviour.
const LOG_EVERY: Duration = Duration::from_secs(60);

impl LibfabricEndpoint {
    /// Sends itself a message, if none is in flight.
    pub(super) fn send_probe(&mut self) {
        self.stop_late();
        let now = self.now();
        let too_soon = self.health.probed_at > Duration::ZERO && now < self.health.probed_at + PROBE_EVERY;
        if self.health.sockets.is_none() || self.health.probe.is_some() || too_soon {
            return;
        }
        self.health.probed_at = now;
        let address = self.address.clone();
        let nonce = self.entropy.u64();
        let Ok(peer) = self.connect(&address) else { return };
        let Ok(buffer) = self.buffer(size_of::<u64>()) else { return };
        if buffer.region.write_at(0, &nonce.to_ne_bytes()).is_err() {
            return;
        }
        self.health.probe = Some(Probe { nonce, sent_at: now, calls: 0 });
        let deadline = now + 2 * PROBE_COMES_WITHIN;
        let bytes = size_of::<u64>();
        self.start(peer, Work::Send(Sending { token: PROBE, tag: PROBE, bytes, deadline, buffer }));
    }

    /// Checks whether the endpoint still receives, and opens it again if not.
    pub(super) fn look_at_health(&mut self, now: Duration) {
        if let Some((at, _)) = self.health.open_retry {
            if now >= at {
                self.open_again();
            }
            return;
        }
        let mut deaf = None;
        if let Some(probe) = &mut self.health.probe {
            probe.calls += 1;
            if now >= probe.sent_at + PROBE_COMES_WITHIN && probe.calls >= PROBE_CALLS {
                deaf = Some("a message to itself did not arrive".to_owned());
            }
        }
        if now >= self.health.looked_at + LOOK_EVERY {
            self.health.looked_at = now;
            let Some(sockets) = &mut self.health.sockets else { return };
            let look = sockets.look();
            if look.broken > 0 {
                self.tell_of_broken(look.broken, look.hosts.iter().next().copied(), now);
            }
            if look.left > 0 {
                deaf = Some(format!("it leaves {} connections unread", look.left));
            }
        }
        let Some(why) = deaf else { return };
        let health = &mut self.health;
        if health.reopened_at.is_some_and(|at| now < at + health.pause) {
            return;
        }
        let soon = health.reopened_at.is_some_and(|at| now < at + REOPEN_SOON);
        health.pause = if soon { REOPEN_PAUSE.1 } else { REOPEN_PAUSE.0 };
        health.reopened_at = Some(now);
        health.opened_again += 1;
        if health.told_at.is_none_or(|at| now >= at + LOG_EVERY) {
            health.told_at = Some(now);
            tracing::warn!(
                "the network's provider no longer receives anything ({why}); its endpoint was opened again {} times. \
                 Does a program that is not a node's daemon send to its port?",
                health.opened_again
            );
        }
        self.reopen();
    }

    fn tell_of_broken(&mut self, broken: usize, host: Option<IpAddr>, now: Duration) {
        let health = &mut self.health;
        health.broken += broken;
        if health.said_at.is_some_and(|at| now < at + LOG_EVERY) {
            return;
        }
        health.said_at = Some(now);
        let of = host.map_or_else(String::new, |host| format!(", such as {host}"));
        tracing::warn!(
            "closed {} connections that were too many, sent no request or had ended (hosts{of})",
            std::mem::take(&mut health.broken)
        );
    }

    /// Closes all objects of the provider and opens them again: same port, same memory and keys, same peers.
    fn reopen(&mut self) {
        self.health.probe = None;
        let closed = self.objects.close_endpoint();
        let failed = || Some((Code::Io, "the endpoint was opened again".to_owned()));
        for operation in std::mem::take(&mut self.operations) {
            // SAFETY: from Box::into_raw, in the set once, and the endpoint that held it is closed.
            let operation = unsafe { Box::from_raw(operation) };
            if closed {
                self.settle(*operation, failed());
            } else {
                // The provider may still use its memory, which is never freed. Sends are reported here, transfers
                // below.
                if let (Work::Send(send), false) = (&operation.work, operation.told) {
                    let (token, peer) = (send.token, operation.peer);
                    self.reports.push_back(Report { token, peer, failed: failed() });
                }
                std::mem::forget(operation);
            }
        }
        for (_, moving) in std::mem::take(&mut self.moving) {
            if !moving.told {
                let (token, peer) = (moving.token, moving.peer);
                self.reports.push_back(Report { token, peer, failed: failed() });
            }
        }
        let memory = std::mem::take(&mut self.memory).into_iter();
        self.lost.extend(memory.map(|(local, r)| (local, r.region.clone(), r.access, r.key)));
        self.small.clear();
        self.large.clear();
        self.receive_mr = None;
        self.objects.close_all();
        self.under_way = 0;
        for state in &mut self.peers {
            state.waiting.clear();
            (state.under_way, state.pause, state.again_at, state.unconnected) =
                (0, PAUSE.0, Duration::ZERO, None);
        }
        self.open_again();
    }

    /// Opens all objects of the closed endpoint, or plans the next attempt.
    fn open_again(&mut self) {
        if let Some(sockets) = &mut self.health.sockets {
            let left = sockets.close_leftovers();
            tracing::debug!("the provider left {left} sockets open");
            sockets.forget();
        }
        match self.open_with_peers() {
            Ok(()) => (self.health.open_retry, self.health.probe) = (None, None),
            Err(e) => {
                tracing::error!("{e}");
                let pause = self.health.open_retry.map_or(OPEN_RETRY.0, |(_, pause)| pause);
                self.health.open_retry = Some((self.now() + pause, (2 * pause).min(OPEN_RETRY.1)));
                return;
            }
        }
        for (local, region, access, key) in std::mem::take(&mut self.lost) {
            match self.register_with(&region, access, Some(key)) {
                Ok((mr, key)) => {
                    self.memory.insert(local, Arc::new(Registration { mr, region, access, key }));
                }
                Err(code) => {
                    tracing::error!("{} bytes of memory are no longer registered: {code}", region.len())
                }
            }
        }
        if self.mr_mode & FI_MR_LOCAL != 0 {
            let region = self.receive_region.clone();
            self.receive_mr = self.register_range(&region, u64::from(FI_RECV)).ok();
        }
        self.unposted.clear();
        for place in 0..self.receives {
            self.post(Operation::new(Peer(u32::MAX), Work::Receive(place)));
        }
    }

    /// Opens the objects, with the addresses of all peers. On an error they are closed. Does not wait for the port,
    /// because `progress` must not block.
    fn open_with_peers(&mut self) -> Result<()> {
        let provider = self.objects.provider.clone();
        let port = host_and_port(&self.address).map(|(_, port)| port);
        let settings = Settings { provider: Some(provider), port, ..self.settings.clone() };
        self.objects = Objects::open(&settings, Duration::ZERO)?;
        let indexes: std::result::Result<Vec<Option<fi_addr_t>>, Code> = self
            .peers
            .iter()
            .map(|state| state.av_index.map(|_| self.insert_address(&state.address)).transpose())
            .collect();
        match indexes {
            Ok(indexes) => {
                self.peers.iter_mut().zip(indexes).for_each(|(state, index)| state.av_index = index);
                Ok(())
            }
            Err(code) => {
                // Users keep their peers, so a peer without an index would be cut off for ever.
                self.objects.close_all();
                Err(Error::new(code, "cannot insert the address of a peer again"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Event;
    use crate::libfabric::open::PORT_PATIENCE;
    use std::net::TcpListener;
    use std::time::Instant;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn endpoint() -> LibfabricEndpoint {
        let (provider, host) = (Some("tcp;ofi_rxm".to_owned()), Some("127.0.0.1".to_owned()));
        LibfabricEndpoint::open(Settings { provider, host, ..Settings::default() }).unwrap()
    }

    /// How long this thread has neither run nor waited for a processor, since some time.
    fn slept() -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        let times = text.split_whitespace().take(2).map(|ns| Duration::from_nanos(ns.parse().unwrap()));
        now.saturating_sub(times.sum())
    }

    fn progress_until_open(endpoint: &mut LibfabricEndpoint) {
        let end = Instant::now() + TIMEOUT;
        while endpoint.objects.ep.is_null() {
            assert!(Instant::now() < end, "not opened");
            let begin = slept();
            endpoint.progress(&mut |_| {});
            let blocked = slept().saturating_sub(begin);
            assert!(blocked < PORT_PATIENCE / 2, "progress blocked for {blocked:?}");
            endpoint.wait(Duration::from_secs(1));
        }
    }

    /// Sends a message, and waits until the receiver has it.
    fn sends(from: &mut LibfabricEndpoint, peer: Peer, to: &mut LibfabricEndpoint) {
        from.send(peer, 1, b"message", 1, from.now() + TIMEOUT).unwrap();
        let (end, mut received) = (Instant::now() + TIMEOUT, false);
        while !received {
            assert!(Instant::now() < end, "not received");
            from.progress(&mut |_| {});
            to.progress(&mut |event| received |= matches!(event, Event::Received { bytes: b"message", .. }));
        }
    }

    #[test]
    fn listener_of_an_endpoint_on_any_address_is_among_its_sockets() {
        let provider = Some("tcp;ofi_rxm".to_owned());
        let endpoint = LibfabricEndpoint::open(Settings { provider, ..Settings::default() }).unwrap();
        assert_eq!(endpoint.health.sockets.as_ref().unwrap().descriptors().len(), 1);
    }

    #[test]
    fn reopen_while_the_port_is_taken_is_tried_again_without_blocking() {
        let (mut one, mut other) = (endpoint(), endpoint());
        let port = host_and_port(&one.address).unwrap().1;
        one.objects.close_all();
        let taken = TcpListener::bind(("0.0.0.0", port)).unwrap();
        let begin = slept();
        one.reopen();
        let blocked = slept().saturating_sub(begin);
        assert!(blocked < PORT_PATIENCE / 2, "blocked for {blocked:?}");
        assert!(one.objects.ep.is_null() && one.connect(&other.address).is_err());
        drop(taken);
        progress_until_open(&mut one);
        assert_eq!(one.objects.address().unwrap(), one.address);
        let peer = one.connect(&other.address).unwrap();
        sends(&mut one, peer, &mut other);
    }

    #[test]
    fn reopen_that_cannot_insert_a_peer_is_tried_again_and_the_peer_stays_valid() {
        let (mut one, mut other) = (endpoint(), endpoint());
        let peer = one.connect(&other.address).unwrap();
        let index = peer.0 as usize;
        // Host and port 0 are no address of a peer.
        let (address, family) = (other.address.clone(), other.address[..2].to_vec());
        one.peers[index].address = family.into_iter().chain([0; 14]).collect();
        one.reopen();
        assert!(one.objects.ep.is_null());
        one.peers[index].address = address;
        progress_until_open(&mut one);
        sends(&mut one, peer, &mut other);
    }
}
