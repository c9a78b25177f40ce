//! What the shard knows of a backing store: versions of objects in it, places, and what is still to be done there.
//!
//! A **place** is a directory of the pool and a name in it, as the store has them: the shard keeps what lies at each
//! place of an attached tree. A **copy** is the place that has a file's last published version. A place is *pending*
//! if the store may differ from the pool there; `forebay-mover` compares both and makes the store equal.

use crate::attr::{Kind, Timestamp};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::Ino;
use crate::limits::{NAME_MAX, PATH_MAX};
use crate::name;
use crate::reply::Entry;

/// A version of an object in a store. Two equal versions have the same bytes, as far as the store can tell.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StoreVersion {
    /// Bytes of its data.
    pub bytes: u64,
    /// Time of its last modification, as the store has it.
    pub mtime: Timestamp,
    /// Inode number; 0 where the store has none.
    pub ino: u64,
    /// Hash of the store's own mark of the version (etag, version ID); 0 where it has none.
    pub tag: u64,
}

/// Encoded bytes of a [`StoreVersion`].
pub const STORE_VERSION_BYTES: usize = 36;

impl StoreVersion {
    /// True if an object of this version becomes one of the other version when its time of modification is set.
    pub fn differs_in_time(&self, other: &StoreVersion) -> bool {
        let in_place = StoreVersion { mtime: other.mtime, ..*self };
        self.ino != 0 && self != other && in_place == *other
    }

    /// True if an object of this version becomes one of the other version when it is written in place. Only file systems
    /// tell objects apart whatever their names.
    pub fn is_same_file(&self, other: &StoreVersion) -> bool {
        self.ino != 0 && self.ino == other.ino && self.tag == 0 && other.tag == 0
    }

    /// What an intent to remove has.
    pub const NOTHING: StoreVersion =
        StoreVersion { bytes: 0, mtime: Timestamp { sec: 0, nsec: 0 }, ino: 0, tag: 0 };

    /// What an intent to make a directory has: its version is not known before.
    pub const A_DIRECTORY: StoreVersion = StoreVersion { bytes: u64::MAX, ..StoreVersion::NOTHING };

    /// Appends the version.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.bytes)?;
        w.u64(self.mtime.sec as u64)?;
        w.u32(self.mtime.nsec)?;
        w.u64(self.ino)?;
        w.u64(self.tag)
    }

    /// Reads a version.
    pub fn decode(r: &mut Reader<'_>) -> Result<StoreVersion, Code> {
        let bytes = r.u64()?;
        let mtime = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
        if mtime.nsec >= 1_000_000_000 {
            return Err(Code::Malformed);
        }
        Ok(StoreVersion { bytes, mtime, ino: r.u64()?, tag: r.u64()? })
    }
}

/// Appends a time.
pub(crate) fn put_time(w: &mut Writer<'_>, time: Timestamp) -> Result<(), Code> {
    w.u64(time.sec as u64)?;
    w.u32(time.nsec)
}

/// Reads a time.
pub(crate) fn time(r: &mut Reader<'_>) -> Result<Timestamp, Code> {
    let time = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
    match time.nsec {
        0..1_000_000_000 => Ok(time),
        _ => Err(Code::Malformed),
    }
}

/// What calls wait for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum StoreTask {
    /// The names of a directory.
    List(Ino),
    /// The data of a file.
    Restore(Ino),
    /// That the store has a file's data.
    Persist(Ino),
    /// A range of a file's data: the one with this number, of [`crate::limits::RANGE_BYTES`] bytes. The rest of the file follows.
    Range(Ino, u64),
    /// One name of a directory that is not listed.
    Look(Ino, Vec<u8>),
}

impl StoreTask {
    /// The most bytes of an encoded task.
    pub const BYTES_MAX: usize = 1 + 8 + 2 + NAME_MAX;

    /// The directory or file.
    pub fn ino(&self) -> Ino {
        match self {
            StoreTask::List(ino)
            | StoreTask::Restore(ino)
            | StoreTask::Persist(ino)
            | StoreTask::Range(ino, _)
            | StoreTask::Look(ino, _) => *ino,
        }
    }

    /// Appends the task.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(match self {
            StoreTask::List(_) => 0,
            StoreTask::Restore(_) => 1,
            StoreTask::Persist(_) => 2,
            StoreTask::Range(..) => 3,
            StoreTask::Look(..) => 4,
        })?;
        w.u64(self.ino().0)?;
        match self {
            StoreTask::Range(_, number) => w.u64(*number),
            StoreTask::Look(_, name) => w.short_bytes(name),
            _ => Ok(()),
        }
    }

    /// Reads a list of tasks to its end.
    pub fn decode_list(bytes: &[u8]) -> Result<Vec<StoreTask>, Code> {
        let (mut r, mut tasks) = (Reader::new(bytes), Vec::new());
        while !r.rest().is_empty() {
            let (kind, ino) = (r.u8()?, Ino(r.u64()?));
            tasks.push(match kind {
                0 => StoreTask::List(ino),
                1 => StoreTask::Restore(ino),
                2 => StoreTask::Persist(ino),
                3 => StoreTask::Range(ino, r.u64()?),
                4 => {
                    let name = r.short_bytes()?;
                    name::check(name)?;
                    StoreTask::Look(ino, name.to_vec())
                }
                _ => return Err(Code::Malformed),
            });
        }
        Ok(tasks)
    }
}

/// A range of a file that is being restored, which has arrived in the pool, or for which the pool has no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestoredRange {
    /// The kernel's number of the backing file that has it. An attempt that begins anew has another backing file.
    /// [`RestoredRange::NO_ROOM`] if there is no room for it: it can be read from the store alone.
    pub backing: u64,
    /// Its first byte, and the byte behind it.
    pub from: u64,
    /// See there.
    pub to: u64,
}

impl RestoredRange {
    /// Encoded bytes.
    pub const BYTES: usize = 24;
    /// No file has this number.
    pub const NO_ROOM: u64 = 0;

    /// Appends the range.
    pub fn encode(self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.backing)?;
        w.u64(self.from)?;
        w.u64(self.to)
    }

    /// Reads a range.
    pub fn decode(bytes: &[u8]) -> Result<RestoredRange, Code> {
        let mut r = Reader::new(bytes);
        let range = RestoredRange { backing: r.u64()?, from: r.u64()?, to: r.u64()? };
        match range.from <= range.to && r.rest().is_empty() {
            true => Ok(range),
            false => Err(Code::Malformed),
        }
    }
}

/// An object of a store, to be imported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreObject<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// Its kind.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, else 0.
    pub rdev: u64,
    /// Time of the last access.
    pub atime: Timestamp,
    /// Its version, with the time of the last modification.
    pub version: StoreVersion,
    /// A symbolic link's target; else empty.
    pub target: &'a [u8],
    /// Names that it has in the store; 1 where that is not known.
    pub nlink: u32,
    /// The file system within the store; 0 for the one of the store's root. Objects of two of them may have the same
    /// inode number.
    pub file_system: u64,
}

/// Marks the kind of an object whose number of names follows.
const HAS_LINKS: u8 = 0x80;

impl<'a> StoreObject<'a> {
    /// Appends the object.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        let has_links = (self.nlink, self.file_system) != (1, 0);
        w.u8(self.kind as u8 | if has_links { HAS_LINKS } else { 0 })?;
        w.u32(self.mode)?;
        w.u32(self.uid)?;
        w.u32(self.gid)?;
        w.u64(self.rdev)?;
        put_time(w, self.atime)?;
        self.version.encode(w)?;
        w.short_bytes(self.name)?;
        w.short_bytes(self.target)?;
        if has_links {
            w.u32(self.nlink)?;
            w.u64(self.file_system)?;
        }
        Ok(())
    }

    /// Reads and checks an object.
    pub fn decode(r: &mut Reader<'a>) -> Result<StoreObject<'a>, Code> {
        let first = r.u8()?;
        let kind = Kind::from_u8(first & !HAS_LINKS)?;
        let (mode, uid, gid, rdev, atime) = (r.u32()?, r.u32()?, r.u32()?, r.u64()?, time(r)?);
        let version = StoreVersion::decode(r)?;
        let (name, target) = (r.short_bytes()?, r.short_bytes()?);
        name::check(name)?;
        let is_target = !target.is_empty() && target.len() <= PATH_MAX && !target.contains(&0);
        if mode & !0o7777 != 0 || is_target != (kind == Kind::Symlink) || !is_target && !target.is_empty() {
            return Err(Code::Malformed);
        }
        let (nlink, file_system) = if first & HAS_LINKS == 0 { (1, 0) } else { (r.u32()?, r.u64()?) };
        Ok(StoreObject { name, kind, mode, uid, gid, rdev, atime, version, target, nlink, file_system })
    }
}

/// What a store has at a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The inode that was published or imported there.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
    /// Its version.
    pub version: StoreVersion,
}

impl Placed {
    /// Appends it.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.ino.0)?;
        w.u8(self.kind as u8)?;
        self.version.encode(w)
    }

    /// Reads it.
    pub fn decode(r: &mut Reader<'_>) -> Result<Placed, Code> {
        Ok(Placed { ino: Ino(r.u64()?), kind: Kind::from_u8(r.u8()?)?, version: StoreVersion::decode(r)? })
    }
}

/// A number of changes above all others. The sender of a report with it takes over what the store has, a version of
/// another program: nothing that the pool changed there before counts any more.
pub const CHANGES_ALL: u64 = u64::MAX;

/// A place at which the store may differ from the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PendingPlace {
    /// Directory.
    pub parent: Ino,
    /// Name in it.
    pub name: Vec<u8>,
    /// How often the pool has changed there since it became pending.
    pub changes: u64,
    /// When it became pending.
    pub since: Timestamp,
    /// The version that was about to be published when a mover noted it last.
    pub intent: Option<StoreVersion>,
    /// True when the store was found to have a version that the pool did not know.
    pub conflict: bool,
    /// What the store has there, as far as the pool knows.
    pub placed: Option<Placed>,
    /// What the pool has there.
    pub wanted: Option<Wanted>,
}

/// What the pool has at a place.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::large_enum_variant)] // Nearly all are `Here`.
pub enum Wanted {
    /// An inode, and the place at which the store has its last version.
    Here(Entry, Option<CopyOf>),
    /// An inode of another node.
    Elsewhere(Ino, Kind),
}

/// The place at which a store has the last published version of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyOf {
    /// Directory.
    pub parent: Ino,
    /// Name in it.
    pub name: Vec<u8>,
    /// Epoch of the data of a file's version.
    pub epoch: u64,
}

const HAS_INTENT: u8 = 1;
const HAS_CONFLICT: u8 = 2;
const HAS_PLACED: u8 = 4;
const HAS_WANTED: u8 = 8;
const HAS_COPY: u8 = 16;
const IS_ELSEWHERE: u8 = 32;

impl PendingPlace {
    /// Appends the place.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        let bit = |is: bool, bit: u8| if is { bit } else { 0 };
        let copy = match &self.wanted {
            Some(Wanted::Here(_, copy)) => copy.as_ref(),
            _ => None,
        };
        w.u64(self.parent.0)?;
        w.short_bytes(&self.name)?;
        w.u64(self.changes)?;
        put_time(w, self.since)?;
        w.u8(bit(self.intent.is_some(), HAS_INTENT)
            | bit(self.conflict, HAS_CONFLICT)
            | bit(self.placed.is_some(), HAS_PLACED)
            | bit(self.wanted.is_some(), HAS_WANTED)
            | bit(copy.is_some(), HAS_COPY)
            | bit(matches!(self.wanted, Some(Wanted::Elsewhere(..))), IS_ELSEWHERE))?;
        if let Some(intent) = &self.intent {
            intent.encode(w)?;
        }
        if let Some(placed) = &self.placed {
            placed.encode(w)?;
        }
        match &self.wanted {
            Some(Wanted::Here(entry, _)) => entry.encode(w)?,
            Some(Wanted::Elsewhere(ino, kind)) => {
                w.u64(ino.0)?;
                w.u8(*kind as u8)?;
            }
            None => {}
        }
        if let Some(copy) = copy {
            w.u64(copy.parent.0)?;
            w.short_bytes(&copy.name)?;
            w.u64(copy.epoch)?;
        }
        Ok(())
    }

    /// Reads a list of places to its end.
    pub fn decode_list(bytes: &[u8]) -> Result<Vec<PendingPlace>, Code> {
        let (mut r, mut places) = (Reader::new(bytes), Vec::new());
        while !r.rest().is_empty() {
            places.push(PendingPlace::decode(&mut r)?);
        }
        Ok(places)
    }

    fn decode(r: &mut Reader<'_>) -> Result<PendingPlace, Code> {
        let (parent, name) = (Ino(r.u64()?), stored_name(r)?);
        let (changes, since, has) = (r.u64()?, time(r)?, r.u8()?);
        let intent = if has & HAS_INTENT != 0 { Some(StoreVersion::decode(r)?) } else { None };
        let placed = if has & HAS_PLACED != 0 { Some(Placed::decode(r)?) } else { None };
        let wanted = match (has & HAS_WANTED != 0, has & IS_ELSEWHERE != 0) {
            (false, _) => None,
            (true, true) => Some(Wanted::Elsewhere(Ino(r.u64()?), Kind::from_u8(r.u8()?)?)),
            (true, false) => {
                let entry = Entry::decode(r)?;
                let copy = if has & HAS_COPY != 0 {
                    Some(CopyOf { parent: Ino(r.u64()?), name: stored_name(r)?, epoch: r.u64()? })
                } else {
                    None
                };
                Some(Wanted::Here(entry, copy))
            }
        };
        let conflict = has & HAS_CONFLICT != 0;
        Ok(PendingPlace { parent, name, changes, since, intent, conflict, placed, wanted })
    }
}

fn stored_name(r: &mut Reader<'_>) -> Result<Vec<u8>, Code> {
    match r.short_bytes()? {
        name if name.len() <= NAME_MAX => Ok(name.to_vec()),
        _ => Err(Code::Malformed),
    }
}

/// Where a store has an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StorePlace {
    /// The directory below which the path begins: where the store is attached, or one of another node.
    pub top: Ino,
    /// Whether the store is attached at `top`.
    pub is_root: bool,
    /// The directory of the place, the last name of `path` is its name; zero for `top` itself.
    pub parent: Ino,
    /// The version; none for the directory with the store, and for one that is not in the store yet.
    pub placed: Option<Placed>,
    /// The epoch of the version's data; [`crate::EPOCH_UNKNOWN`] for a directory.
    pub epoch: u64,
    /// The path below `top`: names with `/` between them. Empty for `top` itself.
    pub path: Vec<u8>,
}

impl StorePlace {
    /// Appends it.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.top.0)?;
        w.u64(self.parent.0)?;
        w.u8(u8::from(self.is_root) | u8::from(self.placed.is_some()) << 1)?;
        if let Some(placed) = &self.placed {
            placed.encode(w)?;
        }
        w.u64(self.epoch)?;
        w.short_bytes(&self.path)
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<StorePlace, Code> {
        let r = &mut Reader::new(bytes);
        let (top, parent, bits) = (Ino(r.u64()?), Ino(r.u64()?), r.u8()?);
        let placed = if bits & 2 != 0 { Some(Placed::decode(r)?) } else { None };
        let (epoch, path) = (r.u64()?, r.short_bytes()?.to_vec());
        Ok(StorePlace { top, is_root: bits & 1 != 0, parent, placed, epoch, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attr, Layout, NodeId};

    #[test]
    fn a_version_is_read_as_it_was_written() {
        let version = StoreVersion {
            bytes: 1 << 40,
            mtime: Timestamp { sec: -5, nsec: 999_999_999 },
            ino: 7,
            tag: u64::MAX,
        };
        let mut buffer = [0; STORE_VERSION_BYTES];
        version.encode(&mut Writer::new(&mut buffer)).unwrap();
        assert_eq!(StoreVersion::decode(&mut Reader::new(&buffer)), Ok(version));
        buffer[16..20].copy_from_slice(&1_000_000_000u32.to_le_bytes());
        assert_eq!(StoreVersion::decode(&mut Reader::new(&buffer)), Err(Code::Malformed));
    }

    #[test]
    fn a_range_is_read_as_it_was_written() {
        let range = RestoredRange { backing: 5, from: 1 << 20, to: 1 << 21 };
        let mut buffer = [0; RestoredRange::BYTES];
        range.encode(&mut Writer::new(&mut buffer)).unwrap();
        assert_eq!(RestoredRange::decode(&buffer), Ok(range));
        let mut longer = [0; RestoredRange::BYTES + 1];
        longer[..buffer.len()].copy_from_slice(&buffer);
        assert_eq!(RestoredRange::decode(&longer), Err(Code::Malformed));
        buffer[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(RestoredRange::decode(&buffer), Err(Code::Malformed), "it ends before it begins");
    }

    #[test]
    fn tasks_are_read_as_they_were_written() {
        let tasks = [
            StoreTask::List(Ino(5)),
            StoreTask::Restore(Ino(6)),
            StoreTask::Persist(Ino(7)),
            StoreTask::Range(Ino(8), 9),
            StoreTask::Look(Ino(9), b"a name".to_vec()),
        ];
        let mut buffer = [0; 44 + 9 + 2 + 6];
        let mut w = Writer::new(&mut buffer);
        tasks.iter().for_each(|task| task.encode(&mut w).unwrap());
        assert_eq!(StoreTask::decode_list(&buffer), Ok(tasks.to_vec()));
        buffer[0] = 4;
        assert_eq!(StoreTask::decode_list(&buffer), Err(Code::Malformed));
        assert_eq!(StoreTask::decode_list(&buffer[..43]), Err(Code::Malformed));
    }

    #[test]
    fn objects_with_bad_names_targets_and_modes_are_refused() {
        let good = StoreObject {
            name: b"n",
            kind: Kind::Symlink,
            mode: 0o777,
            uid: 1,
            gid: 2,
            rdev: 0,
            atime: Timestamp::default(),
            version: StoreVersion::default(),
            target: b"../t",
            nlink: 1,
            file_system: 0,
        };
        let read = |object: &StoreObject<'_>| {
            let mut buffer = [0; 5000];
            let mut w = Writer::new(&mut buffer);
            object.encode(&mut w).unwrap();
            let n = w.len();
            StoreObject::decode(&mut Reader::new(&buffer[..n])).map(|read| assert_eq!(read, *object))
        };
        assert_eq!(read(&good), Ok(()));
        assert!(read(&StoreObject { name: b"a/b", ..good }).is_err());
        assert!(read(&StoreObject { name: b"..", ..good }).is_err());
        assert!(read(&StoreObject { target: b"", ..good }).is_err());
        assert!(read(&StoreObject { kind: Kind::File, ..good }).is_err());
        assert!(read(&StoreObject { mode: 0o10_000, ..good }).is_err());
        let file = StoreObject { kind: Kind::File, target: b"", ..good };
        assert_eq!(read(&file), Ok(()));
        assert_eq!(read(&StoreObject { nlink: 3, ..file }), Ok(()));
        assert_eq!(read(&StoreObject { file_system: 9, ..file }), Ok(()));
    }

    #[test]
    fn pending_places_are_read_as_they_were_written() {
        let attr = Attr {
            ino: Ino(9),
            size: 4,
            rdev: 3,
            parent: Ino(0),
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            nlink: 1,
            flags: 3,
            home: NodeId(1),
            width_log2: 0,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: Timestamp::default(),
        };
        let entry = Entry { attr, layout: Layout::single(NodeId(1), 0) };
        let version = StoreVersion { bytes: 4, ..StoreVersion::default() };
        let copy = CopyOf { parent: Ino(1), name: b"old".to_vec(), epoch: 2 };
        let plain = PendingPlace {
            parent: Ino(1),
            name: b"name".to_vec(),
            changes: 7,
            since: Timestamp { sec: 5, nsec: 6 },
            intent: None,
            conflict: false,
            placed: None,
            wanted: None,
        };
        let places = vec![
            plain.clone(),
            PendingPlace { wanted: Some(Wanted::Here(entry, Some(copy))), conflict: true, ..plain.clone() },
            PendingPlace { wanted: Some(Wanted::Here(entry, None)), intent: Some(version), ..plain.clone() },
            PendingPlace {
                wanted: Some(Wanted::Elsewhere(Ino(7), Kind::Directory)),
                placed: Some(Placed { ino: Ino(8), kind: Kind::File, version }),
                ..plain
            },
        ];
        let mut buffer = [0; 2000];
        let mut w = Writer::new(&mut buffer);
        places.iter().for_each(|place| place.encode(&mut w).unwrap());
        let n = w.len();
        assert_eq!(PendingPlace::decode_list(&buffer[..n]), Ok(places));
        for short in 1..n {
            let _ = PendingPlace::decode_list(&buffer[..short]);
        }
    }

    #[test]
    fn a_store_place_is_read_as_it_was_written() {
        let place = StorePlace {
            top: Ino(1),
            is_root: true,
            parent: Ino(2),
            placed: None,
            epoch: 3,
            path: b"a/b".to_vec(),
        };
        let mut buffer = [0; 100];
        let mut w = Writer::new(&mut buffer);
        place.encode(&mut w).unwrap();
        let n = w.len();
        assert_eq!(StorePlace::decode(&buffer[..n]), Ok(place));
    }
}
