//! Weak references to programs' inotify instances, which show the directories that are still watched.
//!
//! An epoll set holds no reference to its files: the kernel removes an inotify instance from the set when the last
//! process has closed it. So for each directory that an instance watches, the instance is in one epoll set, with the
//! directory's inode number as its data. No thread waits for the set. `/proc/self/fdinfo` lists the entries that
//! remain. A set can contain a file once for each descriptor number. Each directory uses one number, that of its
//! mirror's descriptor. So an instance has one entry for a directory, however often it adds the watch.
//!
//! The entry's epoll events encode the events of [`RAISED`] that the directory's watches request. They are epoll events
//! that inotify never raises.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forebay_types::{Error, Ino, Result};
use rustix::event::epoll::{self, EventFlags};
use rustix::io::{DupFlags, Errno};

use super::contents::RAISED;

/// The lowest number for mirrors' descriptors. Most other descriptors are lower, so that the next worker can reuse the
/// same numbers.
const NUMBERS: i32 = 1024;

/// The entries' epoll events, and the inotify events that they encode.
const MASKS: [(EventFlags, u32); 3] = [
    (EventFlags::PRI, libc::IN_MODIFY),
    (EventFlags::RDBAND, libc::IN_CLOSE_WRITE),
    (EventFlags::WRBAND, libc::IN_ATTRIB),
];
const _: () = assert!(MASKS[0].1 | MASKS[1].1 | MASKS[2].1 == RAISED);

/// An entry of the epoll set.
struct Entry {
    number: i32,
    mask: u32,
    directory: Ino,
}

/// The epoll set.
#[derive(Debug)]
pub(super) struct Holders {
    epoll: OwnedFd,
    /// The descriptor numbers of entries that earlier workers made, and their directory; none if several directories
    /// used the number.
    left: HashMap<i32, Option<Ino>>,
}

impl Holders {
    /// Makes an empty set.
    pub(super) fn create() -> Result<Holders> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot remember watches", &e.into()))?;
        Ok(Holders { epoll, left: HashMap::new() })
    }

    /// The set's descriptor, for the descriptor store.
    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The last worker's set.
    pub(super) fn of(epoll: OwnedFd) -> Holders {
        Holders { epoll, left: HashMap::new() }
    }

    /// Reads the entries of earlier workers: the directories, and the events that their watches request.
    pub(super) fn take_over(&mut self) -> std::io::Result<HashMap<Ino, u32>> {
        let entries = self.entries()?;
        for entry in &entries {
            let of = self.left.entry(entry.number).or_insert(Some(entry.directory));
            *of = of.filter(|of| *of == entry.directory);
        }
        Ok(masks(&entries))
    }

    /// Duplicates the descriptor of a directory's mirror to a number that has no entry for another directory. If
    /// earlier workers made entries for this directory under a number that is free, uses that number.
    pub(super) fn numbered(&self, mirror: &OwnedFd, directory: Ino) -> std::result::Result<OwnedFd, Errno> {
        let earlier = self.left.iter().find(|(_, of)| **of == Some(directory)).map(|(number, _)| *number);
        // If the limit of open files is low, starts again from 0.
        let mut starts = [earlier.unwrap_or(NUMBERS), 0].into_iter();
        let mut from = starts.next().unwrap_or(0);
        loop {
            match rustix::io::fcntl_dupfd_cloexec(mirror, from) {
                Ok(fd) => match self.left.get(&fd.as_raw_fd()) {
                    Some(of) if *of != Some(directory) => from = fd.as_raw_fd() + 1,
                    _ => return Ok(fd),
                },
                Err(e) => from = starts.next().ok_or(e)?,
            }
        }
    }

    /// Adds an entry for a watch of `directory` by `inotify`; true when there was none. `mirror` is the descriptor of
    /// the directory's mirror, whose number the entry uses.
    pub(super) fn add(
        &self,
        inotify: &OwnedFd,
        mirror: &mut OwnedFd,
        directory: Ino,
        mask: u32,
    ) -> std::result::Result<bool, Errno> {
        let own = rustix::io::fcntl_dupfd_cloexec(&*mirror, 0)?;
        rustix::io::dup3(inotify, mirror, DupFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(directory.0);
        let asked = MASKS.iter().filter(|(_, of)| mask & of != 0);
        // Edge-triggered, because no thread waits for the set.
        let events = asked.fold(EventFlags::ET, |events, (event, _)| events | *event);
        let entered = match epoll::add(&self.epoll, &*mirror, data, events) {
            // The entry is for this directory, or for a removed one that had the number before.
            Err(Errno::EXIST) => epoll::modify(&self.epoll, &*mirror, data, events).map(|()| false),
            entered => entered.map(|()| true),
        };
        if let Err(e) = rustix::io::dup3(&own, mirror, DupFlags::CLOEXEC) {
            // The mirror can be used under its other number.
            *mirror = own;
            return Err(e);
        }
        entered
    }

    fn entries(&self) -> std::io::Result<Vec<Entry>> {
        let text = std::fs::read_to_string(fdinfo(self.epoll.as_fd()))?;
        let entry = |line: &str| {
            let mut words = line.split_whitespace();
            let mut field = |name| words.next().filter(|word| *word == name).and_then(|_| words.next());
            let number = field("tfd:")?.parse().ok()?;
            let events = u32::from_str_radix(field("events:")?, 16).ok()?;
            let directory = u64::from_str_radix(field("data:")?, 16).ok().map(Ino)?;
            let asked = MASKS.iter().filter(|(event, _)| events & event.bits() != 0);
            Some(Entry { number, mask: asked.fold(0, |all, (_, of)| all | of), directory })
        };
        Ok(text.lines().filter_map(entry).collect())
    }

    /// The watched directories, and the events that their watches request.
    pub(super) fn directories(&self) -> std::io::Result<HashMap<Ino, u32>> {
        Ok(masks(&self.entries()?))
    }
}

fn masks(entries: &[Entry]) -> HashMap<Ino, u32> {
    let mut masks = HashMap::new();
    for entry in entries {
        *masks.entry(entry.directory).or_default() |= entry.mask;
    }
    masks
}

fn fdinfo(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fdinfo/{}", fd.as_raw_fd())
}

/// True for the descriptor of an inotify instance.
pub(super) fn is_inotify(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(forebay_sys::descriptor::path(fd));
    link.is_ok_and(|link| matches!(link.to_str(), Some("anon_inode:inotify" | "inotify")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::inotify;
    use std::collections::HashSet;

    fn instance() -> OwnedFd {
        inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap()
    }

    fn mirror() -> OwnedFd {
        std::fs::File::open("/").unwrap().into()
    }

    fn directories(holders: &Holders) -> HashSet<Ino> {
        holders.directories().unwrap().into_keys().collect()
    }

    #[test]
    fn a_reference_goes_with_the_last_descriptor_of_its_instance() {
        let holders = Holders::create().unwrap();
        let (one, other) = (instance(), instance());
        let mut mirrors: Vec<_> = (0..=100).map(|_| mirror()).collect();
        for (n, mirror) in mirrors.iter_mut().enumerate() {
            holders.add(&one, mirror, Ino(n as u64), 0).unwrap();
        }
        holders.add(&other, &mut mirrors[7], Ino(u64::MAX), 0).unwrap();
        let copy = one.try_clone().unwrap();
        drop(one);
        assert_eq!(directories(&holders).len(), 102, "another descriptor holds it");
        drop(copy);
        assert_eq!(directories(&holders), HashSet::from([Ino(u64::MAX)]));
        drop(other);
        assert!(directories(&holders).is_empty());
    }

    #[test]
    fn an_instance_is_entered_once_for_a_directory_with_what_was_asked_last() {
        let mut holders = Holders::create().unwrap();
        let (one, other, mut free) = (instance(), instance(), mirror());
        let mut of = holders.numbered(&free, Ino(5)).unwrap();
        let number = of.as_raw_fd();
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let before = inode(&of);
        for mask in [0, libc::IN_MODIFY, RAISED, libc::IN_ATTRIB, libc::IN_CLOSE_WRITE | libc::IN_CREATE] {
            for _ in 0..100 {
                holders.add(&one, &mut of, Ino(5), mask).unwrap();
            }
            assert_eq!(holders.entries().unwrap().len(), 1);
            assert_eq!(holders.directories().unwrap(), HashMap::from([(Ino(5), mask & RAISED)]));
        }
        assert_eq!((of.as_raw_fd(), inode(&of)), (number, before), "the mirror has its descriptor back");
        holders.add(&other, &mut of, Ino(5), libc::IN_MODIFY).unwrap();
        let both = HashMap::from([(Ino(5), libc::IN_CLOSE_WRITE | libc::IN_MODIFY)]);
        assert_eq!(holders.directories().unwrap(), both);

        // As the next worker.
        assert_eq!(holders.take_over().unwrap(), both);
        let taken = holders.numbered(&free, Ino(5)).unwrap();
        assert!(taken.as_raw_fd() > number, "its number is taken");
        drop((taken, of));
        free = holders.numbered(&free, Ino(6)).unwrap();
        assert_ne!(free.as_raw_fd(), number, "entries for another directory have it");
        // The directory is removed, and another one uses the number.
        holders.left.clear();
        holders.add(&one, &mut free, Ino(8), 0).unwrap();
        holders.add(&one, &mut free, Ino(9), 0).unwrap();
        assert_eq!(directories(&holders), HashSet::from([Ino(5), Ino(9)]));
    }

    #[test]
    fn instances_are_told_from_other_files() {
        assert!(is_inotify(&instance()));
        assert!(!is_inotify(&std::fs::File::open("/dev/null").unwrap().into()));
    }
}
