//! The pool's mount on this node, by which a program that is not the mount's reaches a file of another node: such a file has
//! no descriptor here, and only the kernel can make one whose every use is served.
//!
//! Where the pool is mounted is read from the kernel's table at each such open, with system calls alone: a mount may come and
//! go, and be another in another namespace. The mount shows an inode under [`INODE_NAME`] and its number in its root.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::limits::PATH_MAX;
use forebay_types::{Code, Entry, Ino};

use crate::errno;
use crate::open::{close, open_at};
use crate::path::PathBuffer;
use crate::pool::Pool;

/// In front of an inode's number, in 16 digits, in the root of a mount. It is listed nowhere.
pub const INODE_NAME: &[u8] = b".forebay-inode-";
/// Bytes of a line of the table: two paths, and the rest.
const LINE_BYTES: usize = 2 * PATH_MAX + 512;

/// The device (`st_dev`) of the mount that a file was last opened by; 0 before.
static DEVICE: AtomicU64 = AtomicU64::new(0);

/// The inode that a name in a mount's root stands for.
pub fn inode_of_name(name: &[u8]) -> Option<Ino> {
    let digits = name.strip_prefix(INODE_NAME)?;
    if digits.len() != 16 || digits.iter().any(|d| !d.is_ascii_hexdigit() || d.is_ascii_uppercase()) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(Ino)
}

/// Undoes the table's escapes (`\040`) in place; the bytes that are left.
fn unescape(field: &mut [u8]) -> usize {
    let (mut from, mut to) = (0, 0);
    while from < field.len() {
        let octal = match field.get(from..from + 4) {
            Some([b'\\', digits @ ..]) if digits.iter().all(|d| (b'0'..=b'7').contains(d)) => {
                Some(digits.iter().fold(0u32, |n, d| n * 8 + u32::from(d - b'0')) as u8)
            }
            _ => None,
        };
        field[to] = octal.unwrap_or(field[from]);
        from += if octal.is_some() { 4 } else { 1 };
        to += 1;
    }
    to
}

/// The place where a line of the table says that this pool is mounted: where it begins and ends in the line.
fn place_in(line: &mut [u8], pool: &[u8]) -> Option<(usize, usize)> {
    let mut fields = [(0, 0); 5];
    let mut at = 0;
    for field in &mut fields {
        let end = at + line.get(at..)?.iter().position(|b| *b == b' ')?;
        *field = (at, end);
        at = end + 1;
    }
    let dash = at + line[at..].windows(3).position(|w| w == b" - ")? + 3;
    let rest = line[dash..].strip_prefix(b"fuse.forebay ")?;
    let source_at = line.len() - rest.len();
    let source_end = source_at + rest.iter().position(|b| *b == b' ')?;
    let source = &mut line[source_at..source_end];
    let n = unescape(source);
    if &source[..n] != pool {
        return None;
    }
    let (start, end) = fields[4];
    let n = unescape(&mut line[start..end]);
    Some((start, start + n))
}

impl Pool {
    /// Puts into `path` where the kernel reaches a file of another node.
    ///
    /// # Errors
    /// [`Code::NotSupported`] when the pool is mounted nowhere that this process sees.
    #[cold]
    pub(crate) fn lead_to_mount(&self, entry: &Entry, path: &mut PathBuffer) -> Result<(), Code> {
        let table = open_at(libc::AT_FDCWD, c"/proc/self/mountinfo", libc::O_RDONLY | libc::O_CLOEXEC)?;
        let found = self.find_mount(table, path);
        close(table);
        if !found? {
            return Err(Code::NotSupported);
        }
        // SAFETY: an all-zero stat is valid, and filled by the call; the path is NUL-terminated.
        let mut st: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        errno::check(unsafe { libc::fstatat(libc::AT_FDCWD, path.as_c_str_ptr(), &mut st, 0) })?;
        DEVICE.store(st.st_dev, Ordering::Release);
        path.push(b"/")?;
        path.push(INODE_NAME)?;
        let mut digits = [0; 16];
        for (i, digit) in digits.iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(entry.attr.ino.0 >> (60 - 4 * i) & 15) as usize];
        }
        path.push(&digits)
    }

    /// Reads the table to its end: of several mounts the last one counts, which may lie over others.
    fn find_mount(&self, table: RawFd, path: &mut PathBuffer) -> Result<bool, Code> {
        let (mut line, mut len, mut found) = ([0; LINE_BYTES], 0, false);
        let mut piece = [0u8; 1024];
        loop {
            // By number: libc's read is a point at which a thread may be cancelled.
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::syscall(libc::SYS_read, table, piece.as_mut_ptr(), piece.len()) };
            let n = match n {
                0 => return Ok(found),
                n if n > 0 => n as usize,
                _ => return Err(errno::last()),
            };
            for byte in &piece[..n] {
                if *byte != b'\n' {
                    // What is longer than any line of ours is not one.
                    if let Some(room) = line.get_mut(len) {
                        *room = *byte;
                        len += 1;
                    }
                    continue;
                }
                if let Some((start, end)) = place_in(&mut line[..len], self.address().directory()) {
                    path.set(&line[start..end])?;
                    found = true;
                }
                len = 0;
            }
        }
    }

    /// What `fstat` is to answer for a file that was opened by the mount: the device that all files of the pool show.
    pub(crate) fn stat_by_mount(&self, kernel: &libc::stat) -> Option<libc::stat> {
        let device = DEVICE.load(Ordering::Acquire);
        if device == 0 || kernel.st_dev != device {
            return None;
        }
        let mut st = *kernel;
        st.st_dev = self.device();
        Some(st)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_in_finds_this_pool_s_mount_alone() {
        let line = |text: &str| {
            let mut line = text.as_bytes().to_vec();
            place_in(&mut line, b"/tmp/a pool").map(|(start, end)| line[start..end].to_vec())
        };
        let ours =
            "36 35 0:52 / /mnt/my\\040pool rw,nosuid shared:7 - fuse.forebay /tmp/a\\040pool rw,user_id=0";
        assert_eq!(line(ours).as_deref(), Some(b"/mnt/my pool".as_slice()));
        let bare = "36 35 0:52 / /mnt/x rw - fuse.forebay /tmp/a\\040pool rw";
        assert_eq!(line(bare).as_deref(), Some(b"/mnt/x".as_slice()));
        for other in [
            "36 35 0:52 / /mnt/x rw - fuse.forebay /tmp/other rw",
            "36 35 0:52 / /mnt/x rw - fuse.sshfs /tmp/a\\040pool rw",
            "36 35 0:52 / /mnt/x rw",
            "",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
    }

    #[test]
    fn inode_of_name_takes_its_own_form_alone() {
        assert_eq!(inode_of_name(b".forebay-inode-000200000000001f"), Some(Ino(2 << 48 | 31)));
        for other in
            [".forebay-inode-", ".forebay-inode-2", ".forebay-inode-000200000000001F", "000200000000001f"]
        {
            assert_eq!(inode_of_name(other.as_bytes()), None, "{other}");
        }
    }
}
