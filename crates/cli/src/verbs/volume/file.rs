//! The file's side of a copy.
//!
//! A file that is replaced is written under a temporary name in its directory, made durable and renamed, so that its name
//! always has a whole file. The temporary name is a fixed one: what a killed copy has left is used by the next one. A
//! lock on it excludes a second copy to the same file.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{fchown, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error, Result};
use rustix::fs::{FlockOperation, SeekFrom};
use rustix::io::Errno;

use crate::table;

/// Zeros of this many bytes and more are left as holes.
const HOLE_BYTES: usize = 64 << 10;
/// Bytes of a file's name that its temporary name has.
const STEM_BYTES_MAX: usize = 230;

fn failed(verb: &str, path: &Path, e: &io::Error) -> Error {
    Error::io(format!("cannot {verb} {}", table::printable(path.as_os_str().as_bytes())), e)
}

fn refused(code: Code, path: &Path, why: &str) -> Error {
    Error::new(code, format!("cannot copy to or from {}", table::printable(path.as_os_str().as_bytes())))
        .why(why)
}

/// A file that is read.
#[derive(Debug)]
pub(super) struct Input {
    file: File,
    path: PathBuf,
    /// Its size when it was opened.
    pub(super) bytes: u64,
}

impl Input {
    pub(super) fn open(path: &Path) -> Result<Input> {
        let open = || {
            // A FIFO without a writer does not hold this up.
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
            let kind = file.metadata()?.file_type();
            let is_seekable = kind.is_file() || kind.is_block_device();
            let bytes = if is_seekable { rustix::fs::seek(&file, SeekFrom::End(0))? } else { 0 };
            Ok((file, is_seekable, bytes))
        };
        let (file, is_seekable, bytes) = open().map_err(|e| failed("read", path, &e))?;
        if !is_seekable {
            return Err(refused(Code::Invalid, path, "it is neither a regular file nor a block device"));
        }
        Ok(Input { file, path: path.to_owned(), bytes })
    }

    /// The first range of data within `within`; the bytes before it are zeros. None if there are only zeros.
    pub(super) fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>> {
        let failed = |e: Errno| failed("read", &self.path, &e.into());
        let start = match rustix::fs::seek(&self.file, SeekFrom::Data(within.start)) {
            Ok(start) => start,
            Err(Errno::NXIO) => {
                // Behind its last data, or behind its end.
                let bytes = rustix::fs::fstat(&self.file).map_err(failed)?.st_size as u64;
                return if bytes < within.end.min(self.bytes) { Err(self.shorter()) } else { Ok(None) };
            }
            // The file system does not know its holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(within)),
            Err(e) => return Err(failed(e)),
        };
        if start >= within.end {
            return Ok(None);
        }
        match rustix::fs::seek(&self.file, SeekFrom::Hole(start)) {
            Ok(end) => Ok(Some(start..end.clamp(start, within.end))),
            Err(Errno::NXIO) => Err(self.shorter()),
            Err(e) => Err(failed(e)),
        }
    }

    fn shorter(&self) -> Error {
        refused(Code::Stale, &self.path, "it became shorter meanwhile")
    }

    /// Fills the buffer.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.shorter(),
            _ => failed("read", &self.path, &e),
        })
    }
}

/// A file that is written.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    path: PathBuf,
    /// The name until it is whole; none for a file that is changed in place.
    temporary: Option<PathBuf>,
    /// Owner, group and mode that a new file gets when it is whole.
    owner: Option<(u32, u32)>,
    mode: u32,
}

impl Output {
    /// A file that is changed in place, and created if it is missing.
    pub(super) fn in_place(path: &Path, mode: u32) -> Result<Output> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(mode).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(|e| failed("write", path, &e))?;
        let kind = file.metadata().map_err(|e| failed("write", path, &e))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(refused(Code::Invalid, path, "it is neither a regular file nor a block device"));
        }
        Ok(Output { file, path: path.to_owned(), temporary: None, owner: None, mode })
    }

    /// A file that takes the place of the one at `path`, or of nothing, at [`Output::finish`]. It gets owner and mode of
    /// the one that it replaces, else `mode`. A block device is written in place.
    pub(super) fn replacing(path: &Path, mode: u32) -> Result<Output> {
        // A symbolic link stays: the file that it names is replaced.
        let path = match std::fs::symlink_metadata(path) {
            Ok(found) if found.is_symlink() => {
                std::fs::canonicalize(path).map_err(|e| failed("replace", path, &e))?
            }
            _ => path.to_owned(),
        };
        let before = match std::fs::symlink_metadata(&path) {
            Ok(found) if found.file_type().is_block_device() => return Output::in_place(&path, mode),
            Ok(found) if found.is_dir() => {
                return Err(refused(Code::IsDirectory, &path, "it is a directory"))
            }
            Ok(found) if !found.is_file() => {
                return Err(refused(Code::Invalid, &path, "it is neither a regular file nor a block device"))
            }
            Ok(found) => Some(found),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(failed("replace", &path, &e)),
        };
        let Some(name) = path.file_name() else {
            return Err(refused(Code::Invalid, &path, "it names no file"));
        };
        let mut stem = b".".to_vec();
        stem.extend_from_slice(&name.as_bytes()[..name.len().min(STEM_BYTES_MAX)]);
        stem.extend_from_slice(b".forebay-new");
        let temporary = path.with_file_name(std::ffi::OsString::from_vec(stem));
        let file = locked(&temporary)?;
        let owner = before.as_ref().map(|before| (before.uid(), before.gid()));
        let mode = before.map_or(mode, |before| before.mode() & 0o7777);
        let output = Output { file, path, temporary: Some(temporary), owner, mode };
        output.file.set_len(0).map_err(|e| output.failed(&e))?;
        Ok(output)
    }

    fn failed(&self, e: &io::Error) -> Error {
        failed("write", &self.path, e)
    }

    /// Writes bytes. In a new file, zeros are left as holes.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        if self.temporary.is_none() {
            return self.file.write_all_at(bytes, offset).map_err(|e| self.failed(&e));
        }
        let mut at = 0;
        for run in bytes.chunks(HOLE_BYTES) {
            if run.iter().any(|byte| *byte != 0) {
                self.file.write_all_at(run, offset + at).map_err(|e| self.failed(&e))?;
            }
            at += run.len() as u64;
        }
        Ok(())
    }

    /// Makes it durable, and gives a new file of `bytes` bytes its name.
    pub(super) fn finish(mut self, bytes: u64) -> Result<()> {
        if self.temporary.is_some() {
            self.file.set_len(bytes).map_err(|e| self.failed(&e))?;
            if let Some((uid, gid)) = self.owner {
                // Only root can: else it belongs to the user of this command.
                let _ = fchown(&self.file, Some(uid), Some(gid));
            }
            let permissions = std::fs::Permissions::from_mode(self.mode);
            self.file.set_permissions(permissions).map_err(|e| self.failed(&e))?;
        }
        self.file.sync_all().map_err(|e| self.failed(&e))?;
        let Some(temporary) = self.temporary.take() else { return Ok(()) };
        if let Err(e) = std::fs::rename(&temporary, &self.path) {
            self.temporary = Some(temporary);
            return Err(failed("replace", &self.path, &e));
        }
        let directory = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        File::open(directory).and_then(|opened| opened.sync_all()).map_err(|e| failed("sync", directory, &e))
    }
}

impl Drop for Output {
    /// A new file that is not whole is removed, while it is locked.
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Opens and locks the file under a temporary name, new or left by a copy that was killed.
fn locked(temporary: &Path) -> Result<File> {
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(temporary).map_err(|e| failed("create", temporary, &e))?;
        let found = file.metadata().map_err(|e| failed("create", temporary, &e))?;
        // Where other users create files too, this could be a file of theirs, or a link to another file of this user.
        if !found.is_file() || found.nlink() > 1 || found.uid() != rustix::process::geteuid().as_raw() {
            let error = refused(Code::Exists, temporary, "the temporary name is taken by another file");
            return Err(error.cure("remove that file"));
        }
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(refused(Code::Busy, temporary, "another copy to this file is running"))
            }
            Err(e) => return Err(failed("lock", temporary, &e.into())),
        }
        // A copy that ended meanwhile has renamed or removed it.
        match std::fs::symlink_metadata(temporary) {
            Ok(now) if (now.dev(), now.ino()) == (found.dev(), found.ino()) => return Ok(file),
            _ => continue,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_becomes_shorter_is_an_error_and_not_zeros() {
        let path = std::env::temp_dir().join(format!("forebay-shorter-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        file.write_all_at(&[7; 8192], 0).unwrap();
        file.set_len(1 << 20).unwrap();
        let input = Input::open(&path).unwrap();
        // Its end is a hole.
        assert_eq!(input.next_data(65_536..1 << 20).unwrap(), None);
        assert_eq!(input.next_data(0..1 << 20).unwrap(), Some(0..8192));
        file.set_len(4096).unwrap();
        assert_eq!(input.next_data(8192..1 << 20).unwrap_err().code, Code::Stale);
        assert_eq!(input.read(&mut [0; 8192], 0).unwrap_err().code, Code::Stale);
        std::fs::remove_file(&path).unwrap();
    }
}
