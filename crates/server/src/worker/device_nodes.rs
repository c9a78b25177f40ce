//! Backing nodes of FIFOs and devices: a program can open them only as nodes of the kernel.

use forebay_data::{BackingName, Target};
use forebay_types::{Attr, Code, Ino, Kind};
use rustix::fs::{AtFlags, FileType, Mode};
use rustix::io::Errno;

fn code(e: Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

/// Creates the kernel's node of a FIFO or device. An existing one stays as it is.
pub(super) fn create(target: &Target, attr: &Attr) -> Result<(), Code> {
    let kind = match attr.kind() {
        Kind::Fifo => FileType::Fifo,
        Kind::CharDevice => FileType::CharacterDevice,
        Kind::BlockDevice => FileType::BlockDevice,
        Kind::File | Kind::Directory | Kind::Symlink | Kind::Socket => return Err(Code::NotSupported),
    };
    let name = BackingName::new(attr.ino, 0, 0);
    match rustix::fs::mknodat(target.directory(), name.as_c_str(), kind, Mode::RWXU, attr.rdev) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(code(e)),
    }
}

/// Gives a backing file the mode that its owner needs to open it. A program's umask may have removed bits of it. The
/// mark of a file that a mover has copied stays.
pub(super) fn repair_mode(target: &Target, ino: Ino) -> Result<(), Code> {
    let (name, directory) = (BackingName::new(ino, 0, 0), target.directory());
    let stat = rustix::fs::statat(directory, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW).map_err(code)?;
    let mode = Mode::from_raw_mode(stat.st_mode) & Mode::SVTX | Mode::RWXU;
    rustix::fs::chmodat(directory, name.as_c_str(), mode, AtFlags::empty()).map_err(code)
}

/// Removes the kernel's node, or a backing file whose layout is no longer known to be single.
pub(super) fn remove(target: &Target, ino: Ino) -> Result<(), Code> {
    let name = BackingName::new(ino, 0, 0);
    match rustix::fs::unlinkat(target.directory(), name.as_c_str(), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(code(e)),
    }
}
