//! Which programs besides the mount have attached to the pool. While none has, only the mount can change regular files,
//! so the kernel may cache their attributes.
//!
//! A program that attaches may pass its descriptors to processes that never attach and that outlive it. So from the
//! first program on, the mount shares the pool until the pool ends; the descriptor store keeps this over workers. A
//! tool counts only while it is attached.
//!
//! Before a newcomer's attach is answered, the mount is notified and confirms that the kernel has no such attributes
//! cached. A mount that does not confirm in time is disconnected, because a late confirmation would be taken for the
//! answer to another message. It then announces itself again.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_ring::{read_exact, write_all, ATTACH_MOUNT, ATTACH_TOOL, MOUNT_ALONE, MOUNT_SHARED};
use forebay_types::Code;

/// Tag in the descriptor store: programs have attached.
pub(super) const PROGRAMS_TAG: &str = "programs";
/// How long a newcomer waits for a mount that has not announced itself.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(2);

/// The kind of a process that attaches, by the body of its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Newcomer {
    Program,
    Tool,
    Mount,
}

impl Newcomer {
    pub(super) fn of(body: &[u8]) -> Newcomer {
        match body {
            [ATTACH_TOOL] => Newcomer::Tool,
            [ATTACH_MOUNT] => Newcomer::Mount,
            _ => Newcomer::Program,
        }
    }
}

/// The mount.
#[derive(Debug)]
struct Mount {
    session: u64,
    /// Its connection, once it has announced itself to this worker.
    socket: Option<OwnedFd>,
    /// A newcomer waited for its announcement in vain. Later ones do not wait.
    is_late: bool,
}

impl Mount {
    fn is_awaited(&self) -> bool {
        self.socket.is_none() && !self.is_late
    }
}

#[derive(Debug, Default)]
struct State {
    /// A program is or was attached.
    programs: bool,
    /// Sessions of tools.
    tools: HashSet<u64>,
    mount: Option<Mount>,
    /// The last message to the mount was that it shares the pool.
    told_shared: bool,
}

impl State {
    fn is_shared(&self) -> bool {
        self.programs || !self.tools.is_empty()
    }
}

/// See the module. The threads of connections and the attendant lock it, for as long as the mount takes to answer at
/// most.
#[derive(Debug, Default)]
pub(super) struct AttachedPrograms {
    state: Mutex<State>,
    announced: Condvar,
}

impl AttachedPrograms {
    /// The state that a new worker finds: whether programs have attached, sessions that may be tools, the mount's
    /// session.
    pub(super) fn restored(programs: bool, sessions: &[u64], mount: Option<u64>) -> AttachedPrograms {
        let tools = sessions.iter().copied().filter(|id| Some(*id) != mount).collect();
        let mount = mount.map(|session| Mount { session, socket: None, is_late: false });
        let state = State { programs, tools, mount, told_shared: false };
        AttachedPrograms { state: Mutex::new(state), announced: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when a newcomer must wait for the mount.
    pub(super) fn would_wait(&self) -> bool {
        let state = self.state();
        let untold = |mount: &Mount| mount.socket.is_some() && !state.told_shared;
        state.mount.as_ref().is_some_and(|mount| mount.is_awaited() || untold(mount))
    }

    /// A process attaches. True for the first program, which must be recorded in the descriptor store.
    pub(super) fn joins(&self, who: Newcomer, session: u64) -> bool {
        let mut state = self.state();
        let first = match who {
            Newcomer::Mount => return false,
            Newcomer::Program => !std::mem::replace(&mut state.programs, true),
            Newcomer::Tool => {
                state.tools.insert(session);
                false
            }
        };
        let end = Instant::now() + ANNOUNCE_TIMEOUT;
        // A mount of the last worker announces itself again as soon as it notices the new one.
        while state.mount.as_ref().is_some_and(Mount::is_awaited) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!(
                    "the mount has not announced itself: programs attach without it, and it may show stale sizes and times of \
                     files until it does"
                );
                if let Some(mount) = &mut state.mount {
                    mount.is_late = true;
                }
                break;
            }
            let waited = self.announced.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        AttachedPrograms::tell(&mut state);
        first
    }

    /// Notifies the mount of a change, and waits for its confirmation.
    fn tell(state: &mut State) {
        let shared = state.is_shared();
        let Some(mount) = state.mount.as_mut().filter(|_| shared != state.told_shared) else { return };
        let Some(socket) = &mount.socket else { return };
        let word = if shared { MOUNT_SHARED } else { MOUNT_ALONE };
        let told = write_all(socket.as_fd(), &[word]).and_then(|()| match shared {
            true => read_exact(socket.as_fd(), &mut [0]),
            false => Ok(()),
        });
        match told {
            Ok(()) => state.told_shared = shared,
            Err(code) => {
                if code != Code::PoolGone {
                    tracing::error!(
                        "the mount does not confirm ({code}): a program attaches without it, and it may show stale sizes and \
                         times of files until it does"
                    );
                }
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
                mount.socket = None;
                state.told_shared = false;
            }
        }
    }

    /// A process has ended.
    pub(super) fn leaves(&self, session: u64) {
        let mut state = self.state();
        if state.mount.as_ref().is_some_and(|mount| mount.session == session) {
            state.mount = None;
            state.told_shared = false;
            self.announced.notify_all();
        }
        if state.tools.remove(&session) {
            AttachedPrograms::tell(&mut state);
        }
    }

    /// The mount announces itself. `answer` sends it its initial state, and returns its connection.
    pub(super) fn announces<E>(
        &self,
        session: u64,
        answer: impl FnOnce(u8) -> Result<OwnedFd, E>,
    ) -> Result<(), E> {
        let mut state = self.state();
        let shared = state.is_shared();
        let socket = answer(if shared { MOUNT_SHARED } else { MOUNT_ALONE })?;
        state.mount = Some(Mount { session, socket: Some(socket), is_late: false });
        state.told_shared = shared;
        self.announced.notify_all();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn announce(programs: &AttachedPrograms) -> (UnixStream, u8) {
        announce_with(programs, None)
    }

    /// A mount whose answers are awaited for as long as `next_timeout` says.
    fn announce_with(programs: &AttachedPrograms, next_timeout: Option<Duration>) -> (UnixStream, u8) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(next_timeout).unwrap();
        let mut word = 9;
        programs
            .announces(1, |w| {
                word = w;
                Ok::<_, ()>(OwnedFd::from(theirs))
            })
            .unwrap();
        (ours, word)
    }

    #[test]
    fn joins_waits_until_the_mount_has_answered() {
        let programs = AttachedPrograms::default();
        let (mut mount, word) = announce(&programs);
        assert_eq!(word, MOUNT_ALONE);
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| programs.joins(Newcomer::Tool, 2));
            let mut byte = [9];
            mount.read_exact(&mut byte).unwrap();
            assert_eq!(byte[0], MOUNT_SHARED);
            std::thread::sleep(Duration::from_millis(20));
            assert!(!joined.is_finished(), "answered before the mount did");
            mount.write_all(&byte).unwrap();
            assert!(!joined.join().unwrap());
        });
        programs.leaves(2);
        let mut byte = [9];
        mount.read_exact(&mut byte).unwrap();
        assert_eq!(byte[0], MOUNT_ALONE, "the only tool left");
    }

    /// Reads one word, and none when the other end is closed.
    fn hear(mount: &mut UnixStream) -> Option<u8> {
        let mut byte = [9];
        (mount.read(&mut byte).unwrap() == 1).then_some(byte[0])
    }

    #[test]
    fn an_answer_that_comes_too_late_is_not_taken_for_the_next() {
        let programs = AttachedPrograms::default();
        let (mut mount, _) = announce_with(&programs, Some(Duration::from_millis(20)));
        assert!(!programs.joins(Newcomer::Tool, 2), "let in all the same");
        assert_eq!(hear(&mut mount), Some(MOUNT_SHARED));
        let _ = mount.write_all(&[MOUNT_SHARED]);
        assert_eq!(hear(&mut mount), None, "it is to announce itself anew");
        let (mut mount, word) = announce(&programs);
        assert_eq!(word, MOUNT_SHARED);
        programs.leaves(2);
        assert_eq!(hear(&mut mount), Some(MOUNT_ALONE));
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| programs.joins(Newcomer::Tool, 3));
            assert_eq!(hear(&mut mount), Some(MOUNT_SHARED));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!joined.is_finished(), "let in by the answer to another word");
            mount.write_all(&[MOUNT_SHARED]).unwrap();
            joined.join().unwrap();
        });
    }

    #[test]
    fn pool_with_a_program_is_shared_for_ever() {
        let programs = AttachedPrograms::default();
        assert!(programs.joins(Newcomer::Program, 2));
        programs.leaves(2);
        assert_eq!(announce(&programs).1, MOUNT_SHARED);
        assert!(!programs.joins(Newcomer::Program, 3), "not the first");
    }

    #[test]
    fn a_new_worker_waits_for_the_mount_of_the_old() {
        let programs = AttachedPrograms::restored(false, &[1], Some(1));
        assert!(programs.would_wait());
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| programs.joins(Newcomer::Tool, 2));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!joined.is_finished());
            // The newcomer counts by then, so that there is nothing left to tell.
            let (_mount, word) = announce(&programs);
            assert_eq!(word, MOUNT_SHARED);
            joined.join().unwrap();
        });
    }
}
