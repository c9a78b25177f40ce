//! Invalidation of the kernel's cache while the pool is mounted: the kernel keeps names and attributes until it is
//! notified of a change.
//!
//! A change that did not come through the mount is published on the board first, then the kernel is notified, then the
//! change is acknowledged. So a program that uses the mount sees every change that was acknowledged to a client. The
//! kernel handles the notification of a name under the lock of the directory. A program that uses the directory through
//! the mount holds that lock, and may wait for the mount's process, and so for the shard thread or for the next worker.
//! Therefore a process of its own writes the notifications of names (`notifier.rs` of the crate), and the shard thread
//! holds the acknowledgements back meanwhile. A second such process writes the notifications of attributes, which need
//! no directory's lock and so never wait behind a name. Changes by the mount's own session need no notification: the
//! kernel requested them.
//!
//! When the notification of a name is overdue, the shard thread increments the connection's epoch, which never blocks.
//! The kernel then looks up all names again, and names that are queued need no notification. Until the blocked
//! notification is through, the epoch is incremented for each change of a name, so that the queue never holds more than
//! what programs requested at one time.
//!
//! Without a mount there is no notifier, and a change costs one check of an option.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_meta::Client;
use forebay_sys::fuse;
use forebay_types::{Ino, Reply, Request, Result, CHANGES_ALL};

use crate::notifier::{Notifier, Starter};

/// How long an acknowledgement waits for the notification of a name. Then the epoch is incremented, and it is sent.
const OVERDUE: Duration = Duration::from_millis(50);
/// How long an acknowledgement waits for the notification of attributes, which block only while the pool is unmounted.
pub(super) const STUCK: Duration = Duration::from_secs(1);

/// Something that the kernel may have cached and that is no longer valid.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Invalidation {
    /// Attributes of an inode.
    Inode(Ino),
    /// What a name leads to.
    Name(Ino, Vec<u8>),
    /// A name, and the inode that it was the last one of.
    Gone(Ino, Ino, Vec<u8>),
}

/// The invalidations that a change requires. `moved` are the inodes that a rename moved.
pub(super) fn invalidations_of(request: &Request<'_>, reply: &Reply<'_>, moved: &[Ino]) -> Vec<Invalidation> {
    let name_of = |parent, name: &[u8]| Invalidation::Name(parent, name.to_vec());
    match *request {
        Request::Create { parent, name, .. } => match reply {
            Reply::Created { created: true, .. } => vec![Invalidation::Inode(parent), name_of(parent, name)],
            _ => Vec::new(),
        },
        Request::MakeNode { parent, name, .. }
        | Request::MakeDirectory { parent, name, .. }
        | Request::Symlink { parent, name, .. } => vec![Invalidation::Inode(parent), name_of(parent, name)],
        Request::Link { ino, parent, name } => {
            vec![Invalidation::Inode(parent), Invalidation::Inode(ino), name_of(parent, name)]
        }
        Request::Unlink { parent, name }
        | Request::RemoveDirectory { parent, name }
        | Request::Forget { parent, name, .. } => {
            let mut invalidations = vec![Invalidation::Inode(parent)];
            match *reply {
                Reply::Removed { ino, last: true, .. } => {
                    invalidations
                        .extend([Invalidation::Inode(ino), Invalidation::Gone(parent, ino, name.to_vec())]);
                }
                Reply::Removed { ino, .. } => {
                    invalidations.extend([Invalidation::Inode(ino), name_of(parent, name)])
                }
                _ => invalidations.push(name_of(parent, name)),
            }
            invalidations
        }
        Request::Rename { parent, name, new_parent, new_name, .. } => {
            let mut invalidations = vec![Invalidation::Inode(parent), Invalidation::Inode(new_parent)];
            invalidations.extend(moved.iter().copied().map(Invalidation::Inode));
            if let Reply::Removed { ino, .. } = *reply {
                invalidations.extend((ino != Ino(0)).then_some(Invalidation::Inode(ino)));
            }
            invalidations.extend([name_of(parent, name), name_of(new_parent, new_name)]);
            invalidations
        }
        Request::SetAttr { ino, .. } | Request::SetXattr { ino, .. } | Request::RemoveXattr { ino, .. } => {
            vec![Invalidation::Inode(ino)]
        }
        // A released file takes over the size and the time of a version that another program wrote.
        Request::Published { ino, seen: CHANGES_ALL, .. } => vec![Invalidation::Inode(ino)],
        _ => Vec::new(),
    }
}

/// The kernel's number of an inode: the root is 1.
fn node(ino: Ino) -> u64 {
    if ino == Ino::ROOT {
        1
    } else {
        ino.0
    }
}

impl Invalidation {
    fn message(&self) -> Vec<u8> {
        match self {
            Invalidation::Inode(ino) => fuse::invalidate_attributes(node(*ino)),
            Invalidation::Name(parent, name) => fuse::invalidate_entry(node(*parent), name),
            Invalidation::Gone(parent, child, name) => fuse::entry_deleted(node(*parent), node(*child), name),
        }
    }
}

/// A reply that is held back.
#[derive(Debug)]
pub(super) enum HeldReply {
    /// To a session's request.
    Client { client: Client, reply: Vec<u8> },
    /// Of this node's part in a cross-node transaction.
    Step { flight: u64, reply: Box<Reply<'static>> },
}

/// A reply that is held back, and the kind of notifications that it waits for.
#[derive(Debug)]
pub(super) struct Held {
    number: u64,
    pub(super) held_reply: HeldReply,
    pub(super) since: Instant,
    pub(super) by_inodes: bool,
    pub(super) by_names: bool,
    /// It was overdue, and its notifiers were checked and restarted if necessary.
    is_overdue: bool,
}

/// The mount, as the shard thread sees it.
#[derive(Debug)]
pub(super) struct MountedKernel {
    /// The session of the mount's process.
    pub(super) session: u64,
    device: Arc<OwnedFd>,
    pub(super) inodes: Notifier,
    names: Notifier,
    /// Oldest first.
    pub(super) held: VecDeque<Held>,
    last: u64,
    /// The number of the last notification of names that was queued.
    last_names: u64,
}

impl MountedKernel {
    /// Starts to notify the kernel behind `device`, which `session` serves.
    pub(super) fn new(session: u64, device: OwnedFd, starter: &Arc<Starter>) -> Result<MountedKernel> {
        let device = Arc::new(device);
        let notifier = || Notifier::new(Arc::clone(&device), Arc::clone(starter));
        let (inodes, names) = (notifier()?, notifier()?);
        Ok(MountedKernel { session, device, inodes, names, held: VecDeque::new(), last: 0, last_names: 0 })
    }

    /// Holds a reply back until the kernel was notified.
    pub(super) fn hold(&mut self, held_reply: HeldReply, invalidations: Vec<Invalidation>) {
        self.last += 1;
        let (inodes, names): (Vec<_>, Vec<_>) =
            invalidations.into_iter().partition(|n| matches!(n, Invalidation::Inode(_)));
        let mut held = Held {
            number: self.last,
            held_reply,
            since: Instant::now(),
            by_inodes: !inodes.is_empty(),
            by_names: !names.is_empty(),
            is_overdue: false,
        };
        if held.by_inodes {
            self.inodes.notify(self.last, inodes.iter().map(Invalidation::message));
        }
        if held.by_names && self.names.written() < self.names.moot() {
            // An overdue notification still blocks the queue, unless its notifier has ended.
            self.names.revive();
            self.move_epoch();
            held.by_names = false;
        } else if held.by_names {
            self.names.notify(self.last, names.iter().map(Invalidation::message));
            self.last_names = self.last;
        }
        self.held.push_back(held);
    }

    /// How long until a held reply needs attention; none when none is held.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        let left = |held: &Held| {
            let most = match (held.by_inodes || held.by_names, held.is_overdue) {
                (false, _) => Duration::ZERO,
                (true, false) => OVERDUE,
                (true, true) => STUCK,
            };
            most.saturating_sub(held.since.elapsed())
        };
        // Notifications whose reply was sent before them are written as soon as there is a notifier again.
        let behind = self.inodes.is_behind().then_some(OVERDUE);
        self.held.iter().map(left).chain(behind).min()
    }

    /// Makes the kernel look up all names again. Never blocks.
    pub(super) fn move_epoch(&self) {
        if let Err(e) = rustix::io::write(&*self.device, &fuse::new_epoch()) {
            tracing::debug!("cannot increment the mount's epoch: {e}");
        }
    }

    /// Gives up the queued notifications of names: the kernel looks up all names again.
    pub(super) fn give_up_names(&mut self) {
        self.names.make_moot(self.last_names);
        self.move_epoch();
        for held in &mut self.held {
            held.by_names = false;
        }
    }

    /// True when a notifier has written notifications that [`MountedKernel::collect_written`] has not collected.
    #[inline]
    pub(super) fn has_written(&self) -> bool {
        self.inodes.has_written() || self.names.has_written()
    }

    /// Collects which notifications were written.
    pub(super) fn collect_written(&mut self) {
        let (inodes, names) = (self.inodes.collect_written(), self.names.collect_written());
        for held in &mut self.held {
            held.by_inodes &= held.number > inodes;
            held.by_names &= held.number > names;
        }
    }

    /// Handles replies that are overdue; how many became so just now.
    pub(super) fn handle_overdue(&mut self) -> u64 {
        let (mut overdue, mut by_names) = (0, false);
        let is_overdue = |held: &&mut Held| {
            (held.by_inodes || held.by_names) && !held.is_overdue && held.since.elapsed() >= OVERDUE
        };
        for held in self.held.iter_mut().filter(is_overdue) {
            held.is_overdue = true;
            overdue += 1;
            by_names |= held.by_names;
        }
        if overdue > 0 {
            self.inodes.revive();
            self.names.revive();
        }
        if by_names {
            tracing::warn!("notifying the mount takes long: the kernel looks up all names again");
            self.give_up_names();
        }
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Kind, Layout, NodeId};

    fn of(session: u64, slot: usize) -> HeldReply {
        HeldReply::Client { client: Client { session, slot, seq: 1 }, reply: Vec::new() }
    }

    #[test]
    fn notes_of_a_removal_say_whether_the_inode_went_with_its_name() {
        let layout = Layout::single(NodeId(1), 0);
        let request = Request::Unlink { parent: Ino(7), name: b"n" };
        let reply = |last| Reply::Removed { ino: Ino(9), last, kind: Kind::File, layout };
        let gone = Invalidation::Gone(Ino(7), Ino(9), b"n".to_vec());
        assert!(invalidations_of(&request, &reply(true), &[]).contains(&gone));
        let invalidations = invalidations_of(&request, &reply(false), &[]);
        assert!(!invalidations.contains(&gone) && invalidations.contains(&Invalidation::Inode(Ino(9))));
    }

    #[test]
    fn notes_of_a_rename_name_both_names_and_all_inodes() {
        let layout = Layout::single(NodeId(1), 0);
        let request =
            Request::Rename { parent: Ino(7), name: b"a", new_parent: Ino(8), new_name: b"b", flags: 0 };
        let reply = Reply::Removed { ino: Ino(9), last: true, kind: Kind::File, layout };
        let invalidations = invalidations_of(&request, &reply, &[Ino(10), Ino(11)]);
        for ino in [7, 8, 9, 10, 11] {
            assert!(invalidations.contains(&Invalidation::Inode(Ino(ino))), "{ino}");
        }
        assert!(invalidations.contains(&Invalidation::Name(Ino(7), b"a".to_vec())));
        assert!(invalidations.contains(&Invalidation::Name(Ino(8), b"b".to_vec())));
    }

    #[test]
    fn notes_of_what_changes_nothing_the_kernel_keeps_are_none() {
        assert!(invalidations_of(&Request::MarkDirty { ino: Ino(7) }, &Reply::Done, &[]).is_empty());
        assert!(invalidations_of(&Request::Ping, &Reply::Done, &[]).is_empty());
    }

    /// A mount whose notifiers, which are threads, write to a pipe each, and what they have written.
    fn mounted() -> (MountedKernel, std::fs::File, std::fs::File) {
        let (doorbell, _) = forebay_ring::Doorbell::create().unwrap();
        let starter = Arc::new(Starter::new(doorbell, None));
        let notifier = || {
            let (read, write) = rustix::pipe::pipe().unwrap();
            (Notifier::new(Arc::new(write), Arc::clone(&starter)).unwrap(), std::fs::File::from(read))
        };
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let ((inodes, of_inodes), (names, of_names)) = (notifier(), notifier());
        let held = VecDeque::new();
        let mount = MountedKernel {
            session: 1,
            device: Arc::new(null.into()),
            inodes,
            names,
            held,
            last: 0,
            last_names: 0,
        };
        (mount, of_inodes, of_names)
    }

    /// Fills a pipe, so that its notifier blocks like one in the kernel. Returns how many bytes to read to empty it.
    fn block(pipe: &std::fs::File) -> usize {
        rustix::pipe::fcntl_setpipe_size(pipe, 4096).unwrap();
        let through = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(pipe));
        let mut end = std::fs::OpenOptions::new().write(true).open(through).unwrap();
        std::io::Write::write(&mut end, &[0; 4096]).unwrap()
    }

    fn hear_until(mount: &mut MountedKernel, due: &[bool]) {
        let end = Instant::now() + Duration::from_secs(30);
        while is_due(mount) != due {
            assert!(Instant::now() < end, "{:?} and not {due:?}", is_due(mount));
            std::thread::sleep(Duration::from_millis(1));
            mount.collect_written();
        }
    }

    fn is_due(mount: &MountedKernel) -> Vec<bool> {
        mount.held.iter().map(|held| !held.by_inodes && !held.by_names).collect()
    }

    #[test]
    fn attributes_do_not_stand_behind_names() {
        let (mut mount, _inodes, mut names) = mounted();
        let full = block(&names);
        mount.hold(of(2, 0), vec![Invalidation::Inode(Ino(7)), Invalidation::Name(Ino(7), b"a".to_vec())]);
        mount.hold(of(2, 1), vec![Invalidation::Inode(Ino(8))]);
        hear_until(&mut mount, &[false, true]);
        assert!(mount.next_timeout().is_some_and(|left| left <= OVERDUE));
        std::io::Read::read_exact(&mut names, &mut vec![0; full]).unwrap();
        hear_until(&mut mount, &[true, true]);
    }

    #[test]
    fn while_a_name_is_late_no_other_is_queued() {
        let (mut mount, _inodes, mut names) = mounted();
        let name = || vec![Invalidation::Name(Ino(7), b"a".to_vec())];
        let full = block(&names);
        mount.hold(of(2, 0), name());
        mount.hold(of(2, 1), name());
        assert_eq!(mount.handle_overdue(), 0);
        std::thread::sleep(OVERDUE);
        assert_eq!(mount.handle_overdue(), 2);
        assert_eq!(is_due(&mount), [true, true]);
        for slot in 2..100 {
            mount.hold(of(2, slot), name());
        }
        assert_eq!(mount.last_names, 2, "no other was queued");
        assert!(is_due(&mount).iter().all(|due| *due));
        std::io::Read::read_exact(&mut names, &mut vec![0; full]).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while mount.names.collect_written() < 2 {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
        mount.hold(of(2, 1), name());
        assert_eq!(mount.last_names, 101, "the way is free again");
    }

    #[test]
    fn messages_have_the_kernels_sizes() {
        assert_eq!(Invalidation::Inode(Ino::ROOT).message().len(), 16 + 24);
        assert_eq!(Invalidation::Inode(Ino::ROOT).message()[16..24], 1u64.to_ne_bytes());
        assert_eq!(Invalidation::Name(Ino(5), b"abc".to_vec()).message().len(), 16 + 16 + 4);
        assert_eq!(Invalidation::Gone(Ino(5), Ino(6), b"abc".to_vec()).message().len(), 16 + 24 + 4);
    }
}
