//! Creates files: the request, and the backing file, which the process creates while the daemon serves the request
//! (docs/decisions/0003). `layout_choice` selects the layout. A file that is not one backing file on this node is
//! opened through the pool's mount.

use std::os::fd::{OwnedFd, RawFd};

use forebay_data::BackingName;
use forebay_types::{BackingId, BackingOp, Caller, Code, Entry, Ino, Layout, Reply, Request, FLAG_ATTACHED};

use crate::errno;
use crate::leased::has_arrived;
use crate::open::{close, open_at, wanted, writes, NotOpened, ATTEMPTS, KERNEL_FLAGS};
use crate::path::PathBuffer;
use crate::pool::{caller, Pool, SHORT_REPLY_BYTES, SHORT_REQUEST_BYTES};
use crate::remembered::remember_opened;
use crate::walk::{permits, Dir, Name, EXECUTE, WRITE};

/// Attempts to create a file whose data are to lie on other nodes. By the first attempt the daemon learns which node
/// does not answer.
pub(crate) const PLACE_ATTEMPTS: u32 = 3;
const OWNER_READS_AND_WRITES: u32 = 0o600;

/// The result of a request to create a file.
enum Made {
    /// The file was created. The descriptor of its backing file, or the error of opening it.
    New(Entry, Result<RawFd, Code>),
    /// The file was created, but a mover has had it since, and it cannot be opened here. It keeps its name: another
    /// process may have written it.
    Kept(Entry, Code),
    /// The name exists.
    Old(Entry),
    /// Nothing was created: the directory, given here, has a layout.
    AsSet(Entry),
}

/// A file to be created.
#[derive(Clone, Copy)]
pub(crate) struct NewFile<'a> {
    pub(crate) parent: Ino,
    pub(crate) name: &'a [u8],
    pub(crate) mode: u32,
    pub(crate) exclusive: bool,
    pub(crate) layout: Option<Layout>,
    /// The backing file may be created before the daemon has created the inode.
    pub(crate) ahead: bool,
}

impl<'a> NewFile<'a> {
    /// The request that creates the file, under a reserved number if there is one, and reserves the next number.
    pub(crate) fn request(&self, number: Option<Ino>) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number, reserve: true }
    }

    /// The index of this node's target for a backing file that is created before the inode.
    fn target_index(&self) -> u16 {
        let layout = self.layout.as_ref();
        layout.map_or(0, |layout| layout.wish().unwrap_or(layout.components()[0].target(0)) as u16)
    }

    /// The request of a caller that creates no backing file.
    pub(crate) fn request_without_reserve(&self) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number: None, reserve: false }
    }
}

/// The attempt to create a backing file before it was known whether an inode of this number will exist.
#[derive(Clone, Copy)]
struct EarlyBackingFile {
    ino: Ino,
    fd: Option<RawFd>,
}

impl EarlyBackingFile {
    fn make(target: RawFd, ino: Ino, flags: i32) -> EarlyBackingFile {
        let name = BackingName::new(ino, 0, 0);
        // Exclusive: a file that exists already, if there ever is one, is not ours to use or remove.
        let flags = flags & KERNEL_FLAGS | libc::O_CREAT | libc::O_EXCL;
        EarlyBackingFile { ino, fd: open_at(target, name.as_c_str(), flags).ok() }
    }

    /// The descriptor, if it belongs to the file that was created.
    fn take(self, entry: &Entry) -> Option<RawFd> {
        let fd = self.fd?;
        if self.ino == entry.attr.ino && entry.layout.is_single() {
            return Some(fd);
        }
        close(fd);
        None
    }

    /// Removes the backing file. False if it may remain.
    fn undo(self, target: RawFd) -> bool {
        let Some(fd) = self.fd else { return true };
        close(fd);
        // SAFETY: the name is NUL-terminated.
        unsafe { libc::unlinkat(target, BackingName::new(self.ino, 0, 0).as_c_str().as_ptr(), 0) == 0 }
    }
}

impl Pool {
    /// Creates a file and returns its descriptor. `None` if the kernel reaches the file by the path in `by_mount`.
    pub(crate) fn open_new(
        &self,
        dir: &Dir,
        name: &Name,
        flags: i32,
        (mode, exclusive, ahead): (u32, bool, bool),
        by_mount: &mut PathBuffer,
    ) -> Result<Option<RawFd>, NotOpened> {
        dir.check(self, WRITE | EXECUTE)?;
        if flags & libc::O_DIRECTORY != 0 {
            return Err(Code::Invalid.into());
        }
        let mut layout = self.layout_unless_set()?;
        if self.wishes_elsewhere(layout.as_ref()) && !self.can_open_by_mount(mode, flags, by_mount) {
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        let me = caller();
        for attempt in 1.. {
            let elsewhere = self.wishes_elsewhere(layout.as_ref());
            // On a node without targets, a file whose mode does not let its creator open it is opened before it gets
            // that mode.
            let opens_first = elsewhere
                && !self.takes_files()
                && !permits((mode & 0o7777, me.uid, me.gid), wanted(flags), false);
            let file = NewFile {
                parent: dir.ino,
                name: name.as_bytes(),
                mode: mode & 0o7777 | if opens_first { OWNER_READS_AND_WRITES } else { 0 },
                exclusive,
                layout,
                ahead: ahead && self.has_entries_here(dir.ino) && !elsewhere,
            };
            let made = match self.create_file(me, &file, flags)? {
                Made::AsSet(above) => match self.open_new_as_set(&file, &above, flags, by_mount)? {
                    Some(made) => made,
                    None if opens_first => {
                        return Ok(Some(self.open_by_mount(&file, mode, flags, by_mount)?))
                    }
                    None => return Ok(None),
                },
                made => made,
            };
            let code = match made {
                Made::New(entry, Ok(fd)) => return Ok(Some(self.better_by_mount(&entry, fd, flags))),
                Made::New(entry, Err(Code::NotSupported)) if elsewhere => {
                    match self.make_far(&entry).and_then(|()| self.mount_path_of(&entry, by_mount)) {
                        Ok(()) if opens_first => {
                            return Ok(Some(self.open_by_mount(&file, mode, flags, by_mount)?))
                        }
                        Ok(()) => return Ok(None),
                        Err(code) => code,
                    }
                }
                Made::Kept(entry, Code::NotSupported | Code::Stale) => {
                    // Stale if it is gone.
                    if let Some(fd) = self.open_kept(&entry, flags).map_err(NotOpened::made)? {
                        return Ok(Some(self.better_by_mount(&entry, fd, flags)));
                    }
                    self.mount_path_of(&entry, by_mount).map_err(NotOpened::made)?;
                    match opens_first {
                        true => return Ok(Some(self.open_by_mount(&file, mode, flags, by_mount)?)),
                        false => return Ok(None),
                    }
                }
                Made::Kept(_, code) => return Err(NotOpened::made(code)),
                Made::New(_, Err(code)) => code,
                Made::Old(_) if exclusive => return Err(Code::Exists.into()),
                Made::Old(entry)
                    if entry.attr.is_symlink()
                        || self.needs_mount(&entry)
                        || self.hands_out_paced(&entry, flags) =>
                {
                    return Err(Code::Stale.into());
                }
                Made::Old(entry) => {
                    return match self.open_better_by_mount(&entry, flags) {
                        Some(fd) => Ok(Some(fd)),
                        None => Ok(Some(self.open_entry(&entry, flags)?)),
                    }
                }
                Made::AsSet(_) => return Err(Code::Malformed.into()),
            };
            // No descriptors or no space left: a failed open leaves no name behind.
            let _ = self.unlink_in(dir.ino, name.as_bytes());
            if !elsewhere || attempt == PLACE_ATTEMPTS || code == Code::NotSupported {
                return Err(code.into());
            }
            // The node selected for the data does not answer. The next attempt uses this node, or another one if this
            // node has no target.
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        Err(Code::Io.into())
    }

    /// Creates the backing files of a new file that are on other nodes, so that a node that is down is detected while
    /// the file can still be placed elsewhere. A file that was removed meanwhile is no error here: its next open fails.
    #[cold]
    fn make_far(&self, entry: &Entry) -> Result<(), Code> {
        let far = || {
            entry
                .layout
                .stripes()
                .filter_map(|(component, stripe)| self.backing_elsewhere(entry, component, stripe))
        };
        let is_home = |id: &BackingId| id.node() == id.ino.birth_node();
        let made = match far().any(|id| is_home(&id)) {
            // The inode's birth node creates the backing files that it has itself.
            true => self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino }).map(|_| ()),
            false => Ok(()),
        };
        let mut others = far().filter(|id| !is_home(id)).map(|id| (id, BackingOp::Make));
        match made.and_then(|()| self.ask_all(&mut others)) {
            Err(Code::NotFound | Code::Stale) => Ok(()),
            made => made,
        }
    }

    /// Opens a new file through the mount at `path`, then sets its mode. If it cannot be opened, its name is removed.
    #[cold]
    fn open_by_mount(
        &self,
        file: &NewFile<'_>,
        mode: u32,
        flags: i32,
        path: &PathBuffer,
    ) -> Result<RawFd, Code> {
        let flags = flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
        let opened = open_at(libc::AT_FDCWD, path.as_c_str(), flags).and_then(|fd| {
            // SAFETY: plain system call on our descriptor.
            match errno::check(unsafe { libc::fchmod(fd, mode & 0o7777) }) {
                Ok(_) => Ok(fd),
                Err(code) => {
                    close(fd);
                    Err(code)
                }
            }
        });
        opened.inspect_err(|_| {
            let _ = self.unlink_in(file.parent, file.name);
        })
    }

    /// True if the process that creates a file can open it again through the mount, whose path is then in `path`.
    #[cold]
    fn can_open_by_mount(&self, mode: u32, flags: i32, path: &mut PathBuffer) -> bool {
        let me = caller();
        permits((mode & 0o7777, me.uid, me.gid), wanted(flags), false) && self.sees_mount(path).is_ok()
    }

    /// Creates a file in a directory with a layout. `None` if the kernel reaches it by the path in `by_mount`. The file
    /// gets one backing file on this node if no descriptor of it could be opened otherwise: there is no mount, or its
    /// creator may not open it again.
    #[cold]
    fn open_new_as_set(
        &self,
        file: &NewFile<'_>,
        above: &Entry,
        flags: i32,
        by_mount: &mut PathBuffer,
    ) -> Result<Option<Made>, Code> {
        let me = caller();
        for attempt in 0..PLACE_ATTEMPTS {
            let layout = self.layout_to_open(above)?;
            if self.is_one_here(&layout) {
                let file = NewFile { layout: Some(layout), ahead: false, ..*file };
                return self.create_file(me, &file, flags).map(Some);
            }
            if !self.can_open_by_mount(file.mode, flags, by_mount) {
                break;
            }
            let (entry, created) =
                self.create_entry(file.parent, file.name, file.mode, file.exclusive, Some(layout))?;
            if !created {
                return Ok(Some(Made::Old(entry)));
            }
            match self.make_far(&entry).and_then(|()| self.mount_path_of(&entry, by_mount)) {
                Ok(()) => return Ok(None),
                Err(code) => {
                    let _ = self.unlink_in(file.parent, file.name);
                    // If the directory names its targets, there is no alternative.
                    if above.layout.is_placed() || attempt + 1 == PLACE_ATTEMPTS {
                        return Err(code);
                    }
                }
            }
        }
        let layout = self.layout_here()?;
        self.create_file(me, &NewFile { layout: Some(layout), ahead: false, ..*file }, flags).map(Some)
    }

    /// Sends the request to create a file. If the file is created, so is its backing file, and the result has its
    /// descriptor or the error.
    fn create_file(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        let attached = self.attached()?;
        if !self.wishes_elsewhere(file.layout.as_ref()) {
            self.wait_for_room(file.parent);
        }
        let (ring, alive) = (&attached.ring, || self.is_alive(attached));
        let claim = ring.claim(&alive).map_err(|failure| self.failed(attached, failure))?;
        let number = Some(Ino(claim.kept())).filter(|ino| file.ahead && *ino != Ino(0));
        debug_assert!(number.is_none() || self.is_served_here(file.parent));
        let mut message = [0; SHORT_REQUEST_BYTES];
        // Reserved numbers are numbers of this node.
        let request = if self.has_entries_here(file.parent) {
            file.request(number)
        } else {
            file.request_without_reserve()
        };
        let n = request.encode(caller, &mut message)?;
        let owed = claim.post(&message[..n]);
        // Runs while the daemon serves the request.
        let target = attached.target_at(file.target_index());
        let ahead = number.map(|ino| EarlyBackingFile::make(target, ino, flags));
        if let Some(removal) = owed {
            self.unlink_backing_file(attached, removal);
        }
        let mut buffer = [0; SHORT_REPLY_BYTES];
        let reply = claim.finish(&mut buffer, &alive, |reply, claim| {
            let reply = Reply::decode(reply);
            if let Ok(Reply::Created { entry, created: true, next }) = reply {
                if let Some(next) = next {
                    claim.keep(next.0);
                } else if number.is_some() {
                    claim.keep(0);
                }
                // Created before the slot carries another request. Until then the create is pending, and an unlink by
                // another process does not make the daemon forget the backing file that is about to exist.
                let fd = match ahead.and_then(|ahead| ahead.take(&entry)) {
                    Some(fd) => {
                        remember_opened(&entry.attr, fd);
                        Ok(fd)
                    }
                    None => self.open_backing_new(&entry, flags),
                };
                return Ok(Ok(Made::New(entry, fd)));
            }
            // The number stays reserved, unless the backing file may remain or the daemon does not know the number.
            let undone = ahead.is_none_or(|ahead| ahead.undo(target));
            if !undone || reply == Err(Code::Stale) {
                claim.keep(0);
            }
            match reply? {
                Reply::Created { entry, .. } => Ok(Ok(Made::Old(entry))),
                Reply::Entry(above) => Ok(Ok(Made::AsSet(above))),
                Reply::Elsewhere { ino, .. } => Ok(Err(ino)),
                _ => Err(Code::Malformed),
            }
        });
        let made = reply.map_err(|failure| {
            // It is unknown whether the file was created, so its backing file stays. If the file was not created, the
            // daemon removes the backing file.
            if let Some(fd) = ahead.and_then(|ahead| ahead.fd) {
                close(fd);
            }
            self.failed(attached, failure)
        })??;
        match made {
            Ok(Made::New(entry, Ok(fd))) => match self.open_unless_copied(&entry, fd, flags) {
                Ok(fd) => Ok(Made::New(entry, Ok(fd))),
                Err(code) => Ok(Made::Kept(entry, code)),
            },
            // It was released before its backing file was made.
            Ok(Made::New(entry, Err(Code::Stale))) => Ok(Made::Kept(entry, Code::Stale)),
            Ok(made) => Ok(made),
            Err(ino) => self.entry_or_stale(ino).map(Made::Old),
        }
    }

    /// The descriptor of a new file, or another one in its place. In front of a store a mover may find the file before its
    /// backing file is open: then it copies an empty file, and may release it too. So the file is looked at again, like
    /// one that existed before.
    #[inline]
    fn open_unless_copied(&self, entry: &Entry, fd: RawFd, flags: i32) -> Result<RawFd, Code> {
        if entry.attr.flags & FLAG_ATTACHED == 0 {
            return Ok(fd);
        }
        match self.entry_to_open_again(entry, writes(flags)) {
            Ok(None) => Ok(fd),
            // It has lost its name. A restore for another process may not have filled it.
            Err(Code::Stale) if errno::stat(fd).is_ok_and(|st| has_arrived(st.st_mode)) => Ok(fd),
            Ok(Some(now)) => {
                close(fd);
                self.open_backing(&now, flags)
            }
            Err(code) => {
                close(fd);
                Err(code)
            }
        }
    }

    /// Opens a file that was made here, and released before it was open, once more: it may be released again each time. None
    /// if its data are on another node by now. [`Code::Stale`] if it was removed.
    #[cold]
    fn open_kept(&self, entry: &Entry, flags: i32) -> Result<Option<RawFd>, Code> {
        for _ in 0..ATTEMPTS {
            let now = self.entry_or_stale(entry.attr.ino)?;
            if self.needs_mount(&now) || self.hands_out_paced(&now, flags) {
                return Ok(None);
            }
            match self.open_backing(&now, flags) {
                Err(Code::Stale) => {}
                Err(Code::NotSupported) => return Ok(None),
                opened => return opened.map(Some),
            }
        }
        Err(Code::Busy)
    }

    /// An inode to which a name led, or that was made; [`Code::Stale`] if it was removed since.
    fn entry_or_stale(&self, ino: Ino) -> Result<Entry, Code> {
        self.get_attr(ino).map_err(|code| if code == Code::NotFound { Code::Stale } else { code })
    }

    /// Opens the backing file of a new file with the access that the caller requests, regardless of the file's mode.
    fn open_backing_new(&self, entry: &Entry, flags: i32) -> Result<RawFd, Code> {
        if !self.is_one_here(&entry.layout) {
            return Err(Code::NotSupported);
        }
        let name = BackingName::new(entry.attr.ino, 0, 0);
        let attached = self.attached()?;
        let target = || attached.target_of(&entry.layout, 0, 0);
        let flags = flags & KERNEL_FLAGS | libc::O_CREAT;
        let opened = match open_at(target(), name.as_c_str(), flags) {
            Err(Code::NotFound | Code::BadDescriptor | Code::NotDirectory)
                if attached.target_was_lost(self.address()) =>
            {
                open_at(target(), name.as_c_str(), flags)
            }
            // A tmpfs of the pool's own user namespace lets only the pool's user and group create files. Others can
            // open files that the daemon creates.
            Err(Code::Overflow) => {
                self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino })?;
                open_at(target(), name.as_c_str(), flags & !libc::O_CREAT)
            }
            result => result,
        };
        if let Ok(fd) = opened {
            remember_opened(&entry.attr, fd);
        }
        opened
    }

    /// Creates a file with one backing file on this node, or opens the existing file. Returns the descriptor of the
    /// backing file (read-write, plus `flags` such as O_APPEND or O_DIRECT). The flag is true if the file was created.
    /// There is no descriptor if the file lies on another node, as all files do that are created on a node without
    /// targets: call [`Pool::open_file`].
    ///
    /// # Errors
    /// [`Code::Exists`] with `exclusive`.
    pub fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        flags: i32,
    ) -> Result<(Entry, bool, Option<OwnedFd>), Code> {
        let layout = self.layout_in(None)?;
        let ahead = self.has_entries_here(parent) && self.takes_files();
        let file = NewFile { parent, name, mode, exclusive, layout, ahead };
        let flags = flags | libc::O_RDWR | libc::O_CLOEXEC;
        let made = self.create_numbered(caller, &file, flags)?;
        self.opened_new(&file, made, flags)
    }

    /// The same with the directory's layout. There is no descriptor if the file is not one backing file on this node:
    /// call [`Pool::open_file`].
    pub fn create_as_set(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        flags: i32,
    ) -> Result<(Entry, bool, Option<OwnedFd>), Code> {
        let mut layout = self.layout_unless_set()?;
        let flags = flags | libc::O_RDWR | libc::O_CLOEXEC;
        for attempt in 1.. {
            let elsewhere = self.wishes_elsewhere(layout.as_ref());
            let ahead = self.has_entries_here(parent) && !elsewhere;
            let mut file = NewFile { parent, name, mode, exclusive, layout, ahead };
            let mut made = self.create_numbered(caller, &file, flags)?;
            let mut is_placed = false;
            if let Made::AsSet(above) = made {
                is_placed = above.layout.is_placed();
                file = NewFile { layout: Some(self.layout_to_open(&above)?), ahead: false, ..file };
                made = self.create_file(caller, &file, flags)?;
            }
            let (entry, created, fd) = self.opened_new(&file, made, flags)?;
            if !created || fd.is_some() {
                return Ok((entry, created, fd));
            }
            match self.make_far(&entry) {
                Ok(()) => return Ok((entry, true, None)),
                Err(code) => {
                    let _ = self.unlink_in(parent, name);
                    if is_placed || attempt == PLACE_ATTEMPTS {
                        return Err(code);
                    }
                }
            }
            // The node selected for the data does not answer. The next attempt uses this node, unless the directory has
            // a layout.
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        Err(Code::Io)
    }

    fn create_numbered(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        match self.create_file(caller, file, flags) {
            // The daemon does not know the reserved number.
            Err(Code::Stale) => self.create_file(caller, &NewFile { ahead: false, ..*file }, flags),
            result => result,
        }
    }

    fn opened_new(
        &self,
        file: &NewFile<'_>,
        made: Made,
        flags: i32,
    ) -> Result<(Entry, bool, Option<OwnedFd>), Code> {
        use std::os::fd::FromRawFd;
        let (entry, created, fd) = match made {
            Made::New(entry, Ok(fd)) => (entry, true, fd),
            // Its backing files are created when they are opened.
            Made::New(entry, Err(Code::NotSupported)) => return Ok((entry, true, None)),
            Made::Kept(entry, Code::NotSupported | Code::Stale) => {
                self.entry_or_stale(entry.attr.ino)?;
                return Ok((entry, true, None));
            }
            Made::Kept(_, code) => return Err(code),
            Made::New(_, Err(code)) => {
                let _ = self.unlink_in(file.parent, file.name);
                return Err(code);
            }
            Made::Old(entry) if self.needs_mount(&entry) => return Ok((entry, false, None)),
            Made::Old(entry) => (entry, false, self.open_entry(&entry, flags)?),
            Made::AsSet(_) => return Err(Code::Malformed),
        };
        // SAFETY: the descriptor is new and ours.
        Ok((entry, created, Some(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Creates a file of any layout without opening it. Its backing files are created when they are opened.
    pub fn create_entry(
        &self,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        layout: Option<Layout>,
    ) -> Result<(Entry, bool), Code> {
        let layout = self.layout_in(layout)?;
        let file = NewFile { parent, name, mode, exclusive, layout, ahead: false };
        let request = file.request_without_reserve();
        let made = self.ask_as(caller(), &request, |reply| match reply {
            Reply::Created { entry, created, .. } => Ok(Ok((entry, created))),
            Reply::Elsewhere { ino, .. } => Ok(Err(ino)),
            _ => Err(Code::Malformed),
        })?;
        made.or_else(|ino| Ok((self.entry_or_stale(ino)?, false)))
    }
}
