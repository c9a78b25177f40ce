//! Processes that start together: a barrier and a table of times in memory that forked processes share.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use forebay_sys::wait;

/// Maximum processes of one driver.
pub(crate) const PROCESSES_MAX: usize = 64;
/// Maximum phases of one driver.
const PHASES_MAX: usize = 16;

struct Shared {
    arrived: AtomicU32,
    round: AtomicU32,
    failed: AtomicU32,
    started_ns: [[AtomicU64; PROCESSES_MAX]; PHASES_MAX],
    ended_ns: [[AtomicU64; PROCESSES_MAX]; PHASES_MAX],
}

/// The barrier as one process sees it.
pub(crate) struct Gate {
    shared: &'static Shared,
    processes: usize,
    /// This process's number, from 0.
    pub(crate) process: usize,
    phase: usize,
}

/// The machine's clock, which all processes share.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Gate {
    /// Runs `work` in `processes` forked processes, not in this one. Returns the seconds of each phase, from the first
    /// start to the last end.
    pub(crate) fn run(
        processes: usize,
        work: impl Fn(&mut Gate) -> Result<(), String>,
    ) -> Result<Vec<f64>, String> {
        assert!((1..=PROCESSES_MAX).contains(&processes));
        // SAFETY: new anonymous memory, shared with children, never unmapped; all zeros is a valid `Shared`.
        let shared: &'static Shared = unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                size_of::<Shared>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if at == libc::MAP_FAILED {
                return Err("no shared memory".into());
            }
            &*at.cast::<Shared>()
        };
        let mut children = Vec::new();
        for process in 0..processes {
            // SAFETY: this process has one thread, so the child may do anything.
            match unsafe { libc::fork() } {
                -1 => return Err("fork failed".into()),
                0 => {
                    let mut gate = Gate { shared, processes, process, phase: 0 };
                    let status = match work(&mut gate) {
                        Ok(()) => 0,
                        Err(message) => {
                            eprintln!("process {process}: {message}");
                            shared.failed.store(1, Ordering::SeqCst);
                            1
                        }
                    };
                    // SAFETY: ends the child without its parent's exit handlers.
                    unsafe { libc::_exit(status) }
                }
                child => children.push(child),
            }
        }
        let mut well = true;
        for child in children {
            let mut status = 0;
            // SAFETY: the status is ours.
            well &= unsafe { libc::waitpid(child, &mut status, 0) } == child && status == 0;
        }
        if !well {
            return Err("a process of the driver failed".into());
        }
        let times = |table: &[AtomicU64; PROCESSES_MAX]| -> Vec<u64> {
            table[..processes].iter().map(|t| t.load(Ordering::SeqCst)).collect()
        };
        let seconds = (0..PHASES_MAX).map(|phase| {
            let first = times(&shared.started_ns[phase]).into_iter().min().unwrap_or(0);
            let last = times(&shared.ended_ns[phase]).into_iter().max().unwrap_or(0);
            (last.saturating_sub(first)) as f64 / 1e9
        });
        Ok(seconds.take_while(|s| *s > 0.0).collect())
    }

    /// Waits until all processes have arrived. Sleeps, because spinning would take the core that the other processes
    /// and a file system's own processes need.
    pub(crate) fn wait(&self) -> Result<(), String> {
        let round = self.shared.round.load(Ordering::SeqCst);
        if self.shared.arrived.fetch_add(1, Ordering::SeqCst) + 1 == self.processes as u32 {
            self.shared.arrived.store(0, Ordering::SeqCst);
            self.shared.round.store(round + 1, Ordering::SeqCst);
            wait::wake(&self.shared.round, i32::MAX);
        }
        while self.shared.round.load(Ordering::SeqCst) == round {
            if self.shared.failed.load(Ordering::SeqCst) != 0 {
                return Err("stops, because another process failed".into());
            }
            // A process that fails wakes no other, so each sleep is limited.
            wait::sleep(&self.shared.round, round, Duration::from_millis(200));
        }
        Ok(())
    }

    /// One timed phase, which all processes begin together.
    pub(crate) fn timed(&mut self, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        self.wait()?;
        self.shared.started_ns[self.phase][self.process].store(now_ns(), Ordering::SeqCst);
        work()?;
        self.shared.ended_ns[self.phase][self.process].store(now_ns(), Ordering::SeqCst);
        self.phase += 1;
        self.wait()
    }
}
