//! One entry point for fuzzing, by `fuzz/` and by `tests/garbage.rs`.

use forebay_types::NodeId;

use crate::bundle::Frames;
use crate::frame::{seal, Header, Kind};
use crate::handshake::{respond, Answer, Initiator, Response};
use crate::hello::Hello;
use crate::limits::{HEADER_BYTES, MAC_BYTES};
use crate::limits::{PROTOCOL_MAX, PROTOCOL_MIN};
use crate::message::Message;
use crate::secret::Secret;
use crate::session::Session;

fn node(n: u16) -> Hello {
    Hello {
        protocols: (PROTOCOL_MIN, PROTOCOL_MAX),
        pool: [9; 16],
        node: NodeId(n),
        incarnation: n as u64,
        link: 40 + n as u64,
        capacity_bytes: 1 << 30,
        clock_us: 1,
        nonce: [n as u8; 32],
        address: vec![1, 2, 3],
    }
}

fn session_of_nobody() -> Session {
    Session::new(1, 2, [3; 32], [4; 32])
}

/// Feeds bytes to every decoder of this crate, as frames and as bodies, with wrong and with correct MACs. A decoded
/// message must stay the same when it is encoded and decoded again. Panics only if a decoder is wrong.
pub fn exercise(bytes: &[u8]) {
    let secret_bytes: Vec<u8> = (1..33).collect();
    let Ok(secret) = Secret::new(&secret_bytes) else { unreachable!("32 bytes") };
    let mut out = Vec::new();
    // As received: every frame is rejected by its MAC.
    let _ = Header::peek(bytes);
    cut(bytes);
    assert!(respond(&secret, &node(2), bytes, &mut out).is_err(), "a forged hello was taken");
    let Ok(initiator) = Initiator::start(&secret, node(1)) else { unreachable!("the hello is sound") };
    assert!(initiator.finish(&secret, bytes).is_err(), "a forged answer was taken");
    let mut session = session_of_nobody();
    assert!(session.open(bytes).is_err(), "a forged frame was opened");

    // With correct MACs, as from a sender that has the secret, to test the decoders. The first byte selects the kind of
    // the body.
    let Some((choice, body)) = bytes.split_first() else { return };
    cut(body);
    let sealed = |key: &[u8; 32]| {
        let mut frame = body.to_vec();
        seal(key, &mut frame);
        frame
    };
    if let Ok(Response::Welcome(peer, _)) = respond(&secret, &node(2), &sealed(secret.hello()), &mut out) {
        assert!(peer.check().is_ok());
    }
    if let Ok(Answer::Welcome(peer, _)) = initiator.finish(&secret, &sealed(secret.welcome())) {
        assert!(peer.check().is_ok());
    }
    if let Ok((header, opened)) = session.open(&sealed(&[4; 32])) {
        assert_eq!(opened.len() + HEADER_BYTES, body.len());
        assert!(session.open(&sealed(&[4; 32])).is_err(), "a replay was opened");
        body_of(header.kind, opened);
    }
    body_of(Kind::ALL[*choice as usize % Kind::ALL.len()], body);
    if body.len() > MAC_BYTES {
        body_of(Kind::ALL[*choice as usize % Kind::ALL.len()], &body[MAC_BYTES..]);
    }
}

/// Whatever the boundaries of frames are, all bytes of a message are visited once, and no frame is accepted.
fn cut(message: &[u8]) {
    let (mut bytes, mut torn) = (0, false);
    for frame in Frames::of(message) {
        assert!(!torn, "something came behind the error");
        match frame {
            Ok(frame) => {
                bytes += frame.len();
                assert!(session_of_nobody().open(frame).is_err(), "a forged frame was opened");
            }
            Err(_) => torn = true,
        }
    }
    assert!(torn || bytes == message.len());
}

fn body_of(kind: Kind, body: &[u8]) {
    let Ok(message) = Message::decode(kind, body) else { return };
    assert_eq!(message.kind(), kind);
    let mut again = Vec::new();
    match message.encode_to(&mut again) {
        Ok(()) => assert_eq!(Message::decode(kind, &again), Ok(message), "what was decoded changed"),
        Err(code) => panic!("{message:?} was decoded and cannot be encoded: {code}"),
    }
}
