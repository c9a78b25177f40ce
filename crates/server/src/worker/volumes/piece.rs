//! The memory of one piece of a volume: a memfd of mode 0600 whose size is sealed, so that no process can make another's
//! access fault; that of a thin one is a file of the target without a name. Each holder of a descriptor or a mapping has a shared lock (flock) on it; see [`Piece::open`].
//!
//! Beside the first piece of a volume is its head, such a memfd of one page: its first word is the end of the volume's file
//! (`crates/volume/src/file.rs`). A process that maps the head has mapped the piece before.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use forebay_data::{Bounds, Host, Medium};
use forebay_sys::{descriptor, huge_pages};
use forebay_types::limits::VOLUME_GRAIN_BYTES;
use forebay_types::{Code, PieceId, Rights};
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;

use crate::store::{PIECE_TAG, THIN_PIECE_TAG};
use crate::worker::piece_table::{self, PieceKind};

/// Bytes that one call frees.
const FREE_BYTES: u64 = 256 << 20;

pub(super) fn code(e: Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

/// Memory that the helper thread works on.
pub(super) type Memory = Arc<OwnedFd>;

/// A piece on this node.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) kind: PieceKind,
    /// The bytes from its beginning that are reserved; all of a thin piece, for which there is nothing to do.
    pub(super) reserved: u64,
    pub(super) memory: Memory,
    /// The head of its volume, beside the first piece.
    head: Option<Memory>,
}

impl Piece {
    /// Makes a piece of the target in this directory, nothing of which is reserved.
    pub(super) fn make(id: PieceId, kind: PieceKind, target: BorrowedFd<'_>) -> Result<Piece, Code> {
        let memory = match kind.is_thin {
            true => unnamed(target, kind.bytes)?,
            false => sealed(&format!("forebay-volume-{id}"), kind.bytes)?,
        };
        let memory = Arc::new(memory);
        let head = match Piece::head_bytes(id) {
            0 => None,
            bytes => {
                let head = sealed(&format!("forebay-head-{id}"), bytes)?;
                reserve(&head, 0, bytes)?;
                Some(Arc::new(head))
            }
        };
        let reserved = if kind.is_thin { kind.bytes } else { 0 };
        Ok(Piece { kind, reserved, memory, head })
    }

    /// Bytes of the head that is beside a piece.
    pub(super) fn head_bytes(id: PieceId) -> u64 {
        match (id.segment, id.index) {
            (0, 0) => VOLUME_GRAIN_BYTES,
            _ => 0,
        }
    }

    /// Bytes that files cannot have while a piece is there, with those of the head. None: more than there can be.
    pub(super) fn held(id: PieceId, kind: &PieceKind) -> Option<u64> {
        let own = if kind.is_thin { 0 } else { kind.bytes };
        own.checked_add(Piece::head_bytes(id))
    }

    /// The same of this one.
    pub(super) fn held_bytes(&self) -> u64 {
        let own = if self.kind.is_thin { 0 } else { self.kind.bytes };
        own + self.head.as_ref().map_or(0, |_| VOLUME_GRAIN_BYTES)
    }

    /// Bytes that it takes: of a thin one those that were written and not discarded.
    pub(super) fn taken_bytes(&self) -> u64 {
        let written = || rustix::fs::fstat(&*self.memory).map_or(0, |stat| stat.st_blocks as u64 * 512);
        if self.kind.is_thin {
            written()
        } else {
            self.kind.bytes
        }
    }

    /// What the supervisor keeps.
    pub(super) fn kept(&self) -> Vec<BorrowedFd<'_>> {
        let head = self.head.as_ref().map(|head| head.as_fd());
        std::iter::once((*self.memory).as_fd()).chain(head).collect()
    }

    /// The tag under which the supervisor keeps it.
    pub(super) fn tag(id: PieceId, PieceKind { target, bytes, rights, is_thin }: &PieceKind) -> String {
        let rights =
            rights.map_or_else(String::new, |Rights { uid, gid, mode }| format!(" {uid} {gid} {mode}"));
        // No seal keeps the size of a file.
        let tag = if *is_thin { format!("{THIN_PIECE_TAG}{bytes} ") } else { PIECE_TAG.to_owned() };
        format!("{tag}{} {} {} {target}{rights}", id.volume.0, id.segment, id.index)
    }

    /// A piece that an earlier worker left with the supervisor; the descriptors again for another tag.
    pub(super) fn restored(tag: &str, mut fds: Vec<OwnedFd>) -> Result<(PieceId, Piece), Vec<OwnedFd>> {
        let found = match fds.as_slice() {
            [memory, heads @ ..] => Piece::found(tag, memory)
                .filter(|(id, ..)| heads.len() as u64 * VOLUME_GRAIN_BYTES == Piece::head_bytes(*id)),
            [] => None,
        };
        let Some((id, kind, reserved)) = found else { return Err(fds) };
        let head = if fds.len() > 1 { fds.pop().map(Arc::new) } else { None };
        let Some(memory) = fds.pop() else { return Err(fds) };
        Ok((id, Piece { kind, reserved, memory: Arc::new(memory), head }))
    }

    /// Number, kind and reserved bytes of a piece that was kept under a tag.
    fn found(tag: &str, memory: &OwnedFd) -> Option<(PieceId, PieceKind, u64)> {
        let (is_thin, numbers) = match tag.strip_prefix(THIN_PIECE_TAG) {
            Some(numbers) => (true, numbers),
            None => (false, tag.strip_prefix(PIECE_TAG)?),
        };
        let mut numbers = numbers.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        let thin_bytes = if is_thin { Some(next()?) } else { None };
        let volume = forebay_types::Ino(next()?);
        let (segment, index) = (u16::try_from(next()?).ok()?, u16::try_from(next()?).ok()?);
        let target = u16::try_from(next()?).ok()?;
        let rights = match next() {
            Some(uid) => {
                let right = |value| u32::try_from(value).ok();
                Some(Rights { uid: right(uid)?, gid: right(next()?)?, mode: right(next()?)? })
            }
            None => None,
        };
        let stat = rustix::fs::fstat(memory).ok()?;
        let bytes = thin_bytes.or(u64::try_from(stat.st_size).ok())?;
        // The worker may have died between the two halves of `is_unused`.
        let _ = rustix::fs::flock(memory, FlockOperation::Unlock);
        let reserved = match u64::try_from(stat.st_blocks).ok()?.saturating_mul(512) {
            all if all >= bytes || is_thin => bytes,
            _ => 0, // what is there is found again quickly
        };
        let kind = PieceKind { target, bytes, rights, is_thin };
        Some((PieceId { volume, segment, index }, kind, reserved))
    }

    /// A descriptor for a process. It has a lock of its own, which lasts until the last descriptor *and* the last mapping
    /// that come from it are gone: the kernel keeps the open file for a mapping too.
    pub(super) fn open(&self, writes: bool) -> Result<OwnedFd, Code> {
        piece_table::open(&self.memory, writes)
    }

    /// The head, if it is beside this piece.
    pub(super) fn head(&self) -> Option<&Memory> {
        self.head.as_ref()
    }

    /// A descriptor of the head, if it is beside this piece.
    pub(super) fn open_head(&self, writes: bool) -> Result<Option<OwnedFd>, Code> {
        self.head.as_ref().map(|head| open(head, writes)).transpose()
    }

    /// True if no process has it open or mapped.
    pub(super) fn is_unused(&self) -> bool {
        let lock = |operation| rustix::fs::flock(&*self.memory, operation).is_ok();
        lock(FlockOperation::NonBlockingLockExclusive) && lock(FlockOperation::Unlock)
    }
}

/// A file of a target without a name, all of which is a hole. It takes space as it is written.
fn unnamed(target: BorrowedFd<'_>, bytes: u64) -> Result<OwnedFd, Code> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let memory = rustix::fs::openat(target, c".", flags, Mode::RUSR | Mode::WUSR).map_err(code)?;
    rustix::fs::ftruncate(&memory, bytes).map_err(code)?;
    Ok(memory)
}

/// A memfd of a sealed size.
fn sealed(name: &str, bytes: u64) -> Result<OwnedFd, Code> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create(name, flags).map_err(code)?;
    rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR).map_err(code)?;
    rustix::fs::ftruncate(&memory, bytes).map_err(code)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals).map_err(code)?;
    Ok(memory)
}

/// Opens it once more.
fn open(memory: &OwnedFd, writes: bool) -> Result<OwnedFd, Code> {
    let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
    rustix::fs::open(descriptor::path(memory), access | OFlags::CLOEXEC, Mode::empty()).map_err(code)
}

/// Reserves a range of a piece. Before, it checks that the node and its memory cgroup have the memory: the kernel would
/// kill a process of the cgroup otherwise.
pub(super) fn reserve(memory: &OwnedFd, from: u64, until: u64) -> Result<(), Code> {
    let bounds = Bounds::of(&Host::this(), Medium::Dram, None).map_err(|e| e.code)?;
    let usable = bounds.tightest().map_err(|e| e.code)?.free_bytes;
    if usable < until - from {
        return Err(Code::NoSpace);
    }
    loop {
        match rustix::fs::fallocate(memory, FallocateFlags::empty(), from, until - from) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::NOMEM) => return Err(Code::NoSpace),
            Err(e) => return Err(code(e)),
        }
    }
    collapse(memory, from, until);
    Ok(())
}

/// Has the kernel use huge pages for a range, where it can.
fn collapse(memory: &OwnedFd, from: u64, until: u64) {
    let bytes = (until - from) as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let Ok(at) = huge_pages::map_shared(memory.as_fd(), from, bytes, protection) else { return };
    // SAFETY: the mapping was just made, and nothing else uses it.
    unsafe {
        huge_pages::collapse(at, bytes);
        libc::munmap(at.cast(), bytes);
    }
}

/// Frees the memory of a piece that no process uses, also if a descriptor of it is still in the supervisor's queue.
pub(super) fn free(memory: &OwnedFd) {
    let bytes = rustix::fs::fstat(memory).map_or(0, |stat| stat.st_size.max(0) as u64);
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // A thin piece may be large, and mostly holes.
    // A part of a page would be filled with zeros, and kept.
    let step = FREE_BYTES.max(bytes / 1024).next_multiple_of(FREE_BYTES);
    for from in (0..bytes).step_by(step as usize) {
        while rustix::fs::fallocate(memory, flags, from, step) == Err(Errno::INTR) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Ino, NodeId};

    fn kind(bytes: u64) -> PieceKind {
        PieceKind { target: 4, bytes, rights: None, is_thin: false }
    }

    fn make(id: PieceId, kind: PieceKind) -> Piece {
        let target = std::fs::File::open(std::env::temp_dir()).unwrap();
        Piece::make(id, kind, target.as_fd()).unwrap()
    }

    fn id() -> PieceId {
        PieceId { volume: Ino::new(NodeId(3), 77), segment: 1, index: 2 }
    }

    #[test]
    fn restored_piece_is_the_one_that_was_kept_with_what_is_reserved_of_it() {
        let piece = make(id(), kind(4 << 20));
        let tag = Piece::tag(id(), &kind(4 << 20));
        let kept = |piece: &Piece| piece.kept().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let again = || Piece::restored(&tag, kept(&piece)).unwrap();
        let (its, restored) = again();
        assert_eq!((its, restored.kind, restored.reserved), (id(), kind(4 << 20), 0));
        reserve(&piece.memory, 0, 4 << 20).unwrap();
        rustix::io::pwrite(&*piece.memory, b"kept", 12).unwrap();
        let (_, restored) = again();
        assert_eq!(restored.reserved, 4 << 20);
        let mut bytes = [0; 4];
        rustix::io::pread(&*restored.memory, &mut bytes, 12).unwrap();
        assert_eq!(&bytes, b"kept");
        let rights = Some(Rights { uid: 7, gid: 8, mode: 0o640 });
        let away = PieceKind { rights, ..kind(4 << 20) };
        let (its, restored) = Piece::restored(&Piece::tag(id(), &away), kept(&piece)).unwrap();
        assert_eq!((its, restored.kind), (id(), away));
        for tag in
            ["doorbell", "piece", "piece 1 2", "piece 1 2 70000 4", "piece a b c d", "piece 1 2 3 4 5 6"]
        {
            assert_eq!(Piece::restored(tag, kept(&piece)).unwrap_err().len(), 1, "{tag}");
        }
    }

    #[test]
    fn head_is_beside_the_first_piece_alone_and_comes_back_with_it() {
        assert!(make(id(), kind(1 << 20)).open_head(true).unwrap().is_none());
        let first = PieceId { segment: 0, index: 0, ..id() };
        let piece = make(first, kind(1 << 20));
        assert_eq!((piece.held_bytes(), piece.kept().len()), ((1 << 20) + 4096, 2));
        let head = piece.open_head(true).unwrap().unwrap();
        assert_eq!(rustix::fs::fstat(&head).unwrap().st_blocks, 8, "its page is reserved");
        assert_eq!(rustix::fs::ftruncate(&head, 0), Err(Errno::PERM));
        rustix::io::pwrite(&head, b"end", 0).unwrap();
        let kept = || piece.kept().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect::<Vec<_>>();
        let (_, restored) = Piece::restored(&Piece::tag(first, &kind(1 << 20)), kept()).unwrap();
        let reader = restored.open_head(false).unwrap().unwrap();
        let mut bytes = [0; 3];
        rustix::io::pread(&reader, &mut bytes, 0).unwrap();
        assert_eq!((&bytes, rustix::io::pwrite(&reader, b"x", 0)), (b"end", Err(Errno::BADF)));
        let without = kept().drain(..1).collect();
        assert_eq!(Piece::restored(&Piece::tag(first, &kind(1 << 20)), without).unwrap_err().len(), 1);
    }

    #[test]
    fn thin_piece_takes_what_is_written_and_is_restored_with_it() {
        let thin = PieceKind { is_thin: true, ..kind(1 << 40) };
        let piece = make(id(), thin);
        assert_eq!((piece.reserved, piece.held_bytes(), Piece::held(id(), &thin)), (1 << 40, 0, Some(0)));
        rustix::io::pwrite(piece.open(true).unwrap(), b"kept", 1 << 39).unwrap();
        let blocks = || rustix::fs::fstat(&*piece.memory).unwrap().st_blocks;
        assert_eq!((blocks(), piece.taken_bytes()), (8, 4096));
        // Its owner's descriptor can move the end of the file.
        rustix::fs::ftruncate(&*piece.memory, (1 << 40) + 4096).unwrap();
        let kept = piece.kept().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let (its, restored) = Piece::restored(&Piece::tag(id(), &thin), kept).unwrap();
        assert_eq!((its, restored.kind, restored.reserved), (id(), thin, 1 << 40));
        let mut bytes = [0; 4];
        rustix::io::pread(&*restored.memory, &mut bytes, 1 << 39).unwrap();
        assert_eq!((&bytes, restored.is_unused()), (b"kept", true));
        free(&piece.memory);
        assert_eq!(blocks(), 0);
    }

    #[test]
    fn piece_cannot_be_truncated_or_sealed_by_its_holders() {
        let piece = make(id(), kind(1 << 20));
        let theirs = piece.open(true).unwrap();
        for bytes in [0, 1 << 19, 2 << 20] {
            assert_eq!(rustix::fs::ftruncate(&theirs, bytes), Err(Errno::PERM));
        }
        assert_eq!(rustix::fs::fcntl_add_seals(&theirs, SealFlags::WRITE), Err(Errno::PERM));
        let reader = piece.open(false).unwrap();
        assert_eq!(rustix::io::pwrite(&reader, b"x", 0), Err(Errno::BADF));
    }

    #[test]
    fn piece_is_used_while_a_descriptor_or_a_mapping_of_it_exists() {
        let piece = make(id(), kind(1 << 20));
        assert!(piece.is_unused());
        let theirs = piece.open(true).unwrap();
        assert!(!piece.is_unused());
        let mapping = forebay_ring::Mapping::new(theirs.as_fd(), 1 << 20, true).unwrap();
        drop(theirs);
        assert!(!piece.is_unused(), "it is still mapped");
        drop(mapping);
        assert!(piece.is_unused() && piece.is_unused());
    }

    #[test]
    fn freed_memory_is_given_back_although_a_descriptor_is_left() {
        let piece = make(id(), kind(1 << 20));
        reserve(&piece.memory, 0, 1 << 20).unwrap();
        let blocks = || rustix::fs::fstat(&*piece.memory).unwrap().st_blocks;
        assert_eq!(blocks(), (1 << 20) / 512);
        free(&piece.memory);
        assert_eq!(blocks(), 0);
    }
}
