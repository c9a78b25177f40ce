//! A request to a mover for a piece of a file that stays in its backing store: the pool has no room for it. It travels in
//! [`crate::Request::AskMover`], as movers' letters do.

use crate::backing_store::{StoreVersion, STORE_VERSION_BYTES};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::Ino;

/// The first byte of an encoded request. Letters between movers are JSON, which never begins with it.
const MARK: u8 = 0;

/// A piece of a file's data, as its store has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreRead {
    /// The file.
    pub ino: Ino,
    /// The version that the store must have. Data of another one are never sent.
    pub version: StoreVersion,
    /// The first byte.
    pub offset: u64,
    /// How many bytes: at most [`crate::limits::STORE_READ_BYTES_MAX`].
    pub bytes: u32,
}

impl StoreRead {
    /// Bytes of an encoded request.
    pub const BYTES: usize = 1 + 8 + STORE_VERSION_BYTES + 8 + 4;

    /// The request as a message to a mover.
    pub fn encode(&self) -> Result<[u8; StoreRead::BYTES], Code> {
        let mut bytes = [0; StoreRead::BYTES];
        let mut w = Writer::new(&mut bytes);
        w.u8(MARK)?;
        w.u64(self.ino.0)?;
        self.version.encode(&mut w)?;
        w.u64(self.offset)?;
        w.u32(self.bytes)?;
        Ok(bytes)
    }

    /// Reads a message to a mover. None for a letter.
    pub fn decode(message: &[u8]) -> Option<Result<StoreRead, Code>> {
        let fields = message.strip_prefix(&[MARK])?;
        let read = || {
            let mut r = Reader::new(fields);
            let read = StoreRead {
                ino: Ino(r.u64()?),
                version: StoreVersion::decode(&mut r)?,
                offset: r.u64()?,
                bytes: r.u32()?,
            };
            let is_valid = r.rest().is_empty()
                && read.bytes as usize <= crate::limits::STORE_READ_BYTES_MAX
                && read.offset.checked_add(u64::from(read.bytes)).is_some();
            if is_valid {
                Ok(read)
            } else {
                Err(Code::Malformed)
            }
        };
        Some(read())
    }

    /// A mover's answer: the bytes, fewer at the end of the file, or why there are none.
    pub fn encode_answer(data: Result<&[u8], Code>) -> Vec<u8> {
        let (code, data) = data.map_or_else(|code| (code as u16, &[][..]), |data| (0, data));
        [&code.to_le_bytes(), data].concat()
    }

    /// Reads a mover's answer.
    pub fn decode_answer(answer: &[u8]) -> Result<&[u8], Code> {
        match answer.split_first_chunk() {
            Some(([0, 0], data)) => Ok(data),
            Some((code, _)) => Err(Code::from_u16(u16::from_le_bytes(*code))),
            None => Err(Code::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_and_answer_survive_encoding_and_letters_are_no_requests() {
        let version = StoreVersion { bytes: 5, ino: 7, tag: 9, ..StoreVersion::default() };
        let read = StoreRead { ino: Ino(3), version, offset: 1 << 40, bytes: 4096 };
        let encoded = read.encode().unwrap();
        assert_eq!(StoreRead::decode(&encoded), Some(Ok(read)));
        assert_eq!(StoreRead::decode(&encoded[..20]), Some(Err(Code::Malformed)));
        assert_eq!(StoreRead::decode(b"{\"IsFull\":null}"), None);
        assert_eq!(StoreRead::decode(b"\"IsFull\""), None);
        assert_eq!(StoreRead::decode(b""), None);
        for bad in [StoreRead { bytes: u32::MAX, ..read }, StoreRead { offset: u64::MAX, ..read }] {
            assert_eq!(StoreRead::decode(&bad.encode().unwrap()), Some(Err(Code::Malformed)));
        }
        assert_eq!(StoreRead::decode_answer(&StoreRead::encode_answer(Ok(b"data"))), Ok(&b"data"[..]));
        assert_eq!(StoreRead::decode_answer(&StoreRead::encode_answer(Ok(b""))), Ok(&b""[..]));
        assert_eq!(StoreRead::decode_answer(&StoreRead::encode_answer(Err(Code::Stale))), Err(Code::Stale));
        assert_eq!(StoreRead::decode_answer(b"1"), Err(Code::Malformed));
    }
}
