//! The data of a file of a dead pool: its backing files, on one or several targets, as one source.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_data::BackingName;
use forebay_types::{Code, Ino, Layout, Timestamp};
use rustix::fs::{Mode, OFlags};

use crate::store::{next_data, Source};

/// A backing file, as it was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    /// Its number and stripe, as in its name.
    pub(super) number: usize,
    pub(super) stripe: u16,
    /// The target that has it, by its position in the plan.
    pub(super) target: usize,
    pub(super) bytes: u64,
    pub(super) atime: Timestamp,
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
}

impl Part {
    pub(super) fn name(&self, ino: Ino) -> BackingName {
        BackingName::new(ino, self.number, self.stripe)
    }
}

/// The size of a file, from the backing files that were found.
pub(super) fn bytes_of(layout: &Layout, parts: &[Part]) -> u64 {
    let sizes = layout.stripes().filter_map(|(component, stripe)| {
        let number = layout.file_number(component);
        let part = parts.iter().find(|part| (part.number, part.stripe) == (number, stripe))?;
        Some(layout.size_from(component, stripe, part.bytes))
    });
    sizes.max().unwrap_or(0)
}

/// The backing files of one file, open.
pub(super) struct Parts {
    layout: Layout,
    /// In the order of the layout's stripes; none for one that is empty or missing.
    files: Vec<Option<OwnedFd>>,
    bytes: u64,
}

fn code(errno: rustix::io::Errno) -> Code {
    Code::from_errno(errno.raw_os_error())
}

impl Parts {
    /// Opens the backing files.
    pub(super) fn open(
        ino: Ino,
        layout: &Layout,
        parts: &[Part],
        targets: &[OwnedFd],
    ) -> Result<Parts, Code> {
        let open = |(component, stripe): (usize, u16)| {
            let number = layout.file_number(component);
            let Some(part) = parts.iter().find(|part| (part.number, part.stripe) == (number, stripe)) else {
                return Ok(None);
            };
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let target = targets.get(part.target).ok_or(Code::NoDevice)?;
            // The access time is restored with the file: reading must not change it.
            let with = |flags| rustix::fs::openat(target, part.name(ino).as_c_str(), flags, Mode::empty());
            with(flags | OFlags::NOATIME).or_else(|_| with(flags)).map(Some).map_err(code)
        };
        let files = layout.stripes().map(open).collect::<Result<_, _>>()?;
        Ok(Parts { layout: *layout, files, bytes: bytes_of(layout, parts) })
    }
}

impl Source for Parts {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        let mut at = within.start;
        while at < within.end {
            let extent = self.layout.locate(at, within.end - at);
            let index = self.layout.stripes().position(|stripe| stripe == (extent.component, extent.stripe));
            if let Some(file) = &self.files[index.ok_or(Code::Io)?] {
                let there = extent.offset..extent.offset + extent.len;
                if let Some(data) = next_data(file.as_fd(), there)? {
                    let start = at + (data.start - extent.offset);
                    return Ok(Some(start..start + (data.end - data.start)));
                }
            }
            at += extent.len;
        }
        Ok(None)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let room = (buffer.len() as u64).min(self.bytes.saturating_sub(offset)) as usize;
        if room == 0 {
            return Ok(0);
        }
        let extent = self.layout.locate(offset, room as u64);
        let index = self.layout.stripes().position(|at| at == (extent.component, extent.stripe));
        let buffer = &mut buffer[..extent.len as usize];
        let n = match &self.files[index.ok_or(Code::Io)?] {
            Some(file) => rustix::io::pread(file, &mut *buffer, extent.offset).map_err(code)?,
            None => 0,
        };
        // Behind the end of a backing file the file has zeros.
        buffer[n..].fill(0);
        Ok(buffer.len())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match (self.layout.is_single(), self.files.first()) {
            (true, Some(Some(file))) => Some(file.as_fd()),
            _ => None,
        }
    }
}
