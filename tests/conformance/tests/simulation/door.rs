//! The socket through which clients attach, in place of a daemon's attendant. A thread answers each request at once,
//! while its client has the baton. The scheduler has prepared the answers.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_ring::{
    read_exact, send_fds, write_all, AttachReply, Header, HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD,
    KIND_BUFFER, KIND_ERROR,
};
use forebay_server::stepped::Buffers;
use forebay_types::limits::BUFFER_BYTES;
use forebay_types::Code;

/// What an attaching client receives: ring, doorbell, board and target, and buffers on request.
#[derive(Debug)]
pub(crate) struct Handout {
    pub(crate) reply: AttachReply,
    pub(crate) ring: Arc<OwnedFd>,
    pub(crate) doorbell: Arc<OwnedFd>,
    pub(crate) board: Arc<OwnedFd>,
    pub(crate) target: Arc<OwnedFd>,
    pub(crate) buffers: Buffers,
}

/// The handouts, by session. The clients of a dead worker have none: they receive an error, and continue to wait at
/// their rings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Desk {
    handouts: Arc<Mutex<BTreeMap<u64, Handout>>>,
    /// The number of data buffers given out.
    given: Arc<AtomicU64>,
}

impl Desk {
    pub(crate) fn handouts(&self) -> MutexGuard<'_, BTreeMap<u64, Handout>> {
        self.handouts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens on a socket in `dir` for a session's client.
    pub(crate) fn open_door(&self, dir: &Path, session: u64) {
        let listener = UnixListener::bind(dir.join("socket")).unwrap();
        let desk = self.clone();
        let body = move || {
            for socket in listener.incoming() {
                // A client that has ended needs no answer.
                let _ = socket.map(|socket| desk.talk(&socket, session));
            }
        };
        std::thread::Builder::new().name("door".into()).spawn(body).unwrap();
    }

    fn talk(&self, socket: &UnixStream, session: u64) -> Result<(), Code> {
        let mut bytes = [0; HEADER_BYTES];
        read_exact(socket.as_fd(), &mut bytes)?;
        let header = Header::decode(&bytes)?;
        let mut body = vec![0; header.len as usize];
        read_exact(socket.as_fd(), &mut body)?;
        let handouts = self.handouts();
        let Some(handout) = handouts.get(&session) else {
            if header.kind == KIND_ALIVE {
                // As with a real supervisor, the connection succeeds, and the next worker will answer.
                return Ok(());
            }
            let mut message = Header { kind: KIND_ERROR, len: 2 }.encode().to_vec();
            message.extend((Code::Busy as u16).to_le_bytes());
            return write_all(socket.as_fd(), &message);
        };
        let reply = |kind, body: &[u8]| {
            let mut message = Header { kind, len: body.len() as u32 }.encode().to_vec();
            message.extend(body);
            message
        };
        let fds: Vec<i32> = match header.kind {
            KIND_ATTACH => vec![&handout.ring, &handout.doorbell, &handout.board, &handout.target],
            KIND_BOARD => vec![&handout.board, &handout.target],
            KIND_BUFFER => {
                let number = self.given.fetch_add(1, Ordering::Relaxed) + 1;
                let memory = handout.buffers.give(session, number).map_err(|e| e.code)?;
                let body = [number.to_le_bytes(), (BUFFER_BYTES as u64).to_le_bytes()].concat();
                return send_fds(socket.as_fd(), &reply(KIND_BUFFER, &body), &[memory.as_raw_fd()]);
            }
            KIND_ALIVE => return write_all(socket.as_fd(), &reply(KIND_ALIVE, &[])),
            _ => return Err(Code::Malformed),
        }
        .iter()
        .map(|fd| fd.as_raw_fd())
        .collect();
        send_fds(socket.as_fd(), &reply(header.kind, &handout.reply.encode()), &fds)
    }
}
