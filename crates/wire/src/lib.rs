//! Messages between nodes: their encoding, limits and authentication.
//!
//! A *frame* is a fixed header, a body and a MAC. A message of the transport is one frame, or a bundle of several
//! ([`Frames`]). Two nodes prove to each other that they have the pool's secret ([`Initiator`], [`respond`]) and get a
//! [`Session`]: one key for each direction, a counter in every frame, and a window that refuses replays. The MAC is
//! checked over the raw bytes before any of the body is read.
//!
//! Bodies are [`Message`]s: encoded requests and replies of `forebay-types`, data of backing files, heartbeats.
//! Decoding checks every length, name, offset and count, and refuses trailing bytes. So every message that
//! [`Message::decode`] returns is within the bounds of [`limits`].
//!
//! Not here: I/O, clocks, randomness (the caller supplies nonces). Contents are not encrypted, and bytes that move by
//! RMA have no MAC: docs/decisions/0008-authentication-between-nodes.md.
//!
//! Tests: beside the code, `tests/messages.rs` (round trips, bounds), `tests/garbage.rs` (truncation, bit flips,
//! random and mutated input for some seconds; the same entry point as `fuzz/`).

#![forbid(unsafe_code)]

mod bundle;
mod exercise;
mod frame;
mod handshake;
mod hello;
pub mod limits;
mod message;
mod secret;
mod session;

pub use bundle::{join, Frames};
pub use exercise::exercise;
pub use frame::{Header, Kind, Stamp};
pub use handshake::{respond, respond_unless, Answer, Initiator, Refusal, Response};
pub use hello::Hello;
pub use limits::{HEADER_BYTES, MAC_BYTES, PROTOCOL_MAX, PROTOCOL_MIN};
pub use message::{DataLocation, Memory, Message};
pub use secret::{Secret, SECRET_BYTES};
pub use session::Session;
