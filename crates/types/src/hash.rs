//! Name hashes and directory cookies.
//!
//! An entry's position in its directory is its *cookie*: 56 bits of the name's hash, then a 7-bit discriminator chosen
//! at create among names of equal hash. One order serves readdir, seekdir, FUSE and wide directories, which distribute
//! their entries over nodes by the top bits of the hash. Cookies are 1 to 2^63 - 1: 0 means "from the start" and the
//! sign bit of `off_t` stays clear.

use xxhash_rust::xxh3::xxh3_64;

/// A position in a directory. `readdir` after cookie `c` yields entries with a greater cookie.
pub type Cookie = u64;

/// Bits of the hash within a cookie.
pub const HASH_BITS: u32 = 56;
/// Bits of the discriminator within a cookie: at most 128 names of one directory may share a hash.
pub const DISCRIMINATOR_BITS: u32 = 7;
/// The greatest possible cookie.
pub const COOKIE_MAX: Cookie = (1 << (HASH_BITS + DISCRIMINATOR_BITS)) - 1;

/// The 56-bit hash of a name: 1 to 2^56 - 1. A hash of 0 becomes 1, so that no cookie is 0.
pub fn name_hash(name: &[u8]) -> u64 {
    let hash = xxh3_64(name) >> (64 - HASH_BITS);
    hash.max(1)
}

/// The cookie's hash bits.
pub fn cookie_hash(cookie: Cookie) -> u64 {
    cookie >> DISCRIMINATOR_BITS
}
