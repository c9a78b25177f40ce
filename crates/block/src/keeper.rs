//! The keeper of one device: it makes the connection, starts the server, opens the file, makes the loop device, and
//! reports to its starter. Then it waits: for SIGTERM, SIGINT or SIGHUP, which end the device, or for the end of the
//! server.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use forebay_fuse::Device;
use forebay_sys::loop_device::{LoopDevice, Settings};
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Result};
use rustix::event::{PollFd, PollFlags};
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::connection::Detached;
use crate::process::Process;
use crate::report::Report;

/// How long the end of a device may take that no one uses.
const END_TIME: Duration = Duration::from_secs(2);

/// What a signal to the keeper does while programs have the device open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Their I/O fails soon after.
    Soon,
    /// The device ends when they close it, however many signals come.
    AtLastClose,
}

/// What device is to be made.
#[derive(Debug)]
pub struct Plan<'a> {
    /// What is tried, for messages: `cannot make device x`.
    pub what: &'a str,
    /// The type of the FUSE file system, behind `fuse.`.
    pub subtype: &'a CStr,
    /// Its source, as tools show it.
    pub source: &'a str,
    /// The loop device.
    pub settings: Settings<'a>,
    /// Discards would free memory that the device needs.
    pub refuses_discards: bool,
    /// The end on a signal.
    pub ending: Ending,
    /// What exit statuses of the server mean.
    pub meaning: fn(i32) -> Option<&'static str>,
}

/// A device that is up.
#[derive(Debug)]
pub struct Up<T> {
    /// The block device.
    pub device: PathBuf,
    /// The server.
    pub server: Process,
    /// The number of the FUSE connection.
    pub connection: u32,
    /// What the server told.
    pub told: T,
}

/// The server's way to the keeper, once.
#[derive(Debug)]
pub struct Tell<T>(io::PipeWriter, PhantomData<fn(T)>);

impl<T: Serialize> Tell<T> {
    /// Says that the server serves, or why it cannot.
    pub fn tell(mut self, told: Result<T>) {
        let text = serde_json::to_string(&Report::of(told)).unwrap_or_default();
        let _ = self.0.write_all(text.as_bytes());
    }
}

/// Ends the starter's wait for the end of standard output.
fn close_output() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        // SAFETY: plain system call on two descriptors.
        unsafe { libc::dup2(null.as_raw_fd(), 1) };
    }
}

/// Makes a device and keeps it until it ends. This process has one thread.
///
/// `serve` is the server, in a process of its own; it serves until the connection is over. `describe` is what commands are
/// to know of the device, which is reported on standard output.
pub fn keep<T, R>(
    plan: &Plan<'_>,
    serve: impl FnOnce(Device, Tell<T>) -> io::Result<()>,
    describe: impl FnOnce(Up<T>) -> Result<R>,
) -> Result<()>
where
    T: Serialize + DeserializeOwned,
    R: Serialize,
{
    let failed = |step: &'static str| {
        move |e: io::Error| {
            let error = Error::io(plan.what, &e).why(format!("{step}: {e}"));
            match e.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => error.cure("it takes root"),
                Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                    error.cure("the kernel needs FUSE (/dev/fuse) and loop devices (/dev/loop-control)")
                }
                _ => error,
            }
        }
    };
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD])
        .map_err(failed("signals"))?;
    let device = Device::open().map_err(failed("/dev/fuse"))?;
    let mount = Detached::new(&device, plan.subtype, plan.source).map_err(failed("the FUSE mount"))?;
    let (ready, told) = io::pipe().map_err(failed("a pipe"))?;
    // SAFETY: this process has one thread.
    let server = match unsafe { libc::fork() } {
        -1 => return Err(failed("fork")(io::Error::last_os_error())),
        0 => {
            // The keeper reports.
            close_output();
            drop((mount, ready));
            let done = follow_the_keeper().and_then(|()| serve(device, Tell(told, PhantomData)));
            // SAFETY: what the keeper has is not dropped here, and its buffers are not flushed twice.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        pid => Server(pid),
    };
    drop((device, told));
    let told = told_by(ready, plan.what)?;
    let file = mount.open().map_err(failed("the served file"))?;
    let connection = file.metadata().map_err(failed("the served file"))?.dev();
    drop(mount);
    let device = LoopDevice::new(file.as_fd(), &plan.settings).map_err(failed("the loop device"))?;
    drop(file);
    if plan.refuses_discards {
        device.refuse_discards().map_err(failed("the loop device"))?;
    }
    let path = device.path.clone();
    let up = Up {
        device: path.clone(),
        server: Process::of(server.0 as u32).map_err(failed("/proc"))?,
        connection: libc::minor(connection),
        told,
    };
    let text = serde_json::to_string(&Report::of(Ok(describe(up)?))).unwrap_or_default();
    tracing::info!("{} is {} of {}", path.display(), plan.subtype.to_string_lossy(), plan.source);
    // A starter that is gone has told no one of the device.
    writeln!(io::stdout(), "{text}").map_err(failed("the report"))?;
    close_output();
    wait(plan, device, &server, &signals);
    Ok(())
}

/// Waits for the end.
fn wait(plan: &Plan<'_>, device: LoopDevice, server: &Server, signals: &Signals) {
    let (path, mut device) = (device.path.clone(), Some(device));
    let status = loop {
        if let Some(status) = server.ended() {
            break Some(status);
        }
        match signals.next() {
            Some(received) if received.signal == libc::SIGCHLD => {}
            // The last close writes what the page cache has. Then the kernel ends the device, the connection with it, and
            // the server with the connection.
            Some(_) if plan.ending == Ending::AtLastClose => drop(device.take()),
            Some(_) => break None,
            None => {
                let mut readable = [PollFd::new(signals, PollFlags::IN)];
                let _ = rustix::event::poll(&mut readable, None);
            }
        }
    };
    match status {
        Some(0) if device.is_none() => return,
        Some(status) => {
            let known = libc::WIFEXITED(status).then(|| (plan.meaning)(libc::WEXITSTATUS(status))).flatten();
            let why = known.map_or_else(|| format!("status {status}"), str::to_owned);
            tracing::error!("the server has ended ({why}): I/O on {} fails", path.display());
        }
        // Before the server ends: a device that is detached has no place for what its page cache has.
        None => {
            if let Some(Err(e)) = device.as_ref().map(LoopDevice::synchronize) {
                tracing::error!("what was written to {} last is lost: {e}", path.display());
            }
        }
    }
    if device.is_some_and(|device| !device.clear(END_TIME).unwrap_or(true)) {
        tracing::warn!("{} is still in use: its I/O fails from now on", path.display());
    }
}

/// Has this process, the server, end with its keeper.
fn follow_the_keeper() -> io::Result<()> {
    // SAFETY: plain system calls. The keeper may have died before.
    unsafe {
        let keeper = libc::getppid();
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() != keeper || keeper == 1 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // Signals to the group are for the keeper.
        libc::setpgid(0, 0);
    }
    Ok(())
}

/// The server's process, killed and waited for on drop.
struct Server(libc::pid_t);

impl Server {
    /// Its status, if it has ended.
    fn ended(&self) -> Option<i32> {
        // SAFETY: our own child; the structure is writable. It is not reaped, as its number is used until the drop.
        let info = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_PID, self.0 as libc::id_t, &mut info, flags) != 0 || info.si_pid() == 0 {
                return None;
            }
            info
        };
        // SAFETY: filled by waitid.
        let value = unsafe { info.si_status() };
        Some(if info.si_code == libc::CLD_EXITED { value << 8 } else { value })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: our own child, not reaped before.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// What the server says once.
fn told_by<T: DeserializeOwned>(mut ready: io::PipeReader, what: &str) -> Result<T> {
    let mut text = String::new();
    let _ = ready.read_to_string(&mut text);
    match serde_json::from_str::<Report<T>>(&text) {
        Ok(told) => told.into_result(),
        Err(_) => Err(Error::new(Code::Io, what).why("its server ended at its start")),
    }
}
