//! Replies to requests.

use crate::attr::{Attr, Kind};
use crate::backing::BackingAttr;
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::Cookie;
use crate::id::Ino;
use crate::layout::Layout;
use crate::limits::NAME_MAX;
use crate::lock::LockRequest;
use crate::target::{TargetSpaces, Targets};
use crate::transaction::Outcome;
use crate::wide::{Parts, REFUSAL_TAG};

/// Bytes in front of every reply: code (0 for success), tag, flags.
pub const REPLY_HEADER_BYTES: usize = 4;

/// An inode: attributes and layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Attributes.
    pub attr: Attr,
    /// Layout. For anything but a regular file or a directory the default, unused.
    pub layout: Layout,
}

/// Space and inodes of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolSpace {
    /// Bytes of all targets.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// Inodes that exist.
    pub inodes: u64,
    /// Inodes that can still be created.
    pub free_inodes: u64,
}

/// A reply. A failed request has an `Err` in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply<'a> {
    /// The request was executed, with no result.
    Done,
    /// An inode.
    Entry(Entry),
    /// The file that `Create` found or created.
    Created {
        /// The file.
        entry: Entry,
        /// True when this request created it.
        created: bool,
        /// The inode number that is now reserved for the slot's next `Create`, if the request asked for one and the
        /// file was created.
        next: Option<Ino>,
    },
    /// The inode that was removed or replaced.
    Removed {
        /// Its number, or zero when none was.
        ino: Ino,
        /// True when that was its last link. A file's backing files are then orphans, which the client unlinks at the
        /// latest while its slot's next request is served.
        last: bool,
        /// Its kind.
        kind: Kind,
        /// Its layout, which names the backing files.
        layout: Layout,
    },
    /// A layout was replaced.
    Relaid {
        /// The inode.
        ino: Ino,
        /// Its layout before. The client unlinks a file's old backing files before its slot's next request.
        layout: Layout,
    },
    /// Bytes: a symlink's target, a value, a list of names, a path.
    Bytes(&'a [u8]),
    /// Entries of a directory.
    Entries(DirEntries<'a>),
    /// Space.
    Space(PoolSpace),
    /// The inode number that is now reserved for the slot's next `Create`.
    Number(Ino),
    /// The inode of an entry, on another node, from which the client requests its attributes.
    Elsewhere {
        /// The inode.
        ino: Ino,
        /// Its kind.
        kind: Kind,
    },
    /// The end of a path. The parent's node has the part in front of it.
    PartOfPath {
        /// The directory at which this part begins.
        top: Ino,
        /// That directory's parent, on another node.
        parent: Ino,
        /// The path below `top`; empty, or beginning with `/`.
        path: &'a [u8],
    },
    /// A backing file's attributes.
    Backing(BackingAttr),
    /// A number. For a write, the offset of its first byte.
    Count(u64),
    /// The outcome of a transaction.
    Outcome(Outcome),
    /// Targets for a new file.
    Placed(Targets),
    /// Space of a node.
    Targets {
        /// Inodes of its shard.
        inodes: u64,
        /// Inodes that it has space for.
        free_inodes: u64,
        /// Its targets.
        spaces: TargetSpaces<'a>,
    },
    /// A conflicting lock.
    Lock(LockRequest),
    /// The parts of a wide directory.
    Parts(Parts),
}

/// Why a request was not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// An error.
    Code(Code),
    /// The request named a wide directory instead of its part: [`Code::Wide`] with the parts, which the sender
    /// remembers.
    Wide(Parts),
}

impl Refusal {
    /// The code alone, without the parts.
    pub fn code(&self) -> Code {
        match self {
            Refusal::Code(code) => *code,
            Refusal::Wide(_) => Code::Wide,
        }
    }
}

impl From<Code> for Refusal {
    fn from(code: Code) -> Refusal {
        Refusal::Code(code)
    }
}

/// The result of a request.
pub type Answer<'a> = Result<Reply<'a>, Refusal>;

impl Entry {
    /// Appends attributes and layout.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        self.attr.encode(w)?;
        self.layout.encode(w)
    }

    /// Reads attributes and layout.
    #[inline]
    pub fn decode(r: &mut Reader<'_>) -> Result<Entry, Code> {
        Ok(Entry { attr: Attr::decode(r)?, layout: Layout::decode(r)? })
    }
}

impl<'a> Reply<'a> {
    /// Encodes a result into `buffer`. Returns the number of bytes.
    pub fn encode(result: &Result<Reply<'_>, Code>, buffer: &mut [u8]) -> Result<usize, Code> {
        Reply::encode_answer(&result.map_err(Refusal::Code), buffer)
    }

    /// Encodes the result of a request into `buffer`. Returns the number of bytes.
    pub fn encode_answer(answer: &Answer<'_>, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        let reply = match answer {
            Err(Refusal::Code(code)) => {
                w.u16(*code as u16)?;
                w.u16(0)?;
                return Ok(w.len());
            }
            Err(Refusal::Wide(parts)) => {
                w.u16(Code::Wide as u16)?;
                w.u16(REFUSAL_TAG)?;
                parts.encode(&mut w)?;
                return Ok(w.len());
            }
            Ok(reply) => reply,
        };
        w.u16(0)?;
        match reply {
            Reply::Done => w.u16(1)?,
            Reply::Entry(entry) => {
                w.u16(2)?;
                entry.encode(&mut w)?;
            }
            Reply::Created { entry, created, next } => {
                w.u16(if *created { 4 } else { 3 })?;
                entry.encode(&mut w)?;
                w.u64(next.map_or(0, |ino| ino.0))?;
            }
            Reply::Removed { ino, last, kind, layout } => {
                w.u16(5)?;
                w.u64(ino.0)?;
                w.u8(*last as u8)?;
                w.u8(*kind as u8)?;
                layout.encode(&mut w)?;
            }
            Reply::Relaid { ino, layout } => {
                w.u16(11)?;
                w.u64(ino.0)?;
                layout.encode(&mut w)?;
            }
            Reply::Bytes(bytes) => {
                w.u16(6)?;
                w.put(bytes)?;
            }
            Reply::Entries(entries) => {
                w.u16(if entries.end { 8 } else { 7 })?;
                w.put(entries.bytes)?;
            }
            Reply::Number(ino) => {
                w.u16(10)?;
                w.u64(ino.0)?;
            }
            Reply::Elsewhere { ino, kind } => {
                w.u16(12)?;
                w.u64(ino.0)?;
                w.u8(*kind as u8)?;
            }
            Reply::PartOfPath { top, parent, path } => {
                w.u16(13)?;
                w.u64(top.0)?;
                w.u64(parent.0)?;
                w.put(path)?;
            }
            Reply::Backing(attr) => {
                w.u16(14)?;
                attr.encode(&mut w)?;
            }
            Reply::Count(n) => {
                w.u16(15)?;
                w.u64(*n)?;
            }
            Reply::Outcome(outcome) => {
                w.u16(16)?;
                w.u8(*outcome as u8)?;
            }
            Reply::Lock(wish) => {
                w.u16(22)?;
                wish.encode(&mut w)?;
            }
            Reply::Parts(parts) => {
                w.u16(37)?;
                parts.encode(&mut w)?;
            }
            Reply::Placed(targets) => {
                w.u16(20)?;
                targets.encode(&mut w)?;
            }
            Reply::Targets { inodes, free_inodes, spaces } => {
                w.u16(21)?;
                w.u64(*inodes)?;
                w.u64(*free_inodes)?;
                w.put(spaces.as_bytes())?;
            }
            Reply::Space(s) => {
                w.u16(9)?;
                for v in [s.total_bytes, s.free_bytes, s.inodes, s.free_inodes] {
                    w.u64(v)?;
                }
            }
        }
        Ok(w.len())
    }

    /// Decodes a result; `Err(Code::Malformed)` for bytes that cannot be decoded. Drops the parts of [`Code::Wide`].
    pub fn decode(bytes: &'a [u8]) -> Result<Reply<'a>, Code> {
        Reply::decode_answer(bytes).map_err(|refusal| refusal.code())
    }

    /// Decodes the result of a request; [`Code::Malformed`] for bytes that cannot be decoded.
    pub fn decode_answer(bytes: &'a [u8]) -> Answer<'a> {
        let mut r = Reader::new(bytes);
        let code = r.u16()?;
        let tag = r.u16()?;
        if code == Code::Wide as u16 && tag == REFUSAL_TAG {
            return Err(Refusal::Wide(Parts::decode(&mut r)?));
        }
        if code != 0 {
            return Err(Refusal::Code(Code::from_u16(code)));
        }
        Ok(Reply::decode_body(tag, &mut r)?)
    }

    fn decode_body(tag: u16, r: &mut Reader<'a>) -> Result<Reply<'a>, Code> {
        Ok(match tag {
            1 => Reply::Done,
            2 => Reply::Entry(Entry::decode(r)?),
            3 | 4 => {
                let (entry, next) = (Entry::decode(r)?, Ino(r.u64()?));
                Reply::Created { entry, created: tag == 4, next: (next != Ino(0)).then_some(next) }
            }
            5 => Reply::Removed {
                ino: Ino(r.u64()?),
                last: r.u8()? != 0,
                kind: Kind::from_u8(r.u8()?)?,
                layout: Layout::decode(r)?,
            },
            6 => Reply::Bytes(r.rest()),
            7 | 8 => Reply::Entries(DirEntries { bytes: r.rest(), end: tag == 8 }),
            9 => Reply::Space(PoolSpace {
                total_bytes: r.u64()?,
                free_bytes: r.u64()?,
                inodes: r.u64()?,
                free_inodes: r.u64()?,
            }),
            10 => Reply::Number(Ino(r.u64()?)),
            11 => Reply::Relaid { ino: Ino(r.u64()?), layout: Layout::decode(r)? },
            12 => Reply::Elsewhere { ino: Ino(r.u64()?), kind: Kind::from_u8(r.u8()?)? },
            13 => Reply::PartOfPath { top: Ino(r.u64()?), parent: Ino(r.u64()?), path: r.rest() },
            14 => Reply::Backing(BackingAttr::decode(r)?),
            15 => Reply::Count(r.u64()?),
            16 => Reply::Outcome(Outcome::from_u8(r.u8()?)?),
            22 => Reply::Lock(LockRequest::decode(r)?),
            37 => Reply::Parts(Parts::decode(r)?),
            20 => Reply::Placed(Targets::decode(r)?),
            21 => Reply::Targets {
                inodes: r.u64()?,
                free_inodes: r.u64()?,
                spaces: TargetSpaces::of(r.rest())?,
            },
            _ => return Err(Code::Malformed),
        })
    }

    /// The same reply if it borrows nothing.
    pub fn owned(self) -> Option<Reply<'static>> {
        Some(match self {
            Reply::Bytes(_) | Reply::Entries(_) | Reply::PartOfPath { .. } | Reply::Targets { .. } => {
                return None
            }
            Reply::Done => Reply::Done,
            Reply::Entry(entry) => Reply::Entry(entry),
            Reply::Created { entry, created, next } => Reply::Created { entry, created, next },
            Reply::Removed { ino, last, kind, layout } => Reply::Removed { ino, last, kind, layout },
            Reply::Relaid { ino, layout } => Reply::Relaid { ino, layout },
            Reply::Space(space) => Reply::Space(space),
            Reply::Number(ino) => Reply::Number(ino),
            Reply::Elsewhere { ino, kind } => Reply::Elsewhere { ino, kind },
            Reply::Backing(attr) => Reply::Backing(attr),
            Reply::Count(n) => Reply::Count(n),
            Reply::Outcome(outcome) => Reply::Outcome(outcome),
            Reply::Placed(targets) => Reply::Placed(targets),
            Reply::Lock(wish) => Reply::Lock(wish),
            Reply::Parts(parts) => Reply::Parts(parts),
        })
    }
}

/// One entry of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirEntry<'a> {
    /// The entry's position. The next entry has a greater cookie.
    pub cookie: Cookie,
    /// Inode.
    pub ino: Ino,
    /// Kind.
    pub kind: Kind,
    /// Name.
    pub name: &'a [u8],
    /// Attributes, if the request asked for them.
    pub attr: Option<Attr>,
}

/// Encoded entries of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirEntries<'a> {
    /// Encoded entries.
    pub bytes: &'a [u8],
    /// True when no entry follows these.
    pub end: bool,
}

impl<'a> DirEntries<'a> {
    /// The entries, in the order of their cookies. Malformed bytes end the iteration with an error.
    pub fn iter(&self) -> impl Iterator<Item = Result<DirEntry<'a>, Code>> + 'a {
        let mut r = Reader::new(self.bytes);
        let mut failed = false;
        std::iter::from_fn(move || {
            if failed || r.rest().is_empty() {
                return None;
            }
            let entry = DirEntry::decode(&mut r);
            failed = entry.is_err();
            Some(entry)
        })
    }
}

/// Replaces the cookie of the last of some encoded entries, so that a reader continues behind this cookie. Without
/// entries it does nothing.
///
/// # Errors
/// [`Code::Malformed`].
pub fn go_on_behind(entries: &mut [u8], cookie: Cookie) -> Result<(), Code> {
    let mut r = Reader::new(entries);
    let mut last = None;
    while !r.rest().is_empty() {
        last = Some(entries.len() - r.rest().len());
        DirEntry::decode(&mut r)?;
    }
    // An entry begins with its cookie.
    if let Some(place) = last.and_then(|at| entries[at..].first_chunk_mut()) {
        *place = cookie.to_le_bytes();
    }
    Ok(())
}

impl<'a> DirEntry<'a> {
    /// Reads one entry.
    pub fn decode(r: &mut Reader<'a>) -> Result<DirEntry<'a>, Code> {
        let (cookie, ino, kind, with_attr) = (r.u64()?, Ino(r.u64()?), Kind::from_u8(r.u8()?)?, r.u8()?);
        let name = r.short_bytes()?;
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(Code::Malformed);
        }
        let attr = if with_attr != 0 { Some(Attr::decode(r)?) } else { None };
        Ok(DirEntry { cookie, ino, kind, name, attr })
    }
}

/// Collects entries of a directory into a bounded buffer.
#[derive(Debug)]
pub struct DirWriter<'a> {
    w: Writer<'a>,
}

impl<'a> DirWriter<'a> {
    /// Writes into `buffer`.
    pub fn new(buffer: &'a mut [u8]) -> Self {
        DirWriter { w: Writer::new(buffer) }
    }

    /// Appends an entry. False when it does not fit; then nothing was written.
    pub fn push(&mut self, e: &DirEntry<'_>) -> bool {
        let need = 20 + e.name.len() + if e.attr.is_some() { crate::ATTR_BYTES } else { 0 };
        if need > self.w.room() {
            return false;
        }
        let put = |w: &mut Writer<'_>| -> Result<(), Code> {
            w.u64(e.cookie)?;
            w.u64(e.ino.0)?;
            w.u8(e.kind as u8)?;
            w.u8(e.attr.is_some() as u8)?;
            w.short_bytes(e.name)?;
            if let Some(attr) = &e.attr {
                attr.encode(w)?;
            }
            Ok(())
        };
        put(&mut self.w).is_ok()
    }

    /// Bytes written.
    pub fn len(&self) -> usize {
        self.w.len()
    }

    /// True before the first entry.
    pub fn is_empty(&self) -> bool {
        self.w.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Timestamp;
    use crate::id::NodeId;
    use crate::lock::LockKind;
    use crate::target::TargetSpace;
    use proptest::prelude::*;

    fn attr(ino: u64) -> Attr {
        let t = Timestamp { sec: 1, nsec: 2 };
        Attr {
            ino: Ino(ino),
            size: 3,
            rdev: 4,
            parent: Ino(5),
            mode: 0o100_644,
            uid: 6,
            gid: 7,
            nlink: 8,
            flags: 9,
            home: NodeId(10),
            width_log2: 1,
            atime: t,
            mtime: Timestamp { sec: -1, nsec: 3 },
            ctime: t,
            btime: t,
        }
    }

    #[test]
    fn every_reply_round_trips() {
        let entry = Entry { attr: attr(1), layout: Layout::single(NodeId(1), 0) };
        let mut raw = [0; 1000];
        let mut d = DirWriter::new(&mut raw);
        let one = DirEntry { cookie: 9, ino: Ino(4), kind: Kind::Fifo, name: b"n", attr: None };
        let two = DirEntry { cookie: 10, ino: Ino(1), kind: Kind::File, name: b"m", attr: Some(attr(1)) };
        assert!(d.push(&one) && d.push(&two));
        let n = d.len();
        let entries = DirEntries { bytes: &raw[..n], end: true };
        assert_eq!(entries.iter().map(Result::unwrap).collect::<Vec<_>>(), [one, two]);
        let spaces = [1, 2].map(|n| TargetSpace {
            target: n,
            total_bytes: 1 << 40,
            free_bytes: u64::from(n),
            in_memory: n == 1,
        });
        let mut room = [0; 100];
        let spaces_of_two = TargetSpaces::encode(&spaces, &mut room).unwrap();
        assert_eq!(spaces_of_two.iter().collect::<Vec<_>>(), spaces);
        let all = [
            Ok(Reply::Placed(Targets::new(&[7, 8, 9]).unwrap())),
            Ok(Reply::Targets { inodes: 5, free_inodes: 6, spaces: spaces_of_two }),
            Ok(Reply::Lock(LockRequest { owner: 3, flock: false, kind: LockKind::Read, start: 4, end: 5 })),
            Ok(Reply::Parts(
                Parts::new(Ino(5), &[Ino::part(NodeId(1), 2), Ino::part(NodeId(2), 2)]).unwrap(),
            )),
            Err(Refusal::Wide(
                Parts::new(Ino(5), &[Ino::part(NodeId(1), 2), Ino::part(NodeId(2), 2)]).unwrap(),
            )),
            Ok(Reply::Done),
            Ok(Reply::Entry(entry)),
            Ok(Reply::Created { entry, created: true, next: Some(Ino(77)) }),
            Ok(Reply::Created { entry, created: false, next: None }),
            Ok(Reply::Relaid { ino: Ino(3), layout: entry.layout }),
            Ok(Reply::Removed { ino: Ino(3), last: true, kind: Kind::File, layout: entry.layout }),
            Ok(Reply::Bytes(b"target")),
            Ok(Reply::Entries(entries)),
            Ok(Reply::Number(Ino(9))),
            Ok(Reply::Space(PoolSpace { total_bytes: 1, free_bytes: 2, inodes: 3, free_inodes: 4 })),
            Ok(Reply::Elsewhere { ino: Ino(5), kind: Kind::Directory }),
            Ok(Reply::PartOfPath { top: Ino(5), parent: Ino(6), path: b"/a/b" }),
            Ok(Reply::Backing(BackingAttr { bytes: 7, mtime: attr(1).mtime, ..BackingAttr::default() })),
            Ok(Reply::Count(1 << 50)),
            Ok(Reply::Outcome(Outcome::Committed)),
            Err(Refusal::Code(Code::NotEmpty)),
        ];
        let mut buffer = [0; 2000];
        for answer in all {
            let n = Reply::encode_answer(&answer, &mut buffer).unwrap();
            assert_eq!(Reply::decode_answer(&buffer[..n]), answer);
            let without_parts = answer.map_err(|refusal| refusal.code());
            assert_eq!(Reply::decode(&buffer[..n]), without_parts);
            if let Some(owned) = answer.ok().and_then(Reply::owned) {
                assert_eq!(Ok(owned), without_parts);
            }
        }
    }

    #[test]
    fn push_into_a_full_buffer_writes_nothing() {
        let mut raw = [0; 21];
        let mut d = DirWriter::new(&mut raw);
        assert!(d.push(&DirEntry { cookie: 1, ino: Ino(1), kind: Kind::File, name: b"a", attr: None }));
        assert!(!d.push(&DirEntry { cookie: 2, ino: Ino(2), kind: Kind::File, name: b"b", attr: None }));
        assert_eq!(d.len(), 21);
    }

    proptest! {
        #[test]
        fn decode_of_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(Reply::Entries(entries)) = Reply::decode(&bytes) {
                let _ = entries.iter().count();
            }
        }
    }
}
