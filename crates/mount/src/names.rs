//! Requests about names: look-up, creation, removal, rename.

use forebay_client::inode_of_name;
use forebay_types::{Code, Entry, Ino};

use crate::closing::settle;
use crate::errno::Errno;
use crate::filesystem::{FileSystem, Outcome, TEMPORARY};
use crate::nodes::Seen;
use crate::rights::{Owned, Rights};
use forebay_fuse::protocol::{self, Body, Request};

/// Attempts at a look-up before it fails, if the name is replaced again and again.
const LOOKS_MAX: u32 = 4096;

/// ESTALE makes the kernel look the path up again, because the inode that a name led to is gone.
pub(crate) fn gone_is_stale(code: Code) -> Errno {
    match code {
        Code::NotFound => Errno(libc::ESTALE),
        code => code.into(),
    }
}

impl FileSystem {
    pub(crate) fn lookup(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (parent, name) = (self.ino(rq.node), f.name()?);
        if let Some(ino) = inode_of_name(name).filter(|_| parent == self.root) {
            return self.lookup_inode(rq.uid, ino, out);
        }
        // Before the look-up: the names that the listing of a directory brings are not announced.
        let is_unlisted = self.is_unlisted(parent);
        for _ in 0..LOOKS_MAX {
            let found = self.pool.lookup(parent, name).and_then(|entry| {
                if entry.attr.is_file() && self.pool.is_one_here(&entry.layout) {
                    self.lookup_pins.pin_for_a_moment(&self.nodes, self.pool, &entry)?;
                }
                self.pool.stat_entry(&entry)
            });
            match found {
                Ok(st) => {
                    self.put_entry(out, parent, name, &st);
                    return Ok(Outcome::Reply);
                }
                // The inode was removed between the look-up of its name and of itself. The name may lead to another
                // inode by now.
                Err(Code::Stale) => {}
                Err(Code::NotFound) => {
                    let validity = self.entry_validity(parent);
                    if is_unlisted || validity == protocol::Validity::NONE {
                        return Err(Errno(libc::ENOENT));
                    }
                    protocol::put_absent(out, validity);
                    return Ok(Outcome::Reply);
                }
                Err(code) => return Err(code.into()),
            }
        }
        Err(Errno(libc::ENOENT))
    }

    /// Looks up by its number an inode that is no directory, for root and for programs of the pool's own user, which
    /// have found it without the mount. Other users would bypass the permissions of the directories above it.
    fn lookup_inode(&self, uid: u32, ino: Ino, out: &mut Body) -> Result<Outcome, Errno> {
        // SAFETY: cannot fail.
        let me = unsafe { libc::geteuid() };
        let entry = self.pool.get_attr(ino)?;
        if entry.attr.is_directory() || uid != 0 && uid != me {
            return Err(Errno(libc::ENOENT));
        }
        if entry.attr.is_file() && self.pool.is_one_here(&entry.layout) {
            self.lookup_pins.pin_for_a_moment(&self.nodes, self.pool, &entry)?;
        }
        let st = self.pool.stat_entry(&entry)?;
        self.nodes.add_lookup(ino.0, Seen::of(&st));
        self.lookup_pins.note_found(&st);
        let attr = self.found_validity(&st);
        protocol::put_entry_out(out, self.node(ino), &st, protocol::Validity::NONE, attr);
        Ok(Outcome::Reply)
    }

    pub(crate) fn forget(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        self.forget_one(rq.node, f.u64()?);
        Ok(Outcome::Silence)
    }

    pub(crate) fn batch_forget(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let count = f.u32()?;
        f.u32()?;
        for _ in 0..count {
            let (node, lookup_count) = (f.u64()?, f.u64()?);
            self.forget_one(node, lookup_count);
        }
        Ok(Outcome::Silence)
    }

    fn forget_one(&self, node: u64, lookup_count: u64) {
        if node >= TEMPORARY {
            self.nodes.forget(node, lookup_count);
            self.forget_second_node_if_gone(node);
        } else {
            self.nodes.forget(self.ino(node).0, lookup_count);
        }
    }

    /// Gives the kernel an inode that was just created or linked.
    fn made(&self, parent: Ino, name: &[u8], entry: &Entry, out: &mut Body) -> Result<Outcome, Errno> {
        let st = self.pool.stat_entry(entry)?;
        self.put_entry(out, parent, name, &st);
        Ok(Outcome::Reply)
    }

    pub(crate) fn mkdir(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (mode, _umask, name) = (f.u32()?, f.u32()?, f.name()?);
        let (caller, parent) = (FileSystem::caller(rq), self.ino(rq.node));
        let entry = self.pool.make_directory_in(caller, parent, name, mode & 0o7777)?;
        self.made(parent, name, &entry, out)
    }

    pub(crate) fn symlink(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (name, target) = (f.name()?, f.name()?);
        let parent = self.ino(rq.node);
        let entry = self.pool.symlink_in(FileSystem::caller(rq), parent, name, target)?;
        self.made(parent, name, &entry, out)
    }

    pub(crate) fn mknod(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (mode, rdev, _umask, _) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
        let (name, caller, parent) = (f.name()?, FileSystem::caller(rq), self.ino(rq.node));
        let entry = if mode & libc::S_IFMT == libc::S_IFREG {
            let flags = libc::O_CLOEXEC;
            self.pool.create_as_set(caller, parent, name, mode & 0o7777, true, flags)?.0
        } else {
            self.pool.make_node_in(caller, parent, name, mode, protocol::large_device(rdev))?
        };
        self.made(parent, name, &entry, out)
    }

    pub(crate) fn link(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (source, name) = (f.u64()?, f.name()?);
        let (ino, parent) = (self.ino(source), self.ino(rq.node));
        if ino.0 >= TEMPORARY {
            return self.link_temporary(source, parent, name, out);
        }
        if rq.uid != 0 {
            Rights::of(rq).link(self.owned(ino)?)?;
        }
        let entry = self.pool.link_in(ino, parent, name)?;
        self.made(parent, name, &entry, out)
    }

    /// Gives a file without a name its first name: it becomes an inode of the pool.
    fn link_temporary(&self, node: u64, parent: Ino, name: &[u8], out: &mut Body) -> Result<Outcome, Errno> {
        let gone = Errno(libc::ENOENT);
        let seen = self.nodes.seen(node).ok_or(gone)?;
        let file = self.nodes.opened(node).and_then(|opened| opened.any()).ok_or(gone)?;
        let caller = forebay_types::Caller { uid: seen.uid, gid: seen.gid };
        let entry = self.pool.name_temporary(
            caller,
            std::os::fd::AsFd::as_fd(&*file),
            parent,
            name,
            seen.mode & 0o7777,
        )?;
        self.note_second_node(node, entry.attr.ino);
        self.made(parent, name, &entry, out)
    }

    /// `answer` answers the request. It is called before the data is removed where no program can notice: the file is
    /// not open here, and so small that its space is free before any program can miss it.
    pub(crate) fn unlink(&self, rq: &Request<'_>, answer: impl FnOnce()) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (parent, name) = (self.ino(rq.node), f.name()?);
        self.check_removal(rq, parent, name)?;
        self.nameless.settle(&self.nodes, self.pool);
        self.keep_readable(parent, name);
        let (mut answer, mut victim) = (Some(answer), None);
        let likely = self.pool.lookup(parent, name).ok().map(|entry| entry.attr.ino);
        let soon = std::cell::Cell::new(false);
        let look = || soon.set(likely.is_some_and(|ino| self.pool.is_soon_removed(ino)));
        self.pool.unlink_in_with(parent, name, look, |ino| {
            victim = Some(ino);
            if soon.get() && likely == Some(ino) && self.nodes.opened(ino.0).is_none() {
                if let Some(answer) = answer.take() {
                    answer();
                }
            }
        })?;
        self.lost_a_name(victim);
        Ok(if answer.is_some() { Outcome::Reply } else { Outcome::Silence })
    }

    /// Restores the whole of a file that is read while it arrives, before it loses a name.
    fn keep_readable(&self, parent: Ino, name: &[u8]) {
        let Some(ino) = self.leads_to_arriving(parent, name) else { return };
        if let Err(Errno(e)) = self.make_whole(ino) {
            tracing::warn!("file {ino} is removed before its readers have all of it: error {e}");
        }
    }

    /// Handles the removal of a name, which may have been the inode's last. When this returns, the space that a close
    /// just before should have freed is free.
    fn lost_a_name(&self, ino: Option<Ino>) {
        if let Some(ino) = ino.filter(|ino| self.nodes.opened(ino.0).is_some()) {
            settle(&self.nodes, ino.0);
            self.nameless.note(&self.nodes, ino.0);
        }
    }

    pub(crate) fn rmdir(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let (parent, name) = (self.ino(rq.node), f.name()?);
        self.check_removal(rq, parent, name)?;
        self.pool.remove_directory_in(parent, name)?;
        Ok(Outcome::Reply)
    }

    fn owned(&self, ino: Ino) -> Result<Owned, Code> {
        self.pool.get_attr(ino).map(|entry| Owned::from(&entry.attr))
    }

    /// Checks that the caller may remove a name, as far as the kernel may have cached an old owner.
    fn check_removal(&self, rq: &Request<'_>, parent: Ino, name: &[u8]) -> Result<(), Errno> {
        let victim = || self.pool.lookup(parent, name).map(|entry| Owned::from(&entry.attr));
        Rights::of(rq).remove(|| self.owned(parent), victim)
    }

    pub(crate) fn rename(&self, rq: &Request<'_>, with_flags: bool) -> Result<Outcome, Errno> {
        let mut f = rq.fields;
        let new_parent = self.ino(f.u64()?);
        let mut flags = 0;
        if with_flags {
            flags = f.u32()?;
            f.u32()?;
        }
        let (name, new_name) = (f.name()?, f.name()?);
        self.check_removal(rq, self.ino(rq.node), name)?;
        if flags & forebay_types::RENAME_NOREPLACE == 0 {
            self.check_removal(rq, new_parent, new_name)?;
        }
        if flags == 0 {
            self.keep_readable(new_parent, new_name);
        }
        let victim = self.pool.lookup(new_parent, new_name).map(|entry| entry.attr.ino);
        self.pool.rename_in(self.ino(rq.node), name, new_parent, new_name, flags)?;
        if flags == 0 {
            self.lost_a_name(victim.ok());
        }
        Ok(Outcome::Reply)
    }

    pub(crate) fn readlink(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let ino = self.ino(rq.node);
        let read = out.fill(forebay_types::limits::PATH_MAX, |room| self.pool.read_link_inode(ino, room));
        read.map_err(gone_is_stale)?;
        Ok(Outcome::Reply)
    }
}
