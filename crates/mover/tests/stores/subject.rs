//! The stores under test, and the foreign program beside them.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use forebay_mover::store::faulty::{Faults, Faulty};
use forebay_mover::store::limited::{Limited, Limits};
use forebay_mover::store::{
    Attributes, FileSource, MoverId, ObjectStore, Outcome, PosixOptions, PosixStore, S3Place, Store,
    StorePath, StoreVersion,
};
use rustix::fs::MemfdFlags;

use super::s3_server::{Memory, Server};

/// A directory that is removed at the end of its test, however that ends.
pub(crate) struct TempDir(pub(crate) PathBuf);

impl TempDir {
    /// A new directory on a file system that the test names.
    pub(crate) fn new(base: &str) -> TempDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(base).join(format!("forebay-stores-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        TempDir(path)
    }

    pub(crate) fn tmpfs() -> TempDir {
        TempDir::new("/dev/shm")
    }

    pub(crate) fn disk() -> TempDir {
        TempDir::new(env!("CARGO_TARGET_TMPDIR"))
    }

    pub(crate) fn file(&self, path: &StorePath) -> PathBuf {
        self.0.join(std::ffi::OsStr::from_bytes(path.as_bytes()))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Another program that writes to the store.
pub(crate) enum Foreign {
    Directory(TempDir),
    Memory(Arc<Memory>, String),
    /// Only through the store itself.
    None,
}

impl Foreign {
    /// Puts a whole new object at a path. False if there is no foreign program.
    pub(crate) fn write(&self, path: &StorePath, bytes: &[u8]) -> bool {
        self.prepare(path, bytes).is_some_and(|write| {
            write();
            true
        })
    }

    /// Prepares that, so that it then is one short step.
    pub(crate) fn prepare(&self, path: &StorePath, bytes: &[u8]) -> Option<Box<dyn FnOnce()>> {
        match self {
            Foreign::Directory(directory) => {
                let file = directory.file(path);
                let beside = file.with_file_name(format!("foreign-{:?}", std::thread::current().id()));
                fs::write(&beside, bytes).unwrap();
                Some(Box::new(move || fs::rename(&beside, &file).unwrap()))
            }
            Foreign::Memory(memory, prefix) => {
                let key = format!("{prefix}{}", std::str::from_utf8(path.as_bytes()).unwrap());
                let (memory, bytes) = (memory.clone(), bytes.to_vec());
                Some(Box::new(move || {
                    memory.put(&key, &bytes);
                }))
            }
            Foreign::None => None,
        }
    }
}

/// A store under test.
pub(crate) struct Subject {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) foreign: Foreign,
    pub(crate) faults: Option<Faults>,
    _server: Option<Server>,
}

pub(crate) fn id() -> MoverId {
    MoverId::own()
}

fn posix(directory: TempDir, options: PosixOptions) -> Subject {
    let store = PosixStore::open(&directory.0, options, id()).unwrap();
    Subject { store: Arc::new(store), foreign: Foreign::Directory(directory), faults: None, _server: None }
}

impl Subject {
    pub(crate) fn tmpfs() -> Subject {
        posix(TempDir::tmpfs(), PosixOptions::default())
    }

    pub(crate) fn disk() -> Subject {
        posix(TempDir::disk(), PosixOptions::default())
    }

    /// As on NFS and most parallel file systems.
    pub(crate) fn without_rename_flags() -> Subject {
        posix(
            TempDir::tmpfs(),
            PosixOptions { exchange: false, no_replace: false, ..PosixOptions::default() },
        )
    }

    pub(crate) fn without_links_and_exchange() -> Subject {
        posix(
            TempDir::tmpfs(),
            PosixOptions { exchange: false, hard_links: false, ..PosixOptions::default() },
        )
    }

    pub(crate) fn without_openat2() -> Subject {
        posix(TempDir::tmpfs(), PosixOptions { openat2: false, ..PosixOptions::default() })
    }

    pub(crate) fn limited() -> Subject {
        let inner = Subject::tmpfs();
        let limits = Limits {
            bytes_per_second: 200_000_000,
            latency: Duration::from_micros(100),
            ..Limits::default()
        };
        Subject { store: Arc::new(Limited::new(inner.store.clone(), limits)), ..inner }
    }

    pub(crate) fn faulty() -> Subject {
        Subject::tmpfs().with_faults(Faults::new())
    }

    pub(crate) fn with_faults(self, faults: Faults) -> Subject {
        let store = Arc::new(Faulty::new(self.store.clone(), faults.clone()));
        Subject { store, faults: Some(faults), ..self }
    }

    /// A server that evaluates conditions, as S3 does.
    pub(crate) fn object() -> Subject {
        Subject::of_memory(Memory::new(true))
    }

    /// A server that ignores conditions.
    pub(crate) fn object_without_conditions() -> Subject {
        Subject::of_memory(Memory::new(false))
    }

    pub(crate) fn of_memory(memory: Arc<Memory>) -> Subject {
        let server = Server::memory(memory.clone());
        let place = server.place("bucket", "some/prefix");
        let store = ObjectStore::open(&place, id()).unwrap_or_else(|e| panic!("{e}"));
        let foreign = Foreign::Memory(memory, "some/prefix/".into());
        Subject { store: Arc::new(store), foreign, faults: None, _server: Some(server) }
    }

    pub(crate) fn over(store: impl Store + 'static, foreign: Foreign, server: Server) -> Subject {
        Subject { store: Arc::new(store), foreign, faults: None, _server: Some(server) }
    }

    /// A server that runs already, if there is one.
    pub(crate) fn running() -> Option<Subject> {
        let url = std::env::var("FOREBAY_TEST_S3").ok()?;
        let (endpoint, bucket) = url.rsplit_once('/')?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = S3Place {
            bucket: bucket.to_owned(),
            prefix: format!("forebay-test-{}-{number}", std::process::id()),
            endpoint: Some(endpoint.to_owned()),
            region: Some("us-east-1".to_owned()),
            ..S3Place::default()
        };
        let store = ObjectStore::open(&place, id()).unwrap_or_else(|e| panic!("{e}"));
        Some(Subject { store: Arc::new(store), foreign: Foreign::None, faults: None, _server: None })
    }

    /// Uploads and publishes a file.
    pub(crate) fn put(&self, to: &StorePath, bytes: &[u8]) -> StoreVersion {
        self.publish(to, bytes, None).unwrap_or_else(|found| panic!("{to} is taken by {found:?}"))
    }

    pub(crate) fn publish(
        &self,
        to: &StorePath,
        bytes: &[u8],
        expected: Option<&StoreVersion>,
    ) -> Result<StoreVersion, Outcome<StoreVersion>> {
        let temporary = self.upload(to, bytes);
        match self.store.publish(&temporary, to, expected).unwrap_or_else(|e| panic!("{e}")) {
            Outcome::Done(version) => Ok(version),
            conflict => {
                self.store.discard(&temporary).unwrap();
                Err(conflict)
            }
        }
    }

    /// Uploads a file beside its final name.
    pub(crate) fn upload(&self, to: &StorePath, bytes: &[u8]) -> StorePath {
        let temporary = self.store.temporaries().next(&to.parent().unwrap());
        let version = self.store.upload(&temporary, &source(bytes), &Attributes::default());
        assert_eq!(version.unwrap_or_else(|e| panic!("{e}")).bytes, bytes.len() as u64);
        temporary
    }

    /// The bytes of a file; none if there is no file.
    pub(crate) fn get(&self, path: &StorePath) -> Option<Vec<u8>> {
        let object = self.store.look(path).unwrap_or_else(|e| panic!("{e}"))?;
        let file = memory_file(&vec![0; object.bytes() as usize]);
        use std::os::fd::AsFd;
        self.store
            .read(path, &object.version, 0..object.bytes(), file.as_fd())
            .unwrap_or_else(|e| panic!("{e}"));
        Some(contents(file))
    }

    /// The names in a directory, sorted.
    pub(crate) fn names(&self, directory: &StorePath) -> Vec<Vec<u8>> {
        let mut names = Vec::new();
        self.store
            .list(directory, &mut |object| {
                names.push(object.name);
                Ok(())
            })
            .unwrap_or_else(|e| panic!("{e}"));
        names.sort();
        names
    }
}

pub(crate) fn path(text: &str) -> StorePath {
    StorePath::new(text).unwrap()
}

/// A file in memory with these bytes.
pub(crate) fn memory_file(bytes: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&fd, &bytes[at..], at as u64).unwrap();
    }
    fd
}

pub(crate) fn source(bytes: &[u8]) -> FileSource {
    FileSource::new(memory_file(bytes), bytes.len() as u64)
}

pub(crate) fn contents(fd: OwnedFd) -> Vec<u8> {
    rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0)).unwrap();
    let mut bytes = Vec::new();
    fs::File::from(fd).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Bytes that differ by their seed and place.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|i| ((i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b)) >> 11) as u8)
        .collect()
}
