//! Open files that the kernel reads and writes by requests, because passthrough cannot or may not serve them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use forebay_client::File;

use crate::arriving::Arriving;

/// Whether writes of an open wait while the pool is full.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// The file belongs to a backing store's tree: the mover makes space.
    pub(crate) waits: bool,
    /// A write has waited in vain. The next ones do not wait until there was space again.
    pub(crate) is_over: AtomicBool,
}

/// An open file, with the properties of one open.
#[derive(Debug)]
pub(crate) enum Handle {
    /// A file with one backing file, opened with the flags of the open. With O_APPEND writes are appended at the real
    /// end, whatever size the kernel has cached.
    Single(OwnedFd, Patience),
    /// A file with several backing files, or with one on another node. True: writes are appended at the real end.
    Parts(Box<File>, bool),
    /// A file that is read while it is restored.
    Arriving(Box<Arriving>),
}

#[derive(Debug, Default)]
struct Table {
    handles: Vec<Option<Arc<Handle>>>,
    free: Vec<usize>,
}

/// The numbers of passthrough opens begin here.
const PASSTHROUGH: u64 = 1 << 63;

/// All handles by number. Passthrough opens have numbers too, by which locks identify them, but no handle.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    table: RwLock<Table>,
    passed: AtomicU64,
}

impl Handles {
    /// A number for a passthrough open. No other open has had it.
    pub(crate) fn number(&self) -> u64 {
        PASSTHROUGH | self.passed.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn add(&self, handle: Handle) -> u64 {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let handle = Some(Arc::new(handle));
        let index = match table.free.pop() {
            Some(index) => {
                table.handles[index] = handle;
                index
            }
            None => {
                table.handles.push(handle);
                table.handles.len() - 1
            }
        };
        index as u64 + 1
    }

    pub(crate) fn get(&self, number: u64) -> Option<Arc<Handle>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.handles.get(usize::try_from(number.checked_sub(1)?).ok()?)?.clone()
    }

    /// An open handle of a file that has several backing files or one on another node. Prefers a writable handle.
    pub(crate) fn parts_of(&self, ino: u64) -> Option<Arc<Handle>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let writes = |handle: &&Arc<Handle>| match &***handle {
            Handle::Parts(file, _) if file.ino().0 == ino => Some(file.is_writable()),
            _ => None,
        };
        let all = table.handles.iter().flatten();
        all.filter(|handle| writes(handle).is_some()).max_by_key(|handle| writes(handle)).cloned()
    }

    /// An open handle of a released file.
    pub(crate) fn arriving_of(&self, ino: u64) -> Option<Arc<Handle>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let is_of = |handle: &&Arc<Handle>| matches!(&***handle, Handle::Arriving(arriving) if arriving.ino().0 == ino);
        table.handles.iter().flatten().find(is_of).cloned()
    }

    pub(crate) fn remove(&self, number: u64) {
        let Some(index) = number.checked_sub(1).and_then(|n| usize::try_from(n).ok()) else { return };
        let gone = {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            let gone = table.handles.get_mut(index).and_then(Option::take);
            if gone.is_some() {
                table.free.push(index);
            }
            gone
        };
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Handle {
        let fd = std::fs::File::open("/dev/null").unwrap();
        Handle::Single(fd.into(), Patience::default())
    }

    #[test]
    fn numbers_are_used_again_and_never_zero() {
        let handles = Handles::default();
        let (a, b) = (handles.add(handle()), handles.add(handle()));
        assert!(a != 0 && b != 0 && a != b);
        handles.remove(a);
        assert!(handles.get(a).is_none() && handles.get(b).is_some());
        handles.remove(a);
        assert_eq!(handles.add(handle()), a);
        assert!(handles.get(0).is_none() && handles.get(99).is_none());
        let passed = handles.number();
        assert!(handles.get(passed).is_none() && handles.number() != passed);
        handles.remove(passed);
    }
}
