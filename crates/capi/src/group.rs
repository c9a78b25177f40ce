//! The functions of include/forebay.h on groups: a pointer and locks that processes on several nodes share.

use std::os::raw::c_int;

use crate::answer::{Failed, FAULT, INVALID};
use crate::file::{forebay_file, unsigned};

type Done = Result<(), Failed>;

pub(crate) fn file_group_make(file: &forebay_file, position: i64, group: Option<&mut u64>) -> Done {
    let group = group.ok_or(FAULT)?;
    *group = file.groups()?.make(unsigned(position)?)?;
    Ok(())
}

pub(crate) fn file_group_move(file: &forebay_file, group: u64, by: i64) -> Result<u64, Failed> {
    Ok(file.groups()?.move_by(group, unsigned(by)?)?)
}

pub(crate) fn file_group_seek(file: &forebay_file, group: u64, position: i64) -> Done {
    Ok(file.groups()?.seek(group, unsigned(position)?)?)
}

pub(crate) fn file_group_lock(
    file: &forebay_file,
    group: u64,
    writes: c_int,
    offset: i64,
    bytes: i64,
    lock: Option<&mut u64>,
) -> Done {
    let lock = lock.ok_or(FAULT)?;
    let (start, bytes) = (unsigned(offset)?, unsigned(bytes)?);
    let last = bytes.checked_sub(1).and_then(|more| start.checked_add(more));
    let end = last.filter(|end| *end <= i64::MAX as u64).ok_or(INVALID)?;
    *lock = file.groups()?.lock(group, writes != 0, start, end)?;
    Ok(())
}

pub(crate) fn file_group_unlock(file: &forebay_file, group: u64, lock: u64) -> Done {
    Ok(file.groups()?.unlock(group, lock)?)
}

pub(crate) fn file_group_end(file: &forebay_file, group: u64) -> Done {
    Ok(file.groups()?.end(group)?)
}
