//! How fields of requests are encoded, and what values they may have.

use crate::attr::Timestamp;
use crate::backing::BackingId;
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::COOKIE_MAX;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::{
    NAME_MAX, PATH_MAX, REMOVED_AT_ONCE_MAX, SESSIONS_ASKED_MAX, STRIPES_MAX, WIDTH_MAX, XATTR_NAME_MAX,
    XATTR_VALUE_MAX,
};
use crate::transaction::{Part, TxId};

use super::{SetAttr, TimeSet, RENAME_EXCHANGE, RENAME_NOREPLACE, XATTR_CREATE, XATTR_REPLACE};

/// A field's encoding. `get` checks: a value that it gives is within its bounds, and its error is what the caller is answered.
pub(super) trait Field<'a> {
    type Value;

    fn put(w: &mut Writer<'_>, value: Self::Value) -> Result<(), Code>;

    fn get(r: &mut Reader<'a>) -> Result<Self::Value, Code>;
}

/// A field that is encoded as an integer: any value is good, or what `check` says.
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

/// A field of bytes behind their length, whose contents are checked.
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
/// A place in a directory.
pub(super) struct DirCookie;
/// Backing files of a new file.
pub(super) struct StripeCount;
/// A boolean of which any byte but 0 is true.
pub(super) struct AnyBool;

integers! {
    Ino: Ino, u64, |ino: Ino| ino.0, |bits| Ok(Ino(bits));
    TxId: TxId, u64, |tx: TxId| tx.0, |bits| Ok(TxId(bits));
    NodeId: NodeId, u16, |node: NodeId| node.0, |bits| Ok(NodeId(bits));
    u8: u8, u8, |v| v, Ok;
    u16: u16, u16, |v| v, Ok;
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
/// Bytes that are checked where they are read.
pub(super) struct Bytes;
/// Sessions, eight bytes each.
pub(super) struct Sessions;
/// Backing files, as [`BackingId::list`] has them.
pub(super) struct BackingIds;

byte_strings! {
    Name: short_bytes, check_name;
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

impl Field<'_> for SetAttr {
    type Value = SetAttr;

    fn put(w: &mut Writer<'_>, value: SetAttr) -> Result<(), Code> {
        put_set(w, &value)
    }

    fn get(r: &mut Reader<'_>) -> Result<SetAttr, Code> {
        set_attr(r)
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

fn check_name(name: &[u8]) -> Result<(), Code> {
    match name {
        b"" => Err(Code::NotFound),
        b"." | b".." => Err(Code::Invalid),
        _ if name.len() > NAME_MAX => Err(Code::NameTooLong),
        _ if name.iter().any(|&b| b == b'/' || b == 0) => Err(Code::Invalid),
        _ => Ok(()),
    }
}

/// Reads a name of one component.
pub(crate) fn name<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
    Name::get(r)
}

/// Appends a time to set.
pub(crate) fn put_time(w: &mut Writer<'_>, t: TimeSet) -> Result<(), Code> {
    let (tag, at) = match t {
        TimeSet::Omit => (0, Timestamp::default()),
        TimeSet::Now => (1, Timestamp::default()),
        TimeSet::At(at) => (2, at),
    };
    w.u8(tag)?;
    w.u64(at.sec as u64)?;
    w.u32(at.nsec)
}

/// Reads a time to set.
pub(crate) fn time(r: &mut Reader<'_>) -> Result<TimeSet, Code> {
    let tag = r.u8()?;
    let at = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
    match tag {
        0 => Ok(TimeSet::Omit),
        1 => Ok(TimeSet::Now),
        2 if at.nsec < 1_000_000_000 => Ok(TimeSet::At(at)),
        _ => Err(Code::Invalid),
    }
}

/// A width that is not to be set.
const WIDTH_OMITTED: u8 = 0xff;

/// Appends attributes to set.
pub(crate) fn put_set(w: &mut Writer<'_>, set: &SetAttr) -> Result<(), Code> {
    put_option_u64(w, set.mode.map(u64::from))?;
    put_option_u64(w, set.uid.map(u64::from))?;
    put_option_u64(w, set.gid.map(u64::from))?;
    put_option_u64(w, set.size)?;
    put_time(w, set.atime)?;
    put_time(w, set.mtime)?;
    w.u8(set.width_of_new.unwrap_or(WIDTH_OMITTED))
}

/// Reads attributes to set.
pub(crate) fn set_attr(r: &mut Reader<'_>) -> Result<SetAttr, Code> {
    let set = SetAttr {
        mode: option_u32(r)?,
        uid: option_u32(r)?,
        gid: option_u32(r)?,
        size: option_u64(r)?,
        atime: time(r)?,
        mtime: time(r)?,
        width_of_new: Some(r.u8()?).filter(|width| *width != WIDTH_OMITTED),
    };
    match set.mode {
        Some(mode) if mode & !0o7777 != 0 => Err(Code::Invalid),
        _ if set.width_of_new.is_some_and(|width| width == 1 || usize::from(width) > WIDTH_MAX) => {
            Err(Code::Invalid)
        }
        _ => Ok(set),
    }
}

fn put_option_u64(w: &mut Writer<'_>, v: Option<u64>) -> Result<(), Code> {
    w.u8(v.is_some() as u8)?;
    w.u64(v.unwrap_or(0))
}

fn option_u64(r: &mut Reader<'_>) -> Result<Option<u64>, Code> {
    let some = r.u8()?;
    let v = r.u64()?;
    match some {
        0 => Ok(None),
        1 => Ok(Some(v)),
        _ => Err(Code::Malformed),
    }
}

fn option_u32(r: &mut Reader<'_>) -> Result<Option<u32>, Code> {
    match option_u64(r)? {
        None => Ok(None),
        Some(v) => Ok(Some(u32::try_from(v).map_err(|_| Code::Malformed)?)),
    }
}

/// Permission bits, checked.
pub(crate) fn permission_bits(mode: u32) -> Result<u32, Code> {
    if mode & !0o7777 == 0 {
        Ok(mode)
    } else {
        Err(Code::Invalid)
    }
}

/// The fields of `Create`: what is there is said by bits.
pub(super) mod create {
    use super::*;
    use crate::request::Request;

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

    pub(in crate::request) fn get<'a>(r: &mut Reader<'a>) -> Result<Request<'a>, Code> {
        let (parent, mode, bits) = (Ino(r.u64()?), r.u32()?, r.u8()?);
        let bit = |i: u32| bits >> i & 1 != 0;
        let number = if bit(3) { Some(Ino(r.u64()?)) } else { None };
        let name = Name::get(r)?;
        let layout = if bit(2) { Some(Layout::decode(r)?) } else { None };
        let mode = permission_bits(mode)?;
        let (exclusive, dirty, reserve) = (bit(0), bit(1), bit(4));
        Ok(Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve })
    }
}

/// The fields of `Backing`, whose operations have an encoding of their own.
pub(super) mod backing {
    use super::*;
    use crate::backing::BackingOp;
    use crate::request::Request;

    pub(in crate::request) fn put(w: &mut Writer<'_>, id: BackingId, op: BackingOp<'_>) -> Result<(), Code> {
        op.encode(&id, w)
    }

    pub(in crate::request) fn get<'a>(r: &mut Reader<'a>) -> Result<Request<'a>, Code> {
        let (id, op) = BackingOp::decode(r)?;
        Ok(Request::Backing { id, op })
    }
}
