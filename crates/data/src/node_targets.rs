//! The targets of one node, in the order of their numbers.

use forebay_pacing::{Pacer, Pacers};
use forebay_types::{Code, Ino, Layout};

use crate::media::{Media, Space};
use crate::target::Target;

/// A node's targets. The first also holds the shard, the anchors, and the special files of FIFOs and devices.
#[derive(Debug)]
pub struct NodeTargets {
    all: Vec<Target>,
    /// No file data are on this node. The only target holds the shard, and no layout names it.
    shard_only: bool,
    /// The pacers of the targets, if they emulate a medium.
    pacers: Option<Pacers>,
}

impl NodeTargets {
    /// The targets of a node, in the order of their numbers.
    ///
    /// # Panics
    /// If `all` is empty.
    pub fn new(all: Vec<Target>) -> NodeTargets {
        assert!(!all.is_empty(), "a node has a target");
        NodeTargets { all, shard_only: false, pacers: None }
    }

    /// The target of a node without file data: `first` holds only what a first target holds besides file data.
    pub fn of_shard_alone(first: Target) -> NodeTargets {
        NodeTargets { all: vec![first], shard_only: true, pacers: None }
    }

    /// The same targets, whose reads and writes [`NodeTargets::pacer`] delays.
    pub fn paced_by(self, pacers: Option<Pacers>) -> NodeTargets {
        NodeTargets { pacers, ..self }
    }

    /// True if the targets emulate a medium, so that reads and writes of them wait.
    pub fn is_paced(&self) -> bool {
        self.pacers.is_some()
    }

    /// The pacer of the target with this number in layouts, if the target emulates a medium.
    #[inline]
    pub fn pacer(&self, number: u32) -> Option<Pacer<'_>> {
        self.pacers.as_ref().map(|pacers| pacers.pacer(number as u16 as usize))
    }

    /// The targets that may hold file data.
    pub fn for_files(&self) -> &[Target] {
        if self.shard_only {
            &[]
        } else {
            &self.all
        }
    }

    /// The first target.
    pub fn first(&self) -> &Target {
        &self.all[0]
    }

    /// All targets, including one that holds only a shard.
    pub fn iter(&self) -> impl Iterator<Item = &Target> {
        self.all.iter()
    }

    /// The target with this number in layouts.
    ///
    /// # Errors
    /// [`Code::NoDevice`] when the node has no such target.
    pub fn get(&self, number: u32) -> Result<&Target, Code> {
        self.for_files().iter().find(|t| t.target() == number).ok_or(Code::NoDevice)
    }

    /// Creates the file's backing files on this node.
    ///
    /// # Errors
    /// [`Code::NoDevice`] if the layout names a target that this node does not have.
    pub fn create_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        let here = self.first().target() >> 16;
        for (component, stripe) in layout.stripes() {
            let target = layout.components()[component].target(stripe);
            if target >> 16 == here {
                self.get(target)?.create(ino, layout.file_number(component), stripe)?;
            }
        }
        Ok(())
    }

    /// Unlinks the file's backing files on this node. Tries all, and returns the first error.
    pub fn remove_all(&self, ino: Ino, layout: &Layout) -> Result<(), Code> {
        self.all.iter().map(|t| t.remove_all(ino, layout)).fold(Ok(()), Result::and)
    }

    /// The space for file data on all targets.
    pub fn space(&self) -> Result<Space, Code> {
        let mut sum = Space::default();
        for target in self.for_files() {
            let space = target.space()?;
            sum.total_bytes = sum.total_bytes.saturating_add(space.total_bytes);
            sum.free_bytes = sum.free_bytes.saturating_add(space.free_bytes);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use forebay_types::{target_of, NodeId};

    #[test]
    fn files_lie_where_their_layout_says_and_a_target_that_is_not_there_is_told() {
        let (scratch, node) = (Scratch::new(), NodeId(2));
        let open = |index: u16| {
            let path = scratch.path().join(index.to_string());
            std::fs::create_dir(&path).unwrap();
            let directory = std::fs::File::open(path).unwrap();
            Target::format(&directory).unwrap();
            Target::open(&directory, target_of(node, index)).unwrap()
        };
        let targets = NodeTargets::new(vec![open(0), open(1)]);
        let (ino, elsewhere) = (Ino::new(node, 9), target_of(NodeId(3), 7));
        let layout = Layout::on(&[target_of(node, 1), elsewhere, target_of(node, 0)], 3, 4096).unwrap();
        targets.create_all(ino, &layout).unwrap();
        let there =
            |index: u16, stripe| targets.get(target_of(node, index)).unwrap().stat(ino, 1, stripe).is_ok();
        assert!(there(1, 0) && there(0, 2));
        assert!(!there(0, 0) && !there(1, 1) && !there(0, 1) && !there(1, 2), "each on its own alone");
        targets.remove_all(ino, &layout).unwrap();
        assert!(!there(1, 0) && !there(0, 2));
        let missing = Layout::single(node, 2);
        assert_eq!(targets.create_all(ino, &missing), Err(Code::NoDevice));
        assert!(targets.space().unwrap().total_bytes > targets.first().space().unwrap().total_bytes);
    }

    #[test]
    fn node_of_a_shard_alone_has_no_place_for_files() {
        let (scratch, node) = (Scratch::new(), NodeId(2));
        let directory = std::fs::File::open(scratch.path()).unwrap();
        Target::format(&directory).unwrap();
        let targets = NodeTargets::of_shard_alone(Target::open(&directory, target_of(node, 0)).unwrap());
        assert_eq!(targets.space().unwrap(), Space::default());
        assert!(targets.first().space().unwrap().total_bytes > 0 && targets.for_files().is_empty());
        let (ino, here) = (Ino::new(node, 9), Layout::single(node, 0));
        assert_eq!(targets.create_all(ino, &here), Err(Code::NoDevice));
        assert_eq!(targets.iter().count(), 1, "what is swept and checked");
    }
}
