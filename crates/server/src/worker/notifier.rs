//! The kernel told of changes, when the pool is mounted: it keeps names and attributes until it hears that they are
//! wrong.
//!
//! A change that came through another door than the mount is shown on the board first, then told to the kernel, then
//! acknowledged: what a door acknowledged, a look through the mount sees. A notification of a name waits in the kernel
//! for the lock of the directory. A program that uses the directory through the mount holds that lock, and may wait for
//! the mount's process and so for the shard thread, or for the next worker. So a process of its own writes
//! notifications of names (`notifier.rs` of the crate), and the shard thread holds the acknowledgements back meanwhile.
//! Another such process writes notifications of attributes, which wait for no directory and so never stand behind a
//! name. Changes by the mount's own session are not told: the kernel asked for them.
//!
//! When a name is late, the shard thread moves the connection's epoch by itself, which waits for nothing: all names are
//! looked up anew then, and those that wait to be told need no telling. Until the one that is in the way is through,
//! the epoch is moved for each change of a name, so that no more than what programs have asked at one time is ever
//! queued.
//!
//! Without a mount there is no notifier, and a change costs one look at an option.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_meta::Client;
use forebay_sys::fuse;
use forebay_types::{Ino, Reply, Request, Result};

use crate::notifier::{Notifier, Starter};

/// An acknowledgement that was held back for so long by a name is given all the same, after the epoch was moved.
const LATE: Duration = Duration::from_millis(50);
/// And one that was held back for so long by attributes, as is possible only while the mount is being taken away.
pub(super) const STUCK: Duration = Duration::from_secs(1);

/// Something that the kernel may believe and that is so no longer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Note {
    /// Attributes of an inode.
    Inode(Ino),
    /// What a name leads to.
    Name(Ino, Vec<u8>),
    /// A name, and the inode that it was the last one of.
    Gone(Ino, Ino, Vec<u8>),
}

/// What a change that was made says of what the kernel may believe. `moved` are the inodes that a rename moved.
pub(super) fn notes_of(request: &Request<'_>, reply: &Reply<'_>, moved: &[Ino]) -> Vec<Note> {
    let name_of = |parent, name: &[u8]| Note::Name(parent, name.to_vec());
    match *request {
        Request::Create { parent, name, .. } => match reply {
            Reply::Created { created: true, .. } => vec![Note::Inode(parent), name_of(parent, name)],
            _ => Vec::new(),
        },
        Request::MakeNode { parent, name, .. }
        | Request::MakeDirectory { parent, name, .. }
        | Request::Symlink { parent, name, .. } => vec![Note::Inode(parent), name_of(parent, name)],
        Request::Link { ino, parent, name } => {
            vec![Note::Inode(parent), Note::Inode(ino), name_of(parent, name)]
        }
        Request::Unlink { parent, name } | Request::RemoveDirectory { parent, name } => {
            let mut notes = vec![Note::Inode(parent)];
            match *reply {
                Reply::Removed { ino, last: true, .. } => {
                    notes.extend([Note::Inode(ino), Note::Gone(parent, ino, name.to_vec())]);
                }
                Reply::Removed { ino, .. } => notes.extend([Note::Inode(ino), name_of(parent, name)]),
                _ => notes.push(name_of(parent, name)),
            }
            notes
        }
        Request::Rename { parent, name, new_parent, new_name, .. } => {
            let mut notes = vec![Note::Inode(parent), Note::Inode(new_parent)];
            notes.extend(moved.iter().copied().map(Note::Inode));
            if let Reply::Removed { ino, .. } = *reply {
                notes.extend((ino != Ino(0)).then_some(Note::Inode(ino)));
            }
            notes.extend([name_of(parent, name), name_of(new_parent, new_name)]);
            notes
        }
        Request::SetAttr { ino, .. } | Request::SetXattr { ino, .. } | Request::RemoveXattr { ino, .. } => {
            vec![Note::Inode(ino)]
        }
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

impl Note {
    fn message(&self) -> Vec<u8> {
        match self {
            Note::Inode(ino) => fuse::invalidate_attributes(node(*ino)),
            Note::Name(parent, name) => fuse::invalidate_entry(node(*parent), name),
            Note::Gone(parent, child, name) => fuse::entry_deleted(node(*parent), node(*child), name),
        }
    }
}

/// Whose acknowledgement is held back.
#[derive(Debug)]
pub(super) enum Whose {
    /// That of a session's request.
    Client { client: Client, reply: Vec<u8> },
    /// That of this node's part in a change over several.
    Step { flight: u64, reply: Box<Reply<'static>> },
}

/// An acknowledgement that is held back, and by which notes.
#[derive(Debug)]
pub(super) struct Held {
    number: u64,
    pub(super) whose: Whose,
    pub(super) since: Instant,
    pub(super) by_inodes: bool,
    pub(super) by_names: bool,
    /// It was late, and that its notifiers live was made sure of.
    is_late: bool,
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
    /// The last number under which names were given to their notifier.
    last_names: u64,
}

impl MountedKernel {
    /// Starts to tell the kernel behind `device`, which `session` serves.
    pub(super) fn new(session: u64, device: OwnedFd, starter: &Arc<Starter>) -> Result<MountedKernel> {
        let device = Arc::new(device);
        let notifier = || Notifier::new(Arc::clone(&device), Arc::clone(starter));
        let (inodes, names) = (notifier()?, notifier()?);
        Ok(MountedKernel { session, device, inodes, names, held: VecDeque::new(), last: 0, last_names: 0 })
    }

    /// Holds an acknowledgement back until the kernel was told.
    pub(super) fn hold(&mut self, whose: Whose, notes: Vec<Note>) {
        self.last += 1;
        let (inodes, names): (Vec<_>, Vec<_>) = notes.into_iter().partition(|n| matches!(n, Note::Inode(_)));
        let mut held = Held {
            number: self.last,
            whose,
            since: Instant::now(),
            by_inodes: !inodes.is_empty(),
            by_names: !names.is_empty(),
            is_late: false,
        };
        if held.by_inodes {
            self.inodes.notify(self.last, inodes.iter().map(Note::message));
        }
        if held.by_names && self.names.written() < self.names.moot() {
            // One that is late is still in the way, unless it ended there.
            self.names.revive();
            self.move_epoch();
            held.by_names = false;
        } else if held.by_names {
            self.names.notify(self.last, names.iter().map(Note::message));
            self.last_names = self.last;
        }
        self.held.push_back(held);
    }

    /// How long nothing needs to be done about those that are held; none when there are none.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        let left = |held: &Held| {
            let most = match (held.by_inodes || held.by_names, held.is_late) {
                (false, _) => Duration::ZERO,
                (true, false) => LATE,
                (true, true) => STUCK,
            };
            most.saturating_sub(held.since.elapsed())
        };
        // What was acknowledged before it was written is written as soon as there is a notifier again.
        let behind = self.inodes.is_behind().then_some(LATE);
        self.held.iter().map(left).chain(behind).min()
    }

    /// Has the kernel look up anew whatever it has looked up. Waits for nothing.
    pub(super) fn move_epoch(&self) {
        if let Err(e) = rustix::io::write(&*self.device, &fuse::new_epoch()) {
            tracing::debug!("cannot move the mount's epoch: {e}");
        }
    }

    /// Names that were not told are looked up anew, as all are.
    pub(super) fn give_up_names(&mut self) {
        self.names.make_moot(self.last_names);
        self.move_epoch();
        for held in &mut self.held {
            held.by_names = false;
        }
    }

    /// True when a notifier has written what [`ShardThread::acknowledge_told`] has not taken note of.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.inodes.has_news() || self.names.has_news()
    }

    /// Takes note of what was written.
    pub(super) fn hear(&mut self) {
        let (inodes, names) = (self.inodes.hear(), self.names.hear());
        for held in &mut self.held {
            held.by_inodes &= held.number > inodes;
            held.by_names &= held.number > names;
        }
    }

    /// Does what is due about acknowledgements that are late; how many became so just now.
    pub(super) fn mind_late(&mut self) -> u64 {
        let (mut late, mut by_names) = (0, false);
        let is_late = |held: &&mut Held| {
            (held.by_inodes || held.by_names) && !held.is_late && held.since.elapsed() >= LATE
        };
        for held in self.held.iter_mut().filter(is_late) {
            held.is_late = true;
            late += 1;
            by_names |= held.by_names;
        }
        if late > 0 {
            self.inodes.revive();
            self.names.revive();
        }
        if by_names {
            tracing::warn!("telling the mount takes long: all names are looked up anew");
            self.give_up_names();
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Kind, Layout, NodeId};

    fn of(session: u64, slot: usize) -> Whose {
        Whose::Client { client: Client { session, slot, seq: 1 }, reply: Vec::new() }
    }

    #[test]
    fn notes_of_a_removal_say_whether_the_inode_went_with_its_name() {
        let layout = Layout::single(NodeId(1), 0);
        let request = Request::Unlink { parent: Ino(7), name: b"n" };
        let reply = |last| Reply::Removed { ino: Ino(9), last, kind: Kind::File, layout };
        let gone = Note::Gone(Ino(7), Ino(9), b"n".to_vec());
        assert!(notes_of(&request, &reply(true), &[]).contains(&gone));
        let notes = notes_of(&request, &reply(false), &[]);
        assert!(!notes.contains(&gone) && notes.contains(&Note::Inode(Ino(9))));
    }

    #[test]
    fn notes_of_a_rename_name_both_names_and_all_inodes() {
        let layout = Layout::single(NodeId(1), 0);
        let request =
            Request::Rename { parent: Ino(7), name: b"a", new_parent: Ino(8), new_name: b"b", flags: 0 };
        let reply = Reply::Removed { ino: Ino(9), last: true, kind: Kind::File, layout };
        let notes = notes_of(&request, &reply, &[Ino(10), Ino(11)]);
        for ino in [7, 8, 9, 10, 11] {
            assert!(notes.contains(&Note::Inode(Ino(ino))), "{ino}");
        }
        assert!(notes.contains(&Note::Name(Ino(7), b"a".to_vec())));
        assert!(notes.contains(&Note::Name(Ino(8), b"b".to_vec())));
    }

    #[test]
    fn notes_of_what_changes_nothing_the_kernel_keeps_are_none() {
        assert!(notes_of(&Request::MarkDirty { ino: Ino(7) }, &Reply::Done, &[]).is_empty());
        assert!(notes_of(&Request::Ping, &Reply::Done, &[]).is_empty());
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

    /// Fills a pipe, so that its notifier waits, as one in the kernel does; empties it.
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
            mount.hear();
        }
    }

    fn is_due(mount: &MountedKernel) -> Vec<bool> {
        mount.held.iter().map(|held| !held.by_inodes && !held.by_names).collect()
    }

    #[test]
    fn attributes_do_not_stand_behind_names() {
        let (mut mount, _inodes, mut names) = mounted();
        let full = block(&names);
        mount.hold(of(2, 0), vec![Note::Inode(Ino(7)), Note::Name(Ino(7), b"a".to_vec())]);
        mount.hold(of(2, 1), vec![Note::Inode(Ino(8))]);
        hear_until(&mut mount, &[false, true]);
        assert!(mount.next_timeout().is_some_and(|left| left <= LATE));
        std::io::Read::read_exact(&mut names, &mut vec![0; full]).unwrap();
        hear_until(&mut mount, &[true, true]);
    }

    #[test]
    fn while_a_name_is_late_no_other_is_queued() {
        let (mut mount, _inodes, mut names) = mounted();
        let name = || vec![Note::Name(Ino(7), b"a".to_vec())];
        let full = block(&names);
        mount.hold(of(2, 0), name());
        mount.hold(of(2, 1), name());
        assert_eq!(mount.mind_late(), 0);
        std::thread::sleep(LATE);
        assert_eq!(mount.mind_late(), 2);
        assert_eq!(is_due(&mount), [true, true]);
        for slot in 2..100 {
            mount.hold(of(2, slot), name());
        }
        assert_eq!(mount.last_names, 2, "no other was queued");
        assert!(is_due(&mount).iter().all(|due| *due));
        std::io::Read::read_exact(&mut names, &mut vec![0; full]).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while mount.names.hear() < 2 {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
        mount.hold(of(2, 1), name());
        assert_eq!(mount.last_names, 101, "the way is free again");
    }

    #[test]
    fn messages_have_the_kernels_sizes() {
        assert_eq!(Note::Inode(Ino::ROOT).message().len(), 16 + 24);
        assert_eq!(Note::Inode(Ino::ROOT).message()[16..24], 1u64.to_ne_bytes());
        assert_eq!(Note::Name(Ino(5), b"abc".to_vec()).message().len(), 16 + 16 + 4);
        assert_eq!(Note::Gone(Ino(5), Ino(6), b"abc".to_vec()).message().len(), 16 + 24 + 4);
    }
}
