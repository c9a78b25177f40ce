//! All exec calls, for programs and scripts in the pool.

use std::os::raw::{c_char, c_int};

use crate::arguments::{Arguments, Variadic};
use crate::boundary::guard;
use crate::classify::may_lead_to_pool;
use crate::interpose::answer_int;
use crate::path::{self, Buffer};
use crate::program::{shown_path, Image, Program};
use crate::{real, settings};

type Strings = *const *const c_char;

const HERE: c_int = libc::AT_FDCWD;
const ENOENT: isize = -(libc::ENOENT as isize);
/// The search path of execvp when PATH is not set.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
const SHELL: *const c_char = c"/bin/sh".as_ptr();

extern "C" {
    static environ: Strings;
}

unsafe fn kernel(dirfd: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        if dirfd == HERE && flags == 0 {
            return system_call!(libc::SYS_execve, path, argv, envp);
        }
        system_call!(libc::SYS_execveat, dirfd, path, argv, envp, flags)
    }
}

/// Starts the program at a path, in the pool or outside. Returns only on failure, with a negative errno.
unsafe fn exec_any(dirfd: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        let tried = !may_lead_to_pool(dirfd, path);
        if tried {
            let result = kernel(dirfd, path, argv, envp, flags);
            if result != ENOENT || settings::prefix_bytes() == 0 || path::is_wild(path) {
                return result;
            }
        }
        guard(|| exec_found(dirfd, path, argv, envp, flags, tried).unwrap_or_else(|errno| errno))
    }
}

/// Continues where the text of the path did not decide. `tried` is true if the kernel was called and found nothing.
#[cold]
unsafe fn exec_found(
    dirfd: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
    tried: bool,
) -> Result<isize, isize> {
    // SAFETY: libc's contract. The result of `find` lives as long as the program.
    unsafe {
        let mut absolute = Buffer::new();
        let shown = shown_path(dirfd, path, &mut absolute);
        let mut program = Program::new(argv)?;
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        match program.find(dirfd, path, shown, follow)? {
            Image::Path(_, same) if tried && same == path => Ok(ENOENT),
            Image::Path(at, path) => Ok(kernel(at, path, program.arguments.as_argv(), envp, flags)),
            Image::Descriptor(fd) => {
                let argv = program.arguments.as_argv();
                let result = kernel(fd, c"".as_ptr(), argv, envp, libc::AT_EMPTY_PATH);
                real::close(fd);
                Ok(result)
            }
        }
    }
}

/// As [`exec_any`], but the shell runs a file that the kernel cannot start.
unsafe fn exec_or_shell(path: *const c_char, argv: Strings, envp: Strings) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        let result = exec_any(HERE, path, argv, envp, 0);
        if result != -(libc::ENOEXEC as isize) {
            return result;
        }
        let mut list = match Arguments::copy_of(argv) {
            Ok(list) => list,
            Err(errno) => return errno,
        };
        list.pop_front();
        list.push_front(path);
        list.push_front(SHELL);
        exec_any(HERE, SHELL, list.as_argv(), envp, 0)
    }
}

/// The directories in which a program is searched.
pub(crate) fn search_path() -> &'static [u8] {
    // SAFETY: C strings. As libc's exec calls, this reads the environment without a lock.
    unsafe {
        let path = libc::getenv(c"PATH".as_ptr());
        if path::is_wild(path) {
            DEFAULT_PATH
        } else {
            path::bytes(path)
        }
    }
}

/// Stores `directory`/`file`. An empty directory is the working directory. False when the path is too long.
pub(crate) fn join(directory: &[u8], file: &[u8], out: &mut Buffer) -> bool {
    if directory.is_empty() {
        return out.set(&[file]);
    }
    out.set(&[directory, b"/", file])
}

unsafe fn exec_searched(file: *const c_char, argv: Strings, envp: Strings) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        let name = path::bytes(file);
        if name.is_empty() {
            return ENOENT;
        }
        if name.contains(&b'/') {
            return exec_or_shell(file, argv, envp);
        }
        let mut failed = ENOENT;
        for directory in search_path().split(|b| *b == b':') {
            let mut candidate = Buffer::new();
            if !join(directory, name, &mut candidate) {
                failed = -(libc::ENAMETOOLONG as isize);
                continue;
            }
            let result = exec_or_shell(candidate.as_c(), argv, envp);
            match -result as c_int {
                libc::EACCES => failed = result,
                libc::ENOENT | libc::ESTALE | libc::ENOTDIR | libc::ENODEV | libc::ETIMEDOUT => {}
                _ => return result,
            }
        }
        failed
    }
}

unsafe extern "C-unwind" fn execl_words(registers: *const usize, memory: *const usize) -> c_int {
    // SAFETY: libc's contract: a path, and strings up to a null.
    answer_int(unsafe {
        let call = Variadic::new(registers, memory);
        match call.strings() {
            Ok((mut list, _)) => exec_any(HERE, call.get(0) as *const c_char, list.as_argv(), environ, 0),
            Err(errno) => errno,
        }
    })
}

unsafe extern "C-unwind" fn execle_words(registers: *const usize, memory: *const usize) -> c_int {
    // SAFETY: libc's contract: a path, strings up to a null, and an environment.
    answer_int(unsafe {
        let call = Variadic::new(registers, memory);
        match call.strings() {
            Ok((mut list, behind)) => {
                let envp = call.get(behind) as Strings;
                exec_any(HERE, call.get(0) as *const c_char, list.as_argv(), envp, 0)
            }
            Err(errno) => errno,
        }
    })
}

unsafe extern "C-unwind" fn execlp_words(registers: *const usize, memory: *const usize) -> c_int {
    // SAFETY: libc's contract: a name, and strings up to a null.
    answer_int(unsafe {
        let call = Variadic::new(registers, memory);
        match call.strings() {
            Ok((mut list, _)) => exec_searched(call.get(0) as *const c_char, list.as_argv(), environ),
            Err(errno) => errno,
        }
    })
}

variadic! {
    /// execl(3)
    execl => execl_words
}
variadic! {
    /// execle(3)
    execle => execle_words
}
variadic! {
    /// execlp(3)
    execlp => execlp_words
}

interpose! {
    /// execve(2)
    execve = fn(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { exec_any(HERE, path, argv, envp, 0) })
    }

    /// execveat(2)
    execveat = fn(dirfd: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { exec_any(dirfd, path, argv, envp, flags) })
    }

    /// execv(3)
    execv = fn(path: *const c_char, argv: Strings) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { exec_any(HERE, path, argv, environ, 0) })
    }

    /// execvp(3)
    execvp = fn(file: *const c_char, argv: Strings) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { exec_searched(file, argv, environ) })
    }

    /// execvpe(3)
    execvpe = fn(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { exec_searched(file, argv, envp) })
    }
}
