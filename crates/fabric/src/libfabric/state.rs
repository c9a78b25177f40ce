//! The state of an endpoint, opening it, and the memory that its operations use.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric_sys::*;
use forebay_types::limits::MOVE_BYTES_MAX;
use forebay_types::{Code, Error};
use forebay_wire::limits::ADDRESS_BYTES_MAX;

use super::health::Health;
use super::open::{Objects, PORT_PATIENCE};
use super::operation::{Buffer, Moving, Mr, Operation, Registration, Work};
use super::settings::Settings;
use crate::endpoint::{Limits, Local, Peer, Waker};
use crate::memory::Region;
use crate::numbers::Entropy;

/// Messages up to this size are sent from small buffers, of which many are kept.
const SMALL_BYTES: usize = 8 * 1024;
/// Buffers that are kept for the next message: small and large.
const KEPT: [usize; 2] = [256, 16];
/// Operations that may wait for one peer.
const WAITING_PER_PEER: usize = 1024;

/// First and longest pause before an operation that the provider refused is tried again.
pub(super) const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(10));

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) address: Vec<u8>,
    /// Its index in the address vector. None after it was forgotten.
    pub(super) av_index: Option<fi_addr_t>,
    /// Operations that the provider refused for now, in order.
    pub(super) waiting: VecDeque<*mut Operation>,
    /// Sends and pieces that the provider holds.
    pub(super) under_way: usize,
    pub(super) pause: Duration,
    pub(super) again_at: Duration,
    /// Since when the provider reports that there is no connection.
    pub(super) unconnected: Option<Duration>,
}

/// An event that the next `progress` reports.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) token: u64,
    pub(super) peer: Peer,
    pub(super) failed: Option<(Code, String)>,
}

/// An endpoint of libfabric.
pub struct LibfabricEndpoint {
    pub(super) objects: Objects,
    pub(super) address: Vec<u8>,
    pub(super) limits: Limits,
    pub(super) settings: Settings,
    pub(super) origin: Instant,
    pub(super) waker: Waker,
    pub(super) entropy: Entropy,
    pub(super) peers: Vec<PeerState>,
    pub(super) by_address: BTreeMap<Vec<u8>, Peer>,
    /// Operations that the provider holds, and those that wait.
    pub(super) operations: std::collections::HashSet<*mut Operation>,
    pub(super) moving: BTreeMap<u64, Moving>,
    pub(super) next_moving: u64,
    /// No transfer that has to end in time is late before this.
    pub(super) none_late_before: Duration,
    pub(super) memory: BTreeMap<Local, Arc<Registration>>,
    pub(super) next_local: u64,
    pub(super) small: Vec<Buffer>,
    pub(super) large: Vec<Buffer>,
    pub(super) reports: VecDeque<Report>,
    pub(super) deadlines_at: Duration,
    /// The registration of `receive_region`, if the provider requires one. In `receive_region` the receive buffers are
    /// adjacent.
    pub(super) receive_mr: Option<Mr>,
    pub(super) receive_region: Arc<Region>,
    /// Receive buffers that could not be posted. The next `progress` posts them.
    pub(super) unposted: Vec<usize>,
    pub(super) mr_mode: u32,
    pub(super) key_mask: u64,
    pub(super) piece_bytes: usize,
    pub(super) under_way: usize,
    pub(super) receives: usize,
    pub(super) health: Health,
    /// Addresses of nodes passed to `admit`.
    pub(super) admitted: std::collections::BTreeSet<Vec<u8>>,
    /// Memory that is to be registered again: the endpoint was closed and could not be opened again yet.
    pub(super) lost: Vec<(Local, Arc<Region>, u64, u64)>,
}

// SAFETY: the pointers lead to objects and operations of this endpoint alone, which moves as a whole. libfabric's
// threading model FI_THREAD_DOMAIN lets any one thread at a time use them.
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
    /// [`Code::NotSupported`] without a usable libfabric or provider, otherwise the provider's error.
    pub fn open(settings: Settings) -> forebay_types::Result<LibfabricEndpoint> {
        if settings.message_bytes == 0 || settings.receives == 0 || settings.piece_bytes == 0 {
            return Err(Error::new(Code::Invalid, "an endpoint needs room for messages and pieces"));
        }
        let objects = Objects::open(&settings, PORT_PATIENCE)?;
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
                // A transfer in several pieces could have its last byte in memory while a piece in the middle is
                // missing, because that piece failed and the next one used a new connection.
                in_order: objects.in_order && piece_bytes >= MOVE_BYTES_MAX,
                copies: objects.copies() && mr_mode & FI_MR_LOCAL == 0,
            },
            origin: Instant::now(),
            waker: Waker::new()?,
            entropy: Entropy::System,
            peers: Vec::new(),
            by_address: BTreeMap::new(),
            operations: Default::default(),
            moving: BTreeMap::new(),
            next_moving: 0,
            none_late_before: Duration::MAX,
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
    pub(super) fn register_range(&mut self, region: &Region, access: u64) -> Result<Mr, Code> {
        self.register_with(region, access, None).map(|(mr, _)| mr)
    }

    /// Registers a whole region, under this key or any. Returns the registration and the key that was requested.
    pub(super) fn register_with(
        &mut self,
        region: &Region,
        access: u64,
        key: Option<u64>,
    ) -> Result<(Mr, u64), Code> {
        if self.objects.domain.is_null() {
            return Err(Code::NoResources);
        }
        let mut mr = std::ptr::null_mut();
        let mut asked = 0;
        // Keys cannot be guessed. Providers that choose keys ignore it. If a key is in use, another is tried.
        for _ in 0..8 {
            let key = key.unwrap_or_else(|| self.entropy.u64() & self.key_mask);
            asked = key;
            // SAFETY: the region outlives the registration, as both are kept together.
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

    pub(super) fn buffer(&mut self, bytes: usize) -> Result<Buffer, Code> {
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

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        let (kept, most) = if buffer.region.len() == SMALL_BYTES {
            (&mut self.small, KEPT[0])
        } else {
            (&mut self.large, KEPT[1])
        };
        if kept.len() < most {
            kept.push(buffer);
        }
    }

    pub(super) fn peer(&self, peer: Peer) -> Result<&PeerState, Code> {
        let state = self.peers.get(peer.0 as usize).ok_or(Code::Invalid)?;
        match state.av_index {
            Some(_) if state.waiting.len() >= WAITING_PER_PEER => Err(Code::Busy),
            Some(_) => Ok(state),
            None => Err(Code::Invalid),
        }
    }

    /// Checks that bytes from the network are an address of this endpoint's format, which libfabric does not check.
    pub(super) fn sound_address(&self, address: &[u8]) -> bool {
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
