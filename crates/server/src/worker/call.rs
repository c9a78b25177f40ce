//! Calls: a request with the address of its reply. A request is parsed once, on arrival, and travels by value to the
//! stage that executes or forwards it.

use std::sync::Arc;

use forebay_meta::Client;
use forebay_types::{Caller, Code, Request};
use forebay_wire::Stamp;
use self_cell::self_cell;

type Parsed<'a> = (Caller, Request<'a>);

self_cell!(
    /// An encoded request and its parsed form.
    struct Message {
        owner: Vec<u8>,
        #[covariant]
        dependent: Parsed,
    }

    impl {Debug}
);

/// A request of a client, or of another node's daemon. Clones share the message.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// The address of the reply: session, slot and sequence.
    pub(super) client: Client,
    message: Arc<Message>,
}

impl Call {
    /// Parses a request.
    ///
    /// # Errors
    /// [`Code::Malformed`] and the others of [`Request::decode`].
    pub(super) fn parse(client: Client, bytes: Vec<u8>) -> Result<Call, Code> {
        let message = Message::try_new(bytes, |bytes| Request::decode(bytes))?;
        Ok(Call { client, message: Arc::new(message) })
    }

    /// Encodes a request that this daemon executes in place of a client's request.
    pub(super) fn encode(client: Client, caller: Caller, request: &Request<'_>) -> Result<Call, Code> {
        let mut bytes = Vec::new();
        for room in [256, forebay_types::limits::MESSAGE_BYTES_MAX] {
            bytes.resize(room, 0);
            match request.encode(caller, &mut bytes) {
                Ok(len) => {
                    bytes.truncate(len);
                    return Call::parse(client, bytes);
                }
                Err(Code::TooBig) => {}
                Err(code) => return Err(code),
            }
        }
        Err(Code::TooBig)
    }

    /// The user whose permissions are checked.
    pub(super) fn caller(&self) -> Caller {
        self.message.borrow_dependent().0
    }

    /// The request.
    pub(super) fn request(&self) -> &Request<'_> {
        &self.message.borrow_dependent().1
    }

    /// The request as its sender encoded it, for the journal and for other nodes.
    pub(super) fn bytes(&self) -> &[u8] {
        self.message.borrow_owner()
    }

    /// Its stamp on the wire.
    pub(super) fn stamp(&self) -> Stamp {
        let Client { session, slot, seq } = self.client;
        Stamp { session, slot: slot as u16, sequence: seq }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    const CLIENT: Client = Client { session: 7, slot: 3, seq: 9 };
    const CALLER: Caller = Caller { uid: 5, gid: 6 };

    #[test]
    fn call_of_any_length_says_what_was_encoded() {
        for name in [b"n".as_slice(), &[b'n'; 255]] {
            for value in [0, 1, 1000, 60_000] {
                let value = vec![1; value];
                let request = Request::SetXattr { ino: Ino(4), name, value: &value, flags: 0 };
                let call = Call::encode(CLIENT, CALLER, &request).unwrap();
                assert_eq!((call.client, call.caller(), call.request()), (CLIENT, CALLER, &request));
                let again = Call::parse(CLIENT, call.bytes().to_vec()).unwrap();
                assert_eq!(again.request(), call.request());
            }
        }
        assert!(Call::parse(CLIENT, vec![0xff; 9]).is_err());
    }
}
