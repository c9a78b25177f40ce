//! Volumes: ranges of pooled memory that programs put to and get from (docs/decisions/0048). Their record in the shard,
//! and the arithmetic from an offset to a place in a piece.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::{Ino, NodeId};
use crate::limits::{
    NAME_MAX, VOLUME_BYTES_MAX, VOLUME_GRAIN_BYTES, VOLUME_SEGMENTS_BEGUN_MAX, VOLUME_SEGMENTS_MAX,
    VOLUME_STRIPE_BYTES_MAX,
};
use crate::target::{node_of, Targets};

/// Version byte of a record. In version 1 segments had no numbers, which were those of their
/// places, and none was thin.
const RECORD_VERSION: u8 = 2;

/// A part of a volume that was reserved at one time: its bytes are striped over its pieces, RAID-0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Bytes: a multiple of [`VOLUME_GRAIN_BYTES`].
    pub bytes: u64,
    /// Bytes of a stripe, likewise.
    pub stripe_bytes: u64,
    /// The target of each piece.
    pub targets: Targets,
    /// Its memory is not reserved: it takes what was written, and a write may fail for want of space.
    pub is_thin: bool,
}

impl Segment {
    /// A segment; [`Code::Invalid`] for sizes that are zero, too large or not multiples of the grain.
    pub fn new(bytes: u64, stripe_bytes: u64, targets: Targets) -> Result<Segment, Code> {
        let is_whole =
            |bytes: u64, most| bytes > 0 && bytes <= most && bytes.is_multiple_of(VOLUME_GRAIN_BYTES);
        match is_whole(bytes, VOLUME_BYTES_MAX) && is_whole(stripe_bytes, VOLUME_STRIPE_BYTES_MAX) {
            true => Ok(Segment { bytes, stripe_bytes, targets, is_thin: false }),
            false => Err(Code::Invalid),
        }
    }

    /// The same, thin or not.
    pub fn thin(self, is_thin: bool) -> Segment {
        Segment { is_thin, ..self }
    }

    /// The number of pieces.
    pub fn pieces(&self) -> u16 {
        self.targets.as_slice().len() as u16
    }

    /// Bytes of a piece.
    pub fn piece_bytes(&self, index: u16) -> u64 {
        let (n, index) = (u64::from(self.pieces()), u64::from(index));
        let (stripes, rest) = (self.bytes / self.stripe_bytes, self.bytes % self.stripe_bytes);
        let whole = stripes / n + u64::from(index < stripes % n);
        whole * self.stripe_bytes + if index == stripes % n { rest } else { 0 }
    }

    /// The piece that has the byte `offset` of this segment, the byte's offset in it, and the number of bytes from
    /// there on that follow each other in the piece.
    #[inline]
    pub fn locate(&self, offset: u64) -> (u16, u64, u64) {
        let n = u64::from(self.pieces());
        if n == 1 {
            return (0, offset, self.bytes - offset);
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        let run = (self.stripe_bytes - within).min(self.bytes - offset);
        ((stripe % n) as u16, stripe / n * self.stripe_bytes + within, run)
    }

    /// Appends its bytes.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.bytes)?;
        w.u64(self.stripe_bytes)?;
        w.u8(u8::from(self.is_thin))?;
        self.targets.encode(w)
    }

    /// Reads it.
    pub fn decode(r: &mut Reader<'_>) -> Result<Segment, Code> {
        let (bytes, stripe_bytes) = (r.u64()?, r.u64()?);
        let is_thin = match r.u8()? {
            0 => false,
            1 => true,
            _ => return Err(Code::Malformed),
        };
        Ok(Segment::new(bytes, stripe_bytes, Targets::decode(r)?)?.thin(is_thin))
    }
}

/// The number of a piece in the whole pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PieceId {
    /// The volume's number.
    pub volume: Ino,
    /// The number of its segment ([`Volume::numbers`]).
    pub segment: u16,
    /// The piece of the segment.
    pub index: u16,
}

impl PieceId {
    /// Its segment.
    pub fn of_segment(&self) -> SegmentId {
        SegmentId { volume: self.volume, number: self.segment }
    }

    /// Appends its bytes.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.volume.0)?;
        w.u16(self.segment)?;
        w.u16(self.index)
    }

    /// Reads it.
    pub fn decode(r: &mut Reader<'_>) -> Result<PieceId, Code> {
        Ok(PieceId { volume: Ino(r.u64()?), segment: r.u16()?, index: r.u16()? })
    }
}

impl std::fmt::Display for PieceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.volume.0, self.segment, self.index)
    }
}

/// The number of a segment in the whole pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentId {
    /// The volume's number.
    pub volume: Ino,
    /// The segment's number ([`Volume::numbers`]).
    pub number: u16,
}

impl SegmentId {
    /// Bytes of one in a list.
    pub const BYTES: usize = 10;

    /// Encodes a list of them.
    pub fn list(ids: &[SegmentId]) -> Vec<u8> {
        let one = |id: &SegmentId| {
            let mut bytes = [0; SegmentId::BYTES];
            bytes[..8].copy_from_slice(&id.volume.0.to_le_bytes());
            bytes[8..].copy_from_slice(&id.number.to_le_bytes());
            bytes
        };
        ids.iter().flat_map(one).collect()
    }

    /// The list that was encoded so.
    pub fn listed(bytes: &[u8]) -> impl Iterator<Item = SegmentId> + '_ {
        bytes.chunks_exact(SegmentId::BYTES).filter_map(|one| {
            let mut r = Reader::new(one);
            Some(SegmentId { volume: Ino(r.u64().ok()?), number: r.u16().ok()? })
        })
    }
}

/// Who may use a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits; execute permission has no meaning.
    pub mode: u32,
}

impl Rights {
    /// True if a user may read, and write if `writes`.
    pub fn allow(&self, uid: u32, gid: u32, writes: bool) -> bool {
        let shift = match (uid == self.uid, gid == self.gid) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        let wanted = if writes { 0o6 } else { 0o4 };
        uid == 0 || (self.mode >> shift) & wanted == wanted
    }
}

/// A volume as the shard records it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume {
    /// Its number: an inode number of its home, never used again.
    pub ino: Ino,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits; execute permission has no meaning.
    pub mode: u32,
    /// Seconds since 1970 at which it was created.
    pub created_seconds: u64,
    /// The session of the process that reserves the last segment; 0 when all are complete.
    pub maker: u64,
    /// The number of complete segments. A volume without one is not visible.
    pub complete: u16,
    /// Its segments, in the order of their bytes.
    pub segments: Vec<Segment>,
    /// The number of each: one more than that of the segment that was begun before it, which may be gone. So a piece that
    /// another node has not dropped yet is never taken for a newer one.
    pub numbers: Vec<u16>,
    /// The number of the segment that will be begun next.
    pub next_number: u16,
}

impl Volume {
    /// Bytes of its longest record.
    pub const RECORD_BYTES_MAX: usize =
        1 + 8 + 4 + 4 + 4 + 8 + 8 + 2 + 2 + 2 + VOLUME_SEGMENTS_MAX * (2 + 8 + 8 + 1 + 1 + 4 * 8);

    /// True once it was created in full.
    pub fn is_visible(&self) -> bool {
        self.complete > 0
    }

    /// True if its memory is not reserved. All of its segments are as the first.
    pub fn is_thin(&self) -> bool {
        self.segments.first().is_some_and(|segment| segment.is_thin)
    }

    /// The complete segments.
    pub fn usable(&self) -> &[Segment] {
        &self.segments[..usize::from(self.complete)]
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.usable().iter().map(|segment| segment.bytes).sum()
    }

    /// Appends a segment, which is not complete.
    ///
    /// # Errors
    /// [`Code::TooManyLinks`] if it has as many as it can have, or has had.
    pub fn begin(&mut self, segment: Segment) -> Result<(), Code> {
        if self.segments.len() >= VOLUME_SEGMENTS_MAX || self.next_number >= VOLUME_SEGMENTS_BEGUN_MAX {
            return Err(Code::TooManyLinks);
        }
        self.segments.push(segment);
        self.numbers.push(self.next_number);
        self.next_number += 1;
        Ok(())
    }

    /// Drops all but its first segments.
    pub fn keep(&mut self, segments: u16) {
        self.segments.truncate(usize::from(segments));
        self.numbers.truncate(usize::from(segments));
    }

    /// Its pieces, those that are being reserved too: number, target, bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (PieceId, u32, u64)> + '_ {
        self.pieces_of(0..self.segments.len())
    }

    /// The pieces of its complete segments.
    pub fn usable_pieces(&self) -> impl Iterator<Item = (PieceId, u32, u64)> + '_ {
        self.pieces_of(0..usize::from(self.complete))
    }

    /// The pieces that are being reserved.
    pub fn open_pieces(&self) -> impl Iterator<Item = (PieceId, u32, u64)> + '_ {
        self.pieces_of(usize::from(self.complete)..self.segments.len())
    }

    fn pieces_of(&self, some: std::ops::Range<usize>) -> impl Iterator<Item = (PieceId, u32, u64)> + '_ {
        some.flat_map(move |i| {
            let segment = &self.segments[i];
            segment.targets.as_slice().iter().enumerate().map(move |(index, target)| {
                let id = PieceId { volume: self.ino, segment: self.numbers[i], index: index as u16 };
                (id, *target, segment.piece_bytes(id.index))
            })
        })
    }

    /// The nodes that have pieces of it.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.pieces().map(|(_, target, _)| node_of(target)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// True if a user may read it, and write to it if `writes`.
    pub fn allows(&self, uid: u32, gid: u32, writes: bool) -> bool {
        Rights { uid: self.uid, gid: self.gid, mode: self.mode }.allow(uid, gid, writes)
    }

    /// Appends the record.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(RECORD_VERSION)?;
        w.u64(self.ino.0)?;
        for v in [self.uid, self.gid, self.mode] {
            w.u32(v)?;
        }
        w.u64(self.created_seconds)?;
        w.u64(self.maker)?;
        w.u16(self.complete)?;
        w.u16(self.segments.len() as u16)?;
        w.u16(self.next_number)?;
        self.segments.iter().zip(&self.numbers).try_for_each(|(segment, number)| {
            w.u16(*number)?;
            segment.encode(w)
        })
    }

    /// Reads the record; [`Code::Corrupt`] for one of another version or with impossible contents.
    pub fn decode(r: &mut Reader<'_>) -> Result<Volume, Code> {
        let version = r.u8()?;
        if version == 0 || version > RECORD_VERSION {
            return Err(Code::Corrupt);
        }
        let ino = Ino(r.u64()?);
        let (uid, gid, mode) = (r.u32()?, r.u32()?, r.u32()?);
        let (created_seconds, maker, complete) = (r.u64()?, r.u64()?, r.u16()?);
        let count = usize::from(r.u16()?);
        if count == 0 || count > VOLUME_SEGMENTS_MAX || usize::from(complete) > count {
            return Err(Code::Corrupt);
        }
        let next_number = if version == 1 { count as u16 } else { r.u16()? };
        let (mut segments, mut numbers) = (Vec::new(), Vec::new());
        for place in 0..count {
            if version == 1 {
                numbers.push(place as u16);
                segments.push(Segment::new(r.u64()?, r.u64()?, Targets::decode(r)?)?);
                continue;
            }
            numbers.push(r.u16()?);
            segments.push(Segment::decode(r)?);
        }
        // The first has the head of the volume beside it, and is never dropped.
        let are_sound = numbers[0] == 0
            && numbers.is_sorted_by(|a, b| a < b)
            && numbers[count - 1] < next_number
            && next_number <= VOLUME_SEGMENTS_BEGUN_MAX;
        // One maker at a time, and only of the last segment.
        let open = count - usize::from(complete);
        let volume =
            Volume { ino, uid, gid, mode, created_seconds, maker, complete, segments, numbers, next_number };
        match are_sound && open <= 1 && (open == 1) == (maker != 0) {
            true => Ok(volume),
            false => Err(Code::Corrupt),
        }
    }
}

/// Checks the name of a volume: 1 to 255 bytes that a specifier can hold, so none of `/`, `:` and `+`, and no control
/// characters.
///
/// # Errors
/// [`Code::NotFound`] for the empty name, [`Code::NameTooLong`], [`Code::Invalid`].
pub fn check_volume_name(name: &[u8]) -> Result<(), Code> {
    match name {
        [] => Err(Code::NotFound),
        _ if name.len() > NAME_MAX => Err(Code::NameTooLong),
        b"." | b".." => Err(Code::Invalid),
        _ if name.iter().any(|b| matches!(b, b'/' | b':' | b'+' | 0..=31 | 127)) => Err(Code::Invalid),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::target_of;
    use proptest::prelude::*;

    fn segment(bytes: u64, stripe_bytes: u64, pieces: u16) -> Segment {
        let targets: Vec<u32> = (0..pieces).map(|i| target_of(NodeId(1 + i), 0)).collect();
        Segment::new(bytes, stripe_bytes, Targets::new(&targets).unwrap()).unwrap()
    }

    proptest! {
        /// Every byte has one place, pieces are filled without gaps, and runs end where the piece changes.
        #[test]
        fn locate_maps_a_segment_onto_its_pieces(pages in 1u64..40, stripe in 1u64..5, pieces in 1u16..=8) {
            let grain = VOLUME_GRAIN_BYTES;
            let segment = segment(pages * grain, stripe * grain, pieces);
            let mut next = vec![0; usize::from(pieces)];
            let mut offset = 0;
            while offset < segment.bytes {
                let (piece, at, run) = segment.locate(offset);
                prop_assert_eq!(at, next[usize::from(piece)]);
                prop_assert!(run > 0 && (pieces == 1 || run <= segment.stripe_bytes));
                prop_assert_eq!(segment.locate(offset + run - 1), (piece, at + run - 1, 1));
                next[usize::from(piece)] += run;
                offset += run;
            }
            prop_assert_eq!(offset, segment.bytes);
            for (index, bytes) in next.into_iter().enumerate() {
                prop_assert_eq!(segment.piece_bytes(index as u16), bytes);
            }
        }

        #[test]
        fn decode_of_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Volume::decode(&mut Reader::new(&bytes));
        }
    }

    #[test]
    fn record_comes_back_and_impossible_ones_are_refused() {
        let mut volume = Volume {
            ino: Ino(9),
            uid: 1000,
            gid: 100,
            mode: 0o640,
            created_seconds: 5,
            maker: 0,
            complete: 2,
            segments: vec![segment(1 << 20, 4096, 3), segment(1 << 20, 4096, 3).thin(true)],
            numbers: vec![0, 7],
            next_number: 9,
        };
        let mut bytes = [0; Volume::RECORD_BYTES_MAX];
        let mut coded = |volume: &Volume| {
            let mut w = Writer::new(&mut bytes);
            volume.encode(&mut w).unwrap();
            let n = w.len();
            Volume::decode(&mut Reader::new(&bytes[..n]))
        };
        assert_eq!(coded(&volume), Ok(volume.clone()));
        assert_eq!((volume.bytes(), volume.pieces().count(), volume.nodes().len()), (2 << 20, 6, 3));
        let segments: Vec<u16> = volume.pieces().map(|(id, ..)| id.segment).collect();
        assert_eq!(segments, [0, 0, 0, 7, 7, 7], "pieces have the numbers of their segments");
        for numbers in [vec![0, 0], vec![1, 7], vec![0, 9]] {
            let wrong = Volume { numbers, ..volume.clone() };
            assert_eq!(coded(&wrong), Err(Code::Corrupt), "{wrong:?}");
        }
        volume.segments = vec![segment(VOLUME_BYTES_MAX, 4096, 8); VOLUME_SEGMENTS_MAX];
        volume.next_number = VOLUME_SEGMENTS_BEGUN_MAX;
        volume.numbers = (0..volume.segments.len() as u16).collect();
        volume.complete = VOLUME_SEGMENTS_MAX as u16;
        assert_eq!(coded(&volume), Ok(volume.clone()), "the longest fits");
        volume.complete -= 1;
        assert_eq!(coded(&volume), Err(Code::Corrupt), "an open segment without a maker");
        volume.maker = 7;
        assert_eq!(coded(&volume), Ok(volume.clone()));
        volume.complete -= 1;
        assert_eq!(coded(&volume), Err(Code::Corrupt), "two open segments");
    }

    #[test]
    fn numbers_of_segments_are_not_used_again_and_end_some_time() {
        let (new, mut volume) = (segment(4096, 4096, 1), tests_volume(0o600));
        volume.begin(new).unwrap();
        volume.keep(1);
        volume.begin(new).unwrap();
        assert_eq!((volume.numbers.as_slice(), volume.next_number), ([0, 2].as_slice(), 3));
        volume.complete = 2;
        assert_eq!((volume.usable_pieces().count(), volume.open_pieces().count()), (2, 0));
        volume.complete = 1;
        let open: Vec<u16> = volume.open_pieces().map(|(id, ..)| id.segment).collect();
        assert_eq!((volume.usable_pieces().count(), open), (1, vec![2]));
        while volume.next_number < VOLUME_SEGMENTS_BEGUN_MAX {
            volume.keep(1);
            volume.begin(new).unwrap();
        }
        volume.keep(1);
        assert_eq!(volume.begin(new), Err(Code::TooManyLinks));
    }

    #[test]
    fn record_without_numbers_of_segments_is_read() {
        let volume = tests_volume(0o600);
        let mut bytes = [0; Volume::RECORD_BYTES_MAX];
        let mut w = Writer::new(&mut bytes);
        volume.encode(&mut w).unwrap();
        let n = w.len();
        let head = 1 + 8 + 4 + 4 + 4 + 8 + 8 + 2 + 2;
        let (sizes, targets) = (head + 4, head + 4 + 16);
        let old = [&[1], &bytes[1..head], &bytes[sizes..targets], &bytes[targets + 1..n]].concat();
        assert_eq!(Volume::decode(&mut Reader::new(&old)), Ok(volume));
    }

    #[test]
    fn list_of_segments_comes_back() {
        let ids = [SegmentId { volume: Ino(1 << 50), number: 8191 }, SegmentId { volume: Ino(3), number: 0 }];
        assert_eq!(SegmentId::listed(&SegmentId::list(&ids)).collect::<Vec<_>>(), ids);
    }

    fn tests_volume(mode: u32) -> Volume {
        Volume {
            ino: Ino(9),
            uid: 1000,
            gid: 100,
            mode,
            created_seconds: 0,
            maker: 0,
            complete: 1,
            segments: vec![segment(4096, 4096, 1)],
            numbers: vec![0],
            next_number: 1,
        }
    }

    #[test]
    fn segment_of_a_size_that_is_no_whole_number_of_pages_is_refused() {
        let one = Targets::new(&[1]).unwrap();
        for (bytes, stripe) in
            [(0, 4096), (4095, 4096), (4096, 0), (4096, 5000), (VOLUME_BYTES_MAX + 4096, 4096)]
        {
            assert_eq!(Segment::new(bytes, stripe, one), Err(Code::Invalid), "{bytes} {stripe}");
        }
    }

    #[test]
    fn rights_are_those_of_the_first_class_that_fits() {
        let volume = tests_volume(0o046);
        assert!(!volume.allows(1000, 100, false), "the owner's bits count, not the group's");
        assert!(volume.allows(1001, 100, false) && !volume.allows(1001, 100, true));
        assert!(volume.allows(1001, 101, true) && volume.allows(0, 0, true));
    }

    #[test]
    fn names_that_a_specifier_cannot_hold_are_refused() {
        for good in [b"a".as_slice(), b"x.y z", "Größe".as_bytes(), b"...", &[b'x'; 255]] {
            assert_eq!(check_volume_name(good), Ok(()), "{good:?}");
        }
        for bad in [b".".as_slice(), b"..", b"a/b", b"a:b", b"a+b", b"a\nb", b"a\0"] {
            assert_eq!(check_volume_name(bad), Err(Code::Invalid), "{bad:?}");
        }
        assert_eq!(check_volume_name(b""), Err(Code::NotFound));
        assert_eq!(check_volume_name(&[b'x'; 256]), Err(Code::NameTooLong));
    }
}
