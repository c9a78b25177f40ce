//! Attributes to set, and how a request carries them.

use crate::attr::{Attr, Kind, Timestamp};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::limits::{FILE_BYTES_MAX, WIDTH_MAX};

/// A time to set, as for `utimensat`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TimeSet {
    /// Unchanged (UTIME_OMIT).
    #[default]
    Omit,
    /// The daemon's clock (UTIME_NOW).
    Now,
    /// This time.
    At(Timestamp),
}

/// Attributes to set; `None` leaves an attribute unchanged. Any change updates ctime; an empty `SetAttr` updates only
/// ctime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner. An interface that changes owner or group clears set-id bits by setting `mode` too.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// The size hint of a file.
    pub size: Option<u64>,
    /// Access time.
    pub atime: TimeSet,
    /// Modification time.
    pub mtime: TimeSet,
    /// For a directory: the number of nodes over which the entries of new directories in it are distributed, 2 to
    /// [`WIDTH_MAX`]; 0 for one.
    ///
    /// [`WIDTH_MAX`]: crate::limits::WIDTH_MAX
    pub width_of_new: Option<u8>,
}

/// The encoding of an unchanged width.
const WIDTH_OMITTED: u8 = 0xff;

impl TimeSet {
    /// Appends the time.
    pub(crate) fn encode(self, w: &mut Writer<'_>) -> Result<(), Code> {
        let (tag, at) = match self {
            TimeSet::Omit => (0, Timestamp::default()),
            TimeSet::Now => (1, Timestamp::default()),
            TimeSet::At(at) => (2, at),
        };
        w.u8(tag)?;
        w.u64(at.sec as u64)?;
        w.u32(at.nsec)
    }

    /// Reads a time.
    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<TimeSet, Code> {
        let tag = r.u8()?;
        let at = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
        match tag {
            0 => Ok(TimeSet::Omit),
            1 => Ok(TimeSet::Now),
            2 if at.nsec < 1_000_000_000 => Ok(TimeSet::At(at)),
            _ => Err(Code::Invalid),
        }
    }
}

impl SetAttr {
    /// Appends the attributes.
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        put_option_u64(w, self.mode.map(u64::from))?;
        put_option_u64(w, self.uid.map(u64::from))?;
        put_option_u64(w, self.gid.map(u64::from))?;
        put_option_u64(w, self.size)?;
        self.atime.encode(w)?;
        self.mtime.encode(w)?;
        w.u8(self.width_of_new.unwrap_or(WIDTH_OMITTED))
    }

    /// Reads and checks attributes.
    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<SetAttr, Code> {
        let set = SetAttr {
            mode: option_u32(r)?,
            uid: option_u32(r)?,
            gid: option_u32(r)?,
            size: option_u64(r)?,
            atime: TimeSet::decode(r)?,
            mtime: TimeSet::decode(r)?,
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

    /// Applies the changes to attributes, with `now` as the present time.
    ///
    /// # Errors
    /// The error of the first change that this kind of inode does not allow. `attr` is then unchanged.
    pub fn apply(&self, attr: &mut Attr, now: Timestamp) -> Result<(), Code> {
        if self.mode.is_some() && attr.is_symlink() {
            return Err(Code::NotSupported);
        }
        match (self.size, attr.kind()) {
            (None, _) => {}
            (Some(size), Kind::File) if size <= FILE_BYTES_MAX => {}
            (_, Kind::File) => return Err(Code::FileTooLarge),
            (_, Kind::Directory) => return Err(Code::IsDirectory),
            _ => return Err(Code::Invalid),
        }
        if self.width_of_new.is_some() && !attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        // Nothing is refused from here on.
        attr.size = self.size.unwrap_or(attr.size);
        if let Some(width) = self.width_of_new {
            attr.set_width_of_new(width);
        }
        if let Some(mode) = self.mode {
            attr.mode = attr.mode & 0o170_000 | mode & 0o7777;
        }
        attr.uid = self.uid.unwrap_or(attr.uid);
        attr.gid = self.gid.unwrap_or(attr.gid);
        for (time, set) in [(&mut attr.atime, self.atime), (&mut attr.mtime, self.mtime)] {
            match set {
                TimeSet::Omit => {}
                TimeSet::Now => *time = now,
                TimeSet::At(at) => *time = at,
            }
        }
        attr.ctime = now;
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Ino, NodeId};

    #[test]
    fn apply_that_is_refused_leaves_the_attributes_alone() {
        let zero = Timestamp::default();
        let file = Attr {
            ino: Ino::new(NodeId(1), 2),
            size: 7,
            rdev: 0,
            parent: Ino::ROOT,
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            nlink: 1,
            flags: 0,
            home: NodeId(1),
            width_log2: 0,
            atime: zero,
            mtime: zero,
            ctime: zero,
            btime: zero,
        };
        let directory = Attr { mode: 0o040_755, ..file };
        let link = Attr { mode: 0o120_777, ..file };
        let all = SetAttr {
            mode: Some(0o600),
            uid: Some(9),
            size: Some(100),
            width_of_new: Some(2),
            ..SetAttr::default()
        };
        for (before, set, code) in [
            (file, all, Code::NotDirectory),
            (file, SetAttr { size: Some(u64::MAX), width_of_new: None, ..all }, Code::FileTooLarge),
            (directory, all, Code::IsDirectory),
            (link, all, Code::NotSupported),
            (link, SetAttr { mode: None, ..all }, Code::Invalid),
        ] {
            let mut attr = before;
            assert_eq!(set.apply(&mut attr, Timestamp { sec: 5, nsec: 0 }), Err(code));
            assert_eq!(attr, before, "{set:?}");
        }
        let mut attr = file;
        SetAttr { width_of_new: None, ..all }.apply(&mut attr, zero).unwrap();
        assert_eq!((attr.size, attr.mode, attr.uid), (100, 0o100_600, 9));
    }
}
