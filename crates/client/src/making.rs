//! Making files: the request, and the backing file that its process makes while the daemon serves it
//! (docs/decisions/0003). Where the file will lie is `layout_choice`'s business; one that does not lie here as one
//! backing file is opened by the pool's mount.

use std::os::fd::{OwnedFd, RawFd};

use forebay_data::BackingName;
use forebay_types::{BackingId, BackingOp, Caller, Code, Entry, Ino, Layout, Reply, Request};

use crate::errno;
use crate::open::{close, open_at, wanted, KERNEL_FLAGS};
use crate::path::PathBuffer;
use crate::pool::{caller, Pool, SHORT_REPLY_BYTES, SHORT_REQUEST_BYTES};
use crate::remembered::remember_opened;
use crate::walk::{permits, Dir, Name, EXECUTE, WRITE};

/// So many places are tried for a file whose data others are to have: the daemon learns of one that does not answer by
/// the first.
pub(crate) const EAGER_BUFFERS: u32 = 3;
const OWNER_READS_AND_WRITES: u32 = 0o600;

/// What became of a request to make a file.
enum Made {
    /// It was made, and its backing file, whose descriptor this is.
    New(Entry, Result<RawFd, Code>),
    /// The name is taken.
    Old(Entry),
    /// Nothing was, as the directory, which this is, says how its files lie.
    AsSet(Entry),
}

/// A file to be made.
#[derive(Clone, Copy)]
pub(crate) struct NewFile<'a> {
    pub(crate) parent: Ino,
    pub(crate) name: &'a [u8],
    pub(crate) mode: u32,
    pub(crate) exclusive: bool,
    pub(crate) layout: Option<Layout>,
    /// Its backing file may be made before it is known that there will be one.
    pub(crate) ahead: bool,
}

impl<'a> NewFile<'a> {
    /// The request that makes it under a number, if there is one in reserve, and puts one in reserve.
    pub(crate) fn request(&self, number: Option<Ino>) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number, reserve: true }
    }

    /// The target of this node on which its one backing file is made ahead.
    fn target_index(&self) -> u16 {
        let layout = self.layout.as_ref();
        layout.map_or(0, |layout| layout.wish().unwrap_or(layout.components()[0].target(0)) as u16)
    }

    /// The request of who makes no backing file.
    pub(crate) fn request_without_reserve(&self) -> Request<'a> {
        let NewFile { parent, name, mode, exclusive, layout, .. } = *self;
        Request::Create { parent, name, mode, exclusive, dirty: true, layout, number: None, reserve: false }
    }
}

/// A backing file that was made, or was not, before it was known whether there will be an inode of its number.
#[derive(Clone, Copy)]
struct Ahead {
    ino: Ino,
    fd: Option<RawFd>,
}

impl Ahead {
    fn make(target: RawFd, ino: Ino, flags: i32) -> Ahead {
        let name = BackingName::new(ino, 0, 0);
        // Exclusive: what is there already, if anything ever is, is not ours to use or to remove.
        let flags = flags & KERNEL_FLAGS | libc::O_CREAT | libc::O_EXCL;
        Ahead { ino, fd: open_at(target, name.as_c_str(), flags).ok() }
    }

    /// The descriptor, if it is that of the file that was made.
    fn take(self, entry: &Entry) -> Option<RawFd> {
        let fd = self.fd?;
        if self.ino == entry.attr.ino && entry.layout.is_single() {
            return Some(fd);
        }
        close(fd);
        None
    }

    /// Removes the backing file again; false when something may be left.
    fn undo(self, target: RawFd) -> bool {
        let Some(fd) = self.fd else { return true };
        close(fd);
        // SAFETY: the name is NUL-terminated.
        unsafe { libc::unlinkat(target, BackingName::new(self.ino, 0, 0).as_c_str().as_ptr(), 0) == 0 }
    }
}

impl Pool {
    /// Makes a file: its descriptor, or none when `by_mount` is where the kernel reaches it.
    pub(crate) fn open_new(
        &self,
        dir: &Dir,
        name: &Name,
        flags: i32,
        (mode, exclusive, ahead): (u32, bool, bool),
        by_mount: &mut PathBuffer,
    ) -> Result<Option<RawFd>, Code> {
        dir.check(self, WRITE | EXECUTE)?;
        if flags & libc::O_DIRECTORY != 0 {
            return Err(Code::Invalid);
        }
        let mut layout = self.layout_unless_set()?;
        if self.wishes_elsewhere(layout.as_ref()) && !self.can_open_by_mount(mode, flags, by_mount) {
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        let me = caller();
        for attempt in 1.. {
            let elsewhere = self.wishes_elsewhere(layout.as_ref());
            // Where no file can be made on this node, one that its maker may not open again is opened before it gets
            // its mode.
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
                    None if opens_first => return self.open_led(&file, mode, flags, by_mount).map(Some),
                    None => return Ok(None),
                },
                made => made,
            };
            let code = match made {
                Made::New(_, Ok(fd)) => return Ok(Some(fd)),
                Made::New(entry, Err(Code::NotSupported)) if elsewhere => {
                    match self.make_far(&entry).and_then(|()| self.lead_to_mount(&entry, by_mount)) {
                        Ok(()) if opens_first => {
                            return self.open_led(&file, mode, flags, by_mount).map(Some)
                        }
                        Ok(()) => return Ok(None),
                        Err(code) => code,
                    }
                }
                Made::New(_, Err(code)) => code,
                Made::Old(_) if exclusive => return Err(Code::Exists),
                Made::Old(entry) if entry.attr.is_symlink() || self.needs_mount(&entry) => {
                    return Err(Code::Stale);
                }
                Made::Old(entry) => return self.open_entry(&entry, flags).map(Some),
                Made::AsSet(_) => return Err(Code::Malformed),
            };
            // Out of descriptors or of space: an open that fails leaves no name behind.
            let _ = self.unlink_in(dir.ino, name.as_bytes());
            if !elsewhere || attempt == EAGER_BUFFERS || code == Code::NotSupported {
                return Err(code);
            }
            // The node that was to have its data does not answer: they lie here, or on another where this one has no
            // target.
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        Err(Code::Io)
    }

    /// Makes those backing files of a new file that are on other nodes, so that one that is down is noticed while the
    /// file can still lie elsewhere. A file that was removed meanwhile is fine: whoever opens it finds out.
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
            // What is there of its own the inode's home makes.
            true => self.ask_entry(&Request::MakeBacking { ino: entry.attr.ino }).map(|_| ()),
            false => Ok(()),
        };
        let mut others = far().filter(|id| !is_home(id)).map(|id| (id, BackingOp::Make));
        match made.and_then(|()| self.ask_all(&mut others)) {
            Err(Code::NotFound | Code::Stale) => Ok(()),
            made => made,
        }
    }

    /// Opens a new file by the mount, where `path` leads, and gives it its mode then; one that cannot be opened leaves
    /// no name.
    #[cold]
    fn open_led(&self, file: &NewFile<'_>, mode: u32, flags: i32, path: &PathBuffer) -> Result<RawFd, Code> {
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

    /// True when who makes a file can open it again by the mount, where `path` leads then.
    #[cold]
    fn can_open_by_mount(&self, mode: u32, flags: i32, path: &mut PathBuffer) -> bool {
        let me = caller();
        permits((mode & 0o7777, me.uid, me.gid), wanted(flags), false) && self.sees_mount(path).is_ok()
    }

    /// Makes a file in a directory that says how its files lie; none when it is made and `by_mount` says where the
    /// kernel reaches it. Where no descriptor could be had of such a file, without a mount or as its maker may not open
    /// it again, it has one backing file here.
    #[cold]
    fn open_new_as_set(
        &self,
        file: &NewFile<'_>,
        above: &Entry,
        flags: i32,
        by_mount: &mut PathBuffer,
    ) -> Result<Option<Made>, Code> {
        let me = caller();
        for attempt in 0..EAGER_BUFFERS {
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
            match self.make_far(&entry).and_then(|()| self.lead_to_mount(&entry, by_mount)) {
                Ok(()) => return Ok(None),
                Err(code) => {
                    let _ = self.unlink_in(file.parent, file.name);
                    // Where the directory names its targets there is no other place.
                    if above.layout.is_placed() || attempt + 1 == EAGER_BUFFERS {
                        return Err(code);
                    }
                }
            }
        }
        let layout = self.layout_here()?;
        self.create_file(me, &NewFile { layout: Some(layout), ahead: false, ..*file }, flags).map(Some)
    }

    /// Asks for a file. When it was made, its backing file is too, and the descriptor or why there is none comes along.
    fn create_file(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        let attached = self.attached()?;
        let (ring, alive) = (&attached.ring, || self.is_alive(attached));
        let claim = ring.claim(&alive).map_err(|failure| self.failed(attached, failure))?;
        let number = Some(Ino(claim.kept())).filter(|ino| file.ahead && *ino != Ino(0));
        debug_assert!(number.is_none() || self.is_served_here(file.parent));
        let mut message = [0; SHORT_REQUEST_BYTES];
        // Numbers in reserve are this node's.
        let request = if self.has_entries_here(file.parent) {
            file.request(number)
        } else {
            file.request_without_reserve()
        };
        let n = request.encode(caller, &mut message)?;
        let owed = claim.post(&message[..n]);
        // While the daemon serves the request.
        let target = attached.target_at(file.target_index());
        let ahead = number.map(|ino| Ahead::make(target, ino, flags));
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
                // Made before the slot carries another request: until then the daemon keeps an unlink by somebody
                // else from forgetting the backing file that is about to appear.
                let fd = match ahead.and_then(|ahead| ahead.take(&entry)) {
                    Some(fd) => {
                        remember_opened(&entry.attr, fd);
                        Ok(fd)
                    }
                    None => self.open_backing_new(&entry, flags),
                };
                return Ok(Ok(Made::New(entry, fd)));
            }
            // The number stays in reserve, unless something may be left under it or the daemon knows nothing of it.
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
            // Whether the file was made is not known, so what was made for it stays: the daemon removes it if not.
            if let Some(fd) = ahead.and_then(|ahead| ahead.fd) {
                close(fd);
            }
            self.failed(attached, failure)
        })??;
        made.or_else(|ino| self.entry_elsewhere(ino).map(Made::Old))
    }

    /// A file of another node that a name leads to; [`Code::Stale`] when it is gone since the name was read.
    fn entry_elsewhere(&self, ino: Ino) -> Result<Entry, Code> {
        self.get_attr(ino).map_err(|code| if code == Code::NotFound { Code::Stale } else { code })
    }

    /// Opens the backing file of a file that was just made, with the caller's access whatever its mode.
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
            // A tmpfs of the pool's own user namespace lets only the pool's user and group make files; others may use
            // what the daemon makes.
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

    /// Makes a file with one backing file here, or opens the one that is there, with a descriptor to its backing file
    /// (read-write, and `flags` of O_APPEND, O_DIRECT...). The flag tells whether it was made. Without a descriptor
    /// when it lies on another node, as all files do that are made on one without a target: for [`Pool::open_file`].
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

    /// The same as the directory says. Without a descriptor when the file is not one backing file of this node: for
    /// [`Pool::open_file`].
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
                    if is_placed || attempt == EAGER_BUFFERS {
                        return Err(code);
                    }
                }
            }
            // A node that was to have its data does not answer: unless the directory says how they lie, they lie here.
            layout = Some(Layout::unless_set(self.own_target()?));
        }
        Err(Code::Io)
    }

    fn create_numbered(&self, caller: Caller, file: &NewFile<'_>, flags: i32) -> Result<Made, Code> {
        match self.create_file(caller, file, flags) {
            // The daemon knew nothing of the number in reserve.
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
            // Its backing files are made when they are opened.
            Made::New(entry, Err(Code::NotSupported)) => return Ok((entry, true, None)),
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

    /// Makes a file of any layout without opening it; its backing files are made by the daemon when they are opened.
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
        made.or_else(|ino| Ok((self.entry_elsewhere(ino)?, false)))
    }
}
