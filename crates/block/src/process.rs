//! A process, by number and start: numbers are used again.

use std::io;

use forebay_sys::process::Stat;
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
}

impl Process {
    /// The process that has this number now.
    pub fn of(pid: u32) -> io::Result<Process> {
        Ok(Process { pid, started: Stat::of(pid)?.start_ticks })
    }

    /// True until it has ended.
    pub fn lives(self) -> bool {
        Stat::of(self.pid).is_ok_and(|stat| stat.start_ticks == self.started && !stat.has_ended())
    }

    /// Sends it a signal.
    pub fn signal(self, signal: libc::c_int) -> io::Result<()> {
        // SAFETY: plain system calls. The descriptor stands for one process, which cannot be replaced by another between
        // the look at its start and the signal.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, self.pid, 0) as i32;
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let sent = match self.lives() {
                true => libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, std::ptr::null::<u8>(), 0),
                false => {
                    libc::close(fd);
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
            };
            let error = io::Error::last_os_error();
            libc::close(fd);
            if sent < 0 {
                return Err(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_another_start_gets_no_signal() {
        let own = Process::of(std::process::id()).unwrap();
        assert!(own.lives());
        own.signal(0).unwrap();
        let other = Process { started: own.started + 1, ..own };
        assert!(!other.lives());
        assert_eq!(other.signal(libc::SIGKILL).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
