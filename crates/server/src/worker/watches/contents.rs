//! Changed file contents: the kernel's events for this node's backing files, while a program watches a directory for
//! them.
//!
//! One inotify instance of the daemon watches the directories of the backing files, 256 on each target. So no file
//! needs its own watch, and none is set too late for a new file. While a program watches for IN_MODIFY, each write to
//! any file of the node costs its writer the time in which the kernel queues an event.

use forebay_sys::descriptor;
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use forebay_data::{BackingName, NodeTargets};
use forebay_types::Ino;
use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;

/// The events of backing files that are raised for their names in watched directories.
pub(super) const RAISED: u32 = libc::IN_MODIFY | libc::IN_CLOSE_WRITE | libc::IN_ATTRIB;

/// The most reads in one call of [`Contents::take`]: about as many events as the kernel queues by default.
const READS_MAX: usize = 12;

/// The events of backing files since the last call.
#[derive(Debug, Default)]
pub(super) struct Happened {
    /// Inodes and events, in order, without events that repeat the inode's last one.
    pub(super) events: Vec<(Ino, u32)>,
    /// True when the kernel dropped events: any file may have changed.
    pub(super) lost: bool,
}

/// The daemon's inotify instance.
#[derive(Debug)]
pub(super) struct Contents {
    targets: Arc<NodeTargets>,
    instance: OwnedFd,
    mask: u32,
    watches: HashSet<i32>,
}

impl Contents {
    pub(super) fn new(targets: Arc<NodeTargets>) -> Result<Contents, Errno> {
        let instance = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        Ok(Contents { targets, instance, mask: 0, watches: HashSet::new() })
    }

    pub(super) fn instance(&self) -> &OwnedFd {
        &self.instance
    }

    /// Watches for exactly those of the events [`RAISED`] that are in `mask`. After a failure the earlier watches are
    /// in force.
    pub(super) fn watch_for(&mut self, mask: u32) -> Result<(), Errno> {
        let mask = mask & RAISED;
        if mask == self.mask {
            return Ok(());
        }
        if mask == 0 {
            self.watch_for_nothing();
            return Ok(());
        }
        if let Err(e) = self.set(mask) {
            match self.mask {
                0 => self.watch_for_nothing(),
                // Every directory that got the new mask can get the older one. The directories after the failed one
                // still have it.
                before => {
                    let _ = self.set(before);
                }
            }
            return Err(e);
        }
        self.mask = mask;
        Ok(())
    }

    fn set(&mut self, mask: u32) -> Result<(), Errno> {
        for target in self.targets.for_files() {
            for low in 0..=255u8 {
                let path = descriptor::path(&target.directory()).join(format!("data/{low:02x}"));
                let flags = WatchFlags::from_bits_retain(mask) | WatchFlags::ONLYDIR;
                // A directory that is already watched keeps its watch descriptor.
                self.watches.insert(inotify::add_watch(&self.instance, path, flags)?);
            }
        }
        Ok(())
    }

    fn watch_for_nothing(&mut self) {
        for watch in self.watches.drain() {
            let _ = inotify::remove_watch(&self.instance, watch);
        }
        self.mask = 0;
    }

    /// Takes the events since the last call, up to a limit, oldest first: writers must not keep the thread busy here.
    pub(super) fn take(&mut self) -> Happened {
        let mut happened = Happened::default();
        let mut last: HashMap<Ino, u32> = HashMap::new();
        let mut room = [std::mem::MaybeUninit::uninit(); 64 * 1024];
        let mut reader = inotify::Reader::new(&self.instance, &mut room);
        let mut reads = 0;
        loop {
            if reader.is_buffer_empty() {
                if reads == READS_MAX {
                    break;
                }
                reads += 1;
            }
            let Ok(event) = reader.next() else { break };
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                happened.lost = true;
            }
            let parsed = event.file_name().and_then(|name| BackingName::parse(name.to_bytes()));
            let events = event.events().bits() & RAISED;
            if let (Some((ino, ..)), 1..) = (parsed, events) {
                if last.insert(ino, events) != Some(events) {
                    happened.events.push((ino, events));
                }
            }
        }
        happened
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_data::Target;
    use std::os::fd::AsRawFd;
    use std::path::{Path, PathBuf};

    struct Place(PathBuf);

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn contents(name: &str) -> (Place, Contents) {
        let path = std::env::temp_dir().join(format!("forebay-contents-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        let place = Place(path);
        let directory = std::fs::File::open(&place.0).unwrap();
        Target::format(&directory).unwrap();
        let targets = NodeTargets::new(vec![Target::open(&directory, 1 << 16).unwrap()]);
        (place, Contents::new(Arc::new(targets)).unwrap())
    }

    /// The masks of the instance's watches, as the kernel reports them.
    fn masks(contents: &Contents) -> Vec<u32> {
        let path = format!("/proc/self/fdinfo/{}", contents.instance.as_raw_fd());
        let text = std::fs::read_to_string(path).unwrap();
        let mask = |line: &str| {
            let word =
                line.strip_prefix("inotify ")?.split(' ').find_map(|word| word.strip_prefix("mask:"))?;
            Some(u32::from_str_radix(word, 16).unwrap() & RAISED)
        };
        text.lines().filter_map(mask).collect()
    }

    fn bucket(place: &Path) -> PathBuf {
        place.join("data/80")
    }

    #[test]
    fn a_change_of_the_mask_that_fails_half_way_leaves_the_watches_of_before() {
        let (place, mut contents) = contents("half");
        std::fs::remove_dir(bucket(&place.0)).unwrap();
        assert_eq!(contents.watch_for(RAISED), Err(Errno::NOENT));
        assert_eq!(masks(&contents), [0; 0], "none is left of a first that failed");
        std::fs::create_dir(bucket(&place.0)).unwrap();
        contents.watch_for(libc::IN_CLOSE_WRITE).unwrap();
        assert_eq!(masks(&contents), [libc::IN_CLOSE_WRITE; 256]);
        let aside = place.0.join("aside");
        std::fs::rename(bucket(&place.0), &aside).unwrap();
        assert_eq!(contents.watch_for(RAISED), Err(Errno::NOENT));
        assert_eq!(masks(&contents), [libc::IN_CLOSE_WRITE; 256], "the older mask is in force everywhere");
        std::fs::rename(&aside, bucket(&place.0)).unwrap();
        contents.watch_for(RAISED).unwrap();
        assert_eq!(masks(&contents), [RAISED; 256]);
        contents.watch_for(0).unwrap();
        assert_eq!(masks(&contents), [0; 0]);
    }

    #[test]
    fn a_look_ends_while_there_is_more() {
        let (place, mut contents) = contents("more");
        contents.watch_for(libc::IN_CLOSE_WRITE).unwrap();
        // An event contains the file's name: 8000 of these are more than one call takes, and fewer than the kernel
        // queues.
        let file = |digit: &str| std::fs::File::create(bucket(&place.0).join(digit.repeat(200))).unwrap();
        for _ in 0..4000 {
            drop((file("1"), file("2")));
        }
        let left = |contents: &Contents| rustix::io::ioctl_fionread(&contents.instance).unwrap();
        let all = left(&contents);
        assert!(!contents.take().lost);
        assert!(0 < left(&contents) && left(&contents) < all, "{} of {all} bytes are left", left(&contents));
        while left(&contents) > 0 {
            contents.take();
        }
    }
}
