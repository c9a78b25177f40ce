//! A calibration as the numbers of one direction.

use crate::calibration::{Calibration, Value};

/// Costs in nanoseconds, of one direction.
pub(super) struct Costs {
    pub(super) message: f64,
    pub(super) message_byte: f64,
    pub(super) local_message: f64,
    pub(super) local_message_byte: f64,
    pub(super) sequential_byte: f64,
    pub(super) random_byte: f64,
    pub(super) run: f64,
    pub(super) next: f64,
    pub(super) request: f64,
    pub(super) request_byte: f64,
    pub(super) copy_byte: f64,
    pub(super) piece: f64,
    pub(super) gap_bytes: f64,
    pub(super) parallel: f64,
    pub(super) processors: f64,
    pub(super) queue: f64,
}

impl Costs {
    pub(super) fn of(c: &Calibration, writes: bool) -> Costs {
        let ns = |v: Value| v.value.max(0) as f64;
        let byte = |v: Value| v.value.max(0) as f64 / 1000.0;
        let [sequential, random, run, next] = if writes {
            [c.write_sequential_byte_ps, c.write_random_byte_ps, c.write_run_ns, c.write_next_ns]
        } else {
            [c.read_sequential_byte_ps, c.read_random_byte_ps, c.read_run_ns, c.read_next_ns]
        };
        Costs {
            message: ns(c.message_ns),
            message_byte: byte(c.message_byte_ps),
            local_message: ns(c.local_message_ns),
            local_message_byte: byte(c.local_message_byte_ps),
            sequential_byte: byte(sequential),
            random_byte: byte(random),
            run: ns(run),
            // Noise may have made it the greater one.
            next: ns(next).min(ns(run)),
            request: ns(c.request_ns),
            request_byte: byte(c.request_byte_ps),
            copy_byte: byte(c.copy_byte_ps),
            piece: ns(c.piece_ns),
            gap_bytes: c.gap_bytes.max(0) as f64,
            parallel: c.parallel.max(1) as f64,
            processors: c.processors.max(1) as f64,
            queue: c.queue.max(1) as f64,
        }
    }
}
