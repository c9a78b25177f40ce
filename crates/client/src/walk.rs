//! Path walk: from a directory along a path to an inode, or to the directory and name of the last component.

use forebay_ring::NameRef;
use forebay_types::limits::{NAME_MAX, PATH_MAX, SYMLINKS_MAX};
use forebay_types::{Code, Entry, Ino, Kind, Reply, Request};

use crate::errno;
use crate::path::{PathBuffer, Place};
use crate::pool::{Door, Fail, Pool};

/// Read permission, as in `access`.
pub(crate) const READ: u32 = 4;
/// Write permission.
pub(crate) const WRITE: u32 = 2;
/// Execute or search permission.
pub(crate) const EXECUTE: u32 = 1;

/// How often a call walks again when the inode that it finds is replaced meanwhile.
const WALKS_MAX: u32 = 16;
/// How often a name is looked up again when its inode was removed before the next request. Each time a process replaced
/// the name between two requests; other nodes can do so for long while this process waits for a processor.
const REPLACED_MAX: u32 = 4096;

/// Supplementary groups that the kernel allows (NGROUPS_MAX).
const GROUPS_MAX: usize = 65536;

/// A component's name, copied.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    len: u8,
    bytes: [u8; NAME_MAX],
}

impl Name {
    fn new(bytes: &[u8]) -> Name {
        let mut name = Name { len: bytes.len() as u8, bytes: [0; NAME_MAX] };
        name.bytes[..bytes.len()].copy_from_slice(bytes);
        name
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

/// A directory during a walk, with what permission checks need.
#[derive(Clone, Copy)]
pub(crate) struct Dir {
    pub(crate) ino: Ino,
    permissions: Option<(u32, u32, u32)>,
}

/// The kind of the last component of a path.
#[expect(clippy::large_enum_variant, reason = "a walk may run in a signal handler: no allocation")]
pub(crate) enum Last {
    /// A name in a directory, not looked up.
    Name(Name),
    /// `.`, or the starting directory itself (empty path, or only slashes).
    Dot,
    /// `..`.
    DotDot,
}

/// The directory that holds a path's last component.
pub(crate) struct Parent {
    pub(crate) dir: Dir,
    pub(crate) last: Last,
    /// The path ended with a slash, so the name must be a directory.
    pub(crate) slash: bool,
}

/// The result of a walk to an inode.
#[expect(clippy::large_enum_variant, reason = "a walk may run in a signal handler: no allocation")]
pub(crate) enum Target {
    /// It found this inode.
    Found(NameRef),
    /// It found a directory without this name.
    Missing(Dir, Name),
}

/// True if the calling user has permissions `want` on an inode with the given mode, owner and group.
pub(crate) fn permits((mode, uid, gid): (u32, u32, u32), want: u32, real_ids: bool) -> bool {
    // If owner, group and others all have the permissions, the caller's IDs are not needed.
    if (mode >> 6) & (mode >> 3) & mode & want == want {
        return true;
    }
    // SAFETY: these calls cannot fail.
    let me = unsafe {
        if real_ids {
            libc::getuid()
        } else {
            libc::geteuid()
        }
    };
    if me == 0 {
        let directory = mode & libc::S_IFMT == libc::S_IFDIR;
        return want & EXECUTE == 0 || directory || mode & 0o111 != 0;
    }
    // SAFETY: as above.
    let my_group = || unsafe {
        if real_ids {
            libc::getgid()
        } else {
            libc::getegid()
        }
    };
    let class = if me == uid {
        mode >> 6
    } else if my_group() == gid || in_groups(gid) {
        mode >> 3
    } else {
        mode
    };
    class & want == want
}

/// Supplementary groups for which a look-up takes the stack: more than nearly all users have.
const GROUPS_ON_STACK: usize = 256;

/// True when `gid` is among the supplementary groups.
fn in_groups(gid: u32) -> bool {
    let mut groups = [0; GROUPS_ON_STACK];
    // EINVAL: this process has more groups.
    match getgroups(&mut groups) {
        Err(Code::Invalid) => in_many_groups(gid),
        groups => groups.is_ok_and(|groups| groups.contains(&gid)),
    }
}

/// The same for any number of groups, in memory that is mapped for the call.
#[cold]
fn in_many_groups(gid: u32) -> bool {
    const BYTES: usize = GROUPS_MAX * size_of::<libc::gid_t>();
    // SAFETY: a fresh anonymous mapping.
    let memory = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if memory == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the mapping has this length, is zero-initialised, and is used here alone.
    let groups = unsafe { std::slice::from_raw_parts_mut(memory.cast(), GROUPS_MAX) };
    let found = getgroups(groups).is_ok_and(|groups| groups.contains(&gid));
    // SAFETY: the mapping is ours, and the slice is not used after this.
    unsafe { libc::munmap(memory, BYTES) };
    found
}

/// The supplementary groups, in `room`; [`Code::Invalid`] if it is too small.
fn getgroups(room: &mut [libc::gid_t]) -> Result<&[libc::gid_t], Code> {
    // SAFETY: the slice has the given length.
    let n = errno::check(unsafe { libc::getgroups(room.len() as i32, room.as_mut_ptr()) })?;
    Ok(&room[..n as usize])
}

/// Walks again if a symlink was replaced between the look-ups of its name and of its target.
fn again_while_stale<T>(mut walk: impl FnMut() -> Door<T>) -> Door<T> {
    for _ in 0..WALKS_MAX {
        match walk() {
            Err(Fail::Code(Code::Stale)) => {}
            result => return result,
        }
    }
    Err(Code::NotFound.into())
}

impl Dir {
    /// Its mode, owner and group.
    pub(crate) fn permissions(&self, pool: &Pool) -> Result<(u32, u32, u32), Code> {
        match self.permissions {
            Some(p) => Ok(p),
            None => {
                let permissions = pool.permissions_of(self.ino)?;
                match Kind::from_mode(permissions.0) {
                    Some(Kind::Directory) => Ok(permissions),
                    _ => Err(Code::NotDirectory),
                }
            }
        }
    }

    /// Fails with [`Code::AccessDenied`] unless the caller has permissions `want` on the directory.
    pub(crate) fn check(&self, pool: &Pool, want: u32) -> Result<(), Code> {
        if permits(self.permissions(pool)?, want, false) {
            Ok(())
        } else {
            Err(Code::AccessDenied)
        }
    }
}

/// The state of a walk. The rest of the path is `path[at..]` until the first symlink, and `expanded[at..]` after it.
struct Walk<'p, 'b> {
    pool: &'p Pool,
    path: &'p [u8],
    expanded: &'b mut PathBuffer,
    in_expanded: bool,
    at: usize,
    symlinks: usize,
    dir: Dir,
}

/// The next component.
enum Step {
    Component { start: usize, end: usize, last: bool, slash: bool },
    End,
}

impl Walk<'_, '_> {
    fn bytes(&self) -> &[u8] {
        if self.in_expanded {
            self.expanded.as_bytes()
        } else {
            self.path
        }
    }

    fn step(&self) -> Step {
        let bytes = self.bytes();
        let mut start = self.at;
        while start < bytes.len() && bytes[start] == b'/' {
            start += 1;
        }
        if start == bytes.len() {
            return Step::End;
        }
        let mut end = start;
        while end < bytes.len() && bytes[end] != b'/' {
            end += 1;
        }
        let slash = end < bytes.len();
        let last = bytes[end..].iter().all(|&b| b == b'/');
        Step::Component { start, end, last, slash }
    }

    /// Goes up from the current directory; from the pool's root it leaves the pool.
    fn up(&mut self) -> Door<()> {
        if self.dir.ino == self.root()? {
            let prefix = self.pool.prefix();
            let slash = prefix.iter().rposition(|&b| b == b'/').unwrap_or(0);
            let at = self.at;
            return self.escape(&prefix[..slash], at);
        }
        let parent = self.pool.parent_of(&self.pool.get_attr(self.dir.ino)?.attr)?;
        self.dir = Dir { ino: parent, permissions: None };
        Ok(())
    }

    fn root(&self) -> Result<Ino, Code> {
        Ok(self.pool.attached()?.reply.root)
    }

    /// Leaves the pool: the caller's buffer becomes `front` and the rest of the path.
    fn escape<T>(&mut self, front: &[u8], at: usize) -> Door<T> {
        if !self.in_expanded {
            self.expanded.set(self.path)?;
            self.in_expanded = true;
        }
        self.expanded.replace_front(front, at.min(self.expanded.len()))?;
        if self.expanded.is_empty() {
            self.expanded.set(b"/")?;
        }
        Err(Fail::Escape)
    }

    /// Replaces a symlink in the path by its target. `self.at` is the end of the symlink's name.
    #[inline(never)]
    fn follow(&mut self, link: Ino) -> Door<()> {
        self.symlinks += 1;
        if self.symlinks > SYMLINKS_MAX {
            return Err(Code::TooManySymlinks.into());
        }
        let mut target = [0; PATH_MAX];
        // Removed since its name was read. The name may lead to another inode by now, or be gone.
        let n = self.pool.read_link_inode(link, &mut target).map_err(|code| match code {
            Code::NotFound => Code::Stale,
            code => code,
        })?;
        let mut target = &target[..n];
        if !self.in_expanded {
            self.expanded.set(self.path)?;
            self.in_expanded = true;
        }
        if target.first() == Some(&b'/') {
            let prefix = self.pool.prefix();
            let inside = !prefix.is_empty()
                && target.starts_with(prefix)
                && matches!(target.get(prefix.len()), None | Some(b'/'));
            if !inside {
                let at = self.at;
                return self.escape(target, at);
            }
            target = &target[prefix.len()..];
            self.dir = Dir { ino: self.root()?, permissions: None };
        }
        let replaced = self.expanded.replace_front(target, self.at);
        self.at = 0;
        // What links lead to through links is this long in a loop, as a rule.
        Ok(replaced.map_err(|code| if self.symlinks > 1 { Code::TooManySymlinks } else { code })?)
    }
}

impl Pool {
    fn walk<'p, 'b>(&'p self, place: Place<'p>, expanded: &'b mut PathBuffer) -> Walk<'p, 'b> {
        let dir = Dir { ino: place.dir, permissions: None };
        Walk { pool: self, path: place.path, expanded, in_expanded: false, at: 0, symlinks: 0, dir }
    }

    /// Walks to the directory that holds the last component.
    pub(crate) fn walk_parent(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<Parent> {
        again_while_stale(|| self.walk_parent_once(place, escape))
    }

    fn walk_parent_once(&self, place: Place<'_>, escape: &mut PathBuffer) -> Door<Parent> {
        let mut walk = self.walk(place, escape);
        loop {
            let Step::Component { start, end, last, slash } = walk.step() else {
                return Ok(Parent { dir: walk.dir, last: Last::Dot, slash: true });
            };
            let component = &walk.bytes()[start..end];
            if component.len() > NAME_MAX {
                return Err(Code::NameTooLong.into());
            }
            walk.dir.check(self, EXECUTE)?;
            if last {
                let last = match component {
                    b"." => Last::Dot,
                    b".." => {
                        if walk.dir.ino == walk.root()? {
                            walk.at = end;
                            walk.up()?;
                        }
                        Last::DotDot
                    }
                    name => Last::Name(Name::new(name)),
                };
                return Ok(Parent { dir: walk.dir, last, slash });
            }
            walk.at = end;
            self.descend(&mut walk, start)?;
        }
    }

    /// Takes one component that is not the last, which begins at `start` and ends at `walk.at`: into a directory, or through
    /// a symlink. The name is looked up where it is, since copies of names would take a good part of a walk's time.
    fn descend(&self, walk: &mut Walk<'_, '_>, start: usize) -> Door<()> {
        let name = &walk.bytes()[start..walk.at];
        match name {
            b"." => return Ok(()),
            b".." => return walk.up(),
            _ => {}
        }
        let found = self.lookup_name(walk.dir.ino, name)?;
        match found.kind {
            Kind::Directory => {
                walk.dir = Dir { ino: found.ino, permissions: Some(found.permissions) };
                Ok(())
            }
            Kind::Symlink => walk.follow(found.ino),
            _ => Err(Code::NotDirectory.into()),
        }
    }

    /// Walks to an inode. `follow` follows a symlink at the end; a symlink followed by a slash is always followed. With
    /// `to_create` a last name that the board does not have counts as missing, because the request that creates it
    /// reports an existing one, and a last name followed by a slash is [`Code::IsDirectory`].
    pub(crate) fn walk_to(
        &self,
        place: Place<'_>,
        follow: bool,
        to_create: bool,
        escape: &mut PathBuffer,
    ) -> Door<Target> {
        self.walk_asking(place, follow, to_create, escape, &mut None)
    }

    /// The same. `asked` becomes the entry of the last name if a request fetched it, so that it need not be requested
    /// again.
    fn walk_asking(
        &self,
        place: Place<'_>,
        follow: bool,
        to_create: bool,
        escape: &mut PathBuffer,
        asked: &mut Option<Entry>,
    ) -> Door<Target> {
        again_while_stale(|| self.walk_to_once(place, follow, to_create, escape, asked))
    }

    fn walk_to_once(
        &self,
        place: Place<'_>,
        follow: bool,
        to_create: bool,
        escape: &mut PathBuffer,
        asked: &mut Option<Entry>,
    ) -> Door<Target> {
        let mut walk = self.walk(place, escape);
        loop {
            let Step::Component { start, end, last, slash } = walk.step() else {
                // The walk's current directory. If the path was empty from the start, any kind of inode that
                // `place.dir` is.
                let kind = match walk.dir.permissions {
                    Some(_) => Kind::Directory,
                    None => {
                        let permissions = self.permissions_of(walk.dir.ino)?;
                        walk.dir.permissions = Some(permissions);
                        Kind::from_mode(permissions.0).ok_or(Code::Malformed)?
                    }
                };
                if kind != Kind::Directory && !place.path.is_empty() {
                    return Err(Code::NotDirectory.into());
                }
                let permissions = walk.dir.permissions.unwrap_or_default();
                return Ok(Target::Found(NameRef { ino: walk.dir.ino, kind, permissions }));
            };
            let component = &walk.bytes()[start..end];
            if component.len() > NAME_MAX {
                return Err(Code::NameTooLong.into());
            }
            walk.dir.check(self, EXECUTE)?;
            if !last || matches!(component, b"." | b"..") {
                walk.at = end;
                self.descend(&mut walk, start)?;
                continue;
            }
            // As in Linux, whatever the name leads to.
            if slash && to_create {
                return Err(Code::IsDirectory.into());
            }
            let found = match self.lookup_last(walk.dir.ino, component, to_create, asked) {
                Ok(found) => found,
                Err(Code::NotFound) if !slash => return Ok(Target::Missing(walk.dir, Name::new(component))),
                Err(code) => return Err(code.into()),
            };
            walk.at = end;
            match found.kind {
                Kind::Symlink if follow || slash => walk.follow(found.ino)?,
                Kind::Directory => return Ok(Target::Found(found)),
                _ if slash => return Err(Code::NotDirectory.into()),
                _ => return Ok(Target::Found(found)),
            }
        }
    }

    /// Walks to an existing inode.
    pub(crate) fn walk_found(
        &self,
        place: Place<'_>,
        follow: bool,
        escape: &mut PathBuffer,
    ) -> Door<NameRef> {
        match self.walk_to(place, follow, false, escape)? {
            Target::Found(found) => Ok(found),
            Target::Missing(..) => Err(Code::NotFound.into()),
        }
    }

    /// Walks to an existing inode and calls `act` with it. If the inode is gone by then, its name may lead to another
    /// inode, as after a rename over it: the walk starts again.
    pub(crate) fn with_entry<T>(
        &self,
        place: Place<'_>,
        follow: bool,
        escape: &mut PathBuffer,
        mut act: impl FnMut(&Entry) -> Result<T, Code>,
    ) -> Door<T> {
        for _ in 0..WALKS_MAX {
            let mut asked = None;
            let found = match self.walk_asking(place, follow, false, escape, &mut asked)? {
                Target::Found(found) => found,
                Target::Missing(..) => return Err(Code::NotFound.into()),
            };
            let entry = match asked.filter(|entry| entry.attr.ino == found.ino) {
                Some(entry) => Ok(entry),
                None => self.get_attr(found.ino),
            };
            match entry.and_then(|entry| act(&entry)) {
                Err(Code::NotFound | Code::Stale) => {}
                result => return Ok(result?),
            }
        }
        Err(Code::NotFound.into())
    }

    /// The same without a look-up of the inode's attributes.
    pub(crate) fn with_inode<T>(
        &self,
        place: Place<'_>,
        follow: bool,
        escape: &mut PathBuffer,
        mut act: impl FnMut(NameRef) -> Result<T, Code>,
    ) -> Door<T> {
        for _ in 0..REPLACED_MAX {
            let found = self.walk_found(place, follow, escape)?;
            match act(found) {
                Err(Code::NotFound | Code::Stale) => {}
                result => return Ok(result?),
            }
        }
        Err(Code::NotFound.into())
    }

    /// A symlink's target: as many bytes as fit.
    pub fn read_link_inode(&self, ino: Ino, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut reply = [0; PATH_MAX + 16];
        let n = self.call(&Request::ReadLink { ino }, &mut reply)?;
        match Reply::decode(&reply[..n])? {
            Reply::Bytes(target) => {
                let n = target.len().min(buffer.len());
                buffer[..n].copy_from_slice(&target[..n]);
                Ok(n)
            }
            _ => Err(Code::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supplementary_group_counts_however_many_there_are() {
        for count in [1, GROUPS_ON_STACK, GROUPS_ON_STACK + 1, GROUPS_MAX] {
            // The system call changes the calling thread alone.
            let thread = std::thread::spawn(move || {
                let groups: Vec<libc::gid_t> = (1000..).take(count).collect();
                // SAFETY: the slice has the given length.
                let set = unsafe { libc::syscall(libc::SYS_setgroups, count, groups.as_ptr()) };
                if set != 0 {
                    return eprintln!("not tested: only root may set groups");
                }
                assert!(
                    [groups[0], groups[count / 2], groups[count - 1]].into_iter().all(in_groups),
                    "{count}"
                );
                assert!(!in_groups(999) && !in_groups(1000 + count as u32), "{count}");
            });
            thread.join().unwrap();
        }
    }
}
