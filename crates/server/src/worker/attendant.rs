//! The attendant: lets processes attach, notices when they die, answers `status` and `check`, and hears SIGTERM.
//!
//! A client that asks for nothing but to attach, as nearly all do, and says so at once, is served right here: every
//! program's first call on the pool waits for it. Each other connection gets a short-lived thread with a time limit, so
//! that a client that connects and says nothing holds up nobody. A process counts as dead when its pidfd says so, never
//! because a socket closed.

use forebay_sys::signals::Signals;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_ring::{
    read_exact, receive_fds, send_fds, write_all, AttachReply, Doorbell, Header, ServedRing, ATTACH_FDS,
    HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_CONTROL, KIND_ERROR, KIND_MOUNT,
    KIND_WATCH,
};
use forebay_types::limits::{BUFFER_BYTES, RINGS_MAX};
use forebay_types::{Code, Error, Ino, NodeId, Result};
use rustix::event::epoll;
use rustix::io::Errno;
use serde_json::Value;

use super::attached_programs::{AttachedPrograms, Newcomer, PROGRAMS_TAG};
use super::message::Message;
use super::mounter::{self, Mounter};
use super::network::{give_buffer, Command, Commands};
use super::session::Session;
use super::session_id::{mount_tag, new_session_id, session_of_mount_tag, session_of_tag, store_tag};
use super::watches::Watches;
use crate::inherited;
use crate::protocol::WorkerAsk;
use crate::reserve::{Reserve, Seldom};
use crate::setup::WorkerSetup;

/// Connections served at the same time; more wait in the listener's queue.
const CONNECTIONS_MAX: usize = 256;
/// A client that says nothing for so long is dropped.
const TALK_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that has connected says what it wants within so long, or a thread waits for it.
const PROMPT: Duration = Duration::from_micros(500);
/// A mount answers within so long, or is left out.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// `status` waits this long for word of the other nodes: the network thread gives up before.
const SURVEY_PATIENCE: Duration = Duration::from_secs(3);
/// Longest body of a request on the socket.
const BODY_BYTES_MAX: u32 = 64 * 1024;

/// Pause after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// Descriptors that supervisor or worker have open for all clients together, and those for each other node.
const DESCRIPTORS_TAKEN: u64 = 32;
const DESCRIPTORS_A_NODE: u64 = 4;

const TOKEN_LISTENER: u64 = 1 << 62;
const TOKEN_STOP: u64 = TOKEN_LISTENER + 1;
const TOKEN_WAKE: u64 = TOKEN_LISTENER + 2;

/// Blocks SIGTERM and SIGINT in this thread and all that it starts, and makes them readable.
pub(super) fn block_signals() -> Result<OwnedFd> {
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT]);
    signals.map(OwnedFd::from).map_err(|e| Error::io("cannot watch for signals", &e))
}

/// What the attendant starts with.
pub(super) struct Attendant {
    pub(super) setup: WorkerSetup,
    pub(super) stop: OwnedFd,
    pub(super) board_fd: OwnedFd,
    pub(super) board_bytes: u64,
    pub(super) doorbell_fd: OwnedFd,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) device: u64,
    pub(super) stable_inodes: u64,
    pub(super) epoch: u64,
    pub(super) to_shard: Sender<Message>,
    pub(super) network: Option<Commands>,
    pub(super) watches: Watches,
}

/// What the connections' threads share.
struct Desk {
    setup: WorkerSetup,
    board_fd: OwnedFd,
    board_bytes: u64,
    doorbell_fd: OwnedFd,
    doorbell: Arc<Doorbell>,
    device: u64,
    stable_inodes: u64,
    epoch: u64,
    owner: u32,
    epoll: OwnedFd,
    /// Written to wake the attendant when a connection ends.
    wake: OwnedFd,
    connections: AtomicUsize,
    /// Processes that are attached.
    attached: AtomicUsize,
    attached_programs: AttachedPrograms,
    mounter: Mounter,
    network: Option<Commands>,
    /// Processes that may be attached at a time.
    clients_max: usize,
    refusals: Seldom,
    watches: Watches,
    /// A ring for the next client, made while nobody waits.
    spare: Mutex<Option<(OwnedFd, ServedRing)>>,
}

/// The attendant once the dead worker's sessions were taken over.
pub(super) struct Attending {
    desk: Arc<Desk>,
    to_shard: Sender<Message>,
    stop: OwnedFd,
    /// pidfds by session, kept open for as long as the process lives.
    processes: Vec<(u64, OwnedFd)>,
    newcomers: mpsc::Receiver<(u64, OwnedFd)>,
    announce: Sender<(u64, OwnedFd)>,
    reserve: Reserve,
}

/// What a dead worker left.
pub(super) struct Restored {
    pub(super) attending: Attending,
    pub(super) sessions: Vec<Session>,
    /// The session that serves the pool's mount, and the device by which the kernel is told of changes.
    pub(super) mount: Option<(u64, OwnedFd)>,
}

fn failed(what: &str) -> impl FnOnce(Errno) -> Error + '_ {
    move |e| Error::io(what, &e.into())
}

impl Attendant {
    /// Takes over what a dead worker left with the supervisor.
    pub(super) fn restore(mut self) -> Result<Restored> {
        let what = "cannot take over the clients of the last worker";
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed(what))?;
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).map_err(failed(what))?;
        let (mut sessions, mut processes, mut mounts, mut programs) =
            (Vec::new(), Vec::new(), Vec::new(), false);
        for (tag, mut fds) in std::mem::take(&mut self.setup.restored) {
            if let (Some(id), 1) = (session_of_mount_tag(&tag), fds.len()) {
                mounts.extend(fds.pop().map(|device| (id, device)));
                continue;
            }
            if tag == PROGRAMS_TAG {
                programs = true;
                continue;
            }
            let (Some(id), Ok([ring, process])) = (session_of_tag(&tag), <[OwnedFd; 2]>::try_from(fds))
            else {
                tracing::warn!("the descriptor store holds {tag:?}, which is unknown");
                continue;
            };
            let ring = ServedRing::reopen(ring.as_fd()).map_err(|e| Error::io(what, &e))?;
            sessions.push(Session::local(id, ring));
            processes.push((id, process));
        }
        let mounter::Left { serving: mount, mounter, forgotten } =
            mounter::restored(mounts, &processes).map_err(failed(what))?;
        for id in forgotten {
            self.setup.store.remove(&mount_tag(id))?;
        }
        let known: Vec<u64> = sessions.iter().map(|s| s.id).collect();
        let attached_programs =
            AttachedPrograms::restored(programs, &known, mount.as_ref().map(|(id, _)| *id));
        let add = |fd: BorrowedFd<'_>, token: u64| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
                .map_err(failed(what))
        };
        add(self.setup.listener.as_fd(), TOKEN_LISTENER)?;
        add(self.stop.as_fd(), TOKEN_STOP)?;
        add(wake.as_fd(), TOKEN_WAKE)?;
        for (id, process) in &processes {
            add(process.as_fd(), *id & (TOKEN_LISTENER - 1))?;
        }
        let (announce, newcomers) = mpsc::channel();
        let other_nodes = self.setup.membership.as_ref().map_or(0, |m| m.nodes.len().saturating_sub(1));
        let taken = DESCRIPTORS_TAKEN + DESCRIPTORS_A_NODE * other_nodes as u64;
        let desk = Desk {
            clients_max: inherited::clients_max(taken).min(RINGS_MAX),
            refusals: Seldom::default(),
            owner: rustix::process::getuid().as_raw(),
            setup: self.setup,
            board_fd: self.board_fd,
            board_bytes: self.board_bytes,
            doorbell_fd: self.doorbell_fd,
            doorbell: self.doorbell,
            device: self.device,
            stable_inodes: self.stable_inodes,
            epoch: self.epoch,
            epoll,
            wake,
            connections: AtomicUsize::new(0),
            attached: AtomicUsize::new(processes.len()),
            attached_programs,
            mounter,
            network: self.network,
            watches: self.watches,
            spare: Mutex::new(None),
        };
        let attending = Attending {
            reserve: Reserve::new(desk.wake.as_fd()),
            desk: Arc::new(desk),
            to_shard: self.to_shard,
            stop: self.stop,
            processes,
            newcomers,
            announce,
        };
        Ok(Restored { attending, sessions, mount })
    }
}

impl Attending {
    /// Tells the supervisor that the pool serves.
    pub(super) fn ready(&self) -> Result<()> {
        self.desk.setup.store.ready()
    }

    fn tell(&self, message: Message) {
        // The shard thread outlives this one, except when it failed; then all end.
        let _ = self.to_shard.send(message);
        self.desk.doorbell.ring();
    }

    /// Serves until SIGTERM.
    pub(super) fn attend(&mut self) -> Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.desk.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(failed("cannot wait for clients")(e)),
            }
            self.processes.extend(self.newcomers.try_iter());
            for event in &events {
                let (data, _) = (event.data, event.flags);
                match data.u64() {
                    TOKEN_STOP => {
                        let mut info = [0u8; 128];
                        if rustix::io::read(&self.stop, &mut info).is_ok() {
                            self.tell(Message::Stop);
                            return Ok(());
                        }
                    }
                    TOKEN_LISTENER => self.accept(),
                    TOKEN_WAKE => {
                        let mut count = [0u8; 8];
                        let _ = rustix::io::read(&self.desk.wake, &mut count);
                    }
                    token => self.process_ended(token),
                }
            }
        }
    }

    fn process_ended(&mut self, token: u64) {
        let Some(i) = self.processes.iter().position(|(id, _)| id & (TOKEN_LISTENER - 1) == token) else {
            return;
        };
        let (id, process) = self.processes.swap_remove(i);
        self.desk.attached.fetch_sub(1, Ordering::Relaxed);
        let _ = epoll::delete(&self.desk.epoll, &process);
        self.tell(Message::Ended(id));
        self.desk.attached_programs.leaves(id);
        self.desk.mounter.ends(id);
        for tag in [store_tag(id), mount_tag(id)] {
            if let Err(e) = self.desk.setup.store.remove(&tag) {
                tracing::error!("{e}");
            }
        }
    }

    fn accept(&mut self) {
        if self.desk.connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            // Level-triggered: looked at again when one ends, or now and then.
            std::thread::sleep(Duration::from_millis(1));
            return;
        }
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let socket = match rustix::net::accept_with(&self.desk.setup.listener, flags) {
            Ok(socket) => socket,
            Err(e) if Reserve::is_wanted(e) => {
                if self.desk.refusals.may_say() {
                    tracing::error!("clients are refused for want of descriptors: {e}");
                }
                let why = format!(
                    "its daemon has no descriptor left ({e}); raise the limit of open files (ulimit -n)"
                );
                let listener = self.desk.setup.listener.as_fd();
                if self.reserve.refuse(listener, &refusal(Code::NoResources, &why)).is_err() {
                    std::thread::sleep(ACCEPT_AGAIN);
                }
                return;
            }
            Err(e) => {
                if !matches!(e, Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) {
                    if self.desk.refusals.may_say() {
                        tracing::error!("cannot accept a client: {e}");
                    }
                    std::thread::sleep(ACCEPT_AGAIN);
                }
                return;
            }
        };
        let socket = Arc::new(socket);
        let talk =
            Talk { desk: &self.desk, to_shard: &self.to_shard, announce: &self.announce, socket: &socket };
        if talk.attaches_promptly() {
            if let Err(code) = talk.serve_attach() {
                tracing::debug!("a connection ended: {code}");
            }
            self.desk.make_spare();
            return;
        }
        let desk = Arc::clone(&self.desk);
        let to_shard = self.to_shard.clone();
        let announce = self.announce.clone();
        desk.connections.fetch_add(1, Ordering::Relaxed);
        let spawned = std::thread::Builder::new().name("connection".into()).stack_size(256 * 1024).spawn({
            let (desk, socket) = (Arc::clone(&desk), Arc::clone(&socket));
            move || {
                let talk = Talk { desk: &desk, to_shard: &to_shard, announce: &announce, socket: &socket };
                if let Err(code) = talk.serve() {
                    tracing::debug!("a connection ended: {code}");
                }
                desk.connections.fetch_sub(1, Ordering::Relaxed);
            }
        });
        if let Err(e) = spawned {
            desk.connections.fetch_sub(1, Ordering::Relaxed);
            if self.desk.refusals.may_say() {
                tracing::error!("clients are refused, as no thread can be started for them: {e}");
            }
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            let why = format!("its daemon can start no thread: {e}");
            let _ = rustix::net::send(&socket, &refusal(Code::NoResources, &why), flags);
        }
    }
}

/// The message that refuses a client.
fn refusal(code: Code, text: &str) -> Vec<u8> {
    let mut message = Header { kind: KIND_ERROR, len: 2 + text.len() as u32 }.encode().to_vec();
    message.extend((code as u16).to_le_bytes());
    message.extend(text.as_bytes());
    message
}

/// One connection.
struct Talk<'a> {
    desk: &'a Desk,
    to_shard: &'a Sender<Message>,
    announce: &'a Sender<(u64, OwnedFd)>,
    socket: &'a OwnedFd,
}

impl Desk {
    /// These, and the directories of this node's targets.
    fn with_targets(&self, some: &[&OwnedFd]) -> Vec<RawFd> {
        let all = some.iter().copied().chain(&self.setup.target_dirs);
        all.map(AsRawFd::as_raw_fd).collect()
    }

    fn take_ring(&self) -> Result<(OwnedFd, ServedRing)> {
        match self.spare.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(spare) => Ok(spare),
            None => ServedRing::create().map_err(|e| Error::io("cannot make a ring", &e)),
        }
    }

    fn make_spare(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_none() {
            *spare = ServedRing::create().ok();
        }
    }
}

impl Talk<'_> {
    /// True when the client says, as soon as it has connected, that it wants to attach, and nothing else.
    fn attaches_promptly(&self) -> bool {
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

    /// Serves a client that wants to attach and waits for the answer.
    fn serve_attach(&self) -> std::result::Result<(), Code> {
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

    fn serve(&self) -> std::result::Result<(), Code> {
        let errno = |e: Errno| Code::from_errno(e.raw_os_error());
        for option in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(self.socket, option, Some(TALK_TIMEOUT))
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
            let header = Header::decode(&header)?;
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
                    // Its session may have ended before the network heard of its buffer.
                    if !self.is_known(session)? {
                        if let Some(network) = &self.desk.network {
                            network.give(Command::EndSession(session, Vec::new()));
                        }
                    }
                }
                KIND_MOUNT => {
                    let session = body.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
                    if let Err(e) = self.mount(session) {
                        tracing::warn!("{e}");
                        return self.refuse(e.code, &e.to_string());
                    }
                    return Ok(()); // `attached_programs` has the connection from now on
                }
                KIND_WATCH => self.watch(&body)?,
                KIND_CONTROL => self.control(&body)?,
                _ => return self.refuse(Code::Malformed, "unknown kind of message"),
            }
        }
    }

    fn refuse(&self, code: Code, text: &str) -> std::result::Result<(), Code> {
        write_all(self.socket.as_fd(), &refusal(code, text))
    }

    fn ask_shard<T>(&self, message: Message, reply: &mpsc::Receiver<T>) -> std::result::Result<T, Code> {
        self.to_shard.send(message).map_err(|_| Code::PoolGone)?;
        self.desk.doorbell.ring();
        reply.recv().map_err(|_| Code::PoolGone)
    }

    fn is_known(&self, session: u64) -> std::result::Result<bool, Code> {
        let (send, receive) = mpsc::channel();
        self.ask_shard(Message::Known(session, send), &receive)
    }

    /// Makes a session a buffer for data of other nodes, and has the network know it before the client does.
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

    /// A session serves a mount: its device follows, and is told of changes.
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
            // Of a process that attached anew, or of one that is gone: the next worker is to find one mount.
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

    /// Watches a directory with an inotify instance, whose descriptor follows.
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

    fn attach(&self, who: Newcomer) -> Result<()> {
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
        // With the supervisor first: from the moment that the client has its ring, a crash must not lose it.
        self.desk.setup.store.put(&store_tag(id), &[ring_fd.as_fd(), process.as_fd()])?;
        // The shard thread hears of it before it looks for the client's first request, which will wake it.
        self.to_shard
            .send(Message::Attached(Box::new(Session::local(id, ring))))
            .map_err(|_| Error::new(Code::PoolGone, "cannot attach a process"))?;
        if self.desk.attached_programs.joins(who, id) {
            // Any descriptor will do: the tag is what the next worker looks for.
            self.desk.setup.store.put(PROGRAMS_TAG, &[self.desk.board_fd.as_fd()])?;
        }
        // Watched before it is answered, and whether or not the answer arrives: a process that died in between is
        // noticed.
        let token = epoll::EventData::new_u64(id & (TOKEN_LISTENER - 1));
        if let Err(e) = epoll::add(&self.desk.epoll, &process, token, epoll::EventFlags::IN) {
            self.forget(id);
            return Err(failed("cannot watch a client")(e));
        }
        let fds = self.desk.with_targets(&[&ring_fd, &self.desk.doorbell_fd, &self.desk.board_fd]);
        let sent = self.send_attach_reply(KIND_ATTACH, id, &fds);
        self.desk.attached.fetch_add(1, Ordering::Relaxed);
        // An end that is seen before this arrives is seen again, until it has. It fails when the attendant has ended,
        // and the worker with it.
        let _ = self.announce.send((id, process));
        let _ = rustix::io::write(&self.desk.wake, &1u64.to_ne_bytes());
        sent.map_err(|code| Error::new(code, "cannot answer a client"))
    }

    /// Undoes an attachment that cannot be.
    fn forget(&self, id: u64) {
        let _ = self.to_shard.send(Message::Ended(id));
        self.desk.doorbell.ring();
        self.desk.attached_programs.leaves(id);
        if let Err(e) = self.desk.setup.store.remove(&store_tag(id)) {
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
        // Before Linux 6.5: by number, which is the client's as long as it waits for its answer.
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
                status["pids"] = serde_json::json!({ "worker": std::process::id() });
                if let (Some(network), Some(status)) = (&self.desk.network, status.as_object_mut()) {
                    let (send, receive) = mpsc::channel();
                    network.give(Command::Survey(send));
                    if let Ok(Value::Object(others)) = receive.recv_timeout(SURVEY_PATIENCE) {
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
