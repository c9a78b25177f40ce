//! The descriptor store: the supervisor keeps the descriptors that must survive a worker.
//!
//! Supervisor and worker hold the two ends of a SOCK_SEQPACKET pair. A message is one byte of kind, then text, with
//! descriptors beside it. When the worker's `put` returns, the message is in the supervisor's queue. The supervisor
//! reads that queue until it is empty after the worker has died and before it starts the next one, so no descriptor is
//! lost once `put` has returned. The supervisor never blocks on this pair; the worker may.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_tasks::Failure;
use forebay_types::{Code, Error, Result};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Maximum descriptors of one message: those of the setup, with a target and a lock for each target that a node may
/// have.
pub const TAG_FDS_MAX: usize = 2 + 2 * forebay_types::limits::NODE_TARGETS_MAX;
/// Maximum bytes of one message, which is the setup with its lists of costs.
const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Maximum bytes of a tag.
const TAG_BYTES_MAX: usize = 255;

/// What begins the tags of programs' sessions: their rings and pidfds. The supervisor reads them too.
pub(crate) const PROGRAM_TAG: &str = "program ";
/// What begins the tags of pieces of volumes, and those of thin pieces. The supervisor reads them too.
pub(crate) const PIECE_TAG: &str = "piece ";
/// See [`PIECE_TAG`].
pub(crate) const THIN_PIECE_TAG: &str = "thin piece ";

/// A message between supervisor and worker.
#[derive(Debug)]
pub(crate) enum Message {
    /// Worker: store these under the tag, in place of the tag's earlier descriptors.
    Put(String, Vec<OwnedFd>),
    /// Worker: forget the tag.
    Remove(String),
    /// Worker: start a notifier with this end of a pair.
    StartNotifier(OwnedFd),
    /// Worker: keep a mover from now on.
    StartMover,
    /// Worker: the worker serves.
    Ready,
    /// Worker: the worker cannot serve, and why.
    Failed(Failure),
    /// Supervisor: the first message, a [`crate::setup::SetupText`], with the descriptors that it names.
    Setup(String, Vec<OwnedFd>),
    /// Supervisor: descriptors that an earlier worker stored.
    Given(String, Vec<OwnedFd>),
    /// Supervisor: all stored descriptors were sent.
    End,
    /// Worker, to a notifier: the descriptors that it needs.
    Handed(Vec<OwnedFd>),
}

/// Makes a pair of sockets: the supervisor's end, then the worker's. Both are close-on-exec.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| Error::io("cannot make the pair of sockets between supervisor and worker", &e.into()))
}

/// Sends one message; `Errno::AGAIN` when `flags` forbid waiting and the queue is full.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    kind: u8,
    text: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> std::result::Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TAG_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let kind = [kind];
    let parts = [IoSlice::new(&kind), IoSlice::new(text)];
    loop {
        match rustix::net::sendmsg(socket, &parts, &mut control, flags | SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// The first byte of a message, which is its kind.
pub(crate) const KIND_SETUP: u8 = b'S';
pub(crate) const KIND_GIVEN: u8 = b'G';
pub(crate) const KIND_END: u8 = b'E';
pub(crate) const KIND_HANDED: u8 = b'H';
const KIND_NOTIFIER: u8 = b'N';
const KIND_MOVER: u8 = b'M';
const KIND_PUT: u8 = b'P';
const KIND_REMOVE: u8 = b'R';
const KIND_READY: u8 = b'Y';
const KIND_FAILED: u8 = b'F';

/// Receives one message; none when the other end is closed. `Errno::AGAIN` when `flags` forbid waiting and no message
/// is queued. A message that cannot be decoded is `Errno::PROTO`. A message with more descriptors than this process may
/// open is `Errno::MFILE`.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    flags: RecvFlags,
) -> std::result::Result<Option<Message>, Errno> {
    let mut buffer = vec![0u8; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TAG_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Ok(r) => break r,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    let text = String::from_utf8(buffer[1..received.bytes].to_vec()).map_err(|_| Errno::PROTO)?;
    Ok(Some(match buffer[0] {
        KIND_PUT => Message::Put(text, fds),
        KIND_REMOVE => Message::Remove(text),
        KIND_NOTIFIER => Message::StartNotifier(fds.pop().ok_or(Errno::PROTO)?),
        KIND_MOVER => Message::StartMover,
        KIND_HANDED => Message::Handed(fds),
        KIND_READY => Message::Ready,
        KIND_FAILED => Message::Failed(serde_json::from_str(&text).map_err(|_| Errno::PROTO)?),
        KIND_SETUP => Message::Setup(text, fds),
        KIND_GIVEN => Message::Given(text, fds),
        KIND_END => Message::End,
        _ => return Err(Errno::PROTO),
    }))
}

/// The worker's end.
#[derive(Debug)]
pub struct FdStore {
    socket: OwnedFd,
}

impl FdStore {
    /// A store whose supervisor is at the other end of `socket`.
    pub(crate) fn new(socket: OwnedFd) -> FdStore {
        FdStore { socket }
    }

    /// A second handle of the same store.
    pub(crate) fn try_clone(&self) -> Result<FdStore> {
        let socket = self.socket.try_clone();
        socket.map(FdStore::new).map_err(|e| Error::io("cannot duplicate the supervisor's socket", &e))
    }

    fn send(&self, kind: u8, text: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        send(self.socket.as_fd(), kind, text, fds, SendFlags::empty())
            .map_err(|e| Error::io("cannot reach the supervisor's descriptor store", &e.into()))
    }

    /// Stores duplicates of `fds` (1 to [`TAG_FDS_MAX`]) under `tag` (1 to 255 bytes), in place of the tag's earlier
    /// descriptors. When this returns, they outlive this process.
    pub fn put(&self, tag: &str, fds: &[BorrowedFd<'_>]) -> Result<()> {
        if tag.is_empty() || tag.len() > TAG_BYTES_MAX || fds.is_empty() || fds.len() > TAG_FDS_MAX {
            return Err(Error::new(
                Code::Invalid,
                format!("cannot keep {} descriptors as {tag:?}", fds.len()),
            ));
        }
        self.send(KIND_PUT, tag.as_bytes(), fds)
    }

    /// Removes a tag and closes its stored descriptors.
    pub fn remove(&self, tag: &str) -> Result<()> {
        self.send(KIND_REMOVE, tag.as_bytes(), &[])
    }

    /// Makes the supervisor start a notifier, which gets a duplicate of `socket`.
    pub(crate) fn start_notifier(&self, socket: BorrowedFd<'_>) -> Result<()> {
        self.send(KIND_NOTIFIER, b"", &[socket])
    }

    /// Makes the supervisor start a mover, unless it has one.
    pub(crate) fn start_mover(&self) -> Result<()> {
        self.send(KIND_MOVER, b"", &[])
    }

    /// Reports that the worker serves; `forebay up` and `forebay run` wait for this.
    pub fn ready(&self) -> Result<()> {
        self.send(KIND_READY, b"", &[])
    }

    /// Reports why the worker ends. If the pool has not served yet, the pool ends too. With [`Code::Stale`] the pool
    /// ends at any time.
    pub(crate) fn failed(&self, error: &Error) {
        if let Ok(text) = serde_json::to_string(&Failure::from(error)) {
            let _ = self.send(KIND_FAILED, text.as_bytes(), &[]);
        }
    }
}

/// The supervisor's stored descriptors, by tag.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    by_tag: BTreeMap<String, Vec<OwnedFd>>,
}

impl Kept {
    pub(crate) fn put(&mut self, tag: String, fds: Vec<OwnedFd>) {
        self.by_tag.insert(tag, fds);
    }

    pub(crate) fn remove(&mut self, tag: &str) {
        self.by_tag.remove(tag);
    }

    pub(crate) fn tags(&self) -> Vec<String> {
        self.by_tag.keys().cloned().collect()
    }

    /// True if there are descriptors under a tag.
    pub(crate) fn has(&self, tag: &str) -> bool {
        self.by_tag.contains_key(tag)
    }

    /// The descriptors of all tags that begin with `start`.
    pub(crate) fn of(&self, start: &'static str) -> impl Iterator<Item = &[OwnedFd]> {
        let from = self.by_tag.range(start.to_owned()..);
        from.take_while(move |(tag, _)| tag.starts_with(start)).map(|(_, fds)| fds.as_slice())
    }

    pub(crate) fn get(&self, tag: &str) -> Option<Vec<BorrowedFd<'_>>> {
        self.by_tag.get(tag).map(|fds| fds.iter().map(|fd| fd.as_fd()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    fn file(text: &str) -> std::fs::File {
        let fd = rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut f = std::fs::File::from(fd);
        f.write_all(text.as_bytes()).unwrap();
        f
    }

    #[test]
    fn put_descriptors_survive_the_worker_and_reach_the_next() {
        let (ours, theirs) = pair().unwrap();
        let mut kept = Kept::default();
        let store = FdStore::new(theirs);
        store.put("ring 7", &[file("a").as_fd(), file("b").as_fd()]).unwrap();
        store.put("ring 8", &[file("gone").as_fd()]).unwrap();
        store.remove("ring 8").unwrap();
        store.put("ring 7", &[file("c").as_fd()]).unwrap();
        drop(store); // the worker dies; its messages are not read yet
        loop {
            // Blocks until the end closes: a child that another test is forking has the other end open until it execs.
            match receive(ours.as_fd(), RecvFlags::empty()).unwrap() {
                Some(Message::Put(tag, fds)) => kept.put(tag, fds),
                Some(Message::Remove(tag)) => kept.remove(&tag),
                None => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(kept.tags(), ["ring 7"]);
        let (ours, theirs) = pair().unwrap();
        let fds = kept.get("ring 7").unwrap();
        send(ours.as_fd(), KIND_GIVEN, b"ring 7", &fds, SendFlags::DONTWAIT).unwrap();
        let Some(Message::Given(tag, mut fds)) = receive(theirs.as_fd(), RecvFlags::empty()).unwrap() else {
            panic!("no descriptors came")
        };
        assert_eq!((tag.as_str(), fds.len()), ("ring 7", 1));
        let mut f = std::fs::File::from(fds.remove(0));
        let mut text = String::new();
        f.rewind().unwrap();
        f.read_to_string(&mut text).unwrap();
        assert_eq!(text, "c");
    }

    #[test]
    fn failed_carries_the_error_with_its_words() {
        let (ours, theirs) = pair().unwrap();
        let store = FdStore::new(theirs);
        store.failed(&Error::new(Code::NewerFormat, "cannot open the shard").why("format 9").cure("newer"));
        let Some(Message::Failed(f)) = receive(ours.as_fd(), RecvFlags::empty()).unwrap() else { panic!() };
        let e = Error::from(f);
        assert_eq!(e.code, Code::NewerFormat);
        assert_eq!(e.to_string(), "cannot open the shard: format 9\n  hint: newer");
    }

    #[test]
    fn put_of_nothing_or_too_much_is_refused() {
        let (_ours, theirs) = pair().unwrap();
        let store = FdStore::new(theirs);
        let f = file("x");
        assert!(store.put("t", &[]).is_err());
        assert!(store.put("", &[f.as_fd()]).is_err());
        assert!(store.put("t", &[f.as_fd(); TAG_FDS_MAX + 1]).is_err());
        store.put("t", &[f.as_fd(); TAG_FDS_MAX]).unwrap();
    }
}
