//! The functions of include/forebay.h on volumes. A put or get of memory on this
//! node is a comparison and a copy: no system call.

use std::os::raw::{c_int, c_void};
use std::sync::Arc;

use ::forebay_volume::{FileFlags, Striped, VolumeFile};
use forebay_client::{memory_in_use, Pool};
use forebay_types::Code;

use crate::answer::{Failed, FAULT, INVALID};
use crate::file::{forebay_file, unsigned};
use crate::header::forebay_run;
use crate::opened::Opened;
use crate::public::{free_handle, Text};

/// An open volume.
#[allow(non_camel_case_types)]
pub struct forebay_volume(Arc<Striped>);

impl forebay_volume {
    /// It, for a call that may end after the volume is closed.
    pub(crate) fn shared(&self) -> Arc<Striped> {
        Arc::clone(&self.0)
    }
}

type Done = Result<(), Failed>;

/// The failure of an access. If a piece on another node was the reason, `forebay_attach_error` has it in words; else it
/// has none, and not those of a call before.
fn failed(volume: &Striped, code: Code) -> Failed {
    let reason = volume.reason().filter(|_| matches!(code, Code::Io | Code::NoSpace));
    crate::text::remember(reason.as_deref().unwrap_or_default());
    code.into()
}

pub(crate) fn volume_open(
    pool: &'static Pool,
    specifier: Text<'_>,
    flags: c_int,
    out: Option<&mut *mut forebay_volume>,
) -> Done {
    let (specifier, out) = (specifier.ok_or(FAULT)?, out.ok_or(FAULT)?);
    let writes = match flags & !libc::O_CLOEXEC {
        libc::O_RDONLY => false,
        libc::O_RDWR => true,
        _ => return Err(INVALID),
    };
    let volume = opened(pool, specifier, writes)?;
    *out = Box::into_raw(Box::new(forebay_volume(Arc::new(volume))));
    Ok(())
}

fn opened(pool: &'static Pool, specifier: &[u8], writes: bool) -> Result<Striped, Failed> {
    // For failures of what follows, too, that have no words.
    crate::text::remember("");
    pool.volume_open(specifier, writes).map_err(|e| {
        crate::text::remember(&e.to_string());
        Failed::from(e.code)
    })
}

pub(crate) fn volume_file_open(
    pool: &'static Pool,
    specifier: Text<'_>,
    flags: c_int,
    out: Option<&mut *mut forebay_file>,
) -> Done {
    let (specifier, out) = (specifier.ok_or(FAULT)?, out.ok_or(FAULT)?);
    let has = |flag| flags & flag != 0;
    let (reads, writes) = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => (true, false),
        libc::O_WRONLY => (false, true),
        libc::O_RDWR => (true, true),
        _ => return Err(INVALID),
    };
    let others = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;
    if flags & !(libc::O_ACCMODE | libc::O_CLOEXEC | others) != 0 || (!writes && has(others)) {
        return Err(INVALID);
    }
    let (creates, truncates) = (has(libc::O_CREAT), has(libc::O_TRUNC));
    let is_exclusive = creates && has(libc::O_EXCL);
    let flags = FileFlags { reads, writes, creates, is_exclusive, truncates };
    let file = VolumeFile::open(opened(pool, specifier, writes)?, flags)?;
    *out = forebay_file::new(pool, Opened::Volume(Arc::new(file)));
    Ok(())
}

pub(crate) fn volume_file_unlink(pool: &'static Pool, specifier: Text<'_>) -> Done {
    Ok(opened(pool, specifier.ok_or(FAULT)?, true)?.remove_file()?)
}

/// # Safety
/// `volume` is null or open, and not used again.
pub(crate) unsafe fn volume_close(volume: *mut forebay_volume) -> Done {
    // SAFETY: the caller's promise.
    unsafe { free_handle(volume) }
}

pub(crate) fn volume_size(volume: &forebay_volume) -> Result<u64, Failed> {
    Ok(volume.0.bytes())
}

/// # Safety
/// `from` is readable for `bytes` bytes.
pub(crate) unsafe fn volume_put(
    volume: &forebay_volume,
    from: *const c_void,
    bytes: usize,
    offset: i64,
) -> Done {
    let offset = unsigned(offset)?;
    if from.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let _in_use = memory_in_use(from.cast(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { volume.0.put(offset, from.cast(), bytes) }.map_err(|code| failed(&volume.0, code))
}

/// # Safety
/// `to` is writable for `bytes` bytes.
pub(crate) unsafe fn volume_get(volume: &forebay_volume, to: *mut c_void, bytes: usize, offset: i64) -> Done {
    let offset = unsigned(offset)?;
    if to.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let _in_use = memory_in_use(to.cast_const().cast(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { volume.0.get(offset, to.cast(), bytes) }.map_err(|code| failed(&volume.0, code))
}

fn list(runs: &[forebay_run]) -> Result<Vec<(u64, u64)>, Failed> {
    runs.iter().map(|run| Ok((unsigned(run.offset)?, unsigned(run.bytes)?))).collect()
}

/// # Safety
/// `from` is readable for `bytes` bytes.
pub(crate) unsafe fn volume_putv(
    volume: &forebay_volume,
    from: *const c_void,
    bytes: usize,
    runs: &[forebay_run],
) -> Done {
    if from.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let _in_use = memory_in_use(from.cast(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { volume.0.put_runs(&list(runs)?, from.cast(), bytes) }.map_err(|code| failed(&volume.0, code))
}

/// # Safety
/// `to` is writable for `bytes` bytes.
pub(crate) unsafe fn volume_getv(
    volume: &forebay_volume,
    to: *mut c_void,
    bytes: usize,
    runs: &[forebay_run],
) -> Done {
    if to.is_null() && bytes > 0 {
        return Err(FAULT);
    }
    let _in_use = memory_in_use(to.cast_const().cast(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { volume.0.get_runs(&list(runs)?, to.cast(), bytes) }.map_err(|code| failed(&volume.0, code))
}

pub(crate) fn volume_cas(
    volume: &forebay_volume,
    offset: i64,
    expected: u64,
    value: u64,
    was: Option<&mut u64>,
) -> Done {
    let was = was.ok_or(FAULT)?;
    let done = volume.0.compare_and_swap(unsigned(offset)?, expected, value);
    *was = done.map_err(|code| failed(&volume.0, code))?;
    Ok(())
}

pub(crate) fn volume_fetch_add(volume: &forebay_volume, offset: i64, by: u64, was: Option<&mut u64>) -> Done {
    let was = was.ok_or(FAULT)?;
    *was = volume.0.fetch_add(unsigned(offset)?, by).map_err(|code| failed(&volume.0, code))?;
    Ok(())
}

pub(crate) fn volume_swap(volume: &forebay_volume, offset: i64, value: u64, was: Option<&mut u64>) -> Done {
    let was = was.ok_or(FAULT)?;
    *was = volume.0.swap(unsigned(offset)?, value).map_err(|code| failed(&volume.0, code))?;
    Ok(())
}

pub(crate) fn volume_discard(volume: &forebay_volume, offset: i64, bytes: usize) -> Done {
    let done = volume.0.discard(unsigned(offset)?, bytes as u64);
    done.map_err(|code| failed(&volume.0, code))
}

pub(crate) fn volume_flush(volume: &forebay_volume) -> Done {
    volume.0.flush().map_err(|code| failed(&volume.0, code))
}

pub(crate) fn volume_fence(volume: &forebay_volume) -> Done {
    Ok(volume.0.fence()?)
}

pub(crate) fn volume_map(
    volume: &forebay_volume,
    offset: i64,
    address: Option<&mut *mut c_void>,
    bytes: Option<&mut usize>,
) -> Done {
    let (address, bytes) = (address.ok_or(FAULT)?, bytes.ok_or(FAULT)?);
    let (place, run) = volume.0.map(unsigned(offset)?)?;
    (*address, *bytes) = (place.cast(), run as usize);
    Ok(())
}
