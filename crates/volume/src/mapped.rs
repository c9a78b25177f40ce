//! The pieces of one volume: those of this node mapped, or open if they are thin, and which are on other nodes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use forebay_sys::huge_pages;
use forebay_types::{BackingId, Code, Ino, PieceId, Segment, Volume};

use crate::far::Far;

/// Bytes of the page with the word of the pool's life.
const LIFE_BYTES: usize = 4096;
/// Bytes of the head, whose first word is the end of the volume's file.
const HEAD_BYTES: usize = forebay_types::limits::VOLUME_GRAIN_BYTES as usize;
/// The bit that the kernel sets in a robust futex when its owner dies (futex(2)).
const FUTEX_OWNER_DIED: u32 = 0x4000_0000;

/// A shared mapping.
#[derive(Debug)]
struct Map {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is shared with other processes anyway: it is only accessed by copies through raw pointers, and
// atomically.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps all `bytes` of a descriptor, whose size must be sealed.
    fn new(fd: BorrowedFd<'_>, bytes: usize, writes: bool) -> io::Result<Map> {
        let protection = if writes { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: the structure is writable for the call.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) != 0 {
                return Err(io::Error::last_os_error());
            }
            // An access beyond the end would be SIGBUS. So would one to a hole of a file for which there is no space: such a
            // file has no seal.
            let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
            if stat.st_size < bytes as i64 || seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
        }
        let base = huge_pages::map_shared(fd, 0, bytes, protection)?;
        // A core dump of the program would have all of the volume: for the kernel it is memory that no file has.
        // SAFETY: the mapping is ours; no byte changes.
        unsafe { libc::madvise(base.cast(), bytes, libc::MADV_DONTDUMP) };
        Ok(Map { base, bytes })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no pointer into it is used any longer: the callers of `pointer` promise it.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// The word that says that the pool lives.
#[derive(Debug)]
pub struct Life {
    page: Map,
    /// Its value in this pool's life.
    value: u32,
}

impl Life {
    /// Maps the page that the daemon gives beside a piece. [`Code::PoolGone`] if the pool is gone already.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Life, Code> {
        let page = Map::new(fd, LIFE_BYTES, false).map_err(code)?;
        let life = Life { page, value: 0 };
        match life.word() {
            value if value == 0 || value & FUTEX_OWNER_DIED != 0 => Err(Code::PoolGone),
            value => Ok(Life { value, ..life }),
        }
    }

    #[inline]
    fn word(&self) -> u32 {
        // SAFETY: mapped, aligned, and only accessed atomically.
        unsafe { AtomicU32::from_ptr(self.page.base.cast()) }.load(Ordering::Acquire)
    }

    /// Fails if the pool is gone.
    #[inline]
    pub fn check(&self) -> Result<(), Code> {
        match self.word() == self.value {
            true => Ok(()),
            false => Err(Code::PoolGone),
        }
    }
}

fn code(e: io::Error) -> Code {
    e.raw_os_error().map_or(Code::Io, Code::from_errno)
}

/// A piece of a volume.
#[derive(Debug)]
enum Piece {
    Here(Map),
    /// A thin piece of this node.
    File(OwnedFd),
    There(BackingId),
}

/// Where a byte of a volume is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In this process's memory.
    Here(*mut u8),
    /// At an offset of a file that is open as long as the volume.
    File(RawFd, u64),
    /// At an offset of a piece on another node.
    There(BackingId, u64),
}

/// See the module.
#[derive(Debug)]
pub struct Mapped {
    ino: Ino,
    /// None where nobody asked for it.
    head: Option<Map>,
    /// Pieces of all segments, in their order.
    pieces: Vec<Piece>,
    /// Each segment with its first byte and the index of its first piece.
    segments: Vec<(u64, usize, Segment)>,
    bytes: u64,
    is_writable: bool,
    /// None if no piece is on this node.
    life: Option<Life>,
    /// Some if a piece is on another node.
    far: Option<Arc<dyn Far>>,
}

impl Mapped {
    /// Maps a volume. `piece` maps onto each piece's descriptor, none for a piece on another node; it is asked for each
    /// once, in their order. `life` is there if a piece is here, `far` if one is on another node.
    pub fn new<F: std::os::fd::AsFd>(
        volume: &Volume,
        is_writable: bool,
        (life, far): (Option<Life>, Option<Arc<dyn Far>>),
        mut piece: impl FnMut(PieceId, u32) -> Result<Option<F>, Code>,
    ) -> Result<Mapped, Code> {
        let (ino, head, bytes) = (volume.ino, None, 0);
        let (pieces, segments) = (Vec::new(), Vec::new());
        let mut mapped = Mapped { ino, head, pieces, segments, bytes, is_writable, life, far };
        for (segment, number) in volume.usable().iter().zip(&volume.numbers) {
            mapped.segments.push((mapped.bytes, mapped.pieces.len(), *segment));
            mapped.bytes += segment.bytes;
            for (index, target) in (0..).zip(segment.targets.as_slice()) {
                let id = PieceId { volume: volume.ino, segment: *number, index };
                let bytes = usize::try_from(segment.piece_bytes(index)).map_err(|_| Code::NoMemory)?;
                mapped.pieces.push(match piece(id, *target)? {
                    None => Piece::There(BackingId::of_piece(*target, id)),
                    Some(fd) if segment.is_thin => {
                        let fd = fd.as_fd().try_clone_to_owned().map_err(code)?;
                        Piece::File(fd)
                    }
                    Some(_) if bytes == 0 => Piece::Here(Map { base: ptr::null_mut(), bytes: 0 }),
                    Some(fd) => Piece::Here(Map::new(fd.as_fd(), bytes, is_writable).map_err(code)?),
                });
            }
        }
        Ok(mapped)
    }

    /// Maps the volume's head too.
    ///
    /// # Errors
    /// What mmap(2) says; [`Code::Io`] for a descriptor that is too short.
    pub fn with_head(mut self, fd: BorrowedFd<'_>) -> Result<Mapped, Code> {
        self.head = Some(Map::new(fd, HEAD_BYTES, self.is_writable).map_err(code)?);
        Ok(self)
    }

    /// The number of its pieces.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Its first piece.
    pub(crate) fn first_piece(&self) -> Option<BackingId> {
        let (.., segment) = self.segments.first()?;
        let target = segment.targets.as_slice().first()?;
        Some(BackingId::of_piece(*target, PieceId { volume: self.ino, segment: 0, index: 0 }))
    }

    /// The same, if it is on another node.
    pub(crate) fn first_far_piece(&self) -> Option<BackingId> {
        match self.pieces.first() {
            Some(Piece::There(id)) => Some(*id),
            _ => None,
        }
    }

    /// How many of its pieces are on other nodes.
    pub(crate) fn far_pieces(&self) -> usize {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::There(_))).count()
    }

    /// The volume's number.
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// The word that says where the volume's file ends (`file.rs`), if the head is mapped. Mapped read-only unless the
    /// volume is open for writing.
    #[inline]
    pub(crate) fn end_word(&self) -> Option<&AtomicU64> {
        // SAFETY: mapped as long as `self`, aligned, and only accessed atomically; never changed where it is read-only.
        self.head.as_ref().map(|head| unsafe { AtomicU64::from_ptr(head.base.cast()) })
    }

    /// The size.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if it was opened for writing.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Fails if its pool is gone. Where no piece is on this node, the daemon finds out when it is used.
    #[inline]
    pub(crate) fn check_life(&self) -> Result<(), Code> {
        self.life.as_ref().map_or(Ok(()), Life::check)
    }

    /// The way to its pieces on other nodes, if there are any.
    #[inline]
    pub(crate) fn far(&self) -> Option<&Arc<dyn Far>> {
        self.far.as_ref()
    }

    /// Where the byte `offset` is, and how many bytes follow each other from there on. `offset` is below the size.
    #[inline]
    pub(crate) fn place(&self, offset: u64) -> (Place, u64) {
        let (first, piece, segment) = match self.segments.as_slice() {
            [only] => only,
            all => &all[all.partition_point(|(first, ..)| *first <= offset) - 1],
        };
        let (index, at, run) = segment.locate(offset - first);
        match &self.pieces[piece + usize::from(index)] {
            Piece::Here(map) => {
                assert!(at + run <= map.bytes as u64);
                // SAFETY: within the mapping (asserted).
                (Place::Here(unsafe { map.base.add(at as usize) }), run)
            }
            Piece::File(fd) => (Place::File(fd.as_raw_fd(), at), run),
            Piece::There(id) => (Place::There(*id, at), run),
        }
    }

    /// True if all of it is mapped here.
    pub(crate) fn is_mapped(&self) -> bool {
        self.pieces.iter().all(|piece| matches!(piece, Piece::Here(_)))
    }

    /// True if its memory is not reserved.
    pub(crate) fn is_thin(&self) -> bool {
        self.segments.first().is_some_and(|(.., segment)| segment.is_thin)
    }

    /// The bytes that it takes.
    ///
    /// # Errors
    /// [`Code::Io`] if a thin piece on another node cannot be reached.
    pub(crate) fn allocated(&self) -> Result<u64, Code> {
        if !self.is_thin() {
            return Ok(self.bytes);
        }
        let of = |piece: &Piece| match (piece, &self.far) {
            (Piece::File(fd), _) => crate::thin::allocated(fd.as_raw_fd()),
            (Piece::There(id), Some(far)) => far.allocated(*id),
            (Piece::Here(_) | Piece::There(_), _) => Ok(0),
        };
        self.pieces.iter().map(of).sum()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Volumes in memory, for tests.

    use super::*;
    use forebay_types::{target_of, Ino, NodeId, Targets};
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    pub(crate) fn memfd(bytes: u64) -> OwnedFd {
        // SAFETY: plain system calls; the descriptor is new and ours.
        unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0 && libc::ftruncate(fd, bytes as i64) == 0);
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK), 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    pub(crate) fn set(fd: &OwnedFd, word: u32) {
        // SAFETY: the memory lives over the call.
        let n = unsafe { libc::pwrite(fd.as_raw_fd(), (&raw const word).cast(), 4, 0) };
        assert_eq!(n, 4);
    }

    /// A thin volume of segments of (bytes, stripe, pieces).
    pub(crate) fn thin(segments: &[(u64, u64, u16)]) -> Mapped {
        of(segments, true, true).0
    }

    /// A volume of such segments, and its life.
    pub(crate) fn mapped(segments: &[(u64, u64, u16)], is_writable: bool) -> (Mapped, OwnedFd) {
        of(segments, is_writable, false)
    }

    fn of(segments: &[(u64, u64, u16)], is_writable: bool, is_thin: bool) -> (Mapped, OwnedFd) {
        let segment = |(bytes, stripe, pieces): &(u64, u64, u16)| {
            let targets: Vec<u32> = (0..*pieces).map(|i| target_of(NodeId(1), i)).collect();
            Segment::new(*bytes, *stripe, Targets::new(&targets).unwrap()).unwrap().thin(is_thin)
        };
        let segments: Vec<Segment> = segments.iter().map(segment).collect();
        let volume = Volume {
            ino: Ino(9),
            uid: 0,
            gid: 0,
            mode: 0o600,
            created_seconds: 0,
            maker: 0,
            complete: segments.len() as u16,
            numbers: (0..segments.len() as u16).collect(),
            next_number: segments.len() as u16,
            segments,
        };
        let life = memfd(LIFE_BYTES as u64);
        set(&life, 77);
        let piece =
            |id: PieceId, _| Ok(Some(memfd(volume.segments[usize::from(id.segment)].piece_bytes(id.index))));
        let its = (Some(Life::map(life.as_fd()).unwrap()), None);
        (Mapped::new(&volume, is_writable, its, piece).unwrap(), life)
    }

    #[test]
    fn life_that_is_over_is_refused_and_one_that_ends_is_noticed() {
        let page = memfd(LIFE_BYTES as u64);
        for over in [0, FUTEX_OWNER_DIED, FUTEX_OWNER_DIED | 5] {
            set(&page, over);
            assert_eq!(Life::map(page.as_fd()).map(drop), Err(Code::PoolGone), "{over:x}");
        }
        set(&page, 5);
        let life = Life::map(page.as_fd()).unwrap();
        assert_eq!(life.check(), Ok(()));
        set(&page, FUTEX_OWNER_DIED);
        assert_eq!(life.check(), Err(Code::PoolGone));
        set(&page, 6);
        assert_eq!(life.check(), Err(Code::PoolGone), "another life");
    }

    #[test]
    fn piece_that_is_too_short_or_not_sealed_is_refused_and_never_a_signal() {
        let (whole, _life) = mapped(&[(8192, 4096, 2)], true);
        assert_eq!(whole.bytes(), 8192);
        assert!(Map::new(memfd(4096).as_fd(), 8192, true).is_err());
        // SAFETY: plain system calls; the descriptor is new and ours.
        let unsealed =
            unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        // SAFETY: plain system call.
        assert_eq!(unsafe { libc::ftruncate(unsealed.as_raw_fd(), 8192) }, 0);
        assert!(Map::new(unsealed.as_fd(), 8192, true).is_err());
    }
}
