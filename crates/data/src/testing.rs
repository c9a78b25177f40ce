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
