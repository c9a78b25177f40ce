//! Endpoints of libfabric: reliable datagrams, tagged messages, RMA.
//!
//! One thread at a time has an endpoint (FI_THREAD_DOMAIN), and its provider is asked to progress only when it is called
//! (FI_PROGRESS_MANUAL), so that nothing runs behind the user's back; a provider that cannot gets its own way. What it
//! refuses with -FI_EAGAIN waits here, peer by peer, so that one that cannot be reached holds up no other.
//!
//! Buffers and contexts that the provider has are freed when it gives them back, or after the endpoint is closed; if
//! it will not close, they are leaked. An operation whose deadline passes is reported at once and kept until then.

mod environment;
mod health;
mod open;
mod operation;
mod progress;
mod sockets;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric_sys::*;
use forebay_types::limits::MOVE_BYTES_MAX;
use forebay_types::{Code, Error};
use forebay_wire::limits::{ADDRESS_BYTES_MAX, FRAME_BYTES_MAX};
use forebay_wire::Memory;

use crate::endpoint::{Endpoint, Event, Limits, Local, Peer, Registered, Transfer, Waker};
use crate::memory::{Access, Region};
use crate::numbers::Entropy;
pub use environment::environment;
use health::{Health, PROBE};
use open::Objects;
use operation::{Buffer, Moving, Mr, Operation, Piece, Registration, Send as Sending, Work};
use progress::PAUSE;

/// Messages up to this are sent from small buffers, of which many are kept.
const SMALL_BYTES: usize = 8 * 1024;
/// Buffers that are kept for the next message: small and large.
const KEPT: [usize; 2] = [256, 16];
/// Operations that may wait for one peer.
const WAITING_PER_PEER: usize = 1024;

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
    /// Registers buffers of our own as verbs wants it (FI_MR_LOCAL), also where the provider does not ask for it: so that this is
    /// tested on machines without such a network.
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

/// Why libfabric cannot be used on this machine, if it cannot.
pub fn unusable() -> Option<String> {
    open::library().err().map(|e| e.to_string())
}

#[derive(Debug)]
struct PeerState {
    address: Vec<u8>,
    /// Its place in the address vector; None while it is forgotten.
    place: Option<fi_addr_t>,
    /// Refused for now, in order.
    waiting: VecDeque<*mut Operation>,
    /// Sends and pieces that the provider has.
    under_way: usize,
    pause: Duration,
    again_at: Duration,
    /// Since when the provider says that there is no connection.
    unconnected: Option<Duration>,
}

/// What the next `progress` tells.
#[derive(Debug)]
struct Report {
    token: u64,
    peer: Peer,
    failed: Option<(Code, String)>,
}

/// An endpoint of libfabric.
pub struct LibfabricEndpoint {
    objects: Objects,
    address: Vec<u8>,
    limits: Limits,
    settings: Settings,
    origin: Instant,
    waker: Waker,
    entropy: Entropy,
    peers: Vec<PeerState>,
    by_address: BTreeMap<Vec<u8>, Peer>,
    /// What the provider has, and what waits.
    operations: std::collections::HashSet<*mut Operation>,
    moving: BTreeMap<u64, Moving>,
    next_moving: u64,
    memory: BTreeMap<Local, Arc<Registration>>,
    next_local: u64,
    small: Vec<Buffer>,
    large: Vec<Buffer>,
    reports: VecDeque<Report>,
    deadlines_at: Duration,
    /// All receive buffers, one behind the other.
    receive_mr: Option<Mr>,
    receive_region: Arc<Region>,
    /// Buffers that could not be posted, to be tried again.
    unposted: Vec<usize>,
    mr_mode: u32,
    key_mask: u64,
    piece_bytes: usize,
    under_way: usize,
    receives: usize,
    health: Health,
    /// Addresses of nodes, if it was told any.
    admitted: std::collections::BTreeSet<Vec<u8>>,
    /// Memory that was registered before the endpoint was closed, while it cannot be opened again.
    lost: Vec<(Local, Arc<Region>, u64, u64)>,
}

// SAFETY: the pointers are to objects and operations of this endpoint alone, which moves as a whole; libfabric's threading
// model FI_THREAD_DOMAIN lets any one thread at a time use them.
unsafe impl Send for LibfabricEndpoint {}

impl std::fmt::Debug for LibfabricEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LibfabricEndpoint")
            .field("provider", &self.objects.provider)
            .field("peers", &self.peers.len())
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}

impl LibfabricEndpoint {
    /// Opens an endpoint.
    ///
    /// # Errors
    /// [`Code::NotSupported`] where there is no libfabric or no provider; what the provider says otherwise.
    pub fn open(settings: Settings) -> forebay_types::Result<LibfabricEndpoint> {
        if settings.message_bytes == 0 || settings.receives == 0 || settings.piece_bytes == 0 {
            return Err(Error::new(Code::Invalid, "an endpoint needs room for messages and pieces"));
        }
        let objects = Objects::open(&settings)?;
        // SAFETY: fi_getinfo fills all attributes.
        let (max_message, mr_mode, key_size, rx_size) = unsafe {
            let info = &*objects.info;
            (
                (*info.ep_attr).max_msg_size,
                (*info.domain_attr).mr_mode as u32,
                (*info.domain_attr).mr_key_size,
                (*info.rx_attr).size,
            )
        };
        let mr_mode = mr_mode | if settings.register_local { FI_MR_LOCAL } else { 0 };
        let address = objects.address()?;
        let no_memory = |code| Error::new(code, "cannot allocate receive buffers");
        let receives = settings.receives.min(rx_size.max(1));
        let bytes = settings.message_bytes.checked_mul(receives).ok_or_else(|| no_memory(Code::TooBig))?;
        let receive_region = Arc::new(Region::new(bytes).map_err(no_memory)?);
        let piece_bytes = settings.piece_bytes.min(max_message);
        let health = Health::of(&objects.provider, &address);
        let mut endpoint = LibfabricEndpoint {
            address,
            limits: Limits {
                message_bytes: settings.message_bytes.min(max_message),
                waiting_per_peer: WAITING_PER_PEER,
                // A transfer in several pieces may lack one in the middle when its end is there: one fails, and the next goes by a new
                // connection.
                in_order: objects.in_order && piece_bytes >= MOVE_BYTES_MAX,
            },
            origin: Instant::now(),
            waker: Waker::new()?,
            entropy: Entropy::System,
            peers: Vec::new(),
            by_address: BTreeMap::new(),
            operations: Default::default(),
            moving: BTreeMap::new(),
            next_moving: 0,
            memory: BTreeMap::new(),
            next_local: 0,
            small: Vec::new(),
            large: Vec::new(),
            reports: VecDeque::new(),
            deadlines_at: Duration::ZERO,
            receive_mr: None,
            receive_region,
            unposted: Vec::new(),
            mr_mode,
            key_mask: if key_size >= 8 { u64::MAX >> 1 } else { (1 << (8 * key_size.max(1))) - 1 },
            piece_bytes,
            under_way: 0,
            receives,
            health,
            admitted: Default::default(),
            lost: Vec::new(),
            settings,
            objects,
        };
        if endpoint.mr_mode & FI_MR_LOCAL != 0 {
            let region = endpoint.receive_region.clone();
            let mr = endpoint.register_range(&region, u64::from(FI_RECV));
            endpoint.receive_mr = Some(mr.map_err(no_memory)?);
        }
        for place in 0..receives {
            endpoint.post(Operation::new(Peer(u32::MAX), Work::Receive(place)));
        }
        if endpoint.unposted.len() == receives {
            return Err(Error::new(Code::Io, "cannot post receive buffers"));
        }
        tracing::debug!("endpoint of {:?}, provider {}", endpoint.objects.library, endpoint.objects.provider);
        Ok(endpoint)
    }

    /// Registers a whole region with the domain.
    fn register_range(&mut self, region: &Region, access: u64) -> Result<Mr, Code> {
        self.register_with(region, access, None).map(|(mr, _)| mr)
    }

    /// Registers a whole region, under this key or any; the key that was asked for.
    fn register_with(&mut self, region: &Region, access: u64, key: Option<u64>) -> Result<(Mr, u64), Code> {
        let mut mr = std::ptr::null_mut();
        let mut asked = 0;
        // A key that cannot be guessed; providers that choose their own ignore it. One that is taken gets another try.
        for _ in 0..8 {
            let key = key.unwrap_or_else(|| self.entropy.u64() & self.key_mask);
            asked = key;
            // SAFETY: the region outlives the registration: both are kept together.
            let returned = unsafe {
                let start = region.start().cast::<c_void>();
                let domain = self.objects.domain;
                fi_mr_reg(domain, start, region.len(), access, 0, key, 0, &mut mr, std::ptr::null_mut())
            };
            match returned {
                0 => break,
                e if e == -(FI_ENOKEY as i32) => {}
                e => return Err(Code::from_errno(-e)),
            }
        }
        if mr.is_null() {
            return Err(Code::NoResources);
        }
        let mr = Mr(mr);
        if self.mr_mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: both are open and of one domain.
            let returned = unsafe {
                match fi_mr_bind(mr.0, self.objects.ep.cast(), 0) {
                    0 => fi_mr_enable(mr.0),
                    e => e,
                }
            };
            if returned != 0 {
                return Err(Code::from_errno(-returned));
            }
        }
        Ok((mr, asked))
    }

    fn buffer(&mut self, bytes: usize) -> Result<Buffer, Code> {
        let (kept, size) = if bytes <= SMALL_BYTES {
            (&mut self.small, SMALL_BYTES)
        } else {
            (&mut self.large, self.settings.message_bytes)
        };
        if let Some(buffer) = kept.pop() {
            return Ok(buffer);
        }
        let region = Region::new(size)?;
        let mr = match self.mr_mode & FI_MR_LOCAL {
            0 => None,
            _ => Some(self.register_range(&region, u64::from(FI_SEND))?),
        };
        Ok(Buffer { mr, region })
    }

    fn give_back(&mut self, buffer: Buffer) {
        let (kept, most) = if buffer.region.len() == SMALL_BYTES {
            (&mut self.small, KEPT[0])
        } else {
            (&mut self.large, KEPT[1])
        };
        if kept.len() < most {
            kept.push(buffer);
        }
    }

    fn peer(&self, peer: Peer) -> Result<&PeerState, Code> {
        let state = self.peers.get(peer.0 as usize).ok_or(Code::Invalid)?;
        match state.place {
            Some(_) if state.waiting.len() >= WAITING_PER_PEER => Err(Code::Busy),
            Some(_) => Ok(state),
            None => Err(Code::Invalid),
        }
    }

    /// Checks what libfabric takes on trust: that bytes from the network are an address of our own kind.
    fn sound_address(&self, address: &[u8]) -> bool {
        // SAFETY: the info lives as long as the endpoint.
        let format = unsafe { (*self.objects.info).addr_format };
        match format {
            FI_ADDR_STR => {
                address.len() <= ADDRESS_BYTES_MAX
                    && address.iter().position(|b| *b == 0) == Some(address.len() - 1)
            }
            FI_SOCKADDR | FI_SOCKADDR_IN | FI_SOCKADDR_IN6 | FI_SOCKADDR_IB => {
                address.len() == self.address.len() && address[..2] == self.address[..2]
            }
            _ => address.len() == self.address.len(),
        }
    }
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
        if let Some(peer) = known.filter(|p| self.peers[p.0 as usize].place.is_some()) {
            return Ok(peer);
        }
        if address.is_empty() || !self.sound_address(address) {
            return Err(Code::Invalid);
        }
        let place = self.insert_place(address)?;
        let peer = known.unwrap_or(Peer(self.peers.len() as u32));
        if known.is_some() {
            let state = &mut self.peers[peer.0 as usize];
            (state.place, state.pause, state.again_at) = (Some(place), PAUSE.0, Duration::ZERO);
        } else {
            self.peers.push(PeerState {
                address: address.to_vec(),
                place: Some(place),
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
        let Some(state) = self.peers.get_mut(peer.0 as usize) else { return };
        for operation in std::mem::take(&mut state.waiting) {
            if let Some(operation) = self.take_back(operation) {
                self.settle(*operation, Some((Code::Io, "the peer was given up".to_owned())));
            }
        }
        let state = &self.peers[peer.0 as usize];
        // While the provider has something for the peer its place stays: it is the same after the next `connect`.
        if state.under_way == 0 {
            self.remove_place(peer.0 as usize);
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
        // SAFETY: registered, and enabled where the mode asks for it.
        let remote = Memory { address, key: unsafe { fi_mr_key(mr.0) } };
        let bytes = region.len();
        self.memory.insert(local, Arc::new(Registration { mr, region, access: bits, key }));
        Ok(Registered { local, remote, bytes })
    }

    fn unregister(&mut self, local: Local) {
        self.memory.remove(&local);
        // While the endpoint cannot be opened.
        self.lost.retain(|(of, ..)| *of != local);
    }

    fn transfer(
        &mut self,
        peer: Peer,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        let region = self.memory.get(&transfer.local).ok_or(Code::Fault)?.clone();
        region.region.range(transfer.local_offset, transfer.bytes)?;
        transfer.remote.address.checked_add(transfer.bytes as u64).ok_or(Code::Invalid)?;
        self.peer(peer)?;
        if transfer.bytes == 0 {
            self.reports.push_back(Report { token, peer, failed: None });
            return Ok(());
        }
        self.next_moving += 1;
        let id = self.next_moving;
        let pieces_left = transfer.bytes.div_ceil(self.piece_bytes);
        self.moving.insert(id, Moving { token, peer, deadline, pieces_left, told: false, failed: None });
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
        for place in std::mem::take(&mut self.unposted) {
            self.post(Operation::new(Peer(u32::MAX), Work::Receive(place)));
        }
        let mut events = self.read_completions(sink);
        let now = self.now();
        for index in 0..self.peers.len() {
            if !self.peers[index].waiting.is_empty() && self.peers[index].again_at <= now {
                self.give_waiting(Peer(index as u32), now);
            }
        }
        self.look_at_deadlines(now);
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
            // It could not be opened: nothing comes until it is.
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
        // What this endpoint sends itself comes from its own host.
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

impl Drop for LibfabricEndpoint {
    fn drop(&mut self) {
        let closed = self.objects.close_endpoint();
        for operation in std::mem::take(&mut self.operations) {
            // SAFETY: from Box::into_raw, in the set once. The endpoint is closed, so nothing touches it any more.
            let operation = unsafe { Box::from_raw(operation) };
            if !closed {
                std::mem::forget(operation);
            }
        }
        self.memory.clear();
        self.small.clear();
        self.large.clear();
        self.receive_mr = None;
        if !closed {
            tracing::warn!("the endpoint would not close; its buffers are leaked");
            std::mem::forget(self.receive_region.clone());
        }
    }
}
