//! The socket by which clients come to their ring, as a daemon's attendant has it: a thread answers at once whatever it
//! is asked, while its client has the baton. What it answers with the scheduler has laid out before.

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

/// What a client is handed: ring, doorbell, board and target, and buffers when it asks for them.
#[derive(Debug)]
pub(crate) struct Handout {
    pub(crate) reply: AttachReply,
    pub(crate) ring: Arc<OwnedFd>,
    pub(crate) doorbell: Arc<OwnedFd>,
    pub(crate) board: Arc<OwnedFd>,
    pub(crate) target: Arc<OwnedFd>,
    pub(crate) buffers: Buffers,
}

/// By session. Nothing is laid out for the clients of a worker that is dead: they are told so, and ask by their rings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Desk {
    handouts: Arc<Mutex<BTreeMap<u64, Handout>>>,
    /// Buffers that were given.
    given: Arc<AtomicU64>,
}

impl Desk {
    pub(crate) fn handouts(&self) -> MutexGuard<'_, BTreeMap<u64, Handout>> {
        self.handouts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens for a session's client in a directory.
    pub(crate) fn open_door(&self, dir: &Path, session: u64) {
        let listener = UnixListener::bind(dir.join("socket")).unwrap();
        let desk = self.clone();
        let body = move || {
            for socket in listener.incoming() {
                // A client that is gone needs no answer.
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
                // The supervisor listens, and its next worker will answer.
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
