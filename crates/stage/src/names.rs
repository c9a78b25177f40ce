//! Temporary names: how unfinished copies are called, whose they are, and when they may be removed.
//!
//! A temporary is `.forebay-<hash>-<host>-<pid>-<start>-<call>.part`: the hash of the final name, and who makes it
//! (host and PID namespace, process, its start time, a number of the staging call within it), all hexadecimal. So two
//! stagings never share a temporary, and what a killed one left is told from what a living one is writing: on the
//! same host by looking the process up, else by the age of its last change. Trees that are being removed end in
//! `.gone`. Names of this form are never staged.

use std::sync::atomic::{AtomicU32, Ordering};

use forebay_sys::process::Stat;
use forebay_types::{name_hash, Timestamp};
use xxhash_rust::xxh3::xxh3_64;

const PREFIX: &[u8] = b".forebay-";

/// A temporary of another host (or another PID namespace, or from before a reboot) that has not changed for so long is
/// a leftover: a living staging writes to it all the time.
pub(crate) const FOREIGN_STALE_SECONDS: i64 = 3600;

/// Who makes temporaries: one staging call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    host: u32,
    pid: u32,
    start: u64,
    call: u32,
}

/// What a temporary is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// A copy in progress.
    Part,
    /// A tree in removal.
    Gone,
}

/// A temporary's name, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Temporary {
    /// Hash of the final name.
    pub(crate) hash: u64,
    pub(crate) tag: Tag,
    pub(crate) purpose: Use,
}

/// Whether the maker of a temporary still needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// It is running, or cannot be known to be gone.
    Alive,
    /// It is gone: the temporary is a leftover.
    Dead,
}

impl Tag {
    /// The tag of a new staging call of this process.
    pub(crate) fn new() -> Tag {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        Tag {
            host: host(),
            pid,
            start: process(pid).map_or(0, |p| p.start),
            call: CALLS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The temporary name for `name`.
    pub(crate) fn temporary(&self, name: &[u8], purpose: Use) -> Vec<u8> {
        let suffix = match purpose {
            Use::Part => "part",
            Use::Gone => "gone",
        };
        let Tag { host, pid, start, call } = self;
        let prefix = std::str::from_utf8(PREFIX).unwrap_or_default();
        format!("{prefix}{:016x}-{host:08x}-{pid:x}-{start:x}-{call:x}.{suffix}", name_hash(name))
            .into_bytes()
    }

    /// Whether the maker lives. `changed` is the temporary's last change and `now` the same clock's present.
    pub(crate) fn owner(&self, changed: Timestamp, now: Timestamp) -> Owner {
        let alive = if self.host == host() {
            process(self.pid).is_some_and(|p| p.start == self.start && !p.ended)
        } else {
            now.sec.saturating_sub(changed.sec) < FOREIGN_STALE_SECONDS
        };
        if alive {
            Owner::Alive
        } else {
            Owner::Dead
        }
    }
}

impl Temporary {
    /// Takes a name apart; none when it is not one of ours.
    pub(crate) fn parse(name: &[u8]) -> Option<Temporary> {
        let rest = std::str::from_utf8(name.strip_prefix(PREFIX)?).ok()?;
        let (fields, suffix) = rest.split_once('.')?;
        let purpose = match suffix {
            "part" => Use::Part,
            "gone" => Use::Gone,
            _ => return None,
        };
        let mut parts = fields.split('-');
        let mut number = |digits: Option<usize>| {
            let text = parts.next()?;
            let right = digits.is_none_or(|n| text.len() == n)
                && !text.is_empty()
                && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            if right {
                u64::from_str_radix(text, 16).ok()
            } else {
                None
            }
        };
        let hash = number(Some(16))?;
        let host = number(Some(8))? as u32;
        let pid = u32::try_from(number(None)?).ok()?;
        let start = number(None)?;
        let call = u32::try_from(number(None)?).ok()?;
        if parts.next().is_some() {
            return None;
        }
        Some(Temporary { hash, tag: Tag { host, pid, start, call }, purpose })
    }
}

/// True when `name` is a temporary's.
pub(crate) fn is_temporary(name: &[u8]) -> bool {
    name.starts_with(PREFIX) && Temporary::parse(name).is_some()
}

/// This boot of this host and this PID namespace, as a number: where a process number means the same process.
fn host() -> u32 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let node = rustix::system::uname();
    let all = [&boot, namespace.as_os_str().as_encoded_bytes(), node.nodename().to_bytes()].concat();
    xxh3_64(&all) as u32
}

struct Process {
    /// Clock ticks since boot.
    start: u64,
    /// It is a zombie or dead.
    ended: bool,
}

/// What /proc says of a process; none when there is no such process. Without /proc every process of this host counts as
/// alive, with a start time of 0: then nothing is taken for a leftover that may not be one.
fn process(pid: u32) -> Option<Process> {
    match Stat::of(pid) {
        Ok(stat) => Some(Process { start: stat.start_ticks, ended: stat.has_ended() }),
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => None,
        Err(_) => {
            let no_proc = !std::path::Path::new("/proc/self").exists();
            no_proc.then_some(Process { start: 0, ended: false })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp { sec: 1_000_000, nsec: 0 };

    #[test]
    fn temporary_names_round_trip_and_fit() {
        let tag = Tag { host: 1, pid: u32::MAX, start: u64::MAX, call: u32::MAX };
        for purpose in [Use::Part, Use::Gone] {
            let name = tag.temporary(&[b'x'; 255], purpose);
            assert!(name.len() <= 255);
            let parsed = Temporary::parse(&name).unwrap();
            assert_eq!(parsed, Temporary { hash: name_hash(&[b'x'; 255]), tag, purpose });
            assert!(is_temporary(&name));
        }
        assert_ne!(tag.temporary(b"a", Use::Part), tag.temporary(b"b", Use::Part));
    }

    #[test]
    fn parse_of_other_names_is_none() {
        let good = String::from_utf8(Tag::new().temporary(b"x", Use::Part)).unwrap();
        for name in [
            ".forebay-".to_string(),
            ".forebay-x.part".into(),
            good.replace(".part", ".parts"),
            good.replace(".part", ""),
            good.replace(".part", "-0.part"),
            good.replace(".forebay-", ".forebay--"),
            good.to_uppercase(),
            format!("x{good}"),
        ] {
            assert!(!is_temporary(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn owner_of_this_process_is_alive_and_of_others_dead() {
        let mine = Tag::new();
        assert_eq!(mine.owner(Timestamp::default(), NOW), Owner::Alive);
        assert_eq!(Tag { start: mine.start + 1, ..mine }.owner(NOW, NOW), Owner::Dead, "pid used again");
        assert_eq!(Tag { pid: u32::MAX, ..mine }.owner(NOW, NOW), Owner::Dead, "no such process");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let theirs = Tag { pid, start: process(pid).unwrap().start, ..mine };
        assert_eq!(theirs.owner(NOW, NOW), Owner::Alive);
        child.kill().unwrap();
        while !process(pid).unwrap().ended {
            std::thread::yield_now();
        }
        assert_eq!(theirs.owner(NOW, NOW), Owner::Dead, "a zombie writes nothing");
        child.wait().unwrap();
        assert_eq!(theirs.owner(NOW, NOW), Owner::Dead);
    }

    #[test]
    fn owner_on_another_host_is_told_by_age() {
        let mine = Tag::new();
        let other = Tag { host: mine.host ^ 1, ..mine };
        let old = Timestamp { sec: NOW.sec - FOREIGN_STALE_SECONDS, nsec: 0 };
        assert_eq!(other.owner(NOW, NOW), Owner::Alive);
        assert_eq!(other.owner(old, NOW), Owner::Dead);
    }
}
