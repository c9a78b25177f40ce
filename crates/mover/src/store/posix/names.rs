//! Names given, exchanged and put aside, each step without a moment in which an unexpected object can be lost.
//!
//! **Replace.** The upload changes places with what has the name (RENAME_EXCHANGE), and what came back is compared with
//! the expected version. If it is another one, both change places again. If a foreign program put yet another object at
//! the name meanwhile, that is noticed because what comes back is not what was put there, and the exchange goes on until
//! the newest one is at the name. **Where there is no exchange** (NFS, most parallel file systems) the object is renamed
//! to an aside name and compared there, and the upload gets the free name by RENAME_NOREPLACE, or by link and unlink:
//! the name is missing for two calls. A hard link aside followed by a plain rename would not do, because the rename
//! could hit a file that came after the link.
//!
//! **Killed in between**: what is aside has a name by which a sweep recognizes it ([`Marks`]).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_types::StoreVersion;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::super::source::retried;
use super::super::temporary::{Marks, Temporaries};
use super::described::{stat, version_of};
use super::resolve::At;
use crate::host::Instant;

/// What the file system can do with names. A flag is cleared when the kernel refuses the call as a whole.
#[derive(Debug)]
pub(super) struct NameCalls {
    pub(super) exchange: AtomicBool,
    pub(super) no_replace: AtomicBool,
    pub(super) links: AtomicBool,
    /// Microseconds that a link takes, of the last ones.
    pub(super) link_us: AtomicU64,
    /// They count as slow, however soon they end.
    pub(super) count_as_slow: bool,
}

/// A link that takes so long waits for a server.
const SLOW_LINK_US: u64 = 1000;

/// The outcome of [`NameCalls::replace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Replaced {
    Yes,
    /// The name has, or had, another object, which is at the name now.
    Conflict,
}

/// An object that was put aside.
pub(super) struct Aside<'a> {
    at: At<'a>,
    name: Vec<u8>,
    /// The directory that has it, for long names.
    directory: Option<OwnedFd>,
}

impl<'a> Aside<'a> {
    /// A free name for what is at `at`.
    fn new(temporaries: &Temporaries, marks: Marks, at: At<'a>) -> Result<Aside<'a>, Errno> {
        if let Some(name) = temporaries.next_aside(marks, at.name) {
            return Ok(Aside { at, name, directory: None });
        }
        let name = temporaries.next_aside_directory(marks);
        retried(|| rustix::fs::mkdirat(at.directory, &name[..], Mode::RWXU))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = retried(|| rustix::fs::openat(at.directory, &name[..], flags, Mode::empty()))?;
        Ok(Aside { at, name, directory: Some(opened) })
    }

    pub(super) fn place(&self) -> At<'_> {
        match &self.directory {
            Some(directory) => At { directory: directory.as_fd(), name: self.at.name },
            None => At { directory: self.at.directory, name: &self.name },
        }
    }

    /// Removes what is aside.
    pub(super) fn remove(self) -> Result<(), Errno> {
        unlink(self.place())?;
        self.release();
        Ok(())
    }

    /// After nothing is aside any more. A directory that is left is a leftover like any other.
    pub(super) fn release(self) {
        if self.directory.is_some() {
            let _ = remove_directory(At { directory: self.at.directory, name: &self.name });
        }
    }
}

pub(super) fn unlink(at: At<'_>) -> Result<(), Errno> {
    retried(|| rustix::fs::unlinkat(at.directory, at.name, AtFlags::empty()))
}

pub(super) fn remove_directory(at: At<'_>) -> Result<(), Errno> {
    retried(|| rustix::fs::unlinkat(at.directory, at.name, AtFlags::REMOVEDIR))
}

fn version_at(at: At<'_>) -> Result<StoreVersion, Errno> {
    Ok(version_of(&stat(at)?))
}

/// The kernel or the file system does not know the call, or its flag.
fn is_unknown(e: Errno) -> bool {
    matches!(e, Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)
}

impl NameCalls {
    pub(super) fn new(exchange: bool, no_replace: bool, links: bool) -> NameCalls {
        NameCalls {
            exchange: AtomicBool::new(exchange),
            no_replace: AtomicBool::new(no_replace),
            links: AtomicBool::new(links),
            link_us: AtomicU64::new(0),
            count_as_slow: false,
        }
    }

    /// True where a new name is made by link and unlink, each of which waits for a server.
    pub(super) fn are_slow(&self) -> bool {
        let [links, no_replace] = [&self.links, &self.no_replace].map(|flag| flag.load(Ordering::Relaxed));
        let is_slow = self.count_as_slow || self.link_us.load(Ordering::Relaxed) >= SLOW_LINK_US;
        links && !no_replace && is_slow
    }

    /// Gives what is at `from` a further name, and notes how long that takes.
    pub(super) fn link(&self, from: At<'_>, to: At<'_>) -> Result<(), Errno> {
        let begun = Instant::now();
        let linked = retried(|| {
            rustix::fs::linkat(from.directory, from.name, to.directory, to.name, AtFlags::empty())
        });
        let us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        // Of two threads one may not count.
        let before = self.link_us.load(Ordering::Relaxed);
        self.link_us.store(if before == 0 { us } else { before - before / 4 + us / 4 }, Ordering::Relaxed);
        linked
    }

    /// Renames onto a name that must be free; false if it is not. EINVAL for a directory that would be moved into
    /// itself is not an unknown flag, so only files clear one.
    pub(super) fn put_new(&self, from: At<'_>, to: At<'_>, is_directory: bool) -> Result<bool, Errno> {
        if self.no_replace.load(Ordering::Relaxed) {
            match rename_with(from, to, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(true),
                Err(Errno::EXIST) => return Ok(false),
                Err(e) if is_unknown(e) && !is_directory => self.no_replace.store(false, Ordering::Relaxed),
                Err(e) if is_unknown(e) => {}
                Err(e) => return Err(e),
            }
        }
        if !is_directory && self.links.load(Ordering::Relaxed) {
            match self.link(from, to) {
                Ok(()) => return unlink(from).map(|()| true),
                Err(Errno::EXIST) => return Ok(false),
                // No links at all, or not of this file.
                Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {}
                Err(e) => return Err(e),
            }
        }
        match stat(to) {
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
            Ok(_) => return Ok(false),
        }
        retried(|| rustix::fs::renameat(from.directory, from.name, to.directory, to.name))?;
        Ok(true)
    }

    /// Puts the upload `from`, of version `version`, in place of the version `expected` at `to`, which is removed.
    pub(super) fn replace(
        &self,
        temporaries: &Temporaries,
        (from, version): (At<'_>, &StoreVersion),
        (to, expected): (At<'_>, &StoreVersion),
    ) -> Result<Replaced, Errno> {
        if !self.exchange.load(Ordering::Relaxed) {
            return self.replace_by_aside(temporaries, from, to, expected);
        }
        // Under an aside name, so that a sweep can tell the upload from what comes back.
        let aside = Aside::new(temporaries, Marks::of_upload(expected, version), to)?;
        let place = aside.place();
        if let Err(e) =
            retried(|| rustix::fs::renameat(from.directory, from.name, place.directory, place.name))
        {
            aside.release();
            return Err(e);
        }
        self.replace_from_aside(temporaries, (aside, version.ino, from), (to, expected))
    }

    /// Puts what is aside, with inode number `ino`, in place of the version `expected` at `to`, which is removed. After
    /// a conflict it goes to `home`, if that is free.
    pub(super) fn replace_from_aside(
        &self,
        temporaries: &Temporaries,
        (aside, ino, home): (Aside<'_>, u64, At<'_>),
        (to, expected): (At<'_>, &StoreVersion),
    ) -> Result<Replaced, Errno> {
        let exchanged = match self.exchange.load(Ordering::Relaxed) {
            true => self.exchange(aside.place(), ino, to, expected),
            false => Ok(None),
        };
        match exchanged {
            Ok(Some(Replaced::Yes)) => return aside.remove().map(|()| Replaced::Yes),
            Ok(Some(Replaced::Conflict)) | Err(_) => {}
            Ok(None) => match self.replace_by_aside(temporaries, aside.place(), to, expected) {
                Ok(Replaced::Yes) => {
                    aside.release();
                    return Ok(Replaced::Yes);
                }
                other => {
                    self.go_home(aside, ino, home)?;
                    return other;
                }
            },
        }
        let home = self.go_home(aside, ino, home);
        exchanged?;
        home.map(|()| Replaced::Conflict)
    }

    /// Without an exchange: what is at `to` goes aside and is compared, then `from` gets the name.
    fn replace_by_aside(
        &self,
        temporaries: &Temporaries,
        from: At<'_>,
        to: At<'_>,
        expected: &StoreVersion,
    ) -> Result<Replaced, Errno> {
        let Some(aside) = self.put_aside(temporaries, to, expected, None)? else {
            return Ok(Replaced::Conflict);
        };
        match self.put_new(from, to, false) {
            Ok(true) => aside.remove().map(|()| Replaced::Yes),
            // A foreign program has put a file there, in place of the expected one.
            Ok(false) => aside.remove().map(|()| Replaced::Conflict),
            Err(e) => {
                let _ = self.put_back(aside);
                Err(e)
            }
        }
    }

    /// After a conflict: the mover's object, with inode number `ino`, gets its name back. Anything else that is aside
    /// is an object that a foreign program replaced itself, and is removed.
    fn go_home(&self, aside: Aside<'_>, ino: u64, home: At<'_>) -> Result<(), Errno> {
        match stat(aside.place()) {
            Ok(stat) if stat.st_ino != ino => return aside.remove(),
            // A foreign program has put another object there, in place of this one.
            Ok(_) if !self.put_new(aside.place(), home, false)? => return aside.remove(),
            // Home, or at the name that it was to get, because that was free.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
        }
        aside.release();
        Ok(())
    }

    /// Exchanges `from`, with inode number `ino`, and `to`; then compares what came back with `expected`, and undoes the
    /// exchange if it is something else. None if the file system has no exchange.
    pub(super) fn exchange(
        &self,
        from: At<'_>,
        ino: u64,
        to: At<'_>,
        expected: &StoreVersion,
    ) -> Result<Option<Replaced>, Errno> {
        match rename_with(from, to, RenameFlags::EXCHANGE) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(Some(Replaced::Conflict)),
            Err(e) if is_unknown(e) => {
                self.exchange.store(false, Ordering::Relaxed);
                return Ok(None);
            }
            Err(e) => return Err(e),
        }
        let back = stat(from)?;
        if version_of(&back) == *expected {
            return Ok(Some(Replaced::Yes));
        }
        // `put` is at `to`, unless a foreign program replaced it; `back` is at `from`. Each further round needs another
        // replacement by a foreign program between two calls.
        let (mut put, mut back) = (ino, back.st_ino);
        loop {
            match rename_with(from, to, RenameFlags::EXCHANGE) {
                Ok(()) => {}
                Err(Errno::NOENT) => {
                    // A foreign program removed what was put there. What came back is not lost for that.
                    self.put_new(from, to, false)?;
                    return Ok(Some(Replaced::Conflict));
                }
                Err(e) => return Err(e),
            }
            let now = stat(from)?.st_ino;
            if now == put {
                return Ok(Some(Replaced::Conflict));
            }
            (put, back) = (back, now);
        }
    }

    /// Puts what is at `at` aside. None if it is not of version `expected`: it is back at its name then, or a newer one
    /// is there, or nothing was. `spare`: see [`Marks`].
    pub(super) fn put_aside<'a>(
        &self,
        temporaries: &Temporaries,
        at: At<'a>,
        expected: &StoreVersion,
        spare: Option<&StoreVersion>,
    ) -> Result<Option<Aside<'a>>, Errno> {
        let aside = Aside::new(temporaries, Marks::new(expected, spare), at)?;
        let place = aside.place();
        match retried(|| rustix::fs::renameat(at.directory, at.name, place.directory, place.name)) {
            Ok(()) => {}
            Err(e) => {
                aside.release();
                return if e == Errno::NOENT { Ok(None) } else { Err(e) };
            }
        }
        match version_at(aside.place()) {
            Ok(found) if found == *expected => Ok(Some(aside)),
            Ok(_) => self.put_back(aside).map(|()| None),
            Err(e) => {
                let _ = self.put_back(aside);
                Err(e)
            }
        }
    }

    /// Puts what is aside back at its name. If a foreign program has put another object there, that one replaced it,
    /// and what is aside is removed.
    pub(super) fn put_back(&self, aside: Aside<'_>) -> Result<(), Errno> {
        let is_directory = match stat(aside.place()) {
            Ok(stat) => stat.st_mode & 0o170_000 == 0o040_000,
            // It went elsewhere: after a conflict its place at the name was taken by a foreign program.
            Err(Errno::NOENT) => {
                aside.release();
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        if self.put_new(aside.place(), aside.at, is_directory)? {
            aside.release();
            return Ok(());
        }
        if is_directory {
            // Not removable in one call; a sweep keeps it.
            return Ok(());
        }
        aside.remove()
    }
}

fn rename_with(from: At<'_>, to: At<'_>, flags: RenameFlags) -> Result<(), Errno> {
    retried(|| rustix::fs::renameat_with(from.directory, from.name, to.directory, to.name, flags))
}
