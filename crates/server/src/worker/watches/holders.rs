//! Which directories are still watched: weak references to programs' inotify instances.
//!
//! An epoll set holds no reference to the files in it: an instance leaves it when the last process has closed it. So each watch is an entry of
//! one set, which nobody waits for, with the directory's number as its data, and `/proc/self/fdinfo` lists the entries that remain. A file
//! can be in a set once for each number of a descriptor, so each watch is entered under another number.

use std::collections::HashSet;
use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forebay_types::{Error, Ino, Result};
use rustix::event::epoll;
use rustix::io::Errno;

/// Entries are made under numbers up to this one, and beyond it only for an instance that has all of them: higher ones make the
/// process's table of descriptors larger.
const NUMBERS: i32 = 4096;

/// The epoll set.
#[derive(Debug)]
pub(super) struct Holders {
    epoll: OwnedFd,
    /// The number of the last entry's descriptor.
    last: i32,
}

impl Holders {
    /// An empty set.
    pub(super) fn create() -> Result<Holders> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot remember watches", &e.into()))?;
        Ok(Holders { epoll, last: 0 })
    }

    /// The set's descriptor, for the store.
    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The set that the last worker had.
    pub(super) fn of(epoll: OwnedFd) -> Holders {
        Holders { epoll, last: 0 }
    }

    /// Enters a watch of `directory` by `inotify`.
    pub(super) fn add(&mut self, inotify: &OwnedFd, directory: Ino) -> std::result::Result<(), Errno> {
        let enter = |fd: &OwnedFd| {
            let data = epoll::EventData::new_u64(directory.0);
            // Waits for nothing.
            epoll::add(&self.epoll, fd, data, epoll::EventFlags::ET)
        };
        if self.last >= NUMBERS {
            self.last = 0;
        }
        let mut from_start = self.last == 0;
        loop {
            let under_another = match rustix::io::fcntl_dupfd_cloexec(inotify, self.last + 1) {
                Ok(fd) => fd,
                // Beyond the highest number.
                Err(Errno::INVAL | Errno::MFILE) if !from_start => {
                    (self.last, from_start) = (0, true);
                    continue;
                }
                Err(Errno::INVAL | Errno::MFILE) => return Err(Errno::NOSPC),
                Err(e) => return Err(e),
            };
            self.last = under_another.as_raw_fd();
            match enter(&under_another) {
                Err(Errno::EXIST) => {}
                entered => return entered,
            }
        }
    }

    /// The directories that are watched.
    pub(super) fn directories(&self) -> std::io::Result<HashSet<Ino>> {
        let text = std::fs::read_to_string(fdinfo(self.epoll.as_fd()))?;
        let data = |line: &str| {
            let mut words = line.strip_prefix("tfd:")?.split_whitespace();
            words.find(|word| *word == "data:")?;
            u64::from_str_radix(words.next()?, 16).ok().map(Ino)
        };
        Ok(text.lines().filter_map(data).collect())
    }
}

fn fdinfo(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fdinfo/{}", fd.as_raw_fd())
}

/// True of a descriptor of an inotify instance.
pub(super) fn is_inotify(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|link| matches!(link.to_str(), Some("anon_inode:inotify" | "inotify")))
}

/// True when an inotify instance watches the kernel's directory `watched` already.
pub(super) fn has_watch_of(inotify: &OwnedFd, watched: &OwnedFd) -> bool {
    let (Ok(text), Ok(st)) = (std::fs::read_to_string(fdinfo(inotify.as_fd())), rustix::fs::fstat(watched))
    else {
        return false;
    };
    let device = u64::from(rustix::fs::major(st.st_dev)) << 20 | u64::from(rustix::fs::minor(st.st_dev));
    let mut wanted = String::new();
    let _ = write!(wanted, " ino:{:x} sdev:{device:x} ", st.st_ino);
    text.lines().any(|line| line.starts_with("inotify ") && line.contains(&wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::inotify;

    fn instance() -> OwnedFd {
        inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn a_reference_goes_with_the_last_descriptor_of_its_instance() {
        let mut holders = Holders::create().unwrap();
        let (one, other) = (instance(), instance());
        for n in 1..=100 {
            holders.add(&one, Ino(n)).unwrap();
        }
        holders.add(&other, Ino(u64::MAX)).unwrap();
        let copy = one.try_clone().unwrap();
        drop(one);
        assert_eq!(holders.directories().unwrap().len(), 101, "another descriptor holds it");
        drop(copy);
        assert_eq!(holders.directories().unwrap(), HashSet::from([Ino(u64::MAX)]));
        drop(other);
        assert!(holders.directories().unwrap().is_empty());
    }

    #[test]
    fn instances_are_told_from_other_files_and_say_what_they_watch() {
        let instance = instance();
        assert!(is_inotify(&instance));
        assert!(!is_inotify(&std::fs::File::open("/dev/null").unwrap().into()));
        let directory: OwnedFd = std::fs::File::open("/").unwrap().into();
        assert!(!has_watch_of(&instance, &directory));
        inotify::add_watch(&instance, "/", inotify::WatchFlags::CREATE).unwrap();
        assert!(has_watch_of(&instance, &directory));
    }
}
