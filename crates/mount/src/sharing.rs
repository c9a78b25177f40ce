//! Receives from the daemon whether other programs use the pool, on a thread of its own.
//!
//! While no other program does, the kernel may cache attributes of regular files (`cache_rules`). When another program
//! attaches, the thread first stops replying with attributes that the kernel may keep, waits for replies that are on
//! their way, and invalidates what the kernel has cached. Only then does the daemon admit that program. After the death
//! of a worker the mount is announced to the next one; until that has succeeded, other programs count as present.
//!
//! The mount is also announced again when this process has attached anew, for example after a call without an answer.
//! The daemon writes invalidations for the changes of every session but the announced one, and an invalidation for the
//! mount's own change would wait for the request that made it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_types::{Error, Result};

use crate::filesystem::FileSystem;

/// Pause between two attempts to announce the mount.
const ANNOUNCE_AGAIN: Duration = Duration::from_millis(50);
/// Pause before invalidations are repeated for inodes that the kernel does not know yet.
const UNREAD_AGAIN: Duration = Duration::from_micros(500);
/// Longest wait for a request that is being served. A request that takes longer replies without attributes.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// How often the thread checks that the announced session is still this process's session.
const SESSION_LOOK_MS: i32 = 500;
/// The daemon's message that no other program has files open.
const ALONE: u8 = 0;

/// A count for each serving thread: odd while the thread serves a request.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    threads: Vec<AtomicU64>,
}

impl Rounds {
    pub(crate) fn new(threads: usize) -> Rounds {
        Rounds { threads: (0..threads).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Called when a thread begins to serve a request, and when it has answered it.
    pub(crate) fn turn(&self, thread: usize) {
        self.threads[thread].fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until every request in progress has been answered.
    fn pass(&self) {
        let end = Instant::now() + ROUND_MAX;
        for thread in &self.threads {
            let before = thread.load(Ordering::SeqCst);
            while before & 1 == 1 && thread.load(Ordering::SeqCst) == before && Instant::now() < end {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

impl FileSystem {
    /// Other programs may have files open from now on: invalidates the attributes that the kernel has cached.
    fn expect_sharing(&self, rounds: &Rounds) {
        if !self.cache_rules.set_alone(false) {
            return;
        }
        rounds.pass();
        // All inodes, also directories: the kernel may not have read yet the replies that contain some of them.
        let mut inos = self.nodes.numbers(|_| true);
        let end = Instant::now() + ROUND_MAX;
        loop {
            inos.retain(|ino| self.nodes.seen(*ino).is_some() && !self.invalidate_attributes(*ino));
            if inos.is_empty() {
                return;
            }
            if Instant::now() >= end {
                tracing::warn!("the kernel did not read replies about {} inodes in time", inos.len());
                return;
            }
            std::thread::sleep(UNREAD_AGAIN);
        }
    }

    /// Invalidates the kernel's attributes of an inode. False when the kernel does not know the inode, or not yet.
    pub(crate) fn invalidate_attributes(&self, ino: u64) -> bool {
        let note = forebay_sys::fuse::invalidate_attributes(self.node(forebay_types::Ino(ino)));
        self.device.write(&note).map_or_else(|e| e.raw_os_error() != Some(libc::ENOENT), |()| true)
    }
}

/// Announces the mount, and receives the daemon's messages on a thread of its own until the process ends.
pub(crate) fn listen(fs: &Arc<FileSystem>, rounds: &Arc<Rounds>) -> Result<()> {
    let what = "cannot have the kernel told of changes";
    // The session is read first: if it ends meanwhile, the next check announces its successor.
    let announce = |fs: &FileSystem| {
        let session = fs.pool.session();
        fs.pool.announce_mount(fs.device.as_fd()).map(|(socket, alone)| (socket, session, alone))
    };
    let (mut socket, mut session, alone) = announce(fs).map_err(|code| Error::new(code, what))?;
    fs.cache_rules.set_told(true);
    fs.cache_rules.set_alone(alone);
    let (fs, rounds) = (Arc::clone(fs), Arc::clone(rounds));
    let thread = std::thread::Builder::new().name("company".into()).stack_size(256 * 1024);
    let listens = move || loop {
        hear(&fs, &rounds, &socket, session);
        fs.expect_sharing(&rounds);
        (socket, session) = loop {
            match announce(&fs) {
                Ok((socket, session, alone)) => {
                    fs.cache_rules.set_alone(alone);
                    break (socket, session);
                }
                Err(code) => {
                    tracing::debug!("cannot announce the mount to the daemon: {code}");
                    std::thread::sleep(ANNOUNCE_AGAIN);
                }
            }
        };
    };
    thread.spawn(listens).map_err(|e| Error::io(what, &e))?;
    Ok(())
}

/// Handles the daemon's messages until its end of the socket closes, or this process has another session than
/// `session`.
fn hear(fs: &FileSystem, rounds: &Rounds, socket: &OwnedFd, session: Option<u64>) {
    let mut word = [0u8];
    loop {
        let mut ready = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, as said. After a wait that failed or was interrupted, the receive waits instead.
        if unsafe { libc::poll(&mut ready, 1, SESSION_LOOK_MS) } == 0 {
            match fs.pool.session() {
                now if now == session => continue,
                _ => return,
            }
        }
        // SAFETY: the buffer is one byte, as said.
        let n = unsafe { libc::recv(socket.as_raw_fd(), word.as_mut_ptr().cast(), 1, 0) };
        match n {
            1 if word[0] == ALONE => {
                fs.cache_rules.set_alone(true);
            }
            1 => {
                fs.expect_sharing(rounds);
                // SAFETY: as above. The next receive notices a daemon that is gone.
                unsafe { libc::send(socket.as_raw_fd(), word.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
            }
            n if n < 0 => match io::Error::last_os_error().kind() {
                // The socket has a receive timeout.
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut => {}
                _ => return,
            },
            _ => return,
        }
    }
}
