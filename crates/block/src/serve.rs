//! The server: answers the kernel's requests for the file of a device.
//!
//! Serving a request allocates no memory here: each thread has its buffers from the start. A thread serves one request
//! after the other, so there are as many threads as the medium serves at the same time. Where requests do not wait, one thread
//! polls while they come one by one (`turns`).

use std::io;
use std::time::Instant;

use forebay_fuse::protocol::{
    self, fopen, init, op, Body, Request, Short, Validity, MAJOR, MINOR, ROOT_NODE,
};
use forebay_fuse::Device;

use crate::turns::Turns;

/// Largest transfer of one request.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// A write with its headers.
const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;
/// Requests that the kernel may have outstanding: all of the device's are such, as nothing waits for one alone.
const BACKGROUND_MAX: u16 = 512;
/// Replies from this size on show what a copy takes; those of smaller ones mostly what a system call does.
const COPIED_BYTES_MIN: usize = 64 * 1024;
/// Bytes of a thread's stack. Nothing here recurses.
const STACK_BYTES: usize = 256 * 1024;
/// Attributes never change. Without the server, commands can still look at the device.
const ALWAYS: Validity = Validity { seconds: 10 * 365 * 86_400, nanoseconds: 0 };

/// The result of a request: done, or an errno.
pub type Served = Result<(), i32>;

/// The bytes of a device.
pub trait Medium: Sync {
    /// How many there are.
    fn bytes(&self) -> u64;

    /// The inode number of the file, by which commands recognize the device.
    fn inode(&self) -> u64 {
        ROOT_NODE
    }

    /// How many requests it serves at the same time.
    fn threads(&self) -> usize;

    /// True if a request may wait: for the time that its medium takes, or for another process. Otherwise requests are copies of
    /// memory that is there, and one thread may serve them one after the other while it polls for the next. Clearing a range is
    /// never served so, because it takes time in proportion to the range.
    fn waits(&self) -> bool {
        true
    }

    /// Reads `to.len()` bytes.
    fn read(&self, offset: u64, to: &mut [u8]) -> Served;

    /// Writes.
    fn write(&self, offset: u64, from: &[u8]) -> Served;

    /// Returns when what was written before is where it stays.
    fn flush(&self) -> Served;

    /// Sets a range to zero. `discards` if its memory may be freed.
    fn zero(&self, offset: u64, bytes: u64, discards: bool) -> Served;

    /// The kernel has copied the bytes of a read in `ns` nanoseconds.
    fn copied(&self, _bytes: usize, _ns: u64) {}
}

/// Which memory of the server stays in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// All of it.
    All,
    /// What it gets from now on. The caller has locked what else it needs.
    New,
}

fn malformed(_: Short) -> i32 {
    libc::EINVAL
}

/// Makes this process one that memory reclaim can depend on: its memory is present and stays so, and its allocations
/// never wait for the device's own writeback. Returns what could not be done.
fn be_an_io_flusher(memory: Memory) -> Vec<String> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let mut lacks = Vec::new();
    let mut note = |what: &str, result: libc::c_int| {
        if result != 0 {
            lacks.push(format!("{what}: {}", io::Error::last_os_error()));
        }
    };
    let current = if memory == Memory::All { libc::MCL_CURRENT } else { 0 };
    // Without the right, the kernel would refuse memory from here on.
    let may_lock = may_lock_memory();
    // SAFETY: plain system calls.
    unsafe {
        note("PR_SET_IO_FLUSHER", libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0));
        if may_lock {
            note("mlockall", libc::mlockall(current | libc::MCL_FUTURE));
        }
        // A sleep then ends as soon as the timer fires.
        note("PR_SET_TIMERSLACK", libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0));
    }
    if !may_lock {
        lacks.push("mlockall: CAP_IPC_LOCK is missing, and RLIMIT_MEMLOCK is limited".into());
    }
    lacks
}

/// True if this process may lock any amount of memory.
fn may_lock_memory() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    // SAFETY: an all-zero limit is valid, and the call fills it.
    let is_unlimited = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) == 0 && limit.rlim_cur == libc::RLIM_INFINITY
    };
    let has_capability = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let bits = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        bits.is_some_and(|bits| bits & (1 << CAP_IPC_LOCK) != 0)
    };
    is_unlimited || has_capability()
}

/// Serves until the connection is over. `ready` is called when the threads run.
pub fn serve<M: Medium>(device: Device, medium: &M, memory: Memory, ready: impl FnOnce()) -> io::Result<()> {
    for what in be_an_io_flusher(memory) {
        tracing::warn!("the device may be slow or block when memory is short: {what}");
    }
    let mut devices: Vec<Device> =
        (1..medium.threads()).map(|_| device.another()).collect::<io::Result<_>>()?;
    devices.push(device);
    let turns = if medium.waits() { None } else { Some(Turns::new(devices.len())?) };
    std::thread::scope(|scope| {
        for (index, device) in devices.into_iter().enumerate() {
            let turns = turns.as_ref();
            // Before the device appears, so that they are present.
            let (mut buffer, mut out) = (vec![1; REQUEST_BYTES_MAX], filled());
            std::thread::Builder::new().name("medium".into()).stack_size(STACK_BYTES).spawn_scoped(
                scope,
                move || {
                    let serve = |request: &[u8]| serve_one(&device, medium, request, &mut out);
                    let served = match turns {
                        Some(turns) => turns.serve(index, &device, &mut buffer, serve),
                        None => serve_all(&device, &mut buffer, serve),
                    };
                    if let Err(e) = served {
                        tracing::error!("cannot read requests of the device: {e}");
                    }
                },
            )?;
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

/// Serves requests until the connection is over. The kernel wakes the calling thread for each.
fn serve_all(device: &Device, buffer: &mut [u8], mut serve: impl FnMut(&[u8])) -> io::Result<()> {
    loop {
        match device.read(buffer) {
            Ok(n) => serve(&buffer[..n]),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                Some(libc::ENODEV) => return Ok(()),
                _ => return Err(e),
            },
        }
    }
}

fn serve_one<M: Medium>(device: &Device, medium: &M, request: &[u8], out: &mut Body) {
    let Ok(rq) = Request::parse(request) else {
        tracing::error!("the kernel sent {} bytes that are no request", request.len());
        return;
    };
    if matches!(rq.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) {
        return;
    }
    out.clear();
    let error = match answer(medium, &rq, out) {
        Ok(()) => 0,
        Err(errno) => {
            out.clear();
            errno
        }
    };
    let (sent, bytes) = (Instant::now(), out.len());
    let written = device.write(out.message(rq.unique, -error));
    if bytes >= COPIED_BYTES_MIN {
        medium.copied(bytes, sent.elapsed().as_nanos() as u64);
    }
    if let Err(e) = written {
        if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
            tracing::error!("cannot answer a request of the device: {e}");
        }
    }
}

fn answer<M: Medium>(medium: &M, rq: &Request<'_>, out: &mut Body) -> Served {
    match rq.opcode {
        op::INIT => agree(rq, out),
        op::GETATTR | op::SETATTR => {
            protocol::put_attr_out(out, &stat(medium), ALWAYS);
            Ok(())
        }
        op::OPEN => {
            protocol::put_open_out(out, 0, fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES, 0);
            Ok(())
        }
        op::READ => read(medium, rq, out),
        op::WRITE => write(medium, rq, out),
        op::FALLOCATE => zero(medium, rq),
        op::FSYNC => medium.flush(),
        op::STATFS => {
            for v in [medium.bytes() / 4096, 0, 0, 1, 0] {
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

fn stat<M: Medium>(medium: &M) -> libc::stat {
    // SAFETY: an all-zero stat is valid.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    st.st_ino = medium.inode();
    st.st_mode = libc::S_IFREG | 0o600;
    st.st_nlink = 1;
    st.st_size = medium.bytes() as i64;
    st.st_blocks = st.st_size / 512;
    st.st_blksize = 4096;
    st
}

fn read<M: Medium>(medium: &M, rq: &Request<'_>, out: &mut Body) -> Served {
    let mut f = rq.fields;
    f.skip(8).map_err(malformed)?;
    let (offset, len) = (f.u64().map_err(malformed)?, f.u32().map_err(malformed)? as usize);
    if len > TRANSFER_BYTES_MAX {
        return Err(libc::EINVAL);
    }
    out.fill(len, |room| medium.read(offset, room).map(|()| room.len())).map(|_| ())
}

fn write<M: Medium>(medium: &M, rq: &Request<'_>, out: &mut Body) -> Served {
    let mut f = rq.fields;
    f.skip(8).map_err(malformed)?;
    let (offset, len) = (f.u64().map_err(malformed)?, f.u32().map_err(malformed)? as usize);
    f.skip(4 + 16).map_err(malformed)?;
    let from = f.bytes(len).map_err(malformed)?;
    out.u32(len as u32);
    out.u32(0);
    medium.write(offset, from)
}

/// A discard, or a request for zeros.
fn zero<M: Medium>(medium: &M, rq: &Request<'_>) -> Served {
    let mut f = rq.fields;
    f.skip(8).map_err(malformed)?;
    let (offset, bytes) = (f.u64().map_err(malformed)?, f.u64().map_err(malformed)?);
    let mode = f.u32().map_err(malformed)? as i32;
    match mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) {
        0 => Err(libc::EOPNOTSUPP),
        kind => medium.zero(offset, bytes, kind & libc::FALLOC_FL_PUNCH_HOLE != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a request as the kernel writes it.
    fn request(opcode: u32, fields: &[&[u8]]) -> Vec<u8> {
        let body = fields.concat();
        let len = (protocol::IN_HEADER_BYTES + body.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.resize(protocol::IN_HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    struct Refusing;

    impl Medium for Refusing {
        fn bytes(&self) -> u64 {
            8192
        }
        fn threads(&self) -> usize {
            1
        }
        fn read(&self, _: u64, _: &mut [u8]) -> Served {
            Err(libc::EIO)
        }
        fn write(&self, _: u64, _: &[u8]) -> Served {
            Err(libc::EROFS)
        }
        fn flush(&self) -> Served {
            Err(libc::EIO)
        }
        fn zero(&self, _: u64, _: u64, discards: bool) -> Served {
            Err(if discards { libc::EOPNOTSUPP } else { libc::ENOSPC })
        }
    }

    #[test]
    fn errors_of_the_medium_are_those_of_the_request() {
        let served = |opcode, fields: &[&[u8]]| {
            let bytes = request(opcode, fields);
            answer(&Refusing, &Request::parse(&bytes).unwrap(), &mut Body::new())
        };
        let (word, long) = ([0u8; 4], [0u8; 8]);
        let transfer = |len: u32| [&long[..], &long, &len.to_ne_bytes(), &[0; 20]].concat();
        assert_eq!(served(op::READ, &[&transfer(4096)]), Err(libc::EIO));
        assert_eq!(served(op::READ, &[&transfer(1 << 21)]), Err(libc::EINVAL), "longer than agreed");
        assert_eq!(served(op::WRITE, &[&transfer(4), &word]), Err(libc::EROFS));
        assert_eq!(served(op::WRITE, &[&transfer(8), &word]), Err(libc::EINVAL), "shorter than it says");
        assert_eq!(served(op::FSYNC, &[]), Err(libc::EIO));
        let mode = |mode: i32| served(op::FALLOCATE, &[&long, &long, &long, &mode.to_ne_bytes(), &word]);
        assert_eq!(mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE), Err(libc::EOPNOTSUPP));
        assert_eq!(mode(libc::FALLOC_FL_ZERO_RANGE), Err(libc::ENOSPC));
        assert_eq!(mode(0), Err(libc::EOPNOTSUPP));
        assert_eq!(served(op::LOOKUP, &[]), Err(libc::ENOSYS));
    }
}
