//! The requests of a connection, which several threads take from it, each through a descriptor of its own
//! (`FUSE_DEV_IOC_CLONE`). A reply is written to the descriptor that its request was read from.
//!
//! Where requests take little time, the threads take turns (`serving_threads`): one polls for the next request, and
//! sleeps in the kernel when polling does not pay (`forebay_sys::adaptive_spin`). A program that makes one call after
//! another leaves a few microseconds between two requests, and to wake a thread costs more than to serve most requests,
//! above all on a virtual machine. Where each request waits for something, all threads sleep in the kernel, which wakes
//! one for each request.
//!
//! Serving allocates no memory here. Locks: that of the spin, which the polling thread holds while it sleeps in the kernel
//! too, and that of `serving_threads`, which is never taken under it.

use std::io;
use std::sync::{Mutex, PoisonError};

use forebay_sys::adaptive_spin::AdaptiveSpin;

use crate::serving_threads::{Duty, ServingThreads};
use crate::Device;

/// What the threads of a connection share.
#[derive(Debug)]
pub struct Requests {
    turns: Option<Turns>,
}

#[derive(Debug)]
struct Turns {
    threads: ServingThreads,
    /// The leader uses it.
    spin: Mutex<AdaptiveSpin>,
}

/// Why a thread takes no more requests: what [`Requests::serve`] returns.
struct Over(io::Result<()>);

impl Requests {
    /// For requests that take little time: so many threads take turns.
    pub fn in_turns(threads: usize) -> Requests {
        Requests {
            turns: Some(Turns {
                threads: ServingThreads::new(threads),
                spin: Mutex::new(AdaptiveSpin::new()),
            }),
        }
    }

    /// For requests that wait: any number of threads, of which each takes one request after the other.
    pub fn by_all_threads() -> Requests {
        Requests { turns: None }
    }

    /// Has the calling thread serve requests until the connection is over. The buffer has room for the longest request.
    ///
    /// # Errors
    /// The descriptor cannot be read. The other threads that take turns end then, too.
    pub fn serve(&self, device: &Device, buffer: Vec<u8>, serve: impl FnMut(&[u8])) -> io::Result<()> {
        let mut server = Server { device, buffer, waits: true, serve };
        let Over(result) = match &self.turns {
            None => server.serve_all(),
            Some(turns) => server.take_turns(turns),
        };
        result
    }
}

/// One serving thread.
struct Server<'a, F> {
    device: &'a Device,
    buffer: Vec<u8>,
    /// Reads from the descriptor block until there is a request.
    waits: bool,
    serve: F,
}

impl<F: FnMut(&[u8])> Server<'_, F> {
    fn set_waiting(&mut self, waits: bool) {
        if self.waits != waits {
            self.device.set_waiting(waits);
            self.waits = waits;
        }
    }

    /// Reads once. None when there is no request, or the kernel withdrew it.
    fn read(&mut self) -> Result<Option<usize>, Over> {
        match self.device.read(&mut self.buffer) {
            Ok(0) => Err(Over(Err(io::ErrorKind::UnexpectedEof.into()))),
            Ok(n) => Ok(Some(n)),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => Ok(None),
                Some(libc::ENODEV) => Err(Over(Ok(()))),
                _ => Err(Over(Err(e))),
            },
        }
    }

    /// Sleeps until there is a request.
    fn sleep(&mut self) -> Result<usize, Over> {
        self.set_waiting(true);
        loop {
            if let Some(n) = self.read()? {
                return Ok(n);
            }
        }
    }

    fn serve_all(&mut self) -> Over {
        loop {
            match self.sleep() {
                Ok(n) => (self.serve)(&self.buffer[..n]),
                Err(over) => return over,
            }
        }
    }

    fn take_turns(&mut self, turns: &Turns) -> Over {
        loop {
            let done = match turns.threads.duty() {
                Duty::Over => return Over(Ok(())),
                Duty::Leader(term) => self.lead(turns, term),
                Duty::Helper => self.help(turns),
            };
            if let Err(over) = done {
                turns.threads.end();
                return over;
            }
        }
    }

    fn lead(&mut self, turns: &Turns, term: u32) -> Result<(), Over> {
        let mut at_once = 0;
        while turns.threads.is_leader(term) {
            let (n, found_at_once) = self.wait(&turns.spin)?;
            at_once = if found_at_once { at_once + 1 } else { 0 };
            turns.threads.found_at_once(at_once);
            turns.threads.begins(term);
            (self.serve)(&self.buffer[..n]);
            turns.threads.ends(term);
        }
        Ok(())
    }

    fn help(&mut self, turns: &Turns) -> Result<(), Over> {
        self.set_waiting(false);
        while let Some(n) = self.read()? {
            (self.serve)(&self.buffer[..n]);
        }
        turns.threads.helped();
        Ok(())
    }

    /// Polls for a request, then sleeps until there is one. The flag is true if the first read found it.
    fn wait(&mut self, spin: &Mutex<AdaptiveSpin>) -> Result<(usize, bool), Over> {
        let mut spin = spin.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_waiting(false);
        let (mut found, mut reads) = (None, 0);
        spin.look(|| {
            reads += 1;
            found = self.read().transpose();
            found.is_some()
        });
        if let Some(found) = found {
            return found.map(|n| (n, reads == 1));
        }
        let n = self.sleep()?;
        spin.slept(true);
        Ok((n, false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    const THREADS: usize = 3;
    /// A wait in vain is a failure.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A pipe of packets: each is read as a request is, and at the end nothing can be read.
    fn connection() -> (File, Vec<Device>) {
        let mut ends = [0; 2];
        // SAFETY: the array has room for the two descriptors, which are new and ours.
        let (reader, writer) = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_DIRECT), 0);
            (OwnedFd::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        };
        // Flags are those of an open, not of the pipe.
        let open = |_| OpenOptions::new().read(true).open(format!("/proc/self/fd/{}", reader.as_raw_fd()));
        let devices = (0..THREADS).map(open).map(|file| Device::from_fd(file.unwrap().into()));
        (writer, devices.collect())
    }

    /// Serves what `send` sends.
    fn serve(requests: &Requests, send: impl FnOnce(&mut File), served: impl Fn(u32) + Sync) {
        let (mut writer, devices) = connection();
        std::thread::scope(|scope| {
            let threads: Vec<_> = devices
                .iter()
                .map(|device| {
                    let served = &served;
                    let serve = move |bytes: &[u8]| served(u32::from_ne_bytes(bytes.try_into().unwrap()));
                    scope.spawn(move || requests.serve(device, vec![0; 64], serve))
                })
                .collect();
            send(&mut writer);
            drop(writer);
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            assert!(ended.filter(Result::is_err).count() >= 1, "the connection did not end with an error");
        });
    }

    fn both() -> [Requests; 2] {
        [Requests::in_turns(THREADS), Requests::by_all_threads()]
    }

    #[test]
    fn requests_are_each_served_once_and_all_threads_end_with_the_connection() {
        for requests in both() {
            let found = Mutex::new(Vec::new());
            let send = |writer: &mut File| {
                for number in 0..2000u32 {
                    assert_eq!(writer.write(&number.to_ne_bytes()).unwrap(), 4);
                    if number % 100 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            };
            serve(&requests, send, |number| found.lock().unwrap().push(number));
            let mut found = found.into_inner().unwrap();
            found.sort_unstable();
            assert!(found.iter().copied().eq(0..2000), "{} requests", found.len());
        }
    }

    #[test]
    fn request_that_takes_long_holds_up_no_other_as_long_as_there_are_threads() {
        for requests in both() {
            let (here, changed) = (Mutex::new(0), Condvar::new());
            let send = |writer: &mut File| {
                (0..THREADS as u32).for_each(|number| drop(writer.write(&number.to_ne_bytes()).unwrap()));
            };
            serve(&requests, send, |_| {
                let mut count = here.lock().unwrap();
                *count += 1;
                changed.notify_all();
                let waited = changed.wait_timeout_while(count, PATIENCE, |count| *count < THREADS);
                assert!(!waited.unwrap().1.timed_out(), "a request was not served beside others");
            });
        }
    }
}
