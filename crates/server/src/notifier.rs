//! Notifiers: processes that write notifications of changes to a mount's FUSE connection. No other process of the pool
//! writes notifications.
//!
//! Writing a notification of a name waits in the kernel for the lock of the name's directory, and no signal ends that
//! wait. A program that uses the directory through the mount holds the lock until `forebay-mount` answers it, and
//! `forebay-mount` may wait for the worker. If the worker wrote notifications, a killed worker with a thread in such a
//! wait would not end before its successor had answered, and the supervisor starts no successor before that
//! (docs/decisions/0035). No process waits for a notifier, which has no lock, no shard and no ring. So it may block in
//! the kernel for any time.
//!
//! The supervisor starts and reaps notifiers. The worker has two at a time: one for names and one for attributes. Each
//! has one thread, because the descriptors of a process stay open while one of its threads is blocked in the kernel.
//! The worker detects that a notifier was killed when its socket closes; while the notifier is blocked in the kernel,
//! this is late.
//!
//! The worker sends a first message with descriptors, then one packet for each change: its number, then FUSE messages.
//! The notifier writes the messages to the connection, stores the packet's number in shared memory, and rings the shard
//! thread's doorbell. It ends when the worker closes its end of the socket or dies.
//!
//! Tests: here, `worker/notifier.rs`, `crates/mount/tests/worker_killed.rs`.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use forebay_ring::{memfd_sealed, Doorbell, Mapping, Seal};
use forebay_types::{Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::store::{self, FdStore, Message, KIND_HANDED};
use forebay_sys::signals::SignalMask;

/// Bytes of the memory that worker and notifier share.
const SHARED_BYTES: usize = 4096;
/// Byte offsets in the shared memory: the number of the last written packet, and of the last packet that need not be
/// written.
const WRITTEN: usize = 0;
const MOOT: usize = 64;
/// Maximum bytes of a packet: a rename's messages need less than 2 KiB.
const PACKET_BYTES_MAX: usize = 16 * 1024;

// --- the process

/// Runs a notifier until the worker's end of `socket` is closed.
pub(crate) fn serve(socket: BorrowedFd<'_>) {
    let Ok(Some(Message::Handed(fds))) = store::receive(socket, RecvFlags::empty()) else { return };
    let Ok([device, doorbell, shared]) = <[OwnedFd; 3]>::try_from(fds) else { return };
    let opened = Doorbell::open(doorbell.as_fd())
        .and_then(|doorbell| Ok((doorbell, Mapping::new(shared.as_fd(), SHARED_BYTES, true)?)));
    let (doorbell, shared) = match opened {
        Ok(both) => both,
        Err(e) => return tracing::error!("a notifier cannot share memory with its worker: {e}"),
    };
    let mut packet = vec![0; PACKET_BYTES_MAX];
    loop {
        let bytes = match rustix::net::recv(socket, &mut packet, RecvFlags::empty()) {
            Ok((0, _)) => return,
            Ok((bytes, _)) => bytes,
            Err(Errno::INTR) => continue,
            Err(_) => return,
        };
        let Some((number, mut messages)) = packet[..bytes].split_first_chunk() else { return };
        let number = u64::from_ne_bytes(*number);
        while let Some(length) = messages.first_chunk() {
            if number <= shared.word64(MOOT).load(Ordering::Acquire) {
                break;
            }
            let Some((message, rest)) = messages.split_at_checked(u32::from_ne_bytes(*length) as usize)
            else {
                return tracing::error!("the worker sent a notification that is cut off");
            };
            // Errors are ignored. ENOENT: the kernel does not cache the inode or name. If the connection has ended, the
            // mount notices it.
            let _ = rustix::io::write(&device, message);
            messages = rest;
        }
        shared.word64(WRITTEN).store(number, Ordering::SeqCst);
        doorbell.ring();
    }
}

// --- the supervisor's side

/// Notifiers that were started and are not reaped yet.
#[derive(Debug, Default)]
pub(crate) struct Notifiers {
    children: Vec<Child>,
}

impl Notifiers {
    /// Starts this program as a notifier with `socket`, the peer of the worker's socket. On failure the socket is
    /// closed, which the worker detects.
    pub(crate) fn start(&mut self, socket: &OwnedFd) {
        let number = socket.as_raw_fd();
        let mut command = Command::new("/proc/self/exe");
        command.arg0("forebayd").args([OsString::from("--notifier"), number.to_string().into()]);
        command.stdin(std::process::Stdio::null());
        // SAFETY: between fork and exec only system calls are made that are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                SignalMask::empty().set();
                if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        match command.spawn() {
            Ok(child) => self.children.push(child),
            Err(e) => tracing::error!("cannot start a notifier: {e}"),
        }
    }

    /// Reaps notifiers that have ended; never waits.
    pub(crate) fn reap(&mut self) {
        self.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// True when all notifiers have ended.
    pub(crate) fn is_empty(&self) -> bool {
        self.children.is_empty()
    }
}

// --- the worker's side

/// Starts notifiers for the worker.
#[derive(Debug)]
pub(crate) struct Starter {
    doorbell: OwnedFd,
    /// Without a supervisor, in a simulation, a notifier is a thread.
    supervisor: Option<FdStore>,
}

impl Starter {
    pub(crate) fn new(doorbell: OwnedFd, supervisor: Option<FdStore>) -> Starter {
        Starter { doorbell, supervisor }
    }

    /// Makes the supervisor start the mover. Nothing is to be done without a supervisor, in a simulation.
    pub(crate) fn start_mover(&self) {
        if let Some(Err(e)) = self.supervisor.as_ref().map(FdStore::start_mover) {
            tracing::error!("{e}");
        }
    }

    /// Starts a notifier for `device` and returns the socket to it.
    fn start(&self, device: BorrowedFd<'_>, shared: BorrowedFd<'_>) -> Result<OwnedFd> {
        let what = "cannot start a notifier";
        let (ours, theirs) = store::pair()?;
        let fds = [device, self.doorbell.as_fd(), shared];
        store::send(ours.as_fd(), KIND_HANDED, b"", &fds, SendFlags::DONTWAIT)
            .map_err(|e| Error::io(what, &e.into()))?;
        match &self.supervisor {
            Some(supervisor) => supervisor.start_notifier(theirs.as_fd())?,
            None => {
                let thread = std::thread::Builder::new().name("notifier".into());
                thread.spawn(move || serve(theirs.as_fd())).map_err(|e| Error::io(what, &e))?;
            }
        }
        Ok(ours)
    }
}

/// One of the worker's two notifiers, and the packets that it has not written yet.
#[derive(Debug)]
pub(crate) struct Notifier {
    device: Arc<OwnedFd>,
    starter: Arc<Starter>,
    socket: OwnedFd,
    shared: Mapping,
    shared_fd: OwnedFd,
    /// Packets that the notifier may not have written yet, oldest first; the first `sent` of them were sent.
    packets: VecDeque<(u64, Vec<u8>)>,
    sent: usize,
}

impl Notifier {
    /// Starts a notifier.
    pub(crate) fn new(device: Arc<OwnedFd>, starter: Arc<Starter>) -> Result<Notifier> {
        let (shared_fd, shared) = memfd_sealed(c"forebay-notifier", SHARED_BYTES, Seal::Size)
            .map_err(|e| Error::io("cannot share memory with a notifier", &e))?;
        let socket = starter.start(device.as_fd(), shared_fd.as_fd())?;
        Ok(Notifier { device, starter, socket, shared, shared_fd, packets: VecDeque::new(), sent: 0 })
    }

    /// Queues these messages as one packet, with a number above all earlier ones. Never waits.
    pub(crate) fn notify<'a>(&mut self, number: u64, messages: impl Iterator<Item = Vec<u8>> + 'a) {
        let mut packet = number.to_ne_bytes().to_vec();
        messages.for_each(|message| packet.extend(message));
        debug_assert!(packet.len() <= PACKET_BYTES_MAX);
        self.packets.push_back((number, packet));
        self.send();
    }

    /// Sends as many packets as the socket has room for. The rest follow when the notifier has written some.
    fn send(&mut self) {
        while let Some((_, packet)) = self.packets.get(self.sent) {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, packet, flags) {
                Ok(_) => self.sent += 1,
                Err(Errno::INTR) => {}
                // The socket is full, or closed, which `revive` handles.
                Err(_) => return,
            }
        }
    }

    /// The number of the last packet that the notifier has written.
    pub(crate) fn written(&self) -> u64 {
        self.shared.word64(WRITTEN).load(Ordering::SeqCst)
    }

    /// True when the notifier has written packets that [`Notifier::collect_written`] has not removed yet.
    #[inline]
    pub(crate) fn has_written(&self) -> bool {
        self.packets.front().is_some_and(|(number, _)| *number <= self.written())
    }

    /// Removes the packets that were written and sends more; returns the number of the last written packet.
    pub(crate) fn collect_written(&mut self) -> u64 {
        let written = self.written();
        while self.packets.pop_front_if(|(number, _)| *number <= written).is_some() {
            self.sent = self.sent.saturating_sub(1);
        }
        self.send();
        written
    }

    /// Makes the notifier skip packets up to this number.
    pub(crate) fn make_moot(&self, number: u64) {
        self.shared.word64(MOOT).store(number, Ordering::Release);
    }

    /// True while there is a packet that may not be written yet.
    pub(crate) fn is_behind(&self) -> bool {
        !self.packets.is_empty()
    }

    /// The number up to which the notifier skips packets.
    pub(crate) fn moot(&self) -> u64 {
        self.shared.word64(MOOT).load(Ordering::Acquire)
    }

    /// If this notifier was killed, starts another, which writes the remaining packets.
    pub(crate) fn revive(&mut self) {
        let mut ended = [PollFd::new(&self.socket, PollFlags::empty())];
        if !matches!(poll(&mut ended, Some(&Timespec::default())), Ok(1)) {
            return;
        }
        tracing::warn!("a notifier of the mount has ended: another is started");
        match self.starter.start(self.device.as_fd(), self.shared_fd.as_fd()) {
            Ok(socket) => (self.socket, self.sent) = (socket, 0),
            Err(e) => return tracing::error!("{e}"),
        }
        self.send();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::{Duration, Instant};

    fn message(text: &str) -> Vec<u8> {
        let mut message = (4 + text.len() as u32).to_ne_bytes().to_vec();
        message.extend(text.as_bytes());
        message
    }

    /// A notifier that runs as a thread and writes to a pipe.
    fn notifier() -> (Notifier, std::fs::File) {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (doorbell, _) = Doorbell::create().unwrap();
        let starter = Arc::new(Starter::new(doorbell, None));
        (Notifier::new(Arc::new(write), starter).unwrap(), read.into())
    }

    fn wait_for(mut so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !so() {
            assert!(Instant::now() < end, "not in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn packets_beyond_what_the_socket_holds_are_all_written_in_order() {
        let (mut notifier, mut pipe) = notifier();
        // More packets than the socket and the pipe can hold together.
        for number in 1..=5000 {
            notifier.notify(number, [message(&format!("{number:064}"))].into_iter());
        }
        assert!(notifier.sent < notifier.packets.len(), "all fitted: the test shows nothing");
        let reads = std::thread::spawn(move || {
            for number in 1..=5000 {
                let mut read = [0; 68];
                pipe.read_exact(&mut read).unwrap();
                assert_eq!(read[4..], *format!("{number:064}").as_bytes());
            }
        });
        wait_for(|| notifier.collect_written() == 5000);
        assert!(notifier.packets.is_empty() && notifier.sent == 0);
        reads.join().unwrap();
    }

    #[test]
    fn moot_packets_are_not_written_and_count_as_written() {
        let (mut notifier, mut pipe) = notifier();
        notifier.make_moot(2);
        for number in 1..=3 {
            notifier.notify(number, [message("a"), message("b")].into_iter());
        }
        wait_for(|| notifier.collect_written() == 3);
        let mut read = [0; 64];
        assert_eq!(pipe.read(&mut read).unwrap(), 10);
    }

    #[test]
    fn notifier_that_has_ended_is_followed_by_one_that_writes_what_was_left() {
        let (mut notifier, mut pipe) = notifier();
        notifier.notify(1, [message("one")].into_iter());
        wait_for(|| notifier.collect_written() == 1);
        rustix::net::shutdown(&notifier.socket, rustix::net::Shutdown::Both).unwrap();
        notifier.notify(2, [message("two")].into_iter());
        assert_eq!(notifier.collect_written(), 1);
        notifier.revive();
        wait_for(|| notifier.collect_written() == 2);
        let mut read = [0; 64];
        assert_eq!(pipe.read(&mut read).unwrap(), 14);
        // A notifier that is alive is not replaced.
        let socket = notifier.socket.as_raw_fd();
        notifier.revive();
        assert_eq!(notifier.socket.as_raw_fd(), socket);
    }
}
