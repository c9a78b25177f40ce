//! How the threads of a server wait for requests.
//!
//! *Deep*: all sleep in the kernel, which wakes one for each request. So it is at first, and whenever several requests are
//! there at a time. *Shallow*: requests come one after the other, as of a program that waits for each, and the wake-up of a
//! thread takes longer than to serve a request. Then one thread, the leader, polls for the next request, and all others are
//! parked: a thread that sleeps in the kernel would be woken for each request although the leader finds it.
//!
//! ```text
//!          ALONE_MIN requests, each by itself
//!   deep ──────────────────────────────────────► shallow      the thread that served the last one leads
//!        ◄──────────────────────────────────────
//!          BURST requests that were there at once, in a row; a busy machine; one that may take long; the end
//! ```
//! Each return to deep makes the next change to shallow harder ([`Turns::needed`]), so that a load that is neither does not
//! change all the time; one for a request that may take long does not, as it says nothing of the load. A leader that finds nothing for a while sleeps in the kernel: a device without requests takes no
//! processor. It yields the processor between polls, because the program, the loop device's worker, or the kernel's thread
//! that completes requests may need it, does not poll for [`BUSY`] after a yield that took long, and leads no more after some
//! of those ([`STRIKES`]).
//!
//! A signal without effect ([`Turns::new`]) makes a thread leave the kernel to be parked. One that was about to sleep
//! there misses it, and stays until a request wakes it: it is sent another one. Nothing here allocates memory once the
//! threads run. There are no locks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forebay_fuse::protocol::{op, Request};
use forebay_fuse::Device;
use forebay_sys::wait::{self, Learnt, Time};

const DEEP: u32 = 0;
const SHALLOW: u32 = 1;

/// Requests, each by itself, after which a leader polls: at first, and at most after many changes.
const ALONE_MIN: u32 = 64;
const ALONE_MAX: u32 = 1 << 14;
/// So many requests in a row that are served by one leader make the next change as easy as the first.
const STEADY: u32 = 1 << 16;
/// A request that is read in less time than this was there before.
const AT_ONCE: Duration = Duration::from_micros(4);
/// Requests in a row that were there at once.
const BURST: u32 = 2;
/// Longest poll: several times what a program needs between two requests.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// A shorter poll is not made at all.
const LOOK_MIN_NS: u64 = 4_000;
/// If a request ends a sleep sooner than this, a longer poll would have avoided the sleep.
const GAP_SHORT: Duration = Duration::from_micros(200);
/// Polls between two yields: each is a system call.
const LOOKS: u32 = 2;
/// A yield that takes longer than this shows that other threads want the processor.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// No poll for this long after such a yield.
const BUSY: Duration = Duration::from_millis(5);
/// So many such yields end the leading. One is forgotten after [`FORGIVEN`] requests.
const STRIKES: u32 = 4;
const FORGIVEN: u32 = 256;
/// How often threads that are still in the kernel are signalled.
const SIGNAL_EVERY: Duration = Duration::from_millis(2);
/// A parked thread looks so often whether it still has to be.
const PARKED: Duration = Duration::from_secs(1);

/// What the threads of a server share.
#[derive(Debug)]
pub(crate) struct Turns {
    mode: AtomicU32,
    /// Threads that serve a request.
    serving: AtomicU32,
    parked: AtomicU32,
    /// Requests in a row that each came by itself, and how many make a thread lead.
    alone: AtomicU32,
    needed: AtomicU32,
    /// The numbers of the threads, 0 for one that has ended or not begun.
    threads: Vec<AtomicI32>,
    look_ns: Learnt,
}

/// Why a thread takes no more requests.
struct Over(io::Result<()>);

/// Ends the leading of a thread, however it ends.
struct EndOfLeading<'a> {
    turns: &'a Turns,
    device: &'a Device,
    /// The next change to shallow is to be harder.
    is_for_load: bool,
}

impl Drop for EndOfLeading<'_> {
    fn drop(&mut self) {
        self.device.set_waiting(true);
        self.turns.end_shallow(self.is_for_load);
    }
}

fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

impl Turns {
    /// For so many threads. Installs the handler of the signal.
    pub(crate) fn new(threads: usize) -> io::Result<Turns> {
        extern "C" fn nothing(_: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = nothing;
        // SAFETY: an all-zero action is valid: no flags, so that a read that is interrupted ends. The handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            if libc::sigaction(signal(), &action, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Turns {
            mode: AtomicU32::new(DEEP),
            serving: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            alone: AtomicU32::new(0),
            needed: AtomicU32::new(ALONE_MIN),
            threads: (0..threads).map(|_| AtomicI32::new(0)).collect(),
            look_ns: Learnt::new(LOOK_MAX.as_nanos() as u64, LOOK_MIN_NS, 0),
        })
    }

    /// Has the calling thread, the one with this index, serve requests until the connection is over.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub(crate) fn serve(
        &self,
        index: usize,
        device: &Device,
        buffer: &mut [u8],
        mut serve: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        // SAFETY: plain system call.
        self.threads[index].store(unsafe { libc::gettid() }, Ordering::Release);
        let Over(ended) = loop {
            let done = match self.mode.load(Ordering::Acquire) {
                DEEP => self.sleep_for_requests(device, buffer, &mut serve),
                _ => {
                    self.park();
                    continue;
                }
            };
            let led = match done {
                Ok(true) => {
                    let mut end = EndOfLeading { turns: self, device, is_for_load: true };
                    let led = self.lead(device, buffer, &mut serve);
                    end.is_for_load = !matches!(led, Ok(Some(_)));
                    led
                }
                Ok(false) => Ok(None),
                Err(over) => Err(over),
            };
            match led {
                // The others read requests meanwhile.
                Ok(Some(n)) => serve(&buffer[..n]),
                Ok(None) => {}
                Err(over) => break over,
            }
        };
        self.threads[index].store(0, Ordering::Release);
        ended
    }

    /// Serves requests while the mode is deep. True if the thread leads from here on.
    fn sleep_for_requests(
        &self,
        device: &Device,
        buffer: &mut [u8],
        serve: &mut impl FnMut(&[u8]),
    ) -> Result<bool, Over> {
        loop {
            let since = Instant::now();
            let Some(n) = read(device, buffer)? else {
                // It was interrupted, perhaps to be parked.
                match self.mode.load(Ordering::Acquire) {
                    DEEP => continue,
                    _ => return Ok(false),
                }
            };
            let was_there = since.elapsed() < AT_ONCE;
            let is_alone = self.serving.fetch_add(1, Ordering::AcqRel) == 0 && !was_there;
            serve(&buffer[..n]);
            let is_last = self.serving.fetch_sub(1, Ordering::AcqRel) == 1;
            if self.mode.load(Ordering::Acquire) != DEEP {
                return Ok(false);
            }
            if !(is_alone && is_last) {
                self.alone.store(0, Ordering::Relaxed);
                continue;
            }
            let alone = self.alone.fetch_add(1, Ordering::Relaxed) + 1;
            if alone >= self.needed.load(Ordering::Relaxed)
                && self.mode.compare_exchange(DEEP, SHALLOW, Ordering::AcqRel, Ordering::Acquire).is_ok()
            {
                return Ok(true);
            }
        }
    }

    /// Polls for requests and serves them, until several are there at a time. Returns the bytes of one that may take long
    /// and was not served.
    fn lead(
        &self,
        device: &Device,
        buffer: &mut [u8],
        serve: &mut impl FnMut(&[u8]),
    ) -> Result<Option<usize>, Over> {
        device.set_waiting(false);
        self.signal_others();
        let mut signalled = Instant::now();
        let (mut burst, mut served, mut strikes, mut busy_until) = (0, 0u32, 0u32, None::<Instant>);
        loop {
            let since = Instant::now();
            // Otherwise it could be that a thread in the kernel takes the next request meanwhile, which is served as well.
            if self.parked.load(Ordering::Relaxed) + 1 < self.running() && since - signalled >= SIGNAL_EVERY {
                signalled = since;
                self.signal_others();
            }
            let n = match read(device, buffer)? {
                Some(n) => {
                    burst += 1;
                    n
                }
                None => {
                    burst = 0;
                    let found = match busy_until {
                        Some(until) if since < until => None,
                        _ => {
                            let (found, long_yield) = self.look(since, || read(device, buffer).transpose());
                            busy_until = long_yield.map(|ended| ended + BUSY);
                            strikes += u32::from(busy_until.is_some());
                            found
                        }
                    };
                    match found {
                        Some(found) => found?,
                        None => self.sleep(since, device, buffer)?,
                    }
                }
            };
            if is_long(&buffer[..n]) {
                return Ok(Some(n));
            }
            serve(&buffer[..n]);
            if burst >= BURST || strikes >= STRIKES {
                return Ok(None);
            }
            served += 1;
            if served.is_multiple_of(FORGIVEN) {
                strikes = strikes.saturating_sub(1);
            }
            if served == STEADY {
                self.needed.store(ALONE_MIN, Ordering::Relaxed);
            }
        }
    }

    /// Polls. Returns what it has found, and when a yield ended that took long.
    fn look<T>(&self, since: Instant, work: impl FnMut() -> Option<T>) -> (Option<T>, Option<Instant>) {
        let look_ns = self.look_ns.get();
        if look_ns == 0 {
            return (None, None);
        }
        let mut budget = Time::new(since, Duration::from_nanos(look_ns), LOOKS, YIELD_LONG);
        let found = wait::look(&mut budget, work);
        if found.is_none() {
            self.look_ns.shorten(look_ns);
        }
        (found, budget.long_yield_ended())
    }

    /// Sleeps in the kernel until there is a request.
    fn sleep(&self, since: Instant, device: &Device, buffer: &mut [u8]) -> Result<usize, Over> {
        loop {
            let mut fd = libc::pollfd { fd: device.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor, which lives over the call.
            unsafe { libc::poll(&mut fd, 1, -1) };
            if let Some(n) = read(device, buffer)? {
                if since.elapsed() < GAP_SHORT {
                    self.look_ns.lengthen();
                }
                return Ok(n);
            }
        }
    }

    fn running(&self) -> u32 {
        self.threads.iter().filter(|thread| thread.load(Ordering::Relaxed) != 0).count() as u32
    }

    /// Has the other threads leave the kernel.
    fn signal_others(&self) {
        // SAFETY: plain system calls. A number that is that of another thread by now is one of this process, or of none.
        unsafe {
            let (process, own) = (libc::getpid(), libc::gettid());
            for thread in &self.threads {
                let thread = thread.load(Ordering::Acquire);
                if thread != 0 && thread != own {
                    libc::syscall(libc::SYS_tgkill, process, thread, signal());
                }
            }
        }
    }

    /// Waits while another thread leads.
    fn park(&self) {
        self.parked.fetch_add(1, Ordering::AcqRel);
        while self.mode.load(Ordering::Acquire) == SHALLOW {
            wait::sleep(&self.mode, SHALLOW, PARKED);
        }
        self.parked.fetch_sub(1, Ordering::AcqRel);
    }

    /// The leader leads no more.
    fn end_shallow(&self, is_for_load: bool) {
        self.alone.store(0, Ordering::Relaxed);
        if is_for_load {
            let needed = self.needed.load(Ordering::Relaxed);
            self.needed.store((needed * 2).min(ALONE_MAX), Ordering::Relaxed);
        }
        self.mode.store(DEEP, Ordering::Release);
        wait::wake(&self.mode, i32::MAX);
    }
}

/// Reads once. None when there is no request, the kernel withdrew it, or a signal came first.
fn read(device: &Device, buffer: &mut [u8]) -> Result<Option<usize>, Over> {
    match device.read(buffer) {
        Ok(0) => Err(Over(Err(io::ErrorKind::UnexpectedEof.into()))),
        Ok(n) => Ok(Some(n)),
        Err(e) => match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => Ok(None),
            Some(libc::ENODEV) => Err(Over(Ok(()))),
            _ => Err(Over(Err(e))),
        },
    }
}

/// True for a request that may take long: it clears as many bytes as the kernel sends in one, 4 GiB at most.
fn is_long(request: &[u8]) -> bool {
    Request::parse(request).is_ok_and(|request| request.opcode == op::FALLOCATE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::sync::{Condvar, Mutex};
    use std::thread::ThreadId;

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

    /// Serves what `send` sends, and returns what was served, in order.
    fn serve(
        turns: &Turns,
        send: impl FnOnce(&mut File),
        served: impl Fn(u32) + Sync,
    ) -> Vec<(u32, ThreadId)> {
        let (mut writer, devices) = connection();
        let all = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let threads: Vec<_> = devices
                .iter()
                .enumerate()
                .map(|(index, device)| {
                    let (served, all) = (&served, &all);
                    let serve = move |bytes: &[u8]| {
                        let number = u32::from_ne_bytes(*bytes.first_chunk().unwrap());
                        served(number);
                        all.lock().unwrap().push((number, std::thread::current().id()));
                    };
                    scope.spawn(move || turns.serve(index, device, &mut [0; 128], serve))
                })
                .collect();
            send(&mut writer);
            drop(writer);
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            assert!(ended.filter(Result::is_err).count() >= 1, "the connection did not end with an error");
        });
        all.into_inner().unwrap()
    }

    fn eventually(what: &str, done: impl Fn() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < until, "not in time: {what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Sends requests, each when the one before was served.
    fn send_one_by_one(writer: &mut File, numbers: std::ops::Range<u32>, done: &AtomicU32) {
        for number in numbers {
            std::thread::sleep(Duration::from_micros(50));
            let before = done.load(Ordering::Acquire);
            writer.write_all(&number.to_ne_bytes()).unwrap();
            eventually("a request is served", || done.load(Ordering::Acquire) > before);
        }
    }

    #[test]
    fn requests_are_each_served_once_and_all_threads_end_with_the_connection() {
        let turns = Turns::new(THREADS).unwrap();
        let send = |writer: &mut File| {
            for number in 0..4000u32 {
                writer.write_all(&number.to_ne_bytes()).unwrap();
                // One by one, and many at a time.
                if number % 1000 < 500 {
                    std::thread::sleep(Duration::from_micros(30));
                }
            }
        };
        let mut found: Vec<u32> = serve(&turns, send, |_| {}).into_iter().map(|(number, _)| number).collect();
        found.sort_unstable();
        assert!(found.iter().copied().eq(0..4000), "{} requests", found.len());
    }

    #[test]
    fn requests_one_by_one_are_served_by_one_thread_and_a_burst_by_all() {
        let (turns, done) = (Turns::new(THREADS).unwrap(), AtomicU32::new(0));
        let (here, changed) = (Mutex::new(0), Condvar::new());
        let (led, all_sent) = (Mutex::new(None), AtomicU32::new(0));
        const ALONE: u32 = 500_000;
        const LED: u32 = 20;
        let send = |writer: &mut File| {
            let is_led = || turns.parked.load(Ordering::Acquire) + 1 == THREADS as u32;
            // On a busy machine the sender may be ahead of the leader, which is a burst.
            let mut starts = (0..ALONE).step_by(LED as usize);
            let led_from = starts.find(|start| {
                let was_led = is_led();
                send_one_by_one(writer, *start..start + LED, &done);
                was_led && is_led()
            });
            *led.lock().unwrap() = led_from;
            let burst = (ALONE..).take(3 * THREADS);
            burst.for_each(|number| writer.write_all(&number.to_ne_bytes()).unwrap());
            all_sent.store(1, Ordering::Release);
            eventually("all threads take requests again", || turns.mode.load(Ordering::Acquire) == DEEP);
        };
        let served = serve(&turns, send, |number| {
            if number >= ALONE {
                // No request of a burst ends before several threads serve some.
                let mut count = here.lock().unwrap();
                *count += 1;
                changed.notify_all();
                // All are there when the leader has served the first.
                eventually("all are sent", || all_sent.load(Ordering::Acquire) == 1);
                // It serves that one, and then those that make it a burst.
                let led = BURST as usize + 1;
                if *count > led {
                    let waited = changed.wait_timeout_while(count, PATIENCE, |count| *count < led + THREADS);
                    assert!(!waited.unwrap().1.timed_out(), "a request was not served beside others");
                }
            }
            done.fetch_add(1, Ordering::AcqRel);
        });
        let led = led.into_inner().unwrap().expect("no thread leads");
        let is_led = |(number, _): &&(u32, ThreadId)| (led..led + LED).contains(number);
        let leaders: HashSet<ThreadId> = served.iter().filter(is_led).map(|(_, thread)| *thread).collect();
        assert_eq!(leaders.len(), 1);
    }

    /// A request to clear a range. Its number is its length.
    fn fallocate() -> [u8; 72] {
        let mut request = [0; 72];
        request[..4].copy_from_slice(&72u32.to_ne_bytes());
        request[4..8].copy_from_slice(&op::FALLOCATE.to_ne_bytes());
        assert!(is_long(&request));
        request
    }

    #[test]
    fn request_that_may_take_long_ends_the_leading_and_does_not_make_the_next_harder() {
        let (turns, done) = (Turns::new(THREADS).unwrap(), AtomicU32::new(0));
        const LED: u32 = 20;
        let send = |writer: &mut File| {
            let is_led = || turns.mode.load(Ordering::Acquire) == SHALLOW;
            let mut starts = (100..u32::MAX).step_by(LED as usize);
            // On a busy machine the leading may end for another reason in the meantime.
            let is_as_before = (0..6).any(|_| {
                let led = starts.by_ref().take(100_000).find(|start| {
                    send_one_by_one(writer, *start..start + LED, &done);
                    is_led()
                });
                assert!(led.is_some(), "no thread leads");
                let (needed, before) = (turns.needed.load(Ordering::Acquire), done.load(Ordering::Acquire));
                assert!(needed < ALONE_MAX, "it would not show");
                writer.write_all(&fallocate()).unwrap();
                eventually("it is served", || done.load(Ordering::Acquire) > before && !is_led());
                turns.needed.load(Ordering::Acquire) == needed
            });
            assert!(is_as_before, "the next change takes {} requests", turns.needed.load(Ordering::Acquire));
        };
        serve(&turns, send, |_| {
            done.fetch_add(1, Ordering::AcqRel);
        });
    }
}
