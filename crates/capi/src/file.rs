//! The functions of include/forebay.h on files of any layout.
//!
//! A handle owns its descriptors until forebay_file_close. Several threads may read and write one handle at a time.

use std::os::raw::c_int;
use std::sync::Arc;

use forebay_client::{Groups, Pool, Run, Striping};
use forebay_types::Code;

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{forebay_run, FOREBAY_NORMAL, FOREBAY_SEQUENTIAL, FOREBAY_STRIPES_DEFAULT};
use crate::opened::Opened;
use crate::public::{at, Text};

/// An open file of any layout.
#[allow(non_camel_case_types)]
pub struct forebay_file {
    pool: &'static Pool,
    opened: Opened,
}

impl forebay_file {
    pub(crate) fn new(pool: &'static Pool, opened: Opened) -> *mut forebay_file {
        Box::into_raw(Box::new(forebay_file { pool, opened }))
    }

    /// The groups of processes that have it open.
    pub(crate) fn groups(&self) -> Result<Groups, Code> {
        match &self.opened {
            Opened::Pool(file) => Ok(file.groups()),
            Opened::Volume(file) => {
                let first = file.volume().first_piece().ok_or(Code::NotSupported)?;
                Ok(self.pool.groups_of_volume(first))
            }
        }
    }

    /// The file, for a transfer that may outlast the handle.
    pub(crate) fn shared(&self) -> Opened {
        self.opened.clone()
    }
}

impl std::ops::Deref for forebay_file {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

type Done = Result<(), Failed>;

/// Converts an offset or length, which is signed in C.
pub(crate) fn unsigned(value: i64) -> Result<u64, Failed> {
    u64::try_from(value).map_err(|_| INVALID)
}

pub(crate) fn file_open(
    pool: &'static Pool,
    path: Text<'_>,
    flags: c_int,
    mode: u32,
    stripe_count: u32,
    stripe_bytes: u32,
    out: Option<&mut *mut forebay_file>,
) -> Done {
    file_open_on(pool, path, flags, mode, stripe_count, stripe_bytes, &[], out)
}

#[allow(clippy::too_many_arguments)] // As the C function.
pub(crate) fn file_open_on(
    pool: &'static Pool,
    path: Text<'_>,
    flags: c_int,
    mode: u32,
    stripe_count: u32,
    stripe_bytes: u32,
    targets: &[u32],
    out: Option<&mut *mut forebay_file>,
) -> Done {
    let place = at(path)?;
    let out = out.ok_or(FAULT)?;
    let targets = crate::layout::checked(targets)?;
    let allowed = libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_CLOEXEC;
    let count = u16::try_from(stripe_count & !FOREBAY_STRIPES_DEFAULT).map_err(|_| INVALID)?;
    if flags & !allowed != 0 {
        return Err(INVALID);
    }
    let directory_takes_precedence = stripe_count == 0 || stripe_count & FOREBAY_STRIPES_DEFAULT != 0;
    let striping = Striping { stripe_count: count.max(1), stripe_bytes, directory_takes_precedence };
    let mut escape = forebay_client::PathBuffer::new();
    let file = pool.open_striped_on(place, flags, mode, striping, targets, &mut escape)?;
    *out = forebay_file::new(pool, Opened::Pool(Arc::new(file)));
    Ok(())
}

/// # Safety
/// `file` is null or an open file, which is not used again.
pub(crate) unsafe fn file_close(file: *mut forebay_file) -> Done {
    if file.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    let file = unsafe { Box::from_raw(file) };
    Ok(file.opened.close()?)
}

pub(crate) fn file_fd(file: &forebay_file) -> Result<c_int, Failed> {
    Ok(file.pool_file()?.fd().ok_or(Code::NotSupported)?)
}

pub(crate) fn file_number(file: &forebay_file, number: Option<&mut u64>) -> Done {
    *number.ok_or(FAULT)? = file.number();
    Ok(())
}

pub(crate) fn file_layout(
    file: &forebay_file,
    stripe_count: Option<&mut u32>,
    stripe_bytes: Option<&mut u32>,
) -> Done {
    let (count, bytes) = (stripe_count.ok_or(FAULT)?, stripe_bytes.ok_or(FAULT)?);
    let striping = file.striping();
    (*count, *bytes) = (striping.stripe_count.into(), striping.stripe_bytes);
    Ok(())
}

pub(crate) fn file_elsewhere(file: &forebay_file) -> Result<usize, Failed> {
    Ok(file.count_elsewhere())
}

pub(crate) fn file_pread(file: &forebay_file, buffer: &mut [u8], offset: i64) -> Result<usize, Failed> {
    Ok(file.read_at(buffer, unsigned(offset)?)?)
}

pub(crate) fn file_pwrite(file: &forebay_file, buffer: &[u8], offset: i64) -> Result<usize, Failed> {
    Ok(file.write_at(buffer, unsigned(offset)?)?)
}

/// The range of a call that takes only one.
fn one_run(parts: &[libc::iovec], offset: i64) -> Result<[Run; 1], Failed> {
    let bytes = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.iov_len as u64));
    Ok([Run { offset: unsigned(offset)?, bytes: bytes.ok_or(INVALID)? }])
}

/// Converts ranges for the client. A negative number becomes a large one, which [`check`] refuses.
fn ranges(runs: &[forebay_run]) -> &[Run] {
    // SAFETY: both structs have the same layout (header.rs), and all bytes are valid in both.
    unsafe { std::slice::from_raw_parts(runs.as_ptr().cast(), runs.len()) }
}

/// Checks memory and ranges.
fn check(parts: &[libc::iovec], runs: &[Run]) -> Done {
    if parts.iter().any(|part| part.iov_base.is_null() && part.iov_len > 0) {
        return Err(FAULT);
    }
    if runs.iter().any(|run| run.offset > i64::MAX as u64 || run.bytes > i64::MAX as u64) {
        return Err(INVALID);
    }
    Ok(())
}

/// # Safety
/// `parts` point to memory that is writable.
unsafe fn read(file: &forebay_file, parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Failed> {
    check(parts, runs)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { file.read_runs(parts, runs) }?)
}

/// # Safety
/// `parts` point to memory that is readable.
unsafe fn write(file: &forebay_file, parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Failed> {
    check(parts, runs)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { file.write_runs(parts, runs) }?)
}

/// # Safety
/// As of [`read`].
pub(crate) unsafe fn file_preadv(
    file: &forebay_file,
    parts: &[libc::iovec],
    offset: i64,
) -> Result<u64, Failed> {
    // SAFETY: the caller's promise.
    unsafe { read(file, parts, &one_run(parts, offset)?) }
}

/// # Safety
/// As of [`write`].
pub(crate) unsafe fn file_pwritev(
    file: &forebay_file,
    parts: &[libc::iovec],
    offset: i64,
) -> Result<u64, Failed> {
    // SAFETY: the caller's promise.
    unsafe { write(file, parts, &one_run(parts, offset)?) }
}

/// # Safety
/// As of [`read`].
pub(crate) unsafe fn file_read_runs(
    file: &forebay_file,
    parts: &[libc::iovec],
    runs: &[forebay_run],
) -> Result<u64, Failed> {
    // SAFETY: the caller's promise.
    unsafe { read(file, parts, ranges(runs)) }
}

/// # Safety
/// As of [`write`].
pub(crate) unsafe fn file_write_runs(
    file: &forebay_file,
    parts: &[libc::iovec],
    runs: &[forebay_run],
) -> Result<u64, Failed> {
    // SAFETY: the caller's promise.
    unsafe { write(file, parts, ranges(runs)) }
}

pub(crate) fn file_size(file: &forebay_file) -> Result<u64, Failed> {
    Ok(file.size()?)
}

pub(crate) fn file_truncate(file: &forebay_file, size: i64) -> Done {
    Ok(file.truncate(unsigned(size)?)?)
}

pub(crate) fn file_allocate(file: &forebay_file, size: i64) -> Done {
    Ok(file.allocate(unsigned(size)?)?)
}

pub(crate) fn file_advise(file: &forebay_file, advice: c_int) -> Done {
    match advice {
        FOREBAY_NORMAL => file.read_in_order(false),
        FOREBAY_SEQUENTIAL => file.read_in_order(true),
        _ => return Err(INVALID),
    }
    Ok(())
}

pub(crate) fn file_seek_data(file: &forebay_file, offset: i64) -> Result<u64, Failed> {
    Ok(file.seek_data(unsigned(offset)?)?)
}

pub(crate) fn file_seek_hole(file: &forebay_file, offset: i64) -> Result<u64, Failed> {
    Ok(file.seek_hole(unsigned(offset)?)?)
}

pub(crate) fn file_punch(file: &forebay_file, offset: i64, bytes: i64) -> Done {
    Ok(file.punch(unsigned(offset)?, unsigned(bytes)?)?)
}

pub(crate) fn file_sync(file: &forebay_file) -> Done {
    Ok(file.sync()?)
}
