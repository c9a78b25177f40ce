//! The mirror of one watched directory: a directory of the kernel with the same names, which raises the inotify events
//! of the watched one.
//!
//! In the mirror a file, link, FIFO, socket or device is an empty file, and a directory is an empty directory. Each
//! change is one system call, so that it raises exactly the events that the change itself raises on Linux. Whatever the
//! state of the mirror, after a change the name is as in the watched directory.

use forebay_sys::descriptor;
use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_types::{Ino, Kind};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
const DIRECTORY_MODE: Mode = Mode::RWXU;
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// The name, in the directory of the mirrors, of an entry that a rename brings in or takes out.
pub(super) const IN_TRANSIT: &str = "transit";

/// The inode of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Leaf {
    /// The inode number; none when the name is known only from the mirror of an earlier worker.
    pub(super) ino: Option<Ino>,
    pub(super) is_directory: bool,
}

impl Leaf {
    pub(super) fn of((ino, kind): (Ino, Kind)) -> Leaf {
        Leaf { ino: Some(ino), is_directory: kind == Kind::Directory }
    }
}

/// A mirror.
#[derive(Debug)]
pub(super) struct Mirror {
    directory: OwnedFd,
    /// The mirror's name in the directory of the mirrors.
    own_name: String,
    /// True when the mirror has the second of its two names, between which it is renamed.
    is_moved: bool,
    names: HashMap<Vec<u8>, Leaf>,
}

fn own_name(ino: Ino, is_moved: bool) -> String {
    format!("{:x}{}", ino.0, if is_moved { ".moved" } else { "" })
}

/// Parses a mirror's name: the watched directory, and true for the second of its names.
pub(super) fn parse_own_name(name: &str) -> Option<(Ino, bool)> {
    let (digits, is_moved) = match name.strip_suffix(".moved") {
        Some(digits) => (digits, true),
        None => (name, false),
    };
    u64::from_str_radix(digits, 16).ok().map(|ino| (Ino(ino), is_moved))
}

impl Mirror {
    /// Makes an empty mirror in the directory of the mirrors.
    pub(super) fn make(mirrors: BorrowedFd<'_>, ino: Ino) -> Result<Mirror, Errno> {
        rustix::fs::mkdirat(mirrors, own_name(ino, false), DIRECTORY_MODE)?;
        Mirror::open(mirrors, ino, false)
    }

    /// Opens a mirror that an earlier worker left, with its names.
    pub(super) fn open(mirrors: BorrowedFd<'_>, ino: Ino, is_moved: bool) -> Result<Mirror, Errno> {
        let own_name = own_name(ino, is_moved);
        let directory = rustix::fs::openat(mirrors, own_name.as_str(), DIRECTORY, Mode::empty())?;
        let mut names = HashMap::new();
        for entry in rustix::fs::Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                let is_directory = entry.file_type() == FileType::Directory;
                names.insert(name.to_vec(), Leaf { ino: None, is_directory });
            }
        }
        Ok(Mirror { directory, own_name, is_moved, names })
    }

    pub(super) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(super) fn directory_mut(&mut self) -> &mut OwnedFd {
        &mut self.directory
    }

    pub(super) fn get(&self, name: &[u8]) -> Option<Leaf> {
        self.names.get(name).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Vec<u8>, Leaf)> {
        self.names.iter().map(|(name, leaf)| (name, *leaf))
    }

    /// Names in an earlier worker's mirror that were not found in the watched directory.
    pub(super) fn unconfirmed(&self) -> Vec<Vec<u8>> {
        self.iter().filter(|(_, leaf)| leaf.ino.is_none()).map(|(name, _)| name.clone()).collect()
    }

    fn put(at: BorrowedFd<'_>, name: &[u8], leaf: Leaf) -> Result<(), Errno> {
        match leaf.is_directory {
            true => rustix::fs::mkdirat(at, name, DIRECTORY_MODE),
            false => rustix::fs::mknodat(at, name, FileType::RegularFile, FILE_MODE, 0),
        }
    }

    fn take(at: BorrowedFd<'_>, name: &[u8], leaf: Leaf) -> Result<(), Errno> {
        let flags = if leaf.is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(at, name, flags) {
            Err(Errno::NOENT) => Ok(()),
            done => done,
        }
    }

    fn put_in_transit(mirrors: BorrowedFd<'_>, leaf: Leaf) -> Result<(), Errno> {
        match Mirror::put(mirrors, IN_TRANSIT.as_bytes(), leaf) {
            // An earlier change failed half-way and left it.
            Err(Errno::EXIST) => {
                let _ = rustix::fs::unlinkat(mirrors, IN_TRANSIT, AtFlags::empty());
                let _ = rustix::fs::unlinkat(mirrors, IN_TRANSIT, AtFlags::REMOVEDIR);
                Mirror::put(mirrors, IN_TRANSIT.as_bytes(), leaf)
            }
            put => put,
        }
    }

    /// Makes the name refer to `leaf`, or removes it: IN_CREATE, IN_DELETE, or both.
    pub(super) fn set(&mut self, name: &[u8], leaf: Option<Leaf>) -> Result<(), Errno> {
        let before = self.get(name);
        let same = match (before, leaf) {
            (None, None) => true,
            (Some(a), Some(b)) => a.is_directory == b.is_directory && (a.ino.is_none() || a.ino == b.ino),
            _ => false,
        };
        if let (false, Some(before)) = (same, before) {
            Mirror::take(self.directory.as_fd(), name, before)?;
            self.names.remove(name);
        }
        if let Some(leaf) = leaf {
            if !same {
                Mirror::put(self.directory.as_fd(), name, leaf)?;
            }
            self.names.insert(name.to_vec(), leaf);
        }
        Ok(())
    }

    /// Renames a name to a directory that is not watched: IN_MOVED_FROM.
    pub(super) fn move_out(&mut self, mirrors: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        let Some(leaf) = self.get(name) else { return Ok(()) };
        rustix::fs::renameat(&self.directory, name, mirrors, IN_TRANSIT)?;
        self.names.remove(name);
        Mirror::take(mirrors, IN_TRANSIT.as_bytes(), leaf)
    }

    /// Renames an entry from a directory that is not watched to the name: IN_MOVED_TO.
    pub(super) fn move_in(&mut self, mirrors: BorrowedFd<'_>, name: &[u8], leaf: Leaf) -> Result<(), Errno> {
        Mirror::put_in_transit(mirrors, leaf)?;
        self.make_way(name, leaf)?;
        rustix::fs::renameat(mirrors, IN_TRANSIT, &self.directory, name)?;
        self.names.insert(name.to_vec(), leaf);
        Ok(())
    }

    /// Removes an entry that the rename cannot replace because one of the two is a directory. On Linux too a rename
    /// replaces only an entry of the same kind.
    fn make_way(&mut self, name: &[u8], leaf: Leaf) -> Result<(), Errno> {
        match self.get(name) {
            Some(there) if there.is_directory != leaf.is_directory => self.set(name, None),
            _ => Ok(()),
        }
    }

    /// Renames within one mirror: IN_MOVED_FROM and IN_MOVED_TO with one cookie.
    pub(super) fn rename(&mut self, from: &[u8], to: &[u8], leaf: Leaf) -> Result<(), Errno> {
        self.make_way(to, leaf)?;
        rustix::fs::renameat(&self.directory, from, &self.directory, to)?;
        self.names.remove(from);
        self.names.insert(to.to_vec(), leaf);
        Ok(())
    }

    /// Renames from this mirror to another.
    pub(super) fn rename_to(
        &mut self,
        from: &[u8],
        other: &mut Mirror,
        to: &[u8],
        leaf: Leaf,
    ) -> Result<(), Errno> {
        other.make_way(to, leaf)?;
        rustix::fs::renameat(&self.directory, from, &other.directory, to)?;
        self.names.remove(from);
        other.names.insert(to.to_vec(), leaf);
        Ok(())
    }

    /// Exchanges two existing names, the second in `other` if given: both events for each.
    pub(super) fn exchange(
        &mut self,
        from: (&[u8], Leaf),
        other: Option<&mut Mirror>,
        to: (&[u8], Leaf),
    ) -> Result<(), Errno> {
        let directory = other.as_ref().map_or(&self.directory, |other| &other.directory);
        rustix::fs::renameat_with(&self.directory, from.0, directory, to.0, RenameFlags::EXCHANGE)?;
        self.names.insert(from.0.to_vec(), from.1);
        match other {
            Some(other) => other.names.insert(to.0.to_vec(), to.1),
            None => self.names.insert(to.0.to_vec(), to.1),
        };
        Ok(())
    }

    /// Exchanges a name with one in a directory that is not watched: `leaf` gets this name, and the earlier entry
    /// leaves the mirror. `is_source` when this name is the first of the two, which determines the order of the events.
    pub(super) fn exchange_with_outside(
        &mut self,
        mirrors: BorrowedFd<'_>,
        name: &[u8],
        leaf: Leaf,
        is_source: bool,
    ) -> Result<(), Errno> {
        let Some(before) = self.get(name) else { return self.move_in(mirrors, name, leaf) };
        Mirror::put_in_transit(mirrors, leaf)?;
        let (own, transit) = ((self.directory.as_fd(), name), (mirrors, IN_TRANSIT.as_bytes()));
        let (a, b) = if is_source { (own, transit) } else { (transit, own) };
        rustix::fs::renameat_with(a.0, a.1, b.0, b.1, RenameFlags::EXCHANGE)?;
        self.names.insert(name.to_vec(), leaf);
        Mirror::take(mirrors, IN_TRANSIT.as_bytes(), before)
    }

    /// The watched directory itself was renamed: renames the mirror, which raises IN_MOVE_SELF.
    pub(super) fn move_itself(&mut self, mirrors: BorrowedFd<'_>, ino: Ino) -> Result<(), Errno> {
        let name = own_name(ino, !self.is_moved);
        rustix::fs::renameat(mirrors, self.own_name.as_str(), mirrors, name.as_str())?;
        (self.own_name, self.is_moved) = (name, !self.is_moved);
        Ok(())
    }

    /// Attributes of a name, or of the directory itself, were set: IN_ATTRIB.
    pub(super) fn touch(&self, name: Option<&[u8]>) -> Result<(), Errno> {
        let Some(name) = name else { return rustix::fs::fchmod(&self.directory, DIRECTORY_MODE) };
        let mode = match self.get(name) {
            Some(leaf) if leaf.is_directory => DIRECTORY_MODE,
            Some(_) => FILE_MODE,
            None => return Ok(()),
        };
        rustix::fs::chmodat(&self.directory, name, mode, AtFlags::empty())
    }

    /// A file's contents were changed, or a writable descriptor of it was closed: IN_MODIFY, or IN_OPEN and
    /// IN_CLOSE_WRITE.
    pub(super) fn change_contents(&self, name: &[u8], events: u32) -> Result<(), Errno> {
        if self.get(name).is_none_or(|leaf| leaf.is_directory) {
            return Ok(());
        }
        if events & libc::IN_MODIFY != 0 {
            let path = descriptor::path_of_entry(&self.directory, name).into_os_string().into_encoded_bytes();
            let path = CString::new(path).map_err(|_| Errno::INVAL)?;
            // SAFETY: the path is NUL-terminated.
            if unsafe { libc::truncate(path.as_ptr(), 0) } != 0 {
                let e = std::io::Error::last_os_error();
                return Err(Errno::from_io_error(&e).unwrap_or(Errno::IO));
            }
        }
        if events & libc::IN_CLOSE_WRITE != 0 {
            let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            drop(rustix::fs::openat(&self.directory, name, flags, Mode::empty())?);
        }
        Ok(())
    }

    /// Removes the mirror. Remaining watches get the events of the removal of its names and of itself.
    pub(super) fn remove(self, mirrors: BorrowedFd<'_>) {
        for (name, leaf) in self.iter() {
            let _ = Mirror::take(self.directory.as_fd(), name, leaf);
        }
        let _ = rustix::fs::unlinkat(mirrors, self.own_name.as_str(), AtFlags::REMOVEDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::inotify::{self, ReadFlags as E};

    struct Place(std::path::PathBuf, OwnedFd);

    impl Place {
        fn new(name: &str) -> Place {
            let path = std::env::temp_dir().join(format!("forebay-mirror-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir(&path).unwrap();
            let fd = std::fs::File::open(&path).unwrap().into();
            Place(path, fd)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn watch(mirror: &Mirror) -> OwnedFd {
        let instance = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap();
        let path = descriptor::path(&mirror.directory);
        // Without IN_CLOSE_NOWRITE, because the mirror's own descriptor is closed too.
        let mask = inotify::WatchFlags::ALL_EVENTS - inotify::WatchFlags::CLOSE_NOWRITE;
        inotify::add_watch(&instance, path, mask).unwrap();
        instance
    }

    fn events(instance: &OwnedFd) -> Vec<(E, String)> {
        let mut room = [std::mem::MaybeUninit::uninit(); 8192];
        let mut reader = inotify::Reader::new(instance, &mut room);
        let mut all = Vec::new();
        while let Ok(event) = reader.next() {
            let name = event.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
            all.push((event.events(), name));
        }
        all
    }

    fn file(ino: u64) -> Leaf {
        Leaf { ino: Some(Ino(ino)), is_directory: false }
    }

    fn directory(ino: u64) -> Leaf {
        Leaf { ino: Some(Ino(ino)), is_directory: true }
    }

    #[test]
    fn each_change_raises_the_events_that_it_raises_on_linux_and_no_others() {
        let place = Place::new("events");
        let mirrors = place.1.as_fd();
        let (mut a, mut b) = (Mirror::make(mirrors, Ino(1)).unwrap(), Mirror::make(mirrors, Ino(2)).unwrap());
        let (of_a, of_b) = (watch(&a), watch(&b));
        let is = |instance: &OwnedFd, wanted: &[(E, &str)]| {
            let wanted: Vec<_> = wanted.iter().map(|(e, name)| (*e, name.to_string())).collect();
            assert_eq!(events(instance), wanted);
        };
        a.set(b"f", Some(file(10))).unwrap();
        a.set(b"d", Some(directory(11))).unwrap();
        is(&of_a, &[(E::CREATE, "f"), (E::CREATE | E::ISDIR, "d")]);
        a.set(b"f", Some(file(10))).unwrap();
        a.set(b"none", None).unwrap();
        is(&of_a, &[]);
        a.set(b"f", Some(file(12))).unwrap();
        is(&of_a, &[(E::DELETE, "f"), (E::CREATE, "f")]);
        a.rename(b"f", b"g", file(12)).unwrap();
        is(&of_a, &[(E::MOVED_FROM, "f"), (E::MOVED_TO, "g")]);
        a.rename_to(b"g", &mut b, b"h", file(12)).unwrap();
        is(&of_a, &[(E::MOVED_FROM, "g")]);
        is(&of_b, &[(E::MOVED_TO, "h")]);
        b.move_in(mirrors, b"h", directory(13)).unwrap();
        is(&of_b, &[(E::DELETE, "h"), (E::MOVED_TO | E::ISDIR, "h")]);
        b.exchange((b"h", directory(11)), Some(&mut a), (b"d", directory(13))).unwrap();
        let both = [(E::MOVED_FROM | E::ISDIR, "d"), (E::MOVED_TO | E::ISDIR, "d")];
        let mut seen = events(&of_a);
        seen.sort_by_key(|(event, _)| event.bits());
        assert_eq!(seen, both.map(|(e, n)| (e, n.to_string())));
        assert_eq!(events(&of_b).len(), 2);
        // As a change leaves it that fails half-way.
        Mirror::put_in_transit(mirrors, file(15)).unwrap();
        a.exchange_with_outside(mirrors, b"d", directory(16), false).unwrap();
        let mut seen = events(&of_a);
        seen.sort_by_key(|(event, _)| event.bits());
        assert_eq!(seen, both.map(|(e, n)| (e, n.to_string())));
        b.move_out(mirrors, b"h").unwrap();
        is(&of_b, &[(E::MOVED_FROM | E::ISDIR, "h")]);
        b.set(b"c", Some(file(14))).unwrap();
        b.change_contents(b"c", libc::IN_MODIFY).unwrap();
        b.change_contents(b"c", libc::IN_CLOSE_WRITE).unwrap();
        b.touch(Some(b"c")).unwrap();
        b.touch(None).unwrap();
        b.move_itself(mirrors, Ino(2)).unwrap();
        is(
            &of_b,
            &[
                (E::CREATE, "c"),
                (E::MODIFY, "c"),
                (E::OPEN, "c"),
                (E::CLOSE_WRITE, "c"),
                (E::ATTRIB, "c"),
                (E::ATTRIB | E::ISDIR, ""),
                (E::MOVE_SELF, ""),
            ],
        );
        b.set(b"c", None).unwrap();
        b.remove(mirrors);
        is(&of_b, &[(E::DELETE, "c"), (E::DELETE_SELF, ""), (E::IGNORED, "")]);
        a.remove(mirrors);
        assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_mirror_that_was_left_is_opened_with_its_names_and_compared() {
        let place = Place::new("left");
        let mirrors = place.1.as_fd();
        let mut left = Mirror::make(mirrors, Ino(0xabc)).unwrap();
        for (name, leaf) in [("stays", file(1)), ("goes", file(2)), ("changes", file(3))] {
            left.set(name.as_bytes(), Some(leaf)).unwrap();
        }
        left.move_itself(mirrors, Ino(0xabc)).unwrap();
        let names: Vec<_> = std::fs::read_dir(&place.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(parse_own_name(&names[0]), Some((Ino(0xabc), true)));
        assert_eq!(parse_own_name(IN_TRANSIT), None);
        let mut opened = Mirror::open(mirrors, Ino(0xabc), true).unwrap();
        let of = watch(&opened);
        opened.set(b"stays", Some(file(1))).unwrap();
        opened.set(b"changes", Some(directory(4))).unwrap();
        opened.set(b"comes", Some(file(5))).unwrap();
        assert_eq!(opened.unconfirmed(), [b"goes".to_vec()]);
        opened.set(b"goes", None).unwrap();
        let wanted = [
            (E::DELETE, "changes"),
            (E::CREATE | E::ISDIR, "changes"),
            (E::CREATE, "comes"),
            (E::DELETE, "goes"),
        ];
        assert_eq!(events(&of), wanted.map(|(e, n)| (e, n.to_string())));
    }
}
