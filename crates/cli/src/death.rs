//! Ending like a program that was ended by a signal.

use forebay_sys::signals::SignalMask;

/// Ends this process by a signal, so that its parent sees the same status as from the program.
pub(crate) fn die_of(signal: i32) -> ! {
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
    forebay_sys::signals::reset(signal);
    // SAFETY: sends this process a signal; no memory is involved.
    unsafe { libc::kill(libc::getpid(), signal) };
    SignalMask::empty().set();
    // Reached after a signal that does not end a process.
    std::process::exit(128 + signal)
}
