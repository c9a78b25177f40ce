//! Metadata operations per second.

use crate::calls::{c_path, check, close, create, write_all};
use crate::gate::Gate;
use crate::orders::Orders;
use std::ffi::CString;

/// The phases, in the order in which the driver times them.
pub(crate) const PHASES: [&str; 13] = [
    "create",
    "stat, empty file",
    "stat, file with data",
    "stat, directory",
    "stat, absent name",
    "stat, new absent name",
    "open and close",
    "open, read 4 KiB, close",
    "readdir",
    "readdir with attributes",
    "rename",
    "unlink",
    "mkdir and rmdir",
];
/// Files for each directory beside them; each directory's attributes are read this often. The same holds for absent
/// names, except for those that are new each time.
const FILES_PER_DIRECTORY: usize = 10;

/// Operations per second of each phase, for all processes together.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let (files, processes) = (orders.files, orders.processes);
    let directories = (files / FILES_PER_DIRECTORY).max(1);
    let listed = if orders.shared { (files + directories) * processes } else { files + directories };
    let seconds = Gate::run(processes, |gate| work(gate, orders, directories, listed))?;
    let counts: [usize; PHASES.len()] =
        [files, files, files, files, files, files, files, files, listed, listed, files, files, directories];
    assert_eq!(seconds.len(), PHASES.len());
    Ok(PHASES.into_iter().zip(counts.iter().zip(seconds).map(|(n, s)| (n * processes) as f64 / s)).collect())
}

fn work(gate: &mut Gate, orders: &Orders, directories: usize, listed: usize) -> Result<(), String> {
    let files = orders.files;
    let home = |process: usize| {
        if orders.shared {
            orders.root.clone()
        } else {
            format!("{}/p{process}", orders.root)
        }
    };
    let process = gate.process;
    let mine = home(process);
    if !orders.shared {
        make_directory(&CString::new(mine.clone()).unwrap_or_default())?;
    }
    // As in mdtest, a process works on files that the next process made, so that it does not benefit from state of its
    // own.
    let next = (process + 1) % orders.processes;
    let names = |place: &str, kind: &str, who: usize, count: usize| -> Vec<CString> {
        (0..count).map(|i| c_path(place, &format!("{kind}.{who}.{i}"))).collect()
    };
    let own = names(&mine, "file", process, files);
    let theirs = names(&home(next), "file", next, files);
    let their_dirs = names(&home(next), "dir", next, directories);
    let absent = names(&home(next), "none", next, directories);
    let new_absent = names(&home(next), "nothing", next, files);
    let renamed = names(&mine, "name", process, files);

    gate.timed(|| own.iter().try_for_each(|path| create(path).map(close)))?;
    gate.timed(|| theirs.iter().try_for_each(stat))?;
    for path in &own {
        // SAFETY: the string ends in NUL.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY) };
        check(fd, "open", path)?;
        write_all(fd, &[0x5a; 4096])?;
        close(fd);
    }
    names(&mine, "dir", process, directories).iter().try_for_each(make_directory)?;
    gate.timed(|| theirs.iter().try_for_each(stat))?;
    gate.timed(|| (0..files).try_for_each(|i| stat(&their_dirs[i % directories])))?;
    let is_absent = |path: &CString| match is_there(path) {
        true => Err(format!("{} is there", path.to_string_lossy())),
        false => Ok(()),
    };
    gate.timed(|| (0..files).try_for_each(|i| is_absent(&absent[i % directories])))?;
    gate.timed(|| new_absent.iter().try_for_each(is_absent))?;
    gate.timed(|| {
        theirs.iter().try_for_each(|path| {
            // SAFETY: the string ends in NUL.
            let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) };
            check(fd, "open", path).map(|()| close(fd))
        })
    })?;
    gate.timed(|| theirs.iter().try_for_each(read_small))?;
    gate.timed(|| list(&home(next), false, listed))?;
    gate.timed(|| list(&home(next), true, listed))?;
    gate.timed(|| {
        own.iter().zip(&renamed).try_for_each(|(from, to)| {
            // SAFETY: the strings end in NUL.
            check(unsafe { libc::rename(from.as_ptr(), to.as_ptr()) }, "rename", from)
        })
    })?;
    gate.timed(|| {
        renamed.iter().try_for_each(|path| {
            // SAFETY: the string ends in NUL.
            check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", path)
        })
    })?;
    let made = names(&mine, "made", process, directories);
    gate.timed(|| {
        made.iter().try_for_each(make_directory)?;
        made.iter().try_for_each(remove_directory)
    })?;
    names(&mine, "dir", process, directories).iter().try_for_each(remove_directory)?;
    if !orders.shared {
        remove_directory(&CString::new(mine.clone()).unwrap_or_default())?;
    }
    Ok(())
}

pub(crate) fn stat(path: &CString) -> Result<(), String> {
    if is_there(path) {
        return Ok(());
    }
    check(-1, "stat", path)
}

/// Reads a file of 4 KiB as programs read small files.
fn read_small(path: &CString) -> Result<(), String> {
    let mut bytes = [0u8; 4096];
    // SAFETY: the string ends in NUL; the buffer is ours and of the length given.
    let n = unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
        check(fd, "open", path)?;
        let n = libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len());
        close(fd);
        n
    };
    if n == 4096 {
        return Ok(());
    }
    Err(format!("{} gave {n} bytes", path.to_string_lossy()))
}

fn is_there(path: &CString) -> bool {
    // SAFETY: all zeros is a valid struct stat.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the string ends in NUL, the structure is ours.
    unsafe { libc::stat(path.as_ptr(), &mut stat) == 0 }
}

fn make_directory(path: &CString) -> Result<(), String> {
    // SAFETY: the string ends in NUL.
    check(unsafe { libc::mkdir(path.as_ptr(), 0o755) }, "mkdir", path)
}

fn remove_directory(path: &CString) -> Result<(), String> {
    // SAFETY: the string ends in NUL.
    check(unsafe { libc::rmdir(path.as_ptr()) }, "rmdir", path)
}

/// Reads a directory as `ls` or as `ls -l` does, and checks the number of entries.
fn list(directory: &str, attributes: bool, expected: usize) -> Result<(), String> {
    let path = CString::new(directory).unwrap_or_default();
    // SAFETY: the string ends in NUL.
    let stream = unsafe { libc::opendir(path.as_ptr()) };
    if stream.is_null() {
        return check(-1, "opendir", &path);
    }
    let mut seen = 0;
    // SAFETY: the stream is open until closedir; an entry is read before the next; names end in NUL.
    unsafe {
        let under = libc::dirfd(stream);
        loop {
            let entry = libc::readdir(stream);
            if entry.is_null() {
                break;
            }
            let name = (*entry).d_name.as_ptr();
            if *name == b'.' as libc::c_char {
                continue;
            }
            seen += 1;
            if attributes {
                let mut stat: libc::stat = std::mem::zeroed();
                if libc::fstatat(under, name, &mut stat, libc::AT_SYMLINK_NOFOLLOW) != 0 {
                    return check(-1, "fstatat in", &path);
                }
            }
        }
        libc::closedir(stream);
    }
    if seen == expected {
        return Ok(());
    }
    Err(format!("{directory} listed {seen} entries of {expected}"))
}
