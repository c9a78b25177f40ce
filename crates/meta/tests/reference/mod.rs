//! A file system in a few maps: the specification of the shard, as simple as possible. It gives the replies that the
//! shard must give, including inode numbers and times; only the order of a directory's entries is up to the shard.

use std::collections::BTreeMap;

use forebay_types::limits::{XATTR_OVERHEAD, XATTR_TOTAL_MAX};
use forebay_types::{
    node_of, Attr, Caller, Code, Entry, Ino, Kind, Layout, NodeId, Request, SetAttr, TimeSet, Timestamp,
    FLAG_DIRTY, FLAG_HAS_VALUES, FLAG_RESIDENT, RENAME_EXCHANGE, RENAME_NOREPLACE, XATTR_CREATE,
    XATTR_REPLACE,
};

/// The expected reply to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    Number(Ino),
    Done,
    Entry(Entry),
    Created(Entry, bool, Option<Ino>),
    /// The inode, whether that was its last link, kind, layout.
    Removed(Ino, bool, Kind, Layout),
    /// The inode, and its previous layout.
    Relaid(Ino, Layout),
    /// Nothing was replaced.
    Nothing,
    Bytes(Vec<u8>),
    /// Names in any order, each with a NUL behind it.
    Names(Vec<Vec<u8>>),
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) attr: Attr,
    pub(crate) layout: Layout,
    pub(crate) target: Vec<u8>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) entries: BTreeMap<Vec<u8>, Ino>,
}

impl Node {
    pub(crate) fn entry(&self) -> Entry {
        Entry { attr: self.attr, layout: self.layout }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) nodes: BTreeMap<u64, Node>,
    pub(crate) orphans: BTreeMap<u64, Layout>,
    next: u64,
    /// Numbers that were reserved and not used yet.
    pub(crate) reserved: Vec<Ino>,
}

const NODE: NodeId = NodeId::FIRST;

impl Reference {
    pub(crate) fn new(mode: u32, uid: u32, gid: u32, now: Timestamp) -> Reference {
        let mut fs =
            Reference { nodes: BTreeMap::new(), orphans: BTreeMap::new(), next: 1, reserved: Vec::new() };
        let root = fs.node(Kind::Directory.mode_bits() | mode, uid, gid, now);
        assert_eq!(root.attr.ino, Ino::ROOT);
        fs.nodes.insert(Ino::ROOT.0, root);
        fs.next += 1;
        fs
    }

    fn node(&self, mode: u32, uid: u32, gid: u32, now: Timestamp) -> Node {
        let ino = Ino::new(NODE, self.next);
        let directory = Kind::from_mode(mode) == Some(Kind::Directory);
        let attr = Attr {
            ino,
            size: 0,
            rdev: 0,
            parent: if directory { Ino::ROOT } else { Ino(0) },
            mode,
            uid,
            gid,
            nlink: if directory { 2 } else { 1 },
            // A link's target is kept as an attribute's value is.
            flags: if Kind::from_mode(mode) == Some(Kind::Symlink) { FLAG_HAS_VALUES } else { 0 },
            home: NODE,
            width_log2: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
        };
        Node {
            attr,
            layout: Layout::single(NODE, 0),
            target: Vec::new(),
            xattrs: BTreeMap::new(),
            entries: BTreeMap::new(),
        }
    }

    pub(crate) fn get(&self, ino: Ino) -> Result<&Node, Code> {
        self.nodes.get(&ino.0).ok_or(Code::NotFound)
    }

    fn get_mut(&mut self, ino: Ino) -> Result<&mut Node, Code> {
        self.nodes.get_mut(&ino.0).ok_or(Code::NotFound)
    }

    fn directory(&self, ino: Ino) -> Result<&Node, Code> {
        match self.get(ino)? {
            node if node.attr.is_directory() => Ok(node),
            _ => Err(Code::NotDirectory),
        }
    }

    pub(crate) fn child(&self, parent: Ino, name: &[u8]) -> Result<Option<&Node>, Code> {
        Ok(self.directory(parent)?.entries.get(name).map(|ino| &self.nodes[&ino.0]))
    }

    fn is_directory(&self, ino: Ino) -> bool {
        self.nodes[&ino.0].attr.is_directory()
    }

    /// True when `above` is `ino` or an ancestor of it.
    fn is_above(&self, above: Ino, mut ino: Ino) -> bool {
        while ino != above && ino != Ino::ROOT {
            ino = self.nodes[&ino.0].attr.parent;
        }
        ino == above
    }

    fn attach(&mut self, parent: Ino, name: &[u8], ino: Ino) {
        let directory = self.is_directory(ino);
        if directory {
            self.nodes.get_mut(&ino.0).unwrap().attr.parent = parent;
        }
        let node = self.nodes.get_mut(&parent.0).unwrap();
        assert!(node.entries.insert(name.to_vec(), ino).is_none());
        node.attr.size += 1;
        node.attr.nlink += directory as u32;
    }

    fn detach(&mut self, parent: Ino, name: &[u8]) -> Ino {
        let ino = self.nodes.get_mut(&parent.0).unwrap().entries.remove(name).unwrap();
        let directory = self.is_directory(ino);
        let node = self.nodes.get_mut(&parent.0).unwrap();
        node.attr.size -= 1;
        node.attr.nlink -= directory as u32;
        ino
    }

    fn touch(&mut self, ino: Ino, now: Timestamp) {
        let attr = &mut self.nodes.get_mut(&ino.0).unwrap().attr;
        attr.mtime = now;
        attr.ctime = now;
    }

    /// Drops a link of an inode whose entry was removed.
    fn release(&mut self, ino: Ino, now: Timestamp) -> Expected {
        let node = self.nodes.get_mut(&ino.0).unwrap();
        let (kind, layout) = (node.attr.kind(), node.layout);
        node.attr.nlink = if kind == Kind::Directory { 0 } else { node.attr.nlink - 1 };
        node.attr.ctime = now;
        let last = node.attr.nlink == 0;
        if last {
            self.nodes.remove(&ino.0);
            if kind.has_backing() {
                self.orphans.insert(ino.0, layout);
            }
        }
        Expected::Removed(ino, last, kind, layout)
    }

    fn create_inode(
        &mut self,
        caller: Caller,
        now: Timestamp,
        parent: Ino,
        name: &[u8],
        mode: u32,
        shape: impl FnOnce(&mut Node),
    ) -> Result<Entry, Code> {
        let above = self.directory(parent)?;
        if above.entries.contains_key(name) {
            return Err(Code::Exists);
        }
        let inherits = above.attr.mode & 0o2000 != 0;
        let directory = Kind::from_mode(mode) == Some(Kind::Directory);
        let mode = if directory && inherits { mode | 0o2000 } else { mode };
        let gid = if inherits { above.attr.gid } else { caller.gid };
        let mut node = self.node(mode, caller.uid, gid, now);
        if directory {
            node.layout = above.layout;
        }
        shape(&mut node);
        let ino = node.attr.ino;
        if ino == Ino::new(NODE, self.next) {
            self.next += 1;
        }
        self.nodes.insert(ino.0, node);
        self.attach(parent, name, ino);
        self.touch(parent, now);
        Ok(self.nodes[&ino.0].entry())
    }

    /// Answers any request except ReadDirectory, Ping and Space.
    pub(crate) fn apply(
        &mut self,
        caller: Caller,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Result<Expected, Code> {
        match *request {
            Request::Lookup { parent, name } => {
                self.child(parent, name)?.map(|n| Expected::Entry(n.entry())).ok_or(Code::NotFound)
            }
            Request::GetAttr { ino } => Ok(Expected::Entry(self.get(ino)?.entry())),
            Request::SetAttr { ino, set } => self.set_attr(ino, &set, now),
            Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve } => {
                if let (Some(node), false) = (self.child(parent, name)?, exclusive) {
                    return Ok(Expected::Created(node.entry(), false, None));
                }
                let above = self.directory(parent)?;
                let wish = layout.and_then(|layout| layout.wish());
                if wish.is_some() && above.layout.is_set(NODE) && !above.entries.contains_key(name) {
                    return Ok(Expected::Entry(above.entry()));
                }
                let layout = wish.map_or(layout, |target| Some(Layout::single(node_of(target), target as u16)));
                let entry = self.create_inode(caller, now, parent, name, 0o100_000 | mode, |node| {
                    node.attr.flags = FLAG_RESIDENT | if dirty { FLAG_DIRTY } else { 0 };
                    node.layout = layout.unwrap_or(node.layout);
                    node.attr.ino = number.unwrap_or(node.attr.ino);
                })?;
                self.reserved.retain(|ino| Some(*ino) != number);
                let next = reserve.then(|| Ino::new(NODE, self.next));
                self.next += u64::from(reserve);
                self.reserved.extend(next);
                Ok(Expected::Created(entry, true, next))
            }
            Request::MakeNode { parent, name, mode, rdev } => {
                let entry = self.create_inode(caller, now, parent, name, mode, |node| {
                    if matches!(node.attr.kind(), Kind::CharDevice | Kind::BlockDevice) {
                        node.attr.rdev = rdev;
                    }
                })?;
                Ok(Expected::Entry(entry))
            }
            Request::MakeDirectory { parent, name, mode } => {
                Ok(Expected::Entry(self.create_inode(caller, now, parent, name, 0o040_000 | mode, |_| {})?))
            }
            Request::Symlink { parent, name, target } => {
                let entry = self.create_inode(caller, now, parent, name, 0o120_777, |node| {
                    node.attr.size = target.len() as u64;
                    node.target = target.to_vec();
                })?;
                Ok(Expected::Entry(entry))
            }
            Request::Link { ino, parent, name } => {
                let taken = self.child(parent, name)?.is_some();
                let node = self.get(ino)?;
                if taken {
                    return Err(Code::Exists);
                }
                if node.attr.is_directory() {
                    return Err(Code::NotPermitted);
                }
                self.attach(parent, name, ino);
                self.touch(parent, now);
                let node = self.get_mut(ino)?;
                node.attr.nlink += 1;
                node.attr.ctime = now;
                Ok(Expected::Entry(node.entry()))
            }
            Request::Unlink { parent, name } => {
                if self.child(parent, name)?.ok_or(Code::NotFound)?.attr.is_directory() {
                    return Err(Code::IsDirectory);
                }
                let ino = self.detach(parent, name);
                self.touch(parent, now);
                Ok(self.release(ino, now))
            }
            Request::RemoveDirectory { parent, name } => {
                let node = self.child(parent, name)?.ok_or(Code::NotFound)?;
                if !node.attr.is_directory() {
                    return Err(Code::NotDirectory);
                }
                if !node.entries.is_empty() {
                    return Err(Code::NotEmpty);
                }
                let ino = self.detach(parent, name);
                self.touch(parent, now);
                Ok(self.release(ino, now))
            }
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                self.rename((parent, name), (new_parent, new_name), flags, now)
            }
            Request::ReadLink { ino } => match self.get(ino)? {
                node if node.attr.is_symlink() => Ok(Expected::Bytes(node.target.clone())),
                _ => Err(Code::Invalid),
            },
            Request::GetXattr { ino, name } => {
                let node = self.get(ino)?;
                check_name(name, node.attr.kind(), false)?;
                node.xattrs.get(name).map(|v| Expected::Bytes(v.clone())).ok_or(Code::NoAttribute)
            }
            Request::SetXattr { ino, name, value, flags } => {
                let node = self.get_mut(ino)?;
                check_name(name, node.attr.kind(), true)?;
                match flags {
                    XATTR_CREATE if node.xattrs.contains_key(name) => return Err(Code::Exists),
                    XATTR_REPLACE if !node.xattrs.contains_key(name) => return Err(Code::NoAttribute),
                    _ => {}
                }
                let mut xattrs = node.xattrs.clone();
                xattrs.insert(name.to_vec(), value.to_vec());
                if xattrs.iter().map(|(n, v)| n.len() + v.len() + XATTR_OVERHEAD).sum::<usize>()
                    > XATTR_TOTAL_MAX
                {
                    return Err(Code::NoSpace);
                }
                node.xattrs = xattrs;
                node.attr.flags |= FLAG_HAS_VALUES;
                node.attr.ctime = now;
                Ok(Expected::Done)
            }
            Request::ListXattr { ino } => {
                Ok(Expected::Names(self.get(ino)?.xattrs.keys().cloned().collect()))
            }
            Request::RemoveXattr { ino, name } => {
                let node = self.get_mut(ino)?;
                check_name(name, node.attr.kind(), true)?;
                node.xattrs.remove(name).ok_or(Code::NoAttribute)?;
                node.attr.ctime = now;
                Ok(Expected::Done)
            }
            Request::MarkDirty { ino } | Request::MakeBacking { ino } => {
                let dirties = matches!(request, Request::MarkDirty { .. });
                let node = self.get_mut(ino)?;
                match node.attr.kind() {
                    Kind::File => {}
                    Kind::Fifo | Kind::CharDevice | Kind::BlockDevice if !dirties => {}
                    Kind::Directory => return Err(Code::IsDirectory),
                    _ => return Err(Code::Invalid),
                }
                node.attr.flags |= if dirties { FLAG_DIRTY } else { 0 };
                Ok(Expected::Entry(node.entry()))
            }
            Request::SetLayout { ino, layout } => {
                let node = self.get_mut(ino)?;
                match node.attr.kind() {
                    Kind::Directory => {}
                    Kind::File if node.layout.is_single() != layout.is_single() && layout.is_placed() => {}
                    _ => return Err(Code::Invalid),
                }
                Ok(Expected::Relaid(ino, std::mem::replace(&mut node.layout, layout)))
            }
            Request::PathOf { ino } => {
                self.directory(ino)?;
                Ok(Expected::Bytes(self.path(ino)))
            }
            Request::Reserve => {
                let number = Ino::new(NODE, self.next);
                self.next += 1;
                self.reserved.push(number);
                Ok(Expected::Number(number))
            }
            Request::Ping
            | Request::Space
            | Request::Place { .. }
            | Request::Targets
            | Request::ReadDirectory { .. }
            // Cross-node transactions: tests/transactions.
            | Request::MakeDirectoryAt { .. }
            | Request::MoveDirectory { .. }
            | Request::SetWidth { .. }
            | Request::PartsOf { .. }
            | Request::Prepare { .. }
            | Request::Finish { .. }
            | Request::AskOutcome { .. }
            | Request::Decide { .. }
            | Request::DropLink { .. }
            | Request::Touch { .. }
            | Request::LeadsTo { .. }
            | Request::IsLed { .. }
            | Request::NameOf { .. }
            | Request::Backing { .. }
            | Request::EndSession { .. }
            | Request::AreThere { .. }
            | Request::RemoveBackings { .. }
            | Request::RenewLease
            | Request::RevokeName { .. }
            | Request::RevokeDirectory { .. }
            // Backing stores: tests/backing_store.rs.
            | Request::Attach { .. }
            | Request::Detach { .. }
            | Request::StoreWork { .. }
            | Request::StoreFailed { .. }
            | Request::WaitForStore { .. }
            | Request::Persist { .. }
            | Request::Persisted { .. }
            | Request::Import { .. }
            | Request::Listed { .. }
            | Request::LookedUp { .. }
            | Request::Recall { .. }
            | Request::ReadKnown { .. }
            | Request::Restore { .. }
            | Request::RestoreRange { .. }
            | Request::RangeRestored { .. }
            | Request::Restored { .. }
            | Request::BeginDrain { .. }
            | Request::Pending { .. }
            | Request::PendingChanges
            | Request::Intend { .. }
            | Request::Published { .. }
            | Request::StoreReports { .. }
            | Request::Unpublished { .. }
            | Request::Settled { .. }
            | Request::Moved { .. }
            | Request::Release { .. }
            | Request::Pin { .. }
            | Request::StorePlace { .. }
            | Request::StorePlaces { .. }
            | Request::Forget { .. }
            | Request::Conflict { .. }
            | Request::Relocate { .. }
            | Request::AskMover { .. }
            | Request::MoverWork
            | Request::MoverAnswer { .. }
            // Volumes: tests/volumes.rs.
            | Request::CreateVolume { .. }
            | Request::GrowVolume { .. }
            | Request::CommitVolume { .. }
            | Request::AbandonVolume { .. }
            | Request::ShrinkVolume { .. }
            | Request::DeleteVolume { .. }
            | Request::GetVolume { .. }
            | Request::ListVolumes { .. }
            | Request::MakePiece { .. }
            | Request::MakePieceAway { .. }
            | Request::PiecesUnused { .. }
            | Request::ReviewPieces { .. }
            | Request::AreSegments { .. } => Err(Code::NotSupported),
        }
    }

    fn path(&self, mut ino: Ino) -> Vec<u8> {
        let mut names = Vec::new();
        while ino != Ino::ROOT {
            let parent = self.nodes[&ino.0].attr.parent;
            let (name, _) = self.nodes[&parent.0].entries.iter().find(|(_, i)| **i == ino).unwrap();
            names.push(name.clone());
            ino = parent;
        }
        let mut path: Vec<u8> = names.iter().rev().flat_map(|n| [b"/", n.as_slice()].concat()).collect();
        if path.is_empty() {
            path.push(b'/');
        }
        path
    }

    fn set_attr(&mut self, ino: Ino, set: &SetAttr, now: Timestamp) -> Result<Expected, Code> {
        let node = self.get_mut(ino)?;
        let mut attr = node.attr;
        if let Some(mode) = set.mode {
            if attr.is_symlink() {
                return Err(Code::NotSupported);
            }
            attr.mode = attr.mode & 0o170_000 | mode;
        }
        if let Some(size) = set.size {
            match attr.kind() {
                Kind::File => attr.size = size,
                Kind::Directory => return Err(Code::IsDirectory),
                _ => return Err(Code::Invalid),
            }
        }
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        let time = |old, set| match set {
            TimeSet::Omit => old,
            TimeSet::Now => now,
            TimeSet::At(at) => at,
        };
        attr.atime = time(attr.atime, set.atime);
        attr.mtime = time(attr.mtime, set.mtime);
        attr.ctime = now;
        node.attr = attr;
        Ok(Expected::Entry(node.entry()))
    }

    fn rename(
        &mut self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
        now: Timestamp,
    ) -> Result<Expected, Code> {
        self.directory(from.0)?;
        self.directory(to.0)?;
        let source = self.child(from.0, from.1)?.ok_or(Code::NotFound)?.attr;
        let target = self.child(to.0, to.1)?.map(|n| (n.attr, n.entries.len()));
        if flags == RENAME_NOREPLACE && target.is_some() {
            return Err(Code::Exists);
        }
        if flags == RENAME_EXCHANGE && target.is_none() {
            return Err(Code::NotFound);
        }
        if source.is_directory() && self.is_above(source.ino, to.0) {
            return Err(Code::Invalid);
        }
        let mut replaced = Expected::Nothing;
        if let Some((target, entries)) = target {
            if target.is_directory() && self.is_above(target.ino, from.0) {
                return Err(if flags == RENAME_EXCHANGE { Code::Invalid } else { Code::NotEmpty });
            }
            if target.ino == source.ino {
                return Ok(Expected::Nothing);
            }
            if flags == RENAME_EXCHANGE {
                let (a, b) = (self.detach(from.0, from.1), self.detach(to.0, to.1));
                self.attach(from.0, from.1, b);
                self.attach(to.0, to.1, a);
                for ino in [from.0, to.0] {
                    self.touch(ino, now);
                }
                for ino in [a, b] {
                    self.get_mut(ino)?.attr.ctime = now;
                }
                return Ok(Expected::Nothing);
            }
            match (source.is_directory(), target.is_directory()) {
                (true, false) => return Err(Code::NotDirectory),
                (false, true) => return Err(Code::IsDirectory),
                (true, true) if entries > 0 => return Err(Code::NotEmpty),
                _ => {}
            }
            let ino = self.detach(to.0, to.1);
            replaced = self.release(ino, now);
        }
        let ino = self.detach(from.0, from.1);
        self.attach(to.0, to.1, ino);
        self.get_mut(ino)?.attr.ctime = now;
        for ino in [from.0, to.0] {
            self.touch(ino, now);
        }
        Ok(replaced)
    }
}

fn check_name(name: &[u8], kind: Kind, writes: bool) -> Result<(), Code> {
    let text = String::from_utf8_lossy(name).into_owned();
    if text == "system.posix_acl_access" || text == "system.posix_acl_default" {
        return Ok(());
    }
    let Some((space, rest)) = text.split_once('.') else { return Err(Code::NotSupported) };
    if !["user", "trusted", "security"].contains(&space) {
        return Err(Code::NotSupported);
    }
    if rest.is_empty() {
        return Err(Code::Invalid);
    }
    if space == "user" && kind != Kind::File && kind != Kind::Directory {
        return Err(if writes { Code::NotPermitted } else { Code::NoAttribute });
    }
    Ok(())
}
