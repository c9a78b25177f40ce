//! The state of a link after the handshake: keys, counters, a window against replays.

use std::fmt;

use forebay_types::Code;

use crate::frame::{proven, seal, Header, Kind, Stamp};
use crate::limits::WINDOW_FRAMES;
use crate::message::Message;

const WORDS: usize = (WINDOW_FRAMES / 64) as usize;

/// The counters that were received. Each is accepted once, and none that is too far behind the newest (a ring of words
/// as in RFC 6479).
#[derive(Clone)]
struct Window {
    /// One above the newest counter.
    next: u64,
    seen: [u64; WORDS],
}

impl Window {
    fn new() -> Window {
        Window { next: 0, seen: [0; WORDS] }
    }

    /// True if the counter is accepted, which happens once for each counter.
    fn take(&mut self, counter: u64) -> bool {
        // The ring's word with the newest counter is only partly used, so the window is one word shorter than the ring.
        if counter == u64::MAX || self.next.saturating_sub(counter) > WINDOW_FRAMES - 64 {
            return false;
        }
        let word = counter / 64;
        if counter >= self.next {
            let newest = if self.next == 0 { 0 } else { (self.next - 1) / 64 };
            for fresh in (newest + 1..=word).take(WORDS) {
                self.seen[fresh as usize % WORDS] = 0;
            }
            self.next = counter + 1;
        }
        let (slot, bit) = (word as usize % WORDS, 1u64 << (counter % 64));
        let first = self.seen[slot] & bit == 0;
        self.seen[slot] |= bit;
        first
    }
}

/// One end of a session between two nodes that proved to have the secret. It seals outgoing frames and opens incoming
/// ones.
#[derive(Clone)]
pub struct Session {
    protocol: u16,
    /// The peer's number for the link, in every frame to it.
    link: u64,
    out_key: [u8; 32],
    in_key: [u8; 32],
    next: u64,
    window: Window,
    scratch: Vec<u8>,
}

impl Session {
    pub(crate) fn new(protocol: u16, link: u64, out_key: [u8; 32], in_key: [u8; 32]) -> Session {
        Session { protocol, link, out_key, in_key, next: 0, window: Window::new(), scratch: Vec::new() }
    }

    /// The protocol version of the session.
    pub fn protocol(&self) -> u16 {
        self.protocol
    }

    /// Makes the frame of a message and replaces the contents of `out`. A frame is sent only once: a retry is sealed
    /// again.
    ///
    /// # Errors
    /// [`Code::TooBig`] when the message exceeds its limits, and when the counter is used up.
    pub fn seal(
        &mut self,
        request: u64,
        stamp: Stamp,
        message: &Message<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Code> {
        let mut body = std::mem::take(&mut self.scratch);
        let sealed = message
            .encode_to(&mut body)
            .and_then(|()| self.seal_body(message.kind(), request, stamp, &body, out));
        self.scratch = body;
        sealed
    }

    /// As [`Session::seal`], for a body that [`Message::encode_to`] made. A call keeps that body to send it again.
    pub fn seal_body(
        &mut self,
        kind: Kind,
        request: u64,
        stamp: Stamp,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Code> {
        let counter = self.next;
        let next = counter.checked_add(1).filter(|n| *n < u64::MAX).ok_or(Code::TooBig)?;
        let header = Header {
            protocol: self.protocol,
            kind,
            link: self.link,
            counter,
            request,
            stamp,
            body_bytes: body.len(),
        };
        header.put(body, out)?;
        seal(&self.out_key, out);
        self.next = next;
        Ok(())
    }

    /// Verifies a frame, first its MAC, then its counter. Returns header and body.
    ///
    /// # Errors
    /// [`Code::Malformed`] for bytes that are no frame of this session, [`Code::AccessDenied`] for a wrong MAC,
    /// [`Code::Stale`] for a counter that was received before or is too old.
    pub fn open<'a>(&mut self, frame: &'a [u8]) -> Result<(Header, &'a [u8]), Code> {
        let header = Header::peek(frame)?;
        if header.protocol != self.protocol {
            return Err(Code::Malformed);
        }
        if !proven(&self.in_key, frame) {
            return Err(Code::AccessDenied);
        }
        if !self.window.take(header.counter) {
            return Err(Code::Stale);
        }
        Ok((header, Header::body(frame)))
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("link", &self.link).field("sent", &self.next).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn window_takes_each_counter_once_and_none_too_old() {
        let mut w = Window::new();
        assert!(w.take(0) && !w.take(0) && w.take(5) && w.take(3) && !w.take(5) && !w.take(3));
        assert!(w.take(5000));
        assert!(!w.take(4), "far behind");
        assert!(!w.take(5000 - WINDOW_FRAMES));
        assert!(w.take(4999) && w.take(5001 - WINDOW_FRAMES + 64));
        assert!(!w.take(u64::MAX), "the last counter is never used");
        assert!(w.take(u64::MAX - 1) && !w.take(u64::MAX - 1));
    }

    proptest! {
        #[test]
        fn window_agrees_with_a_set(steps in proptest::collection::vec((any::<bool>(), 0u64..3000), 1..400)) {
            let (mut w, mut seen, mut newest) = (Window::new(), HashSet::new(), 0u64);
            for (forward, by) in steps {
                let counter = if forward { newest + by % 200 } else { newest.saturating_sub(by) };
                let taken = w.take(counter);
                prop_assert!(!(taken && seen.contains(&counter)), "taken twice");
                if counter + WINDOW_FRAMES - 64 > newest && !seen.contains(&counter) {
                    prop_assert!(taken, "counter {} within the window of {}", counter, newest);
                }
                if taken {
                    seen.insert(counter);
                    newest = newest.max(counter);
                }
            }
        }
    }
}
