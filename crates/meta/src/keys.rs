//! Keys of the shard's one LMDB database: a tag byte, then numbers in big-endian order, so that LMDB's byte order is
//! the order in which the shard walks them. docs/disk-format.md lists them.
//!
//! The order of tags matters. The records that nearly every transaction writes (ledger, kept replies, orphans) come
//! first, so that they share one leaf page. Pieces of values, two of which may fill a page, come last: the pieces of a
//! new inode, whose number is greater than all before it, are then appended. If they were inserted before other
//! records, LMDB would split each full page in the middle and leave it half empty. Small records fill their pages well
//! in either order.

use forebay_types::limits::{NAME_MAX, XATTR_NAME_MAX};
use forebay_types::{Cookie, Ino, NodeId, TxId, DISCRIMINATOR_BITS};

/// Format version and node number.
pub(crate) const FORMAT: &[u8] = &[1];
/// Counters and pending directory attributes.
pub(crate) const LEDGER: &[u8] = &[2];
const SESSION: u8 = 3;
const REPLY: u8 = 4;
const ORPHAN: u8 = 5;
/// Records that concern other nodes: rare, and of several kinds.
const FOREIGN: u8 = 6;
const LINK: u8 = 1;
const PREPARED: u8 = 2;
const DECISION: u8 = 3;
const OWED: u8 = 4;
/// Records that concern backing stores, in the same range of keys: a pool without a store has none.
const PLACE: u8 = 5;
const COPY: u8 = 6;
const PENDING: u8 = 7;
const FURTHER: u8 = 8;
/// Volumes, by name: records of the root's home.
const VOLUME: u8 = 9;
const LINKED_FILE: u8 = 10;
const ENTRY: u8 = 7;
const INODE: u8 = 8;
const VALUE: u8 = 9;

/// Bytes of a numbered key: tag and number.
pub(crate) type NumberKey = [u8; 9];
/// Bytes of an entry's key: tag, parent, cookie.
pub(crate) type EntryKey = [u8; 17];
/// Bytes of the key of a record that concerns other nodes: tag, kind, two numbers.
pub(crate) type ForeignKey = [u8; 18];
/// Bytes of a kept reply's key: tag, session, slot.
pub(crate) type ReplyKey = [u8; 10];
/// Bytes of the longest key of a piece of a value: tag, inode, name, NUL, piece.
pub(crate) const VALUE_KEY_BYTES: usize = 9 + XATTR_NAME_MAX + 3;

/// A decoded key, for the check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Key<'a> {
    Format,
    Ledger,
    Session(u64),
    Reply(u64, u8),
    Orphan(Ino),
    Value(Ino, &'a [u8], u16),
    /// A link from an entry on another node.
    Link(Ino, TxId),
    /// A prepared part.
    Prepared(TxId, u8),
    /// A node that has not acknowledged a decision.
    Decision(TxId, NodeId),
    /// A debt: a notification that another node's inode is owed.
    Owed(Ino, TxId),
    /// What a backing store has at a place: a directory and a name.
    Place(Ino, &'a [u8]),
    /// The place of an inode's copy in its backing store.
    Copy(Ino),
    /// A place at which a backing store may differ.
    Pending(Ino, &'a [u8]),
    /// A further place of an inode: inode, directory and name.
    Further(Ino, Ino, &'a [u8]),
    /// A volume: its name.
    Volume(&'a [u8]),
    /// A file of a backing store with several names: the directory with the store, and the file's number there.
    LinkedFile(Ino, u64),
    Entry(Ino, Cookie),
    Inode(Ino),
}

fn numbered(tag: u8, number: u64) -> NumberKey {
    let mut key = [tag; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// The key of a session.
pub(crate) fn session(session: u64) -> NumberKey {
    numbered(SESSION, session)
}

/// The key of the reply kept for a session's slot.
pub(crate) fn reply(session: u64, slot: u8) -> ReplyKey {
    let mut key = [slot; 10];
    key[..9].copy_from_slice(&numbered(REPLY, session));
    key
}

/// The key of an inode without links whose backing files still exist.
pub(crate) fn orphan(ino: Ino) -> NumberKey {
    numbered(ORPHAN, ino.0)
}

/// The key of a record that concerns other nodes: two numbers behind its kind.
fn foreign(kind: u8, a: u64, b: u64) -> ForeignKey {
    let mut key = [FOREIGN; 18];
    key[1] = kind;
    key[2..10].copy_from_slice(&a.to_be_bytes());
    key[10..].copy_from_slice(&b.to_be_bytes());
    key
}

/// The key of a link from an entry on another node to an inode.
pub(crate) fn link(ino: Ino, link: TxId) -> ForeignKey {
    foreign(LINK, ino.0, link.0)
}

/// The key of a prepared part of a transaction.
pub(crate) fn prepared(tx: TxId, index: u8) -> ForeignKey {
    foreign(PREPARED, tx.0, u64::from(index))
}

/// The key of a node that has not acknowledged that a transaction was committed.
pub(crate) fn decision(tx: TxId, node: NodeId) -> ForeignKey {
    foreign(DECISION, tx.0, u64::from(node.0))
}

/// The key of a debt to another node's inode.
pub(crate) fn owed(ino: Ino, link: TxId) -> ForeignKey {
    foreign(OWED, ino.0, link.0)
}

/// First and last keys of a transaction's parts.
pub(crate) fn parts_of(tx: TxId) -> (ForeignKey, ForeignKey) {
    (prepared(tx, 0), prepared(tx, u8::MAX))
}

/// First and last keys of a transaction's decision.
pub(crate) fn decisions_of(tx: TxId) -> (ForeignKey, ForeignKey) {
    (foreign(DECISION, tx.0, 0), foreign(DECISION, tx.0, u64::MAX))
}

/// First and last keys of all prepared parts.
pub(crate) fn all_prepared() -> (ForeignKey, ForeignKey) {
    (foreign(PREPARED, 0, 0), foreign(PREPARED, u64::MAX, u64::MAX))
}

/// First and last keys of everything that other nodes have not acknowledged: decisions and debts.
pub(crate) fn all_unsettled() -> (ForeignKey, ForeignKey) {
    (foreign(DECISION, 0, 0), foreign(OWED, u64::MAX, u64::MAX))
}

/// The key of an inode.
pub(crate) fn inode(ino: Ino) -> NumberKey {
    numbered(INODE, ino.0)
}

/// The key of the entry at `cookie` in a directory.
pub(crate) fn entry(parent: Ino, cookie: Cookie) -> EntryKey {
    let mut key = [ENTRY; 17];
    key[1..9].copy_from_slice(&parent.0.to_be_bytes());
    key[9..].copy_from_slice(&cookie.to_be_bytes());
    key
}

/// First and last keys of all entries of a directory whose names have this hash.
pub(crate) fn entries_of_hash(parent: Ino, hash: u64) -> (EntryKey, EntryKey) {
    let first = hash << DISCRIMINATOR_BITS;
    (entry(parent, first), entry(parent, first | ((1 << DISCRIMINATOR_BITS) - 1)))
}

/// A key of a piece of a value, built without allocation.
pub(crate) struct ValueKey {
    bytes: [u8; VALUE_KEY_BYTES],
    len: usize,
}

impl ValueKey {
    /// Piece 0 of the value `name` of an inode. An extended attribute; with the empty name a symlink's target or a wide
    /// directory's parts.
    pub(crate) fn new(ino: Ino, name: &[u8]) -> ValueKey {
        let mut bytes = [0; VALUE_KEY_BYTES];
        bytes[..9].copy_from_slice(&numbered(VALUE, ino.0));
        bytes[9..9 + name.len()].copy_from_slice(name);
        ValueKey { bytes, len: 9 + name.len() + 3 }
    }

    /// Changes it to the key of another piece.
    pub(crate) fn set_piece(&mut self, piece: u16) {
        self.bytes[self.len - 2..self.len].copy_from_slice(&piece.to_be_bytes());
    }

    /// The key.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A key of a place: tag, kind, directory, name.
pub(crate) struct PlaceKey {
    bytes: [u8; PLACE_KEY_BYTES],
    len: usize,
}

/// Bytes of the longest key of a place: tag, kind, inode, directory, name.
const PLACE_KEY_BYTES: usize = 18 + NAME_MAX;

impl PlaceKey {
    fn new(kind: u8, parent: Ino, name: &[u8]) -> PlaceKey {
        let mut bytes = [0; PLACE_KEY_BYTES];
        (bytes[0], bytes[1]) = (FOREIGN, kind);
        bytes[2..10].copy_from_slice(&parent.0.to_be_bytes());
        let len = name.len().min(NAME_MAX);
        bytes[10..10 + len].copy_from_slice(&name[..len]);
        PlaceKey { bytes, len: 10 + len }
    }

    /// The key.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The key of what a backing store has at a place.
pub(crate) fn place(parent: Ino, name: &[u8]) -> PlaceKey {
    PlaceKey::new(PLACE, parent, name)
}

/// The key of a place at which a backing store may differ.
pub(crate) fn pending(parent: Ino, name: &[u8]) -> PlaceKey {
    PlaceKey::new(PENDING, parent, name)
}

/// The keys between which the pending places in a directory are.
pub(crate) fn pending_in(directory: Ino) -> (PlaceKey, PlaceKey) {
    (pending(directory, b""), pending(Ino(directory.0 + 1), b""))
}

/// A key behind all pending places.
pub(crate) fn last_pending() -> [u8; 2] {
    [FOREIGN, PENDING + 1]
}

/// The key of a further place of an inode.
pub(crate) fn further(ino: Ino, parent: Ino, name: &[u8]) -> PlaceKey {
    let mut bytes = [0; PLACE_KEY_BYTES];
    (bytes[0], bytes[1]) = (FOREIGN, FURTHER);
    bytes[2..10].copy_from_slice(&ino.0.to_be_bytes());
    bytes[10..18].copy_from_slice(&parent.0.to_be_bytes());
    let len = name.len().min(NAME_MAX);
    bytes[18..18 + len].copy_from_slice(&name[..len]);
    PlaceKey { bytes, len: 18 + len }
}

/// The key behind all further places of an inode.
pub(crate) fn last_further(ino: Ino) -> PlaceKey {
    further(Ino(ino.0 + 1), Ino(0), b"")
}

/// The key of a volume.
pub(crate) fn volume(name: &[u8]) -> PlaceKey {
    PlaceKey::new(VOLUME, Ino(0), name)
}

/// First and last possible keys of all volumes.
pub(crate) fn all_volumes() -> (PlaceKeyEnd, PlaceKeyEnd) {
    ([FOREIGN, VOLUME], [FOREIGN, VOLUME + 1])
}

/// A key in front of, or behind, all places of a kind.
type PlaceKeyEnd = [u8; 2];

/// First and last keys of what the store has in a directory.
pub(crate) fn places_in(directory: Ino) -> (PlaceKey, PlaceKey) {
    (place(directory, b""), place(Ino(directory.0 + 1), b""))
}

/// The key of the place of an inode's copy.
pub(crate) fn copy(ino: Ino) -> [u8; 10] {
    let mut key = [FOREIGN; 10];
    key[1] = COPY;
    key[2..].copy_from_slice(&ino.0.to_be_bytes());
    key
}

/// First and last keys of all copies.
pub(crate) fn all_copies() -> ([u8; 10], [u8; 10]) {
    (copy(Ino(0)), copy(Ino(u64::MAX)))
}

/// The key of a file of a backing store that has several names.
pub(crate) fn linked_file(root: Ino, number: u64) -> ForeignKey {
    foreign(LINKED_FILE, root.0, number)
}

/// First and last keys of all such files.
pub(crate) fn all_linked_files() -> (ForeignKey, ForeignKey) {
    (foreign(LINKED_FILE, 0, 0), foreign(LINKED_FILE, u64::MAX, u64::MAX))
}

/// First key of all values, and the one behind their last.
pub(crate) fn all_values() -> ([u8; 1], [u8; 1]) {
    ([VALUE], [VALUE + 1])
}

/// First and last possible keys of an inode's values.
pub(crate) fn values_of(ino: Ino) -> (NumberKey, [u8; 10]) {
    let mut last = [0xff; 10];
    last[..9].copy_from_slice(&numbered(VALUE, ino.0));
    (numbered(VALUE, ino.0), last)
}

/// First and last keys of all kept replies of a session.
pub(crate) fn replies_of(session: u64) -> (ReplyKey, ReplyKey) {
    (reply(session, 0), reply(session, u8::MAX))
}

/// First and last keys of all sessions.
pub(crate) fn all_sessions() -> (NumberKey, NumberKey) {
    (numbered(SESSION, 0), numbered(SESSION, u64::MAX))
}

/// First and last keys of all orphans.
pub(crate) fn all_orphans() -> (NumberKey, NumberKey) {
    (numbered(ORPHAN, 0), numbered(ORPHAN, u64::MAX))
}

fn be(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// Decodes a key; none for bytes that are no key of this format.
pub(crate) fn decode(key: &[u8]) -> Option<Key<'_>> {
    let (&tag, rest) = key.split_first()?;
    Some(match tag {
        1 if rest.is_empty() => Key::Format,
        2 if rest.is_empty() => Key::Ledger,
        SESSION => Key::Session(be(rest)?),
        REPLY if rest.len() == 9 => Key::Reply(be(&rest[..8])?, rest[8]),
        ORPHAN => Key::Orphan(Ino(be(rest)?)),
        VALUE if rest.len() >= 11 => {
            let (name, tail) = rest[8..].split_at(rest.len() - 11);
            if tail[0] != 0 || name.contains(&0) || name.len() > XATTR_NAME_MAX {
                return None;
            }
            Key::Value(Ino(be(&rest[..8])?), name, u16::from_be_bytes([tail[1], tail[2]]))
        }
        FOREIGN if rest.len() >= 9 && matches!(rest[0], PLACE | COPY | PENDING) => {
            let (ino, name) = (Ino(be(&rest[1..9])?), &rest[9..]);
            match rest[0] {
                COPY if name.is_empty() => Key::Copy(ino),
                PLACE if (1..=NAME_MAX).contains(&name.len()) => Key::Place(ino, name),
                PENDING if (1..=NAME_MAX).contains(&name.len()) => Key::Pending(ino, name),
                _ => return None,
            }
        }
        FOREIGN if rest.len() > 9 && rest[0] == VOLUME => {
            let (zero, name) = (be(&rest[1..9])?, &rest[9..]);
            (zero == 0 && name.len() <= NAME_MAX).then_some(Key::Volume(name))?
        }
        FOREIGN if rest.len() > 17 && rest[0] == FURTHER => {
            let (ino, parent, name) = (Ino(be(&rest[1..9])?), Ino(be(&rest[9..17])?), &rest[17..]);
            (name.len() <= NAME_MAX).then_some(Key::Further(ino, parent, name))?
        }
        FOREIGN if rest.len() == 17 => {
            let (a, b) = (be(&rest[1..9])?, be(&rest[9..])?);
            match rest[0] {
                LINK => Key::Link(Ino(a), TxId(b)),
                PREPARED => Key::Prepared(TxId(a), u8::try_from(b).ok()?),
                DECISION => Key::Decision(TxId(a), NodeId(u16::try_from(b).ok()?)),
                OWED => Key::Owed(Ino(a), TxId(b)),
                LINKED_FILE => Key::LinkedFile(Ino(a), b),
                _ => return None,
            }
        }
        ENTRY if rest.len() == 16 => Key::Entry(Ino(be(&rest[..8])?), be(&rest[8..])?),
        INODE => Key::Inode(Ino(be(rest)?)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;

    #[test]
    fn decode_every_key_gives_what_it_was_made_of() {
        let ino = Ino::new(NodeId(3), 77);
        assert_eq!(decode(FORMAT), Some(Key::Format));
        assert_eq!(decode(LEDGER), Some(Key::Ledger));
        assert_eq!(decode(&session(9)), Some(Key::Session(9)));
        assert_eq!(decode(&reply(9, 63)), Some(Key::Reply(9, 63)));
        assert_eq!(decode(&orphan(ino)), Some(Key::Orphan(ino)));
        assert_eq!(decode(&inode(ino)), Some(Key::Inode(ino)));
        assert_eq!(decode(&entry(ino, 12345)), Some(Key::Entry(ino, 12345)));
        let tx = TxId::new(NodeId(9), 5);
        assert_eq!(decode(&link(ino, tx)), Some(Key::Link(ino, tx)));
        assert_eq!(decode(&prepared(tx, 7)), Some(Key::Prepared(tx, 7)));
        assert_eq!(decode(&decision(tx, NodeId(3))), Some(Key::Decision(tx, NodeId(3))));
        assert_eq!(decode(&owed(ino, tx)), Some(Key::Owed(ino, tx)));
        for name in [b"v".as_slice(), &[7; 255]] {
            let (key, (first, last)) = (volume(name), all_volumes());
            assert_eq!(decode(key.bytes()), Some(Key::Volume(name)));
            assert!(first.as_slice() < key.bytes() && key.bytes() < last.as_slice());
        }
        assert_eq!(decode(&linked_file(ino, 5)), Some(Key::LinkedFile(ino, 5)));
        for name in [b"".as_slice(), b"user.a", &[7; 255]] {
            let mut key = ValueKey::new(ino, name);
            key.set_piece(300);
            assert_eq!(decode(key.bytes()), Some(Key::Value(ino, name, 300)));
            let (first, last) = values_of(ino);
            assert!(first.as_slice() < key.bytes() && key.bytes() < last.as_slice());
        }
        for bad in [b"".as_slice(), &[1, 1], &[9; 9], &[8; 8], &[6; 12], &[7; 16]] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn entries_of_hash_spans_all_discriminators() {
        let (first, last) = entries_of_hash(Ino(5), 9);
        assert_eq!(decode(&first), Some(Key::Entry(Ino(5), 9 << 7)));
        assert_eq!(decode(&last), Some(Key::Entry(Ino(5), (9 << 7) + 127)));
    }
}
