//! The functions of include/forebay.h on how files and directories lie: stripes, targets, width.

use std::os::raw::{c_char, c_int};
use std::ptr::null;

use forebay_client::{targets_of, Fail, Striping};
use forebay_types::limits::TARGETS_MAX;
use forebay_types::{Code, Targets};

use crate::abi::PoolHandle;
use crate::file::array;
use crate::public::on_path;

// SAFETY of the blocks below: forebay.h tells C callers what paths, lists and values must be.

/// Targets as C gave them.
///
/// # Safety
/// `first` is null or points to `count` numbers that live as long as the call.
pub(crate) unsafe fn targets<'a>(first: *const u32, count: c_int) -> Result<&'a [u32], Fail> {
    // SAFETY: the caller's promise.
    let targets = unsafe { array(first, count) };
    match targets {
        Ok(targets) if targets.len() <= TARGETS_MAX => Ok(targets),
        Ok(_) => Err(Fail::Code(Code::Invalid)),
        Err(negative) => Err(Fail::Code(Code::from_errno(-negative as i32))),
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_get(
    pool: *const PoolHandle,
    path: *const c_char,
    stripe_count: *mut u32,
    stripe_bytes: *mut u32,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let (count, bytes) = (stripe_count.as_mut(), stripe_bytes.as_mut());
            let (Some(count), Some(bytes)) = (count, bytes) else { return Err(Fail::Code(Code::Fault)) };
            let striping = Striping::of(&pool.resolve(at, true, escape)?.layout);
            (*count, *bytes) = (striping.stripe_count.into(), striping.stripe_bytes);
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_set(
    pool: *const PoolHandle,
    path: *const c_char,
    stripe_count: u32,
    stripe_bytes: u32,
) -> c_int {
    // SAFETY: see above.
    unsafe { forebay_layout_set_on(pool, path, stripe_count, stripe_bytes, null(), 0) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_set_on(
    pool: *const PoolHandle,
    path: *const c_char,
    stripe_count: u32,
    stripe_bytes: u32,
    list: *const u32,
    target_count: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let targets = targets(list, target_count)?;
            let directory = pool.resolve(at, true, escape)?;
            let count = u16::try_from(stripe_count).map_err(|_| Fail::Code(Code::Invalid))?;
            pool.set_layout_of_new(&directory, (count, stripe_bytes), targets)?;
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_migrate(pool: *const PoolHandle, path: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let entry = pool.resolve(at, true, escape)?;
            pool.make_single(entry.attr.ino, false)?;
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_targets(
    pool: *const PoolHandle,
    path: *const c_char,
    out: *mut u32,
    room: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let entry = pool.resolve(at, true, escape)?;
            // A directory with none set has its home's first as a stand-in.
            let chosen = entry.attr.is_directory() && !entry.layout.is_set(entry.attr.home);
            let found = if chosen { None } else { targets_of(&entry.layout.components()[0]) };
            let found = found.as_ref().map_or(&[][..], Targets::as_slice);
            let room = usize::try_from(room).map_err(|_| Fail::Code(Code::Invalid))?;
            if out.is_null() && room > 0 {
                return Err(Fail::Code(Code::Fault));
            }
            let copied = found.len().min(room);
            if copied > 0 {
                out.copy_from_nonoverlapping(found.as_ptr(), copied);
            }
            Ok(found.len() as i64)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_width(pool: *const PoolHandle, path: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let attr = pool.resolve(at, true, escape)?.attr;
            if !attr.is_directory() {
                return Err(Fail::Code(Code::NotDirectory));
            }
            let parts = if attr.width_log2 == 0 { None } else { pool.parts_of(attr.ino)? };
            Ok(parts.map_or(1, |parts| parts.as_slice().len() as i64))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_layout_set_width(
    pool: *const PoolHandle,
    path: *const c_char,
    width: u32,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let attr = pool.resolve(at, true, escape)?.attr;
            let width = u16::try_from(width).map_err(|_| Fail::Code(Code::Invalid))?;
            if attr.is_directory() && width == 1 && attr.width_log2 == 0 {
                return Ok(0);
            }
            pool.set_width(attr.ino, width)?;
            Ok(0)
        })
    }
}
