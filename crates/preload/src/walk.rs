//! ftw and nftw over trees in the pool.

use std::os::raw::{c_char, c_int, c_void};

use libc::stat as Stat;

use crate::abi::PATH_BYTES;
use crate::chdir::fchdir;
use crate::directory::{closedir, opendir, readdir};
use crate::interpose::{errno, set_errno};
use crate::path;
use crate::real;
use crate::stat::{lstat, stat};
use crate::stdio::libc_would_miss;

/// `struct FTW`.
#[repr(C)]
struct Ftw {
    base: c_int,
    level: c_int,
}

type Visit = unsafe extern "C-unwind" fn(*const c_char, *const Stat, c_int, *const Ftw) -> c_int;

// Kinds of a visit and flags of a walk, as in <ftw.h>.
const FTW_F: c_int = 0;
const FTW_D: c_int = 1;
const FTW_DNR: c_int = 2;
const FTW_NS: c_int = 3;
const FTW_SL: c_int = 4;
const FTW_DP: c_int = 5;
const FTW_SLN: c_int = 6;
const FTW_PHYS: c_int = 1;
const FTW_MOUNT: c_int = 2;
const FTW_CHDIR: c_int = 4;
const FTW_DEPTH: c_int = 8;
const FTW_ACTIONRETVAL: c_int = 16;
const FTW_SKIP_SUBTREE: c_int = 2;
const FTW_SKIP_SIBLINGS: c_int = 3;

/// The maximum depth of directories. The path of a deeper one does not fit.
const LEVELS_MAX: usize = PATH_BYTES / 2;

struct Walk {
    visit: Visit,
    flags: c_int,
    /// nftw passes more to the visitor than ftw, which does not distinguish symbolic links.
    is_nftw: bool,
    path: [u8; PATH_BYTES],
    bytes: usize,
    device: libc::dev_t,
    /// The directories from the root of the walk to here, so that links cannot make it loop.
    above: Vec<(libc::dev_t, libc::ino_t)>,
    /// With FTW_CHDIR, the current directory of the walk.
    here: c_int,
}

/// How the walk continues after a visit.
enum Next {
    Go,
    SkipSubtree,
    SkipSiblings,
}

impl Walk {
    fn path_c(&self) -> *const c_char {
        self.path.as_ptr().cast()
    }

    /// The offset of the last component.
    fn base(&self) -> usize {
        let text = &self.path[..self.bytes];
        let end = text.iter().rposition(|b| *b != b'/').map_or(0, |last| last + 1);
        text[..end].iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1)
    }

    fn call(&self, seen: &Stat, kind: c_int) -> Result<Next, c_int> {
        let kind = match kind {
            FTW_SLN if !self.is_nftw => FTW_NS,
            FTW_DP if !self.is_nftw => FTW_D,
            kind => kind,
        };
        let place = Ftw { base: self.base() as c_int, level: self.above.len() as c_int };
        // SAFETY: libc's contract: the visitor takes these arguments.
        let answer = unsafe { (self.visit)(self.path_c(), seen, kind, &place) };
        match answer {
            0 => Ok(Next::Go),
            FTW_SKIP_SUBTREE if self.flags & FTW_ACTIONRETVAL != 0 => Ok(Next::SkipSubtree),
            FTW_SKIP_SIBLINGS if self.flags & FTW_ACTIONRETVAL != 0 => Ok(Next::SkipSiblings),
            stop => Err(stop),
        }
    }

    /// Visits the file at the path, and everything below it.
    fn node(&mut self) -> Result<Next, c_int> {
        // SAFETY: a stat of zeroes is a valid one; paths are C strings.
        let mut seen: Stat = unsafe { std::mem::zeroed() };
        let follows = self.flags & FTW_PHYS == 0;
        let name = self.name_from_here();
        // SAFETY: C string and writable structure.
        let found = unsafe {
            if follows {
                stat(name, &mut seen)
            } else {
                lstat(name, &mut seen)
            }
        };
        let mut kind = FTW_F;
        if found != 0 {
            if errno() != libc::ENOENT && errno() != libc::EACCES && errno() != libc::ELOOP {
                return Err(-1);
            }
            // SAFETY: as above.
            let dangling = follows && unsafe { lstat(name, &mut seen) } == 0 && is_link(&seen);
            if self.above.is_empty() && !dangling {
                return Err(-1);
            }
            kind = if dangling { FTW_SLN } else { FTW_NS };
        } else if is_link(&seen) {
            kind = FTW_SL;
        } else if seen.st_mode & libc::S_IFMT == libc::S_IFDIR {
            kind = FTW_D;
        }
        if self.above.is_empty() {
            self.device = seen.st_dev;
        }
        if found == 0 && self.flags & FTW_MOUNT != 0 && seen.st_dev != self.device {
            return Ok(Next::Go);
        }
        if kind != FTW_D {
            return self.call(&seen, kind);
        }
        let me = (seen.st_dev, seen.st_ino);
        if self.above.contains(&me) || self.above.len() >= LEVELS_MAX {
            return Ok(Next::Go);
        }
        self.directory(&seen, me)
    }

    fn directory(&mut self, seen: &Stat, me: (libc::dev_t, libc::ino_t)) -> Result<Next, c_int> {
        // SAFETY: a C string; the stream is closed below.
        let stream = unsafe { opendir(self.name_from_here()) };
        if stream.is_null() {
            if errno() != libc::EACCES {
                return Err(-1);
            }
            return self.call(seen, FTW_DNR);
        }
        let result = self.read_directory(stream, seen, me);
        let why = errno();
        // SAFETY: it was opened above.
        unsafe { closedir(stream) };
        set_errno(why);
        result
    }

    fn read_directory(
        &mut self,
        stream: *mut libc::DIR,
        seen: &Stat,
        me: (libc::dev_t, libc::ino_t),
    ) -> Result<Next, c_int> {
        if self.flags & FTW_DEPTH == 0 {
            match self.call(seen, FTW_D)? {
                Next::Go => {}
                Next::SkipSubtree => return Ok(Next::Go),
                Next::SkipSiblings => return Ok(Next::SkipSiblings),
            }
        }
        let before = self.here;
        if self.flags & FTW_CHDIR != 0 {
            // SAFETY: the stream is open.
            self.here = unsafe { crate::directory::dirfd(stream) };
            self.stand_here()?;
        }
        let bytes = self.bytes;
        self.above.push(me);
        let result = self.entries(stream, bytes);
        self.above.pop();
        self.bytes = bytes;
        self.path[bytes] = 0;
        // As in glibc, the end of a directory is reported from within it.
        let next = match result {
            Ok(()) if self.flags & FTW_DEPTH != 0 => self.call(seen, FTW_DP),
            result => result.map(|()| Next::Go),
        };
        self.here = before;
        let next = next?;
        self.stand_here()?;
        Ok(next)
    }

    fn entries(&mut self, stream: *mut libc::DIR, bytes: usize) -> Result<(), c_int> {
        loop {
            set_errno(0);
            // SAFETY: the stream is open; an entry's name is a C string, used before the next read.
            let name = unsafe {
                let entry = readdir(stream);
                if entry.is_null() {
                    return if errno() == 0 { Ok(()) } else { Err(-1) };
                }
                path::bytes((&raw const (*entry).d_name).cast())
            };
            if name == b"." || name == b".." {
                continue;
            }
            let slash = usize::from(self.path[bytes - 1] != b'/');
            if bytes + slash + name.len() >= PATH_BYTES {
                set_errno(libc::ENAMETOOLONG);
                return Err(-1);
            }
            self.path[bytes] = b'/';
            let start = bytes + slash;
            self.path[start..start + name.len()].copy_from_slice(name);
            self.bytes = start + name.len();
            self.path[self.bytes] = 0;
            if let Next::SkipSiblings = self.node()? {
                return Ok(());
            }
        }
    }

    /// The path for a call: the whole path, or its last component when the walk changes directories.
    fn name_from_here(&self) -> *const c_char {
        if self.flags & FTW_CHDIR == 0 {
            return self.path_c();
        }
        self.path[self.base()..].as_ptr().cast()
    }

    /// With FTW_CHDIR, changes to the current directory of the walk.
    fn stand_here(&self) -> Result<(), c_int> {
        // SAFETY: it touches no memory.
        if self.flags & FTW_CHDIR != 0 && unsafe { fchdir(self.here) } != 0 {
            return Err(-1);
        }
        Ok(())
    }
}

fn is_link(seen: &Stat) -> bool {
    seen.st_mode & libc::S_IFMT == libc::S_IFLNK
}

unsafe fn walk(root: *const c_char, visit: Visit, flags: c_int, is_nftw: bool) -> c_int {
    // SAFETY: libc's contract: a C string.
    let text = unsafe { path::bytes(root) };
    if text.is_empty() || text.len() >= PATH_BYTES {
        set_errno(if text.is_empty() { libc::ENOENT } else { libc::ENAMETOOLONG });
        return -1;
    }
    let mut walk = Walk {
        visit,
        flags,
        is_nftw,
        path: [0; PATH_BYTES],
        bytes: text.len(),
        device: 0,
        above: Vec::new(),
        here: -1,
    };
    walk.path[..text.len()].copy_from_slice(text);
    let run = |walk: &mut Walk| match walk.node() {
        Ok(_) => 0,
        Err(answer) => answer,
    };
    if flags & FTW_CHDIR == 0 {
        return run(&mut walk);
    }
    // The visitor runs in the directory that holds the path, also for the root.
    let directory = |path: *const c_char| {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a C string.
        unsafe { crate::open::open(path, flags, 0) }
    };
    let home = directory(c".".as_ptr());
    if home < 0 {
        return -1;
    }
    let base = walk.base();
    let first = std::mem::replace(&mut walk.path[base], 0);
    walk.here = directory(if base == 0 { c".".as_ptr() } else { walk.path_c() });
    walk.path[base] = first;
    let start = walk.here;
    let result = if start >= 0 && walk.stand_here().is_ok() { run(&mut walk) } else { -1 };
    let why = errno();
    // SAFETY: a descriptor of this walk.
    unsafe { fchdir(home) };
    real::close(home);
    if start >= 0 {
        real::close(start);
    }
    set_errno(why);
    result
}

interpose! {
    /// nftw(3)
    nftw, nftw64 = fn(root: *const c_char, visit: *const c_void, descriptors: c_int, flags: c_int) -> c_int {
        // SAFETY: libc's contract: a C string and a visitor.
        unsafe {
            if visit.is_null()
                || !(libc_would_miss(libc::AT_FDCWD, root, false, true)
                    || libc_would_miss(libc::AT_FDCWD, root, true, true))
            {
                return real::libc_own::nftw(root, visit, descriptors, flags);
            }
            walk(root, std::mem::transmute::<*const c_void, Visit>(visit), flags, true)
        }
    }

    /// ftw(3)
    ftw, ftw64 = fn(root: *const c_char, visit: *const c_void, descriptors: c_int) -> c_int {
        // SAFETY: libc's contract: a C string and a visitor, which takes fewer arguments than that of nftw.
        unsafe {
            if visit.is_null()
                || !(libc_would_miss(libc::AT_FDCWD, root, false, true)
                    || libc_would_miss(libc::AT_FDCWD, root, true, true))
            {
                return real::libc_own::ftw(root, visit, descriptors);
            }
            walk(root, std::mem::transmute::<*const c_void, Visit>(visit), 0, false)
        }
    }
}
