//! Runs this program's own verbs for a job, and takes the reason of a failure.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The longest pause between two looks.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How often it is looked whether the job was given up.
const ASK: Duration = Duration::from_millis(500);
/// Longer reasons are cut: they are shown in one column of squeue.
const REASON_MAX: usize = 300;
/// What is read of a command's messages, and of what it prints.
const SAID_MAX: u64 = 1 << 16;
const PRINTED_MAX: u64 = 1 << 24;
/// The reason of what was given up.
pub(crate) const ENDED: &str = "the job was torn down";

/// This program with other words.
pub(crate) fn own(words: &[&str]) -> std::result::Result<Command, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null());
    Ok(command)
}

/// Runs a verb on a pool. The error is its reason, in one line.
pub(crate) fn forebay(
    pool: &Path,
    words: &[&str],
    is_over: impl Fn() -> bool,
) -> std::result::Result<(), String> {
    let mut command = own(words)?;
    command.env("FOREBAY_POOL", pool);
    finish(command, is_over)
}

/// Runs a verb on a pool, and returns what it prints. The error is its reason, in one line.
pub(crate) fn printed(pool: &Path, words: &[&str]) -> std::result::Result<String, String> {
    let output = own(words)?.env("FOREBAY_POOL", pool).output().map_err(|e| e.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(reason(&String::from_utf8_lossy(&output.stderr))),
    }
}

/// Runs a verb on a pool, and returns what it prints, whether or not it succeeds, and its reason.
pub(crate) fn answered(pool: &Path, words: &[&str]) -> std::result::Result<(String, String), String> {
    let output = own(words)?.env("FOREBAY_POOL", pool).output().map_err(|e| e.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((text(&output.stdout), reason(&text(&output.stderr))))
}

/// The same for one that may take long: it is killed when `is_over` says so.
pub(crate) fn answered_unless(
    pool: &Path,
    words: &[&str],
    is_over: impl Fn() -> bool,
) -> std::result::Result<(String, String), String> {
    let mut command = own(words)?;
    command.env("FOREBAY_POOL", pool);
    let out = tempfile().map_err(|e| format!("cannot keep what it prints: {e}"))?;
    let printed = out.try_clone().map_err(|e| e.to_string())?;
    let (_, said) = watched(command, printed.into(), is_over)?;
    Ok((text_of(out, PRINTED_MAX), reason(&said)))
}

/// Waits for a command, or kills it when `is_over` says so.
pub(crate) fn finish(command: Command, is_over: impl Fn() -> bool) -> std::result::Result<(), String> {
    let (status, said) = watched(command, Stdio::null(), is_over)?;
    if status.success() {
        return Ok(());
    }
    match reason(&said) {
        why if why.is_empty() => Err(format!("it ended with {status}")),
        why => Err(why),
    }
}

/// How a command ended, and its messages. The error is [`ENDED`] if `is_over` had it killed.
fn watched(
    mut command: Command,
    printed: Stdio,
    is_over: impl Fn() -> bool,
) -> std::result::Result<(ExitStatus, String), String> {
    let out = tempfile().map_err(|e| format!("cannot keep its messages: {e}"))?;
    let said = out.try_clone().map_err(|e| e.to_string())?;
    let mut child = command.stdout(printed).stderr(said).spawn().map_err(|e| e.to_string())?;
    let mut looked = Instant::now();
    let mut pause = Duration::from_millis(2);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
        if looked.elapsed() >= ASK {
            looked = Instant::now();
            if is_over() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(ENDED.to_owned());
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_AGAIN);
    };
    Ok((status, text_of(out, SAID_MAX)))
}

/// A file without a name. The daemons that a command starts may keep it open, so it is no pipe.
fn tempfile() -> std::io::Result<std::fs::File> {
    let memory = rustix::fs::memfd_create("forebay-said", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(memory.into())
}

fn text_of(mut file: std::fs::File, most: u64) -> String {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    let _ = file.rewind().and_then(|()| file.take(most).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The message of a command in one line.
pub(crate) fn reason(text: &str) -> String {
    let lines =
        text.lines().map(|line| line.trim().trim_start_matches("forebay: ")).filter(|line| !line.is_empty());
    let joined = lines.collect::<Vec<_>>().join("; ");
    joined.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_one_line_without_control_characters_and_not_too_long() {
        assert_eq!(reason("forebay: cannot do it: why\n  cure\n\x1b[1m"), "cannot do it: why; cure; [1m");
        assert_eq!(reason(&"x".repeat(1000)).len(), REASON_MAX);
        assert_eq!(reason("\n"), "");
    }

    #[test]
    fn finish_gives_the_message_of_a_failure_and_kills_what_is_given_up() {
        let sh = |line: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", line]);
            command
        };
        assert_eq!(finish(sh("true"), || false), Ok(()));
        assert_eq!(finish(sh("echo forebay: no >&2; exit 3"), || false), Err("no".to_owned()));
        assert!(finish(sh("exit 3"), || false).unwrap_err().contains('3'));
        assert_eq!(finish(sh("exec sleep 600"), || true), Err(ENDED.to_owned()));
    }
}
