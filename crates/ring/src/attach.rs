//! How a process gets its ring: messages on the pool's unix socket, with descriptors attached.
//!
//! A message is a 12-byte header (magic, kind, reserved, length) and a body. The client sends KIND_ATTACH; the daemon
//! answers with an [`AttachReply`] and descriptors in the order of [`ATTACH_FDS`]. After a worker was replaced, the
//! client requests board and targets again with KIND_BOARD. Nothing here allocates memory, because a forked child may
//! have to attach inside a signal handler.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use forebay_sys::descriptor;
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{Code, Ino, NodeId, Reader, Writer};

/// First word of every message: "FBYA". Its digit changes with requests, replies, the board, what a client does after a
/// reply, and the requests to supervisor and worker that are JSON, so that a program and a daemon of different versions
/// fail at once. `tests/conformance/tests/versions.rs` ties it to the requests.
pub const MAGIC: u32 = 0x4159_4246;
/// The part of [`MAGIC`] that all versions have.
const MAGIC_OF_ALL: u32 = 0x00ff_ffff;
/// Ties [`MAGIC`]'s digit to the sizes of the messages here: a change of one needs a change of the other.
const _: () = assert!(MAGIC >> 24 == b'A' as u32 && AttachReply::BYTES == 80 && ATTACH_FDS == 12);
/// Bytes of a message's header.
pub const HEADER_BYTES: usize = 12;
/// Attach this process. Answered with [`AttachReply`] and all descriptors. An empty body means a program that may pass
/// its descriptors to other processes; [`ATTACH_TOOL`] and [`ATTACH_MOUNT`] are bodies of one byte.
pub const KIND_ATTACH: u16 = 1;
/// A JSON request: status, check.
pub const KIND_CONTROL: u16 = 2;
/// Send board and targets again. The body is the session. Answered with [`AttachReply`] and their descriptors.
pub const KIND_BOARD: u16 = 3;
/// Check that a session is known. The body is its number. Answered with an empty KIND_ALIVE or an error.
pub const KIND_ALIVE: u16 = 5;
/// This process serves the pool's mount. The body is its session; one byte follows with the FUSE device's descriptor,
/// through which the daemon notifies the kernel of changes that other interfaces make. Answered with KIND_MOUNT and
/// one byte, [`MOUNT_ALONE`] or [`MOUNT_SHARED`]. Answered with an error if the descriptor is not of /dev/fuse, or a
/// living process serves the mount already. The connection stays open: the daemon writes one of the two bytes whenever
/// the state changes, and after [`MOUNT_SHARED`] waits until the client returns the byte. If the byte does not arrive
/// in time, the daemon closes the connection, and the client has to send this message again.
pub const KIND_MOUNT: u16 = 6;
/// A buffer through which data pass to and from other nodes. The body is the session. Answered with KIND_BUFFER, a u64
/// with the buffer's number, a u64 with its bytes, and its descriptor. It replaces an earlier buffer of the session.
pub const KIND_BUFFER: u16 = 7;
/// Watches a directory with the inotify instance whose descriptor follows. The body is the directory's inode number as
/// a u64 and inotify's mask as a u32; one byte follows with the descriptor. Answered with KIND_WATCH and the i32 that
/// inotify_add_watch(2) returned, or with an error.
pub const KIND_WATCH: u16 = 8;
/// A piece of a volume, to map. The body is the volume's number as a u64, segment and piece as u16, and one byte that is 1
/// for a piece that is to be written. Answered with KIND_PIECE, the bytes of the piece as a u64, and descriptors: the
/// piece, the page whose first word says that the pool lives (docs/decisions/0048), and for the first piece of a volume the
/// volume's head, whose first word is the end of its file. While either the descriptor or a
/// mapping of the piece exists, the volume counts as open.
pub const KIND_PIECE: u16 = 9;
/// Memory that a program allocated by forebay_alloc, for transfers from and to it by the network (docs/decisions/0053).
/// The body is the session and a number, both u64, and a byte. If that is 1, the memory is registered, and requests name it by
/// the number, which the client has chosen at random, so that it can withdraw memory without having got the answer. One byte
/// follows with the descriptor of the memory: a memfd of whole pages whose size is sealed. If the byte is 0, the memory with
/// the number is withdrawn. Answered with an empty KIND_MEMORY, or with an error if the daemon does not accept the memory, or
/// has other memory with that number. If the client has closed the connection before the answer, memory is withdrawn again.
pub const KIND_MEMORY: u16 = 10;
/// The number of the node with the name that is the body, as the pool file has it. Answered with KIND_NODE and the number
/// as a u16, or with an error if there is no such node.
pub const KIND_NODE: u16 = 11;
/// Attach a process that passes its descriptors to no other process.
pub const ATTACH_TOOL: u8 = 1;
/// Attach the process that serves the mount.
pub const ATTACH_MOUNT: u8 = 2;
/// No program but the mount has files of the pool open.
pub const MOUNT_ALONE: u8 = 0;
/// Other programs may have files of the pool open.
pub const MOUNT_SHARED: u8 = 1;
/// An answer that is an error: a u16 code, then text.
pub const KIND_ERROR: u16 = 4;
/// Most descriptors of an attach reply: ring, doorbell, board, the directory of each of this node's targets, or the
/// directory that a node without targets has in their place, and the memory of pacers in a pool whose media are paced.
pub const ATTACH_FDS: usize = 4 + NODE_TARGETS_MAX;

/// A message's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// One of the `KIND_` constants.
    pub kind: u16,
    /// Bytes of the body.
    pub len: u32,
}

impl Header {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for the header of another version, [`Code::Malformed`] for anything else.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Code> {
        let mut r = Reader::new(bytes);
        match r.u32()? ^ MAGIC {
            0 => {}
            other if other & MAGIC_OF_ALL == 0 => return Err(Code::NotSupported),
            _ => return Err(Code::Malformed),
        }
        let kind = r.u16()?;
        r.u16()?;
        Ok(Header { kind, len: r.u32()? })
    }
}

/// What an attached process needs from the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachReply {
    /// The session that this ring's requests belong to.
    pub session: u64,
    /// Epoch of the board that is attached.
    pub epoch: u64,
    /// Bytes of the board.
    pub board_bytes: u64,
    /// Device number (`st_dev`) that every file of the pool shows.
    pub device: u64,
    /// Targets of this node, whose directories are attached. Without any, the directory of anchors and shard is
    /// attached.
    pub targets: u64,
    /// The root directory.
    pub root: Ino,
    /// A bit for each target, from the lowest on: set when its kernel inode numbers are never reused (tmpfs with
    /// inode64).
    pub stable_inodes: u64,
    /// This node.
    pub node: NodeId,
    /// Nodes of the pool.
    pub nodes: u64,
    /// Not 0 if the node's media are paced. The last descriptor of the answer to [`KIND_ATTACH`] is then the memory of
    /// their pacers.
    pub paced: u64,
}

impl AttachReply {
    /// Encoded bytes.
    pub const BYTES: usize = 80;

    /// The reply's bytes.
    pub fn encode(&self) -> [u8; AttachReply::BYTES] {
        let mut bytes = [0; AttachReply::BYTES];
        let mut w = Writer::new(&mut bytes);
        for v in [
            self.session,
            self.epoch,
            self.board_bytes,
            self.device,
            self.targets,
            self.root.0,
            self.stable_inodes,
            self.node.0.into(),
            self.nodes,
            self.paced,
        ] {
            let _ = w.u64(v);
        }
        bytes
    }

    /// Reads a reply.
    pub fn decode(bytes: &[u8]) -> Result<AttachReply, Code> {
        let mut r = Reader::new(bytes);
        Ok(AttachReply {
            session: r.u64()?,
            epoch: r.u64()?,
            board_bytes: r.u64()?,
            device: r.u64()?,
            targets: r.u64()?,
            root: Ino(r.u64()?),
            stable_inodes: r.u64()?,
            node: NodeId(r.u64()? as u16),
            nodes: r.u64()?,
            paced: r.u64()?,
        })
    }
}

fn last_code() -> Code {
    // SAFETY: errno of this thread.
    Code::from_errno(unsafe { *libc::__errno_location() })
}

const _: () = assert!(ATTACH_FDS <= descriptor::PASSED_MAX);

fn code(e: io::Error) -> Code {
    Code::from_errno(e.raw_os_error().unwrap_or(libc::EIO))
}

/// Sends `bytes` (all of them) with `fds` attached to the first.
pub fn send_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd]) -> Result<(), Code> {
    let sent = descriptor::send(socket, bytes, fds).map_err(code)?;
    write_all(socket, &bytes[sent..])
}

/// Receives up to `buffer.len()` bytes and up to [`ATTACH_FDS`] descriptors, opened close-on-exec.
///
/// # Errors
/// [`Code::NoResources`] when this process has no room for the descriptors.
pub fn receive_fds(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut [Option<OwnedFd>; ATTACH_FDS],
) -> Result<usize, Code> {
    descriptor::receive(socket, buffer, fds).map_err(code)
}

/// Writes all of `bytes`; a closed peer is an error, not a signal.
pub fn write_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Code> {
    while !bytes.is_empty() {
        // SAFETY: `bytes` is live memory.
        let n =
            unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        match n {
            n if n > 0 => bytes = &bytes[n as usize..],
            0 => return Err(Code::PoolGone),
            _ => {
                let code = last_code();
                if code != Code::Interrupted {
                    return Err(code);
                }
            }
        }
    }
    Ok(())
}

/// Reads exactly `buffer.len()` bytes; a peer that closes earlier is [`Code::PoolGone`].
pub fn read_exact(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<(), Code> {
    let mut got = 0;
    while got < buffer.len() {
        let rest = &mut buffer[got..];
        // SAFETY: `rest` is live memory.
        let n = unsafe { libc::recv(socket.as_raw_fd(), rest.as_mut_ptr().cast(), rest.len(), 0) };
        match n {
            n if n > 0 => got += n as usize,
            0 => return Err(Code::PoolGone),
            _ => {
                let code = last_code();
                if code != Code::Interrupted {
                    return Err(code);
                }
            }
        }
    }
    Ok(())
}
