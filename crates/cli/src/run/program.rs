//! The program of a run: found as a shell would find it, also in the pool, and inspected for properties that would hide
//! the pool from it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use forebay_client::{Fail, PathBuffer, Pool};
use forebay_types::{Code, Error};

use crate::pool;

/// Exit status of a program that cannot be started, and of one that is not found, as env(1) has them.
pub(super) const CANNOT_START: u8 = 126;
/// See [`CANNOT_START`].
pub(super) const NOT_FOUND: u8 = 127;

/// How many nested `#!` interpreters are followed.
const SHEBANG_DEPTH: usize = 4;
/// How many program headers are read.
const HEADERS_MAX: u16 = 1024;
const PT_INTERP: u32 = 3;

/// A failure with its exit status.
pub(super) type Refused = (u8, Error);

/// What to start.
#[derive(Debug)]
pub(super) struct Target {
    /// The path given to exec.
    pub(super) path: PathBuf,
    /// Arguments that replace the first one: those of the interpreter, for a script in the pool.
    pub(super) before: Option<Vec<OsString>>,
    /// The descriptor that `path` refers to, if the program is a file in the pool.
    _fd: Option<OwnedFd>,
    warnings: Vec<String>,
}

impl Target {
    /// A program outside the pool.
    pub(super) fn outside(path: PathBuf) -> Target {
        let warnings = warnings(&path, &path.display().to_string(), 0);
        Target { path, before: None, _fd: None, warnings }
    }

    /// Why the program will not see the pool, or not all of it.
    pub(super) fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// True for the prefix and paths under it.
pub(super) fn is_within(name: &OsStr, prefix: &Path) -> bool {
    Path::new(name).starts_with(prefix)
}

/// The error when a directory is named as a program.
fn is_a_directory(name: &str) -> Refused {
    let error = Error::new(Code::IsDirectory, format!("cannot run {name}")).why("it is a directory");
    (CANNOT_START, error.cure("name a program behind the `--`, with its arguments"))
}

/// Finds a program by its path, or by its name along PATH.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, Refused> {
    let what = || format!("cannot run {}", name.to_string_lossy());
    let refused = |path: &Path, e: rustix::io::Errno| {
        let error = Error::io(what(), &e.into());
        (CANNOT_START, error.cure(format!("is {} executable? (chmod +x)", path.display())))
    };
    if name.is_empty() {
        return Err((NOT_FOUND, Error::new(Code::NotFound, what()).why("its name is empty")));
    }
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(rustix::io::Errno::ISDIR) => Err(is_a_directory(&name.to_string_lossy())),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {
                Err((NOT_FOUND, Error::new(Code::NotFound, what()).why("there is no such file")))
            }
            Err(e) => Err(refused(&path, e)),
        };
    }
    let list = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut denied = None;
    for dir in std::env::split_paths(&list) {
        let path = if dir.as_os_str().is_empty() { Path::new(".").join(name) } else { dir.join(name) };
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(rustix::io::Errno::ACCESS) => denied = denied.or(Some(path)),
            Err(_) => {}
        }
    }
    Err(match denied {
        Some(path) => refused(&path, rustix::io::Errno::ACCESS),
        None => {
            let error = Error::new(Code::NotFound, what()).why("no directory of PATH has it");
            (NOT_FOUND, error.cure("give its path, or load the module that provides it"))
        }
    })
}

fn executable(path: &Path) -> Result<(), rustix::io::Errno> {
    let stat = rustix::fs::stat(path)?;
    if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        return Err(rustix::io::Errno::ISDIR);
    }
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK)
}

/// A program in the pool. The kernel gets its backing file; for a script it gets the interpreter with the script's
/// path, and the interpreter sees the pool.
pub(super) fn within(dir: &Path, name: &OsStr, prefix: &Path) -> Result<Target, Refused> {
    let shown = name.to_string_lossy().into_owned();
    let failed = |status: u8, e: Error| (status, Error { what: format!("cannot run {shown}"), ..e });
    let attached = Pool::attach(dir).map_err(|e| (crate::failure::FOREBAY_FAILED, e))?;
    attached.set_prefix(prefix.as_os_str().as_bytes());
    let relative = Path::new(name).strip_prefix(prefix).unwrap_or(Path::new(name));
    let place = pool::place(relative.as_os_str().as_bytes());
    let mut escape = PathBuffer::new();
    let status_of = |e: &Error| if e.code == Code::NotFound { NOT_FOUND } else { CANNOT_START };
    let worded = |result| pool::worded(result, "run", name.as_bytes());
    let found = attached.resolve(place, true, &mut escape);
    if relative.as_os_str().is_empty() || found.as_ref().is_ok_and(|entry| entry.attr.is_directory()) {
        return Err(is_a_directory(&shown));
    }
    worded(attached.access(place, libc::X_OK, true, true, &mut escape).map(|()| 0)).map_err(|e| {
        let denied = e.code == Code::AccessDenied;
        let e = if denied { e.cure(format!("is {shown} executable? (chmod +x)")) } else { e };
        failed(status_of(&e), e)
    })?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let fd = match attached.open_unwaiting(place, flags, 0, &mut escape) {
        // SAFETY: the descriptor is new and nobody else's.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        // The file is on another node: the pool's mount can open it.
        Err(Fail::Escape) if is_by_mount(escape.as_bytes()) => {
            let path = Path::new(OsStr::from_bytes(escape.as_bytes()));
            File::open(path).map(OwnedFd::from).map_err(|e| Error::io("cannot open it by the mount", &e))
        }
        Err(fail) => pool::worded(Err(fail), "run", name.as_bytes()),
    };
    let fd = fd.map_err(|e| failed(status_of(&e), e))?;
    let path = forebay_sys::descriptor::path(&fd);
    let mut target =
        Target { warnings: warnings(&path, &shown, 0), path: path.clone(), before: None, _fd: Some(fd) };
    if let Some((interpreter, argument)) = File::open(&path).ok().and_then(|f| shebang(&f)) {
        let mut before = vec![interpreter.clone().into_os_string()];
        before.extend(argument);
        before.push(name.to_owned());
        target.path = interpreter;
        target.before = Some(before);
    }
    Ok(target)
}

/// True for the path of an inode in the pool's mount.
fn is_by_mount(path: &[u8]) -> bool {
    path.rsplit(|b| *b == b'/').next().and_then(forebay_client::inode_of_name).is_some()
}

/// The interpreter and argument in a script's first line.
fn shebang(file: &File) -> Option<(PathBuf, Option<OsString>)> {
    let mut line = [0u8; 256];
    let n = file.read_at(&mut line, 0).ok()?;
    let line = line[..n].strip_prefix(b"#!")?;
    let line = line.split(|&b| b == b'\n').next()?.trim_ascii();
    let cut = line.iter().position(|b| matches!(b, b' ' | b'\t')).unwrap_or(line.len());
    let (interpreter, rest) = line.split_at(cut);
    let rest = rest.trim_ascii();
    if interpreter.is_empty() {
        return None;
    }
    let argument = (!rest.is_empty()).then(|| OsString::from_vec(rest.to_vec()));
    Some((PathBuf::from(OsString::from_vec(interpreter.to_vec())), argument))
}

/// Why a preloaded library would not work in the program at `path`.
fn warnings(path: &Path, name: &str, depth: usize) -> Vec<String> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    if let Some((interpreter, argument)) = shebang(&file) {
        if depth >= SHEBANG_DEPTH {
            return Vec::new();
        }
        // `#!/usr/bin/env python3` runs python3.
        let real = match (interpreter.file_name(), argument) {
            (Some(env), Some(program)) if env == "env" => find(&program).unwrap_or(interpreter),
            _ => interpreter,
        };
        return warnings(&real, &format!("{name} ({})", real.display()), depth + 1);
    }
    let mut all = Vec::new();
    match linkage(&file) {
        Linkage::Static => all.push(format!(
            "{name} is linked statically: it cannot see the pool; link it dynamically, or stage out what it needs"
        )),
        Linkage::OtherLoader(loader) => {
            all.push(format!("{name} uses another C library ({loader}): it may not see the pool"));
        }
        Linkage::Dynamic | Linkage::Unknown => {}
    }
    if file.metadata().is_ok_and(|m| changes_identity(&m)) {
        all.push(format!("{name} runs as another user or group: the loader hides the pool from it"));
    }
    all
}

fn changes_identity(m: &std::fs::Metadata) -> bool {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    m.mode() & libc::S_ISUID != 0 && m.uid() != uid || m.mode() & libc::S_ISGID != 0 && m.gid() != gid
}

#[derive(PartialEq, Eq, Debug)]
enum Linkage {
    Dynamic,
    Static,
    OtherLoader(String),
    Unknown,
}

/// Reads the ELF header (System V ABI, "Object Files"): a program without PT_INTERP has no loader that would preload.
fn linkage(file: &File) -> Linkage {
    read_linkage(file).unwrap_or(Linkage::Unknown)
}

fn read_linkage(file: &File) -> Option<Linkage> {
    let mut header = [0u8; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    // 64-bit, little-endian: the format that Forebay is built for.
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let start = u64::from_le_bytes(header[32..40].try_into().ok()?);
    let (entry_bytes, count) = (u16_at(54), u16_at(56).min(HEADERS_MAX));
    for i in 0..count {
        let mut entry = [0u8; 56];
        file.read_exact_at(&mut entry, start.checked_add(u64::from(i) * u64::from(entry_bytes))?).ok()?;
        if u32::from_le_bytes(entry[..4].try_into().ok()?) != PT_INTERP {
            continue;
        }
        let offset = u64::from_le_bytes(entry[8..16].try_into().ok()?);
        let bytes = u64::from_le_bytes(entry[32..40].try_into().ok()?).min(4096);
        let mut name = vec![0; bytes as usize];
        file.read_exact_at(&mut name, offset).ok()?;
        let name = String::from_utf8_lossy(name.split(|&b| b == 0).next()?).into_owned();
        let glibc =
            name.rsplit('/').next().is_some_and(|n| n.starts_with("ld-linux") || n.starts_with("ld64"));
        return Some(if glibc { Linkage::Dynamic } else { Linkage::OtherLoader(name) });
    }
    Some(Linkage::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("forebay-program-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn find_distinguishes_missing_from_forbidden() {
        assert_eq!(find(OsStr::new("no-such-program-here")).unwrap_err().0, NOT_FOUND);
        assert_eq!(find(OsStr::new("/no/such")).unwrap_err().0, NOT_FOUND);
        assert_eq!(find(OsStr::new("/etc")).unwrap_err().0, CANNOT_START, "a directory");
        let plain = scratch("plain", b"text");
        assert_eq!(find(plain.as_os_str()).unwrap_err().0, CANNOT_START);
        std::fs::remove_file(plain).unwrap();
        assert!(find(OsStr::new("sh")).unwrap().ends_with("sh"));
    }

    #[test]
    fn linkage_tells_static_from_dynamic() {
        let me = File::open("/proc/self/exe").unwrap();
        assert_eq!(linkage(&me), Linkage::Dynamic);
        // The smallest header, without program headers.
        let mut bytes = vec![0u8; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let path = scratch("static", &bytes);
        assert_eq!(linkage(&File::open(&path).unwrap()), Linkage::Static);
        assert!(warnings(&path, "prog", 0)[0].contains("linked statically"));
        std::fs::remove_file(&path).unwrap();
        let path = scratch("text", b"hello");
        assert_eq!(linkage(&File::open(&path).unwrap()), Linkage::Unknown);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn warnings_of_a_script_are_those_of_its_interpreter() {
        let mut bytes = vec![0u8; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let interpreter = scratch("interpreter", &bytes);
        let script = scratch("script", format!("#!{} -x\n", interpreter.display()).as_bytes());
        let said = warnings(&script, "script", 0);
        assert!(said[0].contains("script (") && said[0].contains("statically"), "{said:?}");
        let script2 = scratch("script2", b"#!/usr/bin/env sh\n");
        assert_eq!(warnings(&script2, "script2", 0), Vec::<String>::new());
        for path in [interpreter, script, script2] {
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn shebang_takes_one_argument_whole() {
        let path = scratch("shebang", b"#! /usr/bin/env -S a b\necho");
        let (interpreter, argument) = shebang(&File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!((interpreter, argument), (PathBuf::from("/usr/bin/env"), Some(OsString::from("-S a b"))));
    }

    #[test]
    fn is_within_takes_the_prefix_and_what_is_below_it() {
        let prefix = Path::new("/forebay");
        assert!(is_within(OsStr::new("/forebay/bin/x"), prefix));
        assert!(is_within(OsStr::new("/forebay"), prefix));
        assert!(!is_within(OsStr::new("/forebays/x"), prefix));
        assert!(!is_within(OsStr::new("x"), prefix));
    }
}
