//! Selects a provider and opens the objects of an endpoint.

use std::ffi::{c_void, CStr, CString};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric_sys::*;
use forebay_types::{Code, Error, Result};

use super::settings::{Settings, Waiting};

/// Providers in the order in which `auto` tries them: cluster networks by how directly they are driven, TCP last.
/// Providers that reach only this node (shm) or serve debugging (sockets, udp) are left out.
const PREFERRED: [&str; 8] =
    ["cxi", "efa", "opx", "psm3", "verbs;ofi_rxm", "tcp;ofi_rxm", "net;ofi_rxm", "tcp"];
/// Providers whose endpoints have IP addresses, so that a host and a port select one.
const BY_HOST: [&str; 5] = ["verbs", "tcp", "net", "sockets", "udp"];

/// Providers with one connection to a peer, on which messages and transfers are executed in the order in which they
/// were started, and whose bytes are stored in that order. So when a message arrives, everything written before it is
/// in memory. verbs is left out while this is untested: with adaptive routing the last packet of a write may be stored
/// although an earlier packet is missing when the connection breaks.
const IN_ORDER: [&str; 2] = ["tcp;ofi_rxm", "net;ofi_rxm"];

/// How long the first opening waits for its port: that of a daemon that was just killed may not be free yet.
pub(super) const PORT_PATIENCE: Duration = Duration::from_secs(1);
/// The pause between two attempts to take the port.
const PORT_RETRY: Duration = Duration::from_millis(50);

/// The objects of an endpoint, closed in the order that libfabric requires.
pub(super) struct Objects {
    pub(super) library: &'static Library,
    pub(super) info: *mut fi_info,
    pub(super) fabric: *mut fid_fabric,
    pub(super) domain: *mut fid_domain,
    pub(super) av: *mut fid_av,
    pub(super) cq: *mut fid_cq,
    pub(super) ep: *mut fid_ep,
    /// A duplicate of the completion queue's descriptor, for a thread that waits while another uses the endpoint.
    pub(super) descriptor: Option<Arc<OwnedFd>>,
    pub(super) provider: String,
    /// A write completes only when its bytes are in the peer's memory.
    pub(super) delivery_complete: bool,
    /// The provider keeps the promise of [`Limits::in_order`](crate::endpoint::Limits::in_order).
    pub(super) in_order: bool,
}

pub(super) fn failed(library: &Library, what: impl Into<String>, returned: i64) -> Error {
    let code = match -returned {
        e if e == FI_ENOSYS as i64 => Code::NotSupported,
        e => i32::try_from(e).map_or(Code::Io, Code::from_errno),
    };
    Error::new(code, what).why(library.strerror(returned))
}

pub(super) fn library() -> Result<&'static Library> {
    Library::get().map_err(|why| {
        Error::new(Code::NotSupported, "cannot use the network: libfabric is not usable")
            .why(why)
            .cure("install libfabric 1.15 or later (Debian: apt-get install libfabric1)")
    })
}

/// The capabilities that Forebay requests from every provider.
fn hints(
    library: &Library,
    name: &CStr,
    manual: bool,
    (delivery, behind): (bool, bool),
) -> Result<*mut fi_info> {
    let hints = library.fi_allocinfo();
    if hints.is_null() {
        return Err(Error::new(Code::NoMemory, "cannot allocate libfabric's hints"));
    }
    // SAFETY: fi_allocinfo fills all attribute pointers; prov_name is freed by fi_freeinfo, with free.
    unsafe {
        let h = &mut *hints;
        h.caps = [FI_TAGGED, FI_RMA, FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE]
            .iter()
            .fold(0, |all, cap| all | u64::from(*cap));
        h.mode = FI_CONTEXT | FI_CONTEXT2;
        (*h.ep_attr).type_ = FI_EP_RDM;
        let domain = &mut *h.domain_attr;
        domain.mr_mode =
            (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT) as i32;
        domain.threading = FI_THREAD_DOMAIN;
        domain.resource_mgmt = FI_RM_ENABLED;
        domain.av_type = FI_AV_TABLE;
        if manual {
            domain.control_progress = FI_PROGRESS_MANUAL;
            domain.data_progress = FI_PROGRESS_MANUAL;
        }
        // Messages keep their order, and where possible their order behind writes. A write completes when its bytes are
        // in the peer's memory. If the provider cannot report this, a message that is sent after the write's completion
        // must at least not overtake the write.
        let order = if behind { FI_ORDER_SAS | FI_ORDER_SAW } else { FI_ORDER_SAS };
        (*h.tx_attr).msg_order = u64::from(order);
        (*h.rx_attr).msg_order = u64::from(order);
        if delivery {
            (*h.tx_attr).op_flags = u64::from(FI_DELIVERY_COMPLETE);
        }
        (*h.fabric_attr).prov_name = libc::strdup(name.as_ptr());
    }
    Ok(hints)
}

/// The first info of a provider that works: with manual progress if possible, with delivery completion if possible, and
/// with messages behind writes if possible and useful.
fn info_of(
    library: &'static Library,
    provider: &str,
    settings: &Settings,
) -> Result<(*mut fi_info, (bool, bool))> {
    let what = || format!("cannot use provider {provider}");
    let name = CString::new(provider).map_err(|_| Error::new(Code::Invalid, what()))?;
    let by_host = BY_HOST.iter().any(|p| provider.split(';').any(|part| part == *p));
    let text = |s: Option<String>| -> Result<Option<CString>> {
        s.map(CString::new).transpose().map_err(|_| Error::new(Code::Invalid, what()))
    };
    let host = text(settings.host.clone().filter(|_| by_host))?;
    let port = text(settings.port.filter(|_| by_host).map(|p| p.to_string()))?;
    let pointer = |s: &Option<CString>| s.as_ref().map_or(null(), |s| s.as_ptr());
    let flags = if host.is_some() || port.is_some() { FI_SOURCE } else { 0 };
    let mut returned = 0;
    // Without delivery completion, every provider must order messages behind writes. With it, this order is useful only
    // for providers that store bytes in order.
    let all = [(true, true), (true, false), (false, true)];
    let asked = if IN_ORDER.contains(&provider) { &all[..] } else { &all[1..] };
    let by_progress = |manual| asked.iter().map(move |asked| (manual, *asked));
    for (manual, asked) in [true, false].into_iter().flat_map(by_progress) {
        let hints = hints(library, &name, manual, asked)?;
        let mut info = null_mut();
        // SAFETY: sound strings or null, hints from fi_allocinfo, which are freed once.
        unsafe {
            returned = library.fi_getinfo(pointer(&host), pointer(&port), flags, hints, &mut info);
            library.fi_freeinfo(hints);
        }
        if returned == 0 {
            return Ok((info, asked));
        }
    }
    Err(failed(library, what(), returned.into()))
}

impl Objects {
    /// Opens an endpoint of the provider in the settings, or of the first of `PREFERRED` that works. If its port is not
    /// free, waits up to `patience` for it.
    pub(super) fn open(settings: &Settings, patience: Duration) -> Result<Objects> {
        super::environment::set();
        let library = library()?;
        if let Some(name) = &settings.provider {
            return Objects::open_provider(library, name, settings, patience).map_err(|e| {
                e.cure(
                    "fi_info -t FI_EP_RDM (package libfabric-bin) lists what this node has; `auto` chooses",
                )
            });
        }
        let mut reasons = Vec::new();
        for name in PREFERRED {
            match Objects::open_provider(library, name, settings, patience) {
                Ok(objects) => return Ok(objects),
                Err(e) => reasons.push(format!("{name}: {}", e.why)),
            }
        }
        Err(Error::new(Code::NotSupported, "cannot use the network: no provider of libfabric works")
            .why(reasons.join(", ")))
    }

    fn open_provider(
        library: &'static Library,
        name: &str,
        settings: &Settings,
        patience: Duration,
    ) -> Result<Objects> {
        let (info, (delivery_complete, behind)) = info_of(library, name, settings)?;
        let mut objects = Objects {
            library,
            info,
            fabric: null_mut(),
            domain: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            ep: null_mut(),
            descriptor: None,
            provider: name.to_owned(),
            delivery_complete,
            in_order: delivery_complete && behind && IN_ORDER.contains(&name),
        };
        objects.open_all(settings, patience)?;
        Ok(objects)
    }

    fn open_all(&mut self, settings: &Settings, patience: Duration) -> Result<()> {
        let (library, end) = (self.library, Instant::now() + patience);
        let check = |what: &str, returned: i32| match returned {
            0 => Ok(()),
            e => Err(failed(library, format!("cannot open {what} of {}", self.provider), e.into())),
        };
        // SAFETY: the info is from fi_getinfo. Each object is made from those before it, which live until Drop.
        // Attributes are on the stack and read within the calls.
        unsafe {
            let info = &mut *self.info;
            // Sends need no acknowledgement by the peer. Each write requests it itself.
            (*info.tx_attr).op_flags = 0;
            check("the fabric", library.fi_fabric(info.fabric_attr, &mut self.fabric, null_mut()))?;
            check("the domain", fi_domain(self.fabric, info, &mut self.domain, null_mut()))?;
            let mut av: fi_av_attr = std::mem::zeroed();
            av.type_ = FI_AV_TABLE;
            av.count = settings.peers_expected;
            check("the address vector", fi_av_open(self.domain, &mut av, &mut self.av, null_mut()))?;
            let mut attr: fi_cq_attr = std::mem::zeroed();
            attr.size = (*info.tx_attr).size + (*info.rx_attr).size;
            attr.format = FI_CQ_FORMAT_TAGGED;
            attr.wait_obj = match settings.waiting {
                Waiting::Events => FI_WAIT_FD,
                Waiting::Spinning => FI_WAIT_NONE,
            };
            let mut opened = fi_cq_open(self.domain, &mut attr, &mut self.cq, null_mut());
            if opened != 0 && attr.wait_obj == FI_WAIT_FD {
                attr.wait_obj = FI_WAIT_NONE;
                opened = fi_cq_open(self.domain, &mut attr, &mut self.cq, null_mut());
            }
            check("the completion queue", opened)?;
            if attr.wait_obj == FI_WAIT_FD {
                let mut fd: RawFd = -1;
                let argument: *mut c_void = (&raw mut fd).cast();
                if fi_control(&raw mut (*self.cq).fid, FI_GETWAIT as i32, argument) == 0 && fd >= 0 {
                    // The descriptor belongs to the queue and lives as long as the queue.
                    let duplicate = BorrowedFd::borrow_raw(fd).try_clone_to_owned();
                    let duplicate =
                        duplicate.map_err(|e| Error::io("cannot keep the queue's descriptor", &e))?;
                    self.descriptor = Some(Arc::new(duplicate));
                }
            }
            check("the endpoint", fi_endpoint(self.domain, info, &mut self.ep, null_mut()))?;
            check("the endpoint", fi_ep_bind(self.ep, &raw mut (*self.av).fid, 0))?;
            let both = u64::from(FI_TRANSMIT | FI_RECV);
            check("the endpoint", fi_ep_bind(self.ep, &raw mut (*self.cq).fid, both))?;
            let mut enabled = fi_enable(self.ep);
            while enabled == -(FI_EADDRINUSE as i32) && Instant::now() < end {
                std::thread::sleep(PORT_RETRY);
                enabled = fi_enable(self.ep);
            }
            check("the endpoint", enabled)
        }
    }

    /// As of [`Limits`](crate::Limits): the provider is one of sockets, and no thread of its own makes progress.
    pub(super) fn copies(&self) -> bool {
        // SAFETY: fi_getinfo fills all attributes.
        let progress = unsafe { (*(*self.info).domain_attr).data_progress };
        IN_ORDER.contains(&self.provider.as_str()) && progress == FI_PROGRESS_MANUAL
    }

    /// The endpoint's address.
    pub(super) fn address(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; forebay_wire::limits::ADDRESS_BYTES_MAX];
        let mut length = bytes.len();
        // SAFETY: the endpoint is enabled and the buffer has `length` bytes.
        let returned = unsafe { fi_getname(self.ep, bytes.as_mut_ptr().cast(), &mut length) };
        if returned != 0 || length > bytes.len() {
            return Err(failed(self.library, "cannot learn the endpoint's address", returned.into()));
        }
        bytes.truncate(length);
        Ok(bytes)
    }

    /// Closes the endpoint itself, so that the provider no longer accesses buffers. False if it could not be closed.
    pub(super) fn close_endpoint(&mut self) -> bool {
        let ep = std::mem::replace(&mut self.ep, null_mut());
        // SAFETY: open, and not used again.
        ep.is_null() || unsafe { fi_close(ep.cast()) == 0 }
    }
}

impl Objects {
    /// Closes all objects. None is used again. The info stays. False if one is still in use, and stays open.
    pub(super) fn close_all(&mut self) -> bool {
        let closed = self.close_endpoint();
        self.descriptor = None;
        let all: [*mut fid; 4] = [
            std::mem::replace(&mut self.cq, null_mut()).cast(),
            std::mem::replace(&mut self.av, null_mut()).cast(),
            std::mem::replace(&mut self.domain, null_mut()).cast(),
            std::mem::replace(&mut self.fabric, null_mut()).cast(),
        ];
        // SAFETY: open, and closed once; all objects begin with their fid.
        let left = all.iter().filter(|fid| !fid.is_null() && unsafe { fi_close(**fid) } != 0);
        closed & (left.count() == 0)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        self.close_all();
        // SAFETY: from fi_getinfo, freed once.
        unsafe { self.library.fi_freeinfo(self.info) };
    }
}
