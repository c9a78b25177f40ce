//! The memory that a process and its node's daemon share: the *ring*, through which the process sends requests, and
//! the *board*, on which the daemon publishes names and attributes.
//!
//! A ring is a memfd that the daemon creates, seals against resizing and passes with SCM_RIGHTS. Each process has one
//! ring with 64 slots. The board is one memfd for each daemon, sealed so that only the daemon's own mapping can write
//! it. The doorbell is one word in a third memfd, on which the daemon sleeps.
//!
//! Invariants: the daemon trusts nothing in a ring. It copies a request out once and uses only the copy; state,
//! sequence and ownership are kept privately. Nothing in the calling half allocates memory, takes a lock, or calls a
//! function that is not async-signal-safe. A reader of the board uses what it read only if the entry's sequence was
//! even and unchanged, and the board's epoch is the ring's.
//!
//! Faults survived: a client that is stopped or killed at any instruction, or that overwrites all memory that it can
//! write; a daemon that is killed at any instruction (the rings survive it, the board does not). Tests:
//! `tests/calls.rs`, `tests/board.rs`.

mod attach;
mod board;
mod board_writer;
mod call;
mod doorbell;
mod serve;
mod shared;
mod waiter;

pub use attach::{
    read_exact, receive_fds, send_fds, write_all, AttachReply, Header, ATTACH_FDS, ATTACH_MOUNT, ATTACH_TOOL,
    HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_CONTROL, KIND_ERROR, KIND_MEMORY,
    KIND_MOUNT, KIND_NODE, KIND_PIECE, KIND_WATCH, MAGIC, MOUNT_ALONE, MOUNT_SHARED,
};
pub use board::{Board, Lookup, NameRef};
pub use board_writer::BoardWriter;
pub use call::{CallFailure, Claim, Removal, Ring};
pub use doorbell::Doorbell;
pub use forebay_sys::opening;
pub use serve::{ServedRing, SlotRequest, SlotState};
pub use shared::{memfd_sealed, Mapping, Seal};
pub use waiter::{call_clock, is_simulated, lease_clock, pause, simulate, Waiter};
