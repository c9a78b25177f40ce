//! Thin pieces of this node: files, of which a write takes space. They are not mapped, because an access to a page for
//! which there is no space would be a signal (SIGBUS), and a read of a hole would take a page.

use std::io;
use std::os::fd::RawFd;

use forebay_types::Code;

fn failed() -> Code {
    io::Error::last_os_error().raw_os_error().map_or(Code::Io, Code::from_errno)
}

/// The result of a system call; none if it is to be repeated.
fn done(result: isize) -> Result<Option<usize>, Code> {
    match usize::try_from(result) {
        Ok(n) => Ok(Some(n)),
        Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(_) => Err(failed()),
    }
}

/// Writes `bytes` bytes at an offset. [`Code::NoSpace`]: some may be written.
///
/// # Safety
/// `from` is readable for `bytes` bytes.
pub(crate) unsafe fn write(file: RawFd, offset: u64, from: *const u8, bytes: usize) -> Result<(), Code> {
    let mut at = 0;
    while at < bytes {
        // SAFETY: the caller's promise.
        let n = unsafe { libc::pwrite(file, from.add(at).cast(), bytes - at, (offset + at as u64) as i64) };
        at += done(n)?.unwrap_or(0);
    }
    Ok(())
}

/// Reads `bytes` bytes at an offset. [`Code::Io`] if the file is shorter, which it never is.
///
/// # Safety
/// `to` is writable for `bytes` bytes.
pub(crate) unsafe fn read(file: RawFd, offset: u64, to: *mut u8, bytes: usize) -> Result<(), Code> {
    let mut at = 0;
    while at < bytes {
        // SAFETY: the caller's promise.
        let n = unsafe { libc::pread(file, to.add(at).cast(), bytes - at, (offset + at as u64) as i64) };
        match done(n)? {
            Some(0) => return Err(Code::Io),
            n => at += n.unwrap_or(0),
        }
    }
    Ok(())
}

/// Frees the pages of a range, which reads as zeros then.
pub(crate) fn discard(file: RawFd, offset: u64, bytes: u64) -> Result<(), Code> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: plain system call.
    while done(unsafe { libc::fallocate(file, mode, offset as i64, bytes as i64) } as isize)?.is_none() {}
    Ok(())
}

/// The bytes that it takes.
pub(crate) fn allocated(file: RawFd) -> Result<u64, Code> {
    // SAFETY: the structure is writable for the call.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(file, &mut stat) != 0 {
            return Err(failed());
        }
        stat
    };
    Ok(stat.st_blocks as u64 * 512)
}

#[cfg(test)]
mod tests {
    use crate::mapped::testing::{mapped, thin};
    use crate::Striped;
    use forebay_types::Code;

    const PAGE: u64 = 4096;

    #[test]
    fn thin_volume_takes_what_was_written_and_gives_back_what_is_discarded() {
        let volume = Striped::new(vec![thin(&[(1 << 40, 2 * PAGE, 3), (8 * PAGE, PAGE, 1)])]).unwrap();
        let end = volume.bytes();
        assert_eq!((end, volume.allocated()), ((1 << 40) + 8 * PAGE, Ok(0)));
        let mut seen = vec![1; 9 * PAGE as usize];
        volume.get_bytes(5, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 0));
        assert_eq!(volume.allocated(), Ok(0), "to read a hole takes no space");
        // Over all pieces, and over the end of a segment.
        let data: Vec<u8> = (0..9 * PAGE).map(|i| i as u8 | 1).collect();
        for at in [0, 1 << 39, (1 << 40) - 3 * PAGE] {
            volume.put_bytes(at, &data).unwrap();
            volume.get_bytes(at, &mut seen).unwrap();
            assert!(seen == data, "{at}");
        }
        assert_eq!(volume.allocated(), Ok(27 * PAGE));
        volume.discard(1 << 39, 9 * PAGE).unwrap();
        assert_eq!(volume.allocated(), Ok(18 * PAGE));
        // Parts of pages are zero, and stay.
        volume.zero(PAGE - 1, PAGE + 2).unwrap();
        assert_eq!(volume.allocated(), Ok(17 * PAGE));
        volume.get_bytes(0, &mut seen).unwrap();
        let (from, to) = (PAGE as usize - 1, 2 * PAGE as usize + 1);
        assert!(seen[..from] == data[..from] && seen[to..] == data[to..]);
        assert!(seen[from..to].iter().all(|byte| *byte == 0));
        let runs = [(0, 10), (1 << 39, 10)];
        // SAFETY: the vectors have 20 bytes.
        unsafe {
            volume.put_runs(&runs, data.as_ptr(), 20).unwrap();
            volume.get_runs(&runs, seen.as_mut_ptr(), 20).unwrap();
        }
        assert_eq!(seen[..20], data[..20]);
        volume.discard(0, end).unwrap();
        assert_eq!(volume.allocated(), Ok(0));
    }

    #[test]
    fn words_and_addresses_of_thin_volumes_and_discards_of_others_are_refused() {
        let volume = Striped::new(vec![thin(&[(PAGE, PAGE, 1)])]).unwrap();
        assert_eq!(volume.fetch_add(0, 1), Err(Code::NotSupported));
        assert_eq!(volume.map(0).map(drop), Err(Code::NotSupported));
        assert_eq!((volume.discard(PAGE, 1), volume.discard(PAGE, 0)), (Err(Code::Range), Ok(())));
        let thick = || mapped(&[(1 << 20, PAGE, 1)], true).0;
        let volume = Striped::new(vec![thick()]).unwrap();
        assert_eq!((volume.discard(0, 0), volume.allocated()), (Err(Code::NotSupported), Ok(1 << 20)));
        // Joined with one that is thin: what is possible to both.
        let joined = Striped::new(vec![thick(), thin(&[(1 << 20, PAGE, 1)])]).unwrap();
        joined.put_bytes((1 << 20) - 1, b"ab").unwrap();
        let mut seen = [0; 2];
        joined.get_bytes((1 << 20) - 1, &mut seen).unwrap();
        assert_eq!(&seen, b"ab");
        assert_eq!(joined.allocated(), Ok((1 << 20) + PAGE));
        assert_eq!(joined.discard(0, 1 << 21), Err(Code::NotSupported));
        joined.zero(0, 1 << 21).unwrap();
        joined.get_bytes((1 << 20) - 1, &mut seen).unwrap();
        assert_eq!((seen, joined.allocated()), ([0; 2], Ok(1 << 20)));
    }
}
