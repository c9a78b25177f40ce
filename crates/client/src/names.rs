//! Calls that change names: mkdir, rmdir, unlink, rename, link, symlink, mknod.

use forebay_data::BackingName;
use forebay_ring::{Claim, Removal};
use forebay_types::{Code, Entry, Ino, Kind, Layout, Reply, Request};

use crate::attached::Attached;
use crate::errno;
use crate::making::NewFile;
use crate::path::{PathBuffer, Place};
use crate::pool::{caller, Door, Fail, Pool, SHORT_REPLY_BYTES, SHORT_REQUEST_BYTES};
use crate::walk::{Last, Name, Parent, EXECUTE, WRITE};

const STICKY: u32 = 0o1000;
/// How often a directory's rename starts again when the source name changes meanwhile.
const RENAMES_MAX: u32 = 16;

impl Pool {
    /// The directory and name of an entry to be created; an existing `.` or `..` is [`Code::Exists`].
    fn place_for_new(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<(Parent, Name)> {
        let parent = self.walk_parent(place, escape)?;
        let Last::Name(name) = parent.last else { return Err(Code::Exists.into()) };
        Ok((parent, name))
    }

    /// The same for what is no directory, whose name must not end in a slash. An existing name takes precedence.
    fn place_for_new_unless_slash(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<(Parent, Name)> {
        let (parent, name) = self.place_for_new(place, escape)?;
        if parent.slash {
            self.check_missing(&parent, &name)?;
            return Err(Code::NotFound.into());
        }
        Ok((parent, name))
    }

    fn check_missing(&self, parent: &Parent, name: &Name) -> Result<(), Code> {
        match self.lookup_name(parent.dir.ino, name.as_bytes()) {
            Ok(_) => Err(Code::Exists),
            Err(Code::NotFound) => Ok(()),
            Err(code) => Err(code),
        }
    }

    /// Checks that the caller may add to or remove from `parent`.
    fn check_writable(&self, parent: &Parent) -> Result<(), Code> {
        parent.dir.check(self, WRITE | EXECUTE)
    }

    /// In a sticky directory, only the owner of the entry or of the directory may remove it.
    fn check_sticky(&self, parent: &Parent, name: &[u8]) -> Result<(), Code> {
        let (mode, uid, _) = parent.dir.permissions(self)?;
        // Most directories are not sticky: then no system call asks who the caller is.
        if mode & STICKY == 0 {
            return Ok(());
        }
        let me = caller().uid;
        if me == 0 || me == uid {
            return Ok(());
        }
        let victim = self.lookup_name(parent.dir.ino, name)?;
        if self.get_attr(victim.ino)?.attr.uid == me {
            Ok(())
        } else {
            Err(Code::NotPermitted)
        }
    }

    /// Checks that the caller may create an entry. As in Linux, an existing name takes precedence over a missing
    /// permission.
    fn check_new(&self, parent: &Parent, name: &Name) -> Result<(), Code> {
        match self.check_writable(parent) {
            Err(code) => match self.lookup_name(parent.dir.ino, name.as_bytes()) {
                Ok(_) => Err(Code::Exists),
                Err(_) => Err(code),
            },
            done => done,
        }
    }

    /// Creates an entry.
    fn make(&self, parent: &Parent, name: &Name, request: &Request<'_>) -> Door<Ino> {
        self.check_new(parent, name)?;
        let made = |reply: Reply<'_>| match reply {
            Reply::Entry(entry) => Ok(entry.attr.ino),
            _ => Err(Code::Malformed),
        };
        Ok(match request {
            Request::Symlink { target, .. } if target.len() > 256 => self.ask_long(request, made)?,
            _ => self.ask_then(request, made)?,
        })
    }

    /// `mkdirat`; the umask is already applied to `mode`.
    pub fn make_directory(&self, place: Place<'_>, mode: u32, escape: &mut PathBuffer) -> Door<()> {
        let (parent, name) = self.place_for_new(place, escape)?;
        if !self.is_served_here(parent.dir.ino) && self.takes_files() {
            self.check_new(&parent, &name)?;
            let (dir, mode) = (parent.dir.ino, mode & 0o1777);
            self.make_directory_in(caller(), dir, name.as_bytes(), mode)?;
            return Ok(());
        }
        let request =
            Request::MakeDirectory { parent: parent.dir.ino, name: name.as_bytes(), mode: mode & 0o1777 };
        self.make(&parent, &name, &request).map(|_| ())
    }

    /// `mknodat`, also for regular files. Returns the inode.
    pub fn make_node(&self, place: Place<'_>, mode: u32, rdev: u64, escape: &mut PathBuffer) -> Door<Ino> {
        let (parent, name) = self.place_for_new_unless_slash(place, escape)?;
        let (dir, name_bytes) = (parent.dir.ino, name.as_bytes());
        match mode & libc::S_IFMT {
            0 | libc::S_IFREG => {
                self.check_new(&parent, &name)?;
                let mode = mode & 0o7777;
                let file = NewFile {
                    parent: dir,
                    name: name_bytes,
                    mode,
                    exclusive: true,
                    layout: self.layout_in(None)?,
                    ahead: false,
                };
                Ok(self.ask_then(&file.request_without_reserve(), |reply| match reply {
                    Reply::Created { entry, .. } => Ok(entry.attr.ino),
                    _ => Err(Code::Malformed),
                })?)
            }
            libc::S_IFDIR => Err(Code::NotPermitted.into()),
            libc::S_IFCHR | libc::S_IFBLK if caller().uid != 0 => Err(Code::NotPermitted.into()),
            _ => self.make(&parent, &name, &Request::MakeNode { parent: dir, name: name_bytes, mode, rdev }),
        }
    }

    /// `symlinkat`.
    pub fn symlink(&self, target: &[u8], at: Place<'_>, escape: &mut PathBuffer) -> Door<()> {
        if target.is_empty() {
            return Err(Code::NotFound.into());
        }
        if target.len() > forebay_types::limits::PATH_MAX {
            return Err(Code::NameTooLong.into());
        }
        let (parent, name) = self.place_for_new_unless_slash(at, escape)?;
        let request = Request::Symlink { parent: parent.dir.ino, name: name.as_bytes(), target };
        self.make(&parent, &name, &request).map(|_| ())
    }

    /// `readlinkat`: as many bytes of the target as fit.
    pub fn read_link(&self, place: Place<'_>, buffer: &mut [u8], escape: &mut PathBuffer) -> Door<usize> {
        self.with_entry(place, false, escape, |entry| {
            if !entry.attr.is_symlink() {
                return Err(Code::Invalid);
            }
            self.read_link_inode(entry.attr.ino, buffer)
        })
    }

    /// `linkat`.
    pub fn link(&self, from: Place<'_>, to: Place<'_>, follow: bool, escape: &mut PathBuffer) -> Door<()> {
        let source = self.walk_found(from, follow, escape)?;
        let (parent, name) = match self.place_for_new_unless_slash(to, escape) {
            Err(Fail::Escape) => return Err(Code::CrossDevice.into()),
            other => other?,
        };
        if source.kind == Kind::Directory {
            // What is wrong with the new name takes precedence.
            self.check_missing(&parent, &name)?;
            self.check_writable(&parent)?;
            return Err(Code::NotPermitted.into());
        }
        let request = Request::Link { ino: source.ino, parent: parent.dir.ino, name: name.as_bytes() };
        self.make(&parent, &name, &request).map(|_| ())
    }

    /// `unlinkat` of all kinds but directories. When it returns, the space of a file without other links and
    /// descriptors is free, unless its target has space to spare, or is filled to less than three quarters and the daemon
    /// removes what this process came too late for.
    pub fn unlink(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<()> {
        let parent = self.walk_parent(place, escape)?;
        let Last::Name(name) = parent.last else { return Err(Code::IsDirectory.into()) };
        if parent.slash {
            let kind = self.lookup_name(parent.dir.ino, name.as_bytes())?.kind;
            let code = if kind == Kind::Directory { Code::IsDirectory } else { Code::NotDirectory };
            return Err(code.into());
        }
        self.check_removable(&parent, name.as_bytes())?;
        Ok(self.unlink_in(parent.dir.ino, name.as_bytes())?)
    }

    /// A missing name takes precedence over a missing permission.
    fn check_removable(&self, parent: &Parent, name: &[u8]) -> Result<(), Code> {
        match self.check_writable(parent).and_then(|()| self.check_sticky(parent, name)) {
            Ok(()) => Ok(()),
            Err(code) => self.lookup_name(parent.dir.ino, name).and(Err(code)),
        }
    }

    /// `unlinkat` with AT_REMOVEDIR.
    pub fn remove_directory(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<()> {
        let parent = self.walk_parent(place, escape)?;
        let name = match parent.last {
            Last::Name(name) => name,
            Last::Dot if place.path.iter().all(|&b| b == b'/') => return Err(Code::Busy.into()),
            Last::Dot => return Err(Code::Invalid.into()),
            Last::DotDot => return Err(Code::NotEmpty.into()),
        };
        self.check_removable(&parent, name.as_bytes())?;
        Ok(self.remove_directory_in(parent.dir.ino, name.as_bytes())?)
    }

    /// `renameat2` with flags 0, RENAME_NOREPLACE or RENAME_EXCHANGE. A rename out of the pool or into it fails with
    /// [`Code::CrossDevice`], after which programs copy.
    pub fn rename(&self, from: Place<'_>, to: Place<'_>, flags: u32, escape: &mut PathBuffer) -> Door<()> {
        let known = forebay_types::RENAME_NOREPLACE | forebay_types::RENAME_EXCHANGE;
        if flags & !known != 0 || flags == known {
            return Err(Code::Invalid.into());
        }
        let source = match self.walk_parent(from, escape) {
            Err(Fail::Escape) => return Err(Code::CrossDevice.into()),
            other => other?,
        };
        let destination = match self.walk_parent(to, escape) {
            Err(Fail::Escape) => return Err(Code::CrossDevice.into()),
            other => other?,
        };
        let Last::Name(name) = source.last else { return Err(Code::Busy.into()) };
        let Last::Name(new_name) = destination.last else {
            let code = if flags & forebay_types::RENAME_NOREPLACE != 0 { Code::Exists } else { Code::Busy };
            return Err(code.into());
        };
        let (name, new_name) = (name.as_bytes(), new_name.as_bytes());
        if source.slash || destination.slash {
            self.check_slashes((&source, name), (&destination, new_name), flags)?;
        }
        self.check_removable(&source, name)?;
        self.check_writable(&destination)?;
        if flags & forebay_types::RENAME_NOREPLACE == 0 {
            match self.check_sticky(&destination, new_name) {
                Ok(()) | Err(Code::NotFound) => {}
                Err(code) => return Err(code.into()),
            }
        }
        Ok(self.rename_in(source.dir.ino, name, destination.dir.ino, new_name, flags)?)
    }

    /// A slash behind a name of a rename requires a directory: the one that has the name, and unless two entries are
    /// exchanged, the one that gets it.
    #[cold]
    fn check_slashes(
        &self,
        (source, name): (&Parent, &[u8]),
        (destination, new_name): (&Parent, &[u8]),
        flags: u32,
    ) -> Result<(), Code> {
        let exchanges = flags & forebay_types::RENAME_EXCHANGE != 0;
        let old = self.lookup_name(source.dir.ino, name)?.kind;
        match self.lookup_name(destination.dir.ino, new_name) {
            Ok(_) if flags & forebay_types::RENAME_NOREPLACE != 0 => return Err(Code::Exists),
            Ok(new) if exchanges && destination.slash && new.kind != Kind::Directory => {
                return Err(Code::NotDirectory)
            }
            Ok(_) => {}
            Err(Code::NotFound) if !exchanges => {}
            Err(code) => return Err(code),
        }
        match old != Kind::Directory && (source.slash || !exchanges) {
            true => Err(Code::NotDirectory),
            false => Ok(()),
        }
    }

    /// The client's part of an unlink: removes the backing files on this node of an inode without links, and with
    /// `leftover` also those that a migration left. Without `leftover` it removes the backing files of a layout that
    /// the inode no longer has. If the client is killed, the daemon removes the rest.
    ///
    /// True if the daemon may be unlinking one of them at this moment on a target that is short of space.
    pub(crate) fn remove_backing(
        &self,
        ino: Ino,
        kind: Kind,
        layout: &Layout,
        leftover: bool,
    ) -> Result<bool, Code> {
        if matches!(kind, Kind::Directory | Kind::Symlink) {
            return Ok(false);
        }
        let mut is_swept = false;
        let attached = self.attached()?;
        let here = u32::from(attached.reply.node.0);
        for (component, stripe) in layout.stripes() {
            // The inode's home has backing files on other nodes removed.
            if attached.reply.nodes > 1 && layout.components()[component].target(stripe) >> 16 != here {
                continue;
            }
            let name = BackingName::new(ino, layout.file_number(component), stripe);
            let unlink = || {
                let target = attached.target_of(layout, component, stripe);
                // SAFETY: the name is NUL-terminated.
                errno::check(unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) })
            };
            // ENOENT means a file without data, which has no backing file, or that the daemon's sweeper was first. The
            // other errors mean that the program closed the descriptor of the target.
            if let Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory) = unlink() {
                match attached.target_was_lost(self.address()) {
                    true => drop(unlink()),
                    false if is_swept => {}
                    false => is_swept = attached.is_short(attached.target_of(layout, component, stripe)),
                }
            }
            if kind != Kind::File {
                break;
            }
        }
        if kind == Kind::File && !layout.is_single() && leftover {
            // Left by a process that died while it converted the file to one backing file.
            let name = BackingName::new(ino, 0, 0);
            for (_, target) in attached.targets() {
                // SAFETY: as above.
                unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) };
            }
        }
        Ok(is_swept)
    }

    /// Waits until the daemon's sweeper has freed the space of what was removed: this process found nothing to unlink,
    /// perhaps because the daemon, while this process did not run, took its slot for one that rests.
    #[cold]
    fn await_sweeper(&self) {
        // The file is removed in any case.
        let _ = self.ask_then(&Request::Targets, |_| Ok(()));
    }

    /// Unlinks the only backing file of an inode without names.
    pub(crate) fn unlink_backing_file(&self, attached: &Attached, removal: Removal) {
        let name = BackingName::new(removal.ino, 0, 0);
        let unlink = || {
            let target = attached.target_at(removal.target);
            // SAFETY: the name is NUL-terminated.
            errno::check(unsafe { libc::unlinkat(target, name.as_c_str().as_ptr(), 0) })
        };
        // ENOENT: the file never had data, or the daemon unlinked it first. The other two: the program closed the
        // descriptor.
        if let Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory) = unlink() {
            if attached.target_was_lost(self.address()) {
                let _ = unlink();
            }
        }
    }

    /// The client's part of a removal, on the slot of its request: the backing files of an inode without names are
    /// removed at once, or while the daemon serves the slot's next request. True if the caller is to wait for the
    /// sweeper when it has left the slot.
    fn settle_removal(
        &self,
        (claim, attached): (&Claim<'_>, &Attached),
        (ino, kind, layout): (Ino, Kind, &Layout),
    ) -> Result<bool, Code> {
        match attached.may_wait(ino, kind, layout) {
            Some(removal) => {
                claim.owe(removal);
                Ok(false)
            }
            None => self.remove_backing(ino, kind, layout, true),
        }
    }

    /// Sends a request that may remove an inode's last name. Returns the inode of a directory for which another request
    /// is needed, if any.
    fn remove(&self, request: &Request<'_>) -> Result<Option<Ino>, Code> {
        let (mut message, mut buffer) = ([0; SHORT_REQUEST_BYTES], [0; SHORT_REPLY_BYTES]);
        let nobody = forebay_types::Caller { uid: 0, gid: 0 };
        let n = request.encode(nobody, &mut message)?;
        let removed = |reply: &[u8], claim: &Claim<'_>, attached: &Attached| match Reply::decode(reply)? {
            Reply::Removed { ino, last: true, kind, layout } => {
                self.settle_removal((claim, attached), (ino, kind, &layout)).map(|swept| (None, swept))
            }
            Reply::Removed { .. } | Reply::Done => Ok((None, false)),
            Reply::Elsewhere { ino, .. } => Ok((Some(ino), false)),
            _ => Err(Code::Malformed),
        };
        let (elsewhere, swept) = self.exchange_on_slot(&message[..n], &mut buffer, || {}, removed)??;
        if swept {
            self.await_sweeper();
        }
        Ok(elsewhere)
    }

    /// Unlinks `name` in `parent`, without a permission check.
    pub fn unlink_in(&self, parent: Ino, name: &[u8]) -> Result<(), Code> {
        self.remove(&Request::Unlink { parent, name }).map(|_| ())
    }

    /// Removes an entry of an attached tree from the pool alone, see [`Request::Forget`].
    pub fn forget_in(&self, parent: Ino, name: &[u8], relist: bool, discard: bool) -> Result<(), Code> {
        self.remove(&Request::Forget { parent, name, relist, discard }).map(|_| ())
    }

    /// As [`Pool::unlink_in`]. `meanwhile` is called while the daemon serves the request. `gone` is called with the inode after the
    /// name was removed, and before the data are if this was the last name. Removing the data takes longer the larger
    /// the file is, and cannot fail.
    pub fn unlink_in_with(
        &self,
        parent: Ino,
        name: &[u8],
        meanwhile: impl FnOnce(),
        gone: impl FnOnce(Ino),
    ) -> Result<(), Code> {
        let (mut message, mut buffer) = ([0; SHORT_REQUEST_BYTES], [0; SHORT_REPLY_BYTES]);
        let nobody = forebay_types::Caller { uid: 0, gid: 0 };
        let n = Request::Unlink { parent, name }.encode(nobody, &mut message)?;
        let removed = |reply: &[u8], claim: &Claim<'_>, attached: &Attached| match Reply::decode(reply)? {
            Reply::Removed { ino, last, kind, layout } => {
                gone(ino);
                if last {
                    self.settle_removal((claim, attached), (ino, kind, &layout))
                } else {
                    Ok(false)
                }
            }
            Reply::Done => Ok(false),
            _ => Err(Code::Malformed),
        };
        if self.exchange_on_slot(&message[..n], &mut buffer, meanwhile, removed)?? {
            self.await_sweeper();
        }
        Ok(())
    }

    /// Removes the empty directory `name` in `parent`, without a permission check.
    pub fn remove_directory_in(&self, parent: Ino, name: &[u8]) -> Result<(), Code> {
        self.ask_then(&Request::RemoveDirectory { parent, name }, |reply| match reply {
            Reply::Removed { .. } | Reply::Done => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    /// Renames, without a permission check.
    pub fn rename_in(
        &self,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: u32,
    ) -> Result<(), Code> {
        for _ in 0..RENAMES_MAX {
            let rename = Request::Rename { parent, name, new_parent, new_name, flags };
            let Some(ino) = self.remove(&rename)? else { return Ok(()) };
            // A directory: the move involves several nodes.
            let request = Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino };
            match self.remove(&request) {
                // The name leads to another inode by now.
                Err(Code::Stale) => {}
                done => return done.map(|_| ()),
            }
        }
        Err(Code::Busy)
    }

    /// Creates a directory, without a permission check.
    pub fn make_directory_in(
        &self,
        caller: forebay_types::Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
    ) -> Result<Entry, Code> {
        if !self.is_served_here(parent) && self.takes_files() {
            match self.make_directory_elsewhere(caller, parent, name, mode) {
                // The parent belongs to a store's tree, which one node has.
                Err(Code::CrossDevice) => {}
                done => return done,
            }
        }
        self.make_entry_in(caller, &Request::MakeDirectory { parent, name, mode })
    }

    /// Creates a symlink, without a permission check.
    pub fn symlink_in(
        &self,
        caller: forebay_types::Caller,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Result<Entry, Code> {
        let request = Request::Symlink { parent, name, target };
        if target.len() > 256 {
            return self.ask_long(&request, |reply| match reply {
                Reply::Entry(entry) => Ok(entry),
                _ => Err(Code::Malformed),
            });
        }
        self.make_entry_in(caller, &request)
    }

    /// Creates a FIFO, socket or device node, without a permission check.
    pub fn make_node_in(
        &self,
        caller: forebay_types::Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        rdev: u64,
    ) -> Result<Entry, Code> {
        self.make_entry_in(caller, &Request::MakeNode { parent, name, mode, rdev })
    }

    /// Adds a link, without a permission check.
    pub fn link_in(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Entry, Code> {
        self.make_entry_in(caller(), &Request::Link { ino, parent, name })
    }

    fn make_entry_in(&self, caller: forebay_types::Caller, request: &Request<'_>) -> Result<Entry, Code> {
        self.ask_as(caller, request, |reply| match reply {
            Reply::Entry(entry) => Ok(entry),
            _ => Err(Code::Malformed),
        })
    }
}
