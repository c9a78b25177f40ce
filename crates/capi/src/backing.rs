//! The functions of include/forebay.h for files in front of a backing store.

use std::os::raw::c_int;
use std::time::Duration;

use forebay_client::{DataState, Kept, PathBuffer, Pool};
use forebay_types::{Code, Entry, Ino, EPOCH_UNKNOWN};

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{
    forebay_path_state, FOREBAY_CLEAN, FOREBAY_DIRTY, FOREBAY_DRAINING, FOREBAY_RELEASED, FOREBAY_UNATTACHED,
};
use crate::public::{at, Text};

type Done = Result<(), Failed>;
/// A name: the directory, and the name in it.
type Named<'a> = Option<(Ino, &'a [u8])>;

/// The inode at a path, and the directory and name that lead there; none for the root, and for a path that ends in a
/// symbolic link's target.
fn find<'a>(pool: &Pool, path: Text<'a>) -> Result<(Entry, Named<'a>), Failed> {
    let place = at(path)?;
    let entry = pool.resolve(place, true, &mut PathBuffer::new())?;
    let end = place.path.iter().rposition(|b| *b != b'/').map_or(0, |last| last + 1);
    let path = &place.path[..end];
    let start = path.iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
    let (above, name) = path.split_at(start);
    if matches!(name, b"" | b"." | b"..") {
        return Ok((entry, None));
    }
    let above = forebay_client::Place { path: above, ..place };
    let itself = pool.resolve(forebay_client::Place { path, ..place }, false, &mut PathBuffer::new())?;
    if itself.attr.ino != entry.attr.ino {
        return Ok((entry, None));
    }
    let parent = match above.path {
        b"" => place.dir,
        _ => pool.resolve(above, true, &mut PathBuffer::new())?.attr.ino,
    };
    Ok((entry, Some((parent, name))))
}

/// Finds a regular file. Whole trees are handled by the `forebay` command only.
fn file(pool: &Pool, path: Text<'_>) -> Result<Entry, Failed> {
    let (entry, _) = find(pool, path)?;
    match () {
        () if entry.attr.is_directory() => Err(Code::IsDirectory.into()),
        () if !entry.attr.is_file() => Err(INVALID),
        () if DataState::of(&entry.attr) == DataState::Unattached => Err(Code::NoAttribute.into()),
        () => Ok(entry),
    }
}

pub(crate) fn state(pool: &Pool, path: Text<'_>, out: Option<&mut forebay_path_state>) -> Done {
    let out = out.ok_or(FAULT)?;
    let (entry, name) = find(pool, path)?;
    let state = pool.store_state(entry.attr.ino, name)?;
    let version = state.placed.map(|placed| placed.version);
    *out = forebay_path_state {
        state: match state.data {
            DataState::Unattached => FOREBAY_UNATTACHED,
            DataState::Released => FOREBAY_RELEASED,
            DataState::Clean => FOREBAY_CLEAN,
            DataState::Dirty => FOREBAY_DIRTY,
            DataState::Draining => FOREBAY_DRAINING,
        },
        durable: state.is_durable().into(),
        conflict: state.conflict.into(),
        pinned: (state.attr.flags & forebay_types::FLAG_PINNED != 0).into(),
        epoch: if state.attr.is_file() { state.attr.epoch() } else { EPOCH_UNKNOWN },
        stored_bytes: version.map_or(-1, |version| version.bytes as i64),
        stored_mtime_s: version.map_or(0, |version| version.mtime.sec),
    };
    Ok(())
}

pub(crate) fn wait_durable(pool: &Pool, path: Text<'_>, timeout_ms: c_int) -> Done {
    let (entry, name) = find(pool, path)?;
    let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    match pool.wait_durable(entry.attr.ino, name, limit) {
        // Elsewhere this code stands for a daemon that does not answer.
        Err(Code::TimedOut) => Err(Failed::errno(libc::ETIMEDOUT)),
        result => Ok(result?),
    }
}

pub(crate) fn sync(pool: &Pool, path: Text<'_>) -> Done {
    Ok(pool.persist(file(pool, path)?.attr.ino)?)
}

pub(crate) fn prestage(pool: &Pool, path: Text<'_>) -> Done {
    let entry = file(pool, path)?;
    match entry.attr.is_resident() {
        true => Ok(()),
        false => Ok(pool.restore(entry.attr.ino).map(|_| ())?),
    }
}

pub(crate) fn release(pool: &Pool, path: Text<'_>) -> Done {
    match pool.release_file(&file(pool, path)?)? {
        Ok(_) | Err(Kept::Released) => Ok(()),
        Err(Kept::Because(_)) => Err(Code::Busy.into()),
    }
}

pub(crate) fn pin(pool: &Pool, path: Text<'_>, pinned: c_int) -> Done {
    let (entry, _) = find(pool, path)?;
    Ok(pool.pin(entry.attr.ino, pinned != 0)?)
}
