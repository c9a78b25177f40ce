//! flock of directories. The kernel locks files, on their backing files, and directories of the mount. Each open of
//! another directory has an anchor of its own, so the kernel would grant the lock to every caller. A lock that does not
//! lock is worse than none, so the call is refused, as it is by file systems without such locks.

use std::os::raw::c_int;

use crate::interpose::answer_int;
use crate::{descriptor, settings};

interpose! {
    /// flock(2)
    flock = fn(fd: c_int, operation: c_int) -> c_int {
        if settings::prefix_bytes() != 0
            && fd >= 0
            && operation & !libc::LOCK_NB != libc::LOCK_UN
            && descriptor::may_be_directory(fd)
            && descriptor::anchor_of(fd).is_some()
        {
            return answer_int(-(libc::EOPNOTSUPP as isize));
        }
        // SAFETY: it touches no memory.
        answer_int(unsafe { system_call!(libc::SYS_flock, fd, operation) })
    }
}
