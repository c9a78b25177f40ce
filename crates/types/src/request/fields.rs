//! How fields of requests are encoded, and which values they may have.

use crate::attr::{permission_bits, Timestamp};
use crate::backing::BackingId;
use crate::backing_store::{put_time, time, StoreVersion};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::COOKIE_MAX;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::{
    PATH_MAX, REMOVED_AT_ONCE_MAX, SESSIONS_ASKED_MAX, STRIPES_MAX, XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
use crate::name;
use crate::set_attr::SetAttr;
use crate::transaction::{Part, TxId};
use crate::volume::{PieceId, Segment, SegmentId};

use super::{RENAME_EXCHANGE, RENAME_NOREPLACE, XATTR_CREATE, XATTR_REPLACE};

/// A field's encoding. `get` checks: the value that it returns is within its bounds, and its error is the reply to the
/// caller.
pub(super) trait Field<'a> {
    type Value;

    fn put(w: &mut Writer<'_>, value: Self::Value) -> Result<(), Code>;

    fn get(r: &mut Reader<'a>) -> Result<Self::Value, Code>;
}

/// Fields that are encoded as integers. `$get` refuses values that are out of bounds.
macro_rules! integers {
    ($($(#[doc = $doc:literal])* $codec:ident: $value:ty, $int:ident, $put:expr, $get:expr;)+) => {
        $(impl Field<'_> for $codec {
            type Value = $value;

            #[inline]
            fn put(w: &mut Writer<'_>, value: $value) -> Result<(), Code> {
                w.$int($put(value))
            }

            #[inline]
            fn get(r: &mut Reader<'_>) -> Result<$value, Code> {
                r.$int().and_then($get)
            }
        })+
    };
}

/// Fields of bytes with their length in front. `$check` refuses contents that are not allowed.
macro_rules! byte_strings {
    ($($codec:ident: $bytes:ident, $check:expr;)+) => {
        $(impl<'a> Field<'a> for $codec {
            type Value = &'a [u8];

            #[inline]
            fn put(w: &mut Writer<'_>, value: &'a [u8]) -> Result<(), Code> {
                w.$bytes(value)
            }

            #[inline]
            fn get(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
                let bytes = r.$bytes()?;
                $check(bytes)?;
                Ok(bytes)
            }
        })+
    };
}

/// Permission bits.
pub(super) struct Permissions;
/// Type and permission bits of a FIFO, socket or device node.
pub(super) struct NodeMode;
/// Flags of a rename.
pub(super) struct RenameFlags;
/// Flags of a rename of a directory between nodes: all but an exchange.
pub(super) struct MoveFlags;
/// Flags of `setxattr`.
pub(super) struct XattrFlags;
/// A position in a directory.
pub(super) struct DirCookie;
/// Number of backing files of a new file.
pub(super) struct StripeCount;
/// A boolean. Any byte but 0 is true.
pub(super) struct AnyBool;

integers! {
    Ino: Ino, u64, |ino: Ino| ino.0, |bits| Ok(Ino(bits));
    TxId: TxId, u64, |tx: TxId| tx.0, |bits| Ok(TxId(bits));
    NodeId: NodeId, u16, |node: NodeId| node.0, |bits| Ok(NodeId(bits));
    u8: u8, u8, |v| v, Ok;
    u16: u16, u16, |v| v, Ok;
    u32: u32, u32, |v| v, Ok;
    u64: u64, u64, |v| v, Ok;
    Permissions: u32, u32, |mode| mode, permission_bits;
    NodeMode: u32, u32, |mode| mode, |mode: u32| match mode & 0o170_000 {
        0o010_000 | 0o020_000 | 0o060_000 | 0o140_000 if mode & !0o177_777 == 0 => Ok(mode),
        _ => Err(Code::Invalid),
    };
    RenameFlags: u32, u32, |flags| flags, |flags| one_of(flags, &[0, RENAME_NOREPLACE, RENAME_EXCHANGE]);
    MoveFlags: u32, u32, |flags| flags, |flags| one_of(flags, &[0, RENAME_NOREPLACE]);
    XattrFlags: u32, u32, |flags| flags, |flags| one_of(flags, &[0, XATTR_CREATE, XATTR_REPLACE]);
    DirCookie: u64, u64, |cookie| cookie, |cookie| if cookie > COOKIE_MAX { Err(Code::Invalid) } else { Ok(cookie) };
    StripeCount: u16, u16, |count| count, |count| match count {
        1..=STRIPES_MAX => Ok(count),
        _ => Err(Code::Invalid),
    };
    AnyBool: bool, u8, u8::from, |byte| Ok(byte != 0);
    bool: bool, u8, u8::from, |byte| match byte {
        0 | 1 => Ok(byte == 1),
        _ => Err(Code::Malformed),
    };
}

fn one_of(flags: u32, known: &[u32]) -> Result<u32, Code> {
    match known.contains(&flags) {
        true => Ok(flags),
        false => Err(Code::Invalid),
    }
}

/// A name of one component.
pub(super) struct Name;
/// The target of a symbolic link.
pub(super) struct LinkTarget;
/// The full name of an extended attribute.
pub(super) struct XattrName;
/// The value of an extended attribute.
pub(super) struct XattrValue;
/// Bytes that are checked later, where they are parsed.
pub(super) struct Bytes;
/// Sessions, eight bytes each.
pub(super) struct Sessions;
/// Segments of volumes, encoded by [`SegmentId::list`].
pub(super) struct SegmentIds;
/// Backing files, encoded by [`BackingId::list`].
pub(super) struct BackingIds;

byte_strings! {
    Name: short_bytes, name::check;
    LinkTarget: short_bytes, |target: &[u8]| match target.len() {
        0 => Err(Code::NotFound),
        n if n > PATH_MAX => Err(Code::NameTooLong),
        _ if target.contains(&0) => Err(Code::Invalid),
        _ => Ok(()),
    };
    XattrName: short_bytes, |name: &[u8]| match name.len() {
        1..=XATTR_NAME_MAX if name.contains(&0) => Err(Code::Invalid),
        1..=XATTR_NAME_MAX => Ok(()),
        _ => Err(Code::Range),
    };
    XattrValue: long_bytes, |value: &[u8]| if value.len() > XATTR_VALUE_MAX { Err(Code::TooBig) } else { Ok(()) };
    Bytes: short_bytes, |_: &[u8]| Ok(());
    Sessions: long_bytes, |sessions: &[u8]| match sessions.len() {
        n if n % 8 == 0 && n <= 8 * SESSIONS_ASKED_MAX => Ok(()),
        _ => Err(Code::Malformed),
    };
    SegmentIds: long_bytes, |ids: &[u8]| match ids.len() {
        n if n % SegmentId::BYTES == 0 && n <= SegmentId::BYTES * SESSIONS_ASKED_MAX => Ok(()),
        _ => Err(Code::Malformed),
    };
    BackingIds: long_bytes, |ids: &[u8]| match BackingId::is_list(ids, REMOVED_AT_ONCE_MAX) {
        true => Ok(()),
        false => Err(Code::Malformed),
    };
}

impl Field<'_> for Layout {
    type Value = Layout;

    fn put(w: &mut Writer<'_>, value: Layout) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'_>) -> Result<Layout, Code> {
        Layout::decode(r)
    }
}

impl Field<'_> for Timestamp {
    type Value = Timestamp;

    fn put(w: &mut Writer<'_>, value: Timestamp) -> Result<(), Code> {
        put_time(w, value)
    }

    fn get(r: &mut Reader<'_>) -> Result<Timestamp, Code> {
        time(r)
    }
}

impl Field<'_> for Segment {
    type Value = Segment;

    fn put(w: &mut Writer<'_>, value: Segment) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'_>) -> Result<Segment, Code> {
        Segment::decode(r)
    }
}

impl Field<'_> for PieceId {
    type Value = PieceId;

    fn put(w: &mut Writer<'_>, value: PieceId) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'_>) -> Result<PieceId, Code> {
        PieceId::decode(r)
    }
}

impl Field<'_> for StoreVersion {
    type Value = StoreVersion;

    fn put(w: &mut Writer<'_>, value: StoreVersion) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'_>) -> Result<StoreVersion, Code> {
        StoreVersion::decode(r)
    }
}

impl Field<'_> for SetAttr {
    type Value = SetAttr;

    fn put(w: &mut Writer<'_>, value: SetAttr) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'_>) -> Result<SetAttr, Code> {
        SetAttr::decode(r)
    }
}

impl<'a> Field<'a> for Part<'a> {
    type Value = Part<'a>;

    fn put(w: &mut Writer<'_>, value: Part<'a>) -> Result<(), Code> {
        value.encode(w)
    }

    fn get(r: &mut Reader<'a>) -> Result<Part<'a>, Code> {
        Part::decode(r)
    }
}

/// The fields of `Create`. A byte of bits carries the booleans, and says which optional fields are present.
pub(super) mod create {
    use super::*;

    type Fields<'a> = (Ino, &'a [u8], u32, bool, bool, Option<Layout>, Option<Ino>, bool);

    #[allow(clippy::too_many_arguments)]
    pub(in crate::request) fn put(
        w: &mut Writer<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        dirty: bool,
        layout: Option<Layout>,
        number: Option<Ino>,
        reserve: bool,
    ) -> Result<(), Code> {
        let bits = [exclusive, dirty, layout.is_some(), number.is_some(), reserve];
        w.u64(parent.0)?;
        w.u32(mode)?;
        w.u8(bits.into_iter().rev().fold(0, |bits, bit| bits << 1 | u8::from(bit)))?;
        if let Some(number) = number {
            w.u64(number.0)?;
        }
        w.short_bytes(name)?;
        layout.map_or(Ok(()), |layout| layout.encode(w))
    }

    /// Returns the fields in the order of the table.
    pub(in crate::request) fn get<'a>(r: &mut Reader<'a>) -> Result<Fields<'a>, Code> {
        let (parent, mode, bits) = (Ino(r.u64()?), r.u32()?, r.u8()?);
        let bit = |i: u32| bits >> i & 1 != 0;
        let number = if bit(3) { Some(Ino(r.u64()?)) } else { None };
        let name = name::read(r)?;
        let layout = if bit(2) { Some(Layout::decode(r)?) } else { None };
        let mode = permission_bits(mode)?;
        let (exclusive, dirty, reserve) = (bit(0), bit(1), bit(4));
        Ok((parent, name, mode, exclusive, dirty, layout, number, reserve))
    }
}

/// The fields of `Backing`: its operations have an encoding of their own.
pub(super) mod backing {
    use super::*;
    use crate::backing::BackingOp;

    pub(in crate::request) fn put(w: &mut Writer<'_>, id: BackingId, op: BackingOp<'_>) -> Result<(), Code> {
        op.encode(&id, w)
    }

    pub(in crate::request) fn get<'a>(r: &mut Reader<'a>) -> Result<(BackingId, BackingOp<'a>), Code> {
        BackingOp::decode(r)
    }
}
