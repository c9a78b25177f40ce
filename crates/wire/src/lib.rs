//! Messages between nodes: how they are encoded, bounded and authenticated.
//!
//! A *frame* is a fixed header, a body, a MAC; a message of the transport is one, or a bundle of some ([`Frames`]). Two
//! nodes prove to each other that they have the pool's secret ([`Initiator`], [`respond`]) and get a [`Session`]: one
//! key a direction, a counter in every frame, and a window that refuses replays. The MAC is checked over the raw bytes
//! before anything of the body is read.
//!
//! Bodies are [`Message`]s: requests and replies of `forebay-types` as they are, data of stripes, heartbeats.
//! Every length, name, offset and count is checked in decoding, and bytes left over are refused, so that what is
//! behind [`Message::decode`] is within the bounds of [`limits`].
//!
//! What is not here: I/O, clocks, randomness (the caller brings nonces). Contents are not hidden from who taps the
//! network, and bytes that move by RMA have no MAC: docs/decisions/0008-authentication-between-nodes.md.
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
