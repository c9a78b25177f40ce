//! Libfabric's providers must not change the process's actions at fatal signals. This test is a program of its own, as
//! the library is loaded once in a process.

use forebay_fabric_sys::Library;

const SIGNALS: [i32; 4] = [libc::SIGABRT, libc::SIGSEGV, libc::SIGINT, libc::SIGTERM];

fn handler(signal: i32) -> usize {
    // SAFETY: an action of zeros is valid. Null changes nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, std::ptr::null(), &mut action), 0);
        action.sa_sigaction
    }
}

#[test]
fn loading_the_library_leaves_signals_as_they_were() {
    let before = SIGNALS.map(handler);
    if let Err(why) = Library::get() {
        return println!("skipped: {why}");
    }
    assert_eq!(SIGNALS.map(handler), before);
}
