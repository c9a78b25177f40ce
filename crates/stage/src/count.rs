//! Counts the sources, to estimate the time left. A separate thread walks them while they are copied. It starts only if
//! staging takes longer than half a second, reads attributes, and keeps nothing in memory.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use forebay_types::{Code, Kind};

use crate::prepare::Top;
use crate::progress::Progress;
use crate::tree::{Names, Tree};

/// Staging that ends sooner needs no estimate.
const DELAY: Duration = Duration::from_millis(500);
/// Directories open at the same time. Deeper ones are not counted.
const DEPTH_MAX: usize = 64;

/// Signals that copying has ended.
#[derive(Debug, Default)]
pub(crate) struct Finish {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Finish {
    /// Signals the end of copying.
    pub(crate) fn end(&self) {
        *self.ended.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.changed.notify_all();
    }

    fn has_ended(&self) -> bool {
        *self.ended.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits up to `time`; true if copying has ended.
    fn ends_within(&self, time: Duration) -> bool {
        let ended = self.ended.lock().unwrap_or_else(|e| e.into_inner());
        *self.changed.wait_timeout_while(ended, time, |ended| !*ended).unwrap_or_else(|e| e.into_inner()).0
    }
}

/// A directory whose entries are being counted.
struct Open<T: Tree> {
    handle: T::Directory,
    cursor: Option<u64>,
    inner: Vec<Vec<u8>>,
}

/// Counts files and bytes of the sources until all are counted or copying has ended. Returns the sums that were
/// reported to `progress`.
pub(crate) fn count<T: Tree>(tree: &T, tops: &[Top], progress: &dyn Progress, finish: &Finish) -> (u64, u64) {
    let mut sums = (0, 0);
    if finish.ends_within(DELAY) {
        return sums;
    }
    for top in tops {
        // Unreadable entries are not counted. The copying threads report them.
        let _ = count_top(tree, top, progress, finish, &mut sums);
    }
    if !finish.has_ended() {
        progress.scanning_finished();
    }
    sums
}

fn count_top<T: Tree>(
    tree: &T,
    top: &Top,
    progress: &dyn Progress,
    finish: &Finish,
    sums: &mut (u64, u64),
) -> Result<(), Code> {
    let mut found = |files, bytes| {
        progress.found(files, bytes);
        *sums = (sums.0 + files, sums.1 + bytes);
    };
    if !top.is_directory() {
        let (parent, _) = tree.open_path(&top.source.parent)?;
        let meta = tree.stat(&parent, &top.source.name, true)?;
        found(1, if meta.kind == Kind::File { meta.size } else { 0 });
        return Ok(());
    }
    let (handle, _) = tree.open_path(&top.source.path())?;
    let mut open = vec![Open::<T> { handle, cursor: Some(0), inner: Vec::new() }];
    let mut names = Names::default();
    while let Some(last) = open.last_mut() {
        if finish.has_ended() {
            return Ok(());
        }
        if let Some(name) = last.inner.pop() {
            let deeper = tree.open_directory(&last.handle, &name, false);
            if let (Ok((handle, _)), true) = (deeper, open.len() < DEPTH_MAX) {
                open.push(Open { handle, cursor: Some(0), inner: Vec::new() });
            }
            continue;
        }
        let Some(cursor) = last.cursor else {
            open.pop();
            continue;
        };
        names.clear();
        last.cursor = tree.list(&last.handle, cursor, &mut names).unwrap_or(None);
        let (mut files, mut bytes) = (0, 0);
        for (name, kind) in names.iter() {
            match kind {
                Some(Kind::Directory) => last.inner.push(name.to_vec()),
                Some(kind) if kind != Kind::File => files += 1,
                _ => match tree.stat(&last.handle, name, false) {
                    Ok(meta) if meta.kind == Kind::Directory => last.inner.push(name.to_vec()),
                    Ok(meta) => {
                        files += 1;
                        bytes += if meta.kind == Kind::File { meta.size } else { 0 };
                    }
                    Err(_) => {}
                },
            }
        }
        found(files, bytes);
    }
    Ok(())
}
