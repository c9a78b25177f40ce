//! The supervisor's part of the worker: starts it, sends its setup, receives its messages and reaps it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Instant;

use forebay_types::{Error, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::child_process;
use crate::setup::{SetupFds, SetupText, WAS_STOPPED};
use crate::store::{self, Kept, Message, KIND_END, KIND_GIVEN, KIND_SETUP};
use forebay_sys::signals::SignalMask;

/// Describes how a worker ended.
pub(crate) fn describe(status: ExitStatus) -> String {
    match status.code() {
        Some(code) if code == i32::from(WAS_STOPPED) => {
            "was stopped, or had no processor, for over 10 s: it executes nothing that had reached it"
                .to_owned()
        }
        _ => child_process::describe(status),
    }
}

/// A worker process.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    child: Child,
    socket: OwnedFd,
    /// Tags whose descriptors are still to be sent; the end message follows them.
    to_give: VecDeque<String>,
    end_sent: bool,
    pub(crate) started: Instant,
    pub(crate) ready: bool,
}

impl WorkerProcess {
    /// Starts this program as a worker and sends it its setup.
    pub(crate) fn start(text: &SetupText, fds: &SetupFds<'_>, kept: &Kept) -> Result<WorkerProcess> {
        let what = "cannot start the worker";
        let (ours, theirs) = store::pair()?;
        let text =
            serde_json::to_string(text).map_err(|e| Error::new(forebay_types::Code::Io, what).why(e))?;
        let number = theirs.as_raw_fd();
        let supervisor = rustix::process::getpid();
        let mut command = Command::new("/proc/self/exe");
        command.envs(forebay_fabric::libfabric::environment());
        command.arg0("forebayd").args([OsString::from("--worker"), number.to_string().into()]);
        // SAFETY: between fork and exec only system calls are made that are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                SignalMask::empty().set();
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                if rustix::process::getppid() != Some(supervisor) {
                    return Err(Errno::SRCH.into()); // the supervisor died before the kernel watched it
                }
                if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().map_err(|e| Error::io(what, &e))?;
        drop(theirs);
        // The pair is new and empty, so the setup fits.
        store::send(ours.as_fd(), KIND_SETUP, text.as_bytes(), &fds.in_order(), SendFlags::DONTWAIT)
            .map_err(|e| Error::io(what, &e.into()))?;
        Ok(WorkerProcess {
            child,
            socket: ours,
            to_give: kept.tags().into(),
            end_sent: false,
            started: Instant::now(),
            ready: false,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// True while messages are still to be sent.
    pub(crate) fn wants_to_send(&self) -> bool {
        !self.end_sent
    }

    /// Sends stored descriptors, as many as the socket has room for, and then the end message.
    pub(crate) fn give(&mut self, kept: &Kept) {
        while let Some(tag) = self.to_give.front() {
            if let Some(fds) = kept.get(tag) {
                match store::send(self.socket.as_fd(), KIND_GIVEN, tag.as_bytes(), &fds, SendFlags::DONTWAIT)
                {
                    Ok(()) => {}
                    Err(Errno::AGAIN | Errno::TOOMANYREFS) => return,
                    Err(e) => {
                        tracing::error!("cannot hand {tag} to the worker: {e}");
                        return; // the worker has ended, which `ended` reports, or memory is short and this is retried
                    }
                }
            }
            self.to_give.pop_front();
        }
        if !self.end_sent
            && store::send(self.socket.as_fd(), KIND_END, b"", &[], SendFlags::DONTWAIT) != Err(Errno::AGAIN)
        {
            self.end_sent = true;
        }
    }

    /// The worker's unread messages; never waits.
    pub(crate) fn messages(&self) -> Vec<Message> {
        let mut all = Vec::new();
        loop {
            match store::receive(self.socket.as_fd(), RecvFlags::DONTWAIT) {
                Ok(Some(message)) => all.push(message),
                Err(Errno::MFILE) => tracing::error!(
                    "no descriptor is left to keep a client's for the next worker: it will fail with EIO if this one dies"
                ),
                Err(Errno::PROTO) => tracing::error!("the worker sent a malformed message"),
                Ok(None) | Err(_) => return all,
            }
        }
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends the worker a signal.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        // The child is not reaped yet, so its process number is not reused.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}
