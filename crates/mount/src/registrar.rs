//! Registration of backing files with the kernel for passthrough: by this process where it may, else by the helper.
//!
//! A helper may die or hang. A thread, the keeper, notices that and looks for another. No open waits for a helper to be
//! found: files that are opened meanwhile are served by requests until their last release. A helper that hangs delays
//! the opens that wait for it once, by the spin of [`forebay_register::Registrar`]; then it is given up, and what it
//! answers later is not heard.
//!
//! What was registered stays so when the helper dies: registrations belong to the FUSE connection, so that the next
//! helper can end them. It is told of three kinds first: those that ended while there was no helper, those of which it
//! is not known whether the last one heard, and those that it made and could not answer for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_register::{backing, Failure};

use crate::device::Device;

/// Pause between two looks for another helper: at first, and at most.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(60);
/// A helper that lived longer than this did not fail at its start.
const LONG_LIFE: Duration = Duration::from_secs(60);
/// More numbers than this are not missing between two registrations.
const MISSED_MAX: i32 = 64;
const STACK_BYTES: usize = 256 * 1024;

/// One of the two.
#[derive(Debug)]
pub(crate) enum Registrar {
    /// This process has CAP_SYS_ADMIN.
    Itself(Arc<Device>),
    /// `forebay-register` has.
    Helper(Arc<Helper>),
}

/// The helper, while there is one.
#[derive(Debug)]
pub(crate) struct Helper {
    device: Arc<Device>,
    /// A file that a new helper shows with that it works.
    probe: OwnedFd,
    /// Held over a request to the helper and its answer, so that numbers are seen in the order of their registrations.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    helper: Option<forebay_register::Registrar>,
    /// One that was given up, for the keeper to bury.
    dead: Option<forebay_register::Registrar>,
    numbers: Numbers,
}

/// Which registrations are to end.
#[derive(Debug, Default)]
struct Numbers {
    /// The greatest number that the kernel gave.
    greatest: i32,
    /// To be ended by the next helper.
    pending: Vec<i32>,
    /// The helper was told to end these after its last answer: it may not have heard.
    unconfirmed: Vec<i32>,
}

impl Numbers {
    /// The helper answered with a new registration's number. Its messages are in order, so it has heard all before.
    fn answered(&mut self, id: i32) {
        self.unconfirmed.clear();
        // The kernel numbers the registrations of a connection in order (idr_alloc_cyclic), and all are made here, one
        // after the other: a number in between is of a registration whose answer was not heard.
        if self.greatest > 0 && id > self.greatest && id - self.greatest <= MISSED_MAX {
            self.pending.extend(self.greatest + 1..id);
        }
        self.greatest = self.greatest.max(id);
    }

    /// The helper is gone.
    fn gone(&mut self) {
        self.pending.append(&mut self.unconfirmed);
    }
}

impl State {
    /// Ends registrations as long as there is a helper; an error is that there is none any more.
    fn flush(&mut self) -> io::Result<()> {
        let Some(helper) = &mut self.helper else { return Ok(()) };
        while let Some(id) = self.numbers.pending.last().copied() {
            if let Err(e) = helper.unregister(id) {
                return Err(self.give_up(e));
            }
            self.numbers.pending.pop();
            self.numbers.unconfirmed.push(id);
        }
        Ok(())
    }

    /// The helper failed: it is not used again, and the keeper is woken by its connection's end.
    fn give_up(&mut self, e: io::Error) -> io::Error {
        self.numbers.gone();
        self.dead = self.helper.take();
        tracing::error!(
            "forebay-register does not serve ({e}): files are served by requests until another is found"
        );
        e
    }

    fn register(&mut self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        let Some(helper) = &mut self.helper else { return Ok(None) };
        match helper.register(file) {
            Ok(id) => {
                self.numbers.answered(id);
                // One that fails at this has registered the file all the same.
                let _ = self.flush();
                Ok(Some(id))
            }
            Err(Failure::Refused(e)) => Err(e),
            Err(Failure::Gone(e)) => {
                self.give_up(e);
                Ok(None)
            }
        }
    }

    fn unregister(&mut self, id: i32) {
        self.numbers.pending.push(id);
        let _ = self.flush();
    }
}

impl Helper {
    /// With `helper`, which registers `probe` to show that it can; what the kernel says if it cannot.
    pub(crate) fn new(
        device: &Arc<Device>,
        helper: forebay_register::Registrar,
        probe: OwnedFd,
    ) -> io::Result<Arc<Helper>> {
        let state = Mutex::default();
        let new = Arc::new(Helper { device: Arc::clone(device), probe, state });
        let watch = new.employ(helper)?;
        let weak = Arc::downgrade(&new);
        let keeper = std::thread::Builder::new().name("registrar".into()).stack_size(STACK_BYTES);
        keeper.spawn(move || keep(&weak, watch))?;
        Ok(new)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries a helper and has it serve; what hangs up when it ends.
    fn employ(&self, mut helper: forebay_register::Registrar) -> io::Result<OwnedFd> {
        let watch = helper.watch()?;
        // Opens go by requests meanwhile: it is not in the state yet.
        let id = helper.register(self.probe.as_fd())?;
        let mut state = self.state();
        state.numbers.answered(id);
        state.helper = Some(helper);
        state.unregister(id);
        Ok(watch)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // Its connection ends, which wakes the keeper.
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).helper = None;
    }
}

/// Waits until the other end is closed, or ours was shut down.
fn wait_for_end(watch: &OwnedFd) {
    let mut fds = [libc::pollfd { fd: watch.as_raw_fd(), events: 0, revents: 0 }];
    // SAFETY: the array is as long as said. An interrupted wait begins anew.
    while unsafe { libc::poll(fds.as_mut_ptr(), 1, -1) } < 0 {}
}

/// The keeper: sees a helper's end, buries it, and looks for another.
fn keep(helper: &Weak<Helper>, mut watch: OwnedFd) {
    let mut pause = LOOK_AGAIN;
    loop {
        let employed = Instant::now();
        wait_for_end(&watch);
        let Some(this) = helper.upgrade() else { return };
        let dead = {
            let mut state = this.state();
            if state.helper.is_some() {
                state.give_up(io::ErrorKind::UnexpectedEof.into());
            }
            state.dead.take()
        };
        // Not in the state's lock: a process that does not die is waited for.
        drop((dead, this));
        if employed.elapsed() >= LONG_LIFE {
            pause = LOOK_AGAIN;
        }
        watch = loop {
            std::thread::sleep(pause);
            pause = (2 * pause).min(LOOK_AGAIN_MAX);
            let Some(this) = helper.upgrade() else { return };
            let found = forebay_register::Registrar::find(this.device.as_fd()).map_err(io::Error::other);
            match found.and_then(|found| this.employ(found)) {
                Ok(watch) => break watch,
                Err(e) => tracing::debug!("no other forebay-register: {e}"),
            }
        };
        tracing::info!("another forebay-register was found");
    }
}

impl Registrar {
    /// Registers a regular file: the number by which opens name it, or none when that cannot be done for now.
    pub(crate) fn register(&self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        match self {
            Registrar::Itself(device) => backing::register(device.as_fd(), file).map(Some),
            Registrar::Helper(helper) => helper.state().register(file),
        }
    }

    /// Forgets a registration; opens that use it go on. While there is no helper it waits for one.
    pub(crate) fn unregister(&self, id: i32) {
        match self {
            Registrar::Itself(device) => backing::unregister(device.as_fd(), id),
            Registrar::Helper(helper) => helper.state().unregister(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registration_that_was_not_heard_of_is_ended() {
        let mut numbers = Numbers::default();
        numbers.answered(40);
        assert!(numbers.pending.is_empty(), "those before the first are not missing");
        numbers.answered(41);
        numbers.answered(44);
        assert_eq!(numbers.pending, [42, 43]);
        numbers.answered(3);
        numbers.answered(45);
        assert_eq!(numbers.pending, [42, 43], "the kernel began anew");
    }

    #[test]
    fn end_of_a_registration_that_the_helper_may_not_have_heard_of_is_repeated() {
        let mut numbers = Numbers { unconfirmed: vec![1, 2], ..Numbers::default() };
        numbers.answered(7);
        numbers.unconfirmed.push(3);
        numbers.gone();
        assert_eq!(numbers.pending, [3]);
    }
}
