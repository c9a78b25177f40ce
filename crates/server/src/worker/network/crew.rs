//! The crew: threads that read and write backing files for other nodes. None of them knows of the shard: whether a file is
//! there is for the target to say. A request that comes twice does no harm, but for an append, which the network thread
//! answers from what it kept.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_data::{Access, BackingName, Media, Target};
use forebay_fabric::Ticket;
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{BackingAttr, BackingId, BackingOp, Code, Error, Reply, Request, Result};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Order, Orders};

/// Threads: enough to keep a medium busy while others wait for it.
const THREADS: usize = 4;

/// A request for a backing file.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: Ticket,
    pub(super) message: Vec<u8>,
}

/// Starts the crew; it ends when the sender is dropped.
pub(super) fn start(target: Arc<Target>, orders: Orders) -> Result<Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let jobs = Arc::new(Mutex::new(jobs));
    for _ in 0..THREADS {
        let (target, orders, jobs) = (Arc::clone(&target), orders.clone(), Arc::clone(&jobs));
        std::thread::Builder::new()
            .name("data".into())
            .stack_size(512 * 1024)
            .spawn(move || work(&target, &orders, &jobs))
            .map_err(|e| Error::io("cannot start a thread", &e))?;
    }
    Ok(sender)
}

fn work(target: &Target, orders: &Orders, jobs: &Mutex<Receiver<Job>>) {
    let mut room = vec![0; MESSAGE_BYTES_MAX];
    let mut out = vec![0; MESSAGE_BYTES_MAX];
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { ticket, message }) = job else { return };
        let result = match Request::decode(&message) {
            Ok((_, Request::Backing(id, op))) => serve(target, &id, &op, &mut room),
            Ok(_) => Err(Code::Malformed),
            Err(code) => Err(code),
        };
        let n = Reply::encode(&result, &mut out).unwrap_or(0);
        orders.give(Order::Answer { ticket, reply: out[..n].to_vec() });
    }
}

fn code(e: Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

fn serve<'r>(
    target: &Target,
    id: &BackingId,
    op: &BackingOp<'_>,
    room: &'r mut [u8],
) -> std::result::Result<Reply<'r>, Code> {
    if id.target != target.target() {
        return Err(Code::Stale);
    }
    let (ino, number, stripe) = (id.ino, usize::from(id.number), id.stripe);
    let open = |access| target.open(ino, number, stripe, access);
    match *op {
        BackingOp::Stat => {
            let s = target.stat(ino, number, stripe)?;
            Ok(Reply::Backing(BackingAttr {
                bytes: s.bytes,
                allocated_bytes: s.allocated_bytes,
                atime: s.atime,
                mtime: s.mtime,
                ctime: s.ctime,
            }))
        }
        BackingOp::Make => target.create(ino, number, stripe).map(|()| Reply::Done),
        BackingOp::Remove => target.remove(ino, number, stripe).map(|()| Reply::Done),
        BackingOp::Read { offset, bytes } => {
            let file = open(Access::Read)?;
            let room = &mut room[..bytes as usize];
            let mut done = 0;
            while done < room.len() {
                match rustix::io::pread(&file, &mut room[done..], offset + done as u64) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(code(e)),
                }
            }
            Ok(Reply::Bytes(&room[..done]))
        }
        BackingOp::Write { offset, append: false, bytes } => {
            let file = open(Access::ReadWrite)?;
            let mut done = 0;
            while done < bytes.len() {
                match rustix::io::pwrite(&file, &bytes[done..], offset + done as u64) {
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(code(e)),
                }
            }
            Ok(Reply::Count(offset))
        }
        BackingOp::Write { append: true, bytes, .. } => append(target, id, bytes).map(Reply::Count),
        BackingOp::Truncate { bytes } => target.truncate(ino, number, stripe, bytes).map(|()| Reply::Done),
        BackingOp::Allocate { mode, offset, bytes } => {
            let flags = FallocateFlags::from_bits(mode).ok_or(Code::NotSupported)?;
            let file = open(Access::ReadWrite)?;
            loop {
                match rustix::fs::fallocate(&file, flags, offset, bytes) {
                    Ok(()) => return Ok(Reply::Done),
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(code(e)),
                }
            }
        }
        BackingOp::SetTimes { atime, mtime } => {
            target.set_times(ino, number, stripe, atime, mtime).map(|()| Reply::Done)
        }
        BackingOp::Sync => rustix::fs::fsync(open(Access::Read)?).map(|()| Reply::Done).map_err(code),
    }
}

/// Writes at the end, as the kernel has it, who lets no other write come between; where the first byte went.
fn append(target: &Target, id: &BackingId, bytes: &[u8]) -> std::result::Result<u64, Code> {
    let name = BackingName::new(id.ino, usize::from(id.number), id.stripe);
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: OwnedFd =
        rustix::fs::openat(target.directory(), name.as_c_str(), flags, Mode::empty()).map_err(code)?;
    let written = loop {
        match rustix::io::write(&file, bytes) {
            Ok(n) => break n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(code(e)),
        }
    };
    let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::Current(0)).map_err(code)?;
    // A medium that is full in the middle of it: what went in stays in, as after a write that was cut short.
    if written < bytes.len() {
        return Err(Code::NoSpace);
    }
    Ok(end - written as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    #[test]
    fn serve_reads_what_was_written_and_appends_behind_it() {
        let place = std::env::temp_dir().join(format!("forebay-crew-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir(&place).unwrap();
        let directory = std::fs::File::open(&place).unwrap();
        Target::format(&directory).unwrap();
        let target = Target::open(&directory, 2 << 16).unwrap();
        let id = BackingId { target: 2 << 16, ino: Ino(9 << 48 | 5), number: 0, stripe: 0 };
        let mut room = vec![0; 1 << 16];
        let mut ask = |id: &BackingId, op| {
            let reply = serve(&target, id, &op, &mut room);
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
        assert_eq!(ask(&id, BackingOp::Read { offset: 0, bytes: 100 }).unwrap().1, b"\0\0\0abcdef");
        ask(&id, BackingOp::Truncate { bytes: 4 }).unwrap();
        assert_eq!(ask(&id, BackingOp::Stat).unwrap().0, 4);
        assert_eq!(ask(&id, BackingOp::Read { offset: 4, bytes: 1 }).unwrap().0, 0);
        ask(&id, BackingOp::Sync).unwrap();
        let other = BackingId { target: 3 << 16, ..id };
        assert_eq!(ask(&other, BackingOp::Stat), Err(Code::Stale), "another node's target");
        ask(&id, BackingOp::Remove).unwrap();
        ask(&id, BackingOp::Remove).unwrap();
        assert_eq!(ask(&id, BackingOp::Stat), Err(Code::NotFound));
        std::fs::remove_dir_all(&place).unwrap();
    }
}
