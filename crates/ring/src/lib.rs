//! The memory that a process and its node's daemon share: the *ring*, by which a process asks, and the *board*, on
//! which the daemon publishes what it knows.
//!
//! A ring is a memfd that the daemon makes, seals against resizing and hands over with SCM_RIGHTS: one a process, 64
//! slots in it. The board is one memfd a daemon, sealed so that only the daemon's own mapping can write it. The
//! doorbell is one word in a third memfd, on which the daemon sleeps.
//!
//! Invariants: nothing in a ring is trusted by the daemon (a request is copied out once and only the copy is looked
//! at; state, sequence and ownership are kept privately). Nothing in the calling half allocates, locks, or calls
//! anything that is not async-signal-safe. A reader of the board takes what it read only if the entry's sequence was
//! even and unchanged, and the board's epoch is the ring's.
//!
//! Faults survived: a client stopped or killed at any instruction, or that scribbles over all it can write; a daemon
//! killed at any instruction (the rings survive it, the board does not). Tests: `tests/hostile.rs`, `tests/board.rs`.

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
    HEADER_BYTES, KIND_ALIVE, KIND_ATTACH, KIND_BOARD, KIND_BUFFER, KIND_CONTROL, KIND_ERROR, KIND_MOUNT,
    KIND_WATCH, MAGIC, MOUNT_ALONE, MOUNT_SHARED,
};
pub use board::{Board, Lookup, NameRef};
pub use board_writer::BoardWriter;
pub use call::{CallFailure, Claim, Removal, Ring};
pub use doorbell::Doorbell;
pub use serve::{ServedRing, SlotRequest, SlotState};
pub use shared::{memfd_sealed, Mapping, Seal};
pub use waiter::{call_clock, lease_clock, pause, simulate, Waiter};
