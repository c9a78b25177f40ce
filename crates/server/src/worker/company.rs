//! Who else has files of the pool open, as its mount has to know: while nobody has, the kernel may keep attributes of
//! regular files, as nobody but itself can write them.
//!
//! A program that attaches may hand its descriptors to others that never attach and outlive it, so that from its first
//! attach on the mount is in company until the pool ends; the descriptor store remembers that over workers. Tools are
//! company for as long as they live.
//!
//! The mount is told before a newcomer's attach is answered, and has answered that nothing is believed any more.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_ring::{read_exact, write_all, ATTACH_MOUNT, ATTACH_TOOL, MOUNT_ALONE, MOUNT_SHARED};
use forebay_types::Code;

/// Tag in the descriptor store that says that programs have been here.
pub(super) const PROGRAMS_TAG: &str = "programs";
/// How long a newcomer waits for a mount that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What a newcomer is, by the body of its message.
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

#[derive(Debug, Default)]
struct State {
    /// Programs are here or have been.
    programs: bool,
    /// Sessions of tools.
    tools: HashSet<u64>,
    /// The session of the mount's process, and its connection when it has announced itself to this worker.
    mount: Option<(u64, Option<OwnedFd>)>,
    /// What the mount was told last.
    told_shared: bool,
}

impl State {
    fn is_shared(&self) -> bool {
        self.programs || !self.tools.is_empty()
    }
}

/// See the module's text. Locked by the threads of connections and by the attendant, for as long as the mount takes to
/// answer at most.
#[derive(Debug, Default)]
pub(super) struct Company {
    state: Mutex<State>,
    announced: Condvar,
}

impl Company {
    /// What a new worker finds: whether there have been programs, sessions that may be tools, the mount's session.
    pub(super) fn restored(programs: bool, sessions: &[u64], mount: Option<u64>) -> Company {
        let tools = sessions.iter().copied().filter(|id| Some(*id) != mount).collect();
        let state = State { programs, tools, mount: mount.map(|id| (id, None)), told_shared: false };
        Company { state: Mutex::new(state), announced: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when the mount has to be told before a newcomer is answered, which may take a while.
    pub(super) fn would_wait(&self) -> bool {
        let state = self.state();
        state.mount.as_ref().is_some_and(|(_, socket)| socket.is_none() || !state.told_shared)
    }

    /// Somebody attaches; true for the first program, which is to be remembered.
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
        let end = Instant::now() + ANSWER_TIMEOUT;
        // A mount that the last worker knew announces itself anew as soon as it has noticed.
        while state.mount.as_ref().is_some_and(|(_, socket)| socket.is_none()) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!("the mount does not announce itself to the new worker");
                break;
            }
            let waited = self.announced.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Company::tell(&mut state);
        first
    }

    /// Tells the mount what it does not know yet.
    fn tell(state: &mut State) {
        let shared = state.is_shared();
        if shared == state.told_shared {
            return;
        }
        let Some((_, Some(socket))) = &state.mount else { return };
        let word = if shared { MOUNT_SHARED } else { MOUNT_ALONE };
        let told = write_all(socket.as_fd(), &[word]).and_then(|()| match shared {
            true => read_exact(socket.as_fd(), &mut [0]),
            false => Ok(()),
        });
        match told {
            Ok(()) => state.told_shared = shared,
            // Its end takes its beliefs along.
            Err(Code::PoolGone) => {}
            Err(code) => tracing::error!("the mount does not answer: {code}"),
        }
    }

    /// A process is gone.
    pub(super) fn leaves(&self, session: u64) {
        let mut state = self.state();
        if state.mount.as_ref().is_some_and(|(id, _)| *id == session) {
            state.mount = None;
            state.told_shared = false;
        }
        if state.tools.remove(&session) {
            Company::tell(&mut state);
        }
    }

    /// The mount announces itself; `answer` is called with how it is to begin, and gives its connection.
    pub(super) fn announces<E>(
        &self,
        session: u64,
        answer: impl FnOnce(u8) -> Result<OwnedFd, E>,
    ) -> Result<(), E> {
        let mut state = self.state();
        let shared = state.is_shared();
        let socket = answer(if shared { MOUNT_SHARED } else { MOUNT_ALONE })?;
        state.mount = Some((session, Some(socket)));
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

    fn announce(company: &Company) -> (UnixStream, u8) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut word = 9;
        company
            .announces(1, |w| {
                word = w;
                Ok::<_, ()>(OwnedFd::from(theirs))
            })
            .unwrap();
        (ours, word)
    }

    #[test]
    fn joins_waits_until_the_mount_has_answered() {
        let company = Company::default();
        let (mut mount, word) = announce(&company);
        assert_eq!(word, MOUNT_ALONE);
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| company.joins(Newcomer::Tool, 2));
            let mut byte = [9];
            mount.read_exact(&mut byte).unwrap();
            assert_eq!(byte[0], MOUNT_SHARED);
            std::thread::sleep(Duration::from_millis(20));
            assert!(!joined.is_finished(), "answered before the mount did");
            mount.write_all(&byte).unwrap();
            assert!(!joined.join().unwrap());
        });
        company.leaves(2);
        let mut byte = [9];
        mount.read_exact(&mut byte).unwrap();
        assert_eq!(byte[0], MOUNT_ALONE, "the only tool left");
    }

    #[test]
    fn a_program_is_company_for_ever() {
        let company = Company::default();
        assert!(company.joins(Newcomer::Program, 2));
        company.leaves(2);
        assert_eq!(announce(&company).1, MOUNT_SHARED);
        assert!(!company.joins(Newcomer::Program, 3), "not the first");
    }

    #[test]
    fn a_new_worker_waits_for_the_mount_of_the_old() {
        let company = Company::restored(false, &[1], Some(1));
        assert!(company.would_wait());
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| company.joins(Newcomer::Tool, 2));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!joined.is_finished());
            // The newcomer counts by then, so that there is nothing left to tell.
            let (_mount, word) = announce(&company);
            assert_eq!(word, MOUNT_SHARED);
            joined.join().unwrap();
        });
    }
}
