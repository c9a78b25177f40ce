//! The pool's secret, and the keys made from it.

use std::fmt;

use forebay_types::Code;

/// Bytes of a pool's secret.
pub const SECRET_BYTES: usize = 32;

/// The secret that all nodes of a pool share, and no other host has. Keys for each use are derived from it, so that a
/// MAC of one kind of frame is not valid for another kind. Its `Debug` output shows no bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    hello: [u8; 32],
    welcome: [u8; 32],
    session: [u8; 32],
    pool: [u8; 16],
}

impl Secret {
    /// Derives the keys from the pool's 32 random bytes.
    ///
    /// # Errors
    /// [`Code::Invalid`] for another length, and for bytes that are all equal, as in a file that was never filled.
    pub fn new(bytes: &[u8]) -> Result<Secret, Code> {
        if bytes.len() != SECRET_BYTES || bytes.iter().all(|b| *b == bytes[0]) {
            return Err(Code::Invalid);
        }
        let derive = |context| blake3::derive_key(context, bytes);
        Ok(Secret {
            hello: derive("forebay wire 1 hello"),
            welcome: derive("forebay wire 1 welcome"),
            session: derive("forebay wire 1 session"),
            pool: *derive("forebay wire 1 pool").first_chunk().unwrap_or(&[0; 16]),
        })
    }

    /// The pool's ID, which its nodes send to each other. It is derived from the secret and does not reveal it.
    pub fn pool(&self) -> [u8; 16] {
        self.pool
    }

    pub(crate) fn hello(&self) -> &[u8; 32] {
        &self.hello
    }

    pub(crate) fn welcome(&self) -> &[u8; 32] {
        &self.welcome
    }

    /// The key for one direction of the session that these two frames begin.
    pub(crate) fn session(&self, hello: &[u8], welcome: &[u8], direction: u8) -> [u8; 32] {
        let mut h = blake3::Hasher::new_keyed(&self.session);
        h.update(&[direction]);
        h.update(blake3::hash(hello).as_bytes());
        h.update(blake3::hash(welcome).as_bytes());
        *h.finalize().as_bytes()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_of_wrong_length_or_all_alike_is_refused() {
        assert_eq!(Secret::new(&[1; 31]).err(), Some(Code::Invalid));
        assert_eq!(Secret::new(&[]).err(), Some(Code::Invalid));
        assert_eq!(Secret::new(&[7; 32]).err(), Some(Code::Invalid));
        let bytes: Vec<u8> = (0..32).collect();
        assert!(Secret::new(&bytes).is_ok());
        assert_eq!(format!("{:?}", Secret::new(&bytes).unwrap()), "Secret(..)");
    }
}
