//! What dead movers left in a directory: removed, put back, or kept under a name that people see.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::described::{stat, version_of};
use super::names::{remove_directory, unlink};
use super::resolve::At;
use super::tree::each_name;
use super::PosixStore;
use crate::store::attributes::Leftovers;
use crate::store::error::StoreResult;
use crate::store::path::{with_suffix, StorePath};
use crate::store::source::retried;
use crate::store::temporary::{mark, Marks, TemporaryKind, TemporaryName};

/// Names tried for an object that is kept.
const KEPT_NAMES: u32 = 10_000;

/// True for what nothing needs when its mover is dead.
fn is_of_uploads(kind: TemporaryKind<'_>) -> bool {
    matches!(kind, TemporaryKind::Upload | TemporaryKind::UploadDirectory)
}

/// Opens a temporary directory, and returns the names in it.
fn opened(at: At<'_>) -> Result<(OwnedFd, Vec<Vec<u8>>), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let inner = retried(|| rustix::fs::openat(at.directory, at.name, flags, Mode::empty()))?;
    let mut names = Vec::new();
    each_name(
        inner.as_fd(),
        |e| e,
        |name| {
            names.push(name.to_vec());
            Ok(())
        },
    )?;
    Ok((inner, names))
}

/// Removes an upload directory with the uploads in it. What else is in it keeps it.
fn remove_uploads(at: At<'_>, done: &mut Leftovers) -> Result<(), Errno> {
    let (inner, names) = opened(at)?;
    for name in &names {
        let is_upload = TemporaryName::parse(name).is_some_and(|name| name.kind == TemporaryKind::Upload);
        if is_upload {
            match unlink(At { directory: inner.as_fd(), name }) {
                Ok(()) => done.removed += 1,
                // Another sweep was here.
                Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(e) => return Err(e),
            }
        }
    }
    remove_directory(at)
}

impl PosixStore {
    pub(super) fn sweep(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        let failed = |e| self.failed("sweep", directory, e);
        let fd = self.root.open(directory, OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        let mut done = Leftovers::default();
        // Collected first, because a directory that changes while it is listed may show a name twice.
        let mut names = Vec::new();
        each_name(fd.as_fd(), failed, |name| {
            match TemporaryName::parse(name) {
                Some(temporary) if is_alive(temporary.mover) => done.live += 1,
                Some(_) => names.push(name.to_vec()),
                None => {}
            }
            Ok(())
        })?;
        for name in &names {
            let at = At { directory: fd.as_fd(), name };
            let Some(temporary) = TemporaryName::parse(name) else { continue };
            let swept = match temporary.kind {
                TemporaryKind::Upload => unlink(at).map(|()| done.removed += 1),
                TemporaryKind::Aside(marks, final_name) => {
                    self.settle(at, marks, At { directory: fd.as_fd(), name: final_name }, &mut done)
                }
                TemporaryKind::AsideDirectory(marks) => self.settle_directory(at, marks, &mut done),
                TemporaryKind::UploadDirectory => remove_uploads(at, &mut done),
            };
            match swept {
                // Another user's, which only keeps its place: nothing is to be put back.
                Err(Errno::ACCESS | Errno::PERM) if is_of_uploads(temporary.kind) => done.live += 1,
                // Another sweep was here, or a name was taken by a directory.
                Err(Errno::NOENT | Errno::ISDIR | Errno::NOTDIR | Errno::NOTEMPTY) => {}
                other => other.map_err(failed)?,
            }
        }
        Ok(done)
    }

    /// Settles what is in an aside directory, and removes it.
    fn settle_directory(&self, at: At<'_>, marks: Marks, done: &mut Leftovers) -> Result<(), Errno> {
        let (inner, names) = opened(at)?;
        for name in &names {
            let to = At { directory: at.directory, name };
            self.settle(At { directory: inner.as_fd(), name }, marks, to, done)?;
        }
        remove_directory(at)
    }

    /// Settles one object that was put aside from `to`.
    fn settle(&self, aside: At<'_>, marks: Marks, to: At<'_>, done: &mut Leftovers) -> Result<(), Errno> {
        let found = stat(aside)?;
        let is_directory = found.st_mode & 0o170_000 == 0o040_000;
        let version = mark(&version_of(&found));
        if marks.is_spare(version) && !is_directory {
            done.removed += 1;
            return unlink(aside);
        }
        if self.names.put_new(aside, to, is_directory)? {
            done.put_back += 1;
            return Ok(());
        }
        if version == marks.expected && !is_directory {
            done.removed += 1;
            return unlink(aside);
        }
        // A version that no mover expected, and its name has another object: people decide.
        for number in 1..=KEPT_NAMES {
            let name = with_suffix(to.name, &format!(".forebay-kept-{number}"));
            if self.names.put_new(aside, At { directory: to.directory, name: &name }, is_directory)? {
                done.kept += 1;
                return Ok(());
            }
        }
        Err(Errno::EXIST)
    }
}
