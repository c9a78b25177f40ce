//! posix_spawn of programs in the pool. libc makes the child and starts a program in the pool by its backing file. The
//! child reaches that file through the descriptor of this process, so file actions on the child's own descriptors do
//! not matter.

use std::os::raw::{c_char, c_int};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use libc::{pid_t, posix_spawn_file_actions_t as Actions, posix_spawnattr_t as Attributes};

use crate::exec::{join, search_path};
use crate::interpose::{errno, set_errno};
use crate::open::open_any;
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
    // SAFETY: libc's contract. The result of `find` lives as long as the program.
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

/// `/proc/PID/fd/N`, with the number of this process.
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

/// Descriptors that stand for paths of the pool in lists of file actions, until the lists are destroyed. libc's child
/// executes the list without this library, so a file of the pool is opened when it is added to the list, which gets the
/// descriptor.
struct Held {
    /// The list; 0 for a free place.
    actions: AtomicUsize,
    fd: AtomicI32,
}

/// The maximum number of paths of the pool in all lists.
const HELD_MAX: usize = 128;
static HELD: [Held; HELD_MAX] =
    [const { Held { actions: AtomicUsize::new(0), fd: AtomicI32::new(-1) } }; HELD_MAX];

/// Moves a descriptor above those that the child will have, and keeps it for a list. A positive errno when there is no
/// free place.
fn hold(actions: *mut Actions, fd: c_int) -> Result<c_int, c_int> {
    /// As high as the library's own descriptors.
    const HIGH: c_int = 900;
    // SAFETY: no memory is touched.
    let high = unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, HIGH) } as c_int;
    let kept = if high < 0 { fd } else { high };
    if high >= 0 {
        real::close(fd);
    }
    for held in &HELD {
        if held.actions.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            held.fd.store(kept, Ordering::Relaxed);
            held.actions.store(actions as usize, Ordering::Release);
            return Ok(kept);
        }
    }
    real::close(kept);
    Err(libc::ENOMEM)
}

/// Opens the file in the pool that a list of file actions names; a positive errno when that fails.
unsafe fn open_for_list(
    actions: *mut Actions,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> Result<c_int, c_int> {
    // SAFETY: a C string.
    let fd = unsafe { open_any(libc::AT_FDCWD, path, flags | libc::O_CLOEXEC, mode) };
    if fd < 0 {
        return Err(-fd as c_int);
    }
    hold(actions, fd as c_int)
}

interpose! {
    /// posix_spawn_file_actions_addopen(3). A file of the pool is opened now rather than in the child.
    posix_spawn_file_actions_addopen = fn(
        actions: *mut Actions,
        fd: c_int,
        path: *const c_char,
        flags: c_int,
        mode: libc::mode_t
    ) -> c_int {
        // SAFETY: libc's contract.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, path, false, true) {
                return real::libc_own::posix_spawn_file_actions_addopen(actions, fd, path, flags, mode);
            }
            match open_for_list(actions, path, flags, mode) {
                Ok(opened) => libc::posix_spawn_file_actions_adddup2(actions, opened, fd),
                Err(errno) => errno,
            }
        }
    }

    /// posix_spawn_file_actions_addchdir_np(3)
    posix_spawn_file_actions_addchdir_np = fn(actions: *mut Actions, path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, path, false, true) {
                return real::libc_own::posix_spawn_file_actions_addchdir_np(actions, path);
            }
            match open_for_list(actions, path, libc::O_RDONLY | libc::O_DIRECTORY, 0) {
                Ok(opened) => real::libc_own::posix_spawn_file_actions_addfchdir_np(actions, opened),
                Err(errno) => errno,
            }
        }
    }

    /// posix_spawn_file_actions_destroy(3)
    posix_spawn_file_actions_destroy = fn(actions: *mut Actions) -> c_int {
        for held in HELD.iter().filter(|held| held.actions.load(Ordering::Acquire) == actions as usize) {
            real::close(held.fd.swap(-1, Ordering::Relaxed));
            held.actions.store(0, Ordering::Release);
        }
        // SAFETY: libc's contract.
        unsafe { real::libc_own::posix_spawn_file_actions_destroy(actions) }
    }

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
