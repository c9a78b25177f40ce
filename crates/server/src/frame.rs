//! JSON messages on the pool's two unix sockets: the header that attach messages have (forebay-ring) with kind
//! "control", then the text. Every length is checked before it is used.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forebay_ring::{Header, HEADER_BYTES, KIND_CONTROL, KIND_ERROR};
use forebay_types::{Code, Error, Result};
use serde::{de::DeserializeOwned, Serialize};

/// Maximum bytes of one JSON message: enough for a check report with many findings.
const JSON_BYTES_MAX: usize = 16 << 20;

/// The bytes of one message.
pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    let text =
        serde_json::to_vec(value).map_err(|e| Error::new(Code::Io, "cannot write a message").why(e))?;
    let header = Header { kind: KIND_CONTROL, len: text.len() as u32 };
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(&text);
    Ok(bytes)
}

/// Removes the first whole message from `buffer` and returns it; none while bytes are missing.
pub(crate) fn take<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> Result<Option<T>> {
    let Some(header) = buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let len = checked_len(header)?;
    if buffer.len() < HEADER_BYTES + len {
        return Ok(None);
    }
    let value = parse(&buffer[HEADER_BYTES..HEADER_BYTES + len])?;
    buffer.drain(..HEADER_BYTES + len);
    Ok(Some(value))
}

fn checked_len(bytes: &[u8; HEADER_BYTES]) -> Result<usize> {
    let strange = |code| {
        let e = Error::new(code, "cannot understand a message");
        match code {
            Code::NotSupported => e
                .why("command and daemon are of different versions of Forebay")
                .cure("stop the pool with the Forebay that started it"),
            _ => e.why("it is not one of Forebay's"),
        }
    };
    let header = Header::decode(bytes).map_err(strange)?;
    if header.kind != KIND_CONTROL || header.len as usize > JSON_BYTES_MAX {
        return Err(strange(Code::Malformed));
    }
    Ok(header.len as usize)
}

fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|e| {
        Error::new(Code::Malformed, "cannot understand a message")
            .why(e)
            .cure("command and daemon must be of one version: stop the pool with the Forebay that started it")
    })
}

/// Sends `value` and waits for the answer. `timeout` bounds each read and write; with none they wait without limit.
pub(crate) fn ask<T: DeserializeOwned>(
    stream: &mut UnixStream,
    value: &impl Serialize,
    timeout: Option<Duration>,
) -> Result<T> {
    send(stream, value, timeout)?;
    receive(stream)
}

/// Sends `value`. `timeout` bounds each write, and each read of [`receive`].
pub(crate) fn send(stream: &mut UnixStream, value: &impl Serialize, timeout: Option<Duration>) -> Result<()> {
    stream
        .set_read_timeout(timeout)
        .and_then(|()| stream.set_write_timeout(timeout))
        .map_err(|e| Error::io("cannot set a time limit", &e))?;
    stream.write_all(&encode(value)?).map_err(gone)
}

/// Why an exchange has failed.
pub(crate) fn gone(e: std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            Error::new(Code::TimedOut, "cannot ask the pool's daemon").why("it does not answer")
        }
        std::io::ErrorKind::UnexpectedEof
        | std::io::ErrorKind::BrokenPipe
        | std::io::ErrorKind::ConnectionReset => {
            Error::new(Code::PoolGone, "cannot ask the pool's daemon").why("it ended")
        }
        _ => Error::io("cannot ask the pool's daemon", &e),
    }
}

/// Waits for the answer to what was sent.
pub(crate) fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> Result<T> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).map_err(gone)?;
    if let Ok(Header { kind: KIND_ERROR, len }) = Header::decode(&header) {
        let mut body = vec![0; (len as usize).min(JSON_BYTES_MAX)];
        stream.read_exact(&mut body).map_err(gone)?;
        let code = body.first_chunk().map_or(Code::Malformed, |b| Code::from_u16(u16::from_le_bytes(*b)));
        let why = String::from_utf8_lossy(body.get(2..).unwrap_or_default()).into_owned();
        return Err(Error::new(code, "the pool's daemon refused").why(why));
    }
    let mut body = vec![0; checked_len(&header)?];
    stream.read_exact(&mut body).map_err(gone)?;
    parse(&body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take_waits_for_a_whole_message_and_leaves_the_rest() {
        let mut all = encode(&"first").unwrap();
        all.extend(encode(&"second").unwrap());
        let mut buffer = Vec::new();
        let mut seen: Vec<String> = Vec::new();
        for byte in all {
            buffer.push(byte);
            while let Some(s) = take(&mut buffer).unwrap() {
                seen.push(s);
            }
        }
        assert_eq!(seen, ["first", "second"]);
        assert!(buffer.is_empty());
    }

    #[test]
    fn take_of_what_is_not_ours_or_too_long_or_of_another_version_is_refused() {
        let mut http = b"GET / HTTP/1.1\r\n".to_vec();
        assert_eq!(take::<String>(&mut http).unwrap_err().code, Code::Malformed);
        let mut other_version = encode(&"text").unwrap();
        other_version[3] -= 1;
        let e = take::<String>(&mut other_version).unwrap_err();
        assert!(e.code == Code::NotSupported && e.why.contains("different versions"), "{e}");
        let mut long = Header { kind: KIND_CONTROL, len: u32::MAX }.encode().to_vec();
        assert_eq!(take::<String>(&mut long).unwrap_err().code, Code::Malformed);
        let mut not_json = Header { kind: KIND_CONTROL, len: 1 }.encode().to_vec();
        not_json.push(b'{');
        assert_eq!(take::<String>(&mut not_json).unwrap_err().code, Code::Malformed);
    }
}
