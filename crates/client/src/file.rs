//! Files of any layout: reads and writes go to the backing files that hold them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use forebay_types::{Code, Entry, Layout, Request, FLAG_DIRTY};

use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Fail, Pool};
use crate::walk::{permits, Target, EXECUTE, READ, WRITE};

/// How often an open starts again when the file gets another layout, or another file its name, meanwhile.
const ATTEMPTS: u32 = 64;

/// Pieces of memory in one call on a backing file.
const PARTS_MAX: usize = 64;

/// How a file that an open makes is to be spread.
#[derive(Clone, Copy, Debug)]
pub struct Striping {
    /// Backing files on the directory's home target; 1 is an ordinary file.
    pub stripe_count: u16,
    /// Bytes of a stripe, a power of two.
    pub stripe_bytes: u32,
    /// The directory's layout goes first where it has several backing files.
    pub yields: bool,
}

impl Striping {
    /// What the directory's layout says.
    pub const OF_DIRECTORY: Striping = Striping { stripe_count: 1, stripe_bytes: 1 << 20, yields: true };

    /// Of a layout's first component.
    pub fn of(layout: &Layout) -> Striping {
        let first = &layout.components()[0];
        Striping { stripe_count: first.stripe_count, stripe_bytes: first.stripe_bytes, yields: false }
    }
}

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
    /// Opens a file of any layout; with `write` it is dirty when this returns. [`Code::Stale`] when it has got another layout
    /// meanwhile.
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
        // With all of them open no layout changes. Whether it did before, the daemon knows, who need not be asked where the
        // one backing file of another layout is not there (migrate.rs).
        if stripes.len() > 1 && self.may_be_single(entry.attr.ino) {
            match self.ask_entry(&Request::GetAttr { ino: entry.attr.ino }) {
                Ok(now) if now.layout == entry.layout => {}
                Ok(_) | Err(Code::NotFound) => return Err(Code::Stale),
                Err(code) => return Err(code),
            }
        }
        Ok(File { entry: *entry, stripes, first })
    }

    /// Opens a file of any layout by its path; `flags` are O_ACCMODE, O_CREAT, O_EXCL and O_TRUNC, `mode` has the umask
    /// applied. `striping` is of a file that this makes.
    pub fn open_striped(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        striping: Striping,
        escape: &mut PathBuffer,
    ) -> Door<File> {
        if flags & libc::O_CREAT != 0 && (striping.stripe_count > 1 || striping.yields) {
            if let Some(file) = self.make_striped(place, flags, mode, striping, escape)? {
                return Ok(file);
            }
        }
        for _ in 0..ATTEMPTS {
            let found = match self.resolve(place, true, escape) {
                Ok(entry) => Some(entry),
                Err(Fail::Code(Code::NotFound)) => None,
                Err(fail) => return Err(fail),
            };
            let exclusive = flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL;
            let spread =
                found.filter(|entry| entry.attr.is_file() && !entry.layout.is_single() && !exclusive);
            let Some(entry) = spread else {
                return self.open_single(place, flags, mode, escape);
            };
            match self.open_spread(&entry, flags) {
                Err(Code::Stale) => {}
                result => return Ok(result?),
            }
        }
        Err(Code::Stale.into())
    }

    /// Opens a file that has one backing file, or makes one.
    fn open_single(&self, place: Place<'_>, flags: i32, mode: u32, escape: &mut PathBuffer) -> Door<File> {
        let fd = self.open(place, flags | libc::O_CLOEXEC, mode, escape)?;
        // SAFETY: the descriptor is new and ours.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let kernel = errno::stat(fd.as_raw_fd())?;
        let ino = self.inode_of(fd.as_raw_fd(), &kernel).ok_or(Code::Stale)?;
        let entry = self.get_attr(ino)?;
        if !entry.attr.is_file() {
            return Err(if entry.attr.is_directory() { Code::IsDirectory } else { Code::Invalid }.into());
        }
        Ok(File { entry, stripes: vec![fd], first: vec![0] })
    }

    /// Opens a file that has several.
    fn open_spread(&self, entry: &Entry, flags: i32) -> Result<File, Code> {
        let access = flags & libc::O_ACCMODE;
        let write = access != libc::O_RDONLY;
        let wanted = match access {
            libc::O_RDONLY => READ,
            libc::O_WRONLY => WRITE,
            _ => READ | WRITE,
        };
        let attr = &entry.attr;
        if !permits((attr.mode, attr.uid, attr.gid), wanted, false) {
            return Err(Code::AccessDenied);
        }
        let file = self.open_file(entry, write)?;
        if write && flags & libc::O_TRUNC != 0 {
            file.truncate(0)?;
        }
        Ok(file)
    }

    /// Makes a file of several backing files; none when the name is taken and need not be new.
    fn make_striped(
        &self,
        place: Place<'_>,
        flags: i32,
        mode: u32,
        striping: Striping,
        escape: &mut PathBuffer,
    ) -> Door<Option<File>> {
        let exclusive = flags & libc::O_EXCL != 0;
        let (dir, name) = match self.walk_to(place, !exclusive, false, escape)? {
            Target::Missing(dir, name) => (dir, name),
            Target::Found(_) if exclusive => return Err(Code::Exists.into()),
            Target::Found(_) => return Ok(None),
        };
        dir.check(self, WRITE | EXECUTE)?;
        let home = dir.ino.birth_node();
        let default = if striping.yields { Some(self.get_attr(dir.ino)?.layout) } else { None };
        let striping = default.map_or(striping, |layout| match Striping::of(&layout) {
            several if several.stripe_count > 1 => several,
            _ => striping,
        });
        if striping.stripe_count == 1 {
            return Ok(None);
        }
        let layout = Layout::overstriped(home, 0, striping.stripe_count, striping.stripe_bytes)
            .map_err(|_| Code::Invalid)?;
        let made = self.create_entry(dir.ino, name.as_bytes(), mode & 0o7777, exclusive, Some(layout));
        let (entry, created) = match made {
            Err(Code::Exists) if !exclusive => return Ok(None),
            made => made?,
        };
        if !created {
            return Ok(None);
        }
        match self.open_file(&entry, true) {
            Ok(file) => Ok(Some(file)),
            Err(code) => {
                // An open that fails leaves no name behind.
                let _ = self.unlink_in(dir.ino, name.as_bytes());
                Err(code.into())
            }
        }
    }
}

impl File {
    /// Backing files and bytes of a stripe, of the first component.
    pub fn striping(&self) -> Striping {
        Striping::of(&self.entry.layout)
    }

    /// The inode.
    pub fn ino(&self) -> forebay_types::Ino {
        self.entry.attr.ino
    }

    /// Reserves space for the first `bytes` bytes and extends the file to them; it is never cut.
    pub fn allocate(&self, bytes: u64) -> Result<(), Code> {
        if bytes > forebay_types::limits::FILE_BYTES_MAX {
            return Err(Code::FileTooLarge);
        }
        for (component, stripe) in self.entry.layout.stripes() {
            let length = self.entry.layout.backing_bytes(component, stripe, bytes);
            if length == 0 {
                continue;
            }
            loop {
                // SAFETY: plain system call on our descriptor.
                let result = unsafe { libc::fallocate(self.stripe(component, stripe), 0, 0, length as i64) };
                match errno::check(result) {
                    Ok(_) => break,
                    Err(Code::Interrupted) => {}
                    Err(code) => return Err(code),
                }
            }
        }
        Ok(())
    }

    /// fsync(2) of all backing files.
    pub fn sync(&self) -> Result<(), Code> {
        for fd in &self.stripes {
            // SAFETY: plain system call on our descriptor.
            errno::check(unsafe { libc::fsync(fd.as_raw_fd()) })?;
        }
        Ok(())
    }

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

    /// Moves a range with as few calls as there are backing files in it, since a backing file's stripes follow each other
    /// in it. False when anything was short or failed, and the range is to be gone through in order: what was moved
    /// is moved again then.
    fn move_whole(&self, first: *mut u8, bytes: usize, offset: u64, writes: bool) -> bool {
        let [c] = self.entry.layout.components() else { return false };
        let (stripe_bytes, count, end) =
            (u64::from(c.stripe_bytes), u64::from(c.stripe_count), offset + bytes as u64);
        let stripes = offset / stripe_bytes..end.div_ceil(stripe_bytes);
        if count == 1 || stripes.end - stripes.start <= count {
            return false;
        }
        (stripes.start..stripes.start + count).all(|lead| {
            let fd = self.stripe(0, (lead % count) as u16);
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
            }
            true
        })
    }

    /// Reads at an offset; fewer bytes than asked for only at the end. Holes read as zeros.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        if self.move_whole(buffer.as_mut_ptr(), buffer.len(), offset, false) {
            return Ok(buffer.len());
        }
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
        if self.move_whole(buffer.as_ptr().cast_mut(), buffer.len(), offset, true) {
            return Ok(buffer.len());
        }
        let mut done = 0;
        while done < buffer.len() {
            let extent = self.entry.layout.locate(offset + done as u64, (buffer.len() - done) as u64);
            let part = &buffer[done..done + extent.len as usize];
            let fd = self.stripe(extent.component, extent.stripe);
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::pwrite(fd, part.as_ptr().cast(), part.len(), extent.offset as i64) };
            match n {
                // A medium that takes nothing and does not say why.
                0 if done == 0 => return Err(Code::Io),
                0 => return Ok(done),
                n if n > 0 => done += n as usize,
                _ => match errno::last() {
                    Code::Interrupted => {}
                    _ if done > 0 => return Ok(done),
                    code => return Err(code),
                },
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
