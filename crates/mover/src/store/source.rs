//! The bytes of an upload.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_types::Code;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// The bytes that an upload copies into the store: of one backing file, or of the stripes of one file.
///
/// Calls come from one thread at a time. The bytes may change during the upload; the mover finds that out by itself
/// (it copies under leases, or compares epochs) and does not publish such an upload.
pub trait Source: Sync {
    /// Bytes of the file.
    fn bytes(&self) -> u64;

    /// The first range of data within `within`; the bytes before it are zeros. None if there are only zeros.
    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code>;

    /// Reads bytes at an offset; 0 only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code>;

    /// A descriptor of a regular file that has these bytes at the same offsets, if there is one: the kernel can copy
    /// from it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Up to this size a file that has as many blocks as bytes counts as one without holes. It may have blocks beyond its
/// end and holes before it; then a few zeros are copied.
const DENSE_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a block of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// True for a small file that has no holes, by its bytes and its blocks.
pub(crate) fn is_dense(bytes: u64, blocks: i64) -> bool {
    bytes <= DENSE_BYTES_MAX && u64::try_from(blocks).is_ok_and(|blocks| blocks * BLOCK_BYTES >= bytes)
}

/// A source that is one file.
#[derive(Debug)]
pub struct FileSource {
    fd: OwnedFd,
    bytes: u64,
}

impl FileSource {
    /// The first `bytes` bytes of the file.
    pub fn new(fd: OwnedFd, bytes: u64) -> FileSource {
        FileSource { fd, bytes }
    }
}

impl Source for FileSource {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        next_data(self.fd.as_fd(), within)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        retried(|| rustix::io::pread(&self.fd, &mut *buffer, offset)).map_err(code)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// The first range of data of a file within `within`. The call moves the descriptor's own offset.
pub(crate) fn next_data(fd: BorrowedFd<'_>, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
    if within.is_empty() {
        return Ok(None);
    }
    let start = match rustix::fs::seek(fd, SeekFrom::Data(within.start)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not know its holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(within)),
        Err(e) => return Err(code(e)),
    };
    if start >= within.end {
        return Ok(None);
    }
    match rustix::fs::seek(fd, SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some(start..end.clamp(start, within.end))),
        // The file became shorter meanwhile.
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(code(e)),
    }
}

pub(super) fn code(errno: Errno) -> Code {
    Code::from_errno(errno.raw_os_error())
}

/// Repeats a call that a signal interrupted.
pub(super) fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    #[cfg(any(test, feature = "faults"))]
    super::steps::step();
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
