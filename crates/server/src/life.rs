//! A word in shared memory that says that the pool lives (docs/decisions/0048).
//!
//! Programs that map a volume put and get without a system call, and yet must not go on when the pool is gone. So each
//! put compares one word with the value that it had at the open. The word is a robust futex that the supervisor's thread
//! owns: its value is the number of that thread, and when the thread ends, by SIGKILL too, the kernel itself replaces it
//! by FUTEX_OWNER_DIED (set_robust_list(2)). A supervisor that ends in order clears it first.
//!
//! The list replaces that of libc for this thread, which therefore must not use robust mutexes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::{Error, Result};

/// The tag of the word's page in the descriptor store.
pub(crate) const LIFE_TAG: &str = "life";
/// Where in the page the second word is: not 0 while no volume may be created, since the pool stops and the memory of
/// volumes ends with it.
const CLOSED: usize = 64;
/// Bytes of the page.
const PAGE_BYTES: usize = 4096;

/// An element of a robust list, as the kernel reads it.
#[repr(C)]
struct Element {
    next: *const Element,
}

/// `struct robust_list_head`.
#[repr(C)]
struct Head {
    list: Element,
    /// From an element to its futex.
    futex_offset: libc::c_long,
    pending: *const Element,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Life {
    page: &'static Mapping,
}

impl Life {
    /// Makes the word, for as long as the calling thread lives. Returns it with its page's descriptor, through which
    /// nothing can be written.
    pub(crate) fn begin() -> Result<(Life, OwnedFd)> {
        let failed = |e: std::io::Error| Error::io("cannot make the word that says that the pool lives", &e);
        let (fd, page) = memfd_sealed(c"forebay-life", PAGE_BYTES, Seal::SizeAndWrites).map_err(failed)?;
        // The kernel follows these when the thread ends, after everything else in this process.
        let page: &'static Mapping = Box::leak(Box::new(page));
        let word = page.word32(0);
        let element: &'static mut Element = Box::leak(Box::new(Element { next: std::ptr::null() }));
        let head = Box::leak(Box::new(Head {
            list: Element { next: element },
            futex_offset: (word.as_ptr() as isize).wrapping_sub(&raw const *element as isize) as libc::c_long,
            pending: std::ptr::null(),
        }));
        element.next = &raw const head.list;
        // SAFETY: gettid has no arguments.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        word.store(thread as u32, Ordering::Release);
        // SAFETY: the list is circular and lives as long as the process, as does the futex.
        let set = unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const *head, size_of::<Head>()) };
        match set {
            0 => Ok((Life { page }, fd)),
            _ => Err(failed(std::io::Error::last_os_error())),
        }
    }

    /// No piece of a volume may be made from now on, or pieces may be made again. A worker that made one before it saw this
    /// has stored its descriptor before: the supervisor finds it in the store.
    pub(crate) fn close_to_volumes(&self, closed: bool) {
        self.page.word32(CLOSED).store(closed.into(), Ordering::SeqCst);
    }

    /// The pool ends: puts from now on fail.
    pub(crate) fn end(&self) {
        self.page.word32(0).store(0, Ordering::Release);
    }
}

/// The worker's look at the words.
#[derive(Debug)]
pub(crate) struct LifeSeen(Mapping);

impl LifeSeen {
    /// `page`: as [`Life::begin`] returned it.
    pub(crate) fn new(page: &OwnedFd) -> Result<LifeSeen> {
        let mapped = Mapping::new(page.as_fd(), PAGE_BYTES, false);
        mapped.map(LifeSeen).map_err(|e| Error::io("cannot map the word that says that the pool lives", &e))
    }

    /// See [`Life::close_to_volumes`].
    pub(crate) fn is_closed_to_volumes(&self) -> bool {
        self.0.word32(CLOSED).load(Ordering::SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What another process sees after the thread that began the life has ended.
    fn seen_after(ends: impl FnOnce(&Life) + Send + 'static) -> (u32, u32) {
        let thread = std::thread::spawn(move || {
            let (life, fd) = Life::begin().unwrap();
            let theirs = Mapping::new(fd.as_fd(), PAGE_BYTES, false).unwrap();
            let living = theirs.word32(0).load(Ordering::Acquire);
            ends(&life);
            (theirs, living)
        });
        let (theirs, living) = thread.join().unwrap();
        (living, theirs.word32(0).load(Ordering::Acquire))
    }

    #[test]
    fn word_changes_when_its_thread_ends_without_a_word() {
        const FUTEX_OWNER_DIED: u32 = 0x4000_0000;
        let (living, after) = seen_after(|_| {});
        assert!(living != 0 && living & FUTEX_OWNER_DIED == 0, "{living:x}");
        assert_eq!(after, FUTEX_OWNER_DIED);
    }

    #[test]
    fn word_that_was_ended_is_zero() {
        let (living, after) = seen_after(Life::end);
        assert!(living != 0);
        assert_eq!(after, 0);
    }

    #[test]
    fn nobody_else_can_write_the_word() {
        let (_life, fd) = Life::begin().unwrap();
        assert!(Mapping::new(fd.as_fd(), PAGE_BYTES, true).is_err());
        assert!(rustix::io::pwrite(&fd, &[1], 0).is_err());
    }
}
