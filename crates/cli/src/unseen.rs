//! Signals during work that may wait for a worker or a mover that does not answer, and then sees no signal.

use std::io::PipeReader;
use std::os::fd::AsFd;
use std::time::Duration;

use forebay_sys::signals::{is_ignored, Signals};
use forebay_types::{Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// How long a signal may wait to be seen: longer than the mover takes to say how far it is.
const UNSEEN_MAX: Duration = Duration::from_secs(2);

/// Blocks those of the signals that the starter of this process does not ignore.
pub(crate) fn block(signals: &[i32]) -> Result<Signals> {
    let wanted: Vec<i32> = signals.iter().copied().filter(|signal| !is_ignored(*signal)).collect();
    Signals::block(&wanted).map_err(|e| Error::io("cannot wait for signals", &e))
}

/// Does `work`. If a signal comes that `work` does not take within [`UNSEEN_MAX`], another thread calls `leave`, which ends
/// this process.
pub(crate) fn guarded<T>(
    signals: &Signals,
    leave: impl FnOnce(i32) + Send,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let failed = |e: std::io::Error| Error::io("cannot wait for signals", &e);
    let (over, working) = std::io::pipe().map_err(failed)?;
    std::thread::scope(|scope| {
        let guard = move || {
            if let Some(signal) = unseen_signal(signals, &over) {
                leave(signal)
            }
        };
        std::thread::Builder::new().spawn_scoped(scope, guard).map_err(failed)?;
        let done = work();
        drop(working);
        done
    })
}

/// Waits for a signal that nobody takes for [`UNSEEN_MAX`]. None once `over` is closed.
fn unseen_signal(signals: &Signals, over: &PipeReader) -> Option<i32> {
    loop {
        let mut awaited = [PollFd::new(signals, PollFlags::IN), PollFd::new(over, PollFlags::IN)];
        let _ = poll(&mut awaited, None);
        let [has_come, is_over] = awaited.map(|fd| !fd.revents().is_empty());
        if is_over || has_come && can_be_read(over, UNSEEN_MAX) {
            return None;
        }
        if let Some(received) = signals.next() {
            return Some(received.signal);
        }
    }
}

/// True once `fd` can be read, or was closed at its other end; false if that has not come within `period`.
pub(crate) fn can_be_read(fd: &impl AsFd, period: Duration) -> bool {
    let limit = Timespec { tv_sec: period.as_secs() as i64, tv_nsec: period.subsec_nanos().into() };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
}
