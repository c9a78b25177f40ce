//! Registration of backing files with the kernel for passthrough: by this process if it has the privilege, else by a
//! helper, `forebay-register`.
//!
//! A helper may die or hang. A thread, the keeper, notices this and searches for another helper. No open waits for
//! that search: files that are opened meanwhile are served by requests until their last release. A helper that hangs
//! delays the opens that wait for it once, by the timeout of [`forebay_register::Registrar`]. Then it is given up, and
//! its later answers are ignored.
//!
//! Registrations outlive the helper, because they belong to the FUSE connection, so the next helper can end them. It
//! first receives three kinds to end: registrations that ended while there was no helper, registrations whose end the
//! last helper may not have received, and registrations that the last helper made without an answer.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_register::{backing, Failure};

use forebay_fuse::Device;

/// Pause between two searches for another helper: at first, and at most.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(60);
/// A helper that lived longer than this did not fail at its start.
const LONG_LIFE: Duration = Duration::from_secs(60);
/// A larger gap between the numbers of two registrations is not taken for registrations without an answer.
const MISSED_MAX: i32 = 64;
const STACK_BYTES: usize = 256 * 1024;

/// The process that registers files.
#[derive(Debug)]
pub(crate) enum Registrar {
    /// This process, which has CAP_SYS_ADMIN.
    Itself(Arc<Device>),
    /// `forebay-register`, which has CAP_SYS_ADMIN.
    Helper(Arc<Helper>),
}

/// The helper, while there is one.
#[derive(Debug)]
pub(crate) struct Helper {
    device: Arc<Device>,
    /// A file that a new helper registers to prove that it works.
    probe: OwnedFd,
    /// Held across a request to the helper and its answer, so that numbers are seen in the order of their
    /// registrations.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    helper: Option<forebay_register::Registrar>,
    /// A helper that was given up. The keeper reaps it.
    dead: Option<forebay_register::Registrar>,
    numbers: Numbers,
}

/// Registrations that have to be ended.
#[derive(Debug, Default)]
struct Numbers {
    /// The greatest number that the kernel gave.
    greatest: i32,
    /// Their end has not been sent to a helper yet.
    pending: Vec<i32>,
    /// Their end was sent to the helper after its last answer: it may not have received it.
    unconfirmed: Vec<i32>,
}

impl Numbers {
    /// The helper answered with the number of a new registration. It handles messages in order, so it has received all
    /// earlier ones.
    fn answered(&mut self, id: i32) {
        self.unconfirmed.clear();
        // The kernel numbers the registrations of a connection in order (idr_alloc_cyclic), and all are made here, one
        // after the other. A number in between belongs to a registration whose answer was lost.
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
    /// Ends the pending registrations if there is a helper. On an error the helper has been given up.
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

    /// Handles a helper's failure: it is not used again. The end of its connection wakes the keeper.
    fn give_up(&mut self, e: io::Error) -> io::Error {
        self.numbers.gone();
        self.dead = self.helper.take();
        tracing::error!(
            "forebay-register failed ({e}): file data go through forebay-mount until another helper is found"
        );
        e
    }

    fn register(&mut self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        let Some(helper) = &mut self.helper else { return Ok(None) };
        match helper.register(file) {
            Ok(id) => {
                self.numbers.answered(id);
                // A helper that fails here has registered the file nevertheless.
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
    /// Starts with `helper`, which registers `probe` to prove that it can. Returns the kernel's error if it cannot.
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

    /// Tests a helper and puts it into service. Returns a descriptor that hangs up when the helper ends.
    fn employ(&self, mut helper: forebay_register::Registrar) -> io::Result<OwnedFd> {
        let watch = helper.watch()?;
        // Opens are served by requests meanwhile, because the helper is not in the state yet.
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
        // The end of the helper's connection wakes the keeper.
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).helper = None;
    }
}

/// Waits until the other end is closed, or this end was shut down.
fn wait_for_end(watch: &OwnedFd) {
    let mut fds = [libc::pollfd { fd: watch.as_raw_fd(), events: 0, revents: 0 }];
    // SAFETY: the array is as long as said. An interrupted wait begins anew.
    while unsafe { libc::poll(fds.as_mut_ptr(), 1, -1) } < 0 {}
}

/// The keeper: notices the end of a helper, reaps it, and searches for another.
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
        // Outside the state's lock, because dropping a helper waits for its process, which may not die.
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
    /// Registers a regular file. Returns the number that opens give to the kernel, or none if no helper can register
    /// now.
    pub(crate) fn register(&self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        match self {
            Registrar::Itself(device) => backing::register(device.as_fd(), file).map(Some),
            Registrar::Helper(helper) => helper.state().register(file),
        }
    }

    /// Ends a registration; opens that use it continue. While there is no helper, the end waits for the next one.
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
