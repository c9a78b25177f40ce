//! Serves a FUSE connection: negotiates with the kernel, then each thread reads a request, serves it, and replies.
//!
//! Each thread has a descriptor of its own (`FUSE_DEV_IOC_CLONE`), and a reply is written to the descriptor that its
//! request was read from. `serving_threads` decides which thread reads. A lock request may wait without limit, so it
//! waits on a thread of its own (`locks`). The threads end when the file system is unmounted or the connection
//! aborted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use forebay_register::backing;
use forebay_types::{Code, Error, Result};

use crate::adaptive_spin::AdaptiveSpin;
use crate::errno::Errno;
use crate::files::TRANSFER_BYTES_MAX;
use crate::filesystem::{DataPath, FileSystem, Outcome};
use crate::registrar::{Helper, Registrar};
use crate::serving_threads::{Duty, ServingThreads};
use crate::sharing::{self, Rounds};
use crate::splice::{self, Pipe};
use crate::waiting::WaitsFor;
use forebay_fuse::protocol::{init, op, Body, Request, MAJOR, MINOR, MINOR_OF_EPOCHS};
use forebay_fuse::Device;

/// Size of the largest request: a write with its headers.
const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;
/// Background requests, for which no program waits, that the kernel may have outstanding.
const BACKGROUND_MAX: u16 = 64;
/// From this many on the kernel treats the connection as congested.
const CONGESTED_AT: u16 = 48;
/// Oldest minor version that is supported: Linux 5.4 has every feature that the mount cannot do without.
const MINOR_MIN: u32 = 31;
/// The mount's own depth in a stack of file systems: the backing files' file system must not be stacked itself.
const STACK_DEPTH: u32 = 1;

/// The result of the negotiation with the kernel.
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
    /// Negotiates with the kernel, then serves requests by up to `threads` threads. With `no_passthrough` data is
    /// served by requests even where the kernel could serve it.
    pub fn start(fs: &Arc<FileSystem>, threads: usize, no_passthrough: bool) -> Result<Session> {
        let agreement = agree(fs, no_passthrough)?;
        // A clone needs an open of the device, which a user whose connection the helper opened may lack the permission
        // for.
        let clones: Vec<Device> = (1..threads).map_while(|_| fs.device.another().ok()).collect();
        let threads = clones.len() + 1;
        if threads == 1 {
            tracing::info!(
                "the mount is served by one thread, as the FUSE connection cannot be opened again"
            );
        }
        let devices = std::iter::once(Arc::clone(&fs.device)).chain(clones.into_iter().map(Arc::new));
        let (mut started, spin) = (Vec::new(), Arc::new(AdaptiveSpin::new()));
        let serving = Arc::new(ServingThreads::new(threads));
        let rounds = Arc::new(Rounds::new(threads));
        for (number, device) in devices.enumerate() {
            let (fs, spin, rounds, serving) =
                (Arc::clone(fs), Arc::clone(&spin), Arc::clone(&rounds), Arc::clone(&serving));
            let thread = std::thread::Builder::new()
                .name(format!("fuse-{number}"))
                .spawn(move || {
                    let (buffer, out) = (vec![0; REQUEST_BYTES_MAX], Body::new());
                    let mut server = Server {
                        fs: &fs,
                        device: &device,
                        spin: &spin,
                        serving: &serving,
                        buffer,
                        out,
                        pipe: None,
                        waits: true,
                    };
                    server.run(&|| rounds.turn(number));
                })
                .map_err(failed("cannot start a thread"))?;
            started.push(thread);
        }
        // When invalidations take long, the daemon uses an epoch instead. A kernel without epochs may cache nothing.
        if agreement.minor >= MINOR_OF_EPOCHS {
            sharing::listen(fs, &rounds)?;
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

/// The state of one serving thread: its descriptor, and buffers for requests and replies.
struct Server<'a> {
    fs: &'a Arc<FileSystem>,
    device: &'a Arc<Device>,
    spin: &'a AdaptiveSpin,
    serving: &'a ServingThreads,
    buffer: Vec<u8>,
    out: Body,
    /// For replies to large reads. Made with the first of them.
    pipe: Option<Pipe>,
    /// Reads from the descriptor block until there is a request.
    waits: bool,
}

/// The connection is over.
struct Over;

impl Server<'_> {
    fn set_waiting(&mut self, waits: bool) {
        if self.waits != waits {
            self.device.set_waiting(waits);
            self.waits = waits;
        }
    }

    /// Reads once. None when there is no request, or the kernel withdrew it.
    fn read(&mut self) -> std::result::Result<Option<usize>, Over> {
        match self.device.read(&mut self.buffer) {
            Ok(n) => Ok(Some(n)),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => Ok(None),
                Some(libc::ENODEV) => Err(Over),
                _ => {
                    tracing::error!("cannot read requests of the mount: {e}");
                    Err(Over)
                }
            },
        }
    }

    /// Polls for a request for as long as that pays. The flag is true if the first read found it.
    fn look(&mut self) -> std::result::Result<Option<(usize, bool)>, Over> {
        self.set_waiting(false);
        if let Some(n) = self.read()? {
            return Ok(Some((n, true)));
        }
        let spin = self.spin;
        match spin.look(|| self.read().transpose()) {
            Some(found) => found.map(|n| Some((n, false))),
            None => Ok(None),
        }
    }

    /// Polls for a request, then sleeps until there is one.
    fn wait(&mut self) -> std::result::Result<(usize, bool), Over> {
        if let Some(found) = self.look()? {
            return Ok(found);
        }
        self.set_waiting(true);
        let asleep = Instant::now();
        loop {
            if let Some(n) = self.read()? {
                self.spin.slept(asleep.elapsed());
                return Ok((n, false));
            }
        }
    }

    /// Serves until the connection is over.
    fn run(&mut self, turn: &impl Fn()) {
        loop {
            let done = match self.serving.duty() {
                Duty::Over => return,
                Duty::Leader(term) => self.lead(term, turn),
                Duty::Helper => self.help(turn),
            };
            if let Err(Over) = done {
                return self.serving.end();
            }
        }
    }

    fn lead(&mut self, term: u32, turn: &impl Fn()) -> std::result::Result<(), Over> {
        let mut at_once = 0;
        while self.serving.is_leader(term) {
            let (n, found_at_once) = self.wait()?;
            at_once = if found_at_once { at_once + 1 } else { 0 };
            self.serving.found_at_once(at_once);
            self.serving.begins(term);
            self.serve(n, turn);
            self.serving.ends(term);
        }
        Ok(())
    }

    fn help(&mut self, turn: &impl Fn()) -> std::result::Result<(), Over> {
        self.set_waiting(false);
        while let Some(n) = self.read()? {
            self.serve(n, turn);
        }
        self.serving.helped();
        Ok(())
    }

    /// Serves the request in the first `n` bytes of the buffer.
    fn serve(&mut self, n: usize, turn: &impl Fn()) {
        let Ok(rq) = Request::parse(&self.buffer[..n]) else {
            tracing::error!("the kernel sent {n} bytes that are no request");
            return;
        };
        turn();
        match self.fs.waits_for(&rq) {
            None => answer(self.fs, self.device, &rq, &mut self.out, &mut self.pipe),
            Some(what) => hand_over(self.fs, self.device, what, rq.unique, self.buffer[..n].to_vec()),
        }
        turn();
    }
}

/// Serves a request in a thread of its own, because it may wait for a backing store.
fn hand_over(fs: &Arc<FileSystem>, device: &Arc<Device>, what: WaitsFor, unique: u64, message: Vec<u8>) {
    let (fs_too, device_too, device) = (Arc::clone(fs), Arc::clone(device), Arc::clone(device));
    let serve = move || {
        if let Ok(rq) = Request::parse(&message) {
            answer(&fs_too, &device_too, &rq, &mut Body::new(), &mut None);
        }
    };
    let fail = move |Errno(error)| reply(&device, &mut Body::new(), unique, error);
    fs.waiting.hand_over(what, serve, fail);
}

/// Serves a request and replies.
fn answer(
    fs: &Arc<FileSystem>,
    device: &Arc<Device>,
    rq: &Request<'_>,
    out: &mut Body,
    pipe: &mut Option<Pipe>,
) {
    out.clear();
    let outcome = match rq.opcode {
        op::SETLK | op::SETLKW => {
            let (device, unique) = (Arc::clone(device), rq.unique);
            fs.setlk(rq, rq.opcode == op::SETLKW, move |error| {
                reply(&device, &mut Body::new(), unique, error)
            })
        }
        op::INTERRUPT => interrupt(fs, rq),
        op::READ => {
            let unique = rq.unique;
            let send = |file: BorrowedFd<'_>, range| splice::answer_read(pipe, device, file, range, unique);
            fs.read(rq, out, send)
        }
        op::UNLINK => fs.unlink(rq, || reply(device, &mut Body::new(), rq.unique, 0)),
        _ => fs.serve(rq, out),
    };
    match outcome {
        Ok(Outcome::Reply) => reply(device, out, rq.unique, 0),
        Ok(Outcome::Silence) => {}
        Err(Errno(error)) => {
            out.clear();
            reply(device, out, rq.unique, error);
        }
    }
}

/// An INTERRUPT has no reply.
fn interrupt(fs: &FileSystem, rq: &Request<'_>) -> std::result::Result<Outcome, Errno> {
    let mut f = rq.fields;
    fs.locks.interrupt(f.u64()?);
    Ok(Outcome::Silence)
}

fn reply(device: &Device, out: &mut Body, unique: u64, error: i32) {
    if let Err(e) = device.write(out.message(unique, -error)) {
        // The kernel withdrew the request, or the connection is gone.
        if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
            tracing::error!("cannot answer a request of the mount: {e}");
        }
    }
}

/// Answers INIT.
fn agree(fs: &FileSystem, no_passthrough: bool) -> Result<Agreement> {
    let what = "cannot agree with the kernel about the mount";
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let n = loop {
        match fs.device.read(&mut buffer) {
            Ok(n) => break n,
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(e) => return Err(failed(what)(e)),
        }
    };
    let strange = |_| Error::new(Code::Malformed, what).why("cannot parse its INIT request");
    let rq = Request::parse(&buffer[..n]).map_err(strange)?;
    let mut f = rq.fields;
    let mut word = || f.u32().map_err(strange);
    let (major, minor, readahead) = (word()?, word()?, word()?);
    let mut offered = u64::from(word()?);
    if rq.opcode != op::INIT || major != MAJOR || minor < MINOR_MIN {
        return Err(Error::new(Code::NotSupported, what)
            .why(format!("it has version {major}.{minor} of the FUSE protocol"))
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
    let data = if fs.pool.is_paced() {
        DataPath::Requests("the pool emulates a medium, so that each read and write waits".into())
    } else if no_passthrough {
        DataPath::Requests("requested with --no-passthrough".into())
    } else if agreed & init::PASSTHROUGH == 0 {
        DataPath::Requests(
            "this kernel has no FUSE passthrough (Linux 6.9 with CONFIG_FUSE_PASSTHROUGH)".into(),
        )
    } else {
        try_passthrough(fs)
    };
    Ok(Agreement { minor, data })
}

/// Registers a file, to find out whether that is permitted and which process can do it.
fn try_passthrough(fs: &FileSystem) -> DataPath {
    if !fs.pool.takes_files() {
        return DataPath::Requests("this node has no target, so all files lie on others".into());
    }
    let file = match fs.pool.make_temporary(0) {
        Ok(file) => file,
        Err(code) => {
            return DataPath::Requests(format!(
                "cannot create a test file for passthrough on the target: {code}"
            ));
        }
    };
    let refused = |e: io::Error| match e.raw_os_error() {
        Some(libc::ELOOP) => {
            "the target is on a stacked file system, which passthrough does not support".to_owned()
        }
        _ => format!("the kernel refuses passthrough: {e}"),
    };
    match backing::register(fs.device.as_fd(), file.as_fd()) {
        Ok(id) => {
            backing::unregister(fs.device.as_fd(), id);
            let _ = fs.registrar.set(Arc::new(Registrar::Itself(Arc::clone(&fs.device))));
            DataPath::Passthrough
        }
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            match forebay_register::Registrar::find(fs.device.as_fd()) {
                Err(why) => {
                    DataPath::Requests(format!("passthrough needs CAP_SYS_ADMIN, or a helper ({why})"))
                }
                Ok(helper) => match Helper::new(&fs.device, helper, file) {
                    Ok(helper) => {
                        let _ = fs.registrar.set(Arc::new(Registrar::Helper(helper)));
                        DataPath::PassthroughByHelper
                    }
                    Err(e) => DataPath::Requests(format!("by the helper: {}", refused(e))),
                },
            }
        }
        Err(e) => DataPath::Requests(refused(e)),
    }
}
