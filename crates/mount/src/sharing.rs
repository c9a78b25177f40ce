//! Word from the daemon whether others have files of the pool open, on a thread of its own.
//!
//! While nobody has, the kernel may keep attributes of regular files (`cache_rules`). When somebody comes, no more are
//! given out that last, replies that are on their way are waited for, and what was given is taken back, before the
//! daemon lets the newcomer in. A daemon whose worker died is told of the mount again; until it is, everybody counts as
//! company. So it is when this process has attached anew, as after a call that had no answer: changes by a session that
//! the daemon does not know as the mount's are told to the kernel, and each would wait for itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_types::{Error, Result};

use crate::filesystem::FileSystem;

/// Pause before the daemon is told again that does not answer.
const ANNOUNCE_AGAIN: Duration = Duration::from_millis(50);
/// Pause before the kernel is told again of inodes that it does not know yet.
const UNREAD_AGAIN: Duration = Duration::from_micros(500);
/// Longest wait for a request that is being served; one as slow answers with no attributes.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// How often it is made sure that the session which was announced is the process's.
const SESSION_LOOK_MS: i32 = 500;
/// The daemon's word that nobody else has files open.
const ALONE: u8 = 0;

/// What each serving thread is at: odd while it serves a request.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    threads: Vec<AtomicU64>,
}

impl Rounds {
    pub(crate) fn new(threads: usize) -> Rounds {
        Rounds { threads: (0..threads).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A thread begins to serve a request, or has answered it.
    pub(crate) fn turn(&self, thread: usize) {
        self.threads[thread].fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until every request that is being served now was answered.
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
    /// Others may have files open from now on.
    fn expect_sharing(&self, rounds: &Rounds) {
        if !self.cache_rules.set_alone(false) {
            return;
        }
        rounds.pass();
        // All of them: the kernel may not have read yet what it is told of some, directories too.
        let mut inos = self.nodes.numbers(|_| true);
        let end = Instant::now() + ROUND_MAX;
        loop {
            inos.retain(|ino| self.nodes.seen(*ino).is_some() && !self.invalidate_attributes(*ino));
            if inos.is_empty() {
                return;
            }
            if Instant::now() >= end {
                tracing::warn!("the kernel has not read in time what it was told of {} files", inos.len());
                return;
            }
            std::thread::sleep(UNREAD_AGAIN);
        }
    }

    /// The kernel is to ask again for an inode's attributes. False when it does not know the inode, or not yet.
    pub(crate) fn invalidate_attributes(&self, ino: u64) -> bool {
        let note = forebay_sys::fuse::invalidate_attributes(self.node(forebay_types::Ino(ino)));
        self.device.write(&note).map_or_else(|e| e.raw_os_error() != Some(libc::ENOENT), |()| true)
    }
}

/// Announces the mount, and listens on a thread of its own until the process ends.
pub(crate) fn listen(fs: &Arc<FileSystem>, rounds: &Arc<Rounds>) -> Result<()> {
    let what = "cannot have the kernel told of changes";
    // The session first: should it end meanwhile, the next look announces the next one.
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
                    tracing::debug!("the daemon cannot be told of the mount: {code}");
                    std::thread::sleep(ANNOUNCE_AGAIN);
                }
            }
        };
    };
    thread.spawn(listens).map_err(|e| Error::io(what, &e))?;
    Ok(())
}

/// Does what the daemon says until its end of the socket closes, or `session` is no longer this process's.
fn hear(fs: &FileSystem, rounds: &Rounds, socket: &OwnedFd, session: Option<u64>) {
    let mut word = [0u8];
    loop {
        let mut ready = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, as said. A wait that fails or was interrupted is followed by the receive's own.
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
                // SAFETY: as above. A daemon that is gone is noticed by the next look.
                unsafe { libc::send(socket.as_raw_fd(), word.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
            }
            n if n < 0 => match io::Error::last_os_error().kind() {
                // The socket has a time limit.
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut => {}
                _ => return,
            },
            _ => return,
        }
    }
}
