//! Reads and writes of the backing files that hold a range: by system calls on this node, by requests on other nodes,
//! all at the same time.

use std::os::fd::{AsRawFd, OwnedFd};

use forebay_types::limits::FILE_BYTES_MAX;
use forebay_types::Code;

use super::{File, Stripe};
use crate::errno;
use crate::far_parts::Memory;
use crate::paced::{self, Paced};
use crate::remote_data::{parts, Moved};

/// Pieces of memory in one system call, at most.
const PARTS_MAX: usize = 64;

impl File {
    /// Moves a range with one call per backing file if [`PARTS_MAX`] allows, because a backing file's stripes are
    /// adjacent in it. False if a call failed or was short: the caller then moves the whole range again, in order.
    fn move_whole(&self, first: *mut u8, bytes: usize, offset: u64, writes: bool) -> bool {
        let [c] = self.entry.layout.components() else { return false };
        let (stripe_bytes, count, end) =
            (u64::from(c.stripe_bytes), u64::from(c.stripe_count), offset + bytes as u64);
        let stripes = offset / stripe_bytes..end.div_ceil(stripe_bytes);
        if count == 1 || stripes.end - stripes.start <= count {
            return false;
        }
        (stripes.start..stripes.start + count).all(|lead| {
            let index = self.index_of(0, (lead % count) as u16);
            let Stripe::Local(fd) = self.stripe_at(index) else { return false };
            let fd = fd.as_raw_fd();
            let mut numbers = (lead..stripes.end).step_by(count as usize).peekable();
            while let Some(&next) = numbers.peek() {
                let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PARTS_MAX];
                let (mut used, mut wanted) = (0, 0);
                let at = self.entry.layout.locate((next * stripe_bytes).max(offset), 1).offset;
                for (part, number) in parts.iter_mut().zip(&mut numbers) {
                    let from = (number * stripe_bytes).max(offset);
                    let to = ((number + 1) * stripe_bytes).min(end);
                    // SAFETY: within the range, which the caller promises to be valid.
                    part.iov_base = unsafe { first.add((from - offset) as usize) }.cast();
                    part.iov_len = (to - from) as usize;
                    wanted += part.iov_len;
                    used += 1;
                }
                let paced = Paced::begin(self, index);
                // SAFETY: the parts are within the caller's range, which is writable if this reads.
                let moved = unsafe {
                    if writes {
                        libc::pwritev(fd, parts.as_ptr(), used, at as i64)
                    } else {
                        libc::preadv(fd, parts.as_ptr(), used, at as i64)
                    }
                };
                if moved != wanted as isize {
                    return false;
                }
                paced::complete(paced, writes, at, moved);
            }
            true
        })
    }

    /// Reads at an offset. A count below the buffer's length means the file's end. Holes read as zeros.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        if let Some(n) = self.read_ahead.read(buffer, offset, |ahead, at| self.read_now(ahead, at))? {
            return Ok(n);
        }
        self.read_now(buffer, offset)
    }

    fn read_now(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        if self.move_whole(buffer.as_mut_ptr(), buffer.len(), offset, false) {
            return Ok(buffer.len());
        }
        let mut size = None;
        let mut done = match self.has_far() {
            true => {
                // SAFETY: the buffer is writable and has the given length.
                let moved =
                    unsafe { self.move_in_parts(Memory::Into(buffer.as_mut_ptr()), buffer.len(), offset)? };
                match moved.failed {
                    Some(code) => return Err(code),
                    // The end of the only backing file is the file's end.
                    None if self.entry.layout.is_single() => return Ok(moved.end),
                    None => moved.end,
                }
            }
            false => 0,
        };
        while done < buffer.len() {
            let at = offset + done as u64;
            let extent = self.entry.layout.locate(at, (buffer.len() - done) as u64);
            let part = &mut buffer[done..done + extent.len as usize];
            let n = match self.stripe(extent.component, extent.stripe) {
                Stripe::Remote(remote) => {
                    let to = Memory::Into(part.as_mut_ptr());
                    let mut parts = parts(remote.id, extent.offset, 0, part.len());
                    // SAFETY: the buffer is writable and has the given length.
                    let moved = unsafe { self.pool.move_far(&mut parts, part.len(), to, false)? };
                    match moved.failed {
                        Some(code) => return Err(code),
                        None => moved.end,
                    }
                }
                Stripe::Local(fd) => {
                    let (to, len) = (part.as_mut_ptr().cast(), part.len());
                    let paced = Paced::begin(self, self.index_of(extent.component, extent.stripe));
                    // SAFETY: the buffer has the given length.
                    let n = unsafe { libc::pread(fd.as_raw_fd(), to, len, extent.offset as i64) };
                    paced::complete(paced, false, extent.offset, n);
                    if n < 0 {
                        match errno::last() {
                            Code::Interrupted => continue,
                            code => return Err(code),
                        }
                    }
                    n as usize
                }
            };
            done += n;
            if n < part.len() {
                // The backing file ends here. An only backing file ends the file. Otherwise the file may continue in
                // another backing file, and this range is a hole if it is still short after the size was queried: bytes
                // written meanwhile must not read as zeros.
                if self.entry.layout.is_single() {
                    return Ok(done);
                }
                let Some(size) = size else {
                    size = Some(self.size()?);
                    continue;
                };
                let left = size.saturating_sub(offset + done as u64).min((part.len() - n) as u64) as usize;
                if left == 0 {
                    return Ok(done);
                }
                part[n..n + left].fill(0);
                done += left;
            }
        }
        Ok(done)
    }

    /// Moves a range of a file that has backing files on other nodes. Requests to all of them are in progress while the
    /// parts on this node are moved.
    ///
    /// # Safety
    /// `memory` is `len` bytes long, and readable or writable as its variant requires.
    unsafe fn move_in_parts(&self, memory: Memory, len: usize, offset: u64) -> Result<Moved, Code> {
        let layout = &self.entry.layout;
        let mut here = Moved { end: len, failed: None, in_doubt: false };
        let (mut next, mut queued) = (0, None);
        let mut far = std::iter::from_fn(|| loop {
            if let Some(part) = queued.as_mut().and_then(Iterator::next) {
                return Some(part);
            }
            if next >= len {
                return None;
            }
            let extent = layout.locate(offset + next as u64, (len - next) as u64);
            let (at, bytes) = (next, extent.len as usize);
            next += bytes;
            match self.stripe(extent.component, extent.stripe) {
                Stripe::Remote(remote) => queued = Some(parts(remote.id, extent.offset, at, bytes)),
                Stripe::Local(fd) => {
                    let index = self.index_of(extent.component, extent.stripe);
                    // SAFETY: the caller's promise; the extent is within the memory.
                    match unsafe { self.move_here(index, fd, (memory, len), at, bytes, extent.offset) } {
                        Ok(n) if n == bytes => {}
                        Ok(n) => here.ends(at + n, None),
                        Err(code) => here.ends(at, Some(code)),
                    }
                }
            }
        });
        // SAFETY: the caller's promise; all parts are within the memory.
        let mut moved = unsafe { self.pool.move_far(&mut far, len, memory, false)? };
        moved.ends(here.end, here.failed);
        Ok(moved)
    }

    /// Moves a range of a backing file on this node, and returns the number of bytes moved.
    ///
    /// # Safety
    /// `memory` has `bytes` bytes at `at`, which are readable or writable as its variant requires.
    unsafe fn move_here(
        &self,
        index: usize,
        fd: &OwnedFd,
        (memory, len): (Memory, usize),
        at: usize,
        bytes: usize,
        offset: u64,
    ) -> Result<usize, Code> {
        let fd = fd.as_raw_fd();
        if matches!(memory, Memory::From(_)) {
            self.take_ahead(index, fd, offset..offset + bytes as u64, bytes, len);
        }
        let mut done = 0;
        while done < bytes {
            let (left, place) = (bytes - done, (offset + done as u64) as i64);
            let paced = Paced::begin(self, index);
            // SAFETY: the caller's promise.
            let n = unsafe {
                match memory {
                    Memory::Into(to) => libc::pread(fd, to.add(at + done).cast(), left, place),
                    Memory::From(from) => libc::pwrite(fd, from.add(at + done).cast(), left, place),
                }
            };
            paced::complete(paced, matches!(memory, Memory::From(_)), place as u64, n);
            match usize::try_from(n).map_err(|_| errno::last()) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Code::Interrupted) => {}
                Err(_) if done > 0 => break,
                Err(code) => return Err(code),
            }
        }
        Ok(done)
    }

    /// Appends to the only backing file, on this node.
    pub(crate) fn append_here(&self, fd: &OwnedFd, buffer: &[u8]) -> Result<usize, Code> {
        let paced = Paced::begin(self, 0);
        let part = libc::iovec { iov_base: buffer.as_ptr().cast_mut().cast(), iov_len: buffer.len() };
        // SAFETY: the buffer has the given length.
        let n = unsafe { libc::pwritev2(fd.as_raw_fd(), &raw const part, 1, 0, libc::RWF_APPEND) };
        let written = usize::try_from(n).map_err(|_| errno::last())?;
        let end = errno::stat(fd.as_raw_fd()).map_or(0, |stat| stat.st_size as u64);
        paced::complete(paced, true, end.saturating_sub(written as u64), n);
        Ok(written)
    }

    /// Writes at an offset. The count is short only if an error occurred after some bytes were written.
    ///
    /// # Errors
    /// [`Code::FileTooLarge`] if the file would be larger than any: the offsets in several backing files are lower ones, which
    /// the kernel would take.
    pub fn write_at(&self, buffer: &[u8], offset: u64) -> Result<usize, Code> {
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Code::FileTooLarge);
        }
        if self.move_whole(buffer.as_ptr().cast_mut(), buffer.len(), offset, true) {
            return Ok(buffer.len());
        }
        if self.has_far() {
            // SAFETY: the buffer is readable and has the given length.
            let moved = unsafe { self.move_in_parts(Memory::From(buffer.as_ptr()), buffer.len(), offset) };
            self.read_ahead.forget();
            let moved = moved?;
            return match moved.failed {
                Some(code) if moved.end == 0 => Err(code),
                // The medium wrote nothing and returned no error.
                None if moved.end == 0 && !buffer.is_empty() => Err(Code::Io),
                _ => Ok(moved.end),
            };
        }
        let mut done = 0;
        while done < buffer.len() {
            let extent = self.entry.layout.locate(offset + done as u64, (buffer.len() - done) as u64);
            let part = &buffer[done..done + extent.len as usize];
            let written = match self.stripe(extent.component, extent.stripe) {
                // Files with parts on other nodes were handled above.
                Stripe::Remote(_) => Err(Code::Invalid),
                Stripe::Local(fd) => {
                    let range = extent.offset..extent.offset + extent.len;
                    let index = self.index_of(extent.component, extent.stripe);
                    self.take_ahead(index, fd.as_raw_fd(), range, part.len(), buffer.len());
                    let (from, len) = (part.as_ptr().cast(), part.len());
                    let paced = Paced::begin(self, index);
                    // SAFETY: the buffer has the given length.
                    let n = unsafe { libc::pwrite(fd.as_raw_fd(), from, len, extent.offset as i64) };
                    paced::complete(paced, true, extent.offset, n);
                    usize::try_from(n).map_err(|_| errno::last())
                }
            };
            match written {
                // The medium wrote nothing and returned no error.
                Ok(0) if done == 0 => return Err(Code::Io),
                Ok(0) => return Ok(done),
                Ok(n) => done += n,
                Err(Code::Interrupted) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(code) => return Err(code),
            }
        }
        Ok(done)
    }
}
