//! Connections to the pool's socket, made with system calls alone.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use forebay_ring::{
    read_exact, receive_fds, send_fds, AttachReply, Header, Mapping, ATTACH_FDS, ATTACH_MOUNT, ATTACH_TOOL,
    HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_ERROR, KIND_MOUNT, KIND_NODE,
    KIND_PIECE, KIND_WATCH, MOUNT_ALONE,
};
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{Code, Ino, NodeId, PieceId, Writer};

use crate::errno;

/// Number of descriptors in an attach reply, at least: ring, doorbell, board, one target.
const ATTACH_FDS_MIN: usize = 4;
/// Longest wait for a reply on the socket, in seconds: longer than a worker's restart takes.
pub(crate) const ANSWER_TIMEOUT_S: libc::time_t = 20;
/// Attempts to reach a pool whose workers die while they serve the request, and the pause between two attempts.
const ATTEMPTS: u32 = 100;
const ATTEMPT_PERIOD_US: libc::useconds_t = 20_000;
/// Longest wait for the reply whether a session lives. No reply counts as yes.
const ALIVE_TIMEOUT_MS: i64 = 300;

/// The socket in the pool's directory.
const SOCKET_NAME: &[u8] = b"/socket";

/// The role of a process in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// A program. Other processes that outlive it may hold descriptors that it opened.
    Host,
    /// A tool. Its descriptors are closed when it ends.
    Tool,
    /// The process that serves the pool's mount.
    Mount,
}

/// The descriptors of an attach reply, in this order.
pub(crate) struct AttachFds {
    pub(crate) ring: OwnedFd,
    pub(crate) doorbell: OwnedFd,
    pub(crate) board: OwnedFd,
    pub(crate) targets: [Option<OwnedFd>; NODE_TARGETS_MAX],
    /// The memory of the targets' pacers, in a pool whose media are paced.
    pub(crate) pacing: Option<OwnedFd>,
}

/// Checks the number of target descriptors. A node without targets sends one directory in their place.
fn check_targets(reply: &AttachReply, targets: &[Option<OwnedFd>; NODE_TARGETS_MAX]) -> Result<(), Code> {
    let count = targets.iter().take_while(|t| t.is_some()).count();
    if count as u64 != reply.targets.max(1) {
        return Err(Code::Malformed);
    }
    Ok(())
}

/// The pool's socket address.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    address: libc::sockaddr_un,
}

/// The descriptors that come with a piece of a volume.
pub(crate) struct PieceFds {
    /// The piece.
    pub(crate) piece: OwnedFd,
    /// The page that says that the pool lives.
    pub(crate) life: OwnedFd,
    /// The volume's head, which comes with the first piece.
    pub(crate) head: Option<OwnedFd>,
}

impl Address {
    /// `directory`/socket. A path longer than 107 bytes is refused, because a socket address has no room for it.
    pub(crate) fn new(directory: &[u8]) -> Result<Address, Code> {
        // SAFETY: an all-zero sockaddr_un is valid.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let name = SOCKET_NAME;
        if directory.len() + name.len() >= address.sun_path.len() {
            return Err(Code::NameTooLong);
        }
        for (to, from) in address.sun_path.iter_mut().zip(directory.iter().chain(name)) {
            *to = *from as libc::c_char;
        }
        Ok(Address { address })
    }

    /// The pool's directory.
    pub(crate) fn directory(&self) -> &[u8] {
        let bytes = self.address.sun_path.as_slice();
        // SAFETY: characters of C have the size of bytes.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), bytes.len()) };
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        &bytes[..end - SOCKET_NAME.len()]
    }

    pub(crate) fn connect(&self, timeout_s: libc::time_t, timeout_us: i64) -> Result<OwnedFd, Code> {
        // SAFETY: plain system calls; the descriptor is new and ours.
        let socket = unsafe {
            let fd = errno::check(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0))?;
            OwnedFd::from_raw_fd(fd)
        };
        let timeout = libc::timeval { tv_sec: timeout_s, tv_usec: timeout_us as libc::suseconds_t };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: `timeout` is valid for the call. Without a timeout the call merely waits longer.
            unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    option,
                    (&raw const timeout).cast(),
                    size_of_val(&timeout) as libc::socklen_t,
                );
            }
        }
        loop {
            // SAFETY: the address is valid, and its length is correct.
            let done = unsafe {
                libc::connect(
                    socket.as_raw_fd(),
                    (&raw const self.address).cast(),
                    size_of_val(&self.address) as libc::socklen_t,
                )
            };
            match errno::check(done) {
                Ok(_) => return Ok(socket),
                Err(Code::Interrupted) => continue,
                Err(_) if errno::nobody_listens() => return Err(Code::PoolGone),
                Err(code) => return Err(code),
            }
        }
    }

    /// Fails if this process has too few free descriptors for an attachment. Otherwise the daemon would create an
    /// attachment that the process cannot receive, and keep it until the process ends.
    fn check_room(&self) -> Result<(), Code> {
        let mut room = [const { None }; ATTACH_FDS_MIN + 1];
        for place in &mut room {
            // SAFETY: plain system calls; the descriptor is new and ours, and closed at the end.
            *place = Some(unsafe {
                let fd =
                    errno::check(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0))?;
                OwnedFd::from_raw_fd(fd)
            });
        }
        Ok(())
    }

    /// Attaches this process: a new session with a ring of its own.
    pub(crate) fn attach(&self, role: Role) -> Result<(AttachReply, AttachFds), Code> {
        let mut fds = [const { None }; ATTACH_FDS];
        let body: &[u8] = match role {
            Role::Host => &[],
            Role::Tool => &[ATTACH_TOOL],
            Role::Mount => &[ATTACH_MOUNT],
        };
        self.check_room()?;
        let reply = self.ask(KIND_ATTACH, body, &mut fds)?;
        let pacing = match reply.paced {
            0 => None,
            _ => fds.iter_mut().rev().find_map(Option::take),
        };
        let [Some(ring), Some(doorbell), Some(board), targets @ .., None] = fds else {
            return Err(Code::Malformed);
        };
        check_targets(&reply, &targets)?;
        Ok((reply, AttachFds { ring, doorbell, board, targets, pacing }))
    }

    /// Fetches board and targets of a session again.
    pub(crate) fn refresh(
        &self,
        session: u64,
    ) -> Result<(AttachReply, OwnedFd, [Option<OwnedFd>; NODE_TARGETS_MAX]), Code> {
        let mut fds = [const { None }; ATTACH_FDS];
        let reply = self.ask(KIND_BOARD, &session.to_le_bytes(), &mut fds)?;
        let [Some(board), targets @ .., None, None, None] = fds else { return Err(Code::Malformed) };
        check_targets(&reply, &targets)?;
        Ok((reply, board, targets))
    }

    /// Sends a request, and repeats it if a worker dies before it replies, while the supervisor listens.
    fn ask(
        &self,
        kind: u16,
        body: &[u8],
        fds: &mut [Option<OwnedFd>; ATTACH_FDS],
    ) -> Result<AttachReply, Code> {
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::talk(&socket, kind, body, fds) {
                Ok(answer) => return answer,
                // The reply arrived without its descriptors: this process has no room for them.
                Err(Code::NoResources) => return Err(Code::NoResources),
                // The daemon is of another version.
                Err(Code::NotSupported) => return Err(Code::NotSupported),
                Err(_) => {
                    *fds = [const { None }; ATTACH_FDS];
                    // SAFETY: plain system call; a short sleep needs no answer.
                    unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
                }
            }
        }
        Err(Code::PoolGone)
    }

    /// One exchange. The outer error means that no reply arrived.
    fn talk(
        socket: &OwnedFd,
        kind: u16,
        body: &[u8],
        fds: &mut [Option<OwnedFd>; ATTACH_FDS],
    ) -> Result<Result<AttachReply, Code>, Code> {
        let header = Header { kind, len: body.len() as u32 }.encode();
        send_fds(socket.as_fd(), &header, &[])?;
        forebay_ring::write_all(socket.as_fd(), body)?;
        let mut bytes = [0; HEADER_BYTES];
        let got = receive_fds(socket.as_fd(), &mut bytes, fds)?;
        read_exact(socket.as_fd(), &mut bytes[got..])?;
        let header = Header::decode(&bytes)?;
        let mut body = [0; AttachReply::BYTES];
        if header.kind == KIND_ERROR {
            let mut code = [0; 2];
            read_exact(socket.as_fd(), &mut code)?;
            return Ok(Err(Code::from_u16(u16::from_le_bytes(code))));
        }
        if header.kind != kind || header.len as usize != body.len() {
            return Ok(Err(Code::Malformed));
        }
        read_exact(socket.as_fd(), &mut body)?;
        Ok(AttachReply::decode(&body))
    }

    /// Gets a buffer of `bytes` bytes for data of other nodes for a session. Returns the memory and the buffer's
    /// number.
    pub(crate) fn buffer(&self, session: u64, bytes: usize) -> Result<(Mapping, u64), Code> {
        let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
        send_fds(socket.as_fd(), &Header { kind: KIND_BUFFER, len: 8 }.encode(), &[])?;
        forebay_ring::write_all(socket.as_fd(), &session.to_le_bytes())?;
        let (mut header, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
        let got = receive_fds(socket.as_fd(), &mut header, &mut fds)?;
        read_exact(socket.as_fd(), &mut header[got..])?;
        let header = Header::decode(&header)?;
        if header.kind != KIND_BUFFER || header.len != 16 {
            return Err(Code::NotSupported);
        }
        let (mut number, mut length) = ([0; 8], [0; 8]);
        read_exact(socket.as_fd(), &mut number)?;
        read_exact(socket.as_fd(), &mut length)?;
        let [Some(memory), None, ..] = fds else { return Err(Code::Malformed) };
        if u64::from_le_bytes(length) != bytes as u64 {
            return Err(Code::Malformed);
        }
        let mapping = Mapping::new(memory.as_fd(), bytes, true).map_err(errno::of)?;
        Ok((mapping, u64::from_le_bytes(number)))
    }

    /// Gets a piece of a volume.
    pub(crate) fn piece(&self, id: PieceId, writes: bool) -> Result<PieceFds, Code> {
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::ask_piece(&socket, id, writes) {
                Ok(answer) => return answer,
                Err(Code::NoResources) => return Err(Code::NoResources),
                Err(_) if errno::timed_out() => return Err(Code::TimedOut),
                Err(_) => {}
            }
            // SAFETY: plain system call; a short sleep needs no answer.
            unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
        }
        Err(Code::PoolGone)
    }

    /// One exchange. The outer error means that no reply arrived.
    fn ask_piece(socket: &OwnedFd, id: PieceId, writes: bool) -> Result<Result<PieceFds, Code>, Code> {
        let mut body = [0; 13];
        let mut w = Writer::new(&mut body);
        id.encode(&mut w)?;
        w.u8(u8::from(writes))?;
        send_fds(socket.as_fd(), &Header { kind: KIND_PIECE, len: body.len() as u32 }.encode(), &[])?;
        forebay_ring::write_all(socket.as_fd(), &body)?;
        let (mut bytes, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
        let got = receive_fds(socket.as_fd(), &mut bytes, &mut fds)?;
        read_exact(socket.as_fd(), &mut bytes[got..])?;
        let header = Header::decode(&bytes)?;
        if header.kind == KIND_PIECE && header.len == 8 {
            read_exact(socket.as_fd(), &mut [0; 8])?;
            return match fds {
                [Some(piece), Some(life), head, None, ..] => Ok(Ok(PieceFds { piece, life, head })),
                _ => Ok(Err(Code::Malformed)),
            };
        }
        let mut code = [0; 2];
        read_exact(socket.as_fd(), &mut code)?;
        Ok(Err(Code::from_u16(u16::from_le_bytes(code))))
    }

    /// The number of the node with this name in the pool file.
    pub(crate) fn node_named(&self, name: &[u8]) -> Result<NodeId, Code> {
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::ask_node(&socket, name) {
                Ok(answer) => return answer,
                Err(_) if errno::timed_out() => return Err(Code::TimedOut),
                Err(_) => {}
            }
            // SAFETY: plain system call; a short sleep needs no answer.
            unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
        }
        Err(Code::PoolGone)
    }

    /// One exchange. The outer error means that no reply arrived.
    fn ask_node(socket: &OwnedFd, name: &[u8]) -> Result<Result<NodeId, Code>, Code> {
        send_fds(socket.as_fd(), &Header { kind: KIND_NODE, len: name.len() as u32 }.encode(), &[])?;
        forebay_ring::write_all(socket.as_fd(), name)?;
        let mut bytes = [0; HEADER_BYTES];
        read_exact(socket.as_fd(), &mut bytes)?;
        let header = Header::decode(&bytes)?;
        let mut word = [0; 2];
        read_exact(socket.as_fd(), &mut word)?;
        Ok(match u16::from_le_bytes(word) {
            number if header.kind == KIND_NODE && header.len == 2 => Ok(NodeId(number)),
            code => Err(Code::from_u16(code)),
        })
    }

    /// Announces that a session serves the pool's mount, and sends the mount's FUSE device. The announcement holds
    /// while the returned socket is open. The flag is true if no other process has files of the pool open
    /// ([`MOUNT_ALONE`]).
    pub(crate) fn announce_mount(
        &self,
        session: u64,
        device: BorrowedFd<'_>,
    ) -> Result<(OwnedFd, bool), Code> {
        let mut last = Code::PoolGone;
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::announce(&socket, session, device) {
                Ok(answer) => return answer.map(|alone| (socket, alone)),
                Err(code) => last = code,
            }
            // SAFETY: plain system call; a short sleep needs no answer.
            unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
        }
        Err(last)
    }

    /// One announcement. The outer error means that no reply arrived.
    fn announce(socket: &OwnedFd, session: u64, device: BorrowedFd<'_>) -> Result<Result<bool, Code>, Code> {
        send_fds(socket.as_fd(), &Header { kind: KIND_MOUNT, len: 8 }.encode(), &[])?;
        forebay_ring::write_all(socket.as_fd(), &session.to_le_bytes())?;
        send_fds(socket.as_fd(), &[0], &[device.as_raw_fd()])?;
        let mut bytes = [0; HEADER_BYTES];
        read_exact(socket.as_fd(), &mut bytes)?;
        let header = Header::decode(&bytes)?;
        if header.kind == KIND_MOUNT {
            let mut how = [0];
            read_exact(socket.as_fd(), &mut how)?;
            return Ok(Ok(how[0] == MOUNT_ALONE));
        }
        let mut code = [0; 2];
        read_exact(socket.as_fd(), &mut code)?;
        Ok(Err(Code::from_u16(u16::from_le_bytes(code))))
    }

    /// Adds a watch of a directory to an inotify instance, and returns the watch descriptor. The request is repeated if
    /// a worker dies before it replies, because adding a watch twice changes nothing. It is not repeated after a
    /// timeout, because each attempt would leave a waiting thread in the daemon.
    pub(crate) fn watch(&self, ino: Ino, inotify: BorrowedFd<'_>, mask: u32) -> Result<i32, Code> {
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::ask_watch(&socket, ino, inotify, mask) {
                Ok(answer) => return answer,
                // The daemon closed the socket. errno may be left over from an earlier call, so it is not checked.
                Err(Code::PoolGone) => {}
                Err(_) if errno::timed_out() => return Err(Code::TimedOut),
                Err(_) => {}
            }
            // SAFETY: plain system call; a short sleep needs no answer.
            unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
        }
        Err(Code::PoolGone)
    }

    /// One exchange. The outer error means that no reply arrived.
    fn ask_watch(
        socket: &OwnedFd,
        ino: Ino,
        inotify: BorrowedFd<'_>,
        mask: u32,
    ) -> Result<Result<i32, Code>, Code> {
        let mut body = [0; 12];
        body[..8].copy_from_slice(&ino.0.to_le_bytes());
        body[8..].copy_from_slice(&mask.to_le_bytes());
        send_fds(socket.as_fd(), &Header { kind: KIND_WATCH, len: body.len() as u32 }.encode(), &[])?;
        forebay_ring::write_all(socket.as_fd(), &body)?;
        match send_fds(socket.as_fd(), &[0], &[inotify.as_raw_fd()]) {
            Err(Code::BadDescriptor) => return Ok(Err(Code::BadDescriptor)),
            sent => sent?,
        }
        let mut bytes = [0; HEADER_BYTES];
        read_exact(socket.as_fd(), &mut bytes)?;
        let header = Header::decode(&bytes)?;
        if header.kind == KIND_WATCH && header.len == 4 {
            let mut watch = [0; 4];
            read_exact(socket.as_fd(), &mut watch)?;
            return Ok(Ok(i32::from_le_bytes(watch)));
        }
        let mut code = [0; 2];
        read_exact(socket.as_fd(), &mut code)?;
        Ok(Err(Code::from_u16(u16::from_le_bytes(code))))
    }

    /// False if the pool is gone or does not know the session. True also while a worker restarts.
    pub(crate) fn is_alive(&self, session: u64) -> bool {
        let socket = match self.connect(0, ALIVE_TIMEOUT_MS * 1000) {
            Ok(socket) => socket,
            // This process is out of descriptors, or the socket's queue is full: the state is unknown and counts as
            // alive.
            Err(code) => return code != Code::PoolGone,
        };
        let header = Header { kind: KIND_ALIVE, len: 8 }.encode();
        let sent = send_fds(socket.as_fd(), &header, &[])
            .and_then(|()| forebay_ring::write_all(socket.as_fd(), &session.to_le_bytes()));
        if sent.is_err() {
            return true;
        }
        let mut bytes = [0; HEADER_BYTES];
        match read_exact(socket.as_fd(), &mut bytes).and_then(|()| Header::decode(&bytes)) {
            Ok(header) => header.kind == KIND_ALIVE,
            Err(_) => true,
        }
    }
}
