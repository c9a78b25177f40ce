//! A pool that emulates a medium, for a program under the preload library: its descriptors are the mount's, so there has to
//! be one (docs/emulation.md).

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_server::control::{self, MountOptions};
use forebay_server::directory::RUN_MOUNT;
use forebay_types::{Code, Error, Result};

/// How long another run of this node may take to mount the pool.
const MOUNT_TIME: Duration = Duration::from_secs(25);

/// Mounts the pool in its own directory if it emulates a medium and has no mount. The mount ends with the pool. Where it
/// cannot be mounted the program starts nevertheless, since it may use forebay.h or MPI-IO alone: opens of others fail.
pub(super) fn ensure_mounted(dir: &Path) -> Result<()> {
    let Some(mounts) = control::mounts_if_paced(dir)? else { return Ok(()) };
    if mounts.is_empty() {
        let at = dir.join(RUN_MOUNT);
        let failed = match std::fs::create_dir(&at) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                Error::io("cannot make its directory", &e)
            }
            _ => match control::mount(dir, &at, MountOptions { allow_other: false, no_passthrough: false }) {
                Ok(_) => return Ok(()),
                Err(e) => e,
            },
        };
        // Busy: another run of this node was faster.
        if failed.code != Code::Busy {
            note!(
                "forebay: warning: programs that use neither MPI-IO nor forebay.h cannot open files in a pool that \
                 emulates a medium: it cannot be mounted on {}: {failed}",
                at.display()
            );
            return Ok(());
        }
    }
    let until = Instant::now() + MOUNT_TIME;
    loop {
        let mounts = control::mounts_if_paced(dir)?.unwrap_or_default();
        if mounts.iter().any(|mount| mount.state == "mounted") {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(Error::new(Code::TimedOut, "cannot run a program in a pool that emulates a medium")
                .why("its reads and writes are paced by the pool's mount, which is not there yet")
                .cure("`forebay status` says why"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
