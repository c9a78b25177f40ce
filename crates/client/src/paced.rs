//! Reads and writes of this process's own, of backing files on targets that emulate a medium (docs/emulation.md): those of
//! [`File`], and of callers that have a backing file's descriptor themselves.
//!
//! In a pool without a profile the only cost is a look at a flag of the open file.

use forebay_pacing::{Direction, Place, Ticket};
use forebay_types::{Entry, Layout};

use crate::connection::Role;
use crate::file::File;
use crate::open::BACKING_FILE;
use crate::pool::Pool;

impl Pool {
    /// True for a file whose descriptors have to be the mount's, because the kernel serves other descriptors at the speed of
    /// the real medium. The mount's own process serves them, tools need not be slow, and [`File`] paces what it does itself.
    #[inline]
    pub(crate) fn hands_out_paced(&self, entry: &Entry, flags: i32) -> bool {
        entry.attr.is_file() && flags & BACKING_FILE == 0 && self.role() == Role::Host && self.is_paced()
    }

    /// True if this node's targets emulate a medium: reads and writes by [`File`] then take as long as the medium does.
    #[inline]
    pub fn is_paced(&self) -> bool {
        self.attached().is_ok_and(|attached| attached.pacer(0).is_some())
    }

    /// Notes that the caller begins a call on the only backing file of a file, which is on this node. None if its target is not
    /// paced.
    #[inline]
    pub fn begin_paced(&'static self, entry: &Entry) -> Option<Paced> {
        match self.is_paced() {
            false => None,
            true => Paced::begin_now(self, &entry.layout, entry.attr.ino.0, 0),
        }
    }
}

/// A call on a backing file that has begun and is to take as long as its medium does.
#[must_use]
#[derive(Debug)]
pub struct Paced {
    ticket: Ticket<'static>,
    ino: u64,
    number: usize,
    stripe: u16,
}

impl Paced {
    /// Notes that a call on the backing file of a file with an index begins. None if its target is not paced.
    #[inline]
    pub(crate) fn begin(file: &File, index: usize) -> Option<Paced> {
        match file.is_paced() {
            false => None,
            true => Paced::begin_now(file.pool, file.layout(), file.ino().0, index),
        }
    }

    #[cold]
    fn begin_now(pool: &'static Pool, layout: &Layout, ino: u64, index: usize) -> Option<Paced> {
        let (component, stripe) = layout.stripes().nth(index)?;
        let target = layout.components()[component].target(stripe) as u16;
        let pacer = pool.attached().ok()?.pacer(target)?;
        let number = layout.file_number(component);
        Some(Paced { ticket: pacer.begin(), ino, number, stripe })
    }

    /// Waits until the medium would have moved so many bytes.
    pub fn complete(self, writes: bool, offset: u64, bytes: usize) {
        let direction = if writes { Direction::Write } else { Direction::Read };
        let place = Place::of(self.ino, self.number, self.stripe, offset);
        self.ticket.complete(direction, place, bytes as u64);
    }
}

/// Waits as long as a call takes that moved `moved` bytes; a failed call does not wait.
#[inline]
pub(crate) fn complete(paced: Option<Paced>, writes: bool, offset: u64, moved: isize) {
    if let (Some(paced), Ok(bytes)) = (paced, usize::try_from(moved)) {
        paced.complete(writes, offset, bytes);
    }
}
