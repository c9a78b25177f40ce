//! A host's end of the simulated network.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_types::Code;
use forebay_wire::Memory;

use super::network::{Host, HostId, Network, Told};
use crate::endpoint::{Endpoint, Event, Limits, Local, Peer, Registered, Transfer, Waker};
use crate::memory::{Access, Region};

/// Transfers and messages are in order as far as the faults allow. `Faults::reorder` detects users that rely on more
/// than [`Limits::in_order`] promises.
const LIMITS: Limits =
    Limits { message_bytes: 1 << 20, waiting_per_peer: 1024, in_order: true, copies: true };

/// An operation that was not reported yet.
#[derive(Debug)]
struct Operation {
    peer: Peer,
    token: u64,
}

/// An endpoint of [`Network::endpoint`].
#[derive(Debug)]
pub struct SimulatedEndpoint {
    network: Network,
    host: HostId,
    incarnation: u64,
    address: Vec<u8>,
    peers: Vec<HostId>,
    operations: BTreeMap<u64, Operation>,
    next_operation: u64,
    memory: BTreeMap<Local, Arc<Region>>,
    waker: Waker,
}

impl Network {
    /// Makes the endpoint of a host that has none, because it is new or was killed. A killed host keeps its address.
    pub fn endpoint(&self, host: u32) -> SimulatedEndpoint {
        let mut state = self.lock();
        let entry = state.hosts.entry(host).or_default();
        assert!(!entry.alive, "host {host} has an endpoint");
        let incarnation = entry.incarnation + 1;
        *entry = Host { incarnation, alive: true, ..Host::default() };
        state.note(&[u64::from(host), 10, incarnation]);
        drop(state);
        SimulatedEndpoint::new(self.clone(), host, incarnation)
    }
}

impl SimulatedEndpoint {
    fn new(network: Network, host: HostId, incarnation: u64) -> SimulatedEndpoint {
        let waker = Waker::new().unwrap_or_else(|e| panic!("{e}"));
        SimulatedEndpoint {
            network,
            host,
            incarnation,
            address: format!("simulated:{host}").into_bytes(),
            peers: Vec::new(),
            operations: BTreeMap::new(),
            next_operation: 0,
            memory: BTreeMap::new(),
            waker,
        }
    }

    fn begin(&mut self, peer: Peer, token: u64) -> Result<(HostId, u64), Code> {
        let to = *self.peers.get(peer.0 as usize).ok_or(Code::Invalid)?;
        if self.operations.values().filter(|o| o.peer == peer).count() >= LIMITS.waiting_per_peer {
            return Err(Code::Busy);
        }
        self.next_operation += 1;
        self.operations.insert(self.next_operation, Operation { peer, token });
        Ok((to, self.next_operation))
    }
}

impl Endpoint for SimulatedEndpoint {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn provider(&self) -> &str {
        "simulated"
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn now(&self) -> Duration {
        self.network.now()
    }

    fn connect(&mut self, address: &[u8]) -> Result<Peer, Code> {
        let text = std::str::from_utf8(address).map_err(|_| Code::Invalid)?;
        let host = text.strip_prefix("simulated:").and_then(|h| h.parse().ok()).ok_or(Code::Invalid)?;
        let index = self.peers.iter().position(|p| *p == host).unwrap_or_else(|| {
            self.peers.push(host);
            self.peers.len() - 1
        });
        Ok(Peer(index as u32))
    }

    fn forget(&mut self, _peer: Peer) {}

    fn send(
        &mut self,
        peer: Peer,
        tag: u64,
        bytes: &[u8],
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        if bytes.len() > LIMITS.message_bytes {
            return Err(Code::TooBig);
        }
        let (to, operation) = self.begin(peer, token)?;
        let mut state = self.network.lock();
        let Some(host) =
            state.hosts.get_mut(&self.host).filter(|h| h.alive && h.incarnation == self.incarnation)
        else {
            return Ok(());
        };
        host.under_way.insert(operation);
        state.watch(self.host, operation, deadline);
        state.send(self.host, to, operation, tag, bytes);
        Ok(())
    }

    fn register(&mut self, region: Arc<Region>, access: Access) -> Result<Registered, Code> {
        let mut state = self.network.lock();
        let (key, address) = (state.numbers.draw(), state.numbers.below(1 << 40) << 12);
        let bytes = region.len();
        self.memory.insert(Local(key), region.clone());
        if let Some(host) = state.hosts.get_mut(&self.host) {
            host.memory.insert(key, (region, address, access));
        }
        Ok(Registered { local: Local(key), remote: Memory { address, key }, bytes })
    }

    fn unregister(&mut self, local: Local) {
        self.memory.remove(&local);
        if let Some(host) = self.network.lock().hosts.get_mut(&self.host) {
            if host.incarnation == self.incarnation {
                host.memory.remove(&local.0);
            }
        }
    }

    fn is_registered(&self, local: Local) -> bool {
        self.memory.contains_key(&local)
    }

    fn transfer(
        &mut self,
        peer: Peer,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        let region = self.memory.get(&transfer.local).ok_or(Code::Fault)?.clone();
        region.range(transfer.local_offset, transfer.bytes)?;
        let (to, operation) = self.begin(peer, token)?;
        let mut state = self.network.lock();
        let Some(host) =
            state.hosts.get_mut(&self.host).filter(|h| h.alive && h.incarnation == self.incarnation)
        else {
            return Ok(());
        };
        host.under_way.insert(operation);
        state.watch(self.host, operation, deadline);
        if deadline > state.now {
            state.transfer(self.host, to, operation, *transfer, region);
        }
        Ok(())
    }

    fn progress(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize {
        let told = {
            let mut state = self.network.lock();
            match state.hosts.get_mut(&self.host) {
                Some(host) if host.incarnation == self.incarnation => std::mem::take(&mut host.told),
                _ => return 0,
            }
        };
        let count = told.len();
        for told in told {
            match told {
                Told::Received { tag, bytes } => sink(Event::Received { tag, bytes: &bytes }),
                Told::Done { operation } => {
                    if let Some(o) = self.operations.remove(&operation) {
                        sink(Event::Done { token: o.token });
                    }
                }
                Told::Failed { operation, code, why } => {
                    if let Some(o) = self.operations.remove(&operation) {
                        sink(Event::Failed { token: o.token, peer: o.peer, code, why });
                    }
                }
            }
        }
        count
    }

    fn descriptor(&self) -> Option<&Arc<OwnedFd>> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        false
    }

    fn next_timer(&self) -> Option<Duration> {
        None
    }

    fn waker(&self) -> &Waker {
        &self.waker
    }
}

impl Drop for SimulatedEndpoint {
    /// The end of a process ends its endpoint.
    fn drop(&mut self) {
        let mut state = self.network.lock();
        let ours = state.hosts.get(&self.host).is_some_and(|h| h.alive && h.incarnation == self.incarnation);
        if ours {
            if let Some(host) = state.hosts.get_mut(&self.host) {
                *host = super::network::Host { incarnation: self.incarnation, ..Default::default() };
            }
        }
    }
}
