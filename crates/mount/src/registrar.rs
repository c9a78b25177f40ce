//! Who registers backing files with the kernel for passthrough: this process where it may, else the helper.
//!
//! A helper may die. Files that are opened then are served by requests, until another helper is found, which is looked for
//! now and then. What was registered stays so.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_register::backing;

use crate::device::Device;

/// Pause between two looks for another helper.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// One of the two.
#[derive(Debug)]
pub(crate) enum Registrar {
    /// This process has CAP_SYS_ADMIN.
    Itself(Arc<Device>),
    /// `forebay-register` has.
    Helper(Helper),
}

/// The helper, while there is one.
#[derive(Debug)]
pub(crate) struct Helper {
    device: Arc<Device>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    helper: Option<Arc<forebay_register::Registrar>>,
    looked: Instant,
}

/// True when the helper is gone, or as good as gone.
fn is_gone(e: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, InvalidData, TimedOut, UnexpectedEof, WouldBlock};
    matches!(e.kind(), BrokenPipe | ConnectionReset | InvalidData | TimedOut | UnexpectedEof | WouldBlock)
}

impl Helper {
    pub(crate) fn new(device: &Arc<Device>, helper: forebay_register::Registrar) -> Helper {
        let state = State { helper: Some(Arc::new(helper)), looked: Instant::now() };
        Helper { device: Arc::clone(device), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The helper, or another when it is gone.
    fn get(&self) -> Option<Arc<forebay_register::Registrar>> {
        let mut state = self.state();
        if state.helper.is_none() && state.looked.elapsed() >= LOOK_AGAIN {
            state.helper = forebay_register::Registrar::find(self.device.as_fd()).ok().map(Arc::new);
            state.looked = Instant::now();
            if state.helper.is_some() {
                tracing::info!("another forebay-register was found");
            }
        }
        state.helper.clone()
    }

    fn register(&self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        let Some(helper) = self.get() else { return Ok(None) };
        match helper.register(file) {
            Err(e) if is_gone(&e) => {
                tracing::error!(
                    "forebay-register is gone ({e}): files are served by requests until another is found"
                );
                let mut state = self.state();
                if state.helper.as_ref().is_some_and(|current| Arc::ptr_eq(current, &helper)) {
                    (state.helper, state.looked) = (None, Instant::now());
                }
                Ok(None)
            }
            result => result.map(Some),
        }
    }
}

impl Registrar {
    /// Registers a regular file: the number by which opens name it, or none when that cannot be done for now.
    pub(crate) fn register(&self, file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        match self {
            Registrar::Itself(device) => backing::register(device.as_fd(), file).map(Some),
            Registrar::Helper(helper) => helper.register(file),
        }
    }

    /// Forgets a registration; opens that use it go on. Without a helper the kernel forgets it with the connection.
    pub(crate) fn unregister(&self, id: i32) {
        match self {
            Registrar::Itself(device) => backing::unregister(device.as_fd(), id),
            Registrar::Helper(helper) => {
                if let Some(helper) = helper.get() {
                    helper.unregister(id);
                }
            }
        }
    }
}
