//! The messages, and their bodies.

use forebay_types::limits::{COMPONENTS_MAX, FILE_BYTES_MAX, NAME_MAX, STRIPES_MAX};
use forebay_types::{Answer, BackingId, Caller, Code, Ino, Reader, Refusal, Reply, Request, Writer};

use crate::frame::Kind;
use crate::limits::{BODY_BYTES_MAX, DATA_BYTES_MAX, DETAIL_BYTES_MAX, INLINE_BYTES_MAX};

/// Registered memory of a message's sender. The receiver may read or write it by RMA.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Memory {
    /// The start of the range, as the transport addresses it.
    pub address: u64,
    /// The key that permits access.
    pub key: u64,
}

/// Where the bytes of a data request are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataLocation<'a> {
    /// In the message itself. A write has its bytes here. A read has none, as its bytes are in the answer.
    Inline(&'a [u8]),
    /// In the requester's registered memory.
    Remote(Memory),
    /// In the requester's registered memory. The bytes of a write are also in transfer to an eager buffer that the
    /// receiver granted. They end at the buffer's last byte.
    Eager {
        /// Where to read the bytes if the transfer to the eager buffer fails.
        memory: Memory,
        /// The number of [`Message::TakeEagerBuffers`].
        grant: u32,
        /// The index of the buffer in the grant.
        buffer: u16,
        /// Increases with each use of the buffer.
        generation: u32,
    },
}

/// A message between nodes. A request is answered by its answer or by `Failure`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// The initiator's proof that it has the session's key.
    Finish,
    /// A client's or a daemon's request, with its caller. → `Answer`
    Ask(Caller, Request<'a>),
    /// The answer of the node that served the request.
    Answer(Answer<'a>),
    /// Reads `bytes` at `offset` of a backing file, or fewer at its end. → `Answer`, with a count
    ReadStripe {
        /// The backing file.
        id: BackingId,
        /// Offset within the backing file.
        offset: u64,
        /// 1 byte to 64 KiB inline, to 64 MiB by RMA.
        bytes: u64,
        /// `Inline` (empty here), or the memory to store them in.
        to: DataLocation<'a>,
    },
    /// Writes `bytes` at `offset` of a backing file. → `Answer`, with a count
    WriteStripe {
        /// The backing file.
        id: BackingId,
        /// Offset within the backing file.
        offset: u64,
        /// Writes at the end of the file instead of at `offset`. No other write comes between finding the end and
        /// writing.
        append: bool,
        /// 1 byte to 64 KiB inline, to 64 MiB by RMA.
        bytes: u64,
        /// The bytes, or the memory to read them from.
        from: DataLocation<'a>,
    },
    /// Requests eager buffers: memory of the receiver into which the sender writes by RMA before it sends the request
    /// that names the buffer. The sender no longer uses buffers of earlier grants. → `GrantEagerBuffers`
    TakeEagerBuffers {
        /// The sender's number of the grant, greater than all before.
        grant: u32,
    },
    /// Grants eager buffers, which are adjacent in memory.
    GrantEagerBuffers {
        /// The start of the first buffer.
        memory: Memory,
        /// The number of buffers, not 0.
        buffers: u16,
        /// Bytes of each buffer, not 0.
        bytes: u32,
    },
    /// The sender is alive. → `Alive`
    Heartbeat {
        /// The sender's clock, in microseconds since 1970.
        clock_us: u64,
    },
    /// Answers a heartbeat.
    Alive {
        /// The clock of the heartbeat.
        echo_us: u64,
        /// The clock of the node that answers.
        clock_us: u64,
    },
    /// The sender leaves in order, and will not answer further requests.
    Goodbye {
        /// The reason, for the log.
        detail: &'a [u8],
    },
    /// The request was not executed.
    Failure {
        /// The reason.
        code: Code,
        /// The reason as text, for the log.
        detail: &'a [u8],
    },
}

fn detail<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
    let detail = r.short_bytes()?;
    if detail.len() > DETAIL_BYTES_MAX {
        return Err(Code::TooBig);
    }
    Ok(detail)
}

fn put_detail(w: &mut Writer<'_>, detail: &[u8]) -> Result<(), Code> {
    if detail.len() > DETAIL_BYTES_MAX {
        return Err(Code::TooBig);
    }
    w.short_bytes(detail)
}

fn memory(r: &mut Reader<'_>) -> Result<Memory, Code> {
    Ok(Memory { address: r.u64()?, key: r.u64()? })
}

fn put_memory(w: &mut Writer<'_>, memory: Memory) -> Result<(), Code> {
    w.u64(memory.address)?;
    w.u64(memory.key)
}

/// A data request: the fields that read and write share.
struct Transfer<'a> {
    id: BackingId,
    offset: u64,
    append: bool,
    bytes: u64,
    place: DataLocation<'a>,
}

impl<'a> Transfer<'a> {
    fn check(&self, reads: bool) -> Result<(), Code> {
        let end = self.offset.checked_add(self.bytes).ok_or(Code::Invalid)?;
        if end > FILE_BYTES_MAX {
            return Err(Code::FileTooLarge);
        }
        // A file with one backing file has number 0. A striped file's components have numbers from 1.
        let is_sound = match self.id.piece() {
            Some(_) => !self.append,
            None => usize::from(self.id.number) <= COMPONENTS_MAX && self.id.stripe < STRIPES_MAX,
        };
        if !is_sound || self.bytes == 0 || (reads && self.append) {
            return Err(Code::Invalid);
        }
        match self.place {
            DataLocation::Inline(_) if self.bytes > INLINE_BYTES_MAX as u64 => Err(Code::TooBig),
            DataLocation::Inline(data) if reads && !data.is_empty() => Err(Code::Malformed),
            DataLocation::Inline(data) if !reads && data.len() as u64 != self.bytes => Err(Code::Malformed),
            DataLocation::Remote(_) if self.bytes > DATA_BYTES_MAX => Err(Code::TooBig),
            DataLocation::Eager { .. } if reads || self.append => Err(Code::Invalid),
            DataLocation::Eager { .. } if self.bytes > DATA_BYTES_MAX => Err(Code::TooBig),
            DataLocation::Remote(memory) | DataLocation::Eager { memory, .. }
                if memory.address.checked_add(self.bytes).is_none() =>
            {
                Err(Code::Invalid)
            }
            _ => Ok(()),
        }
    }

    fn encode(&self, w: &mut Writer<'_>, reads: bool) -> Result<(), Code> {
        self.check(reads)?;
        w.u32(self.id.target)?;
        w.u64(self.id.ino.0)?;
        w.u8(self.id.number)?;
        let place = match self.place {
            DataLocation::Inline(_) => 0,
            DataLocation::Remote(_) => 1,
            DataLocation::Eager { .. } => 4,
        };
        w.u8(place | u8::from(self.append) << 1)?;
        w.u16(self.id.stripe)?;
        w.u64(self.offset)?;
        w.u64(self.bytes)?;
        match self.place {
            DataLocation::Inline(data) => w.put(data),
            DataLocation::Remote(memory) => put_memory(w, memory),
            DataLocation::Eager { memory, grant, buffer, generation } => {
                put_memory(w, memory)?;
                w.u32(grant)?;
                w.u16(buffer)?;
                w.u32(generation)
            }
        }
    }

    fn decode(r: &mut Reader<'a>, reads: bool) -> Result<Transfer<'a>, Code> {
        let (target, ino, number, how) = (r.u32()?, Ino(r.u64()?), r.u8()?, r.u8()?);
        let id = BackingId { target, ino, number, stripe: r.u16()? };
        let (offset, bytes) = (r.u64()?, r.u64()?);
        let (append, place) = (how & 2 != 0, how & !2);
        let place = match place {
            0 => DataLocation::Inline(r.take(r.rest().len())?),
            1 => DataLocation::Remote(memory(r)?),
            4 => DataLocation::Eager {
                memory: memory(r)?,
                grant: r.u32()?,
                buffer: r.u16()?,
                generation: r.u32()?,
            },
            _ => return Err(Code::Malformed),
        };
        let transfer = Transfer { id, offset, append, bytes, place };
        transfer.check(reads)?;
        Ok(transfer)
    }
}

impl<'a> Message<'a> {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Finish => Kind::Finish,
            Message::Ask(..) => Kind::Ask,
            Message::Answer(_) => Kind::Answer,
            Message::ReadStripe { .. } => Kind::ReadStripe,
            Message::WriteStripe { .. } => Kind::WriteStripe,
            Message::TakeEagerBuffers { .. } => Kind::TakeEagerBuffers,
            Message::GrantEagerBuffers { .. } => Kind::GrantEagerBuffers,
            Message::Heartbeat { .. } => Kind::Heartbeat,
            Message::Alive { .. } => Kind::Alive,
            Message::Goodbye { .. } => Kind::Goodbye,
            Message::Failure { .. } => Kind::Failure,
        }
    }

    /// Bytes that suffice for the body of nearly every message.
    fn guess(&self) -> usize {
        const FIXED: usize = 512;
        match self {
            Message::WriteStripe { from: DataLocation::Inline(data), .. } => FIXED + data.len(),
            Message::Answer(Ok(Reply::Bytes(bytes))) => FIXED + bytes.len(),
            Message::Answer(Ok(Reply::Entries(entries))) => FIXED + entries.bytes.len(),
            Message::Ask(_, Request::SetXattr { value, .. }) => FIXED + NAME_MAX + value.len(),
            Message::Ask(..) => FIXED + 2 * NAME_MAX,
            _ => FIXED,
        }
    }

    /// Encodes the body into `out` and replaces its contents.
    ///
    /// # Errors
    /// [`Code::TooBig`] and the errors of [`Message::decode`], so that no message is sent that cannot be decoded.
    pub fn encode_to(&self, out: &mut Vec<u8>) -> Result<(), Code> {
        for room in [self.guess().min(BODY_BYTES_MAX), BODY_BYTES_MAX] {
            out.resize(room, 0);
            match self.encode(out) {
                Ok(n) => {
                    out.truncate(n);
                    return Ok(());
                }
                Err(Code::TooBig) if room < BODY_BYTES_MAX => {}
                Err(code) => {
                    out.clear();
                    return Err(code);
                }
            }
        }
        unreachable!("the last room is BODY_BYTES_MAX")
    }

    /// Encodes the body into `buffer`. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`Message::encode_to`].
    pub fn encode(&self, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        match *self {
            Message::Finish => {}
            Message::Ask(caller, ref request) => return request.encode(caller, buffer),
            Message::Answer(ref answer) => return Reply::encode_answer(answer, buffer),
            Message::ReadStripe { id, offset, bytes, to } => {
                Transfer { id, offset, append: false, bytes, place: to }.encode(&mut w, true)?;
            }
            Message::WriteStripe { id, offset, append, bytes, from } => {
                Transfer { id, offset, append, bytes, place: from }.encode(&mut w, false)?;
            }
            Message::TakeEagerBuffers { grant } => w.u32(grant)?,
            Message::GrantEagerBuffers { memory, buffers, bytes } => {
                put_memory(&mut w, memory)?;
                w.u16(buffers)?;
                w.u32(bytes)?;
            }
            Message::Heartbeat { clock_us } => w.u64(clock_us)?,
            Message::Alive { echo_us, clock_us } => {
                w.u64(echo_us)?;
                w.u64(clock_us)?;
            }
            Message::Goodbye { detail } => put_detail(&mut w, detail)?,
            Message::Failure { code, detail } => {
                w.u16(code as u16)?;
                put_detail(&mut w, detail)?;
            }
        }
        Ok(w.len())
    }

    /// Decodes and checks a body. The error is the code to answer the requester with.
    ///
    /// # Errors
    /// [`Code::Malformed`] for anything that Forebay does not send, otherwise the code of the exceeded limit.
    pub fn decode(kind: Kind, body: &'a [u8]) -> Result<Message<'a>, Code> {
        if body.len() > BODY_BYTES_MAX {
            return Err(Code::TooBig);
        }
        let mut r = Reader::new(body);
        let message = match kind {
            Kind::Hello | Kind::Welcome | Kind::Refuse => return Err(Code::Malformed),
            Kind::Ask => {
                let (caller, request) = Request::decode(body)?;
                return Ok(Message::Ask(caller, request));
            }
            Kind::Answer => {
                let (code, zero) = (r.u16()?, r.u16()?);
                // `Code::Wide` is the one refusal that carries data.
                if code != 0 && !(code == Code::Wide as u16 && zero != 0) {
                    let sound = zero == 0 && r.rest().is_empty();
                    return if sound {
                        Ok(Message::Answer(Err(Code::from_u16(code).into())))
                    } else {
                        Err(Code::Malformed)
                    };
                }
                let answer = match Reply::decode_answer(body) {
                    // Entries are decoded lazily. Those from another node are all checked here.
                    Ok(Reply::Entries(entries)) if entries.iter().any(|e| e.is_err()) => {
                        return Err(Code::Malformed)
                    }
                    Err(Refusal::Code(_)) => return Err(Code::Malformed),
                    answer => answer,
                };
                return Ok(Message::Answer(answer));
            }
            Kind::Finish => Message::Finish,
            Kind::ReadStripe => {
                let t = Transfer::decode(&mut r, true)?;
                Message::ReadStripe { id: t.id, offset: t.offset, bytes: t.bytes, to: t.place }
            }
            Kind::WriteStripe => {
                let t = Transfer::decode(&mut r, false)?;
                Message::WriteStripe {
                    id: t.id,
                    offset: t.offset,
                    append: t.append,
                    bytes: t.bytes,
                    from: t.place,
                }
            }
            Kind::TakeEagerBuffers => Message::TakeEagerBuffers { grant: r.u32()? },
            Kind::GrantEagerBuffers => {
                let (memory, buffers, bytes) = (memory(&mut r)?, r.u16()?, r.u32()?);
                let all = u64::from(buffers) * u64::from(bytes);
                if all == 0 || memory.address.checked_add(all).is_none() {
                    return Err(Code::Malformed);
                }
                Message::GrantEagerBuffers { memory, buffers, bytes }
            }
            Kind::Heartbeat => Message::Heartbeat { clock_us: r.u64()? },
            Kind::Alive => Message::Alive { echo_us: r.u64()?, clock_us: r.u64()? },
            Kind::Goodbye => Message::Goodbye { detail: detail(&mut r)? },
            Kind::Failure => {
                let code = r.u16()?;
                Message::Failure { code: Code::from_u16(code), detail: detail(&mut r)? }
            }
        };
        if r.rest().is_empty() {
            Ok(message)
        } else {
            Err(Code::Malformed)
        }
    }
}
