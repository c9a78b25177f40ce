//! Puts and gets of pieces on other nodes that are under way while their caller does something else. The thread that begins
//! one posts its request, and whoever waits for completions takes the reply: no other thread has to sleep and wake for it.
//!
//! Only what is one request is posted, through registered memory: a put that was copied into a piece of the process's
//! buffer, a get that is copied out of one when it ends, or either from and to allocated memory. What would have to wait for
//! a slot or a piece is not, and what was refused ends so that its caller executes it as any other (`far_pieces`).

use forebay_ring::{call_clock, Claim, Ring};
use forebay_sys::wait::Sleeper;
use forebay_types::limits::{CALL_TIMEOUT_MS, MOVE_BYTES_MAX};
use forebay_types::Code;
use forebay_volume::UnderWay;

use crate::attached::Attached;
use crate::direct::Direct;
use crate::far_parts::{Memory, Part};
use crate::pool::Pool;
use crate::remote_data::{encode, take, was_answered, Through};

/// Shorter ones are not posted: many of them cost less where I/O threads send them together, in one message.
const POSTED_BYTES_MIN: usize = MOVE_BYTES_MAX / 2;
/// A request with its fields, or a reply: the data are in registered memory.
const MESSAGE_BYTES: usize = 128;

/// See the module.
pub(crate) struct Posted {
    pool: &'static Pool,
    attached: &'static Attached,
    /// The request, until it has ended.
    claim: Option<(Claim<'static>, Through)>,
    part: Part,
    memory: Memory,
    direct: Option<Direct>,
    /// When it began.
    since_ns: u64,
}

// SAFETY: whoever begins a call promises that its memory stays until the end; the pointer is used by one thread at a time.
unsafe impl Send for Posted {}

impl std::fmt::Debug for Posted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Posted").field("part", &self.part).finish_non_exhaustive()
    }
}

impl Pool {
    /// Posts a part that begins at the start of its memory, if no slot and no memory have to be waited for.
    ///
    /// # Safety
    /// The memory is readable or writable, as it says, until the result has ended or was dropped.
    pub(crate) unsafe fn post_part(&'static self, part: Part, memory: Memory) -> Option<Posted> {
        if part.len < POSTED_BYTES_MIN {
            return None;
        }
        let attached: &'static Attached = self.attached().ok()?;
        let ring: &'static Ring = &attached.ring;
        let direct = self.direct(attached, memory, part.len);
        let claim = ring.claim_spare()?;
        let place = direct.as_ref().and_then(|direct| direct.place(&part));
        let through = match place {
            Some(place) => Through::Memory(place),
            None => Through::Piece(attached.buffers.spare(part.id.node(), || self.new_buffer(attached))?),
        };
        let mut message = [0; MESSAGE_BYTES];
        // SAFETY: the caller's promise.
        let n = unsafe { encode(&part, Some(&through), memory, &mut message) }.ok()?;
        self.post(attached, &claim, &message[..n]);
        let (claim, since_ns) = (Some((claim, through)), call_clock());
        Some(Posted { pool: self, attached, claim, part, memory, direct, since_ns })
    }
}

impl Posted {
    /// Ends the request: with its reply if that is there, else it is in doubt.
    fn end(&mut self) -> Result<bool, Code> {
        let Some((claim, through)) = self.claim.take() else { return Err(Code::Io) };
        let (attached, part, memory) = (self.attached, &self.part, self.memory);
        let answered = claim.finish_by(0, &mut [0; MESSAGE_BYTES], &|| true, |reply, _| {
            // SAFETY: the caller's promise.
            unsafe { take(part, Some(&through), memory, reply) }
        });
        let answered = answered.map_err(|failure| self.pool.failed(attached, failure)).and_then(|done| done);
        let is_in_doubt = answered.is_err_and(|code| !was_answered(code));
        match (answered, through) {
            (Ok(done), Through::Piece(_)) => {
                attached.buffers.known(part.id.node());
                Ok(done == part.len)
            }
            (Ok(done), Through::Memory(_)) => Ok(done == part.len),
            (Err(_), Through::Piece(piece)) if is_in_doubt => {
                attached.buffers.lose(piece, matches!(memory, Memory::From(_)));
                Err(Code::Io)
            }
            (Err(Code::Fault), Through::Piece(piece)) => {
                attached.buffers.refused(part.id.node(), &piece);
                Ok(false)
            }
            (Err(_), Through::Piece(_)) => Ok(false),
            (Err(code), Through::Memory(place)) => {
                let refused_by = (code == Code::Fault).then(|| attached.ring.epoch());
                let fails = is_in_doubt || refused_by.is_some();
                if let Some(direct) = self.direct.as_mut().filter(|_| fails) {
                    direct.failed(part, place, refused_by)?;
                }
                if is_in_doubt {
                    Err(Code::Io)
                } else {
                    Ok(false)
                }
            }
        }
    }
}

impl UnderWay for Posted {
    fn is_answered(&self) -> bool {
        self.claim.as_ref().is_none_or(|(claim, _)| claim.is_answered())
    }

    fn sleeper(&self) -> Sleeper<'static> {
        match &self.claim {
            Some((claim, _)) => claim.sleeper(),
            None => unreachable!("it has ended, and is gone with that"),
        }
    }

    fn is_lost(&self, since_ns: u64) -> bool {
        let until_ns = since_ns.max(self.since_ns) + CALL_TIMEOUT_MS * 1_000_000;
        if let Some((claim, _)) = &self.claim {
            claim.ring_again();
        }
        !self.is_answered() && (call_clock() >= until_ns || !self.pool.is_alive(self.attached))
    }

    fn finish(mut self: Box<Self>) -> Result<bool, Code> {
        self.end()
    }
}

impl Drop for Posted {
    /// What has not ended may still be executed.
    fn drop(&mut self) {
        if self.claim.is_some() {
            let _ = self.end();
        }
    }
}
