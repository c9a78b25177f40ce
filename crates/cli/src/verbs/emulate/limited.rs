//! `forebay emulate run`: a program in a memory cgroup of its own.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};

use forebay_block::Limited;
use forebay_sys::signals::Signals;
use forebay_types::{Error, Result};
use rustix::event::{poll, PollFd, PollFlags};

use crate::arguments::EmulateRun;
use crate::table;

/// Signals that are passed on to the program.
const SIGNALS: [i32; 5] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGCHLD];

pub(super) fn run(arguments: &EmulateRun) -> Result<ExitCode> {
    let name = &arguments.command[0];
    let failed = |e: std::io::Error| Error::io(format!("cannot run {}", name.display()), &e);
    let signals = Signals::block(&SIGNALS).map_err(failed)?;
    let limited = Limited::new(arguments.memory)?;
    let entrance = std::fs::File::options().write(true).open(limited.entrance()).map_err(failed)?;
    let mask = signals.mask_before();
    let mut command = Command::new(name);
    command.args(&arguments.command[1..]);
    // SAFETY: between fork and exec only system calls that are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::write(std::os::fd::AsRawFd::as_raw_fd(&entrance), b"0".as_ptr().cast(), 1) != 1 {
                return Err(std::io::Error::last_os_error());
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            mask.set();
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(failed)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
        while let Some(received) = signals.next() {
            if received.signal != libc::SIGCHLD && received.from_process {
                // SAFETY: our own child, not waited for yet.
                unsafe { libc::kill(child.id() as i32, received.signal) };
            }
        }
    };
    if let Some(peak) = limited.peak_bytes() {
        let limit = table::bytes(arguments.memory);
        note!(
            "forebay: the program had up to {} of memory, page cache included, of {limit}",
            table::bytes(peak)
        );
    }
    drop(limited);
    Ok(ExitCode::from(match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => (128 + signal) as u8,
        (None, None) => crate::failure::FAILED,
    }))
}
