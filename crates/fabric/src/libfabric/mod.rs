//! Endpoints of libfabric: reliable datagrams, tagged messages, RMA.
//!
//! One thread at a time uses an endpoint (FI_THREAD_DOMAIN). Its provider makes progress only inside calls
//! (FI_PROGRESS_MANUAL), so that no thread of the provider runs. A provider that cannot do this uses its own way.
//! Operations that the provider refuses with -FI_EAGAIN wait here in a queue for each peer, so that an unreachable peer
//! does not delay others.
//!
//! Buffers and contexts that the provider holds are freed when it returns them, or after the endpoint is closed. If it
//! cannot be closed, they are leaked. An operation whose deadline passes is reported at once, and its memory is kept
//! until then.

mod environment;
mod health;
mod open;
mod operation;
mod progress;
mod reopen;
mod settings;
mod sockets;
mod state;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric_sys::*;
use forebay_types::Code;
use forebay_wire::Memory;

use crate::endpoint::{Direction, Endpoint, Event, Limits, Local, Peer, Registered, Transfer, Waker};
use crate::memory::{Access, Region};
pub use environment::environment;
use health::PROBE;
use operation::{Moving, Operation, Piece, Registration, Send as Sending, Work};
use progress::late;
pub use settings::{Settings, Waiting};
pub use state::LibfabricEndpoint;
use state::{PeerState, Report, PAUSE};

/// The reason why libfabric cannot be used on this machine, if it cannot.
pub fn unusable() -> Option<String> {
    open::library().err().map(|e| e.to_string())
}

impl Endpoint for LibfabricEndpoint {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn provider(&self) -> &str {
        &self.objects.provider
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn connect(&mut self, address: &[u8]) -> Result<Peer, Code> {
        let known = self.by_address.get(address).copied();
        if let Some(peer) = known.filter(|p| self.peers[p.0 as usize].av_index.is_some()) {
            return Ok(peer);
        }
        if address.is_empty() || !self.sound_address(address) {
            return Err(Code::Invalid);
        }
        let av_index = self.insert_address(address)?;
        let peer = known.unwrap_or(Peer(self.peers.len() as u32));
        if known.is_some() {
            let state = &mut self.peers[peer.0 as usize];
            (state.av_index, state.pause, state.again_at) = (Some(av_index), PAUSE.0, Duration::ZERO);
        } else {
            self.peers.push(PeerState {
                address: address.to_vec(),
                av_index: Some(av_index),
                waiting: VecDeque::new(),
                under_way: 0,
                pause: PAUSE.0,
                again_at: Duration::ZERO,
                unconnected: None,
            });
            self.by_address.insert(address.to_vec(), peer);
        }
        Ok(peer)
    }

    fn forget(&mut self, peer: Peer) {
        self.stop_late();
        let Some(state) = self.peers.get_mut(peer.0 as usize) else { return };
        for operation in std::mem::take(&mut state.waiting) {
            if let Some(operation) = self.take_back(operation) {
                self.settle(*operation, Some((Code::Io, "the peer was given up".to_owned())));
            }
        }
        let state = &self.peers[peer.0 as usize];
        // While the provider holds operations for the peer, its entry in the address vector stays, and the next
        // `connect` uses it.
        if state.under_way == 0 {
            self.remove_address(peer.0 as usize);
        }
    }

    fn send(
        &mut self,
        peer: Peer,
        tag: u64,
        bytes: &[u8],
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        if bytes.len() > self.limits.message_bytes {
            return Err(Code::TooBig);
        }
        self.stop_late();
        self.peer(peer)?;
        let buffer = self.buffer(bytes.len())?;
        buffer.region.write_at(0, bytes)?;
        self.start(peer, Work::Send(Sending { token, tag, bytes: bytes.len(), deadline, buffer }));
        Ok(())
    }

    fn register(&mut self, region: Arc<Region>, access: Access) -> Result<Registered, Code> {
        let mut bits = u64::from(FI_READ | FI_WRITE);
        if access.read {
            bits |= u64::from(FI_REMOTE_READ);
        }
        if access.write {
            bits |= u64::from(FI_REMOTE_WRITE);
        }
        if self.objects.ep.is_null() {
            return Err(Code::NoResources);
        }
        let (mr, key) = self.register_with(&region, bits, None)?;
        self.next_local += 1;
        let local = Local(self.next_local);
        let address = if self.mr_mode & FI_MR_VIRT_ADDR != 0 { region.start() as u64 } else { 0 };
        // SAFETY: registered, and enabled where the mode requires it.
        let remote = Memory { address, key: unsafe { fi_mr_key(mr.0) } };
        let bytes = region.len();
        self.memory.insert(local, Arc::new(Registration { mr, region, access: bits, key }));
        Ok(Registered { local, remote, bytes })
    }

    fn unregister(&mut self, local: Local) {
        self.memory.remove(&local);
        // Memory of an endpoint that cannot be opened again yet.
        self.lost.retain(|(of, ..)| *of != local);
    }

    fn is_registered(&self, local: Local) -> bool {
        self.memory.contains_key(&local) || self.lost.iter().any(|(of, ..)| *of == local)
    }

    fn transfer(
        &mut self,
        peer: Peer,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        self.stop_late();
        let region = self.memory.get(&transfer.local).ok_or(Code::Fault)?.clone();
        region.region.range(transfer.local_offset, transfer.bytes)?;
        transfer.remote.address.checked_add(transfer.bytes as u64).ok_or(Code::Invalid)?;
        self.peer(peer)?;
        if transfer.bytes == 0 {
            self.reports.push_back(Report { token, peer, failed: None });
            return Ok(());
        }
        if deadline <= self.now() {
            self.reports.push_back(Report { token, peer, failed: late() });
            return Ok(());
        }
        self.next_moving += 1;
        let id = self.next_moving;
        let pieces_left = transfer.bytes.div_ceil(self.piece_bytes);
        let in_time = (transfer.direction == Direction::ReadInTime).then(|| (transfer.local, region.clone()));
        if in_time.is_some() {
            self.none_late_before = self.none_late_before.min(deadline);
        }
        self.moving
            .insert(id, Moving { token, peer, deadline, in_time, pieces_left, told: false, failed: None });
        for start in (0..transfer.bytes).step_by(self.piece_bytes) {
            let piece = Piece {
                transfer: id,
                direction: transfer.direction,
                region: region.clone(),
                offset: transfer.local_offset + start,
                bytes: (transfer.bytes - start).min(self.piece_bytes),
                address: transfer.remote.address + start as u64,
                key: transfer.remote.key,
            };
            self.start(peer, Work::Piece(piece));
        }
        Ok(())
    }

    fn progress(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize {
        self.stop_late();
        for place in std::mem::take(&mut self.unposted) {
            self.post(Operation::new(Peer(u32::MAX), Work::Receive(place)));
        }
        let mut events = self.read_completions(sink);
        // Nothing below starts an operation whose deadline has passed meanwhile.
        let now = self.now();
        self.look_at_deadlines(now);
        for index in 0..self.peers.len() {
            if !self.peers[index].waiting.is_empty() && self.peers[index].again_at <= now {
                self.give_waiting(Peer(index as u32), now);
            }
        }
        self.look_at_health(now);
        while let Some(report) = self.reports.pop_front() {
            if report.token == PROBE {
                continue;
            }
            events += 1;
            match &report.failed {
                None => sink(Event::Done { token: report.token }),
                Some((code, why)) => {
                    sink(Event::Failed { token: report.token, peer: report.peer, code: *code, why })
                }
            }
        }
        events
    }

    fn descriptor(&self) -> Option<&Arc<OwnedFd>> {
        self.objects.descriptor.as_ref()
    }

    fn pause_without_descriptor(&self) -> Duration {
        match self.objects.ep.is_null() {
            // It could not be opened again. There is no input until it is.
            true => Duration::from_millis(100),
            false => Duration::from_micros(50),
        }
    }

    fn may_sleep(&mut self) -> bool {
        if !self.reports.is_empty() || !self.unposted.is_empty() {
            return false;
        }
        if self.objects.descriptor.is_none() || self.objects.cq.is_null() {
            return true;
        }
        self.stop_late();
        if !self.reports.is_empty() {
            return false;
        }
        // SAFETY: both are open; the queue begins with its fid.
        unsafe {
            let mut fids: [*mut fid; 1] = [self.objects.cq.cast()];
            fi_trywait(self.objects.fabric, fids.as_mut_ptr(), 1) == 0
        }
    }

    fn next_timer(&self) -> Option<Duration> {
        let again = self.peers.iter().filter(|p| !p.waiting.is_empty()).map(|p| p.again_at).min();
        let deadlines = (self.under_way > 0 || again.is_some()).then_some(self.deadlines_at);
        match (again, deadlines) {
            (Some(a), Some(d)) => Some(a.min(d)),
            (a, d) => a.or(d),
        }
    }

    fn waker(&self) -> &Waker {
        &self.waker
    }

    fn admit(&mut self, address: &[u8]) {
        // Messages of this endpoint to itself come from its own host.
        let own = self.admitted.is_empty().then(|| self.address.clone());
        for address in own.iter().map(Vec::as_slice).chain([address]) {
            if self.admitted.insert(address.to_vec()) {
                if let Some((host, _)) = sockets::host_and_port(address) {
                    self.health.admit(host);
                }
            }
        }
    }

    fn suspect(&mut self) {
        self.send_probe();
    }

    fn opened_again(&self) -> u64 {
        self.health.opened_again
    }
}

impl LibfabricEndpoint {
    /// Closes all objects, after everything that is registered with them. False if the provider still uses one.
    fn close(&mut self) -> bool {
        self.stop_late();
        let closed = self.objects.close_endpoint();
        for operation in std::mem::take(&mut self.operations) {
            // SAFETY: from Box::into_raw, in the set once. The endpoint is closed, so nothing touches it any more.
            let operation = unsafe { Box::from_raw(operation) };
            if !closed {
                std::mem::forget(operation);
            }
        }
        // A transfer in progress has a registration too.
        self.moving.clear();
        self.memory.clear();
        self.small.clear();
        self.large.clear();
        self.receive_mr = None;
        if !closed {
            tracing::warn!("the endpoint could not be closed; its buffers are leaked");
            std::mem::forget(self.receive_region.clone());
        }
        self.objects.close_all()
    }
}

impl Drop for LibfabricEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_that_is_closed_during_a_transfer_leaves_nothing_open() {
        if let Some(why) = unusable() {
            return println!("skipped: {why}");
        }
        let settings = Settings {
            provider: Some("tcp;ofi_rxm".to_owned()),
            host: Some("127.0.0.1".to_owned()),
            ..Settings::default()
        };
        let memory = || Arc::new(Region::new(4096).unwrap());
        let mut peer = LibfabricEndpoint::open(settings.clone()).unwrap();
        let remote = peer.register(memory(), Access::BOTH).unwrap().remote;
        for direction in [Direction::Read, Direction::ReadInTime, Direction::Write] {
            let mut endpoint = LibfabricEndpoint::open(settings.clone()).unwrap();
            let local = endpoint.register(memory(), Access::LOCAL).unwrap().local;
            let to = endpoint.connect(peer.address()).unwrap();
            let transfer = Transfer { direction, local, local_offset: 0, remote, bytes: 4096 };
            // The peer does not answer.
            endpoint.transfer(to, &transfer, 1, Duration::from_secs(60)).unwrap();
            assert!(endpoint.close(), "{direction:?}");
        }
    }
}
