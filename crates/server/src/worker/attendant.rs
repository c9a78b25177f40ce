//! The attendant: lets processes attach, notices when they end, answers `status` and `check`, and receives SIGTERM.
//!
//! A client whose first request is a plain request to attach, as nearly all are, is served in this thread: a program's
//! first call on the pool waits for it. Every other connection gets a short-lived thread with a time limit, so that a
//! silent client delays no other. A process counts as dead when its pidfd reports it, never because a socket closed.

mod connection;
mod desk;
mod program_memory;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_ring::{Doorbell, ServedRing};
use forebay_sys::signals::Signals;
use forebay_types::limits::RINGS_MAX;
use forebay_types::{Code, Error, Result};
use rustix::event::epoll;
use rustix::io::Errno;

use super::attached_programs::{AttachedPrograms, PROGRAMS_TAG};
use super::message::Message;
use super::mounter;
use super::network::Commands;
use super::session::Session;
use super::session_id::{mount_tag, session_of_mount_tag, session_of_tag, store_tag};
use super::watches::Watches;
use crate::inherited;
use crate::reserve::{Reserve, Seldom};
use crate::setup::WorkerSetup;
use connection::Connection;
use desk::{failed, refusal, Desk, Process, TOKEN_LISTENER, TOKEN_STOP, TOKEN_WAKE};

/// Connections served at the same time. Further connections wait in the listener's queue.
const CONNECTIONS_MAX: usize = 256;
/// Pause after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// Descriptors that supervisor or worker have open for all clients together, and for each other node.
const DESCRIPTORS_TAKEN: u64 = 32;
const DESCRIPTORS_A_NODE: u64 = 4;

/// Blocks SIGTERM and SIGINT in this thread and all that it starts, and makes them readable.
pub(super) fn block_signals() -> Result<OwnedFd> {
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT]);
    signals.map(OwnedFd::from).map_err(|e| Error::io("cannot watch for signals", &e))
}

/// The attendant before it takes over a dead worker's sessions.
pub(super) struct Attendant {
    pub(super) setup: WorkerSetup,
    /// The memory of the targets' pacers, in a pool whose media are paced.
    pub(super) pacing: Option<OwnedFd>,
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

/// The attendant after that.
pub(super) struct Attending {
    desk: Arc<Desk>,
    to_shard: Sender<Message>,
    stop: OwnedFd,
    /// The sessions whose processes live.
    processes: Vec<Process>,
    newcomers: mpsc::Receiver<Process>,
    announce: Sender<Process>,
    reserve: Reserve,
}

/// What a dead worker left, taken over.
pub(super) struct Restored {
    pub(super) attending: Attending,
    pub(super) sessions: Vec<Session>,
    /// The session that serves the pool's mount, and the device that invalidations are written to.
    pub(super) mount: Option<(u64, OwnedFd)>,
}

impl Attendant {
    /// Takes over what a dead worker left in the descriptor store.
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
            let (Some((id, is_program)), Ok([ring, pidfd])) =
                (session_of_tag(&tag), <[OwnedFd; 2]>::try_from(fds))
            else {
                tracing::warn!("the descriptor store holds {tag:?}, which is unknown");
                continue;
            };
            let ring = ServedRing::reopen(ring.as_fd()).map_err(|e| Error::io(what, &e))?;
            sessions.push(Session::local(id, ring));
            processes.push(Process { session: id, is_program, pidfd });
        }
        let mounter::Left { serving: mount, mounter, forgotten } = mounter::restored(mounts, |id| {
            processes.iter().find(|process| process.session == id).map(|process| &process.pidfd)
        })
        .map_err(failed(what))?;
        for id in forgotten {
            self.setup.store.remove(&mount_tag(id))?;
        }
        let known: Vec<u64> =
            processes.iter().filter(|process| !process.is_program).map(|process| process.session).collect();
        let attached_programs =
            AttachedPrograms::restored(programs, &known, mount.as_ref().map(|(id, _)| *id));
        let add = |fd: BorrowedFd<'_>, token: u64| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
                .map_err(failed(what))
        };
        add(self.setup.listener.as_fd(), TOKEN_LISTENER)?;
        add(self.stop.as_fd(), TOKEN_STOP)?;
        add(wake.as_fd(), TOKEN_WAKE)?;
        for process in &processes {
            add(process.pidfd.as_fd(), process.session & (TOKEN_LISTENER - 1))?;
        }
        let (announce, newcomers) = mpsc::channel();
        let other_nodes = self.setup.membership.as_ref().map_or(0, |m| m.nodes.len().saturating_sub(1));
        let taken = DESCRIPTORS_TAKEN + DESCRIPTORS_A_NODE * other_nodes as u64;
        let desk = Desk {
            clients_max: inherited::clients_max(taken).min(RINGS_MAX),
            refusals: Seldom::default(),
            owner: rustix::process::getuid().as_raw(),
            setup: self.setup,
            pacing: self.pacing,
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
        // The shard thread outlives this one, unless it failed; then the worker ends.
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
        let ended = |process: &Process| process.session & (TOKEN_LISTENER - 1) == token;
        let Some(i) = self.processes.iter().position(ended) else { return };
        let Process { session: id, is_program, pidfd } = self.processes.swap_remove(i);
        self.desk.attached.fetch_sub(1, Ordering::Relaxed);
        let _ = epoll::delete(&self.desk.epoll, &pidfd);
        self.tell(Message::Ended(id));
        self.desk.attached_programs.leaves(id);
        self.desk.mounter.ends(id);
        for tag in [store_tag(id, is_program), mount_tag(id)] {
            if let Err(e) = self.desk.setup.store.remove(&tag) {
                tracing::error!("{e}");
            }
        }
    }

    fn accept(&mut self) {
        if self.desk.connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            // The event is level-triggered: it is reported again.
            std::thread::sleep(Duration::from_millis(1));
            return;
        }
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let socket = match rustix::net::accept_with(&self.desk.setup.listener, flags) {
            Ok(socket) => socket,
            Err(e) if Reserve::is_wanted(e) => {
                if self.desk.refusals.may_say() {
                    tracing::error!("clients are refused, because no descriptor is left: {e}");
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
        let connection = Connection {
            desk: &self.desk,
            to_shard: &self.to_shard,
            announce: &self.announce,
            socket: &socket,
        };
        if connection.attaches_promptly() {
            if let Err(code) = connection.serve_attach() {
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
                let connection =
                    Connection { desk: &desk, to_shard: &to_shard, announce: &announce, socket: &socket };
                if let Err(code) = connection.serve() {
                    tracing::debug!("a connection ended: {code}");
                }
                desk.connections.fetch_sub(1, Ordering::Relaxed);
            }
        });
        if let Err(e) = spawned {
            desk.connections.fetch_sub(1, Ordering::Relaxed);
            if self.desk.refusals.may_say() {
                tracing::error!("clients are refused, because no thread can be started for them: {e}");
            }
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            let why = format!("its daemon can start no thread: {e}");
            let _ = rustix::net::send(&socket, &refusal(Code::NoResources, &why), flags);
        }
    }
}
