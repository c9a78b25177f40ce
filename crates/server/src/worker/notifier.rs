//! The kernel told of changes, when the pool is mounted: it keeps names and attributes until it hears that they are wrong.
//!
//! A change that came through another door than the mount is shown on the board first, then told to the kernel, then
//! acknowledged: what a door acknowledged, a look through the mount sees. To tell the kernel of a name waits for whoever
//! uses that directory through the mount, who may be waiting for the mount's process and so for the shard thread: it is
//! done by a thread of its own, the *notifier*, and the shard thread holds the acknowledgements back meanwhile. Changes by
//! the mount's own session are not told: the kernel asked for them.
//!
//! When the notifier is late, the shard thread moves the connection's epoch by itself, which waits for nobody: all names
//! are looked up anew then. Attributes need no such way out, as to tell of them does not wait.
//!
//! Without a mount there is no thread, and a change costs one look at an option. Numbers are those of `linux/fuse.h`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_ring::Doorbell;
use forebay_types::{Error, Ino, Reply, Request, Result};

use super::shard_thread::{Message, ShardThread};

/// An acknowledgement that was held back for so long is given all the same, after the epoch was moved.
const LATE: Duration = Duration::from_millis(50);

const NOTIFY_INVAL_INODE: i32 = 2;
const NOTIFY_INVAL_ENTRY: i32 = 3;
const NOTIFY_DELETE: i32 = 6;
const NOTIFY_INC_EPOCH: i32 = 8;

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

/// What a change that was made says of what the kernel may believe. `moved` is the inode that a rename moved.
pub(super) fn notes_of(request: &Request<'_>, reply: &[u8], moved: Option<Ino>) -> Vec<Note> {
    let name_of = |parent, name: &[u8]| Note::Name(parent, name.to_vec());
    match *request {
        Request::Create { parent, name, .. } => match Reply::decode(reply) {
            Ok(Reply::Created { created: true, .. }) => vec![Note::Inode(parent), name_of(parent, name)],
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
            match Reply::decode(reply) {
                Ok(Reply::Removed { ino, last: true, .. }) => {
                    notes.extend([Note::Inode(ino), Note::Gone(parent, ino, name.to_vec())]);
                }
                Ok(Reply::Removed { ino, .. }) => notes.extend([Note::Inode(ino), name_of(parent, name)]),
                _ => notes.push(name_of(parent, name)),
            }
            notes
        }
        Request::Rename { parent, name, new_parent, new_name, .. } => {
            let mut notes = vec![Note::Inode(parent), Note::Inode(new_parent)];
            notes.extend(moved.map(Note::Inode));
            if let Ok(Reply::Removed { ino, .. }) = Reply::decode(reply) {
                notes.extend((ino != Ino(0)).then_some(Note::Inode(ino)));
            }
            notes.extend([name_of(parent, name), name_of(new_parent, new_name)]);
            notes
        }
        Request::EnterDirectory { parent, name, .. } | Request::LeaveDirectory { parent, name, .. } => {
            vec![Note::Inode(parent), name_of(parent, name)]
        }
        Request::FreeDirectory { ino } => vec![Note::Inode(ino)],
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

fn message(number: i32, parts: &[&[u8]]) -> Vec<u8> {
    let bytes = 16 + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut message = Vec::with_capacity(bytes);
    message.extend((bytes as u32).to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend(0u64.to_ne_bytes());
    for part in parts {
        message.extend_from_slice(part);
    }
    message
}

impl Note {
    fn message(&self) -> Vec<u8> {
        let number = |ino: Ino| node(ino).to_ne_bytes();
        let length = |name: &[u8]| (name.len() as u32).to_ne_bytes();
        match self {
            // Attributes alone: the kernel keeps no data of ours.
            Note::Inode(ino) => {
                message(NOTIFY_INVAL_INODE, &[&number(*ino), &(-1i64).to_ne_bytes(), &0i64.to_ne_bytes()])
            }
            Note::Name(parent, name) => {
                message(NOTIFY_INVAL_ENTRY, &[&number(*parent), &length(name), &[0; 4], name, &[0]])
            }
            Note::Gone(parent, child, name) => message(
                NOTIFY_DELETE,
                &[&number(*parent), &number(*child), &length(name), &[0; 4], name, &[0]],
            ),
        }
    }
}

/// Notes to write, under the number of the acknowledgement that waits for them.
#[derive(Debug)]
struct Job {
    number: u64,
    notes: Vec<Note>,
}

/// An acknowledgement that is held back.
#[derive(Debug)]
struct Held {
    number: u64,
    session: u64,
    slot: usize,
    reply: Vec<u8>,
    since: Instant,
}

/// The mount, as the shard thread sees it.
#[derive(Debug)]
pub(super) struct MountedKernel {
    /// The session of the mount's process.
    pub(super) session: u64,
    device: Arc<OwnedFd>,
    jobs: Sender<Job>,
    held: VecDeque<Held>,
    next: u64,
}

fn notify(device: &OwnedFd, jobs: &Receiver<Job>, done: &Sender<Message>, doorbell: &Doorbell) {
    while let Ok(Job { number, notes }) = jobs.recv() {
        for note in &notes {
            // What the kernel does not know (ENOENT) needs no telling; a connection that is over is noticed elsewhere.
            let _ = rustix::io::write(device, &note.message());
        }
        if done.send(Message::Told(number)).is_err() {
            return;
        }
        doorbell.ring();
    }
}

impl MountedKernel {
    /// Starts to tell the kernel behind `device`, which `session` serves.
    pub(super) fn new(
        session: u64,
        device: OwnedFd,
        done: Sender<Message>,
        doorbell: Arc<Doorbell>,
    ) -> Result<MountedKernel> {
        let (jobs, work) = mpsc::channel();
        let device = Arc::new(device);
        let theirs = Arc::clone(&device);
        // Never waited for: it may be in the kernel until the mount's connection ends.
        std::thread::Builder::new()
            .name("notifier".into())
            .stack_size(128 * 1024)
            .spawn(move || notify(&theirs, &work, &done, &doorbell))
            .map_err(|e| Error::io("cannot start a thread", &e))?;
        Ok(MountedKernel { session, device, jobs, held: VecDeque::new(), next: 1 })
    }

    /// Holds an acknowledgement back until the kernel was told.
    pub(super) fn hold(&mut self, session: u64, slot: usize, reply: &[u8], notes: Vec<Note>) {
        let (number, reply) = (self.next, reply.to_vec());
        self.next += 1;
        self.held.push_back(Held { number, session, slot, reply, since: Instant::now() });
        let _ = self.jobs.send(Job { number, notes });
    }

    /// How long nothing needs to be done about those that are held; none when there are none.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.held.front().map(|held| LATE.saturating_sub(held.since.elapsed()))
    }

    fn move_epoch(&self) {
        if let Err(e) = rustix::io::write(&*self.device, &message(NOTIFY_INC_EPOCH, &[])) {
            tracing::debug!("cannot move the mount's epoch: {e}");
        }
    }
}

impl ShardThread<'_> {
    /// Acknowledges what was held back up to a number: the kernel was told.
    pub(super) fn acknowledge_told(&mut self, number: u64) {
        while let Some(mount) = &mut self.mount {
            match mount.held.front() {
                Some(held) if held.number <= number => {}
                _ => return,
            }
            let Some(held) = mount.held.pop_front() else { return };
            if let Some(session) = self.sessions.iter().find(|s| s.id == held.session) {
                session.answer(held.slot, &held.reply);
            }
        }
    }

    /// Acknowledges all that is held when the oldest was held too long.
    pub(super) fn acknowledge_late(&mut self) {
        let Some(mount) = &self.mount else { return };
        if mount.patience().is_some_and(|left| left.is_zero()) {
            tracing::warn!("telling the mount takes long: all names are looked up anew");
            mount.move_epoch();
            self.acknowledge_told(u64::MAX);
        }
    }

    /// Tells the kernel that the last worker told.
    pub(super) fn resume_mount(&mut self, session: u64, device: OwnedFd) -> Result<()> {
        let (done, doorbell) = (self.to_self.clone(), Arc::clone(&self.doorbell));
        self.mount = Some(MountedKernel::new(session, device, done, doorbell)?);
        Ok(())
    }

    /// The pool is not mounted any more.
    pub(super) fn forget_mount(&mut self) {
        self.acknowledge_told(u64::MAX);
        self.mount = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Kind, Layout, NodeId};

    fn encoded(reply: Reply<'_>) -> Vec<u8> {
        let mut buffer = [0; 512];
        let n = Reply::encode(&Ok(reply), &mut buffer).unwrap();
        buffer[..n].to_vec()
    }

    #[test]
    fn notes_of_a_removal_say_whether_the_inode_went_with_its_name() {
        let layout = Layout::single(NodeId(1), 0);
        let request = Request::Unlink { parent: Ino(7), name: b"n" };
        let reply = |last| encoded(Reply::Removed { ino: Ino(9), last, kind: Kind::File, layout });
        let gone = Note::Gone(Ino(7), Ino(9), b"n".to_vec());
        assert!(notes_of(&request, &reply(true), None).contains(&gone));
        let notes = notes_of(&request, &reply(false), None);
        assert!(!notes.contains(&gone) && notes.contains(&Note::Inode(Ino(9))));
    }

    #[test]
    fn notes_of_a_rename_name_both_names_and_all_inodes() {
        let layout = Layout::single(NodeId(1), 0);
        let request =
            Request::Rename { parent: Ino(7), name: b"a", new_parent: Ino(8), new_name: b"b", flags: 0 };
        let reply = encoded(Reply::Removed { ino: Ino(9), last: true, kind: Kind::File, layout });
        let notes = notes_of(&request, &reply, Some(Ino(10)));
        for ino in [7, 8, 9, 10] {
            assert!(notes.contains(&Note::Inode(Ino(ino))), "{ino}");
        }
        assert!(notes.contains(&Note::Name(Ino(7), b"a".to_vec())));
        assert!(notes.contains(&Note::Name(Ino(8), b"b".to_vec())));
    }

    #[test]
    fn notes_of_what_changes_nothing_the_kernel_keeps_are_none() {
        assert!(notes_of(&Request::MarkDirty { ino: Ino(7) }, &encoded(Reply::Done), None).is_empty());
        assert!(notes_of(&Request::Ping, &encoded(Reply::Done), None).is_empty());
    }

    #[test]
    fn messages_have_the_kernels_sizes() {
        assert_eq!(Note::Inode(Ino::ROOT).message().len(), 16 + 24);
        assert_eq!(Note::Inode(Ino::ROOT).message()[16..24], 1u64.to_ne_bytes());
        assert_eq!(Note::Name(Ino(5), b"abc".to_vec()).message().len(), 16 + 16 + 4);
        assert_eq!(Note::Gone(Ino(5), Ino(6), b"abc".to_vec()).message().len(), 16 + 24 + 4);
    }
}
