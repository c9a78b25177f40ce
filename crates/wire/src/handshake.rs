//! The handshake, in which two nodes prove to each other that they have the pool's secret.
//!
//! ```text
//! initiator ── Hello: identity, nonce                                   MAC by the pool's key for hellos
//! responder ── Welcome: identity, nonce, protocol, digest of the Hello  MAC by the pool's key for welcomes
//! initiator ── Finish, or any frame                                     MAC by the session's key
//! ```
//! The session's keys derive from the secret and both frames, and so from both nonces. An old Welcome does not fit a
//! new Hello. A sender that replays an old Hello gets a Welcome, but cannot compute the session's key. The responder
//! acts on nothing before it has received a frame under the session's key. A sender without the secret gets no answer
//! at all.

use forebay_types::{Code, Reader};

use crate::frame::{proven, seal, Header, Kind, Stamp};
use crate::hello::Hello;
use crate::limits::DETAIL_BYTES_MAX;
use crate::limits::HEADER_BYTES;
use crate::secret::Secret;
use crate::session::Session;

const TO_RESPONDER: u8 = 1;
const TO_INITIATOR: u8 = 2;

/// The reason why a node with the right secret was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// [`Code::NotSupported`]: no common protocol. [`Code::Invalid`]: another pool. [`Code::Exists`]: the node
    /// connected to itself. Otherwise the code that the caller of [`respond_unless`] returned.
    pub code: Code,
    /// The reason as text, at most 512 bytes.
    pub detail: String,
}

/// The answer to a Hello.
#[derive(Debug)]
pub enum Answer {
    /// The peer has the secret and belongs to this pool. The initiator sends [`crate::Message::Finish`] or any other
    /// message.
    Welcome(Hello, Box<Session>),
    /// The peer has the secret and refuses this node.
    Refused(Refusal),
}

/// The result of a Hello. The frame to send back is in `out`.
#[derive(Debug)]
pub enum Response {
    /// The session. The peer is authenticated when a first frame of it opens.
    Welcome(Hello, Box<Session>),
    /// The frame is sent to the address in the Hello, and no state is kept.
    Refuse(Hello, Refusal),
}

/// The side that requests a link.
#[derive(Debug)]
pub struct Initiator {
    me: Hello,
    frame: Vec<u8>,
    digest: [u8; 32],
}

fn opening(kind: Kind) -> Header {
    Header { protocol: 0, kind, link: 0, counter: 0, request: 0, stamp: Stamp::default(), body_bytes: 0 }
}

fn done(r: &Reader<'_>) -> Result<(), Code> {
    if r.rest().is_empty() {
        Ok(())
    } else {
        Err(Code::Malformed)
    }
}

impl Initiator {
    /// Starts a handshake. [`Initiator::frame`] is sent until it is answered.
    pub fn start(secret: &Secret, me: Hello) -> Result<Initiator, Code> {
        let (mut body, mut frame) = (Vec::new(), Vec::new());
        me.put(&mut body)?;
        opening(Kind::Hello).put(&body, &mut frame)?;
        seal(secret.hello(), &mut frame);
        let digest = *blake3::hash(&frame).as_bytes();
        Ok(Initiator { me, frame, digest })
    }

    /// The encoded Hello.
    pub fn frame(&self) -> &[u8] {
        &self.frame
    }

    /// The contents of the Hello.
    pub fn hello(&self) -> &Hello {
        &self.me
    }

    /// True if a frame carries the digest of this Hello. [`Initiator::finish`] then verifies the frame.
    pub fn is_answered_by(&self, frame: &[u8]) -> bool {
        let digest = frame.get(HEADER_BYTES..).and_then(|body| body.get(..32));
        digest == Some(self.digest.as_slice())
    }

    /// Verifies and decodes an answer. After an error the handshake still waits for an answer, as any host can send
    /// rubbish.
    ///
    /// # Errors
    /// [`Code::AccessDenied`] for a MAC that is not by the pool's key, [`Code::Stale`] for an answer to another Hello,
    /// [`Code::Malformed`] for anything else.
    pub fn finish(&self, secret: &Secret, frame: &[u8]) -> Result<Answer, Code> {
        let header = Header::peek(frame)?;
        if !matches!(header.kind, Kind::Welcome | Kind::Refuse) {
            return Err(Code::Malformed);
        }
        if !proven(secret.welcome(), frame) {
            return Err(Code::AccessDenied);
        }
        let mut r = Reader::new(Header::body(frame));
        if r.array::<32>()? != &self.digest {
            return Err(Code::Stale);
        }
        if header.kind == Kind::Refuse {
            let code = Code::from_u16(r.u16()?);
            let detail = r.short_bytes()?;
            done(&r)?;
            if detail.len() > DETAIL_BYTES_MAX {
                return Err(Code::Malformed);
            }
            let detail = String::from_utf8_lossy(detail).into_owned();
            return Ok(Answer::Refused(Refusal { code, detail }));
        }
        let protocol = r.u16()?;
        let peer = Hello::decode(&mut r)?;
        done(&r)?;
        if self.me.common(&peer) != Some(protocol) || peer.pool != self.me.pool {
            return Err(Code::Malformed);
        }
        let key = |direction| secret.session(&self.frame, frame, direction);
        let session = Session::new(protocol, peer.link, key(TO_RESPONDER), key(TO_INITIATOR));
        Ok(Answer::Welcome(peer, Box::new(session)))
    }
}

fn refusal(me: &Hello, peer: &Hello) -> Option<Refusal> {
    let (mine, theirs) = (me.protocols, peer.protocols);
    let (code, detail) = if me.pool != peer.pool {
        (Code::Invalid, format!("node {} belongs to another pool", me.node))
    } else if me.incarnation == peer.incarnation {
        (Code::Exists, format!("node {} connected to itself", me.node))
    } else if me.common(peer).is_none() {
        let detail = format!(
            "node {} speaks protocols {} to {}, node {} speaks {} to {}: install one version on both",
            me.node, mine.0, mine.1, peer.node, theirs.0, theirs.1
        );
        (Code::NotSupported, detail)
    } else {
        return None;
    };
    Some(Refusal { code, detail })
}

/// Answers a Hello. `me` must have a new nonce and link. The frame for the address in the peer's Hello replaces the
/// contents of `out`.
///
/// # Errors
/// The caller then sends nothing. [`Code::AccessDenied`] for a sender without the secret, [`Code::Malformed`] for a
/// frame that is no Hello.
pub fn respond(secret: &Secret, me: &Hello, frame: &[u8], out: &mut Vec<u8>) -> Result<Response, Code> {
    respond_unless(secret, me, frame, out, |_| None)
}

/// As [`respond`], but `refused` can refuse a peer that has the right secret.
///
/// # Errors
/// As [`respond`].
pub fn respond_unless(
    secret: &Secret,
    me: &Hello,
    frame: &[u8],
    out: &mut Vec<u8>,
    refused: impl Fn(&Hello) -> Option<Refusal>,
) -> Result<Response, Code> {
    let header = Header::peek(frame)?;
    if header.kind != Kind::Hello {
        return Err(Code::Malformed);
    }
    if !proven(secret.hello(), frame) {
        return Err(Code::AccessDenied);
    }
    let mut r = Reader::new(Header::body(frame));
    let peer = Hello::decode(&mut r)?;
    done(&r)?;
    let mut body = blake3::hash(frame).as_bytes().to_vec();
    if let Some(mut refusal) = refusal(me, &peer).or_else(|| refused(&peer)) {
        let end = refusal.detail.floor_char_boundary(DETAIL_BYTES_MAX);
        refusal.detail.truncate(end);
        body.extend_from_slice(&(refusal.code as u16).to_le_bytes());
        body.extend_from_slice(&(refusal.detail.len() as u16).to_le_bytes());
        body.extend_from_slice(refusal.detail.as_bytes());
        opening(Kind::Refuse).put(&body, out)?;
        seal(secret.welcome(), out);
        return Ok(Response::Refuse(peer, refusal));
    }
    let protocol = me.common(&peer).ok_or(Code::NotSupported)?;
    body.extend_from_slice(&protocol.to_le_bytes());
    me.put(&mut body)?;
    opening(Kind::Welcome).put(&body, out)?;
    seal(secret.welcome(), out);
    let key = |direction| secret.session(frame, out, direction);
    let session = Session::new(protocol, peer.link, key(TO_INITIATOR), key(TO_RESPONDER));
    Ok(Response::Welcome(peer, Box::new(session)))
}
