//! Who registers backing files with the kernel for passthrough: this process where it may, else the helper.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::device::Device;

/// One of the two.
#[derive(Debug)]
pub(crate) enum Registrar {
    /// This process has CAP_SYS_ADMIN.
    Itself(Arc<Device>),
    /// `forebay-register` has.
    Helper(forebay_register::Registrar),
}

impl Registrar {
    /// Registers a regular file; the number by which opens name it.
    pub(crate) fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        match self {
            Registrar::Itself(device) => device.register(file),
            Registrar::Helper(helper) => helper.register(file),
        }
    }

    /// Forgets a registration; opens that use it go on.
    pub(crate) fn unregister(&self, id: i32) {
        match self {
            Registrar::Itself(device) => device.unregister(id),
            Registrar::Helper(helper) => helper.unregister(id),
        }
    }
}
