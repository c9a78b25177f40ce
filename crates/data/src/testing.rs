//! For tests that mount: a mount namespace of the test's own, so that nothing is left even when it is killed.

use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

/// Runs `test` on a thread in a mount namespace of its own; says why and returns where that is not allowed.
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

/// Takes a mount away that nothing of the test uses any more. A process that another test is just starting has all
/// descriptors of this one until it runs its program, and the mount is busy so long. `unmount` fails with whether that
/// is why.
pub(crate) fn when_free(mut unmount: impl FnMut() -> Result<(), bool>) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(is_busy) = unmount() {
        assert!(is_busy && std::time::Instant::now() < until, "it cannot be unmounted; busy: {is_busy}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
