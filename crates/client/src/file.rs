//! Files of any layout: reads and writes go to the backing files that hold them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use forebay_types::{Code, Entry, Request, FLAG_DIRTY};

use crate::errno;
use crate::pool::Pool;

/// An open file. Offsets are in bytes; a short count happens only at the file's end.
#[derive(Debug)]
pub struct File {
    entry: Entry,
    /// One descriptor a backing file, in the order of the layout's stripes.
    stripes: Vec<OwnedFd>,
    /// Index in `stripes` of each component's first stripe.
    first: Vec<usize>,
}

impl Pool {
    /// Opens a file of any layout; with `write` it is dirty when this returns.
    pub fn open_file(&self, entry: &Entry, write: bool) -> Result<File, Code> {
        if !entry.attr.is_file() {
            return Err(if entry.attr.is_directory() { Code::IsDirectory } else { Code::Invalid });
        }
        let flags = libc::O_CLOEXEC | if write { libc::O_RDWR } else { libc::O_RDONLY };
        let mut stripes = Vec::new();
        let mut first = Vec::new();
        for (component, stripe) in entry.layout.stripes() {
            if stripe == 0 {
                first.push(stripes.len());
            }
            let fd = self.open_stripe(entry, component, stripe, flags)?;
            // SAFETY: the descriptor is new and ours.
            stripes.push(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        if write && entry.attr.flags & FLAG_DIRTY == 0 {
            self.ask_entry(&Request::MarkDirty { ino: entry.attr.ino })?;
        }
        Ok(File { entry: *entry, stripes, first })
    }
}

impl File {
    /// The one descriptor of a file with one backing file.
    pub fn fd(&self) -> Option<RawFd> {
        self.entry.layout.is_single().then(|| self.stripes[0].as_raw_fd())
    }

    fn stripe(&self, component: usize, stripe: u16) -> RawFd {
        self.stripes[self.first[component] + stripe as usize].as_raw_fd()
    }

    /// Bytes of the file.
    pub fn size(&self) -> Result<u64, Code> {
        let mut size = 0;
        for (component, stripe) in self.entry.layout.stripes() {
            let mut st = crate::stat::empty_stat();
            // SAFETY: the descriptor is ours and `st` is valid for the call.
            errno::check(unsafe { libc::fstat(self.stripe(component, stripe), &mut st) })?;
            size = size.max(self.entry.layout.size_from(component, stripe, st.st_size as u64));
        }
        Ok(size)
    }

    /// Reads at an offset; fewer bytes than asked for only at the end. Holes read as zeros.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let mut done = 0;
        let mut size = None;
        while done < buffer.len() {
            let at = offset + done as u64;
            let extent = self.entry.layout.locate(at, (buffer.len() - done) as u64);
            let part = &mut buffer[done..done + extent.len as usize];
            let fd = self.stripe(extent.component, extent.stripe);
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::pread(fd, part.as_mut_ptr().cast(), part.len(), extent.offset as i64) };
            if n < 0 {
                match errno::last() {
                    Code::Interrupted => continue,
                    code => return Err(code),
                }
            }
            let n = n as usize;
            done += n;
            if n < part.len() {
                // The backing file ends here; the file may go on in another: then this is a hole.
                let size = match size {
                    Some(size) => size,
                    None => *size.insert(self.size()?),
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

    /// Writes at an offset, all of it.
    pub fn write_at(&self, buffer: &[u8], offset: u64) -> Result<usize, Code> {
        let mut done = 0;
        while done < buffer.len() {
            let extent = self.entry.layout.locate(offset + done as u64, (buffer.len() - done) as u64);
            let part = &buffer[done..done + extent.len as usize];
            let fd = self.stripe(extent.component, extent.stripe);
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::pwrite(fd, part.as_ptr().cast(), part.len(), extent.offset as i64) };
            match errno::check(n as i32) {
                Ok(_) => done += n as usize,
                Err(Code::Interrupted) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(code) => return Err(code),
            }
        }
        Ok(done)
    }

    /// Sets the size.
    pub fn truncate(&self, size: u64) -> Result<(), Code> {
        if size > forebay_types::limits::FILE_BYTES_MAX {
            return Err(Code::FileTooLarge);
        }
        let layout = &self.entry.layout;
        // Stripe by stripe; the one that holds the last byte reaches the size, so that it shows.
        for (component, stripe) in layout.stripes() {
            let bytes = layout.backing_bytes(component, stripe, size);
            // SAFETY: plain system call on our descriptor.
            errno::check(unsafe { libc::ftruncate(self.stripe(component, stripe), bytes as i64) })?;
        }
        Ok(())
    }
}
