//! The numbers of versions belong to the requests that they stand for.

use forebay_ring::MAGIC;
use forebay_wire::{PROTOCOL_MAX, PROTOCOL_MIN};

/// The digit of what programs and their daemon send one another, the newest protocol between nodes and the oldest that this
/// version supports, and the hash of the requests' bytes.
const VERSIONS: (u8, u16, u16, u64) = (b'A', 5, 5, 0xa825_a787_f2bc_453b);

/// A change of the requests' bytes needs new numbers, unless no version with the present ones is in use. Then, or with the
/// new numbers, the hash is replaced by the one that this prints. Replies, messages between nodes (`wire/src/message.rs`)
/// and requests that are JSON (`server/src/protocol.rs`) need the same, and no test sees it.
#[test]
fn numbers_of_versions_are_those_of_the_requests() {
    let requests = include_bytes!("../../../crates/types/tests/requests.golden");
    // FNV-1a
    let hash = requests.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let found = (MAGIC.to_le_bytes()[3], PROTOCOL_MAX, PROTOCOL_MIN, hash);
    assert_eq!(
        found, VERSIONS,
        "the hash is {hash:#x}: MAGIC of ring/src/attach.rs, PROTOCOL_MAX of wire/src/limits.rs"
    );
}
