//! The functions of include/forebay.h on what processes have in common that opened a file together.

use std::os::raw::c_int;

use forebay_types::Code;

use crate::file::{forebay_file, on_file, unsigned};
use crate::guard::{negative, FAULT};

// SAFETY of the blocks below: forebay.h tells C callers what files, room and values must be.

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_make(
    file: *const forebay_file,
    position: i64,
    group: *mut u64,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let out = group.as_mut().ok_or(FAULT)?;
            *out = file.group_make(unsigned(position)?).map_err(negative)?;
            Ok(0)
        }) as c_int
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_move(file: *const forebay_file, group: u64, by: i64) -> i64 {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.group_move(group, unsigned(by)?).map(|n| n as i64).map_err(negative)) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_seek(
    file: *const forebay_file,
    group: u64,
    position: i64,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| file.group_seek(group, unsigned(position)?).map(|()| 0).map_err(negative))
            as c_int
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_lock(
    file: *const forebay_file,
    group: u64,
    writes: c_int,
    offset: i64,
    bytes: i64,
    lock: *mut u64,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_file(file, |file| {
            let out = lock.as_mut().ok_or(FAULT)?;
            let (start, bytes) = (unsigned(offset)?, unsigned(bytes)?);
            let last = bytes.checked_sub(1).and_then(|more| start.checked_add(more));
            let end = last.filter(|end| *end <= i64::MAX as u64).ok_or(negative(Code::Invalid))?;
            *out = file.group_lock(group, writes != 0, start, end).map_err(negative)?;
            Ok(0)
        }) as c_int
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_unlock(
    file: *const forebay_file,
    group: u64,
    lock: u64,
) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.group_unlock(group, lock).map(|()| 0).map_err(negative)) as c_int }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_file_group_end(file: *const forebay_file, group: u64) -> c_int {
    // SAFETY: see above.
    unsafe { on_file(file, |file| file.group_end(group).map(|()| 0).map_err(negative)) as c_int }
}
