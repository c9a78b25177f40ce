//! The process that serves the pool's mount. There is at most one: a living process that has handed over a FUSE
//! connection.
//!
//! The kernel behind that connection is notified of changes, and acknowledgements wait for the notifications. If
//! another process of the pool's user could hand over a connection of its own, it could delay acknowledgements and
//! leave invalid entries in the kernel's cache.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::{Code, Error, Result};
use rustix::io::Errno;

/// The session that serves the mount, and its process.
#[derive(Debug, Default)]
pub(super) struct Mounter {
    serving: Mutex<Option<(u64, OwnedFd)>>,
}

/// True while the process of a pidfd lives.
fn lives(process: &impl AsFd) -> bool {
    let mut ended = [rustix::event::PollFd::new(process, rustix::event::PollFlags::IN)];
    !matches!(rustix::event::poll(&mut ended, Some(&rustix::time::Timespec::default())), Ok(1))
}

/// True if two pidfds refer to one process. Their pids are compared, which every kernel shows, so both processes must
/// live.
fn are_one(a: &impl AsRawFd, b: &impl AsRawFd) -> bool {
    let number = |fd: RawFd| -> Option<u32> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
    };
    // 0 is a process of another namespace, -1 one that has ended.
    number(a.as_raw_fd()).is_some_and(|pid| pid != 0 && number(b.as_raw_fd()) == Some(pid))
}

/// True for a descriptor of /dev/fuse, by its device number.
fn is_fuse_device(fd: &OwnedFd) -> bool {
    const FUSE: (u32, u32) = (10, 229);
    rustix::fs::fstat(fd).is_ok_and(|st| {
        rustix::fs::FileType::from_raw_mode(st.st_mode) == rustix::fs::FileType::CharacterDevice
            && (rustix::fs::major(st.st_rdev), rustix::fs::minor(st.st_rdev)) == FUSE
    })
}

/// What a dead worker left: the mount that is served, and sessions whose mounts no longer exist.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) serving: Option<(u64, OwnedFd)>,
    pub(super) mounter: Mounter,
    pub(super) forgotten: Vec<u64>,
}

/// Restores the mount from the stored ones (by session) and the processes of sessions. There may be several if the last
/// worker died after the announcement of a mount's process and before it noticed the end of the one before. Only the
/// mount whose process lives is restored.
pub(super) fn restored<'p>(
    mounts: Vec<(u64, OwnedFd)>,
    process_of: impl Fn(u64) -> Option<&'p OwnedFd>,
) -> std::result::Result<Left, Errno> {
    let mut left = Left::default();
    for (id, device) in mounts {
        match process_of(id) {
            Some(process) if lives(process) => {
                let process = rustix::io::fcntl_dupfd_cloexec(process, 3)?;
                left.mounter = Mounter { serving: Mutex::new(Some((id, process))) };
                left.serving = Some((id, device));
            }
            // It is removed with its session, whose end is noticed in a moment.
            Some(_) => {}
            None => left.forgotten.push(id),
        }
    }
    Ok(left)
}

impl Mounter {
    fn serving(&self) -> MutexGuard<'_, Option<(u64, OwnedFd)>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process announces that it serves the mount, with its session and its connection's descriptor. It counts once
    /// `done` has succeeded. A process that attached again announces its new session; returns the session that served
    /// before.
    pub(super) fn takes_over(
        &self,
        session: u64,
        process: OwnedFd,
        device: OwnedFd,
        done: impl FnOnce(OwnedFd) -> Result<()>,
    ) -> Result<Option<u64>> {
        let what = "cannot notify a mount of changes";
        if !is_fuse_device(&device) {
            return Err(
                Error::new(Code::Invalid, what).why("the descriptor that came along is not one of /dev/fuse")
            );
        }
        let mut serving = self.serving();
        if serving.as_ref().is_some_and(|(_, other)| lives(other) && !are_one(other, &process)) {
            return Err(Error::new(Code::Busy, what).why("another process serves the pool's mount"));
        }
        done(device)?;
        let before = serving.replace((session, process));
        Ok(before.map(|(of, _)| of).filter(|of| *of != session))
    }

    /// A session has ended.
    pub(super) fn ends(&self, session: u64) {
        self.serving().take_if(|(of, _)| *of == session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn file(path: &str) -> OwnedFd {
        std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into()
    }

    fn process_of(child: &Child) -> OwnedFd {
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap()
    }

    /// A process that lives until its standard input is closed.
    fn child() -> Child {
        Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn restored_prefers_the_mount_whose_process_lives() {
        let (dead, living) = (child(), child());
        let processes = [(1, process_of(&dead)), (2, process_of(&living)), (3, process_of(&dead))];
        end(dead);
        let mounts = [1, 2, 3, 4].map(|id| (id, file("/dev/null")));
        let of = |id| processes.iter().find(|(of, _)| *of == id).map(|(_, process)| process);
        let left = restored(mounts.into(), of).unwrap();
        assert_eq!(left.serving.map(|(id, _)| id), Some(2));
        assert_eq!(left.forgotten, [4], "no session");
        end(living);
    }

    #[test]
    fn what_is_not_a_connection_or_comes_while_another_serves_is_refused() {
        let mounter = Mounter::default();
        let (first, second) = (child(), child());
        let take = |session, of: &Child, device: &str| {
            mounter.takes_over(session, process_of(of), file(device), |_| Ok(()))
        };
        assert_eq!(take(1, &first, "/dev/null").unwrap_err().code, Code::Invalid);
        if !std::path::Path::new("/dev/fuse").exists() {
            eprintln!("skipped in part: there is no /dev/fuse");
            return end(first);
        }
        assert_eq!(take(1, &first, "/dev/fuse").unwrap(), None);
        assert_eq!(take(1, &first, "/dev/fuse").unwrap(), None);
        assert_eq!(take(3, &first, "/dev/fuse").unwrap(), Some(1), "it attached anew");
        assert_eq!(take(2, &second, "/dev/fuse").unwrap_err().code, Code::Busy);
        end(first);
        assert_eq!(take(2, &second, "/dev/fuse").unwrap(), Some(3));
        mounter.ends(2);
        assert!(mounter.serving().is_none());
        end(second);
    }
}
