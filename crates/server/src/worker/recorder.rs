//! The flight recorder: the requests that a worker was serving when it died.
//!
//! Its memory outlives workers. A request that was being served at two crashes is answered with EIO: it may be what
//! kills the worker, and must not keep other requests from being served. While there are suspects, each batch has one
//! request, so that only the culprit is in flight at two crashes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use forebay_meta::Client;
use forebay_ring::Mapping;
use forebay_types::limits::BATCH_MAX;
use forebay_types::{Error, Result};

use crate::setup::FLIGHT_RECORDER_BYTES;

/// Crashes after which a request is answered with EIO.
const CRASHES_MAX: u64 = 2;

/// A request, under a name that the next worker can find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct InFlight {
    pub(super) session: u64,
    pub(super) slot: usize,
    pub(super) seq: u64,
}

impl InFlight {
    pub(super) fn of(client: &Client) -> InFlight {
        InFlight { session: client.session, slot: client.slot, seq: client.seq }
    }
}

/// Layout: word 0 is the number of requests being served, followed by up to [`BATCH_MAX`] of them (session, slot,
/// sequence). Only the records that this word counts are valid: others are of earlier batches. The second half of the
/// memory starts with the number of suspects, followed by the suspects with their crashes.
#[derive(Debug)]
pub(super) struct FlightRecorder {
    mapping: Mapping,
    /// Requests that are recorded as being served.
    flying: usize,
    suspects: Vec<(InFlight, u64)>,
}

const RECORD_WORDS: usize = 4;
const SUSPECTS_AT: usize = FLIGHT_RECORDER_BYTES as usize / 2;
const SUSPECTS_MAX: usize = 4 * BATCH_MAX;
const _: () = assert!(8 + BATCH_MAX * RECORD_WORDS * 8 <= SUSPECTS_AT);
const _: () = assert!(8 + SUSPECTS_MAX * RECORD_WORDS * 8 <= SUSPECTS_AT);

impl FlightRecorder {
    /// Maps the recorder. The requests that a dead worker was serving become suspects.
    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<FlightRecorder> {
        let mapping = Mapping::new(fd, FLIGHT_RECORDER_BYTES as usize, true)
            .map_err(|e| Error::io("cannot map the flight recorder", &e))?;
        let mut recorder = FlightRecorder { mapping, flying: 0, suspects: Vec::new() };
        let known = recorder.word(SUSPECTS_AT).min(SUSPECTS_MAX as u64) as usize;
        recorder.suspects = (0..known).map(|i| recorder.read(SUSPECTS_AT + 8, i)).collect();
        let flying = recorder.word(0).min(BATCH_MAX as u64) as usize;
        for i in 0..flying {
            let (request, _) = recorder.read(8, i);
            match recorder.suspects.iter().position(|(s, _)| *s == request) {
                Some(known) => recorder.suspects[known].1 += 1,
                None if recorder.suspects.len() < SUSPECTS_MAX => recorder.suspects.push((request, 1)),
                None => {}
            }
        }
        recorder.write_suspects();
        recorder.record_count();
        Ok(recorder)
    }

    fn word(&self, at: usize) -> u64 {
        self.mapping.word64(at).load(Ordering::Acquire)
    }

    fn read(&self, base: usize, i: usize) -> (InFlight, u64) {
        let at = base + i * RECORD_WORDS * 8;
        let request =
            InFlight { session: self.word(at), slot: self.word(at + 8) as usize, seq: self.word(at + 16) };
        (request, self.word(at + 24))
    }

    fn write(&self, base: usize, i: usize, request: InFlight, crashes: u64) {
        let at = base + i * RECORD_WORDS * 8;
        for (k, v) in [request.session, request.slot as u64, request.seq, crashes].into_iter().enumerate() {
            self.mapping.word64(at + 8 * k).store(v, Ordering::Relaxed);
        }
    }

    fn write_suspects(&self) {
        for (i, (request, crashes)) in self.suspects.iter().enumerate() {
            self.write(SUSPECTS_AT + 8, i, *request, *crashes);
        }
        self.mapping.word64(SUSPECTS_AT).store(self.suspects.len() as u64, Ordering::Release);
    }

    /// True while there are suspects: requests are served one at a time.
    pub(super) fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    fn record_count(&self) {
        self.mapping.word64(0).store(self.flying as u64, Ordering::Release);
    }

    /// Records that a request is about to be served. False when it must not be: it was being served at two crashes.
    pub(super) fn takes_off(&mut self, request: InFlight) -> bool {
        if !self.suspects.is_empty() {
            let crashes = self.suspects.iter().find(|(s, _)| *s == request).map_or(0, |(_, c)| *c);
            if crashes >= CRASHES_MAX {
                self.clear(request);
                return false;
            }
        }
        if self.flying < BATCH_MAX {
            self.write(8, self.flying, request, 0);
            self.flying += 1;
            self.record_count();
        }
        true
    }

    /// Records that a suspect was served, and the worker is alive.
    pub(super) fn clear(&mut self, request: InFlight) {
        let before = self.suspects.len();
        // An older request of the same slot can no longer arrive.
        self.suspects.retain(|(s, _)| !(s.session == request.session && s.slot == request.slot));
        if self.suspects.len() != before {
            self.write_suspects();
        }
    }

    /// Records that a session ended: its requests no longer matter.
    pub(super) fn forget_session(&mut self, session: u64) {
        self.suspects.retain(|(s, _)| s.session != session);
        self.write_suspects();
    }

    /// Records that only these sessions are left.
    pub(super) fn keep_sessions(&mut self, known: &std::collections::HashSet<u64>) {
        self.suspects.retain(|(s, _)| known.contains(&s.session));
        self.write_suspects();
    }

    /// Records that no request is being served: the batch is done. Its requests are no suspects any more, whether they
    /// were answered, or are answered later.
    pub(super) fn landed(&mut self) {
        let flown = std::mem::take(&mut self.flying);
        self.record_count();
        if !self.suspects.is_empty() {
            for i in 0..flown {
                self.clear(self.read(8, i).0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn takes_off_after_two_crashes_is_refused_once() {
        let (fd, _memory) =
            forebay_ring::memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, forebay_ring::Seal::Size)
                .unwrap();
        let bad = InFlight { session: 7, slot: 3, seq: 9 };
        let good = InFlight { session: 8, slot: 0, seq: 1 };
        let mut first = FlightRecorder::open(fd.as_fd()).unwrap();
        assert!(!first.has_suspects());
        assert!(first.takes_off(bad) && first.takes_off(good));
        // crash
        let mut second = FlightRecorder::open(fd.as_fd()).unwrap();
        assert!(second.has_suspects());
        assert!(second.takes_off(good));
        second.landed();
        assert!(second.takes_off(bad));
        // crash
        let mut third = FlightRecorder::open(fd.as_fd()).unwrap();
        assert!(!third.takes_off(bad), "met twice: refused");
        assert!(!third.has_suspects());
        assert!(third.takes_off(InFlight { seq: 10, ..bad }), "the next request of the slot is served");
    }

    #[test]
    fn open_after_a_crash_suspects_only_requests_of_the_last_batch() {
        let (fd, _memory) =
            forebay_ring::memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, forebay_ring::Seal::Size)
                .unwrap();
        let request = |slot| InFlight { session: 7, slot, seq: 1 };
        let mut first = FlightRecorder::open(fd.as_fd()).unwrap();
        assert!((0..BATCH_MAX).all(|slot| first.takes_off(request(slot))));
        first.landed();
        assert!(first.takes_off(request(BATCH_MAX)));
        // crash
        let mut second = FlightRecorder::open(fd.as_fd()).unwrap();
        assert_eq!(second.suspects, [(request(BATCH_MAX), 1)]);
        assert!(second.takes_off(request(0)));
        second.landed();
        assert!(second.has_suspects(), "another request");
        assert!(second.takes_off(request(BATCH_MAX)));
        second.landed();
        assert!(!second.has_suspects());
    }
}
