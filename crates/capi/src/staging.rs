//! Staging: `forebay_stage` of include/forebay.h.
//!
//! The `forebay` command does the staging, as a process of its own. So storage that hangs does not block a thread of
//! the host program, and a killed host program leaves the same state as a killed command. The command is searched
//! beside this library, and in `bin` beside the library's directory. It is started by clone(2) without a signal at its
//! end, so that neither SIGCHLD nor wait(2) reports to the host program a child that it did not start. The output of
//! the command goes to files in memory, which are read when it has ended.
//!
//! One thread at a time uses a `forebay_stage`, in the process that started it.

use std::ffi::{CStr, CString, OsString};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::raw::{c_char, c_int};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use forebay_client::Pool;
use forebay_types::Code;

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{forebay_stage_status, FOREBAY_STAGE_ALL_OR_NOTHING, FOREBAY_STAGE_VERIFY};
use crate::public::Text;
use crate::text::store;

/// The manifest's path in the command's process: its descriptor 3.
const MANIFEST: &CStr = c"/proc/self/fd/3";

/// The size of the kernel's set of signals, which is not libc's.
const SIGNAL_SET_BYTES: usize = 8;

/// Staging that was started.
#[allow(non_camel_case_types)]
pub struct forebay_stage {
    process: libc::pid_t,
    report: OwnedFd,
    words: OwnedFd,
}

/// A new file without a name.
fn unnamed() -> Result<OwnedFd, Failed> {
    // SAFETY: the name is NUL-terminated; the descriptor is new and owned here. The call is made by number, so that no
    // library interposes it.
    unsafe {
        let fd = libc::syscall(libc::SYS_memfd_create, c"forebay-stage".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(Failed::last());
        }
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}

/// The command that belongs to this library.
fn command() -> Result<CString, Failed> {
    // SAFETY: the structure is filled on success. The loader owns its strings, which stay valid.
    let library = unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(command as *const libc::c_void, &mut found) == 0 || found.dli_fname.is_null() {
            return Err(Code::NotFound.into());
        }
        PathBuf::from(OsString::from_vec(CStr::from_ptr(found.dli_fname).to_bytes().to_vec()))
    };
    let directory = library.parent().unwrap_or(Path::new("."));
    for candidate in [directory.join("forebay"), directory.join("../bin/forebay")] {
        let path = CString::new(candidate.as_os_str().as_bytes()).map_err(|_| Code::NotFound)?;
        // SAFETY: the path is NUL-terminated.
        if unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), libc::X_OK) } == 0 {
            return Ok(path);
        }
    }
    Err(Code::NotFound.into())
}

/// A field of a manifest (`crates/stage/src/manifest.rs`), quoted.
fn quoted(path: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for &byte in path {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            0..=31 | 127 => out.extend(format!("\\x{byte:02x}").bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

/// Writes `bytes` to a new file from its start.
fn fill(file: &OwnedFd, bytes: &[u8]) -> Result<(), Failed> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(file.try_clone().map_err(|_| Failed::errno(libc::EMFILE))?);
    file.write_all_at(bytes, 0).map_err(|_| Code::NoSpace.into())
}

fn pointers(words: &[CString]) -> Vec<*const c_char> {
    words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
}

/// Starts the command with `manifest` as descriptor 3. Returns its process.
fn launch(
    command: &CStr,
    arguments: &[CString],
    manifest: &OwnedFd,
    stage: (&OwnedFd, &OwnedFd),
) -> Result<libc::pid_t, Failed> {
    let environment: Vec<CString> = std::env::vars_os()
        .filter(|(name, _)| name != "LD_PRELOAD")
        .filter_map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok())
        .collect();
    let (arguments, environment) = (pointers(arguments), pointers(&environment));
    let places = [(stage.0.as_raw_fd(), 1), (stage.1.as_raw_fd(), 2), (manifest.as_raw_fd(), 3)];
    // Copies with numbers above the final ones, so that no descriptor is overwritten before it was duplicated.
    let above: Vec<OwnedFd> = places
        .iter()
        .map(|(fd, _)| {
            // SAFETY: plain system call; the descriptor is new and owned here.
            unsafe {
                let copy = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, 10);
                if copy < 0 {
                    return Err(Failed::last());
                }
                Ok(OwnedFd::from_raw_fd(copy))
            }
        })
        .collect::<Result<_, Failed>>()?;
    // SAFETY: as fork(2), but no signal reports the child's end. The child only makes system calls, with arguments that
    // were prepared before, and ends or becomes another program.
    unsafe {
        let process = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
        if process != 0 {
            return match process {
                1.. => Ok(process as libc::pid_t),
                _ => Err(Failed::last()),
            };
        }
        for (fd, (_, place)) in above.iter().zip(places) {
            libc::syscall(libc::SYS_dup3, fd.as_raw_fd(), place, 0);
        }
        // `forebay_stage_stop` sends SIGTERM, which may arrive before the command handles it. Then it must end the
        // command, whether the host has a handler for it, ignores it or blocks it.
        let none = [0u64; 4];
        libc::syscall(libc::SYS_rt_sigaction, libc::SIGTERM, &raw const none, 0, SIGNAL_SET_BYTES);
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, SIGNAL_SET_BYTES);
        // The command must not keep the host's descriptors open.
        libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0);
        libc::syscall(libc::SYS_execve, command.as_ptr(), arguments.as_ptr(), environment.as_ptr());
        libc::syscall(libc::SYS_exit_group, 127);
        libc::abort()
    }
}

/// Starts a stage of either direction.
fn start(pool: &Pool, verb: &CStr, from: &[u8], to: &[u8], flags: c_int) -> Result<forebay_stage, Failed> {
    if flags & !(FOREBAY_STAGE_VERIFY | FOREBAY_STAGE_ALL_OR_NOTHING) != 0 || from.is_empty() || to.is_empty()
    {
        return Err(INVALID);
    }
    let command = command()?;
    let mut line = Vec::new();
    quoted(from, &mut line);
    line.push(b' ');
    quoted(to, &mut line);
    line.push(b'\n');
    let (manifest, report, words) = (unnamed()?, unnamed()?, unnamed()?);
    fill(&manifest, &line)?;
    let directory = CString::new(pool.directory()).map_err(|_| INVALID)?;
    let mut arguments: Vec<CString> =
        [c"forebay", c"--pool"].into_iter().map(CStr::to_owned).chain([directory]).collect();
    let tail = [verb, c"--json", c"--no-progress", c"--manifest", MANIFEST];
    arguments.extend(tail.into_iter().map(CStr::to_owned));
    arguments.extend((flags & FOREBAY_STAGE_VERIFY != 0).then(|| c"--verify".to_owned()));
    arguments.extend((flags & FOREBAY_STAGE_ALL_OR_NOTHING != 0).then(|| c"--all-or-nothing".to_owned()));
    let process = launch(&command, &arguments, &manifest, (&report, &words))?;
    Ok(forebay_stage { process, report, words })
}

/// The whole contents of a file.
fn contents(file: &OwnedFd) -> String {
    use std::io::{Seek, SeekFrom};
    let mut text = Vec::new();
    if let Ok(copy) = file.try_clone() {
        let mut file = std::fs::File::from(copy);
        let _ = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut text));
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The text of a JSON string that begins after its opening quotation mark. None if it is malformed.
fn unescaped(string: &str) -> Option<String> {
    let (mut text, mut rest) = (Vec::new(), string.chars());
    loop {
        let unit = match rest.next()? {
            '"' => return Some(String::from_utf16_lossy(&text)),
            '\\' => match rest.next()? {
                'b' => 0x08,
                't' => 0x09,
                'n' => 0x0a,
                'f' => 0x0c,
                'r' => 0x0d,
                'u' => {
                    let (digits, behind) = rest.as_str().split_at_checked(4)?;
                    rest = behind.chars();
                    u16::from_str_radix(digits, 16).ok()?
                }
                itself @ ('"' | '\\' | '/') => itself as u16,
                _ => return None,
            },
            other => {
                text.extend_from_slice(other.encode_utf16(&mut [0; 2]));
                continue;
            }
        };
        text.push(unit);
    }
}

/// The number or text behind the first `"key":` of a report, which `forebay` prints with one field a line.
fn field(report: &str, key: &str) -> Option<String> {
    let (_, behind) = report.split_once(&format!("\"{key}\":"))?;
    let value = behind.lines().next()?.trim();
    match value.strip_prefix('"') {
        Some(string) => unescaped(string),
        None => Some(value.trim_end_matches(',').to_owned()),
    }
}

impl forebay_stage {
    /// The status of the process if it has ended. Waits for its end if `waits` is true.
    fn ended(&self, waits: bool) -> Result<Option<c_int>, Failed> {
        let mut status = 0;
        let options = libc::__WALL | if waits { 0 } else { libc::WNOHANG };
        loop {
            // SAFETY: the status is writable. The call is made by number, as libc's function may cancel the thread.
            let found = unsafe {
                libc::syscall(
                    libc::SYS_wait4,
                    self.process,
                    &raw mut status,
                    options,
                    std::ptr::null::<libc::rusage>(),
                )
            };
            // SAFETY: errno of this thread.
            match (found, unsafe { *libc::__errno_location() }) {
                (0, _) => return Ok(None),
                (1.., _) => return Ok(Some(status)),
                (_, libc::EINTR) => {}
                (_, errno) => return Err(Failed::errno(errno)),
            }
        }
    }

    /// The result, and the status for the caller.
    fn outcome(&self, ended: c_int) -> (Result<(), Failed>, forebay_stage_status) {
        let (report, said) = (contents(&self.report), contents(&self.words));
        let number = |key| field(&report, key).and_then(|value| value.parse().ok()).unwrap_or(0);
        let mut status = forebay_stage_status {
            files: number("files"),
            bytes: number("bytes"),
            skipped_files: number("skipped_files"),
            failed_files: number("errors_total"),
            words: [0; 512],
        };
        if libc::WIFEXITED(ended) && libc::WEXITSTATUS(ended) == 0 {
            return (Ok(()), status);
        }
        if libc::WIFSIGNALED(ended) {
            store("staging was stopped: start it again to go on", &mut status.words);
            return (Err(Code::Interrupted.into()), status);
        }
        let named = field(&report, "code").or_else(|| field(&said, "code"));
        let code =
            Code::ALL.into_iter().find(|code| Some(code.name()) == named.as_deref()).unwrap_or(Code::Io);
        let first = ["path", "what", "why", "cure"].map(|key| field(&report, key));
        let listed: Vec<String> = first.into_iter().flatten().filter(|word| !word.is_empty()).collect();
        let words = if listed.is_empty() { said.trim().to_owned() } else { listed.join(": ") };
        store(&words, &mut status.words);
        (Err(code.into()), status)
    }
}

/// True if everything was copied. False if the stage is still running and `waits` is false.
///
/// # Safety
/// `stage` is null, or was started and its end was not reported yet. After its end was reported, it is not used again.
unsafe fn end(
    stage: *mut forebay_stage,
    out: Option<&mut forebay_stage_status>,
    waits: bool,
) -> Result<bool, Failed> {
    // SAFETY: the caller's promise.
    let held = unsafe { stage.as_ref() }.ok_or(FAULT)?;
    let ended = match held.ended(waits) {
        Ok(None) => return Ok(false),
        ended => ended,
    };
    // SAFETY: the caller's promise.
    let held = unsafe { Box::from_raw(stage) };
    let (outcome, status) = held.outcome(ended?.unwrap_or(0));
    if let Some(out) = out {
        *out = status;
    }
    outcome.map(|()| true)
}

/// Starts a stage.
fn begin(
    pool: &Pool,
    verb: &CStr,
    (from, to): (Text<'_>, Text<'_>),
    flags: c_int,
    out: Option<&mut *mut forebay_stage>,
) -> Result<(), Failed> {
    let out = out.ok_or(FAULT)?;
    let stage = start(pool, verb, from.ok_or(FAULT)?, to.ok_or(FAULT)?, flags)?;
    *out = Box::into_raw(Box::new(stage));
    Ok(())
}

pub(crate) fn stage_in_start(
    pool: &Pool,
    source: Text<'_>,
    path: Text<'_>,
    flags: c_int,
    out: Option<&mut *mut forebay_stage>,
) -> Result<(), Failed> {
    begin(pool, c"stage-in", (source, path), flags, out)
}

pub(crate) fn stage_out_start(
    pool: &Pool,
    path: Text<'_>,
    destination: Text<'_>,
    flags: c_int,
    out: Option<&mut *mut forebay_stage>,
) -> Result<(), Failed> {
    begin(pool, c"stage-out", (path, destination), flags, out)
}

/// # Safety
/// As of [`end`].
pub(crate) unsafe fn stage_test(
    stage: *mut forebay_stage,
    status: Option<&mut forebay_stage_status>,
) -> Result<bool, Failed> {
    // SAFETY: the caller's promise.
    unsafe { end(stage, status, false) }
}

/// # Safety
/// As of [`end`].
pub(crate) unsafe fn stage_wait(
    stage: *mut forebay_stage,
    status: Option<&mut forebay_stage_status>,
) -> Result<bool, Failed> {
    // SAFETY: the caller's promise.
    unsafe { end(stage, status, true) }
}

pub(crate) fn stage_stop(stage: &forebay_stage) -> Result<(), Failed> {
    // SAFETY: plain system call. The process has not been waited for, so no other process has its number.
    if unsafe { libc::kill(stage.process, libc::SIGTERM) } != 0 {
        return Err(Failed::last());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_path_is_what_a_manifest_reads() {
        let mut out = Vec::new();
        quoted(b"/a \"b\"\\c\n:#", &mut out);
        assert_eq!(out, b"\"/a \\\"b\\\"\\\\c\\x0a:#\"");
    }

    #[test]
    fn field_of_a_report_is_its_value() {
        let report =
            "{\n  \"files\": 12,\n  \"errors\": [\n    {\n      \"code\": \"no-space\"\n    }\n  ]\n}\n";
        assert_eq!(field(report, "files").as_deref(), Some("12"));
        assert_eq!(field(report, "code").as_deref(), Some("no-space"));
        assert_eq!(field(report, "bytes"), None);
    }

    #[test]
    fn field_of_a_report_is_unescaped() {
        let report = r#"{
  "path": "/in/\"a\\b\"",
  "what": "tab\t, bell\u0007, ö and \ud83d\ude00",
  "why": "ends with \"",
  "cure": "\u12"
}"#;
        assert_eq!(field(report, "path").as_deref(), Some(r#"/in/"a\b""#));
        assert_eq!(field(report, "what").as_deref(), Some("tab\t, bell\u{7}, ö and \u{1f600}"));
        assert_eq!(field(report, "why").as_deref(), Some("ends with \""));
        assert_eq!(field(report, "cure"), None);
    }

    #[test]
    fn launched_command_ends_at_a_sigterm_that_its_starter_blocks_and_ignores() {
        let (manifest, report, words) = (unnamed().unwrap(), unnamed().unwrap(), unnamed().unwrap());
        // SAFETY: plain system calls of this thread. No other test of this crate uses the signal.
        let process = unsafe {
            let mut term: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&mut term, libc::SIGTERM);
            libc::pthread_sigmask(libc::SIG_BLOCK, &term, std::ptr::null_mut());
            let before = libc::signal(libc::SIGTERM, libc::SIG_IGN);
            let arguments = [c"sleep".to_owned(), c"60".to_owned()];
            let process = launch(c"/bin/sleep", &arguments, &manifest, (&report, &words)).unwrap();
            libc::signal(libc::SIGTERM, before);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &term, std::ptr::null_mut());
            process
        };
        let stage = forebay_stage { process, report, words };
        stage_stop(&stage).unwrap();
        let status = stage.ended(true).unwrap().unwrap();
        assert_eq!(libc::WTERMSIG(status), libc::SIGTERM);
    }
}
