//! Operations on this node's backing files, and on pieces of volumes, for other nodes; locks and turns to append for all
//! nodes. The network thread answers duplicates of changes from the replies that it kept. An append that an earlier
//! worker began is found in its log (`appended`).

use std::cell::LazyCell;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::Arc;
use std::time::Duration;

use forebay_data::{Access, Media, NodeTargets, Target};
use forebay_sys::{descriptor, opening};
use forebay_types::{
    node_of, BackingAttr, BackingId, BackingOp, BackingRuns, Caller, Code, Ino, MoveKind, PieceId, Reply,
    Timestamp,
};
use forebay_wire::Stamp;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::appended::{AppendFile, Before};
use super::bounce::DataBuffer;
use super::commands::{Command, Commands};
use super::file_io::{code, read, write, write_from};
use super::jobs::Moving;
use super::kept::KeptOpen;
use super::paced::Paced;
use super::runs;

/// The mode of fallocate(2) that frees a range.
const DISCARD: u32 = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE).bits();

/// How long a write waits for the mark of its file. The shard thread gives up before.
const MARK_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for a message; none after `limit`. In a simulation other threads run meanwhile.
fn receive<T>(messages: &Receiver<T>, limit: Duration) -> Option<T> {
    if !forebay_ring::is_simulated() {
        return messages.recv_timeout(limit).ok();
    }
    let until = forebay_ring::call_clock() + limit.as_nanos() as u64;
    loop {
        match messages.try_recv() {
            Ok(message) => return Some(message),
            Err(TryRecvError::Empty) if forebay_ring::call_clock() < until => {
                forebay_ring::pause(Duration::from_millis(1));
            }
            Err(_) => return None,
        }
    }
}

/// The backing files of this node, by name and by descriptors that are kept open.
pub(super) struct Files {
    pub(super) targets: Arc<NodeTargets>,
    pub(super) kept: Arc<KeptOpen>,
    /// None in tests: then no file can be marked.
    pub(super) commands: Option<Commands>,
}

fn mode_of(file: &OwnedFd) -> Result<Mode, Code> {
    Ok(Mode::from_raw_mode(rustix::fs::fstat(file).map_err(code)?.st_mode))
}

/// True for a backing file that a restore of a pool of several nodes has not filled yet.
fn is_filling(mode: Mode) -> bool {
    mode.contains(Mode::SVTX) && !mode.contains(Mode::XUSR)
}

impl Files {
    /// A descriptor for reading: the one kept open for the session, or a new one.
    fn open(&self, session: u64, id: &BackingId) -> Result<Arc<OwnedFd>, Code> {
        match self.kept.get(session, id) {
            Some(file) => self.check_end(session, id, 0).map(|()| file),
            None if id.piece().is_some() => Err(Code::Stale),
            None => {
                let file = self.open_by_name(id, Access::Read)?;
                match is_filling(mode_of(&file)?) {
                    true => Err(Code::Stale),
                    false => Ok(Arc::new(file)),
                }
            }
        }
    }

    /// A descriptor for writing, likewise. From when it is open, no mover can get a lease on the file. If one had, the
    /// file is marked dirty before anything is written.
    fn open_to_write(&self, session: u64, id: &BackingId) -> Result<Arc<OwnedFd>, Code> {
        self.open_to_write_until(session, id, 0)
    }

    /// The same, for a write that ends here.
    fn open_to_write_until(&self, session: u64, id: &BackingId, end: u64) -> Result<Arc<OwnedFd>, Code> {
        if let Some(file) = self.kept.get_writable(session, id) {
            return self.check_end(session, id, end).map(|()| file);
        }
        if id.piece().is_some() {
            return Err(Code::Stale);
        }
        let file = Arc::new(self.open_anew(session, id)?);
        let mode = mode_of(&file)?;
        if mode.contains(Mode::SVTX) {
            let is_removed = self.mark(id.ino)?;
            if is_removed && is_filling(mode) {
                return Err(Code::Stale);
            }
            // A file that was released while this open waited for the lease, and was restored before the mark, has
            // another backing file by now. From the mark on it is not released.
            if !is_removed && rustix::fs::fstat(&*file).map_err(code)?.st_nlink == 0 {
                return Err(Code::Stale);
            }
            rustix::fs::fchmod(&*file, Mode::RWXU).map_err(code)?;
        }
        self.kept.keep_writable(session, id, &file);
        Ok(file)
    }

    /// Checks that a piece that a session has open still belongs to a volume, and is so long: a thin one is a file, which
    /// a write could make longer. Other backing files pass.
    ///
    /// # Errors
    /// [`Code::Io`] for a piece whose segment is gone, [`Code::Range`].
    fn check_end(&self, session: u64, id: &BackingId, end: u64) -> Result<(), Code> {
        let Some(piece) = id.piece() else { return Ok(()) };
        match self.kept.pieces.bytes(piece) {
            Ok(bytes) if end <= bytes => Ok(()),
            Ok(_) => Err(Code::Range),
            Err(code) => {
                self.kept.close_piece(session, id);
                Err(code)
            }
        }
    }

    /// Has a file marked dirty at its home. True for a file that has lost its last name.
    #[cold]
    fn mark(&self, ino: Ino) -> Result<bool, Code> {
        let commands = self.commands.as_ref().ok_or(Code::NotSupported)?;
        let (done, marked) = channel();
        commands.give(Command::Mark(ino, done));
        match receive(&marked, MARK_TIMEOUT) {
            Some(Ok(())) => Ok(false),
            // Nothing copies or releases it any longer.
            Some(Err(Code::NotFound)) => Ok(true),
            // It was released, and this is no longer its backing file.
            Some(Err(Code::Stale)) => Err(Code::Stale),
            Some(Err(_)) | None => Err(Code::Io),
        }
    }

    /// The target of a backing file. [`Code::Stale`] for a target of another node or of lost data. [`Code::NoDevice`]
    /// for a target that this node lacks and never had: no node starts without a target that it had.
    fn target(&self, id: &BackingId) -> Result<&Target, Code> {
        let is_ours = id.node() == node_of(self.targets.first().target());
        self.targets.get(id.target).map_err(|code| if is_ours { code } else { Code::Stale })
    }

    fn open_by_name(&self, id: &BackingId, access: Access) -> Result<OwnedFd, Code> {
        self.target(id)?.open(id.ino, usize::from(id.number), id.stripe, access)
    }

    /// A descriptor with an open file description of its own, also of a file without a name.
    fn open_anew(&self, session: u64, id: &BackingId) -> Result<OwnedFd, Code> {
        let Some(kept) = self.kept.get(session, id) else {
            return self.open_by_name(id, Access::ReadWrite);
        };
        opening::open(&descriptor::path(&*kept), libc::O_RDWR | libc::O_CLOEXEC)
            .map_err(|e| Code::from_errno(e.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// Fills a piece of memory from a file, or writes it to one. Returns the number of bytes.
    pub(super) fn move_piece(&self, moving: &mut Moving) -> Result<usize, Code> {
        let paced = Paced::begin(&self.targets, &moving.id);
        let moved = self.move_now(moving);
        if let (Some(paced), Ok(bytes)) = (paced, &moved) {
            let is_read = moving.kind == MoveKind::Read;
            paced.complete(is_read, &moving.id, moving.offset, *bytes);
        }
        moved
    }

    /// The descriptor by which a process has a reserved piece open, if it may read or write bytes of it, and if the medium
    /// is not paced.
    ///
    /// # Errors
    /// What a copy of these bytes fails with.
    pub(super) fn open_reserved(
        &self,
        session: u64,
        id: &BackingId,
        (kind, end): (MoveKind, u64),
    ) -> Result<Option<Arc<OwnedFd>>, Code> {
        let Some(piece) = id.piece() else { return Ok(None) };
        if kind == MoveKind::Append || self.targets.is_paced() || self.kept.pieces.is_thin(piece) != Ok(false)
        {
            return Ok(None);
        }
        self.target(id)?;
        let file = match kind {
            MoveKind::Write => self.open_to_write_until(session, id, end)?,
            _ => self.open(session, id)?,
        };
        // A read that ends beyond the end is cut off there.
        Ok(self.kept.pieces.bytes(piece).is_ok_and(|bytes| end <= bytes).then_some(file))
    }

    fn move_now(&self, moving: &mut Moving) -> Result<usize, Code> {
        self.target(&moving.id)?;
        let session = moving.ticket.stamp.session;
        let len = moving.bytes;
        match (moving.kind, &mut moving.room) {
            (MoveKind::Write, room) => {
                let start = room.start(len).ok_or(Code::Malformed)?;
                let end = moving.offset.saturating_add(len as u64);
                let file = self.open_to_write_until(session, &moving.id, end)?;
                // SAFETY: of memory that lives as long as the room.
                unsafe { write_from(&file, start.as_ptr(), len, moving.offset) }.map(|()| len)
            }
            (MoveKind::Read, DataBuffer::Piece(piece)) => {
                read(&*self.open(session, &moving.id)?, piece.bytes(len), moving.offset)
            }
            (MoveKind::Append, _) if moving.id.piece().is_some() => Err(Code::NotSupported),
            (MoveKind::Append, DataBuffer::Piece(piece)) => {
                self.append_once(&moving.ticket.stamp, &moving.id, piece.bytes(len)).map(|_| len)
            }
            // Only writes use eager buffers, and no thread copies from or to a volume's piece itself.
            (_, DataBuffer::Eager(_) | DataBuffer::Direct(_)) => Err(Code::Malformed),
        }
    }

    fn read_runs<'r>(
        &self,
        session: u64,
        id: &BackingId,
        runs: BackingRuns<'_>,
        room: &'r mut [u8],
    ) -> Result<Reply<'r>, Code> {
        let file = self.open(session, id)?;
        let n = runs::read_runs((&self.targets, id, self.target(id)?), &file, runs, room)?;
        Ok(Reply::Bytes(&room[..n]))
    }

    fn write_runs(
        &self,
        session: u64,
        id: &BackingId,
        runs: BackingRuns<'_>,
        bytes: &[u8],
    ) -> Result<Reply<'static>, Code> {
        let end = runs.iter().map(|(offset, bytes)| offset.saturating_add(bytes as u64)).max();
        let file = self.open_to_write_until(session, id, end.unwrap_or(0))?;
        runs::write_runs((&self.targets, id), &file, runs, bytes).map(|n| Reply::Count(n as u64))
    }

    /// Unlinks a list of backing files. The reply says which of them are removed.
    pub(super) fn remove_all<'r>(&self, ids: &[u8], room: &'r mut [u8]) -> Reply<'r> {
        self.kept.appended.note_removed(BackingId::listed(ids).map(|id| id.ino));
        let mut count = 0;
        for (done, id) in room.iter_mut().zip(BackingId::listed(ids)) {
            let target = self.target(&id);
            let removed = target.and_then(|target| target.remove(id.ino, usize::from(id.number), id.stripe));
            // A file whose layout names a missing target would otherwise stay an orphan for ever.
            *done = u8::from(matches!(removed, Ok(()) | Err(Code::NoDevice)));
            count += 1;
        }
        Reply::Bytes(&room[..count])
    }

    fn size(&self, session: u64, id: &BackingId) -> Result<u64, Code> {
        let stat = rustix::fs::fstat(&*self.open(session, id)?).map_err(code)?;
        Ok(stat.st_size as u64)
    }

    /// Appends, unless the append is recorded as done. In that case its file may be removed, and is not opened.
    fn append_once(&self, stamp: &Stamp, id: &BackingId, bytes: &[u8]) -> Result<u64, Code> {
        let file = LazyCell::new(|| self.open_to_write(stamp.session, id));
        self.kept.appended.once(stamp, id, bytes, &Opening(file))
    }

    /// Serves an operation on a piece of a volume. A process must have it open: after the death of a worker it gets
    /// [`Code::Stale`], and opens it again.
    pub(super) fn serve_piece<'r>(
        &self,
        stamp: Stamp,
        caller: Caller,
        (id, piece): (&BackingId, PieceId),
        op: &BackingOp<'_>,
        room: &'r mut [u8],
    ) -> Result<Reply<'r>, Code> {
        self.target(id)?;
        let session = stamp.session;
        match *op {
            BackingOp::Open { handle } => {
                let mut writes = false;
                let open = || {
                    let opened = self.kept.pieces.open(piece, (caller.uid, caller.gid))?;
                    writes = opened.1;
                    Ok(opened.0)
                };
                self.kept.open(session, id, handle, open)?;
                // One that is kept open, or was opened while its segment went.
                self.check_end(session, id, 0)?;
                if let Some(file) = self.kept.get(session, id).filter(|_| writes) {
                    self.kept.keep_writable(session, id, &file);
                }
                Ok(Reply::Done)
            }
            BackingOp::Close { handle } => {
                self.kept.close(session, id, handle);
                Ok(Reply::Done)
            }
            BackingOp::Read { offset, bytes } => {
                let n = read(&*self.open(session, id)?, &mut room[..bytes as usize], offset)?;
                Ok(Reply::Bytes(&room[..n]))
            }
            BackingOp::Write { offset, append: false, bytes } => {
                let end = offset.saturating_add(bytes.len() as u64);
                let file = self.open_to_write_until(session, id, end)?;
                write(&file, bytes, offset).map(|()| Reply::Count(offset))
            }
            BackingOp::ReadRuns { runs } => self.read_runs(session, id, runs, room),
            BackingOp::WriteRuns { runs, bytes } => self.write_runs(session, id, runs, bytes),
            BackingOp::Stat => attr_of(&rustix::fs::fstat(&*self.open(session, id)?).map_err(code)?),
            // The space of other pieces is reserved.
            BackingOp::Allocate { mode, offset, bytes }
                if mode == DISCARD && self.kept.pieces.is_thin(piece)? =>
            {
                allocate(&*self.open_to_write(session, id)?, mode, offset, bytes)
            }
            _ => Err(Code::NotSupported),
        }
    }

    pub(super) fn serve<'r>(
        &self,
        stamp: Stamp,
        id: &BackingId,
        op: &BackingOp<'_>,
        room: &'r mut [u8],
    ) -> Result<Reply<'r>, Code> {
        let target = self.target(id)?;
        let (ino, number, stripe) = (id.ino, usize::from(id.number), id.stripe);
        let session = stamp.session;
        match *op {
            // The shard knows which inodes of this node exist.
            BackingOp::Make if ino.birth_node() == id.node() => Err(Code::Invalid),
            BackingOp::Make => {
                let make = || target.create(ino, number, stripe);
                self.kept.appended.unless_removed(ino, make).map(|()| Reply::Done)
            }
            BackingOp::Open { handle } => {
                let open = || self.open_by_name(id, Access::Read);
                self.kept.open(session, id, handle, open).map(|()| Reply::Done)
            }
            BackingOp::Close { handle } => {
                self.kept.close(session, id, handle);
                Ok(Reply::Done)
            }
            BackingOp::Lock(wish) => {
                let open = || self.open_anew(session, id);
                self.kept.locks.lock(session, id, &wish, open).map(|()| Reply::Done)
            }
            BackingOp::TestLock(wish) => {
                let open = || self.open_anew(session, id);
                let found = self.kept.locks.test(session, id, &wish, open)?;
                Ok(found.map_or(Reply::Done, Reply::Lock))
            }
            BackingOp::BeginAppend { handle } => {
                self.kept.locks.begin_append(session, id, handle).map(|()| Reply::Done)
            }
            BackingOp::EndAppend { handle } => {
                self.kept.locks.end_append(session, id, handle);
                Ok(Reply::Done)
            }
            // Only a client sends this, to its own daemon, which sends other requests.
            BackingOp::Move(_) => Err(Code::Malformed),
            // The network thread serves them.
            BackingOp::Group { .. } | BackingOp::Atomic { .. } => Err(Code::Malformed),
            BackingOp::Stat => match self.kept.get(session, id) {
                Some(file) => attr_of(&rustix::fs::fstat(&*file).map_err(code)?),
                None => target.stat(ino, number, stripe).map(|s| {
                    Reply::Backing(BackingAttr {
                        bytes: s.bytes,
                        allocated_bytes: s.allocated_bytes,
                        atime: s.atime,
                        mtime: s.mtime,
                        ctime: s.ctime,
                    })
                }),
            },
            BackingOp::Read { offset, bytes } => {
                let n = read(&*self.open(session, id)?, &mut room[..bytes as usize], offset)?;
                Ok(Reply::Bytes(&room[..n]))
            }
            BackingOp::Write { offset, append: false, bytes } => {
                write(&*self.open_to_write(session, id)?, bytes, offset).map(|()| Reply::Count(offset))
            }
            BackingOp::ReadRuns { runs } => self.read_runs(session, id, runs, room),
            BackingOp::WriteRuns { runs, bytes } => self.write_runs(session, id, runs, bytes),
            BackingOp::Write { append: true, bytes, .. } => {
                self.append_once(&stamp, id, bytes).map(Reply::Count)
            }
            BackingOp::AppendPiece { handle, at, total, bytes } => {
                match self.kept.gathering.add((session, handle), (at, total), bytes) {
                    Ok(None) => Ok(Reply::Count(0)),
                    Ok(Some(whole)) => self.append_once(&stamp, id, &whole).map(Reply::Count),
                    // The pieces were lost with a worker that may have written them.
                    Err(Code::Interrupted) => match self.kept.appended.before(&stamp, id) {
                        Some(Before::Done(at)) => Ok(Reply::Count(at)),
                        Some(Before::Begun(size)) if self.size(session, id) != Ok(size) => Err(Code::Io),
                        _ => Err(Code::Interrupted),
                    },
                    Err(code) => Err(code),
                }
            }
            BackingOp::Truncate { bytes } => {
                rustix::fs::ftruncate(&*self.open_to_write(session, id)?, bytes).map_err(code)?;
                Ok(Reply::Done)
            }
            BackingOp::Allocate { mode, offset, bytes } => {
                allocate(&*self.open_to_write(session, id)?, mode, offset, bytes)
            }
            BackingOp::SetTimes { atime, mtime } => match self.kept.get(session, id) {
                Some(file) => {
                    rustix::fs::futimens(&*file, &forebay_data::timestamps(atime, mtime)).map_err(code)?;
                    Ok(Reply::Done)
                }
                None => target.set_times(ino, number, stripe, atime, mtime).map(|()| Reply::Done),
            },
            BackingOp::Sync => {
                rustix::fs::fsync(&*self.open(session, id)?).map_err(code)?;
                Ok(Reply::Done)
            }
        }
    }
}

fn allocate<'r>(file: &OwnedFd, mode: u32, offset: u64, bytes: u64) -> Result<Reply<'r>, Code> {
    let flags = FallocateFlags::from_bits(mode).ok_or(Code::NotSupported)?;
    loop {
        match rustix::fs::fallocate(file, flags, offset, bytes) {
            Ok(()) => return Ok(Reply::Done),
            Err(Errno::INTR) => {}
            Err(e) => return Err(code(e)),
        }
    }
}

fn attr_of<'r>(st: &rustix::fs::Stat) -> Result<Reply<'r>, Code> {
    let time = |sec: i64, nsec| Timestamp { sec, nsec };
    Ok(Reply::Backing(BackingAttr {
        bytes: st.st_size as u64,
        allocated_bytes: st.st_blocks as u64 * 512,
        atime: time(st.st_atime, st.st_atime_nsec as u32),
        mtime: time(st.st_mtime, st.st_mtime_nsec as u32),
        ctime: time(st.st_ctime, st.st_ctime_nsec as u32),
    }))
}

/// A backing file that is opened when it is needed.
struct Opening<F>(LazyCell<Result<Arc<OwnedFd>, Code>, F>);

impl<F: FnOnce() -> Result<Arc<OwnedFd>, Code>> Opening<F> {
    fn file(&self) -> Result<&OwnedFd, Code> {
        self.0.as_ref().map(Arc::as_ref).map_err(|code| *code)
    }
}

impl<F: FnOnce() -> Result<Arc<OwnedFd>, Code>> AppendFile for Opening<F> {
    fn size(&self) -> Result<u64, Code> {
        rustix::fs::fstat(self.file()?).map(|stat| stat.st_size as u64).map_err(code)
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<usize, Code> {
        read(self.file()?, bytes, at)
    }

    fn append(&self, bytes: &[u8]) -> Result<u64, Code> {
        append(self.file()?, bytes)
    }
}

/// Writes at the end with O_APPEND, so that no other write can intervene. Returns the offset of the first byte.
fn append(file: &OwnedFd, bytes: &[u8]) -> Result<u64, Code> {
    // Opened again, because the flag and the offset belong to the open file description.
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
    let file = rustix::fs::open(descriptor::path(file), flags, Mode::empty()).map_err(code)?;
    let written = loop {
        match rustix::io::write(&file, bytes) {
            Ok(n) => break n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(code(e)),
        }
    };
    let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::Current(0)).map_err(code)?;
    // The medium is full in the middle of it. The bytes written stay, as after a short write.
    if written < bytes.len() {
        return Err(Code::NoSpace);
    }
    Ok(end - written as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::durable_table::DurableMemory;
    use crate::worker::network::appended::{Appended, FORMAT};
    use crate::worker::piece_table::PieceKind;
    use forebay_types::Rights;
    use std::path::PathBuf;

    /// A node's targets, and their directory.
    fn targets(name: &str) -> (PathBuf, Arc<NodeTargets>) {
        let place = std::env::temp_dir().join(format!("forebay-io_workers-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir(&place).unwrap();
        let directory = std::fs::File::open(&place).unwrap();
        Target::format(&directory).unwrap();
        let target = Target::open(&directory, 2 << 16).unwrap();
        (place, Arc::new(NodeTargets::new(vec![target])))
    }

    #[test]
    fn append_that_is_done_is_known_by_the_next_worker_when_its_file_is_gone() {
        let (place, targets) = targets("gone");
        let memory = DurableMemory::new(&FORMAT);
        let worker = || {
            let mut kept = KeptOpen::default();
            kept.appended = Appended::open(&memory);
            Files { targets: Arc::clone(&targets), kept: Arc::new(kept), commands: None }
        };
        let id = BackingId { target: 2 << 16, ino: Ino(9 << 48 | 5), number: 0, stripe: 0 };
        let ask = |files: &Files, sequence, op| {
            let stamp = Stamp { session: 77, slot: sequence as u16, sequence };
            files.serve(stamp, &id, &op, &mut vec![0; 1 << 16]).map(|reply| match reply {
                Reply::Count(n) => n,
                _ => 0,
            })
        };
        let append = BackingOp::Write { offset: 0, append: true, bytes: b"def" };
        let piece = |at| BackingOp::AppendPiece { handle: 3, at, total: 4, bytes: b"gh" };
        let first = worker();
        ask(&first, 1, BackingOp::Make).unwrap();
        assert_eq!(ask(&first, 2, append), Ok(0));
        assert_eq!((ask(&first, 3, piece(0)), ask(&first, 4, piece(2))), (Ok(0), Ok(3)));
        let next = worker();
        assert!(matches!(next.remove_all(&BackingId::list(&[id]), &mut [0; 1]), Reply::Bytes([1])));
        assert_eq!((ask(&next, 2, append), ask(&next, 4, piece(2))), (Ok(0), Ok(3)));
        assert_eq!(ask(&next, 5, append), Err(Code::NotFound), "another");
        std::fs::remove_dir_all(&place).unwrap();
    }

    /// One thread has taken the request to make the file, and another one serves the removal, which came later, first.
    #[test]
    fn file_whose_removal_is_served_first_is_not_made_and_one_that_was_made_before_is_removed() {
        let (place, targets) = targets("overtaken");
        let files = Files { targets, kept: Arc::default(), commands: None };
        let id = |ino: u64| BackingId { target: 2 << 16, ino: Ino(9 << 48 | ino), number: 1, stripe: 1 };
        let ask = |ino, op| {
            let stamp = Stamp { session: 77, slot: 0, sequence: 1 };
            files.serve(stamp, &id(ino), &op, &mut []).map(|_| ())
        };
        let remove = |ino| files.remove_all(&BackingId::list(&[id(ino)]), &mut [0; 1]) == Reply::Bytes(&[1]);
        assert!(remove(5));
        assert_eq!(ask(5, BackingOp::Make), Err(Code::NotFound));
        assert_eq!(ask(5, BackingOp::Stat), Err(Code::NotFound));
        ask(6, BackingOp::Make).unwrap();
        ask(6, BackingOp::Stat).unwrap();
        assert!(remove(6));
        assert_eq!(ask(6, BackingOp::Stat), Err(Code::NotFound));
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn thin_piece_is_not_written_past_its_end_and_no_longer_served_when_its_segment_is_gone() {
        let (place, targets) = targets("thin");
        let files = Files { targets, kept: Arc::default(), commands: None };
        let piece = PieceId { volume: Ino(9 << 48 | 5), segment: 0, index: 0 };
        let id = BackingId::of_piece(2 << 16, piece);
        let memory =
            std::fs::File::options().read(true).write(true).create_new(true).open(place.join("thin"));
        let memory = memory.unwrap();
        memory.set_len(4096).unwrap();
        let memory = Arc::new(OwnedFd::from(memory));
        let rights = Some(Rights { uid: 7, gid: 7, mode: 0o600 });
        let kind = PieceKind { target: 0, bytes: 4096, rights, is_thin: true };
        files.kept.pieces.add(piece, (&memory, kind), None);
        let caller = Caller { uid: 7, gid: 7 };
        let ask = |op: BackingOp<'_>| {
            let stamp = Stamp { session: 77, slot: 0, sequence: 1 };
            files.serve_piece(stamp, caller, (&id, piece), &op, &mut [0; 64]).map(drop)
        };
        let open = || BackingOp::Open { handle: 1 };
        let reserved = |kind, end| files.open_reserved(77, &id, (kind, end)).map(|file| file.is_some());
        let write = |offset| BackingOp::Write { offset, append: false, bytes: b"abc" };
        let runs = |runs: &[(u64, u32)]| {
            let mut list = Vec::new();
            runs.iter().for_each(|(offset, bytes)| BackingRuns::add(&mut list, *offset, *bytes));
            let runs = BackingRuns::of(&list).unwrap();
            ask(BackingOp::WriteRuns { runs, bytes: &vec![1; runs.bytes()] })
        };
        assert_eq!(ask(write(0)), Err(Code::Stale));
        let thick = PieceKind { is_thin: false, ..kind };
        files.kept.pieces.add(piece, (&memory, thick), None);
        assert_eq!(reserved(MoveKind::Read, 1), Err(Code::Stale));
        ask(open()).unwrap();
        for (access, end, expected) in [
            (MoveKind::Read, 4096, Ok(true)),
            (MoveKind::Read, 4097, Ok(false)),
            (MoveKind::Write, 4096, Ok(true)),
            (MoveKind::Write, 4097, Err(Code::Range)),
            (MoveKind::Append, 1, Ok(false)),
        ] {
            assert_eq!(reserved(access, end), expected, "{access:?} up to {end}");
        }
        files.kept.pieces.add(piece, (&memory, kind), None);
        assert_eq!(reserved(MoveKind::Write, 1), Ok(false), "it is thin");
        assert_eq!((ask(write(4093)), runs(&[(4094, 2), (0, 3)])), (Ok(()), Ok(())));
        for offset in [4094, 4096, 1 << 40, u64::MAX] {
            assert_eq!(ask(write(offset)), Err(Code::Range), "{offset}");
        }
        assert_eq!(runs(&[(4095, 2), (0, 3)]), Err(Code::Range));
        assert_eq!(rustix::fs::fstat(&memory).unwrap().st_size, 4096);
        // The process has it open, and opens it again to see whether it is there.
        for op in [write(0), BackingOp::Read { offset: 0, bytes: 3 }, BackingOp::Stat, open()] {
            files.kept.pieces.add(piece, (&memory, kind), None);
            ask(open()).unwrap();
            files.kept.pieces.remove(piece);
            assert_eq!(ask(op), Err(Code::Io));
            assert!(files.kept.get(77, &id).is_none(), "it takes no memory any longer");
        }
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn serve_reads_what_was_written_and_appends_behind_it() {
        let (place, targets) = targets("serve");
        let files = Files { targets, kept: Arc::default(), commands: None };
        let id = BackingId { target: 2 << 16, ino: Ino(9 << 48 | 5), number: 0, stripe: 0 };
        let mut room = vec![0; 1 << 16];
        let mut stamp = Stamp { session: 77, slot: 0, sequence: 0 };
        let mut ask = |id: &BackingId, op| {
            stamp.sequence += 1;
            let reply = files.serve(stamp, id, &op, &mut room);
            reply.map(|reply| match reply {
                Reply::Bytes(bytes) => (bytes.len() as u64, bytes.to_vec()),
                Reply::Count(n) => (n, Vec::new()),
                Reply::Backing(attr) => (attr.bytes, Vec::new()),
                _ => (0, Vec::new()),
            })
        };
        assert_eq!(ask(&id, BackingOp::Stat), Err(Code::NotFound));
        let write = BackingOp::Write { offset: 0, append: false, bytes: b"x" };
        assert_eq!(ask(&id, write), Err(Code::NotFound), "a write makes no file");
        ask(&id, BackingOp::Make).unwrap();
        ask(&id, BackingOp::Write { offset: 3, append: false, bytes: b"abc" }).unwrap();
        let appended = ask(&id, BackingOp::Write { offset: 0, append: true, bytes: b"def" }).unwrap();
        assert_eq!(appended.0, 6);
        // In pieces: none is visible before all have arrived.
        let piece = |at, bytes| BackingOp::AppendPiece { handle: 3, at, total: 4, bytes };
        ask(&id, piece(0, b"gh")).unwrap();
        assert_eq!(ask(&id, BackingOp::Stat).unwrap().0, 9);
        assert_eq!(ask(&id, piece(2, b"ij")).unwrap().0, 9, "where it went");
        assert_eq!(ask(&id, BackingOp::Read { offset: 8, bytes: 9 }).unwrap().1, b"fghij");
        assert_eq!(ask(&id, piece(2, b"ij")), Err(Code::Interrupted), "it is written");
        ask(&id, BackingOp::Truncate { bytes: 9 }).unwrap();
        assert_eq!(ask(&id, BackingOp::Read { offset: 0, bytes: 100 }).unwrap().1, b"\0\0\0abcdef");
        ask(&id, BackingOp::Truncate { bytes: 4 }).unwrap();
        assert_eq!(ask(&id, BackingOp::Stat).unwrap().0, 4);
        assert_eq!(ask(&id, BackingOp::Read { offset: 4, bytes: 1 }).unwrap().0, 0);
        ask(&id, BackingOp::Sync).unwrap();
        let other = BackingId { target: 3 << 16, ..id };
        assert_eq!(ask(&other, BackingOp::Stat), Err(Code::Stale), "another node's target");
        let absent = BackingId { target: id.target + 1, ..id };
        assert_eq!(ask(&absent, BackingOp::Stat), Err(Code::NoDevice));
        // A file that is kept open outlives its name.
        ask(&id, BackingOp::Open { handle: 1 }).unwrap();
        let elsewhere = BackingId { target: 3 << 16, ..id };
        for _ in 0..2 {
            let mut room = [9; 8];
            let removed = files.remove_all(&BackingId::list(&[id, elsewhere, id, absent]), &mut room);
            assert!(matches!(removed, Reply::Bytes([1, 0, 1, 1])), "absent is fine, another node's is not");
        }
        ask(&id, BackingOp::Write { offset: 0, append: true, bytes: b"more" }).unwrap();
        assert_eq!(ask(&id, BackingOp::Read { offset: 3, bytes: 9 }).unwrap().1, b"amore");
        assert_eq!(ask(&id, BackingOp::Stat).unwrap().0, 8);
        ask(&id, BackingOp::Close { handle: 1 }).unwrap();
        assert_eq!(ask(&id, BackingOp::Stat), Err(Code::NotFound));
        std::fs::remove_dir_all(&place).unwrap();
    }
}
