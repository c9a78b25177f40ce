//! A FUSE connection being served: the agreement at its start, then threads that each read a request, serve it, and reply.
//!
//! Each thread has a descriptor of its own (`FUSE_DEV_IOC_CLONE`): a reply goes where its request came from. No thread
//! waits for another; what may wait long, a lock, has a thread of its own. The threads end when the file system is
//! unmounted or the connection aborted.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use forebay_types::{Code, Error, Result};

use crate::company::{self, Rounds};
use crate::device::Device;
use crate::errno::Errno;
use crate::files::TRANSFER_BYTES_MAX;
use crate::filesystem::{DataPath, FileSystem, Outcome};
use crate::patience::Patience;
use crate::protocol::{init, op, Body, Request, MAJOR, MINOR, MINOR_OF_EPOCHS};

/// Room for the largest request: a write with its headers.
const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;
/// Requests that the kernel may have outstanding of the kind nobody waits for.
const BACKGROUND_MAX: u16 = 64;
/// From so many on the kernel calls the connection congested.
const CONGESTED_AT: u16 = 48;
/// Oldest protocol that is spoken: that of Linux 5.4 has all that cannot be done without.
const MINOR_MIN: u32 = 31;
/// A passthrough file's own stack of file systems: one below us, none below that.
const STACK_DEPTH: u32 = 1;
/// Pause before the kernel is told to interrupt again what is not known, or not known yet.
const INTERRUPT_AGAIN: std::time::Duration = std::time::Duration::from_millis(1);

/// What was agreed with the kernel.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// The kernel's minor protocol version.
    pub minor: u32,
    /// How data is served.
    pub data: DataPath,
}

/// A connection that is being served.
#[derive(Debug)]
pub struct Session {
    threads: Vec<JoinHandle<()>>,
    /// What was agreed at its start.
    pub agreement: Agreement,
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> Error + '_ {
    move |e| Error::io(what, &e)
}

impl Session {
    /// Answers the kernel's first request, and serves the others by `threads` threads.
    pub fn start(fs: &Arc<FileSystem>, threads: usize) -> Result<Session> {
        let agreement = agree(fs)?;
        fs.passes.store(agreement.data == DataPath::Passthrough, Ordering::Relaxed);
        let threads = threads.max(1);
        let (mut started, patience) = (Vec::new(), Arc::new(Patience::new()));
        let rounds = Arc::new(Rounds::new(threads));
        for number in 0..threads {
            let device = if number == 0 {
                Arc::clone(&fs.device)
            } else {
                Arc::new(fs.device.another().map_err(failed("cannot open the FUSE connection again"))?)
            };
            let (fs, patience, rounds) = (Arc::clone(fs), Arc::clone(&patience), Arc::clone(&rounds));
            let thread = std::thread::Builder::new()
                .name(format!("fuse-{number}"))
                .spawn(move || serve(&fs, &device, &patience, || rounds.turn(number)))
                .map_err(failed("cannot start a thread"))?;
            started.push(thread);
        }
        // A kernel without epochs, which are the way out when telling takes long, believes nothing.
        if agreement.minor >= MINOR_OF_EPOCHS {
            company::listen(fs, &rounds)?;
        }
        Ok(Session { threads: started, agreement })
    }

    /// True when the file system is unmounted.
    pub fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits until the file system is unmounted.
    pub fn wait(self) {
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// Reads the next request: looks for it for as long as that pays, then sleeps.
fn next(device: &Device, patience: &Patience, waits: &mut bool, buffer: &mut [u8]) -> io::Result<usize> {
    let mut set = |wanted: bool| {
        if *waits != wanted {
            device.set_waiting(wanted);
            *waits = wanted;
        }
    };
    let found = patience.look(|| {
        set(false);
        match device.read(buffer) {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => None,
            result => Some(result),
        }
    });
    if let Some(result) = found {
        return result;
    }
    set(true);
    let asleep = Instant::now();
    let result = device.read(buffer);
    patience.slept(asleep.elapsed());
    result
}

/// Serves requests until the connection ends.
fn serve(fs: &Arc<FileSystem>, device: &Arc<Device>, patience: &Patience, turn: impl Fn()) {
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let mut out = Body::new();
    let mut waits = true;
    loop {
        let n = match next(device, patience, &mut waits, &mut buffer) {
            Ok(n) => n,
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => continue,
                Some(libc::ENODEV) => return,
                _ => {
                    tracing::error!("cannot read requests of the mount: {e}");
                    return;
                }
            },
        };
        let Ok(rq) = Request::parse(&buffer[..n]) else {
            tracing::error!("the kernel sent {n} bytes that are no request");
            continue;
        };
        turn();
        out.clear();
        let outcome = match rq.opcode {
            op::SETLKW => {
                let (device, unique) = (Arc::clone(device), rq.unique);
                fs.setlkw(&rq, move |error| reply(&device, &mut Body::new(), unique, error))
            }
            op::INTERRUPT => interrupt(fs, &rq),
            _ => fs.serve(&rq, &mut out),
        };
        match outcome {
            Ok(Outcome::Reply) => reply(device, &mut out, rq.unique, 0),
            Ok(Outcome::Silence) => {}
            Err(Errno(error)) => {
                out.clear();
                reply(device, &mut out, rq.unique, error);
            }
        }
        turn();
    }
}

/// An INTERRUPT has an answer only when it came too early.
fn interrupt(fs: &FileSystem, rq: &Request<'_>) -> std::result::Result<Outcome, Errno> {
    let mut f = rq.fields;
    if fs.locks.interrupt(f.u64()?) {
        return Ok(Outcome::Silence);
    }
    // A lock that is about to wait, perhaps. Of a request that is answered by then the kernel knows nothing.
    std::thread::sleep(INTERRUPT_AGAIN);
    Err(Errno(libc::EAGAIN))
}

fn reply(device: &Device, out: &mut Body, unique: u64, error: i32) {
    if let Err(e) = device.write(out.message(unique, -error)) {
        // The request was given up, or the connection is gone.
        if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
            tracing::error!("cannot answer a request of the mount: {e}");
        }
    }
}

/// Answers INIT.
fn agree(fs: &FileSystem) -> Result<Agreement> {
    let what = "cannot agree with the kernel about the mount";
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let n = loop {
        match fs.device.read(&mut buffer) {
            Ok(n) => break n,
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(e) => return Err(failed(what)(e)),
        }
    };
    let strange = |_| Error::new(Code::Malformed, what).why("its first request cannot be understood");
    let rq = Request::parse(&buffer[..n]).map_err(strange)?;
    let mut f = rq.fields;
    let mut word = || f.u32().map_err(strange);
    let (major, minor, readahead) = (word()?, word()?, word()?);
    let mut offered = u64::from(word()?);
    if rq.opcode != op::INIT || major != MAJOR || minor < MINOR_MIN {
        return Err(Error::new(Code::NotSupported, what)
            .why(format!("it speaks version {major}.{minor} of the FUSE protocol"))
            .cure("Linux 5.4 or later is needed"));
    }
    if offered & init::INIT_EXT != 0 {
        offered |= u64::from(word()?) << 32;
    }
    let wanted = init::ASYNC_READ
        | init::POSIX_LOCKS
        | init::ATOMIC_O_TRUNC
        | init::BIG_WRITES
        | init::FLOCK_LOCKS
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::HANDLE_KILLPRIV_V2
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP
        | init::PASSTHROUGH
        | init::NO_EXPORT_SUPPORT;
    let agreed = offered & wanted;
    let mut out = Body::new();
    for v in [MAJOR, MINOR.min(minor), readahead, agreed as u32] {
        out.u32(v);
    }
    out.u16(BACKGROUND_MAX);
    out.u16(CONGESTED_AT);
    out.u32(TRANSFER_BYTES_MAX as u32);
    out.u32(1); // times are exact to the nanosecond
    out.u16((TRANSFER_BYTES_MAX / 4096) as u16);
    out.u16(0);
    out.u32((agreed >> 32) as u32);
    out.u32(STACK_DEPTH);
    out.zeros(64 - 40);
    fs.device.write(out.message(rq.unique, 0)).map_err(failed(what))?;
    let data = if agreed & init::PASSTHROUGH == 0 {
        DataPath::Requests(
            "this kernel has no FUSE passthrough (Linux 6.9 with CONFIG_FUSE_PASSTHROUGH)".into(),
        )
    } else {
        try_passthrough(fs)
    };
    Ok(Agreement { minor, data })
}

/// Registers a file to see whether that is allowed.
fn try_passthrough(fs: &FileSystem) -> DataPath {
    let file = match fs.pool.make_temporary(0) {
        Ok(file) => file,
        Err(code) => {
            return DataPath::Requests(format!("the target makes no file to try passthrough with: {code}"))
        }
    };
    match fs.device.register(file.as_fd()) {
        Ok(id) => {
            fs.device.unregister(id);
            DataPath::Passthrough
        }
        Err(e) => DataPath::Requests(match e.raw_os_error() {
            Some(libc::EPERM) => "passthrough needs CAP_SYS_ADMIN".into(),
            Some(libc::ELOOP) => {
                "the target lies on a stacked file system, over which passthrough cannot go".into()
            }
            _ => format!("the kernel refuses passthrough: {e}"),
        }),
    }
}
