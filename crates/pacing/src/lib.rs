//! Emulated media: a medium is made as slow as a [`Profile`] says, by delaying the requests to it where they are served.
//!
//! One [`Pacer`] stands for one medium of a node. Its state is in shared memory ([`Pacers`]), so that all processes of
//! the node that read and write the medium share its queue and its bandwidth. A request reserves its time with a few
//! atomic operations ([`Pacer::begin`]), is then served by the real medium, and completes when its time has passed
//! ([`Ticket::wait`]). So the time that the real medium takes is a part of the emulated time.
//!
//! Invariants: nothing in the memory is a lock. A process that is killed between any two instructions leaves at most
//! time that it had reserved. No wait is longer than [`WAIT_MAX_NS`], whatever other processes write to the memory.
//! Nothing here allocates memory after the pacers were opened, and no call changes errno: a host program's read(2) may
//! be paced, in a signal handler too.
//!
//! Media cannot be made faster. The floor, below which media do not differ, is what [`measure_floor`] returns on top of
//! the time that the request's way takes anyway (docs/emulation.md). Tests: beside the code, with clocks of their own,
//! and `tests/shared.rs`.

mod clock;
mod memory;
mod pacer;
mod profile;
mod statistics;

pub use clock::{measure_floor, now_ns, wait_until, SPIN_NS, WAIT_MAX_NS};
pub use memory::{Pacers, PACERS_BYTES};
pub use pacer::{Pacer, Place, Reservation, Ticket};
pub use profile::{
    Direction, Medium, Profile, Speed, BANDWIDTH_MAX, BANDWIDTH_MIN, LATENCY_MAX_NS, PROFILES,
    QUEUE_DEPTH_MAX,
};
pub use statistics::{Histogram, Statistics, BUCKETS};
