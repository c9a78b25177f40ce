//! A pool that emulates a medium, for a program under the preload library: its descriptors are the mount's, so there has to
//! be one (docs/emulation.md).

use std::path::Path;

use forebay_server::control::{self, MountOptions};
use forebay_server::directory::RUN_MOUNT;
use forebay_types::{Code, Error, Result};

/// Mounts the pool in its own directory if it emulates a medium and has no mount. The mount ends with the pool.
pub(super) fn ensure_mounted(dir: &Path) -> Result<()> {
    let status = control::status(dir)?;
    let profile = status.more.get("media_profile").filter(|profile| profile.is_object());
    if profile.is_none() || !status.mounts.is_empty() {
        return Ok(());
    }
    let at = dir.join(RUN_MOUNT);
    let failed = match std::fs::create_dir(&at) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Error::io("cannot make its directory", &e),
        _ => match control::mount(dir, &at, MountOptions { allow_other: false, no_passthrough: false }) {
            Ok(_) => return Ok(()),
            Err(e) => e,
        },
    };
    // Another run of the same pool may have been faster.
    if control::status(dir).is_ok_and(|status| status.mounts.iter().any(|mount| mount.state == "mounted")) {
        return Ok(());
    }
    Err(Error::new(Code::NotSupported, "cannot run a program in a pool that emulates a medium")
        .why(format!("its reads and writes are paced by the pool's mount, and {}: {failed}", at.display()))
        .cure("use a node with FUSE, or programs that use MPI-IO or forebay.h"))
}
