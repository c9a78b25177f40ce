//! scandir, over directories in the pool.

use std::os::raw::{c_char, c_int, c_void};

use libc::dirent as Dirent;

use crate::directory::{closedir, copy_entry, opendir_at, readdir};
use crate::interpose::{errno, set_errno};
use crate::real;
use crate::stdio::libc_would_miss;

type Select = Option<unsafe extern "C-unwind" fn(*const Dirent) -> c_int>;
type Compare = Option<unsafe extern "C-unwind" fn(*mut *const Dirent, *mut *const Dirent) -> c_int>;

unsafe fn scan(
    at: c_int,
    path: *const c_char,
    names: *mut *mut *mut Dirent,
    select: Select,
    compare: Compare,
) -> c_int {
    // SAFETY: libc's contract, which libc's own functions keep too.
    unsafe {
        if !libc_would_miss(at, path, false, true) {
            let count = real::libc_own::scandirat(at, path, names, select, compare);
            if count >= 0 || errno() != libc::ENOENT || !libc_would_miss(at, path, true, true) {
                return count;
            }
        }
        let stream = opendir_at(at, path);
        if stream.is_null() {
            return -1;
        }
        let before = errno();
        let (mut list, mut count, mut room): (*mut *mut Dirent, usize, usize) = (std::ptr::null_mut(), 0, 0);
        let failed = loop {
            set_errno(0);
            let entry = readdir(stream);
            if entry.is_null() {
                break errno();
            }
            if select.is_some_and(|select| select(entry) == 0) {
                continue;
            }
            if count == room {
                room = (room * 2).max(32);
                let longer = libc::realloc(list.cast(), room * size_of::<*mut Dirent>());
                if longer.is_null() {
                    break libc::ENOMEM;
                }
                list = longer.cast();
            }
            let copy = copy_entry(entry);
            if copy.is_null() {
                break libc::ENOMEM;
            }
            list.add(count).write(copy);
            count += 1;
        };
        closedir(stream);
        if failed != 0 {
            for i in 0..count {
                libc::free(list.add(i).read().cast());
            }
            libc::free(list.cast());
            set_errno(failed);
            return -1;
        }
        if let Some(compare) = compare {
            type Sort = unsafe extern "C" fn(*const c_void, *const c_void) -> c_int;
            // The function that compares entries takes pointers to elements of the list, as qsort passes them.
            let compare = std::mem::transmute::<
                unsafe extern "C-unwind" fn(*mut *const Dirent, *mut *const Dirent) -> c_int,
                Sort,
            >(compare);
            if count > 0 {
                libc::qsort(list.cast(), count, size_of::<*mut Dirent>(), Some(compare));
            }
        }
        set_errno(before);
        names.write(list);
        count as c_int
    }
}

interpose! {
    /// scandir(3)
    scandir, scandir64 = fn(
        path: *const c_char,
        names: *mut *mut *mut Dirent,
        select: Select,
        compare: Compare
    ) -> c_int {
        // SAFETY: libc's contract.
        unsafe { scan(libc::AT_FDCWD, path, names, select, compare) }
    }

    /// scandirat(3)
    scandirat, scandirat64 = fn(
        at: c_int,
        path: *const c_char,
        names: *mut *mut *mut Dirent,
        select: Select,
        compare: Compare
    ) -> c_int {
        // SAFETY: libc's contract.
        unsafe { scan(at, path, names, select, compare) }
    }
}
