//! The I/O workers: threads that read and write backing files for other nodes, and serve this node's processes the
//! locks and the turns to append that all nodes share. They do not use the shard: the target knows whether a backing
//! file exists. What they do with a file is in `backing_operations.rs`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use forebay_data::NodeTargets;
use forebay_sys::stopped;
use forebay_types::limits::{MESSAGE_BYTES_MAX, MOVE_BYTES_MIN};
use forebay_types::{BackingId, BackingOp, Code, Error, MoveKind, Reply, Request, Result};
use forebay_wire::Stamp;

use super::backing_operations::Files;
use super::commands::{Command, Commands};
use super::jobs::{queue, Asker, Job, Jobs, Moving};
use super::kept::KeptOpen;
use super::paced::Paced;
use crate::worker::end_of_worker::EndOfWorker;

/// The number of threads: enough to keep a medium busy while some wait for it.
const THREADS: usize = 4;

/// Bytes that are read from memory in less time than the wake-up of a thread takes.
const AT_ONCE_BYTES: usize = 64 * 1024;

/// And how many ranges.
const AT_ONCE_RUNS: usize = 32;

/// The command that sends a job's reply.
fn answer(asker: Asker, reply: Vec<u8>) -> Command {
    match asker {
        Asker::There(ticket) => Command::Answer { ticket, reply },
        Asker::Here(stamp) => Command::AnswerHere { stamp, reply },
    }
}

/// Starts the I/O workers. They end when the result is dropped.
pub(super) fn start(targets: Arc<NodeTargets>, kept: Arc<KeptOpen>, commands: Commands) -> Result<Jobs> {
    let (jobs, taker) = queue();
    for _ in 0..THREADS {
        let taker = taker.clone();
        let mut io_worker = IoWorker::new(Arc::clone(&targets), Arc::clone(&kept), commands.clone());
        std::thread::Builder::new()
            .name("data".into())
            .stack_size(512 * 1024)
            .spawn(move || {
                let _end = EndOfWorker;
                while let Some(job) = taker.take() {
                    stopped::check();
                    io_worker.serve(job);
                }
            })
            .map_err(|e| Error::io("cannot start a thread", &e))?;
    }
    Ok(jobs)
}

/// One of the I/O workers.
pub(in crate::worker) struct IoWorker {
    files: Files,
    commands: Commands,
    room: Vec<u8>,
    out: Vec<u8>,
}

impl IoWorker {
    pub(in crate::worker) fn new(
        targets: Arc<NodeTargets>,
        kept: Arc<KeptOpen>,
        commands: Commands,
    ) -> IoWorker {
        let buffer = || vec![0; MESSAGE_BYTES_MAX];
        let files = Files { targets, kept, commands: Some(commands.clone()) };
        IoWorker { files, commands, room: buffer(), out: buffer() }
    }

    /// Serves a job and sends its reply.
    pub(in crate::worker) fn serve(&mut self, job: Job) {
        let (asker, message) = match job {
            Job::Serve { asker, message } => (asker, message),
            Job::Move(mut moving) => {
                let result = self.files.move_piece(&mut moving);
                return self.commands.give(Command::Moved(moving, result));
            }
        };
        let reply = self.reply(asker.stamp(), &message).to_vec();
        self.commands.give(answer(asker, reply));
    }

    fn reply(&mut self, stamp: Stamp, message: &[u8]) -> &[u8] {
        let result = match Request::decode(message) {
            Ok((caller, Request::Backing { id, op })) => {
                let paced = Paced::begin(&self.files.targets, &id);
                let result = match id.piece() {
                    Some(piece) => self.files.serve_piece(stamp, caller, (&id, piece), &op, &mut self.room),
                    None => self.files.serve(stamp, &id, &op, &mut self.room),
                };
                if let Some(paced) = paced {
                    paced.complete_op(&id, &op, &result);
                }
                result
            }
            Ok((_, Request::RemoveBackings { ids })) => Ok(self.files.remove_all(ids, &mut self.room)),
            Ok(_) => Err(Code::Malformed),
            Err(code) => Err(code),
        };
        let n = Reply::encode(&result, &mut self.out).unwrap_or(0);
        &self.out[..n]
    }

    /// True if a short write to this piece takes no longer than its copy, and the end of another write to the piece: its memory
    /// is reserved.
    fn is_reserved(&self, id: &BackingId) -> bool {
        let is_thick = |piece| self.files.kept.pieces.is_thin(piece) == Ok(false);
        id.piece().is_some_and(is_thick) && !self.files.targets.is_paced()
    }

    /// For a thread that must not block: the reply to a short read, which never blocks where backing files are in
    /// memory, or to a short write of a volume's piece. A write of a file may wait for a long one, and freeing space takes
    /// time in proportion to the space.
    pub(super) fn reply_at_once(&mut self, stamp: Stamp, message: &[u8]) -> Option<&[u8]> {
        match Request::decode(message) {
            Ok((_, Request::Backing { op: BackingOp::Read { bytes, .. }, .. }))
                if bytes as usize <= AT_ONCE_BYTES && !self.files.targets.is_paced() =>
            {
                Some(self.reply(stamp, message))
            }
            Ok((_, Request::Backing { op: BackingOp::ReadRuns { runs }, .. }))
                if runs.iter().len() <= AT_ONCE_RUNS
                    && runs.bytes() <= AT_ONCE_BYTES
                    && !self.files.targets.is_paced() =>
            {
                Some(self.reply(stamp, message))
            }
            Ok((_, Request::Backing { id, op: BackingOp::Write { append: false, .. } }))
                if self.is_reserved(&id) =>
            {
                Some(self.reply(stamp, message))
            }
            Ok((_, Request::Backing { id, op: BackingOp::WriteRuns { runs, .. } }))
                if runs.iter().len() <= AT_ONCE_RUNS && self.is_reserved(&id) =>
            {
                Some(self.reply(stamp, message))
            }
            _ => None,
        }
    }

    /// The same for a piece that is to be filled. `idle`: the network has little else to do, so that parts of longer
    /// calls are filled too.
    pub(super) fn fill_at_once(
        &self,
        moving: &mut Moving,
        idle: bool,
    ) -> Option<std::result::Result<usize, Code>> {
        let most = if idle || moving.id.piece().is_some() { MOVE_BYTES_MIN } else { AT_ONCE_BYTES };
        let is_short =
            moving.kind == MoveKind::Read && moving.bytes <= most && !self.files.targets.is_paced();
        is_short.then(|| self.files.move_piece(moving))
    }

    /// As [`Files::open_reserved`]: the descriptor of a piece from and to which the network may move bytes itself.
    pub(super) fn open_reserved(
        &self,
        session: u64,
        id: &BackingId,
        access: (MoveKind, u64),
    ) -> Option<Arc<OwnedFd>> {
        self.files.open_reserved(session, id, access).ok().flatten()
    }

    /// The same for a write to a volume's piece whose bytes are there. A copy of so many takes less of a processor than to
    /// wake a thread.
    pub(super) fn write_at_once(&self, moving: &mut Moving) -> Option<std::result::Result<usize, Code>> {
        let is_short = moving.kind == MoveKind::Write && moving.bytes <= MOVE_BYTES_MIN;
        (is_short && self.is_reserved(&moving.id)).then(|| self.files.move_piece(moving))
    }
}
