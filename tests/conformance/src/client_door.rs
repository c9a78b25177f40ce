//! The door of the client library: the suite's calls, made on a pool.
//!
//! The client library leaves some tasks to its interfaces. This door does them in the simplest way: the umask, the
//! empty path, the length of a path, `.` and `..` in a listing, negative sizes.

use crate::door::{done, Ability, At, Door, Errno, Item, Outcome, SetTime, Space, Stat, Stream};
use crate::libc_door::{LibcDoor, Spelling};
use forebay_client::{Directory, Fail, PathBuffer, Place, Pool};
use forebay_types::{Code, Ino, TimeSet, Timestamp};
use std::cell::Cell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// The path at which programs would see the pool.
const PREFIX: &[u8] = b"/forebay";

/// See the module.
pub struct ClientDoor {
    pool: &'static Pool,
    /// The directory below the root in which cases get their directories; empty for the root.
    under: String,
    entered: Ino,
    entered_path: Vec<u8>,
    umask: Cell<u32>,
    abilities: Vec<Ability>,
    /// Serves descriptors that the pool does not know, such as those of O_TMPFILE: only the kernel has their files.
    kernel: LibcDoor,
}

/// The error for a path that leaves the pool. No case with such a path runs through this door, so none expects it.
const ESCAPED: Errno = Errno(libc::EREMOTE);

impl From<Code> for Errno {
    fn from(code: Code) -> Errno {
        Errno(code.errno())
    }
}

impl From<Fail> for Errno {
    fn from(fail: Fail) -> Errno {
        match fail {
            Fail::Code(code) => code.into(),
            Fail::Escape => ESCAPED,
        }
    }
}

impl ClientDoor {
    /// Attaches to the pool in `directory`. Cases run below the directory `under` of the pool.
    pub fn attach(directory: &Path, under: &str, claimed: &[Ability]) -> Result<ClientDoor, String> {
        let pool = Pool::attach(directory).map_err(|e| e.to_string())?;
        pool.set_prefix(PREFIX);
        let mut abilities = vec![
            Ability::OneDoor,
            Ability::OneNode,
            Ability::OwnData,
            Ability::Children,
            Ability::Xattrs,
            Ability::LargeXattrs,
            Ability::OwnSpace,
        ];
        // SAFETY: no memory is passed.
        abilities.push(if unsafe { libc::geteuid() } == 0 { Ability::Root } else { Ability::NotRoot });
        abilities.extend_from_slice(claimed);
        let entered = pool.root().map_err(|code| format!("the pool's root: {code:?}"))?;
        Ok(ClientDoor {
            pool,
            under: under.to_owned(),
            entered,
            entered_path: PREFIX.to_vec(),
            umask: Cell::new(0o022),
            abilities,
            kernel: LibcDoor::new(Path::new("/"), Spelling::Absolute, &[]),
        })
    }

    fn place<'a>(&self, path: &'a [u8]) -> Outcome<Place<'a>> {
        match path {
            [] => Err(Errno(libc::ENOENT)),
            _ if path.len() > forebay_types::limits::PATH_MAX => Err(Errno(libc::ENAMETOOLONG)),
            [b'/', ..] => match path.strip_prefix(PREFIX) {
                Some(inside) if inside.is_empty() || inside[0] == b'/' => {
                    Ok(Place { dir: self.pool.root()?, path: inside })
                }
                _ => Err(ESCAPED),
            },
            _ => Ok(Place { dir: self.entered, path }),
        }
    }

    fn at<'a>(&self, at: At<'a>) -> Outcome<Place<'a>> {
        match at.dir {
            Some(fd) if at.path.first() != Some(&b'/') => Ok(Place { dir: self.inode(fd)?, path: at.path }),
            _ => self.place(at.path),
        }
    }

    fn inode(&self, fd: RawFd) -> Outcome<Ino> {
        self.known(fd)?.ok_or(Errno(libc::EBADF))
    }

    fn known(&self, fd: RawFd) -> Outcome<Option<Ino>> {
        Ok(self.pool.inode_of(fd, &kernel_stat(fd)?))
    }
}

fn kernel_stat(fd: RawFd) -> Outcome<libc::stat> {
    // SAFETY: all zeros is a valid struct stat.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours.
    done(unsafe { libc::fstat(fd, &mut stat) })?;
    Ok(stat)
}

fn time_set(time: SetTime) -> TimeSet {
    match time {
        SetTime::Omit => TimeSet::Omit,
        SetTime::Now => TimeSet::Now,
        SetTime::At(t) => TimeSet::At(Timestamp { sec: t.sec, nsec: t.nsec as u32 }),
    }
}

fn opened(fd: RawFd) -> OwnedFd {
    // SAFETY: the pool just opened this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A buffer for paths that leave the pool.
fn escape() -> PathBuffer {
    PathBuffer::new()
}

impl Door for ClientDoor {
    fn name(&self) -> String {
        "client".into()
    }

    fn can(&self, ability: Ability) -> bool {
        self.abilities.contains(&ability)
    }

    fn enter(&mut self, directory: &str) -> Outcome<()> {
        let root = self.pool.root()?;
        let path = format!("{}/{directory}", self.under);
        let place = Place { dir: root, path: path.as_bytes() };
        self.pool.make_directory(place, 0o755, &mut escape())?;
        self.enter_existing(directory)
    }

    fn enter_existing(&mut self, directory: &str) -> Outcome<()> {
        let path = format!("{}/{directory}", self.under);
        let place = Place { dir: self.pool.root()?, path: path.as_bytes() };
        self.entered = self.pool.resolve(place, true, &mut escape())?.attr.ino;
        self.entered_path = [PREFIX, b"/", path.trim_start_matches('/').as_bytes()].concat();
        Ok(())
    }

    fn absolute(&self, path: &[u8]) -> Vec<u8> {
        [&self.entered_path, b"/".as_slice(), path].concat()
    }

    fn open_at(&self, at: At<'_>, flags: i32, mode: u32) -> Outcome<OwnedFd> {
        Ok(opened(self.pool.open(self.at(at)?, flags, mode & !self.umask.get(), &mut escape())?))
    }

    fn stat_at(&self, at: At<'_>, follow: bool) -> Outcome<Stat> {
        Ok(Stat::from_c(&self.pool.stat(self.at(at)?, follow, &mut escape())?))
    }

    fn make_directory_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        Ok(self.pool.make_directory(self.at(at)?, mode & !self.umask.get(), &mut escape())?)
    }

    fn unlink_at(&self, at: At<'_>) -> Outcome<()> {
        Ok(self.pool.unlink(self.at(at)?, &mut escape())?)
    }

    fn remove_directory_at(&self, at: At<'_>) -> Outcome<()> {
        Ok(self.pool.remove_directory(self.at(at)?, &mut escape())?)
    }

    fn rename_at(&self, from: At<'_>, to: At<'_>, flags: u32) -> Outcome<()> {
        Ok(self.pool.rename(self.at(from)?, self.at(to)?, flags, &mut escape())?)
    }

    fn link_at(&self, from: At<'_>, to: At<'_>, follow: bool) -> Outcome<()> {
        Ok(self.pool.link(self.at(from)?, self.at(to)?, follow, &mut escape())?)
    }

    fn link_handle(&self, fd: RawFd, to: At<'_>) -> Outcome<()> {
        Ok(self.pool.link_unnamed(fd, self.at(to)?, &mut escape())?)
    }

    fn symlink_at(&self, target: &[u8], at: At<'_>) -> Outcome<()> {
        Ok(self.pool.symlink(target, self.at(at)?, &mut escape())?)
    }

    fn read_link_at(&self, at: At<'_>, buffer: &mut [u8]) -> Outcome<usize> {
        Ok(self.pool.read_link(self.at(at)?, buffer, &mut escape())?)
    }

    fn make_node_at(&self, at: At<'_>, mode: u32, rdev: u64) -> Outcome<()> {
        self.pool.make_node(self.at(at)?, mode & !self.umask.get(), rdev, &mut escape())?;
        Ok(())
    }

    fn chmod_at(&self, at: At<'_>, mode: u32) -> Outcome<()> {
        Ok(self.pool.chmod(self.at(at)?, mode, true, &mut escape())?)
    }

    fn chown_at(&self, at: At<'_>, uid: Option<u32>, gid: Option<u32>, follow: bool) -> Outcome<()> {
        Ok(self.pool.chown(self.at(at)?, uid, gid, follow, &mut escape())?)
    }

    fn set_times_at(&self, at: At<'_>, atime: SetTime, mtime: SetTime, follow: bool) -> Outcome<()> {
        Ok(self.pool.set_times(self.at(at)?, time_set(atime), time_set(mtime), follow, &mut escape())?)
    }

    fn access_at(&self, at: At<'_>, amode: i32) -> Outcome<()> {
        Ok(self.pool.access(self.at(at)?, amode, false, true, &mut escape())?)
    }

    fn truncate(&self, path: &[u8], size: i64) -> Outcome<()> {
        let size = u64::try_from(size).map_err(|_| Errno(libc::EINVAL))?;
        Ok(self.pool.truncate(self.place(path)?, size, &mut escape())?)
    }

    fn get_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        Ok(self.pool.get_xattr(self.place(path)?, follow, name, value, &mut escape())?)
    }

    fn set_xattr(&self, path: &[u8], follow: bool, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        Ok(self.pool.set_xattr(self.place(path)?, follow, name, value, flags as u32, &mut escape())?)
    }

    fn list_xattr(&self, path: &[u8], follow: bool, names: &mut [u8]) -> Outcome<usize> {
        Ok(self.pool.list_xattr(self.place(path)?, follow, names, &mut escape())?)
    }

    fn remove_xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Outcome<()> {
        Ok(self.pool.remove_xattr(self.place(path)?, follow, name, &mut escape())?)
    }

    fn space(&self) -> Outcome<Space> {
        let s = self.pool.statvfs()?;
        Ok(Space {
            total_bytes: s.f_blocks * s.f_frsize,
            free_bytes: s.f_bavail * s.f_frsize,
            name_max: s.f_namemax,
        })
    }

    fn set_umask(&self, mask: u32) -> u32 {
        self.umask.replace(mask)
    }

    fn open_stream(&self, path: &[u8]) -> Outcome<Box<dyn Stream>> {
        self.stream_of(self.open_at(path.into(), libc::O_RDONLY | libc::O_DIRECTORY, 0)?)
    }

    fn stream_of(&self, directory: OwnedFd) -> Outcome<Box<dyn Stream>> {
        let ino = self.inode(directory.as_raw_fd())?;
        let parent = self.pool.resolve(Place { dir: ino, path: b".." }, true, &mut escape());
        // The root's parent is outside the pool; the root is used instead.
        let parent = parent.map_or(ino, |entry| entry.attr.ino);
        let entries = Box::new(self.pool.read_directory(ino));
        Ok(Box::new(PoolStream { pool: self.pool, entries, dots: 0, ino, parent, _open: directory }))
    }

    fn change_directory(&self, _: RawFd) -> Outcome<()> {
        Err(Errno(libc::ENOSYS))
    }

    fn working_directory(&self) -> Outcome<Vec<u8>> {
        Err(Errno(libc::ENOSYS))
    }

    fn stat_handle(&self, fd: RawFd) -> Outcome<Stat> {
        // A descriptor that the pool does not know, such as one of O_TMPFILE, has only the kernel's attributes.
        let kernel = kernel_stat(fd)?;
        Ok(Stat::from_c(&self.pool.fstat(fd, &kernel).unwrap_or(kernel)))
    }

    fn chmod_handle(&self, fd: RawFd, mode: u32) -> Outcome<()> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.chmod_inode(ino, mode)?),
            None => self.kernel.chmod_handle(fd, mode),
        }
    }

    fn chown_handle(&self, fd: RawFd, uid: Option<u32>, gid: Option<u32>) -> Outcome<()> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.chown_inode(ino, uid, gid)?),
            None => self.kernel.chown_handle(fd, uid, gid),
        }
    }

    fn set_times_handle(&self, fd: RawFd, atime: SetTime, mtime: SetTime) -> Outcome<()> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.set_times_inode(ino, time_set(atime), time_set(mtime))?),
            None => self.kernel.set_times_handle(fd, atime, mtime),
        }
    }

    fn get_xattr_handle(&self, fd: RawFd, name: &[u8], value: &mut [u8]) -> Outcome<usize> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.get_xattr_inode(ino, name, value)?),
            None => self.kernel.get_xattr_handle(fd, name, value),
        }
    }

    fn set_xattr_handle(&self, fd: RawFd, name: &[u8], value: &[u8], flags: i32) -> Outcome<()> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.set_xattr_inode(ino, name, value, flags as u32)?),
            None => self.kernel.set_xattr_handle(fd, name, value, flags),
        }
    }

    fn list_xattr_handle(&self, fd: RawFd, names: &mut [u8]) -> Outcome<usize> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.list_xattr_inode(ino, names)?),
            None => self.kernel.list_xattr_handle(fd, names),
        }
    }

    fn remove_xattr_handle(&self, fd: RawFd, name: &[u8]) -> Outcome<()> {
        match self.known(fd)? {
            Some(ino) => Ok(self.pool.remove_xattr_inode(ino, name)?),
            None => self.kernel.remove_xattr_handle(fd, name),
        }
    }
}

/// A directory's entries after `.` and `..`. The positions before `.`, `..` and the first entry are 0, 1 and 2; later
/// positions are cookies, which are larger.
struct PoolStream {
    pool: &'static Pool,
    entries: Box<Directory>,
    dots: i64,
    ino: Ino,
    parent: Ino,
    _open: OwnedFd,
}

impl Stream for PoolStream {
    fn next(&mut self) -> Outcome<Option<Item>> {
        let dot = |name: &[u8], ino: Ino| Item { name: name.to_vec(), ino: ino.0, kind: libc::DT_DIR };
        if self.dots < 2 {
            self.dots += 1;
            return Ok(Some(if self.dots == 1 { dot(b".", self.ino) } else { dot(b"..", self.parent) }));
        }
        let entry = self.entries.next(self.pool)?;
        Ok(entry.map(|e| Item { name: e.name.to_vec(), ino: e.ino.0, kind: e.kind.dirent_type() }))
    }

    fn tell(&mut self) -> i64 {
        if self.dots < 2 || self.entries.tell() == 0 {
            self.dots
        } else {
            self.entries.tell() as i64
        }
    }

    fn seek(&mut self, position: i64) {
        self.dots = position.min(2);
        self.entries.seek(if position > 2 { position as u64 } else { 0 });
    }

    fn rewind(&mut self) {
        self.seek(0);
    }
}
