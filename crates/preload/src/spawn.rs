//! posix_spawn of programs in the pool. The child is made by libc, which starts what we name: a program in the pool by
//! its backing file, which the child reaches through this process's descriptor whatever its file actions do to its own.

use std::os::raw::{c_char, c_int};

use libc::{pid_t, posix_spawn_file_actions_t as Actions, posix_spawnattr_t as Attributes};

use crate::exec::{join, search_path};
use crate::interpose::{errno, set_errno};
use crate::path::{self, Buffer};
use crate::program::{Image, Program};
use crate::stdio::libc_would_miss;
use crate::{real, settings};

type Strings = *const *const c_char;

/// posix_spawn(3): 0 or a positive errno.
unsafe fn spawn_any(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const Actions,
    attributes: *const Attributes,
    argv: Strings,
    envp: Strings,
) -> c_int {
    // SAFETY: libc's contract; what `find` gives lives as long as the program.
    unsafe {
        if !libc_would_miss(libc::AT_FDCWD, path, false, true) {
            let result = real::libc_own::posix_spawn(pid, path, actions, attributes, argv, envp);
            if result != libc::ENOENT || settings::prefix_bytes() == 0 {
                return result;
            }
        }
        let before = errno();
        let mut program = match Program::new(argv) {
            Ok(program) => program,
            Err(errno) => return -errno as c_int,
        };
        let result = match program.find(libc::AT_FDCWD, path, path, true) {
            Err(errno) => -errno as c_int,
            Ok(Image::Path(_, path)) => {
                let argv = program.arguments.as_argv();
                real::libc_own::posix_spawn(pid, path, actions, attributes, argv, envp)
            }
            Ok(Image::Descriptor(fd)) => {
                let image = path_for_child(fd);
                let argv = program.arguments.as_argv();
                let result = real::libc_own::posix_spawn(pid, image.as_c(), actions, attributes, argv, envp);
                real::close(fd);
                result
            }
        };
        set_errno(before);
        result
    }
}

/// `/proc/PID/fd/N`, with this process's number.
fn path_for_child(fd: c_int) -> Buffer {
    let (mut me, mut descriptor) = ([0; 12], [0; 12]);
    let mut path = Buffer::new();
    path.set(&[b"/proc/", path::digits(real::getpid(), &mut me), b"/fd/", path::digits(fd, &mut descriptor)]);
    path
}

/// True when a search along PATH may pass the pool.
fn search_may_pass_pool() -> bool {
    let prefix = settings::prefix();
    let search = search_path();
    !prefix.is_empty()
        && (path::contains(search, prefix)
            || (crate::cwd::may_be_pool() && search.split(|b| *b == b':').any(|d| d.first() != Some(&b'/'))))
}

interpose! {
    /// posix_spawn(3)
    posix_spawn = fn(
        pid: *mut pid_t,
        path: *const c_char,
        actions: *const Actions,
        attributes: *const Attributes,
        argv: Strings,
        envp: Strings
    ) -> c_int {
        // SAFETY: libc's contract.
        unsafe { spawn_any(pid, path, actions, attributes, argv, envp) }
    }

    /// posix_spawnp(3)
    posix_spawnp = fn(
        pid: *mut pid_t,
        file: *const c_char,
        actions: *const Actions,
        attributes: *const Attributes,
        argv: Strings,
        envp: Strings
    ) -> c_int {
        // SAFETY: libc's contract.
        unsafe {
            let name = path::bytes(file);
            if name.contains(&b'/') {
                return spawn_any(pid, file, actions, attributes, argv, envp);
            }
            if !name.is_empty() && search_may_pass_pool() {
                for directory in search_path().split(|b| *b == b':') {
                    let mut candidate = Buffer::new();
                    if !join(directory, name, &mut candidate) {
                        continue;
                    }
                    let before = errno();
                    let found = crate::stat::access(candidate.as_c(), libc::X_OK);
                    set_errno(before);
                    if found == 0 {
                        return spawn_any(pid, candidate.as_c(), actions, attributes, argv, envp);
                    }
                }
            }
            real::libc_own::posix_spawnp(pid, file, actions, attributes, argv, envp)
        }
    }
}
