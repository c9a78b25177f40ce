//! The plan of a cross-node transaction, part by part: which node prepares which part, in which order, and the reply.
//! No I/O and no clock: [`crate::Transactions`] drives it.
//!
//! ```text
//! (if a condemned directory is wide: condemn all its parts too)
//! widen            here: widen · each node: make part · here: widen, with the parts
//! chmod … of a     here: change · each part: change
//! wide directory
//! link             home of the inode: count      · here: enter
//! rmdir            here: leave                   · home of the directory: condemn
//! mkdir            here: create inode            · home of the parent: enter · here: change, to inherit from it
//! … that is wide   (then) each node: make part   · here: widen, with the parts
//! rename, a file   here: leave                   · home of the destination: enter
//! … a directory    home of the source: leave     · homes above the destination, up to the root: climb
//! (root's home)    · home of the destination: enter · home of the directory: move · of what it replaces: condemn
//! ```
//! The parts are prepared one after the other; the first refusal aborts the transaction. Refusals come in the order in
//! which Linux checks.

use forebay_types::{
    Caller, Change, Code, Entry, Ino, Kind, Layout, NodeId, Part, Parts, Reply, Request, SetAttr, TxId,
    FLAG_ATTACHED, RENAME_EXCHANGE, RENAME_NOREPLACE,
};

use crate::batch::{Answer, Batch};
use crate::namespace::S_ISGID;
use crate::rename::removed_nothing;
use crate::wide::{check_narrow, choose_nodes, nodes_of_new, width_log2};

/// The plan of a cross-node transaction: the request, with what this node found when it received it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan(Operation);

/// The operation of a [`Plan`].
#[derive(Clone, PartialEq, Eq, Debug)]
enum Operation {
    /// A new name here for a file of another node.
    Link { ino: Ino, parent: Ino, name: Vec<u8> },
    /// A directory of another node with its entry here; or a wide directory.
    RemoveDirectory { parent: Ino, name: Vec<u8>, ino: Ino },
    /// A new directory of this node. Its parent is on another node, or is on this one and makes new directories wide,
    /// over nodes of `pool`.
    MakeDirectory { parent: Ino, name: Vec<u8>, mode: u32, pool: Vec<NodeId> },
    /// A file from a directory here to one on another node.
    RenameFile { from: (Ino, Vec<u8>), to: (Ino, Vec<u8>), flags: u32, ino: Ino, kind: Kind, link: TxId },
    /// A directory between any two nodes; the root's home coordinates it.
    MoveDirectory { from: (Ino, Vec<u8>), to: (Ino, Vec<u8>), flags: u32, ino: Ino },
    /// A directory of this node becomes wide.
    Widen { ino: Ino, nodes: Vec<NodeId> },
    /// A change of a wide directory of this node, and of its parts.
    Change { parts: Box<Parts>, change: Box<Change> },
}

impl Batch<'_> {
    /// The plan of a request that this shard cannot execute alone; none for all others. `nodes` are the nodes of the
    /// pool.
    ///
    /// # Errors
    /// The code with which the request is refused at once.
    pub fn plan(
        &mut self,
        request: &Request<'_>,
        nodes: &[NodeId],
    ) -> std::result::Result<Option<Plan>, Code> {
        match *request {
            Request::Link { ino, parent, name } if !self.is_ours(ino) => {
                let slot = self.entries_for(parent, name)?;
                if self.find_entry(slot, name)?.is_some() {
                    return Err(Code::Exists);
                }
                Ok(Some(Plan(Operation::Link { ino, parent, name: name.to_vec() })))
            }
            Request::RemoveDirectory { parent, name } => {
                let slot = self.entries_for(parent, name)?;
                let found = self.find_entry(slot, name)?;
                let Some(found) = found.filter(|f| f.kind == Kind::Directory) else { return Ok(None) };
                let several = !self.is_ours(found.ino) || self.parts_if_wide(found.ino)?.is_some();
                Ok(several
                    .then_some(found)
                    .map(|f| Plan(Operation::RemoveDirectory { parent, name: name.to_vec(), ino: f.ino })))
            }
            Request::MakeDirectoryAt { parent, name, mode, .. } => {
                let (name, pool) = (name.to_vec(), nodes.to_vec());
                Ok(Some(Plan(Operation::MakeDirectory { parent, name, mode, pool })))
            }
            Request::MakeDirectory { parent, name, mode } if nodes.len() > 1 => {
                let slot = self.entries_for(parent, name)?;
                let above = self.state.directories.get(slot).attr;
                // The directories of a store's tree are narrow.
                if above.width_of_new() == 0 || above.flags & FLAG_ATTACHED != 0 {
                    return Ok(None);
                }
                if self.find_entry(slot, name)?.is_some() {
                    return Err(Code::Exists);
                }
                let (name, pool) = (name.to_vec(), nodes.to_vec());
                Ok(Some(Plan(Operation::MakeDirectory { parent, name, mode, pool })))
            }
            Request::Rename { parent, name, new_parent, new_name, flags }
                if !self.is_ours(new_parent) && flags & RENAME_EXCHANGE == 0 =>
            {
                let slot = self.entries_for(parent, name)?;
                let found = self.find_entry(slot, name)?.ok_or(Code::NotFound)?;
                if found.kind == Kind::Directory {
                    return Ok(None); // the reply sends the client to the root's home
                }
                Ok(Some(Plan(Operation::RenameFile {
                    from: (parent, name.to_vec()),
                    to: (new_parent, new_name.to_vec()),
                    flags,
                    ino: found.ino,
                    kind: found.kind,
                    link: found.link,
                })))
            }
            Request::MoveDirectory { parent, name, new_parent, new_name, flags, ino } => {
                let (from, to) = ((parent, name.to_vec()), (new_parent, new_name.to_vec()));
                Ok(Some(Plan(Operation::MoveDirectory { from, to, flags, ino })))
            }
            Request::SetWidth { ino, width, .. } => {
                let slot = self.directory(ino)?;
                if self.state.directories.get(slot).attr.flags & FLAG_ATTACHED != 0 {
                    return Err(Code::NotSupported);
                }
                check_narrow(self.state.directories.get(slot))?;
                let nodes = choose_nodes(ino.birth_node(), nodes, width)?;
                Ok(Some(Plan(Operation::Widen { ino, nodes })))
            }
            Request::SetAttr { ino, set } => self.plan_change(ino, Change { set, layout: None }),
            Request::SetLayout { ino, layout } => {
                self.plan_change(ino, Change { set: SetAttr::default(), layout: Some(layout) })
            }
            _ => Ok(None),
        }
    }

    /// A change of a wide directory of this node that applies to its parts too.
    fn plan_change(&mut self, ino: Ino, change: Change) -> std::result::Result<Option<Plan>, Code> {
        let parts = self.parts_if_wide(ino)?;
        Ok(parts.map(|parts| Plan(Operation::Change { parts: Box::new(parts), change: Box::new(change) })))
    }
}

/// Operations that run one at a time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Exclusive {
    /// Moves of directories between nodes, in the whole pool.
    Moves,
    /// Changes of this wide directory.
    ChangesOf(Ino),
}

/// The next step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Send this message, a part to prepare, to the node.
    Prepare(NodeId, Vec<u8>),
    /// All parts are prepared: decide, with this reply.
    Decide(Reply<'static>),
    /// Nothing needs to be done: drop what was prepared, and answer with this.
    Nothing(forebay_types::Answer<'static>),
}

/// A transaction until it is decided.
#[derive(Debug)]
pub(crate) struct Coordinator {
    pub(crate) tx: TxId,
    me: NodeId,
    caller: Caller,
    plan: Operation,
    /// Number of parts sent. A path that changes between nodes more often than this can count cannot be climbed.
    asked: u8,
    /// The position in the plan.
    stage: u8,
    /// Nodes that may have prepared parts.
    pub(crate) nodes: Vec<NodeId>,
    /// The node of the last part sent.
    last: NodeId,
    reply: Reply<'static>,
    /// The directory from which a climb continues; the new directory of a mkdir.
    at: Ino,
    /// The kind of the inode that gets a link.
    kind: Kind,
    /// The directory that is replaced.
    victim: Option<Ino>,
    /// The parts of a wide directory that is removed, which are condemned too, and how many of these were sent; or the
    /// parts created so far.
    parts: Vec<Ino>,
    parts_asked: usize,
    /// How many parts of a directory that changes have been changed.
    asked_of_parts: usize,
    /// The nodes of the parts of a directory that is being created.
    wide_on: Vec<NodeId>,
    /// What the parts of a directory inherit when it becomes wide, or a new directory inherits from its parent.
    like: Option<Change>,
}

/// What the parts of a directory inherit from it.
fn like_for_parts(directory: &Entry) -> Change {
    let attr = &directory.attr;
    let (mode, uid, gid) = (Some(attr.mode & 0o7777), Some(attr.uid), Some(attr.gid));
    let width_of_new = Some(attr.width_of_new()).filter(|width| *width != 0);
    let set = SetAttr { mode, uid, gid, width_of_new, ..SetAttr::default() };
    Change { set, layout: Some(directory.layout) }
}

impl Coordinator {
    pub(crate) fn new(tx: TxId, me: NodeId, caller: Caller, plan: Plan) -> Coordinator {
        let Plan(plan) = plan;
        let at = match &plan {
            Operation::MoveDirectory { to, .. } => to.0,
            _ => Ino::ROOT,
        };
        Coordinator {
            tx,
            me,
            caller,
            plan,
            asked: 0,
            stage: 0,
            nodes: Vec::new(),
            last: me,
            reply: removed_nothing(Kind::Directory),
            at,
            kind: Kind::File,
            victim: None,
            parts: Vec::new(),
            parts_asked: 0,
            asked_of_parts: 0,
            wide_on: Vec::new(),
            like: None,
        }
    }

    /// The sort of operation of which only one may run here at a time, if it is one: a second one would meet the first
    /// and have to start again.
    pub(crate) fn exclusive(plan: &Plan) -> Option<Exclusive> {
        match &plan.0 {
            Operation::MoveDirectory { .. } => Some(Exclusive::Moves),
            Operation::Change { parts, .. } => Some(Exclusive::ChangesOf(parts.of)),
            _ => None,
        }
    }

    /// True when the client, not this node, looked up the inode to move.
    pub(crate) fn client_looked_up(&self) -> bool {
        matches!(self.plan, Operation::MoveDirectory { .. })
    }

    /// The first step.
    pub(crate) fn begin(&mut self) -> Answer<Next> {
        self.next()
    }

    /// The last part sent is prepared, with this reply. Returns the next step.
    pub(crate) fn prepared(&mut self, reply: Reply<'_>) -> Answer<Next> {
        // No reply to a part borrows anything.
        let reply = reply.owned().ok_or(Code::Malformed)?;
        if self.parts_asked > 0 {
            // A part of a directory that is removed: these come last.
            return match reply {
                Reply::Done => self.next(),
                _ => Err(Code::Malformed),
            };
        }
        match (&self.plan, self.stage, reply) {
            (Operation::Link { .. }, 0, Reply::Entry(entry)) => {
                self.kind = entry.attr.kind();
                self.reply = reply;
            }
            (Operation::MakeDirectory { .. }, 0, Reply::Entry(entry)) => {
                self.at = entry.attr.ino;
                self.reply = reply;
            }
            (Operation::MakeDirectory { .. }, 1, Reply::Entry(above)) => self.inherit(&above)?,
            (Operation::MakeDirectory { .. }, 2, _) => {}
            (Operation::MakeDirectory { .. }, 3, Reply::Entry(part)) => {
                self.parts.push(part.attr.ino);
                if self.parts.len() < self.wide_on.len() {
                    return self.next(); // the stage stays
                }
            }
            (Operation::MakeDirectory { .. }, 4, Reply::Entry(_)) => {
                let Reply::Entry(mut created) = self.reply else { return Err(Code::Malformed) };
                created.attr.width_log2 = width_log2(self.parts.len());
                self.reply = Reply::Entry(created);
                self.parts.clear();
            }
            // No entry had the name.
            (Operation::MoveDirectory { flags: RENAME_NOREPLACE, .. }, 2, Reply::Entry(_)) => {}
            (Operation::RemoveDirectory { ino, .. }, 0, Reply::Done) => {
                let layout = Layout::single(ino.birth_node(), 0);
                let (ino, kind) = (*ino, Kind::Directory);
                self.reply = Reply::Removed { ino, last: true, kind, layout };
            }
            (Operation::RenameFile { ino, kind, .. }, 1, Reply::Removed { ino: victim, .. }) => {
                if victim == *ino {
                    return Ok(Next::Nothing(Ok(removed_nothing(*kind))));
                }
                self.reply = reply;
            }
            (Operation::MoveDirectory { .. }, 1, Reply::Number(above)) => {
                if above != Ino::ROOT {
                    self.at = above;
                    return self.next(); // the stage stays
                }
            }
            (Operation::MoveDirectory { ino, .. }, 2, Reply::Removed { ino: victim, .. }) => {
                if victim == *ino {
                    return Ok(Next::Nothing(Ok(self.reply)));
                }
                self.victim = (victim != Ino(0)).then_some(victim);
                self.reply = reply;
            }
            (Operation::RemoveDirectory { .. }, 1, Reply::Parts(parts))
            | (Operation::MoveDirectory { .. }, 4, Reply::Parts(parts)) => {
                self.parts = parts.as_slice().to_vec();
            }
            (Operation::Widen { .. }, 0, Reply::Entry(entry)) => {
                self.like = Some(like_for_parts(&entry));
            }
            (Operation::Widen { nodes, .. }, 1, Reply::Entry(part)) => {
                self.parts.push(part.attr.ino);
                if self.parts.len() < nodes.len() {
                    return self.next(); // the stage stays
                }
            }
            (Operation::Widen { ino, .. }, 2, Reply::Entry(_)) => {
                self.reply = Reply::Parts(Parts::new(*ino, &self.parts)?);
                self.parts.clear();
            }
            (Operation::Change { .. }, 0, Reply::Entry(_) | Reply::Relaid { .. }) => {
                self.reply = reply;
            }
            (Operation::Change { parts, .. }, 1, Reply::Done) => {
                self.asked_of_parts += 1;
                if self.asked_of_parts < parts.as_slice().len() {
                    return self.next(); // the stage stays
                }
            }
            (Operation::Link { .. }, 1, Reply::Removed { .. })
            | (Operation::RemoveDirectory { .. }, 1, Reply::Done)
            | (Operation::RenameFile { .. }, 0, Reply::Done)
            | (Operation::MoveDirectory { .. }, 0 | 3 | 4, Reply::Done) => {}
            _ => return Err(Code::Malformed),
        }
        self.stage += 1;
        self.next()
    }

    /// The node of the last part sent is gone for good: another node has its place. None if the transaction cannot do
    /// without it. A wide directory that lost a part can still be removed and changed.
    pub(crate) fn lost(&mut self) -> Option<Answer<Next>> {
        let changes_part = matches!(self.plan, Operation::Change { .. }) && self.stage == 1;
        if self.parts_asked == 0 && !changes_part {
            return None;
        }
        let last = self.last;
        self.nodes.retain(|node| *node != last);
        Some(self.prepared(Reply::Done))
    }

    /// Applies what a new directory inherits from its parent: group, set-group-id bit, layout, and the width of new
    /// directories, which is also its own width.
    fn inherit(&mut self, above: &Entry) -> Answer<()> {
        let Reply::Entry(mut created) = self.reply else { return Err(Code::Malformed) };
        let inherits = above.attr.mode & S_ISGID != 0;
        let mode = inherits.then_some(created.attr.mode & 0o7777 | S_ISGID);
        let width = Some(above.attr.width_of_new()).filter(|width| *width != 0);
        let gid = inherits.then_some(above.attr.gid);
        let set = SetAttr { mode, gid, width_of_new: width, ..SetAttr::default() };
        if let Operation::MakeDirectory { pool, .. } = &self.plan {
            self.wide_on = nodes_of_new(self.me, pool, width.unwrap_or(0));
        }
        let layout = above.layout.is_set(above.attr.home).then_some(above.layout);
        if set == SetAttr::default() && layout.is_none() {
            return Ok(());
        }
        let now = created.attr.ctime;
        set.apply(&mut created.attr, now)?;
        created.layout = layout.unwrap_or(created.layout);
        self.reply = Reply::Entry(created);
        self.like = Some(Change { set, layout });
        Ok(())
    }

    fn next(&mut self) -> Answer<Next> {
        let (tx, stage, file) = (self.tx, self.stage, TxId::NONE);
        let part = match &self.plan {
            Operation::Link { ino, parent, name } => match stage {
                0 => Some(Part::Count { ino: *ino, link: tx }),
                1 => {
                    let (kind, flags) = (self.kind, RENAME_NOREPLACE);
                    Some(Part::Enter { parent: *parent, name, ino: *ino, kind, link: tx, flags })
                }
                _ => None,
            },
            Operation::RemoveDirectory { parent, name, ino } => match stage {
                0 => Some(Part::Leave { parent: *parent, name, ino: *ino, link: TxId::NONE }),
                1 => Some(Part::Condemn { ino: *ino }),
                _ => None,
            },
            Operation::MakeDirectory { parent, name, mode, .. } => match stage {
                0 => Some(Part::CreateInode { parent: *parent, mode: *mode }),
                1 => {
                    let (kind, flags) = (Kind::Directory, RENAME_NOREPLACE);
                    Some(Part::Enter { parent: *parent, name, ino: self.at, kind, link: file, flags })
                }
                2 => self.like.map(|change| Part::Change { ino: self.at, change }),
                3 if !self.wide_on.is_empty() => {
                    let (index, width) = (self.parts.len() as u8, self.wide_on.len() as u8);
                    let node = *self.wide_on.get(self.parts.len()).ok_or(Code::Malformed)?;
                    let Reply::Entry(created) = self.reply else { return Err(Code::Malformed) };
                    Some(Part::CreatePart { node, of: self.at, index, width, like: like_for_parts(&created) })
                }
                4 => Some(Part::Widen { ino: self.at, parts: Some(Parts::new(self.at, &self.parts)?) }),
                _ => None,
            },
            Operation::RenameFile { from, to, flags, ino, kind, link } => {
                let link = if ino.birth_node() == self.me { tx } else { *link };
                match stage {
                    0 => Some(Part::Leave { parent: from.0, name: &from.1, ino: *ino, link }),
                    1 => Some(Part::Enter {
                        parent: to.0,
                        name: &to.1,
                        ino: *ino,
                        kind: *kind,
                        link,
                        flags: *flags,
                    }),
                    _ => None,
                }
            }
            Operation::MoveDirectory { from, to, flags, ino } => {
                if self.stage == 1 && from.0 == to.0 {
                    self.stage = 2; // no directory becomes a descendant of another
                }
                if self.stage == 3 && ino.birth_node() == to.0.birth_node() {
                    self.stage = 4; // the part that creates its entry updates it
                }
                match self.stage {
                    0 => Some(Part::Leave { parent: from.0, name: &from.1, ino: *ino, link: file }),
                    1 => Some(Part::Climb { from: self.at, avoid: *ino }),
                    2 => Some(Part::Enter {
                        parent: to.0,
                        name: &to.1,
                        ino: *ino,
                        kind: Kind::Directory,
                        link: file,
                        flags: *flags,
                    }),
                    3 => Some(Part::Move { ino: *ino, parent: to.0 }),
                    4 => self.victim.map(|ino| Part::Condemn { ino }),
                    _ => None,
                }
            }
            Operation::Widen { ino, nodes } => match (stage, self.like) {
                (0, _) => Some(Part::Widen { ino: *ino, parts: None }),
                (1, Some(like)) => {
                    let (index, width) = (self.parts.len() as u8, nodes.len() as u8);
                    let node = *nodes.get(self.parts.len()).ok_or(Code::Malformed)?;
                    Some(Part::CreatePart { node, of: *ino, index, width, like })
                }
                (2, _) => Some(Part::Widen { ino: *ino, parts: Some(Parts::new(*ino, &self.parts)?) }),
                _ => None,
            },
            Operation::Change { parts, change } => match stage {
                0 => Some(Part::Change { ino: parts.of, change: **change }),
                1 => {
                    let ino = *parts.as_slice().get(self.asked_of_parts).ok_or(Code::Malformed)?;
                    Some(Part::Change { ino, change: **change })
                }
                _ => None,
            },
        };
        let part = part.or_else(|| {
            let part = self.parts.get(self.parts_asked)?;
            self.parts_asked += 1;
            Some(Part::Condemn { ino: *part })
        });
        let Some(part) = part else { return Ok(Next::Decide(self.reply)) };
        let node = part.node().unwrap_or(self.me);
        self.last = node;
        let index = self.asked;
        self.asked = self.asked.checked_add(1).ok_or(Code::NoResources)?;
        let mut message = vec![0; 1024];
        let n = Request::Prepare { tx, index, part }.encode(self.caller, &mut message)?;
        message.truncate(n);
        if !self.nodes.contains(&node) {
            self.nodes.push(node);
        }
        Ok(Next::Prepare(node, message))
    }
}
