//! How two nodes prove to each other that they have the pool's secret.
//!
//! ```text
//! initiator ── Hello: who I am, nonce                                  MAC by the pool's key for hellos
//! responder ── Welcome: who I am, nonce, protocol, digest of the Hello  MAC by the pool's key for welcomes
//! initiator ── Finish, or any frame                                     MAC by the session's key
//! ```
//! The session's keys come from the secret and both frames, so from both nonces: an old Welcome answers no new Hello, and
//! an old Hello gets a Welcome that its replayer cannot finish. The responder acts on nothing before a frame under the
//! session's key has come. One who lacks the secret is not answered at all.

use forebay_types::{Code, Reader};

use crate::frame::{proven, seal, Header, Kind, Stamp};
use crate::hello::Hello;
use crate::limits::DETAIL_BYTES_MAX;
use crate::limits::HEADER_BYTES;
use crate::secret::Secret;
use crate::session::Session;

const TO_RESPONDER: u8 = 1;
const TO_INITIATOR: u8 = 2;

/// Why a node with the right secret was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// [`Code::NotSupported`]: no common protocol. [`Code::Invalid`]: another pool. [`Code::Exists`]: it met itself.
    /// Others: what [`respond_unless`] was given.
    pub code: Code,
    /// In words, at most 512 bytes.
    pub detail: String,
}

/// What came back to an [`Initiator`].
#[derive(Debug)]
pub enum Answer {
    /// The peer is who it must be; send [`crate::Message::Finish`] or any other message.
    Welcome(Hello, Box<Session>),
    /// The peer has the secret and does not want this node.
    Refused(Refusal),
}

/// What a responder made of a Hello; the frame to send back is in `out`.
#[derive(Debug)]
pub enum Response {
    /// The session, to be trusted from its first frame that opens.
    Welcome(Hello, Box<Session>),
    /// Say so to the address in the hello, and forget it.
    Refuse(Hello, Refusal),
}

/// The side that asks for a link.
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
    /// Begins: the frame to send is [`Initiator::frame`], as often as it takes.
    pub fn start(secret: &Secret, me: Hello) -> Result<Initiator, Code> {
        let (mut body, mut frame) = (Vec::new(), Vec::new());
        me.put(&mut body)?;
        opening(Kind::Hello).put(&body, &mut frame)?;
        seal(secret.hello(), &mut frame);
        let digest = *blake3::hash(&frame).as_bytes();
        Ok(Initiator { me, frame, digest })
    }

    /// The Hello.
    pub fn frame(&self) -> &[u8] {
        &self.frame
    }

    /// What was said in it.
    pub fn hello(&self) -> &Hello {
        &self.me
    }

    /// True when a frame says that it answers this Hello: whether it does is for [`Initiator::finish`] to prove.
    pub fn is_answered_by(&self, frame: &[u8]) -> bool {
        let digest = frame.get(HEADER_BYTES..).and_then(|body| body.get(..32));
        digest == Some(self.digest.as_slice())
    }

    /// Takes an answer. An error leaves the handshake as it was: anyone can send rubbish.
    ///
    /// # Errors
    /// [`Code::AccessDenied`] for a MAC that is not the pool's, [`Code::Stale`] for an answer to another Hello,
    /// [`Code::Malformed`] for the rest.
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
        (Code::Invalid, format!("node {} is of another pool", me.node))
    } else if me.incarnation == peer.incarnation {
        (Code::Exists, format!("node {} met itself", me.node))
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

/// Answers a Hello: `me` must have a new nonce and link. What is to be sent to the address in the peer's hello replaces
/// what `out` held.
///
/// # Errors
/// [`Code::AccessDenied`] for who has not the secret and [`Code::Malformed`] for what is no Hello: send nothing.
pub fn respond(secret: &Secret, me: &Hello, frame: &[u8], out: &mut Vec<u8>) -> Result<Response, Code> {
    respond_unless(secret, me, frame, out, |_| None)
}

/// As [`respond`], where a peer with the right secret may be refused for a reason of the caller's.
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
