//! Connections to the pool's socket, made with system calls alone.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use forebay_ring::{
    read_exact, receive_fds, send_fds, AttachReply, Header, Mapping, ATTACH_FDS, ATTACH_MOUNT, ATTACH_TOOL,
    HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_ERROR, KIND_MOUNT, KIND_WATCH,
    MOUNT_ALONE,
};
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{Code, Ino};

use crate::errno;

/// Descriptors of an attach reply at least: ring, doorbell, board, one target.
const ATTACH_FDS_MIN: usize = 4;
/// Longest wait for an answer on the socket: longer than a worker takes to restart.
const ANSWER_TIMEOUT_S: libc::time_t = 20;
/// Attempts to reach a pool whose workers die in the middle of an answer, and the pause between two.
const ATTEMPTS: u32 = 100;
const ATTEMPT_PERIOD_US: libc::useconds_t = 20_000;
/// Longest wait for word whether a session lives; no word counts as yes.
const ALIVE_TIMEOUT_MS: i64 = 300;

/// The socket in the pool's directory.
const SOCKET_NAME: &[u8] = b"/socket";

/// What a process is to the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// A program: what it has open it may hand to others, who outlive it.
    Host,
    /// A tool that ends with what it has open.
    Tool,
    /// The process that serves the pool's mount.
    Mount,
}

/// The descriptors that come with an attach reply, in this order.
pub(crate) struct AttachFds {
    pub(crate) ring: OwnedFd,
    pub(crate) doorbell: OwnedFd,
    pub(crate) board: OwnedFd,
    pub(crate) targets: [Option<OwnedFd>; NODE_TARGETS_MAX],
}

/// Whether there are as many targets as the daemon says; of a node without one a directory comes all the same.
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

impl Address {
    /// `directory`/socket; too long a path is refused, as the kernel's addresses hold 107 bytes.
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
        // SAFETY: characters of C are bytes.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), bytes.len()) };
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        &bytes[..end - SOCKET_NAME.len()]
    }

    fn connect(&self, timeout_s: libc::time_t, timeout_us: i64) -> Result<OwnedFd, Code> {
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
            // SAFETY: the address is valid and as long as said.
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

    /// Fails while this process has no room for the descriptors of an attachment, which the daemon would have made in
    /// vain and keep until the process ends.
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
        let [Some(ring), Some(doorbell), Some(board), targets @ ..] = fds else {
            return Err(Code::Malformed);
        };
        check_targets(&reply, &targets)?;
        Ok((reply, AttachFds { ring, doorbell, board, targets }))
    }

    /// Fetches board and targets of a session again.
    pub(crate) fn refresh(
        &self,
        session: u64,
    ) -> Result<(AttachReply, OwnedFd, [Option<OwnedFd>; NODE_TARGETS_MAX]), Code> {
        let mut fds = [const { None }; ATTACH_FDS];
        let reply = self.ask(KIND_BOARD, &session.to_le_bytes(), &mut fds)?;
        let [Some(board), targets @ .., None, None] = fds else { return Err(Code::Malformed) };
        check_targets(&reply, &targets)?;
        Ok((reply, board, targets))
    }

    /// Asks; again when a worker died in the middle, as long as its supervisor listens.
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
                // An answer came, but not its descriptors: this process has no room for them.
                Err(Code::NoResources) => return Err(Code::NoResources),
                Err(_) => {
                    *fds = [const { None }; ATTACH_FDS];
                    // SAFETY: plain system call; a short sleep needs no answer.
                    unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
                }
            }
        }
        Err(Code::PoolGone)
    }

    /// One exchange; an error is that there was no answer.
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

    /// Gets a session a buffer of so many bytes, for data of other nodes; its number.
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

    /// Says that a session serves the pool's mount, whose device comes along.
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

    /// One announcement; an error is that there was no answer.
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

    /// Watches a directory with an inotify instance; the watch's descriptor. Tried again when a worker dies in the
    /// middle: adding a watch twice changes nothing. Not when no answer comes: each attempt would leave the daemon a
    /// thread that waits.
    pub(crate) fn watch(&self, ino: Ino, inotify: BorrowedFd<'_>, mask: u32) -> Result<i32, Code> {
        for _ in 0..ATTEMPTS {
            let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
            match Address::ask_watch(&socket, ino, inotify, mask) {
                Ok(answer) => return answer,
                // The other end closed the socket, whatever errno an earlier call left.
                Err(Code::PoolGone) => {}
                Err(_) if errno::timed_out() => return Err(Code::TimedOut),
                Err(_) => {}
            }
            // SAFETY: plain system call; a short sleep needs no answer.
            unsafe { libc::usleep(ATTEMPT_PERIOD_US) };
        }
        Err(Code::PoolGone)
    }

    /// One exchange; an error is that there was no answer.
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

    /// False when the pool is gone or does not know the session; true also while a worker restarts.
    pub(crate) fn is_alive(&self, session: u64) -> bool {
        let socket = match self.connect(0, ALIVE_TIMEOUT_MS * 1000) {
            Ok(socket) => socket,
            // Out of descriptors, or a full queue: no word.
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
