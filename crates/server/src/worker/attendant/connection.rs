//! One connection of a client: requests to attach, and those that follow on the same socket.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use forebay_ring::{
    read_exact, receive_fds, send_fds, write_all, AttachReply, Header, ATTACH_FDS, HEADER_BYTES, KIND_ALIVE,
    KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_CONTROL, KIND_MEMORY, KIND_MOUNT, KIND_NODE, KIND_PIECE,
    KIND_WATCH,
};
use forebay_types::limits::{BUFFER_BYTES, RINGS_MAX};
use forebay_types::{Code, Error, Ino, NodeId, PieceId, Reader, Result};
use rustix::event::epoll;
use rustix::io::Errno;
use serde_json::Value;

use super::desk::{failed, refusal, Desk, Process, TOKEN_LISTENER};
use crate::pacing;
use crate::protocol::WorkerAsk;
use crate::worker::attached_programs::{Newcomer, PROGRAMS_TAG};
use crate::worker::message::Message;
use crate::worker::network::{give_buffer, Command};
use crate::worker::session::Session;
use crate::worker::session_id::{mount_tag, new_session_id, store_tag};

/// A client that sends nothing for so long is dropped.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// A client's first request is awaited for so long before a thread is started for its connection.
const PROMPT: Duration = Duration::from_micros(500);
/// A mount that does not answer within so long is disconnected.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time that `status` gives the other nodes to answer. The network thread gives up before.
const SURVEY_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest body of a request on the socket.
const BODY_BYTES_MAX: u32 = 64 * 1024;

/// One connection.
pub(super) struct Connection<'a> {
    pub(super) desk: &'a Desk,
    pub(super) to_shard: &'a Sender<Message>,
    pub(super) announce: &'a Sender<Process>,
    pub(super) socket: &'a OwnedFd,
}

impl Connection<'_> {
    /// True when the client's first request arrives at once and is a plain request to attach.
    pub(super) fn attaches_promptly(&self) -> bool {
        let mut header = [0; HEADER_BYTES];
        let next_timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: PROMPT.subsec_nanos().into() };
        let mut ready = [rustix::event::PollFd::new(self.socket, rustix::event::PollFlags::IN)];
        if !matches!(rustix::event::poll(&mut ready, Some(&next_timeout)), Ok(1)) {
            return false;
        }
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(self.socket, &mut header, flags);
        let whole = matches!(peeked, Ok((n, _)) if n == HEADER_BYTES);
        let plain = Header::decode(&header).is_ok_and(|h| h.kind == KIND_ATTACH && h.len == 0);
        whole && plain && !self.desk.attached_programs.would_wait()
    }

    /// Serves a plain request to attach.
    pub(super) fn serve_attach(&self) -> std::result::Result<(), Code> {
        if !self.is_from_owner()? {
            return self.refuse(Code::AccessDenied, "the pool serves another user");
        }
        read_exact(self.socket.as_fd(), &mut [0; HEADER_BYTES])?;
        self.attach(Newcomer::Program).or_else(|e| self.refuse_attach(&e))
    }

    fn refuse_attach(&self, e: &Error) -> std::result::Result<(), Code> {
        if self.desk.refusals.may_say() {
            tracing::warn!("cannot attach a process: {e}");
        }
        self.refuse(e.code, &e.to_string())
    }

    fn is_from_owner(&self) -> std::result::Result<bool, Code> {
        let peer = rustix::net::sockopt::socket_peercred(self.socket)
            .map_err(|e| Code::from_errno(e.raw_os_error()))?;
        let uid = peer.uid.as_raw();
        Ok(uid == self.desk.owner || uid == 0)
    }

    pub(super) fn serve(&self) -> std::result::Result<(), Code> {
        let errno = |e: Errno| Code::from_errno(e.raw_os_error());
        for option in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(self.socket, option, Some(SILENCE_TIMEOUT))
                .map_err(errno)?;
        }
        if !self.is_from_owner()? {
            return self.refuse(Code::AccessDenied, "the pool serves another user");
        }
        loop {
            let mut header = [0; HEADER_BYTES];
            match read_exact(self.socket.as_fd(), &mut header) {
                Err(Code::PoolGone) => return Ok(()),
                other => other?,
            }
            let header = match Header::decode(&header) {
                Err(Code::NotSupported) => {
                    return self.refuse(Code::NotSupported, "program and daemon are of different versions");
                }
                header => header?,
            };
            if header.len > BODY_BYTES_MAX {
                return self.refuse(Code::TooBig, "the request is too long");
            }
            let mut body = vec![0; header.len as usize];
            read_exact(self.socket.as_fd(), &mut body)?;
            match header.kind {
                KIND_ATTACH => {
                    if let Err(e) = self.attach(Newcomer::of(&body)) {
                        return self.refuse_attach(&e);
                    }
                }
                KIND_BOARD => {
                    let session = body.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
                    if !self.is_known(session)? {
                        return self.refuse(Code::UnknownSession, "attach again");
                    }
                    let fds = self.desk.with_targets(&[&self.desk.board_fd]);
                    self.send_attach_reply(KIND_BOARD, session, &fds)?;
                }
                KIND_ALIVE => {
                    let session = body.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
                    if !self.is_known(session)? {
                        return self.refuse(Code::UnknownSession, "attach again");
                    }
                    write_all(self.socket.as_fd(), &Header { kind: KIND_ALIVE, len: 0 }.encode())?;
                }
                KIND_BUFFER => {
                    let session = body.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
                    if !self.is_known(session)? {
                        return self.refuse(Code::UnknownSession, "attach again");
                    }
                    if let Err(e) = self.give_buffer(session) {
                        tracing::debug!("{e}");
                        return self.refuse(e.code, &e.to_string());
                    }
                    self.end_if_over(session)?;
                }
                KIND_MOUNT => {
                    let session = body.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
                    if let Err(e) = self.mount(session) {
                        tracing::warn!("{e}");
                        return self.refuse(e.code, &e.to_string());
                    }
                    return Ok(()); // `attached_programs` owns the connection from here on
                }
                KIND_PIECE => self.open_piece(&body)?,
                KIND_NODE => self.name_node(&body)?,
                KIND_MEMORY => self.program_memory(&body)?,
                KIND_WATCH => self.watch(&body)?,
                KIND_CONTROL => self.control(&body)?,
                _ => return self.refuse(Code::Malformed, "unknown kind of message"),
            }
        }
    }

    /// Releases what the network thread has of a session that may have ended before the thread received it.
    pub(super) fn end_if_over(&self, session: u64) -> std::result::Result<(), Code> {
        if !self.is_known(session)? {
            if let Some(network) = &self.desk.network {
                network.give(Command::EndSession(session, Vec::new()));
            }
        }
        Ok(())
    }

    pub(super) fn refuse(&self, code: Code, text: &str) -> std::result::Result<(), Code> {
        write_all(self.socket.as_fd(), &refusal(code, text))
    }

    fn ask_shard<T>(&self, message: Message, reply: &mpsc::Receiver<T>) -> std::result::Result<T, Code> {
        self.to_shard.send(message).map_err(|_| Code::PoolGone)?;
        self.desk.doorbell.ring();
        reply.recv().map_err(|_| Code::PoolGone)
    }

    pub(super) fn is_known(&self, session: u64) -> std::result::Result<bool, Code> {
        let (send, receive) = mpsc::channel();
        self.ask_shard(Message::Known(session, send), &receive)
    }

    /// Creates a session's buffer for data of other nodes. The network thread receives it before the client does.
    fn give_buffer(&self, session: u64) -> Result<()> {
        let what = "cannot give a process a buffer";
        let Some(network) = &self.desk.network else {
            return Err(Error::new(Code::NotSupported, what).why("the pool has no other nodes"));
        };
        let mut number = [0; 8];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).map_err(failed(what))?;
        let fd = give_buffer(network, session, u64::from_le_bytes(number))?;
        let mut message = Header { kind: KIND_BUFFER, len: 16 }.encode().to_vec();
        message.extend(number);
        message.extend((BUFFER_BYTES as u64).to_le_bytes());
        send_fds(self.socket.as_fd(), &message, &[fd.as_raw_fd()]).map_err(|code| Error::new(code, what))
    }

    /// A session serves a mount. Its device follows; invalidations are written to it.
    fn mount(&self, session: u64) -> Result<()> {
        let what = "cannot notify a mount of changes";
        let code = |code| Error::new(code, what);
        let mut fds = [const { None }; ATTACH_FDS];
        receive_fds(self.socket.as_fd(), &mut [0], &mut fds).map_err(code)?;
        let [Some(device), None, ..] = fds else { return Err(code(Code::Malformed)) };
        let before = self.desk.mounter.takes_over(session, self.peer_process()?, device, |device| {
            self.desk.setup.store.put(&mount_tag(session), &[device.as_fd()])?;
            let (send, receive) = mpsc::channel();
            if self.ask_shard(Message::Mounted(session, device, send), &receive).map_err(code)? {
                return Ok(());
            }
            let _ = self.desk.setup.store.remove(&mount_tag(session));
            Err(code(Code::UnknownSession))
        })?;
        if let Some(before) = before {
            // That process has attached again, or has ended. The next worker must find one mount.
            self.desk.setup.store.remove(&mount_tag(before))?;
        }
        let answer = |word| -> std::result::Result<OwnedFd, Code> {
            let errno = |e: Errno| Code::from_errno(e.raw_os_error());
            let timeout = rustix::net::sockopt::Timeout::Recv;
            rustix::net::sockopt::set_socket_timeout(self.socket, timeout, Some(MOUNT_TIMEOUT))
                .map_err(errno)?;
            let mut message = Header { kind: KIND_MOUNT, len: 1 }.encode().to_vec();
            message.push(word);
            write_all(self.socket.as_fd(), &message)?;
            rustix::io::fcntl_dupfd_cloexec(self.socket, 3).map_err(errno)
        };
        self.desk.attached_programs.announces(session, answer).map_err(code)
    }

    /// Watches a directory with the inotify instance whose descriptor follows.
    fn watch(&self, body: &[u8]) -> std::result::Result<(), Code> {
        let mut fds = [const { None }; ATTACH_FDS];
        receive_fds(self.socket.as_fd(), &mut [0], &mut fds)?;
        let fields = (body.first_chunk(), body.last_chunk(), body.len());
        let ([Some(inotify), None, ..], (Some(directory), Some(mask), 12)) = (fds, fields) else {
            return self.refuse(Code::Malformed, "a watch needs a directory, a mask and a descriptor");
        };
        let directory = Ino(u64::from_le_bytes(*directory));
        match self.desk.watches.watch(directory, inotify, u32::from_le_bytes(*mask)) {
            Ok(watch) => {
                let mut message = Header { kind: KIND_WATCH, len: 4 }.encode().to_vec();
                message.extend(watch.to_le_bytes());
                write_all(self.socket.as_fd(), &message)
            }
            Err(code) => self.refuse(code, "cannot watch the directory"),
        }
    }

    /// Gives a piece of a volume to a process whose user may have it.
    fn open_piece(&self, body: &[u8]) -> std::result::Result<(), Code> {
        let mut r = Reader::new(body);
        let (Ok(piece), Ok(writes @ (0 | 1)), []) = (PieceId::decode(&mut r), r.u8(), r.rest()) else {
            return self.refuse(Code::Malformed, "a piece needs its number and how it is used");
        };
        let peer = rustix::net::sockopt::socket_peercred(self.socket)
            .map_err(|e| Code::from_errno(e.raw_os_error()))?;
        let user = (peer.uid.as_raw(), peer.gid.as_raw());
        let (send, receive) = mpsc::channel();
        match self.ask_shard(Message::OpenPiece(piece, writes == 1, user, send), &receive)? {
            Ok(opened) => {
                let (header, bytes) = (Header { kind: KIND_PIECE, len: 8 }.encode(), opened.bytes);
                let mut fds = vec![opened.piece.as_raw_fd(), opened.life.as_raw_fd()];
                fds.extend(opened.head.as_ref().map(AsRawFd::as_raw_fd));
                send_fds(self.socket.as_fd(), &header, &fds)?;
                // The volume counts as open as long as this descriptor exists, and the process may have closed its own as
                // soon as it has the whole answer.
                drop(opened);
                write_all(self.socket.as_fd(), &bytes.to_le_bytes())
            }
            Err(code) => self.refuse(code, "cannot open a piece of a volume"),
        }
    }

    /// Tells the number of the node with a name.
    fn name_node(&self, name: &[u8]) -> std::result::Result<(), Code> {
        let mut nodes = self.desk.setup.membership.iter().flat_map(|membership| &membership.nodes);
        match nodes.find(|node| node.name.as_bytes() == name) {
            Some(node) => {
                let mut message = Header { kind: KIND_NODE, len: 2 }.encode().to_vec();
                message.extend(node.number.to_le_bytes());
                write_all(self.socket.as_fd(), &message)
            }
            None => self.refuse(Code::NotFound, "the pool has no node with this name"),
        }
    }

    fn attach(&self, kind: Newcomer) -> Result<()> {
        if self.desk.attached.load(Ordering::Relaxed) >= self.desk.clients_max {
            let e = Error::new(Code::NoResources, "cannot attach another process")
                .why(format!("{} are attached", self.desk.clients_max));
            return Err(match self.desk.clients_max < RINGS_MAX {
                true => e.cure("start the pool with a higher limit of open files (ulimit -n)"),
                false => e,
            });
        }
        let id = new_session_id(NodeId(self.desk.setup.identity.node))?;
        let process = self.peer_process()?;
        let (ring_fd, ring) = self.desk.take_ring()?;
        ring.set_epoch(self.desk.epoch);
        // First to the supervisor: once the client has its ring, a crash must not lose it.
        let is_program = kind == Newcomer::Program;
        self.desk.setup.store.put(&store_tag(id, is_program), &[ring_fd.as_fd(), process.as_fd()])?;
        // The shard thread receives this before the client's first request wakes it.
        self.to_shard
            .send(Message::Attached(Box::new(Session::local(id, ring))))
            .map_err(|_| Error::new(Code::PoolGone, "cannot attach a process"))?;
        if self.desk.attached_programs.joins(kind, id) {
            // Any descriptor will do: the next worker searches for the tag.
            self.desk.setup.store.put(PROGRAMS_TAG, &[self.desk.board_fd.as_fd()])?;
        }
        // Watched before the answer is sent, and even if it does not arrive, so that the death of the process is
        // noticed.
        let token = epoll::EventData::new_u64(id & (TOKEN_LISTENER - 1));
        if let Err(e) = epoll::add(&self.desk.epoll, &process, token, epoll::EventFlags::IN) {
            self.forget(id, is_program);
            return Err(failed("cannot watch a client")(e));
        }
        let mut fds = self.desk.with_targets(&[&ring_fd, &self.desk.doorbell_fd, &self.desk.board_fd]);
        fds.extend(self.desk.pacing.as_ref().map(AsRawFd::as_raw_fd));
        let sent = self.send_attach_reply(KIND_ATTACH, id, &fds);
        self.desk.attached.fetch_add(1, Ordering::Relaxed);
        // If the process ends before the attendant receives this, epoll reports it again. The send fails when the
        // attendant has ended, and the worker with it.
        let _ = self.announce.send(Process { session: id, is_program, pidfd: process });
        let _ = rustix::io::write(&self.desk.wake, &1u64.to_ne_bytes());
        sent.map_err(|code| Error::new(code, "cannot answer a client"))
    }

    /// Undoes an attachment that failed.
    fn forget(&self, id: u64, is_program: bool) {
        let _ = self.to_shard.send(Message::Ended(id));
        self.desk.doorbell.ring();
        self.desk.attached_programs.leaves(id);
        if let Err(e) = self.desk.setup.store.remove(&store_tag(id, is_program)) {
            tracing::error!("{e}");
        }
    }

    /// A descriptor of the process at the other end.
    fn peer_process(&self) -> Result<OwnedFd> {
        let what = "cannot watch the client's process";
        const SO_PEERPIDFD: libc::c_int = 77;
        let mut fd: libc::c_int = -1;
        let mut len = size_of_val(&fd) as libc::socklen_t;
        // SAFETY: the option's value is one int, as said.
        let got = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERPIDFD,
                (&raw mut fd).cast(),
                &mut len,
            )
        };
        if got == 0 && fd >= 0 {
            // SAFETY: the descriptor is new and ours.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        // Before Linux 6.5: by process ID, which stays the client's while it waits for the answer.
        let peer = rustix::net::sockopt::socket_peercred(self.socket).map_err(failed(what))?;
        rustix::process::pidfd_open(peer.pid, rustix::process::PidfdFlags::empty()).map_err(failed(what))
    }

    fn send_attach_reply(&self, kind: u16, session: u64, fds: &[i32]) -> std::result::Result<(), Code> {
        let reply = AttachReply {
            session,
            epoch: self.desk.epoch,
            board_bytes: self.desk.board_bytes,
            device: self.desk.device,
            targets: match self.desk.setup.identity.shard_only {
                true => 0,
                false => self.desk.setup.target_dirs.len() as u64,
            },
            root: Ino::ROOT,
            stable_inodes: self.desk.stable_inodes,
            node: NodeId(self.desk.setup.identity.node),
            nodes: self.desk.setup.membership.as_ref().map_or(1, |m| m.nodes.len() as u64),
            paced: self.desk.pacing.is_some().into(),
        };
        let mut message = Header { kind, len: AttachReply::BYTES as u32 }.encode().to_vec();
        message.extend(reply.encode());
        send_fds(self.socket.as_fd(), &message, fds)
    }

    fn control(&self, body: &[u8]) -> std::result::Result<(), Code> {
        let Ok(ask) = serde_json::from_slice(body) else {
            return self.refuse(Code::Malformed, "the request cannot be understood");
        };
        let value: Value = match ask {
            WorkerAsk::Status => {
                let (send, receive) = mpsc::channel();
                let mut status = self.ask_shard(Message::Status(send), &receive)?;
                if let Some(fd) = &self.desk.pacing {
                    let targets = if self.desk.setup.identity.shard_only {
                        0
                    } else {
                        self.desk.setup.target_dirs.len()
                    };
                    status["media_profile"] = pacing::status(fd, targets);
                }
                status["pids"] = serde_json::json!({ "worker": std::process::id() });
                if let (Some(network), Some(status)) = (&self.desk.network, status.as_object_mut()) {
                    let (send, receive) = mpsc::channel();
                    network.give(Command::Survey(send));
                    if let Ok(Value::Object(others)) = receive.recv_timeout(SURVEY_TIMEOUT) {
                        status.extend(others);
                    }
                }
                status
            }
            WorkerAsk::Check => {
                let (send, receive) = mpsc::channel();
                match self.ask_shard(Message::Check(send), &receive)? {
                    Ok(report) => report,
                    Err(e) => return self.refuse(e.code, &e.to_string()),
                }
            }
        };
        let text = value.to_string();
        let mut message = Header { kind: KIND_CONTROL, len: text.len() as u32 }.encode().to_vec();
        message.extend(text.as_bytes());
        write_all(self.socket.as_fd(), &message)
    }
}
