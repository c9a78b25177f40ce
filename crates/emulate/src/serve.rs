//! The server: answers the kernel's requests for the file of a device, each as late as the medium would.
//!
//! Serving a request allocates no memory: each thread has its buffers from the start. A thread waits for its request's
//! time by itself, so there are as many threads as the medium has channels.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::OnceLock;

use forebay_fuse::protocol::{
    self, fopen, init, op, Body, Request, Short, Validity, MAJOR, MINOR, ROOT_NODE,
};
use forebay_fuse::Device;
use forebay_pacing::{now_ns, Direction, Pacers, Place};

use crate::control::Control;
use crate::store::{Fault, Store};

/// Largest transfer of one request.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// A write with its headers.
const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;
/// Requests that the kernel may have outstanding: all of the device's are such, as nothing waits for one alone.
const BACKGROUND_MAX: u16 = 512;
/// Threads besides those that wait for the medium, so that a flush is not behind writes.
const SPARE_THREADS: usize = 2;
/// Replies from this size on show what a copy takes; those of smaller ones mostly what a system call does.
const COPIED_BYTES_MIN: usize = 64 * 1024;
/// Most nanoseconds that the copy of 1 MiB is taken to need: a thread that was interrupted says more.
const COPY_NS_MAX: u64 = 1_000_000;
/// Bytes of a thread's stack. Nothing here recurses.
const STACK_BYTES: usize = 256 * 1024;

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Medium {
    pub(crate) store: Store,
    pub(crate) pacers: Pacers,
    pub(crate) control: Control,
    pub(crate) copying: Copying,
}

/// How long the kernel takes to copy a transfer between the server and the device's user, learnt from the replies to
/// reads. The copy is a part of the time that a request takes for its user, so it is a part of the emulated time.
#[derive(Debug, Default)]
pub(crate) struct Copying(AtomicU64);

impl Copying {
    /// Takes a transfer into account whose copy took `ns`.
    fn note(&self, bytes: usize, ns: u64) {
        let per_mib = (ns.saturating_mul(1 << 20) / bytes.max(1) as u64).min(COPY_NS_MAX);
        let before = self.0.load(Ordering::Relaxed);
        // Interruptions of this thread count little, and a first value at once.
        let next = if before == 0 { per_mib } else { before - before / 8 + per_mib.min(2 * before) / 8 };
        self.0.store(next, Ordering::Relaxed);
    }

    /// The time that the copy of a transfer takes.
    fn of(&self, bytes: usize) -> u64 {
        (self.0.load(Ordering::Relaxed).saturating_mul(bytes as u64)) >> 20
    }
}

/// A reply: a body, or an errno.
type Served = Result<(), i32>;

fn malformed(_: Short) -> i32 {
    libc::EINVAL
}

/// The mapping, for the handler of SIGSEGV.
static GUARDED: OnceLock<(usize, usize)> = OnceLock::new();
/// Bytes of [`GUARDED`] that a stray store hit, for tests.
static STRAY_EXIT: AtomicUsize = AtomicUsize::new(0);
/// Exit status of a server whose write protection caught a store.
pub(crate) const CAUGHT: i32 = 86;

/// Ends the process after a store to the protected mapping. Only calls that are safe in a handler.
extern "C" fn on_fault(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure; write(2) and _exit(2) are safe in a handler.
    unsafe {
        let address = (*info).si_addr() as usize;
        if let Some((base, bytes)) = GUARDED.get() {
            if address.wrapping_sub(*base) < *bytes {
                STRAY_EXIT.store(address - base, Ordering::Relaxed);
                let line = b"ERROR a stray write to the medium was caught by its write protection: the device ends\n";
                libc::write(2, line.as_ptr().cast(), line.len());
                libc::_exit(CAUGHT);
            }
        }
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
    }
}

/// Has stray stores to the store's mapping end this process.
fn guard(store: &Store) {
    let _ = GUARDED.set((store.base() as usize, store.bytes()));
    // SAFETY: an all-zero sigaction is valid; the handler keeps to what a handler may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut());
    }
}

/// Makes this process one that memory reclaim can depend on: all memory is present and stays so, and its allocations
/// never wait for the device's own writeback. Returns what could not be done.
fn be_an_io_flusher() -> Vec<String> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let mut lacks = Vec::new();
    let mut note = |what: &str, result: libc::c_int| {
        if result != 0 {
            lacks.push(format!("{what}: {}", io::Error::last_os_error()));
        }
    };
    // SAFETY: plain system calls.
    unsafe {
        note("PR_SET_IO_FLUSHER", libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0));
        note("mlockall", libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE));
        // A sleep then ends as soon as the timer fires.
        note("PR_SET_TIMERSLACK", libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0));
    }
    lacks
}

/// Serves until the connection is over. `ready` is called when the threads run.
pub(crate) fn serve(device: Device, medium: Medium, protects: bool, ready: impl FnOnce()) -> io::Result<()> {
    if protects {
        guard(&medium.store);
    }
    for what in be_an_io_flusher() {
        tracing::warn!("the device may be slow or block when memory is short: {what}");
    }
    let count = medium.pacers.pacer(0).medium().queue_depth as usize + SPARE_THREADS;
    let mut devices: Vec<Device> = (1..count).map(|_| device.another()).collect::<io::Result<_>>()?;
    devices.push(device);
    let medium = &medium;
    std::thread::scope(|scope| {
        for device in devices {
            // Before the device appears, so that they are present.
            let (buffer, out) = (vec![1; REQUEST_BYTES_MAX], filled());
            std::thread::Builder::new()
                .name("medium".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || run(&device, medium, buffer, out))?;
        }
        ready();
        Ok(())
    })
}

/// A reply that has its memory.
fn filled() -> Body {
    let mut out = Body::new();
    out.zeros(REQUEST_BYTES_MAX);
    out.clear();
    out
}

fn run(device: &Device, medium: &Medium, mut buffer: Vec<u8>, mut out: Body) {
    loop {
        let n = match device.read(&mut buffer) {
            Ok(n) => n,
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => continue,
                Some(libc::ENODEV) => return,
                _ => {
                    tracing::error!("cannot read requests of the device: {e}");
                    return;
                }
            },
        };
        let Ok(rq) = Request::parse(&buffer[..n]) else {
            tracing::error!("the kernel sent {n} bytes that are no request");
            continue;
        };
        if matches!(rq.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) {
            continue;
        }
        out.clear();
        let error = match answer(medium, &rq, &mut out) {
            Ok(()) => 0,
            Err(errno) => {
                out.clear();
                errno
            }
        };
        let (sent, bytes) = (now_ns(), out.len());
        let written = device.write(out.message(rq.unique, -error));
        if bytes >= COPIED_BYTES_MIN {
            medium.copying.note(bytes, now_ns() - sent);
        }
        if let Err(e) = written {
            if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
                tracing::error!("cannot answer a request of the device: {e}");
            }
        }
    }
}

fn answer(medium: &Medium, rq: &Request<'_>, out: &mut Body) -> Served {
    match rq.opcode {
        op::INIT => agree(rq, out),
        op::GETATTR | op::SETATTR => {
            protocol::put_attr_out(out, &stat(medium), Validity::LONG);
            Ok(())
        }
        op::OPEN => {
            protocol::put_open_out(out, 0, fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES, 0);
            Ok(())
        }
        op::READ => transfer(medium, rq, out, Direction::Read),
        op::WRITE => transfer(medium, rq, out, Direction::Write),
        op::FALLOCATE => discard(medium, rq),
        op::FSYNC => {
            medium.control.count_sync();
            Ok(())
        }
        op::STATFS => {
            let blocks = (medium.store.bytes() / 4096) as u64;
            for v in [blocks, 0, 0, 1, 0] {
                out.u64(v);
            }
            for v in [4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0] {
                out.u32(v);
            }
            Ok(())
        }
        op::FLUSH | op::RELEASE | op::DESTROY => Ok(()),
        _ => Err(libc::ENOSYS),
    }
}

fn agree(rq: &Request<'_>, out: &mut Body) -> Served {
    let mut f = rq.fields;
    let (major, minor, readahead) =
        (f.u32().map_err(malformed)?, f.u32().map_err(malformed)?, f.u32().map_err(malformed)?);
    let offered = u64::from(f.u32().map_err(malformed)?);
    if major != MAJOR {
        return Err(libc::EPROTO);
    }
    let wanted = init::ASYNC_READ | init::BIG_WRITES | init::ASYNC_DIO | init::MAX_PAGES;
    for v in [MAJOR, MINOR.min(minor), readahead, (offered & wanted) as u32] {
        out.u32(v);
    }
    out.u16(BACKGROUND_MAX);
    out.u16(BACKGROUND_MAX);
    out.u32(TRANSFER_BYTES_MAX as u32);
    out.u32(1);
    out.u16((TRANSFER_BYTES_MAX / 4096) as u16);
    out.zeros(64 - 30);
    Ok(())
}

fn stat(medium: &Medium) -> libc::stat {
    // SAFETY: an all-zero stat is valid.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    st.st_ino = ROOT_NODE;
    st.st_mode = libc::S_IFREG | 0o600;
    st.st_nlink = 1;
    st.st_size = medium.store.bytes() as i64;
    st.st_blocks = st.st_size / 512;
    st.st_blksize = 4096;
    st
}

/// A read or a write, which completes when the medium would.
fn transfer(medium: &Medium, rq: &Request<'_>, out: &mut Body, direction: Direction) -> Served {
    let ticket = medium.pacers.pacer(0).begin();
    if let Some(byte) = medium.control.takes_stray_store() {
        stray(medium, byte as usize);
    }
    let mut f = rq.fields;
    f.skip(8).map_err(malformed)?;
    let (offset, len) = (f.u64().map_err(malformed)?, f.u32().map_err(malformed)? as usize);
    if len > TRANSFER_BYTES_MAX {
        return note(medium, offset, len, Err(Fault::Range));
    }
    let (copy_ns, way_ns) = (medium.copying.of(len), medium.control.way_ns(direction, len));
    let ticket = if direction == Direction::Write { ticket.arrived_before(copy_ns) } else { ticket };
    // Before its bytes are moved: parts of one request, which arrive together, reach the medium in their order.
    let reserved = ticket.reserve(direction, Place { file: 0, offset }, len as u64);
    let (done, ahead_ns) = match direction {
        Direction::Read => {
            let read = out.fill(len, |room| medium.store.read(offset, room).map(|()| room.len())).map(|_| ());
            (read, copy_ns + way_ns)
        }
        Direction::Write => {
            f.skip(4 + 16).map_err(malformed)?;
            let from = f.bytes(len).map_err(malformed)?;
            out.u32(len as u32);
            out.u32(0);
            (medium.store.write(offset, from, &medium.control), way_ns)
        }
    };
    note(medium, offset, len, done)?;
    reserved.wait(ahead_ns);
    Ok(())
}

/// A discard, or a request for zeros. It takes what the memory takes.
fn discard(medium: &Medium, rq: &Request<'_>) -> Served {
    let mut f = rq.fields;
    f.skip(8).map_err(malformed)?;
    let (offset, len) = (f.u64().map_err(malformed)?, f.u64().map_err(malformed)?);
    let mode = f.u32().map_err(malformed)? as i32;
    if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) == 0 {
        return Err(libc::EOPNOTSUPP);
    }
    note(medium, offset, len as usize, medium.store.zero(offset, len, &medium.control))?;
    medium.control.count_discarded(len);
    Ok(())
}

/// Logs and counts a fault.
fn note(medium: &Medium, offset: u64, len: usize, done: Result<(), Fault>) -> Served {
    match done {
        Ok(()) => Ok(()),
        Err(Fault::Range) => {
            medium.control.count_refused();
            tracing::error!(
                "a request for {len} bytes at {offset} was refused: these are not blocks of the device"
            );
            Err(libc::EINVAL)
        }
        Err(Fault::Checksum { block }) => {
            medium.control.count_checksum_error();
            tracing::error!(
                "block {block} does not have its checksum: its bytes changed after they were written"
            );
            Err(libc::EIO)
        }
        Err(Fault::Written { block }) => {
            medium.control.count_verify_error();
            tracing::error!("block {block} does not read back as it was written");
            Err(libc::EIO)
        }
        Err(Fault::Memory(errno)) => {
            tracing::error!("cannot write the medium: {}", io::Error::from_raw_os_error(errno));
            Err(libc::EIO)
        }
    }
}

/// Stores to a byte of the mapping without the store's knowledge, as a wild pointer would. Tests order it.
#[cold]
fn stray(medium: &Medium, byte: usize) {
    if byte < medium.store.bytes() {
        // SAFETY: within the mapping. If that is protected, the store is a fault, which is what is tested.
        unsafe { medium.store.base().add(byte).write_volatile(0xa5) };
    }
}

/// The descriptors that commands open through /proc.
pub(crate) fn numbers(memory: &impl AsRawFd, pacing: &impl AsFd, control: &impl AsFd) -> [i32; 3] {
    [memory.as_raw_fd(), pacing.as_fd().as_raw_fd(), control.as_fd().as_raw_fd()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_follows_what_copies_take_and_not_single_interruptions() {
        let copying = Copying::default();
        assert_eq!(copying.of(1 << 20), 0, "nothing was copied yet");
        copying.note(1 << 20, 80_000);
        assert_eq!((copying.of(1 << 20), copying.of(1 << 19)), (80_000, 40_000));
        copying.note(1 << 20, 80_000_000);
        assert!(copying.of(1 << 20) <= 90_000, "{}", copying.of(1 << 20));
        for _ in 0..100 {
            copying.note(1 << 18, 10_000);
        }
        let settled = copying.of(1 << 20);
        assert!((39_000..42_000).contains(&settled), "{settled}");
    }
}
