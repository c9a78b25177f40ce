//! How a process comes to its ring: messages on the pool's unix socket, with descriptors beside them.
//!
//! A message is a 12-byte header (magic, kind, reserved, length) and a body. The client sends KIND_ATTACH with no body;
//! the daemon answers with an [`AttachReply`] and descriptors in the order of [`ATTACH_FDS`]. KIND_BOARD asks for board
//! and target again, after a worker was replaced. Nothing here allocates: a forked child attaches inside a signal
//! handler if it must.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use forebay_sys::descriptor;
use forebay_types::limits::NODE_TARGETS_MAX;
use forebay_types::{Code, Ino, NodeId, Reader, Writer};

/// First word of every message: "FBY7". Its number changes with requests, replies, the board and what a client does
/// behind a reply, so that a library and a daemon that disagree about them part at once.
pub const MAGIC: u32 = 0x3759_4246;
/// What [`MAGIC`]'s number stands for of the messages here: who changes the one changes the other.
const _: () = assert!(MAGIC >> 24 == b'7' as u32 && AttachReply::BYTES == 72 && ATTACH_FDS == 11);
/// Bytes of a message's header.
pub const HEADER_BYTES: usize = 12;
/// Attach this process: answered with [`AttachReply`] and all descriptors. An empty body is a program that may hand its
/// descriptors to others; [`ATTACH_TOOL`] and [`ATTACH_MOUNT`] are bodies of one byte.
pub const KIND_ATTACH: u16 = 1;
/// A JSON request: status, check.
pub const KIND_CONTROL: u16 = 2;
/// Board and targets again: the body is the session; answered with [`AttachReply`] and their descriptors.
pub const KIND_BOARD: u16 = 3;
/// Is a session known? The body is its number; answered with an empty KIND_ALIVE or an error.
pub const KIND_ALIVE: u16 = 5;
/// This process serves the pool's mount: the body is its session; one byte follows with the FUSE device's descriptor,
/// by which the kernel is notified of changes that other interfaces make. Answered with KIND_MOUNT and one byte, [`MOUNT_ALONE`]
/// or [`MOUNT_SHARED`], or with an error: the descriptor is not of /dev/fuse, or a living process serves the mount
/// already. The connection stays: the daemon writes one of the two whenever that changes, and waits for the byte to
/// come back after [`MOUNT_SHARED`]. Without it in time the daemon closes the connection, and the process is to say so
/// again.
pub const KIND_MOUNT: u16 = 6;
/// A buffer by which data pass to and from other nodes: the body is the session. Answered with KIND_BUFFER, a u64 that
/// is the buffer's number and a u64 that is its bytes, and its descriptor. One that the session had is no more.
pub const KIND_BUFFER: u16 = 7;
/// Watches a directory with the inotify instance whose descriptor follows: the body is the directory's inode number as
/// a u64 and inotify's mask as a u32; one byte follows with the descriptor. Answered with KIND_WATCH and the i32 that
/// inotify_add_watch(2) gave, or with an error.
pub const KIND_WATCH: u16 = 8;
/// Attach a process that ends with its descriptors: it hands none to another.
pub const ATTACH_TOOL: u8 = 1;
/// Attach the process that serves the mount.
pub const ATTACH_MOUNT: u8 = 2;
/// Nobody but the mount has files of the pool open.
pub const MOUNT_ALONE: u8 = 0;
/// Others may have.
pub const MOUNT_SHARED: u8 = 1;
/// An answer that is an error: a u16 code, then text.
pub const KIND_ERROR: u16 = 4;
/// Descriptors of an attach reply at most: ring, doorbell, board, the directory of each of this node's targets,
/// or the one that a node without any has in their place.
pub const ATTACH_FDS: usize = 3 + NODE_TARGETS_MAX;

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

    /// Reads a header; [`Code::Malformed`] without the magic.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Code> {
        let mut r = Reader::new(bytes);
        if r.u32()? != MAGIC {
            return Err(Code::Malformed);
        }
        let kind = r.u16()?;
        r.u16()?;
        Ok(Header { kind, len: r.u32()? })
    }
}

/// What an attached process must know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachReply {
    /// The session that this ring's requests belong to.
    pub session: u64,
    /// Epoch of the board that was handed over.
    pub epoch: u64,
    /// Bytes of the board.
    pub board_bytes: u64,
    /// Device number (`st_dev`) that every file of the pool shows.
    pub device: u64,
    /// Targets of this node, whose directories come along; with none, the one that has anchors and its shard does.
    pub targets: u64,
    /// The root directory.
    pub root: Ino,
    /// A bit for each target, from the lowest on: set when its kernel inode numbers are never used again (tmpfs with
    /// inode64).
    pub stable_inodes: u64,
    /// This node.
    pub node: NodeId,
    /// Nodes of the pool.
    pub nodes: u64,
}

impl AttachReply {
    /// Encoded bytes.
    pub const BYTES: usize = 72;

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
/// [`Code::NoResources`] when descriptors came for which this process has no room.
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
