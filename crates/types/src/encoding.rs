//! Requests as bytes: what travels by ring, wire and journal.

use crate::attr::Timestamp;
use crate::backing::{BackingId, BackingOp};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::COOKIE_MAX;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::{
    NAME_MAX, PATH_MAX, REMOVED_AT_ONCE_MAX, SESSIONS_ASKED_MAX, STRIPES_MAX, WIDTH_MAX, XATTR_NAME_MAX,
    XATTR_VALUE_MAX,
};
use crate::request::{
    Caller, Request, SetAttr, TimeSet, RENAME_EXCHANGE, RENAME_NOREPLACE, XATTR_CREATE, XATTR_REPLACE,
};
use crate::transaction::{Part, TxId};

/// Bytes in front of every request: op, flags, reserved, uid, gid.
const HEADER_BYTES: usize = 12;

pub(crate) fn name<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
    let name = r.short_bytes()?;
    match name {
        b"" => Err(Code::NotFound),
        b"." | b".." => Err(Code::Invalid),
        _ if name.len() > NAME_MAX => Err(Code::NameTooLong),
        _ if name.iter().any(|&b| b == b'/' || b == 0) => Err(Code::Invalid),
        _ => Ok(name),
    }
}

fn xattr_name<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
    let name = r.short_bytes()?;
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return Err(Code::Range);
    }
    if name.contains(&0) {
        return Err(Code::Invalid);
    }
    Ok(name)
}

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

impl<'a> Request<'a> {
    fn op(&self) -> u8 {
        match self {
            Request::Ping => 1,
            Request::Lookup { .. } => 2,
            Request::GetAttr { .. } => 3,
            Request::SetAttr { .. } => 4,
            Request::Create { .. } => 5,
            Request::MakeNode { .. } => 6,
            Request::MakeDirectory { .. } => 7,
            Request::Symlink { .. } => 8,
            Request::Link { .. } => 9,
            Request::Unlink { .. } => 10,
            Request::RemoveDirectory { .. } => 11,
            Request::Rename { .. } => 12,
            Request::ReadDirectory { .. } => 13,
            Request::ReadLink { .. } => 14,
            Request::GetXattr { .. } => 15,
            Request::SetXattr { .. } => 16,
            Request::ListXattr { .. } => 17,
            Request::RemoveXattr { .. } => 18,
            Request::MarkDirty { .. } => 19,
            Request::MakeBacking { .. } => 20,
            Request::PathOf { .. } => 21,
            Request::Space => 22,
            Request::Reserve => 23,
            Request::SetLayout { .. } => 24,
            Request::Decide { .. } => 25,
            Request::DropLink { .. } => 26,
            Request::Touch { .. } => 27,
            Request::IsLed { .. } => 28,
            Request::NameOf { .. } => 31,
            Request::Backing(..) => 32,
            Request::EndSession { .. } => 33,
            Request::MakeDirectoryAt { .. } => 34,
            Request::MoveDirectory { .. } => 35,
            Request::Prepare { .. } => 36,
            Request::Finish { .. } => 37,
            Request::AskOutcome { .. } => 38,
            Request::LeadsTo { .. } => 39,
            Request::Place { .. } => 40,
            Request::Targets => 41,
            Request::AreThere { .. } => 55,
            Request::RemoveBackings { .. } => 59,
            Request::RenewLease => 56,
            Request::RecallName { .. } => 57,
            Request::RecallDirectory { .. } => 58,
            Request::SetWidth { .. } => 80,
            Request::PartsOf { .. } => 81,
        }
    }

    /// Encodes into `buffer`; the number of bytes. Fails with [`Code::TooBig`] when they do not fit.
    pub fn encode(&self, caller: Caller, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        w.u8(self.op())?;
        w.u8(0)?;
        w.u16(0)?;
        w.u32(caller.uid)?;
        w.u32(caller.gid)?;
        match *self {
            Request::Ping | Request::Space | Request::Reserve | Request::Targets | Request::RenewLease => {}
            Request::Place { stripe_count } => w.u16(stripe_count)?,
            Request::Lookup { parent, name }
            | Request::RecallName { parent, name }
            | Request::Unlink { parent, name }
            | Request::RemoveDirectory { parent, name } => {
                w.u64(parent.0)?;
                w.short_bytes(name)?;
            }
            Request::GetAttr { ino }
            | Request::ReadLink { ino }
            | Request::ListXattr { ino }
            | Request::MarkDirty { ino }
            | Request::MakeBacking { ino }
            | Request::PathOf { ino }
            | Request::Touch { ino }
            | Request::PartsOf { ino }
            | Request::RecallDirectory { ino } => w.u64(ino.0)?,
            Request::MakeDirectoryAt { node, parent, name, mode } => {
                w.u16(node.0)?;
                w.u64(parent.0)?;
                w.u32(mode)?;
                w.short_bytes(name)?;
            }
            Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino } => {
                w.u64(parent.0)?;
                w.u64(new_parent.0)?;
                w.u32(flags)?;
                w.u64(ino.0)?;
                w.short_bytes(name)?;
                w.short_bytes(new_name)?;
            }
            Request::Prepare { tx, index, ref part } => {
                w.u64(tx.0)?;
                w.u8(index)?;
                part.encode(&mut w)?;
            }
            Request::Finish { tx, commit } => {
                w.u64(tx.0)?;
                w.u8(u8::from(commit))?;
            }
            Request::AskOutcome { tx } => w.u64(tx.0)?,
            Request::Decide { tx, nodes, reply } => {
                w.u64(tx.0)?;
                w.short_bytes(nodes)?;
                w.short_bytes(reply)?;
            }
            Request::DropLink { ino, link } => {
                w.u64(ino.0)?;
                w.u64(link.0)?;
            }
            Request::IsLed { ino, parent, link } => {
                w.u64(ino.0)?;
                w.u64(parent.0)?;
                w.u64(link.0)?;
            }
            Request::LeadsTo { node, parent, cookie } => {
                w.u16(node.0)?;
                w.u64(parent.0)?;
                w.u64(cookie)?;
            }
            Request::NameOf { parent, ino } => {
                w.u64(parent.0)?;
                w.u64(ino.0)?;
            }
            Request::Backing(ref id, ref op) => op.encode(id, &mut w)?,
            Request::EndSession { session } => w.u64(session)?,
            Request::AreThere { sessions } => w.long_bytes(sessions)?,
            Request::RemoveBackings { ids } => w.long_bytes(ids)?,
            Request::SetAttr { ino, set } => {
                w.u64(ino.0)?;
                put_set(&mut w, &set)?;
            }
            Request::SetWidth { ino, width } => {
                w.u64(ino.0)?;
                w.u16(width)?;
            }
            Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve } => {
                let bits = [exclusive, dirty, layout.is_some(), number.is_some(), reserve];
                w.u64(parent.0)?;
                w.u32(mode)?;
                w.u8(bits.into_iter().rev().fold(0, |bits, bit| bits << 1 | u8::from(bit)))?;
                if let Some(number) = number {
                    w.u64(number.0)?;
                }
                w.short_bytes(name)?;
                if let Some(layout) = layout {
                    layout.encode(&mut w)?;
                }
            }
            Request::MakeNode { parent, name, mode, rdev } => {
                w.u64(parent.0)?;
                w.u32(mode)?;
                w.u64(rdev)?;
                w.short_bytes(name)?;
            }
            Request::MakeDirectory { parent, name, mode } => {
                w.u64(parent.0)?;
                w.u32(mode)?;
                w.short_bytes(name)?;
            }
            Request::Symlink { parent, name, target } => {
                w.u64(parent.0)?;
                w.short_bytes(name)?;
                w.short_bytes(target)?;
            }
            Request::Link { ino, parent, name } => {
                w.u64(ino.0)?;
                w.u64(parent.0)?;
                w.short_bytes(name)?;
            }
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                w.u64(parent.0)?;
                w.u64(new_parent.0)?;
                w.u32(flags)?;
                w.short_bytes(name)?;
                w.short_bytes(new_name)?;
            }
            Request::ReadDirectory { ino, cookie, attributes } => {
                w.u64(ino.0)?;
                w.u64(cookie)?;
                w.u8(attributes as u8)?;
            }
            Request::GetXattr { ino, name } | Request::RemoveXattr { ino, name } => {
                w.u64(ino.0)?;
                w.short_bytes(name)?;
            }
            Request::SetLayout { ino, layout } => {
                w.u64(ino.0)?;
                layout.encode(&mut w)?;
            }
            Request::SetXattr { ino, name, value, flags } => {
                w.u64(ino.0)?;
                w.u32(flags)?;
                w.short_bytes(name)?;
                w.long_bytes(value)?;
            }
        }
        Ok(w.len())
    }

    /// Decodes and checks a request: names, lengths, flags and times are within bounds behind this point. The error is
    /// what the caller is answered.
    pub fn decode(bytes: &'a [u8]) -> Result<(Caller, Request<'a>), Code> {
        let mut r = Reader::new(bytes);
        if bytes.len() < HEADER_BYTES {
            return Err(Code::Malformed);
        }
        let op = r.u8()?;
        r.u8()?;
        r.u16()?;
        let caller = Caller { uid: r.u32()?, gid: r.u32()? };
        let request = match op {
            1 => Request::Ping,
            2 => Request::Lookup { parent: Ino(r.u64()?), name: name(&mut r)? },
            3 => Request::GetAttr { ino: Ino(r.u64()?) },
            4 => {
                let ino = Ino(r.u64()?);
                Request::SetAttr { ino, set: set_attr(&mut r)? }
            }
            5 => {
                let (parent, mode, bits) = (Ino(r.u64()?), r.u32()?, r.u8()?);
                let bit = |i: u32| bits >> i & 1 != 0;
                let number = if bit(3) { Some(Ino(r.u64()?)) } else { None };
                let name = name(&mut r)?;
                let layout = if bit(2) { Some(Layout::decode(&mut r)?) } else { None };
                let mode = permission_bits(mode)?;
                let (exclusive, dirty, reserve) = (bit(0), bit(1), bit(4));
                Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve }
            }
            6 => {
                let (parent, mode, rdev) = (Ino(r.u64()?), r.u32()?, r.u64()?);
                if !matches!(mode & 0o170_000, 0o010_000 | 0o020_000 | 0o060_000 | 0o140_000)
                    || mode & !0o177_777 != 0
                {
                    return Err(Code::Invalid);
                }
                Request::MakeNode { parent, name: name(&mut r)?, mode, rdev }
            }
            7 => {
                let (parent, mode) = (Ino(r.u64()?), permission_bits(r.u32()?)?);
                Request::MakeDirectory { parent, name: name(&mut r)?, mode }
            }
            8 => {
                let parent = Ino(r.u64()?);
                let name = name(&mut r)?;
                let target = r.short_bytes()?;
                match target.len() {
                    0 => return Err(Code::NotFound),
                    n if n > PATH_MAX => return Err(Code::NameTooLong),
                    _ if target.contains(&0) => return Err(Code::Invalid),
                    _ => Request::Symlink { parent, name, target },
                }
            }
            9 => Request::Link { ino: Ino(r.u64()?), parent: Ino(r.u64()?), name: name(&mut r)? },
            10 => Request::Unlink { parent: Ino(r.u64()?), name: name(&mut r)? },
            11 => Request::RemoveDirectory { parent: Ino(r.u64()?), name: name(&mut r)? },
            12 => {
                let (parent, new_parent, flags) = (Ino(r.u64()?), Ino(r.u64()?), r.u32()?);
                if !matches!(flags, 0 | RENAME_NOREPLACE | RENAME_EXCHANGE) {
                    return Err(Code::Invalid);
                }
                Request::Rename { parent, name: name(&mut r)?, new_parent, new_name: name(&mut r)?, flags }
            }
            13 => {
                let (ino, cookie, attributes) = (Ino(r.u64()?), r.u64()?, r.u8()?);
                if cookie > COOKIE_MAX {
                    return Err(Code::Invalid);
                }
                Request::ReadDirectory { ino, cookie, attributes: attributes != 0 }
            }
            14 => Request::ReadLink { ino: Ino(r.u64()?) },
            15 => Request::GetXattr { ino: Ino(r.u64()?), name: xattr_name(&mut r)? },
            16 => {
                let (ino, flags) = (Ino(r.u64()?), r.u32()?);
                let name = xattr_name(&mut r)?;
                let value = r.long_bytes()?;
                if value.len() > XATTR_VALUE_MAX {
                    return Err(Code::TooBig);
                }
                if !matches!(flags, 0 | XATTR_CREATE | XATTR_REPLACE) {
                    return Err(Code::Invalid);
                }
                Request::SetXattr { ino, name, value, flags }
            }
            17 => Request::ListXattr { ino: Ino(r.u64()?) },
            18 => Request::RemoveXattr { ino: Ino(r.u64()?), name: xattr_name(&mut r)? },
            19 => Request::MarkDirty { ino: Ino(r.u64()?) },
            20 => Request::MakeBacking { ino: Ino(r.u64()?) },
            21 => Request::PathOf { ino: Ino(r.u64()?) },
            22 => Request::Space,
            23 => Request::Reserve,
            24 => Request::SetLayout { ino: Ino(r.u64()?), layout: Layout::decode(&mut r)? },
            25 => Request::Decide { tx: TxId(r.u64()?), nodes: r.short_bytes()?, reply: r.short_bytes()? },
            26 => Request::DropLink { ino: Ino(r.u64()?), link: TxId(r.u64()?) },
            27 => Request::Touch { ino: Ino(r.u64()?) },
            28 => Request::IsLed { ino: Ino(r.u64()?), parent: Ino(r.u64()?), link: TxId(r.u64()?) },
            31 => Request::NameOf { parent: Ino(r.u64()?), ino: Ino(r.u64()?) },
            32 => {
                let (id, op) = BackingOp::decode(&mut r)?;
                Request::Backing(id, op)
            }
            33 => Request::EndSession { session: r.u64()? },
            34 => {
                let (node, parent, mode) = (NodeId(r.u16()?), Ino(r.u64()?), permission_bits(r.u32()?)?);
                Request::MakeDirectoryAt { node, parent, name: name(&mut r)?, mode }
            }
            35 => {
                let (parent, new_parent, flags) = (Ino(r.u64()?), Ino(r.u64()?), r.u32()?);
                if !matches!(flags, 0 | RENAME_NOREPLACE) {
                    return Err(Code::Invalid);
                }
                let (ino, name, new_name) = (Ino(r.u64()?), name(&mut r)?, name(&mut r)?);
                Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino }
            }
            36 => {
                let (tx, index) = (TxId(r.u64()?), r.u8()?);
                Request::Prepare { tx, index, part: Part::decode(&mut r)? }
            }
            37 => {
                let (tx, commit) = (TxId(r.u64()?), r.u8()?);
                if commit > 1 {
                    return Err(Code::Malformed);
                }
                Request::Finish { tx, commit: commit == 1 }
            }
            38 => Request::AskOutcome { tx: TxId(r.u64()?) },
            39 => {
                let (node, parent, cookie) = (NodeId(r.u16()?), Ino(r.u64()?), r.u64()?);
                Request::LeadsTo { node, parent, cookie }
            }
            40 => match r.u16()? {
                stripe_count @ 1..=STRIPES_MAX => Request::Place { stripe_count },
                _ => return Err(Code::Invalid),
            },
            41 => Request::Targets,
            55 => {
                let sessions = r.long_bytes()?;
                if sessions.len() % 8 != 0 || sessions.len() > 8 * SESSIONS_ASKED_MAX {
                    return Err(Code::Malformed);
                }
                Request::AreThere { sessions }
            }
            56 => Request::RenewLease,
            57 => Request::RecallName { parent: Ino(r.u64()?), name: name(&mut r)? },
            58 => Request::RecallDirectory { ino: Ino(r.u64()?) },
            59 => {
                let ids = r.long_bytes()?;
                if !BackingId::is_list(ids, REMOVED_AT_ONCE_MAX) {
                    return Err(Code::Malformed);
                }
                Request::RemoveBackings { ids }
            }
            80 => Request::SetWidth { ino: Ino(r.u64()?), width: r.u16()? },
            81 => Request::PartsOf { ino: Ino(r.u64()?) },
            _ => return Err(Code::Malformed),
        };
        Ok((caller, request))
    }
}

pub(crate) fn permission_bits(mode: u32) -> Result<u32, Code> {
    if mode & !0o7777 == 0 {
        Ok(mode)
    } else {
        Err(Code::Invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_request_round_trips() {
        let (p, i) = (Ino(77), Ino(99));
        let name = b"a name with \xff bytes".as_slice();
        let set =
            SetAttr { mode: Some(0o644), uid: None, gid: Some(7), size: Some(1 << 40), ..SetAttr::default() };
        let at = TimeSet::At(Timestamp { sec: -5, nsec: 999_999_999 });
        let all = [
            Request::Ping,
            Request::Lookup { parent: p, name },
            Request::GetAttr { ino: i },
            Request::SetAttr { ino: i, set },
            Request::SetAttr { ino: i, set: SetAttr { atime: TimeSet::Now, mtime: at, ..set } },
            Request::Create {
                parent: p,
                name,
                mode: 0o755,
                exclusive: true,
                dirty: false,
                layout: None,
                number: None,
                reserve: true,
            },
            Request::Create {
                parent: p,
                name,
                mode: 0,
                exclusive: false,
                dirty: true,
                layout: Some(Layout::single(NodeId(2), 1)),
                number: Some(i),
                reserve: false,
            },
            Request::MakeNode { parent: p, name, mode: 0o010_600, rdev: 0 },
            Request::MakeDirectory { parent: p, name, mode: 0o1777 },
            Request::Symlink { parent: p, name, target: b"../x" },
            Request::Link { ino: i, parent: p, name },
            Request::Unlink { parent: p, name },
            Request::RemoveDirectory { parent: p, name },
            Request::Rename { parent: p, name, new_parent: i, new_name: b"b", flags: RENAME_EXCHANGE },
            Request::ReadDirectory { ino: i, cookie: 5, attributes: true },
            Request::ReadLink { ino: i },
            Request::GetXattr { ino: i, name: b"user.a" },
            Request::SetXattr { ino: i, name: b"user.a", value: &[9; 65_536], flags: XATTR_CREATE },
            Request::ListXattr { ino: i },
            Request::RemoveXattr { ino: i, name: b"user.a" },
            Request::MarkDirty { ino: i },
            Request::MakeBacking { ino: i },
            Request::PathOf { ino: i },
            Request::Space,
            Request::Reserve,
            Request::SetLayout { ino: i, layout: Layout::overstriped(NodeId(2), 1, 5, 4096).unwrap() },
            Request::MakeDirectoryAt { node: NodeId(7), parent: p, name, mode: 0o750 },
            Request::MoveDirectory { parent: p, name, new_parent: i, new_name: b"b", flags: 1, ino: i },
            Request::Prepare { tx: TxId(5), index: 3, part: Part::Count { ino: i, link: TxId(6) } },
            Request::Finish { tx: TxId(5), commit: true },
            Request::AskOutcome { tx: TxId(5) },
            Request::Decide { tx: TxId(5), nodes: &[1, 0, 2, 0], reply: &[0, 0, 1, 0] },
            Request::DropLink { ino: i, link: TxId(6) },
            Request::Touch { ino: i },
            Request::IsLed { ino: i, parent: p, link: TxId(6) },
            Request::LeadsTo { node: NodeId(2), parent: p, cookie: 77 },
            Request::NameOf { parent: p, ino: i },
            Request::EndSession { session: 5 },
            Request::Place { stripe_count: STRIPES_MAX },
            Request::Targets,
            Request::RenewLease,
            Request::RecallName { parent: p, name },
            Request::RecallDirectory { ino: i },
            Request::SetWidth { ino: i, width: 16 },
            Request::PartsOf { ino: i },
            Request::AreThere { sessions: &[7; 24] },
            Request::RemoveBackings { ids: &[0; 30] },
            Request::Backing(
                BackingId { target: 9, ino: i, number: 0, stripe: 3 },
                BackingOp::Write { offset: 77, append: false, bytes: &[5; 3000] },
            ),
        ];
        let caller = Caller { uid: 1000, gid: 100 };
        let mut buffer = vec![0; crate::limits::MESSAGE_BYTES_MAX];
        for request in all {
            let n = request.encode(caller, &mut buffer).unwrap();
            assert_eq!(Request::decode(&buffer[..n]).unwrap(), (caller, request));
            for short in 0..n.min(300) {
                assert!(Request::decode(&buffer[..short]).is_err(), "{request:?} cut to {short} bytes");
            }
        }
    }

    #[test]
    fn decode_bad_names_are_refused() {
        let caller = Caller { uid: 0, gid: 0 };
        let mut buffer = [0; 4096];
        let long = [b'x'; 256];
        for (name, code) in [
            (b"".as_slice(), Code::NotFound),
            (b".", Code::Invalid),
            (b"..", Code::Invalid),
            (b"a/b", Code::Invalid),
            (b"a\0", Code::Invalid),
            (&long, Code::NameTooLong),
        ] {
            let n = Request::Unlink { parent: Ino(1), name }.encode(caller, &mut buffer).unwrap();
            assert_eq!(Request::decode(&buffer[..n]).unwrap_err(), code, "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn decode_of_any_bytes_never_panics(op in 0u8..60, bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut all = vec![op];
            all.extend(bytes);
            let _ = Request::decode(&all);
        }
    }
}
