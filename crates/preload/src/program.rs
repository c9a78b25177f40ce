//! Programs in the pool: what to pass to the kernel to start one.
//!
//! A program in the pool is started from the descriptor of its backing file, so the kernel maps and runs it as any
//! other. The kernel would pass the path of a script's backing file to the interpreter. So this library reads the `#!`
//! line itself and passes the script's own path, as the kernel does for other scripts.

use std::os::raw::{c_char, c_int};

use crate::abi::{Place, ESCAPED};
use crate::arguments::{Arguments, LEVELS_MAX};
use crate::classify::{classify, Leads};
use crate::crossing::crossing;
use crate::door::{either, Pool};
use crate::path::{self, Buffer};
use crate::real;

/// Bytes at the start of a program that the kernel examines.
const HEAD_BYTES: usize = 256;
/// How often a path may cross between the kernel's tree and the pool.
const CHANGES_MAX: u32 = 40;
const ENOEXEC: isize = -(libc::ENOEXEC as isize);

/// What to start.
pub(crate) enum Image {
    /// The program behind this descriptor.
    Descriptor(c_int),
    /// The program at this path of the kernel's tree, relative to this directory.
    Path(c_int, *const c_char),
}

/// A program's file.
enum Opened {
    Pool(c_int),
    Kernel(c_int, *const c_char),
}

/// A program and its arguments during an exec call. It keeps paths and arguments of interpreters.
pub(crate) struct Program {
    heads: [[u8; HEAD_BYTES + 1]; LEVELS_MAX],
    /// The path at which the last walk left the pool.
    escaped: Buffer,
    level: usize,
    /// The arguments for exec.
    pub(crate) arguments: Arguments,
}

/// An interpreter as a script names it: offsets of C strings within the head of the script.
#[derive(Debug, PartialEq, Eq)]
struct Interpreter {
    path: usize,
    argument: Option<usize>,
}

impl Program {
    /// A program to be started with these arguments.
    ///
    /// # Safety
    /// `argv` is null or ends with a null.
    pub(crate) unsafe fn new(argv: *const *const c_char) -> Result<Program, isize> {
        // SAFETY: the caller's promise.
        let arguments = unsafe { Arguments::copy_of(argv) }?;
        Ok(Program { heads: [[0; HEAD_BYTES + 1]; LEVELS_MAX], escaped: Buffer::new(), level: 0, arguments })
    }

    /// Finds what to start for a path, which programs know as `shown`.
    ///
    /// # Safety
    /// The paths are C strings that live as long as the result.
    pub(crate) unsafe fn find(
        &mut self,
        dirfd: c_int,
        path: *const c_char,
        shown: *const c_char,
        follow: bool,
    ) -> Result<Image, isize> {
        let (mut dirfd, mut path, mut shown, mut follow) = (dirfd, path, shown, follow);
        loop {
            // SAFETY: the paths are the caller's, or C strings that this program keeps.
            let fd = match unsafe { self.open(dirfd, path, follow)? } {
                Opened::Pool(fd) => fd,
                Opened::Kernel(at, path) => {
                    // SAFETY: as above.
                    match unsafe { self.open_script_of_pool(at, path) } {
                        Some(fd) => fd,
                        None => return Ok(Image::Path(at, path)),
                    }
                }
            };
            let Some(interpreter) = self.read_head(fd)? else { return Ok(Image::Descriptor(fd)) };
            real::close(fd);
            let head: *const u8 = self.heads[self.level].as_ptr();
            self.level += 1;
            self.arguments.pop_front();
            self.arguments.push_front(shown);
            if let Some(argument) = interpreter.argument {
                // SAFETY: an offset within the head.
                self.arguments.push_front(unsafe { head.add(argument) }.cast());
            }
            // SAFETY: as above.
            path = unsafe { head.add(interpreter.path) }.cast();
            self.arguments.push_front(path);
            (dirfd, shown, follow) = (libc::AT_FDCWD, path, true);
        }
    }

    /// Follows a path into the pool or the kernel's tree, and opens the program if it is in the pool.
    unsafe fn open(&mut self, dirfd: c_int, path: *const c_char, follow: bool) -> Result<Opened, isize> {
        if self.level >= LEVELS_MAX {
            return Err(-(libc::ELOOP as isize));
        }
        let (mut dirfd, mut path) = (dirfd, path);
        let (mut entry, mut escape) = (Buffer::new(), Buffer::new());
        for _ in 0..CHANGES_MAX {
            // SAFETY: C strings. Buffers have room for a path, and none is written while a path in it is read.
            unsafe {
                let mut leads = classify(dirfd, path, follow);
                if matches!(leads, Leads::Kernel) && crossing(dirfd, path, follow, &mut entry) {
                    leads = classify(libc::AT_FDCWD, entry.as_c(), follow);
                }
                match leads {
                    Leads::Kernel => return Ok(Opened::Kernel(dirfd, path)),
                    Leads::Nowhere(errno) => return Err(errno),
                    Leads::Pool(pool, place) => {
                        match either(open_program(pool, place, follow, escape.first())) {
                            ESCAPED => {
                                std::mem::swap(&mut self.escaped, &mut escape);
                                (dirfd, path) = (libc::AT_FDCWD, self.escaped.as_c());
                            }
                            fd if fd < 0 => return Err(fd as isize),
                            fd => return Ok(Opened::Pool(fd as c_int)),
                        }
                    }
                }
            }
        }
        Err(-(libc::ELOOP as isize))
    }

    /// Opens a script in the kernel's tree whose interpreter is in the pool, which the kernel cannot find.
    unsafe fn open_script_of_pool(&mut self, dirfd: c_int, path: *const c_char) -> Option<c_int> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the caller passes C strings.
        unsafe {
            // Only files that the caller may execute are examined.
            if system_call!(libc::SYS_faccessat, dirfd, path, libc::X_OK) != 0 {
                return None;
            }
            let fd = c_int::try_from(real::openat(dirfd, path, flags, 0)).ok().filter(|fd| *fd >= 0)?;
            if let Ok(Some(interpreter)) = self.read_head(fd) {
                let named = self.heads[self.level].as_ptr().add(interpreter.path).cast();
                let inside = !matches!(classify(libc::AT_FDCWD, named, true), Leads::Kernel)
                    || crossing(libc::AT_FDCWD, named, true, &mut Buffer::new());
                if inside {
                    return Some(fd);
                }
            }
            real::close(fd);
        }
        None
    }

    /// Reads the start of a program. Returns its interpreter if it is a script.
    fn read_head(&mut self, fd: c_int) -> Result<Option<Interpreter>, isize> {
        let head = &mut self.heads[self.level];
        let n = real::pread(fd, &mut head[..HEAD_BYTES], 0);
        // A program that the caller may execute but not read is not treated as a script.
        let Ok(n) = usize::try_from(n) else { return Ok(None) };
        head[n] = 0;
        if !head.starts_with(b"#!") {
            return Ok(None);
        }
        match parse(head, n) {
            Some(interpreter) => Ok(Some(interpreter)),
            None => {
                real::close(fd);
                Err(ENOEXEC)
            }
        }
    }
}

/// Opens a program in the pool, if the caller may execute it.
///
/// # Safety
/// `escape` has room for a path.
unsafe fn open_program(pool: Pool, place: Place, follow: bool, escape: *mut u8) -> Result<i64, i64> {
    // SAFETY: the caller's promise.
    unsafe {
        let (itself, kind) = pool.reach(place, follow, escape)?;
        match kind {
            libc::S_IFREG => {}
            libc::S_IFLNK => return Err(-i64::from(libc::ELOOP)),
            _ => return Err(-i64::from(libc::EACCES)),
        }
        pool.allows(itself, libc::X_OK, escape)?;
        let fd = pool.open(itself, libc::O_RDONLY | libc::O_CLOEXEC, 0, escape);
        if fd == -i64::from(libc::EACCES) {
            return Ok(pool.open(itself, libc::O_PATH | libc::O_CLOEXEC, 0, escape));
        }
        Ok(fd)
    }
}

/// Finds interpreter and argument in the first `n` bytes of a script and ends each with a NUL, as the kernel does
/// (fs/binfmt_script.c). A line that is cut within the interpreter's name is not a script. The argument is one string,
/// without blanks around it.
fn parse(head: &mut [u8], n: usize) -> Option<Interpreter> {
    let blank = |b: u8| b == b' ' || b == b'\t';
    let whole = head[..n].iter().position(|b| *b == b'\n');
    let mut end = whole.unwrap_or(n);
    while end > 2 && blank(head[end - 1]) {
        end -= 1;
    }
    let path = (2..end).find(|i| !blank(head[*i]))?;
    let path_end = (path..end).find(|i| blank(head[*i]) || head[*i] == 0).unwrap_or(end);
    if whole.is_none() && path_end == n && n == HEAD_BYTES {
        return None;
    }
    let argument = (path_end..end).find(|i| !blank(head[*i]) && head[*i] != 0);
    head[path_end] = 0;
    head[end] = 0;
    (path < path_end).then_some(Interpreter { path, argument })
}

/// Keeps the path of a script as programs know it. A path relative to a directory's descriptor becomes absolute.
pub(crate) fn shown_path(dirfd: c_int, path: *const c_char, out: &mut Buffer) -> *const c_char {
    // SAFETY: the caller passes a C string.
    let text = unsafe { path::bytes(path) };
    if dirfd == libc::AT_FDCWD || text.first() == Some(&b'/') {
        return path;
    }
    let mut inside = Buffer::new();
    if let Some((pool, ino)) = crate::descriptor::directory_of(dirfd) {
        // SAFETY: the handle is attached. The buffer has room for a path, and then holds a C string.
        unsafe {
            if pool.path_of(ino, inside.first()) >= 0 {
                let inside = path::bytes(inside.as_c());
                if out.set(&[crate::settings::prefix(), inside, b"/", text]) {
                    return out.as_c();
                }
            }
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &[u8]) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
        let mut head = [0; HEAD_BYTES + 1];
        let n = line.len().min(HEAD_BYTES);
        head[..n].copy_from_slice(&line[..n]);
        let found = parse(&mut head, n)?;
        let text = |at: usize| head[at..].split(|b| *b == 0).next().unwrap_or_default().to_vec();
        Some((text(found.path), found.argument.map(text)))
    }

    #[test]
    fn parse_of_scripts_agrees_with_the_kernel() {
        let some = |path: &[u8], argument: Option<&[u8]>| Some((path.to_vec(), argument.map(<[u8]>::to_vec)));
        assert_eq!(parsed(b"#!/bin/sh\necho"), some(b"/bin/sh", None));
        assert_eq!(parsed(b"#! /usr/bin/env  python3 -u \t\nx"), some(b"/usr/bin/env", Some(b"python3 -u")));
        assert_eq!(parsed(b"#!/bin/sh"), some(b"/bin/sh", None));
        assert_eq!(parsed(b"#!\n"), None);
        assert_eq!(parsed(b"#!   "), None);
    }

    #[test]
    fn parse_of_a_cut_interpreter_is_none() {
        let long = [b"#!/".as_slice(), &[b'x'; 400]].concat();
        assert_eq!(parsed(&long), None);
        let argument = [b"#!/bin/sh ".as_slice(), &[b'x'; 400]].concat();
        assert_eq!(parsed(&argument).unwrap().1.unwrap().len(), HEAD_BYTES - 10);
    }
}
