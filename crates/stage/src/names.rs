//! Temporary names of unfinished copies, their owners, and when they may be removed.
//!
//! A temporary is named `.forebay-<hash>-<host>-<pid>-<start>-<call>.part`, all fields in hexadecimal: the hash of the
//! final name, and the owner (host and PID namespace, process, its start time, the number of the staging call or of the
//! removal in the process). So two stagings never share a temporary. A leftover of a killed staging is distinguished from
//! a live staging's temporary: on the same host by looking up the process, else by the age of its last change, which for a
//! tree is the last change of anything in it. Trees in removal end in `.gone`. Names of this form are never staged.

use std::sync::atomic::{AtomicU32, Ordering};

use forebay_sys::process::Stat;
use forebay_types::{name_hash, Timestamp};
use xxhash_rust::xxh3::xxh3_64;

const PREFIX: &[u8] = b".forebay-";

/// A temporary of another host (or PID namespace, or from before a reboot) that has not changed for this many seconds
/// counts as a leftover: a live staging is assumed to change its temporaries more often.
pub(crate) const FOREIGN_STALE_SECONDS: i64 = 3600;

/// The owner of temporaries: one staging call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    host: u32,
    pid: u32,
    start: u64,
    call: u32,
}

/// The purpose of a temporary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// A copy in progress.
    Part,
    /// A tree in removal.
    Gone,
}

/// The fields of a temporary's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Temporary {
    /// Hash of the final name.
    pub(crate) hash: u64,
    pub(crate) tag: Tag,
    pub(crate) purpose: Use,
}

/// Whether the owner of a temporary still needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// The owner is running, or cannot be shown to have ended.
    Alive,
    /// The owner has ended: the temporary is a leftover.
    Dead,
}

impl Tag {
    /// The tag of a new staging call of this process.
    pub(crate) fn new() -> Tag {
        let pid = std::process::id();
        Tag { host: host(), pid, start: process(pid).map_or(0, |p| p.start), call: next_call() }
    }

    /// The tag of a staging on this host whose process has ended.
    #[cfg(test)]
    pub(crate) fn of_a_process_that_has_ended() -> Tag {
        Tag { pid: u32::MAX, ..Tag::new() }
    }

    /// The tag of a staging on another host.
    #[cfg(test)]
    pub(crate) fn of_another_host() -> Tag {
        let mine = Tag::new();
        Tag { host: mine.host ^ 1, ..mine }
    }

    /// The temporary name for `name`. For a temporary of another staging it has the same final name's hash, by which
    /// the next staging to that name finds it. A tree in removal gets a call number of its own, since one staging may
    /// remove several leftovers of one final name.
    pub(crate) fn temporary(&self, name: &[u8], purpose: Use) -> Vec<u8> {
        let suffix = match purpose {
            Use::Part => "part",
            Use::Gone => "gone",
        };
        let Tag { host, pid, start, call } = match purpose {
            Use::Part => *self,
            Use::Gone => Tag { call: next_call(), ..*self },
        };
        let prefix = std::str::from_utf8(PREFIX).unwrap_or_default();
        let hash = Temporary::parse(name).map_or_else(|| name_hash(name), |temporary| temporary.hash);
        format!("{prefix}{hash:016x}-{host:08x}-{pid:x}-{start:x}-{call:x}.{suffix}").into_bytes()
    }

    /// True if the owner is on another host, where its process cannot be looked up.
    pub(crate) fn is_foreign(&self) -> bool {
        self.host != host()
    }

    /// Whether the owner lives. `changed` is the temporary's last change, and `now` the present time of the same clock.
    pub(crate) fn owner(&self, changed: Timestamp, now: Timestamp) -> Owner {
        let alive = if self.is_foreign() {
            now.sec.saturating_sub(changed.sec) < FOREIGN_STALE_SECONDS
        } else {
            process(self.pid).is_some_and(|p| p.start == self.start && !p.ended)
        };
        if alive {
            Owner::Alive
        } else {
            Owner::Dead
        }
    }
}

/// A number that no temporary of this process has yet.
fn next_call() -> u32 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed)
}

impl Temporary {
    /// Parses a name; `None` if it is not a temporary's.
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

/// True if `name` is that of a temporary.
pub(crate) fn is_temporary(name: &[u8]) -> bool {
    name.starts_with(PREFIX) && Temporary::parse(name).is_some()
}

/// A number for this host, boot and PID namespace: within it, a PID identifies one process at a time.
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
    /// Set for a zombie or dead process.
    ended: bool,
}

/// The entry of a process in /proc; `None` if there is none. Without /proc every process of this host counts as alive,
/// with a start time of 0, so that no temporary of a live staging counts as a leftover.
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
            let tag = Tag { call: if purpose == Use::Gone { parsed.tag.call } else { tag.call }, ..tag };
            assert_eq!(parsed, Temporary { hash: name_hash(&[b'x'; 255]), tag, purpose });
            assert!(is_temporary(&name));
        }
        assert_ne!(tag.temporary(b"a", Use::Part), tag.temporary(b"b", Use::Part));
        // A temporary in removal is found by the name that it was made for.
        let part = Tag::of_another_host().temporary(b"a", Use::Part);
        let gone = Temporary::parse(&tag.temporary(&part, Use::Gone)).unwrap();
        let tag = Tag { call: gone.tag.call, ..tag };
        assert_eq!(gone, Temporary { hash: name_hash(b"a"), tag, purpose: Use::Gone });
        // Another one of that name is removed meanwhile.
        assert_ne!(tag.temporary(&part, Use::Gone), tag.temporary(&part, Use::Gone));
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
        let other = Tag::of_another_host();
        let old = Timestamp { sec: NOW.sec - FOREIGN_STALE_SECONDS, nsec: 0 };
        assert_eq!(other.owner(NOW, NOW), Owner::Alive);
        assert_eq!(other.owner(old, NOW), Owner::Dead);
    }
}
