//! An endpoint that its provider has made deaf: noticing it, and opening it anew.
//!
//! What a host without the pool's secret sends is not kept from the tcp provider of libfabric 1.17, and not all of it does that provider
//! survive. The receive buffers of ofi_rxm are one pool for all connections, and one whose connection breaks in the middle of a message is
//! not given back; without them it reads no connection any more, nor sees the end of one, and its descriptor stays readable. From
//! outside that shows in two ways, each of them enough: bytes lie unread for seconds, or a message of this endpoint to itself does not come.
//! The latter is tried when the user hears nobody ([`Endpoint::suspect`]).
//!
//! An endpoint that is opened anew has the same port, the same memory under the same keys, and the same peers. What was under way has failed,
//! which its users survive, as they survive any loss.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric_sys::*;
use forebay_types::Code;

use super::open::Objects;
use super::operation::{Operation, Registration, Send as Sending, Work};
use super::sockets::{host_and_port, Sockets};
use super::{LibfabricEndpoint, PAUSE};
use crate::endpoint::{Endpoint, Local, Peer};

/// How often sockets are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A message to itself comes within this time, and so many calls of `progress`, or not at all: the process may have been stopped.
const PROBE_COMES_WITHIN: Duration = Duration::from_secs(2);
const PROBE_CALLS: u32 = 50;
/// Between two probes.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Between two openings: at first, and if they follow each other within [`REOPEN_SOON`].
const REOPEN_PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(4));
const REOPEN_SOON: Duration = Duration::from_secs(60);
/// Lines of the log on what other hosts do are this far apart.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// The token and the tag of a message to itself.
pub(super) const PROBE: u64 = u64::MAX;

/// What is known of an endpoint's health.
#[derive(Debug, Default)]
pub(super) struct Health {
    sockets: Option<Sockets>,
    looked_at: Duration,
    probe: Option<Probe>,
    probed_at: Duration,
    reopened_at: Option<Duration>,
    pause: Duration,
    pub(super) opened_again: u64,
    told_at: Option<Duration>,
    /// Connections that were broken since the log last said so.
    broken: usize,
    said_at: Option<Duration>,
}

/// A message to itself that is under way.
#[derive(Debug)]
struct Probe {
    nonce: u64,
    sent_at: Duration,
    calls: u32,
}

impl Health {
    /// Only providers that have sockets of TCP need any of this.
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

    /// A message with the tag of probes came, from anyone.
    pub(super) fn probe_came(&mut self, bytes: &[u8]) {
        if self.probe.as_ref().is_some_and(|probe| bytes == probe.nonce.to_ne_bytes()) {
            self.probe = None;
        }
    }
}

impl LibfabricEndpoint {
    /// Sends itself a message, if none is under way.
    pub(super) fn send_probe(&mut self) {
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

    /// Looks whether the endpoint hears, and opens it anew if not.
    pub(super) fn look_at_health(&mut self, now: Duration) {
        let mut deaf = None;
        if let Some(probe) = &mut self.health.probe {
            probe.calls += 1;
            if now >= probe.sent_at + PROBE_COMES_WITHIN && probe.calls >= PROBE_CALLS {
                deaf = Some("a message to itself did not come".to_owned());
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
            if self.objects.ep.is_null() {
                deaf = Some("it could not be opened".to_owned());
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
                "the network's provider hears nobody any more ({why}); its endpoint was opened anew {} times. Does a program that is no \
                 node's daemon send to its port?",
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
            "closed {} connections that were too many, never asked for anything or had ended (hosts{of})",
            std::mem::take(&mut health.broken)
        );
    }

    /// Closes all that the provider has and opens it again: same port, same memory and keys, same peers.
    fn reopen(&mut self) {
        self.health.probe = None;
        let closed = self.objects.close_endpoint();
        let failed = || Some((Code::Io, "the endpoint was opened anew".to_owned()));
        for operation in std::mem::take(&mut self.operations) {
            // SAFETY: from Box::into_raw, in the set once, and the endpoint that had it is closed.
            let operation = unsafe { Box::from_raw(operation) };
            if closed {
                self.settle(*operation, failed());
            } else {
                // The provider may touch it yet: its memory is kept for ever. Its user hears of it now; of transfers, below.
                if let (Work::Send(send), false) = (&operation.work, operation.told) {
                    let (token, peer) = (send.token, operation.peer);
                    self.reports.push_back(super::Report { token, peer, failed: failed() });
                }
                std::mem::forget(operation);
            }
        }
        for (_, moving) in std::mem::take(&mut self.moving) {
            if !moving.told {
                let (token, peer) = (moving.token, moving.peer);
                self.reports.push_back(super::Report { token, peer, failed: failed() });
            }
        }
        let memory: Vec<(Local, Arc<Registration>)> = std::mem::take(&mut self.memory).into_iter().collect();
        let memory: Vec<_> =
            memory.into_iter().map(|(local, r)| (local, r.region.clone(), r.access, r.key)).collect();
        self.small.clear();
        self.large.clear();
        self.receive_mr = None;
        self.objects.close_all();
        if let Some(sockets) = &mut self.health.sockets {
            let left = sockets.close_leftovers();
            tracing::debug!("the provider left {left} sockets open");
            sockets.forget();
        }
        self.under_way = 0;
        for state in &mut self.peers {
            state.waiting.clear();
            (state.under_way, state.pause, state.again_at, state.unconnected) =
                (0, PAUSE.0, Duration::ZERO, None);
        }
        let provider = self.objects.provider.clone();
        let port = host_and_port(&self.address).map(|(_, port)| port);
        let settings = super::Settings { provider: Some(provider), port, ..self.settings.clone() };
        match Objects::open(&settings) {
            Ok(objects) => self.objects = objects,
            // Tried again at a later look.
            Err(e) => {
                tracing::error!("{e}");
                self.lost.extend(memory);
                return;
            }
        }
        for (local, region, access, key) in memory.into_iter().chain(std::mem::take(&mut self.lost)) {
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
        for index in 0..self.peers.len() {
            if self.peers[index].place.is_some() {
                let address = self.peers[index].address.clone();
                self.peers[index].place = self.insert_place(&address).ok();
            }
        }
        self.unposted.clear();
        for place in 0..self.receives {
            self.post(Operation::new(Peer(u32::MAX), Work::Receive(place)));
        }
    }
}
