//! Bundles: several frames in one message of the transport.
//!
//! A message costs both ends several system calls and perhaps a wake-up, whatever its length. So frames that leave for
//! one peer at the same time share a message. Each frame keeps its own MAC and counter. The bundle itself has none, and
//! does not bind its frames together. A frame of a handshake is always alone in its message, so that the form of
//! handshakes never changes.

use forebay_types::Code;

use crate::frame::Header;
use crate::limits::BUNDLE_BYTES_MAX;

/// Appends a frame to a bundle. False if it does not fit or may not share a message.
pub fn join(bundle: &mut Vec<u8>, frame: &[u8]) -> bool {
    let fits = bundle.len() + frame.len() <= BUNDLE_BYTES_MAX
        && !Header::is_handshake(bundle)
        && !Header::is_handshake(frame);
    if fits {
        bundle.extend_from_slice(frame);
    }
    fits
}

/// The frames of a message, as they were sealed. Their MACs are not checked yet. Bytes that are no whole frame give one
/// error, which is the last item.
#[derive(Clone, Debug)]
pub struct Frames<'a> {
    rest: &'a [u8],
    first: bool,
}

impl<'a> Frames<'a> {
    /// The frames of a received message.
    pub fn of(message: &'a [u8]) -> Frames<'a> {
        Frames { rest: message, first: true }
    }

    fn take(&mut self) -> Result<&'a [u8], Code> {
        let bytes = Header::frame_bytes(self.rest)?;
        let (frame, rest) = self.rest.split_at_checked(bytes).ok_or(Code::Malformed)?;
        let alone = self.first && rest.is_empty();
        if Header::is_handshake(frame) && !alone {
            return Err(Code::Malformed);
        }
        (self.rest, self.first) = (rest, false);
        Ok(frame)
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<&'a [u8], Code>;

    fn next(&mut self) -> Option<Result<&'a [u8], Code>> {
        if self.rest.is_empty() && !self.first {
            return None;
        }
        let frame = self.take();
        if frame.is_err() {
            (self.rest, self.first) = (&[], false);
        }
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Kind, Stamp};
    use crate::message::Message;
    use crate::session::Session;
    use proptest::prelude::*;

    fn frames(count: usize, detail: &[u8]) -> Vec<Vec<u8>> {
        let mut session = Session::new(1, 2, [3; 32], [4; 32]);
        let sealed = |_| {
            let mut frame = Vec::new();
            session.seal(0, Stamp::default(), &Message::Goodbye { detail }, &mut frame).unwrap();
            frame
        };
        (0..count).map(sealed).collect()
    }

    fn split(message: &[u8]) -> Vec<Result<Vec<u8>, Code>> {
        Frames::of(message).map(|frame| frame.map(<[u8]>::to_vec)).collect()
    }

    fn hello() -> Vec<u8> {
        let mut frame = Vec::new();
        let stamp = Stamp::default();
        let header =
            Header { protocol: 0, kind: Kind::Hello, link: 0, counter: 0, request: 0, stamp, body_bytes: 3 };
        header.put(&[1, 2, 3], &mut frame).unwrap();
        crate::frame::seal(&[1; 32], &mut frame);
        frame
    }

    #[test]
    fn frame_of_a_handshake_comes_alone() {
        let (hello, other) = (hello(), frames(1, b"").remove(0));
        assert_eq!(split(&hello), [Ok(hello.clone())]);
        assert_eq!(split(&[&hello[..], &other].concat()), [Err(Code::Malformed)]);
        assert_eq!(split(&[&other[..], &hello].concat()), [Ok(other.clone()), Err(Code::Malformed)]);
        assert!(!join(&mut hello.clone(), &other) && !join(&mut other.clone(), &hello));
    }

    #[test]
    fn bundle_has_a_bound() {
        let all = frames(1000, &[7; 100]);
        let mut bundle = all[0].clone();
        let joined = all[1..].iter().take_while(|frame| join(&mut bundle, frame)).count();
        assert!(joined > 10 && bundle.len() <= BUNDLE_BYTES_MAX);
        assert!(bundle.len() + all[0].len() > BUNDLE_BYTES_MAX);
        assert_eq!(Frames::of(&bundle).count(), joined + 1);
    }

    #[test]
    fn nothing_is_one_error() {
        assert_eq!(split(b""), [Err(Code::Malformed)]);
    }

    proptest! {
        #[test]
        fn frames_come_as_they_were_and_a_torn_bundle_ends_in_one_error(
            count in 1usize..9, bytes in 0usize..200, cut in any::<prop::sample::Index>()
        ) {
            let all = frames(count, &vec![5; bytes]);
            let mut bundle = all[0].clone();
            for frame in &all[1..] {
                prop_assert!(join(&mut bundle, frame));
            }
            let whole: Vec<_> = all.iter().cloned().map(Ok).collect();
            prop_assert_eq!(split(&bundle), whole);
            let at = cut.index(bundle.len());
            let mut expected: Vec<_> = all.iter().take(at / all[0].len()).cloned().map(Ok).collect();
            if at % all[0].len() != 0 || at == 0 {
                expected.push(Err(Code::Malformed));
            }
            prop_assert_eq!(split(&bundle[..at]), expected);
        }
    }
}
