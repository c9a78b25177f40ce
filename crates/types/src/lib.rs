//! The types that all crates of Forebay share: ids, limits, errors with stable codes, attributes, layout arithmetic,
//! name hashes, and the requests and replies that travel by ring (one node) and wire (between nodes).
//!
//! Nothing here does I/O, allocates on a hot path, or is unsafe. All encodings are little-endian and fixed: a client
//! and a daemon of one version share them through memory, and the shard stores some of them on disk
//! (docs/disk-format.md).

#![forbid(unsafe_code)]

mod atomic;
mod attr;
mod backing;
mod backing_runs;
mod backing_store;
mod bytes;
mod error;
mod group;
mod hash;
mod id;
mod layout;
pub mod limits;
mod lock;
mod mount;
mod mover;
mod name;
mod reply;
mod request;
mod route;
mod set_attr;
mod store_read;
mod target;
mod transaction;
mod volume;
mod wide;

pub use atomic::{AtomicOp, PieceWord};
pub use attr::{
    Attr, Kind, Timestamp, ATTR_BYTES, EPOCH_OFFSET, EPOCH_UNKNOWN, FLAGS_INHERITED, FLAGS_OFFSET,
    FLAG_ATTACHED, FLAG_CLOSE_WAITS, FLAG_DIRTY, FLAG_DRAINING, FLAG_FSYNC_WAITS, FLAG_HAS_VALUES,
    FLAG_PINNED, FLAG_RESIDENT, FLAG_STORE, FLAG_UNLISTED, PERMISSIONS_OFFSET,
};
pub use backing::{BackingAttr, BackingId, BackingOp, Move, MoveKind};
pub use backing_runs::BackingRuns;
pub use backing_store::{
    CopyOf, PendingPlace, Placed, RestoredRange, StoreObject, StorePlace, StoreTask, StoreVersion, Wanted,
    CHANGES_ALL, STORE_VERSION_BYTES,
};
pub use bytes::{Reader, Writer};
pub use error::{Code, Error, Result};
pub use group::GroupOp;
pub use hash::{cookie_hash, name_hash, Cookie, COOKIE_MAX, DISCRIMINATOR_BITS, HASH_BITS};
pub use id::{Ino, NodeId};
pub use layout::{Component, Extent, Layout, COMPONENT_BYTES};
pub use lock::{LockKind, LockRequest};
pub use mount::{mount_link, mount_of_link, MOUNT_LINK};
pub use mover::{MODEL_FILE, MODEL_FILE_NEW, MOVER_SOCKET, STORES_MARK, TASKS_FILE, TASKS_FILE_NEW};
pub use reply::{
    go_on_behind, Answer, DirEntries, DirEntry, DirWriter, Entry, PoolSpace, Refusal, Reply,
    REPLY_HEADER_BYTES,
};
pub use request::{
    decode_inos, decode_outcomes, decode_store_places, encode_outcome, encode_store_place, is_for_data,
    may_change, Caller, Class, ReportOutcome, Request, RequestInfo, OUTCOME_BYTES, RENAME_EXCHANGE,
    RENAME_NOREPLACE, REPORTS_MAX, REQUESTS, XATTR_CREATE, XATTR_REPLACE,
};
pub use set_attr::{SetAttr, TimeSet};
pub use store_read::StoreRead;
pub use target::{node_of, target_of, TargetSpace, TargetSpaces, Targets};
pub use transaction::{decode_nodes, Change, Outcome, Part, TxId};
pub use volume::{check_volume_name, PieceId, Rights, Segment, SegmentId, Volume};
pub use wide::{part_of_hash, Parts};
