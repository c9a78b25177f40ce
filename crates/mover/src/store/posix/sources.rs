//! Files of the store that several threads read in ranges, each opened once.
//!
//! Many file systems of a network forget what they have read of a file when it is opened again: what they had read ahead for
//! one range would be read from the server twice. Since an open file may be described by attributes from long ago, the server is
//! asked for them ([`State::of`]). A leaf mutex.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use forebay_types::{Kind, StoreVersion, Timestamp};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;

use super::super::path::StorePath;
use super::super::source::{is_dense, retried};
use super::described::version_of;

/// The files that are open.
#[derive(Debug, Default)]
pub(super) struct Sources(Mutex<HashMap<StorePath, Weak<OwnedFd>>>);

impl Sources {
    fn lock(&self) -> MutexGuard<'_, HashMap<StorePath, Weak<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that another thread has opened at a path. It may have another name, or none, by now.
    pub(super) fn get(&self, path: &StorePath) -> Option<Arc<OwnedFd>> {
        self.lock().get(path)?.upgrade()
    }

    /// What was opened at a path, for other threads too, as long as any has it.
    pub(super) fn put(&self, path: &StorePath, file: OwnedFd) -> Arc<OwnedFd> {
        let file = Arc::new(file);
        let mut open = self.lock();
        open.retain(|_, file| file.strong_count() > 0);
        open.insert(path.clone(), Arc::downgrade(&file));
        file
    }
}

/// What a store says of an open file.
pub(super) struct State {
    pub(super) version: StoreVersion,
    is_file: bool,
    pub(super) is_dense: bool,
}

impl State {
    /// That of a file that was opened just now, or, with `asks_server`, as its server has it now.
    pub(super) fn of(fd: impl AsFd, asks_server: bool) -> Result<State, Errno> {
        if asks_server {
            match State::asked(&fd) {
                Err(Errno::NOSYS) => {}
                asked => return asked,
            }
        }
        let stat = retried(|| rustix::fs::fstat(&fd))?;
        Ok(State {
            version: version_of(&stat),
            is_file: Kind::from_mode(stat.st_mode) == Some(Kind::File),
            is_dense: is_dense(stat.st_size as u64, stat.st_blocks),
        })
    }

    fn asked(fd: &impl AsFd) -> Result<State, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let found = retried(|| rustix::fs::statx(fd, c"", flags, StatxFlags::BASIC_STATS))?;
        let mtime = Timestamp { sec: found.stx_mtime.tv_sec, nsec: found.stx_mtime.tv_nsec };
        Ok(State {
            version: StoreVersion { bytes: found.stx_size, mtime, ino: found.stx_ino, tag: 0 },
            is_file: Kind::from_mode(found.stx_mode.into()) == Some(Kind::File),
            is_dense: is_dense(found.stx_size, found.stx_blocks as i64),
        })
    }

    /// True for a file of this version.
    pub(super) fn is(&self, expected: &StoreVersion) -> bool {
        self.is_file && self.version == *expected
    }
}

#[cfg(test)]
mod tests {
    use super::super::PosixStore;
    use super::*;
    use crate::store::{MoverId, Store};
    use forebay_types::Code;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    #[test]
    fn file_is_shared_as_long_as_a_thread_has_it() {
        let directory = std::env::temp_dir();
        let open = || OwnedFd::from(std::fs::File::open(&directory).unwrap());
        let path = |name: &[u8]| StorePath::root().join(name).unwrap();
        let sources = Sources::default();
        assert!(sources.get(&path(b"a")).is_none());
        let first = sources.put(&path(b"a"), open());
        let second = sources.get(&path(b"a")).unwrap();
        assert!(Arc::ptr_eq(&first, &second) && sources.get(&path(b"b")).is_none());
        drop((first, second));
        assert!(sources.get(&path(b"a")).is_none());
        let _other = sources.put(&path(b"b"), open());
        assert_eq!(sources.lock().len(), 1, "what no thread has is forgotten");
    }

    #[test]
    fn file_that_was_replaced_is_read_as_the_version_that_is_asked_for() {
        let directory = std::env::temp_dir().join(format!("forebay-ranges-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let options = super::super::PosixOptions::default();
        let store = PosixStore::open(&directory, options, MoverId::own()).unwrap();
        let (path, file) = (StorePath::root().join(b"f").unwrap(), directory.join("f"));
        let version = || store.look(&path).unwrap().unwrap().version;
        let read = |version: &StoreVersion| {
            let into = std::fs::File::options();
            let into =
                into.clone().read(true).write(true).create(true).truncate(true).open(directory.join("into"));
            let into = into.unwrap();
            let done = store.read(&path, version, 1..4, into.as_fd());
            done.map(|()| {
                let mut bytes = [0; 3];
                into.read_exact_at(&mut bytes, 1).unwrap();
                bytes
            })
        };
        std::fs::write(&file, "before").unwrap();
        let (old, held) = (version(), store.sources.put(&path, std::fs::File::open(&file).unwrap().into()));
        std::fs::write(directory.join("g"), "after!").unwrap();
        std::fs::rename(directory.join("g"), &file).unwrap();
        let new = version();
        assert_eq!(read(&old).unwrap(), *b"efo", "a thread has it open");
        assert_eq!(read(&new).unwrap(), *b"fte");
        drop(held);
        assert_eq!(read(&old).map_err(|e| e.code()), Err(Code::Stale));
        assert_eq!(read(&new).unwrap(), *b"fte");
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn server_is_asked_for_the_same_as_is_known() {
        let path = std::env::temp_dir().join(format!("forebay-sources-{}", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&[7; 9000]).unwrap();
        let (known, asked) = (State::of(&file, false).unwrap(), State::of(&file, true).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(known.is(&asked.version) && asked.is(&known.version) && known.is_dense == asked.is_dense);
        file.write_all(&[7]).unwrap();
        assert!(!State::of(&file, true).unwrap().is(&known.version));
        let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
        let state = State::of(&directory, true).unwrap();
        assert!(!state.is(&state.version), "it is no file");
    }
}
