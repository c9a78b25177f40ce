//! A directory for a test's shard, removed when the test ends, even if it fails; and a driver of single requests.
#![allow(dead_code)] // Each test program uses a part.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_meta::{Batch, Effects, ShardOptions};
use forebay_types::{limits, Caller, Code, Entry, Ino, NodeId, Reply, Request, Timestamp};

/// A directory that is removed when it is dropped.
pub(crate) struct Place(PathBuf);

impl Place {
    /// A new directory in the directory for temporary files.
    pub(crate) fn new() -> Place {
        Place::within(&std::env::temp_dir())
    }

    /// A new directory in this one.
    pub(crate) fn within(dir: &Path) -> Place {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("forebay-meta-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Place(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A test may have mounted a file system on it.
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A shard that may grow to 64 MiB.
pub(crate) const OPTIONS: ShardOptions =
    ShardOptions { node: NodeId::FIRST, map_bytes: 64 << 20, root_mode: 0o755, root_uid: 1, root_gid: 2 };

pub(crate) const CALLER: Caller = Caller { uid: 1000, gid: 100 };

pub(crate) fn at(sec: i64) -> Timestamp {
    Timestamp { sec, nsec: 0 }
}

/// Sends single requests, each at a later time than the one before.
pub(crate) struct Driver {
    out: Vec<u8>,
    pub(crate) effects: Effects,
    pub(crate) clock: i64,
}

impl Driver {
    pub(crate) fn new() -> Driver {
        Driver { out: vec![0; limits::MESSAGE_BYTES_MAX], effects: Effects::new(), clock: 100 }
    }

    pub(crate) fn ask<'o>(
        &'o mut self,
        batch: &mut Batch<'_>,
        request: Request<'_>,
    ) -> Result<Reply<'o>, Code> {
        self.effects.clear();
        self.clock += 1;
        let answer = batch.apply(CALLER, &request, at(self.clock), &mut self.effects, &mut self.out);
        answer.map_err(|refusal| refusal.code())
    }

    /// A request whose reply is an entry, created or found.
    pub(crate) fn entry(&mut self, batch: &mut Batch<'_>, request: Request<'_>) -> Result<Entry, Code> {
        match self.ask(batch, request)? {
            Reply::Entry(entry) | Reply::Created { entry, .. } => Ok(entry),
            other => panic!("{request:?} was answered with {other:?}"),
        }
    }

    pub(crate) fn file(&mut self, batch: &mut Batch<'_>, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        let request = Request::Create {
            parent,
            name,
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        };
        Ok(self.entry(batch, request)?.attr.ino)
    }

    pub(crate) fn directory(&mut self, batch: &mut Batch<'_>, parent: Ino, name: &[u8]) -> Result<Ino, Code> {
        Ok(self.entry(batch, Request::MakeDirectory { parent, name, mode: 0o755 })?.attr.ino)
    }

    pub(crate) fn unlink(&mut self, batch: &mut Batch<'_>, parent: Ino, name: &[u8]) -> Result<(), Code> {
        self.ask(batch, Request::Unlink { parent, name }).map(|_| ())
    }

    pub(crate) fn attr(&mut self, batch: &mut Batch<'_>, ino: Ino) -> Result<forebay_types::Attr, Code> {
        Ok(self.entry(batch, Request::GetAttr { ino })?.attr)
    }

    /// All names of a directory with their cookies, in as many requests as needed.
    pub(crate) fn list(&mut self, batch: &mut Batch<'_>, ino: Ino) -> Vec<(u64, Vec<u8>)> {
        let mut names = Vec::new();
        loop {
            let cookie = names.last().map_or(0, |n: &(u64, Vec<u8>)| n.0);
            let reply = self.ask(batch, Request::ReadDirectory { ino, cookie, attributes: false });
            let Ok(Reply::Entries(entries)) = reply else { panic!("{reply:?}") };
            names.extend(entries.iter().map(|e| e.unwrap()).map(|e| (e.cookie, e.name.to_vec())));
            if entries.end {
                return names;
            }
        }
    }
}
