//! For tests that mount: a mount namespace for one test, so that no mount remains even if the test is killed.

use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

/// Runs `test` on a thread in a new mount namespace. Prints the reason and returns if that is not allowed.
pub(crate) fn in_mount_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the flag does not unshare the table of descriptors.
            if let Err(e) = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) } {
                println!("skipped: this user may not enter a mount namespace: {e}");
                return;
            }
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            test();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Removes a mount that the test no longer uses. A process that another test is just starting has copies of all
/// descriptors of this one until its exec, and the mount stays busy until then. `unmount` returns Err(true) if the
/// mount was busy.
pub(crate) fn when_free(mut unmount: impl FnMut() -> Result<(), bool>) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(is_busy) = unmount() {
        assert!(is_busy && std::time::Instant::now() < until, "it cannot be unmounted; busy: {is_busy}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
