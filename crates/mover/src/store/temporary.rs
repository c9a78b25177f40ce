//! Names of temporaries in a store, and which mover owns them.
//!
//! | name | is | when its mover is dead |
//! |---|---|---|
//! | `.forebay-<mover>-<number>.tmp` | an upload that is not published | removed |
//! | `.forebay-<mover>-<number>.<marks>.was.<name>` | what was at `<name>` and is being compared | see below |
//! | `.forebay-<mover>-<number>.<marks>.new.<name>` | an upload that is changing places with what is at `<name>` | the same |
//! | `.forebay-<mover>-<number>.<marks>.was/<name>` | the same, for long names; `.new/` too | the same |
//! | `.forebay-<mover>-<number>.uploads/` | uploads of one pass  | removed, with what is in it |
//!
//! The marks ([`Marks`]) are hashes of the expected version and of one that nothing needs. So a sweep knows what a dead
//! mover left: the spare version is removed; anything else goes back to its name if that is free; if it is not, the
//! expected version is removed, because it was replaced, and any other object is kept under a name that people see. The
//! expected version under a name of an upload was replaced too, even if the name is free: what replaced it was removed
//! since, and the old version must not come back.
//!
//! A mover's ID has its host, the boot and PID namespace of the host, its process number and the time when it started.
//! So two movers never share a temporary, not even after a restart with the same process number.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use forebay_sys::process::Stat;
use forebay_types::limits::NAME_MAX;
use forebay_types::{StoreVersion, Writer, STORE_VERSION_BYTES};
use xxhash_rust::xxh3::xxh3_64;

use super::path::StorePath;

const PREFIX: &[u8] = b".forebay-";
/// Characters of the host's name that are kept.
const HOST_CHARS: usize = 32;

/// The ID of a mover: `<host>.<boot and namespace>.<pid>.<start>`, and the number of its next temporary. Copies of an ID
/// count together: a mover may have opened one directory several times, at two directories of the pool, or again while
/// what it had open before is still in use.
#[derive(Clone, Debug)]
pub struct MoverId {
    id: String,
    next: Arc<AtomicU64>,
}

/// The ID of the calling thread's mover, and whether a mover runs, where a simulation runs several in one process.
#[cfg(feature = "simulation")]
type Movers = (fn() -> MoverId, fn(&str) -> bool);

#[cfg(feature = "simulation")]
static SIMULATED: OnceLock<Movers> = OnceLock::new();

/// Makes all movers of this process use these from now on. Only the first use has an effect.
#[cfg(feature = "simulation")]
pub fn simulate_movers(own: fn() -> MoverId, runs: fn(&str) -> bool) {
    let _ = SIMULATED.set((own, runs));
}

impl MoverId {
    /// The ID of this process.
    pub fn own() -> MoverId {
        static OWN: OnceLock<MoverId> = OnceLock::new();
        #[cfg(feature = "simulation")]
        if let Some((own, _)) = SIMULATED.get() {
            return own();
        }
        let make = || {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let host: String = host.trim().chars().take(HOST_CHARS).map(plain).collect();
            let pid = std::process::id();
            let start = Stat::of(pid).map_or(0, |stat| stat.start_ticks);
            MoverId::of(format!("{}.{}.{pid}.{start}", if host.is_empty() { "host" } else { &host }, place()))
        };
        OWN.get_or_init(make).clone()
    }

    /// The ID of a node's simulated mover, the `start`th.
    #[cfg(feature = "simulation")]
    pub fn simulated(node: u16, start: u64) -> MoverId {
        MoverId::of(format!("simulated.00.{node}.{start}"))
    }

    fn of(id: String) -> MoverId {
        MoverId { id, next: Arc::default() }
    }

    /// The ID in a temporary's name; none if it does not have the form of an ID.
    fn parse(bytes: &[u8]) -> Option<&str> {
        let id = std::str::from_utf8(bytes).ok()?;
        let mut fields = id.split('.');
        let [host, place, pid, start] = [fields.next()?, fields.next()?, fields.next()?, fields.next()?];
        let good = fields.next().is_none()
            && !host.is_empty()
            && host.chars().all(|c| plain(c) == c)
            && place.bytes().all(|b| b.is_ascii_hexdigit())
            && pid.parse::<u32>().is_ok()
            && start.parse::<u64>().is_ok();
        good.then_some(id)
    }

    /// The ID as it appears in names.
    pub fn as_str(&self) -> &str {
        &self.id
    }
}

impl fmt::Display for MoverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)
    }
}

fn plain(c: char) -> char {
    if c.is_ascii_alphanumeric() {
        c
    } else {
        '_'
    }
}

/// Boot and PID namespace in hexadecimal: process numbers mean something only within both.
fn place() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(12).collect();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    format!("{boot}{:08x}", digits.parse::<u64>().unwrap_or(0))
}

/// Whether the mover with this ID runs, as far as this process can see: none for a mover of another host, boot or PID
/// namespace.
pub fn runs_here(mover: &str) -> Option<bool> {
    #[cfg(feature = "simulation")]
    if let Some((_, runs)) = SIMULATED.get() {
        return Some(runs(mover));
    }
    let fields: Vec<&str> = MoverId::parse(mover.as_bytes())?.split('.').collect();
    if fields[1] != place() {
        return None;
    }
    let stat = Stat::of(fields[2].parse().ok()?);
    Some(stat.is_ok_and(|stat| !stat.has_ended() && stat.start_ticks.to_string() == fields[3]))
}

/// Whether a mover may still run, for processes that know no other node's movers. One of an earlier boot of this host does
/// not.
pub(crate) fn may_run(mover: &str) -> bool {
    let own = MoverId::own();
    let field = |id: &str, n: usize| id.split('.').nth(n).unwrap_or_default().to_owned();
    let boot = |id: &str| field(id, 1).get(..12).map(str::to_owned);
    let is_of_earlier_boot = field(mover, 0) == field(own.as_str(), 0) && boot(mover) != boot(own.as_str());
    !is_of_earlier_boot && runs_here(mover).unwrap_or(true)
}

/// Hashes of two versions, in the name of an object that is put aside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// The version that was expected at the name.
    pub expected: u32,
    /// A version that nothing needs if the mover is dead: an upload that is not published, or the version that a renamed
    /// file replaced. The same as `expected` if there is none.
    pub spare: u32,
    /// What is aside began as the upload: if it is the expected version now, that was replaced.
    pub is_of_upload: bool,
}

/// Hex digits of [`Marks`].
const MARKS_DIGITS: usize = 16;
/// The bytes of [`Marks::suffix`].
const SUFFIX_BYTES: usize = 4;

impl Marks {
    /// The marks of the version that is expected at the name, and of one that may be there without being needed.
    pub fn new(expected: &StoreVersion, spare: Option<&StoreVersion>) -> Marks {
        let spare = mark(spare.unwrap_or(expected));
        Marks { expected: mark(expected), spare, is_of_upload: false }
    }

    /// The marks of an upload that changes places with the version that is expected at the name.
    pub fn of_upload(expected: &StoreVersion, upload: &StoreVersion) -> Marks {
        Marks { is_of_upload: true, ..Marks::new(expected, Some(upload)) }
    }

    /// What follows the marks in names.
    fn suffix(self) -> &'static str {
        match self.is_of_upload {
            true => ".new",
            false => ".was",
        }
    }

    /// True for a version, given by its hash, that nothing needs if the mover is dead.
    pub(super) fn is_spare(self, version: u32) -> bool {
        version == self.spare && self.spare != self.expected || self.is_of_upload && version == self.expected
    }

    fn parse(digits: &[u8], suffix: &[u8]) -> Option<Marks> {
        let digits = std::str::from_utf8(digits).ok()?;
        let hex = |digits: &str| u32::from_str_radix(digits, 16).ok();
        let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
        let is_of_upload = suffix == b".new";
        let is_known = plain && (is_of_upload || suffix == b".was");
        let (expected, spare) = (hex(digits.get(..8)?)?, hex(digits.get(8..)?)?);
        is_known.then_some(Marks { expected, spare, is_of_upload })
    }
}

/// The hash of a version in [`Marks`].
pub(super) fn mark(version: &StoreVersion) -> u32 {
    let mut buffer = [0; STORE_VERSION_BYTES];
    // The buffer has the length of the encoding.
    let _ = version.encode(&mut Writer::new(&mut buffer));
    xxh3_64(&buffer) as u32
}

/// What a temporary is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TemporaryKind<'a> {
    /// Bytes that nothing needs when their mover is dead.
    Upload,
    /// An object put aside, with its name in the directory.
    Aside(Marks, &'a [u8]),
    /// A directory that has an object put aside under the object's own name.
    AsideDirectory(Marks),
    /// A directory that has uploads.
    UploadDirectory,
}

/// The fields of a temporary's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TemporaryName<'a> {
    /// The ID of the mover that made it.
    pub mover: &'a str,
    /// What it is.
    pub kind: TemporaryKind<'a>,
}

impl<'a> TemporaryName<'a> {
    /// The fields of `name`; none if it is not a temporary's.
    pub fn parse(name: &'a [u8]) -> Option<TemporaryName<'a>> {
        let rest = name.strip_prefix(PREFIX)?;
        let dash = rest.iter().position(|&b| b == b'-')?;
        let mover = MoverId::parse(&rest[..dash])?;
        let rest = &rest[dash + 1..];
        let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
        let kind = match rest[digits..].strip_prefix(b".")? {
            b"tmp" => TemporaryKind::Upload,
            b"uploads" => TemporaryKind::UploadDirectory,
            suffix => {
                let (digits, suffix) = suffix.split_at_checked(MARKS_DIGITS)?;
                let (kind, suffix) = suffix.split_at_checked(SUFFIX_BYTES)?;
                let marks = Marks::parse(digits, kind)?;
                match suffix {
                    b"" => TemporaryKind::AsideDirectory(marks),
                    suffix => {
                        let name = suffix.strip_prefix(b".").filter(|name| !name.is_empty())?;
                        TemporaryKind::Aside(marks, name)
                    }
                }
            }
        };
        (digits > 0).then_some(TemporaryName { mover, kind })
    }
}

/// Makes the names of one mover's temporaries.
#[derive(Debug)]
pub struct Temporaries {
    mover: MoverId,
}

impl Temporaries {
    /// Names for this mover.
    pub fn new(mover: MoverId) -> Temporaries {
        Temporaries { mover }
    }

    /// The mover that owns the names.
    pub fn mover(&self) -> &MoverId {
        &self.mover
    }

    /// The path of a new temporary in `directory`; in the root if the path would be too long.
    pub fn next(&self, directory: &StorePath) -> StorePath {
        let name = self.next_name();
        directory.join(&name).unwrap_or_else(|_| StorePath::root().join(&name).unwrap_or_default())
    }

    pub(super) fn next_name(&self) -> Vec<u8> {
        self.stem(".tmp").into_bytes()
    }

    pub(super) fn next_upload_directory(&self) -> Vec<u8> {
        self.stem(".uploads").into_bytes()
    }

    /// A name for `name` put aside; none if it would be too long, see [`Temporaries::next_aside_directory`].
    pub(super) fn next_aside(&self, marks: Marks, name: &[u8]) -> Option<Vec<u8>> {
        let mut aside = self.next_aside_directory(marks);
        aside.push(b'.');
        aside.extend_from_slice(name);
        (aside.len() <= NAME_MAX).then_some(aside)
    }

    pub(super) fn next_aside_directory(&self, marks: Marks) -> Vec<u8> {
        self.stem(&format!(".{:08x}{:08x}{}", marks.expected, marks.spare, marks.suffix())).into_bytes()
    }

    fn stem(&self, suffix: &str) -> String {
        let number = self.mover.next.fetch_add(1, Ordering::Relaxed);
        format!(".forebay-{}-{number}{suffix}", self.mover)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporaries_are_recognized_and_other_names_are_not() {
        let temporaries = Temporaries::new(MoverId::own());
        fn kind(name: &[u8]) -> Option<TemporaryKind<'_>> {
            TemporaryName::parse(name).map(|temporary| temporary.kind)
        }
        let own = temporaries.next_name();
        assert_eq!(TemporaryName::parse(&own).unwrap().mover, MoverId::own().as_str());
        assert_eq!(kind(&temporaries.next_name()), Some(TemporaryKind::Upload));
        assert_eq!(kind(&temporaries.next_upload_directory()), Some(TemporaryKind::UploadDirectory));
        for is_of_upload in [false, true] {
            let marks = Marks { expected: 0x12ab, spare: u32::MAX, is_of_upload };
            let directory = temporaries.next_aside_directory(marks);
            assert_eq!(kind(&directory), Some(TemporaryKind::AsideDirectory(marks)));
            let aside = temporaries.next_aside(marks, b"\xff.was.x-1.tmp").unwrap();
            assert_eq!(kind(&aside), Some(TemporaryKind::Aside(marks, b"\xff.was.x-1.tmp")));
            assert_eq!(temporaries.next_aside(marks, &[b'x'; 255]), None);
        }
        for other in [".forebay-", ".forebay-x-1.tmp", ".forebay-a.b.1.1-.tmp", "forebay-a.b.1.1-1.tmp", "x"]
        {
            assert_eq!(kind(other.as_bytes()), None, "{other}");
        }
        assert!(kind(b".forebay-h.00.1.1-1.tmp").is_some());
        assert!(kind(b".forebay-h.00.1.1-1.0123456789abcdef.was").is_some());
        assert!(kind(b".forebay-h.00.1.1-1.0123456789abcdef.was.").is_none());
        assert!(kind(b".forebay-h.00.1.1-1.0123456789abcde+.was").is_none());
        assert!(kind(b".forebay-h.00.1.1-1.0123456789abcdef.old").is_none());
        assert_ne!(temporaries.next(&StorePath::root()), temporaries.next(&StorePath::root()));
    }

    #[test]
    fn stores_that_a_mover_has_opened_have_no_temporary_in_common() {
        let opened = [MoverId::own(), MoverId::own()].map(Temporaries::new);
        let names: Vec<Vec<u8>> = (0..10).map(|i| opened[i % 2].next_name()).collect();
        let different: std::collections::HashSet<&Vec<u8>> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }

    #[test]
    fn runs_here_knows_own_dead_and_foreign_movers() {
        let own = MoverId::own();
        assert_eq!(runs_here(own.as_str()), Some(true));
        let fields: Vec<&str> = own.as_str().split('.').collect();
        assert_eq!(runs_here(&format!("{}.{}.{}.1", fields[0], fields[1], fields[2])), Some(false));
        assert_eq!(runs_here(&format!("{}.0123.{}.{}", fields[0], fields[2], fields[3])), None);
        assert_eq!(runs_here("nonsense"), None);
    }
}
