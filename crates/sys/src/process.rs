//! What the kernel shows of a process in `/proc/PID/stat`, and a start without the preload library.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Starts this program again without `LD_PRELOAD`, if that is set: a process that serves a pool would wait for itself
/// under the pool's preload library. Must be called first. Returns the error if the program cannot be started again.
pub fn shed_preload() -> io::Result<()> {
    match std::env::var_os("LD_PRELOAD") {
        None => Ok(()),
        Some(_) => Err(Command::new("/proc/self/exe")
            .args(std::env::args_os().skip(1))
            .env_remove("LD_PRELOAD")
            .exec()),
    }
}

/// Some fields of `/proc/PID/stat`; see proc_pid_stat(5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// `R`, `S`, `D`, `Z`, ....
    pub state: u8,
    /// The parent's number.
    pub parent: u32,
    /// When it started, in clock ticks since boot. Together with the process's number this identifies it uniquely.
    pub start_ticks: u64,
    /// Where its environment starts in its memory; 0 for a process that this one may not trace.
    pub environment_start: u64,
}

impl Stat {
    /// The fields of the process with this number. [`io::ErrorKind::NotFound`] when there is no such process or no
    /// `/proc`.
    pub fn of(pid: u32) -> io::Result<Stat> {
        let bytes = std::fs::read(format!("/proc/{pid}/stat"))?;
        Stat::parse(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(bytes: &[u8]) -> Option<Stat> {
        // The second field, the program's name in parentheses, may hold anything.
        let name_end = bytes.iter().rposition(|&b| b == b')')?;
        let fields: Vec<&str> =
            std::str::from_utf8(&bytes[name_end + 1..]).ok()?.split_ascii_whitespace().collect();
        // Numbered as in the manual page, which counts from 1: the state is the third.
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Stat {
            state: *field(3)?.as_bytes().first()?,
            parent: field(4)?.parse().ok()?,
            start_ticks: field(22)?.parse().ok()?,
            environment_start: field(50)?.parse().ok()?,
        })
    }

    /// True for a process that has ended and was not waited for yet.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_this_process_has_its_parent_and_an_environment() {
        let stat = Stat::of(std::process::id()).unwrap();
        assert_eq!(stat.parent, std::os::unix::process::parent_id());
        assert!(stat.start_ticks > 0 && stat.environment_start > 0 && !stat.has_ended());
        assert_eq!(Stat::of(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn of_a_child_that_was_not_waited_for_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while !Stat::of(child.id()).unwrap().has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
    }

    #[test]
    fn parse_is_not_misled_by_the_programs_name() {
        let mut line = b"7 (a) R 1\xff\n) S 12 ".to_vec();
        line.extend((5..=52).map(|number| format!("{number} ")).collect::<String>().bytes());
        let found = Stat { state: b'S', parent: 12, start_ticks: 22, environment_start: 50 };
        assert_eq!(Stat::parse(&line), Some(found));
        assert_eq!(Stat::parse(b"7 (a) S 12"), None);
        assert_eq!(Stat::parse(b""), None);
    }
}
