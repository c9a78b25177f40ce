//! The functions of include/forebay.h on files of any layout: `forebay_file`.
//!
//! A handle owns its descriptors until forebay_file_close. Several threads may read and write one handle at a time.

use std::os::raw::{c_char, c_int, c_void};
use std::ptr::null;
use std::sync::Arc;

use forebay_client::{Fail, File, Run, Striping};
use forebay_types::Code;

use crate::abi::PoolHandle;
use crate::guard::{bytes, guard, negative, room, Answer, FAULT};
use crate::public::on_path;

/// `FOREBAY_STRIPES_DEFAULT` of forebay.h: the directory's layout goes first where it has several backing files.
const STRIPES_DEFAULT: u32 = 0x8000_0000;

/// An open file of any layout: `forebay_file`.
#[allow(non_camel_case_types)]
pub struct forebay_file {
    file: Arc<File>,
}

impl forebay_file {
    /// The file, for a transfer that may outlast the handle.
    pub(crate) fn shared(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }
}

/// Runs `body` on the file of a handle.
///
/// # Safety
/// `handle` is null or from forebay_file_open and not closed.
pub(crate) unsafe fn on_file(handle: *const forebay_file, body: impl FnOnce(&File) -> Answer) -> i64 {
    guard(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle.as_ref() }.ok_or(FAULT)?;
        body(&handle.file)
    })
}

/// An offset or length that C gave as a signed number.
pub(crate) fn unsigned(value: i64) -> Result<u64, i64> {
    u64::try_from(value).map_err(|_| negative(Code::Invalid))
}

// SAFETY of the blocks below: forebay.h tells C callers what files, paths, room and values must be.

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_open(
    pool: *const PoolHandle,
    path: *const c_char,
    flags: c_int,
    mode: u32,
    stripe_count: u32,
    stripe_bytes: u32,
    out: *mut *mut forebay_file,
) -> c_int {
    // SAFETY: see above.
    unsafe { forebay_file_open_on(pool, path, flags, mode, stripe_count, stripe_bytes, null(), 0, out) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
#[allow(clippy::too_many_arguments)] // C's
pub unsafe extern "C" fn forebay_file_open_on(
    pool: *const PoolHandle,
    path: *const c_char,
    flags: c_int,
    mode: u32,
    stripe_count: u32,
    stripe_bytes: u32,
    targets: *const u32,
    target_count: c_int,
    out: *mut *mut forebay_file,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let out = out.as_mut().ok_or(Fail::Code(Code::Fault))?;
            let targets = crate::layout::targets(targets, target_count)?;
            let allowed = libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_CLOEXEC;
            let count =
                u16::try_from(stripe_count & !STRIPES_DEFAULT).map_err(|_| Fail::Code(Code::Invalid))?;
            if flags & !allowed != 0 {
                return Err(Fail::Code(Code::Invalid));
            }
            let yields = stripe_count == 0 || stripe_count & STRIPES_DEFAULT != 0;
            let striping = Striping { stripe_count: count.max(1), stripe_bytes, yields };
            let file = pool.open_striped_on(at, flags, mode, striping, targets, escape)?;
            *out = Box::into_raw(Box::new(forebay_file { file: Arc::new(file) }));
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_close(file: *mut forebay_file) -> c_int {
    let answer = guard(|| {
        if file.is_null() {
            return Err(FAULT);
        }
        // SAFETY: see above; it came from forebay_file_open and is not used again.
        drop(unsafe { Box::from_raw(file) });
        Ok(0)
    });
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_fd(file: *const forebay_file) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.fd().map(i64::from).ok_or(negative(Code::NotSupported))) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_layout(
    file: *const forebay_file,
    stripe_count: *mut u32,
    stripe_bytes: *mut u32,
) -> c_int {
    let answer = |file: &File| {
        // SAFETY: see above.
        let (count, bytes) =
            unsafe { (stripe_count.as_mut().ok_or(FAULT)?, stripe_bytes.as_mut().ok_or(FAULT)?) };
        let striping = file.striping();
        (*count, *bytes) = (striping.stripe_count.into(), striping.stripe_bytes);
        Ok(0)
    };
    // SAFETY: see above.
    unsafe { on_file(file, answer) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_elsewhere(file: *const forebay_file) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file: &File| Ok(file.count_elsewhere() as i64)) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_pread(
    file: *const forebay_file,
    buffer: *mut c_void,
    count: usize,
    offset: i64,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let into = room(buffer.cast(), count);
            file.read_at(into, unsigned(offset)?).map(|n| n as i64).map_err(negative)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_pwrite(
    file: *const forebay_file,
    buffer: *const c_void,
    count: usize,
    offset: i64,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let from = bytes(buffer.cast(), count);
            file.write_at(from, unsigned(offset)?).map(|n| n as i64).map_err(negative)
        })
    }
}

/// A C array.
///
/// # Safety
/// `first` is null or points to `count` elements that live as long as the call.
pub(crate) unsafe fn array<'a, T>(first: *const T, count: c_int) -> Result<&'a [T], i64> {
    let count = usize::try_from(count).map_err(|_| negative(Code::Invalid))?;
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(FAULT);
    }
    // SAFETY: not null; the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Ranges and memory as C gave them.
///
/// # Safety
/// As [`array`]'s.
unsafe fn lists<'a>(
    parts: *const libc::iovec,
    part_count: c_int,
    runs: *const Run,
    run_count: c_int,
) -> Result<(&'a [libc::iovec], &'a [Run]), i64> {
    // SAFETY: the caller's promise.
    let (parts, runs) = unsafe { (array(parts, part_count)?, array(runs, run_count)?) };
    if parts.iter().any(|part| part.iov_base.is_null() && part.iov_len > 0) {
        return Err(FAULT);
    }
    if runs.iter().any(|run| run.offset > i64::MAX as u64 || run.bytes > i64::MAX as u64) {
        return Err(negative(Code::Invalid));
    }
    Ok((parts, runs))
}

/// The one range of a call that has no list of them.
///
/// # Safety
/// As [`array`]'s.
unsafe fn one_run(parts: *const libc::iovec, part_count: c_int, offset: i64) -> Result<Run, i64> {
    // SAFETY: the caller's promise.
    let parts = unsafe { array(parts, part_count)? };
    let bytes = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.iov_len as u64));
    Ok(Run { offset: unsigned(offset)?, bytes: bytes.ok_or(negative(Code::Invalid))? })
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_preadv(
    file: *const forebay_file,
    parts: *const libc::iovec,
    part_count: c_int,
    offset: i64,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let run = one_run(parts, part_count, offset)?;
            let (parts, runs) = lists(parts, part_count, &run, 1)?;
            file.read_runs(parts, runs).map(|n| n as i64).map_err(negative)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_pwritev(
    file: *const forebay_file,
    parts: *const libc::iovec,
    part_count: c_int,
    offset: i64,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let run = one_run(parts, part_count, offset)?;
            let (parts, runs) = lists(parts, part_count, &run, 1)?;
            file.write_runs(parts, runs).map(|n| n as i64).map_err(negative)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_read_runs(
    file: *const forebay_file,
    parts: *const libc::iovec,
    part_count: c_int,
    runs: *const Run,
    run_count: c_int,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let (parts, runs) = lists(parts, part_count, runs, run_count)?;
            file.read_runs(parts, runs).map(|n| n as i64).map_err(negative)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_write_runs(
    file: *const forebay_file,
    parts: *const libc::iovec,
    part_count: c_int,
    runs: *const Run,
    run_count: c_int,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let (parts, runs) = lists(parts, part_count, runs, run_count)?;
            file.write_runs(parts, runs).map(|n| n as i64).map_err(negative)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_size(file: *const forebay_file) -> i64 {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.size().map(|n| n as i64).map_err(negative)) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_truncate(file: *const forebay_file, size: i64) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.truncate(unsigned(size)?).map(|()| 0).map_err(negative)) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_allocate(file: *const forebay_file, size: i64) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.allocate(unsigned(size)?).map(|()| 0).map_err(negative)) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_advise(file: *const forebay_file, advice: c_int) -> c_int {
    let answer = |file: &File| {
        match advice {
            libc::POSIX_FADV_NORMAL => file.read_in_order(false),
            libc::POSIX_FADV_SEQUENTIAL => file.read_in_order(true),
            _ => return Err(negative(Code::Invalid)),
        }
        Ok(0)
    };
    // SAFETY: see above.
    unsafe { on_file(file, answer) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_seek_data(file: *const forebay_file, offset: i64) -> i64 {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.seek_data(unsigned(offset)?).map(|n| n as i64).map_err(negative)) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_seek_hole(file: *const forebay_file, offset: i64) -> i64 {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.seek_hole(unsigned(offset)?).map(|n| n as i64).map_err(negative)) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_punch(file: *const forebay_file, offset: i64, count: i64) -> c_int {
    let answer = |file: &File| file.punch(unsigned(offset)?, unsigned(count)?).map(|()| 0).map_err(negative);
    // SAFETY: see above.
    unsafe { on_file(file, answer) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_sync(file: *const forebay_file) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.sync().map(|()| 0).map_err(negative)) as c_int }
}
