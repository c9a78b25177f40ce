//! Selects the layout of new files. The data of a file lie on the node of the process that creates it, unless the
//! directory's layout or the caller says otherwise. Targets that are not named are selected by the daemon
//! (`Request::Place`), because it knows which targets have free space. It selects them anew for each file, also on a
//! node without targets.
//!
//! A process that creates a file in a directory of another node does not know the directory's layout, and sends no
//! request for it. Its `Create` carries the layout that it would use ([`Layout::unless_set`]). If the directory has a
//! layout, the directory's node creates nothing and replies with the directory. So directories without a layout cost no
//! extra request.

use forebay_types::limits::{STRIPES_MAX, TARGETS_MAX};
use forebay_types::{
    node_of, target_of, BackingId, Code, Component, Entry, Ino, Layout, Reply, Request, Targets,
};

use crate::file::Striping;
use crate::pool::Pool;

/// The targets of a component's stripes in round-robin order, or the single target of all stripes. `None` if the daemon
/// selects targets for each file.
pub fn targets_of(c: &Component) -> Option<Targets> {
    let mut all = [0; TARGETS_MAX];
    let used = usize::from(c.stripe_count.min(u16::from(c.target_count)));
    let targets = all.get_mut(..used)?;
    (0..).zip(targets.iter_mut()).for_each(|(stripe, target)| *target = c.target(stripe));
    match targets {
        [first, rest @ ..] if rest.iter().all(|target| target == first) => {
            Targets::new(&[*first]).filter(|_| *first != 0)
        }
        targets => Targets::new(targets),
    }
}

/// The largest prime up to `count` + 1, if `count` is more than 2. Processes that write a file at the same time are
/// mostly a power of two of stripes apart. With a power of two of backing files they would meet on the same one again
/// and again (docs/decisions/0021).
fn prime_near(count: u16) -> u16 {
    let is_prime = |n: &u16| (2..*n).take_while(|i| i * i <= *n).all(|i| !n.is_multiple_of(i));
    (2..=(count + 1).min(STRIPES_MAX)).rev().find(is_prime).filter(|_| count > 2).unwrap_or(count)
}

impl Pool {
    /// The layout in a request to create a file if the caller has no preference. `None` in a pool with one target,
    /// where a file has several backing files only if the caller requests them.
    pub(crate) fn layout_unless_set(&self) -> Result<Option<Layout>, Code> {
        let attached = self.attached()?;
        Ok(match attached.reply.nodes > 1 || attached.target_count() > 1 {
            true => Some(Layout::unless_set(self.target_for_new()?)),
            false => None,
        })
    }

    /// The target for a new file if the caller names none: one of this node while it has room, else one that the daemon
    /// selects for its free space.
    fn target_for_new(&self) -> Result<u32, Code> {
        let attached = self.attached()?;
        if attached.reply.nodes > 1 && attached.takes_files() && attached.is_full() {
            // If the daemon knows nothing of other nodes, this node's target is tried.
            if let Ok(target) = self.chosen_target() {
                return Ok(target);
            }
        }
        self.own_target()
    }

    /// One target that the daemon selects.
    fn chosen_target(&self) -> Result<u32, Code> {
        self.place(1)?.as_slice().first().copied().ok_or(Code::NoDevice)
    }

    /// True if a request to create a file prefers another node.
    pub(crate) fn wishes_elsewhere(&self, layout: Option<&Layout>) -> bool {
        let wish = layout.and_then(Layout::wish);
        wish.is_some_and(|target| {
            self.attached().is_ok_and(|attached| node_of(target) != attached.reply.node)
        })
    }

    /// A layout with one backing file on this node, regardless of the directory's layout. It is on another node if this
    /// one has no target.
    pub(crate) fn layout_here(&self) -> Result<Layout, Code> {
        let own = self.own_target()?;
        Ok(Layout::single(node_of(own), own as u16))
    }

    /// The target on which this node's programs create their files: the first of this node with room. It is on another
    /// node if this one has none.
    pub(crate) fn own_target(&self) -> Result<u32, Code> {
        let attached = self.attached()?;
        if !attached.takes_files() {
            return self.chosen_target();
        }
        Ok(target_of(attached.reply.node, attached.roomy_target()))
    }

    /// The layout of a new file in a directory with a layout, if the caller needs a descriptor. A descriptor refers to
    /// one backing file, so in a pool of one node only callers that request several backing files get them.
    pub(crate) fn layout_to_open(&self, directory: &Entry) -> Result<Layout, Code> {
        if !self.spans_nodes() && Striping::of(&directory.layout).stripe_count > 1 {
            return self.layout_here();
        }
        self.layout_as_set(directory)
    }

    /// The layout of a new file in a directory with a layout.
    pub(crate) fn layout_as_set(&self, directory: &Entry) -> Result<Layout, Code> {
        let layout = &directory.layout;
        if layout.is_placed() {
            let first = &layout.components()[0];
            return Ok(match layout.is_single() {
                true => Layout::single(node_of(first.target(0)), first.target(0) as u16),
                false => *layout,
            });
        }
        self.layout_of(Striping::of(layout))
    }

    /// A layout on targets that the daemon selects. The number of stripes is exact, unless it is a proposal
    /// (`directory_takes_precedence`): on a medium that seeks a target has one stripe, as each way between two of its
    /// backing files would be a seek; and [`prime_near`] replaces the number if all stripes are on one target.
    pub(crate) fn layout_of(&self, mut striping: Striping) -> Result<Layout, Code> {
        let targets = self.place(striping.stripe_count)?;
        let count = targets.as_slice().len();
        if striping.directory_takes_precedence && self.attached()?.seeks() {
            striping.stripe_count = striping.stripe_count.min(count as u16);
        } else if striping.directory_takes_precedence && count == 1 {
            striping.stripe_count = prime_near(striping.stripe_count);
        }
        self.layout_on(striping, targets.as_slice())
    }

    /// The same on given targets.
    pub(crate) fn layout_on(&self, striping: Striping, targets: &[u32]) -> Result<Layout, Code> {
        let first = *targets.first().ok_or(Code::Invalid)?;
        if striping.stripe_count == 1 {
            return Ok(Layout::single(node_of(first), first as u16));
        }
        Layout::on(targets, striping.stripe_count, striping.stripe_bytes).map_err(|_| Code::Invalid)
    }

    fn place(&self, stripe_count: u16) -> Result<Targets, Code> {
        self.ask_then(&Request::Place { stripe_count }, |reply| match reply {
            Reply::Placed(targets) => Ok(targets),
            _ => Err(Code::Malformed),
        })
    }

    /// Sets the layout of new files in a directory. Without targets, the daemon selects them for each file. One stripe
    /// and no targets removes the directory's layout.
    ///
    /// # Errors
    /// [`Code::NotDirectory`]; [`Code::Invalid`] for stripes that no layout can have; [`Code::NoDevice`] for a target
    /// that does not exist.
    pub fn set_layout_of_new(
        &self,
        directory: &Entry,
        (stripe_count, stripe_bytes): (u16, u32),
        targets: &[u32],
    ) -> Result<(), Code> {
        let attr = &directory.attr;
        if !attr.is_directory() {
            return Err(Code::NotDirectory);
        }
        let layout = match (targets, stripe_count) {
            ([], 1) => Ok(Layout::single(attr.home, 0)),
            ([], _) => Layout::on_any(stripe_count, stripe_bytes),
            _ => Layout::on(targets, stripe_count, stripe_bytes),
        };
        let layout = layout.map_err(|_| Code::Invalid)?;
        targets.iter().try_for_each(|target| self.check_target(attr.ino, *target))?;
        self.ask_then(&Request::SetLayout { ino: attr.ino, layout }, |reply| match reply {
            Reply::Relaid { .. } => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    /// Checks that a target exists, given that its node has targets. A node knows only its own targets, so the target's
    /// node is queried. A target whose node cannot be queried now counts as existing.
    fn check_target(&self, any: Ino, target: u32) -> Result<(), Code> {
        let (attached, index) = (self.attached()?, target as u16);
        let is_there = match node_of(target) == attached.reply.node {
            true => usize::from(index) < attached.target_count(),
            false if index == 0 => true,
            false => {
                let id = BackingId { target, ino: any, number: 0, stripe: 0 };
                !matches!(self.stat_backing(id), Err(Code::NoDevice))
            }
        };
        is_there.then_some(()).ok_or(Code::NoDevice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prime_near_of_few_is_itself_and_of_more_no_power_of_two() {
        let near = [1, 2, 3, 4, 6, 8, 9, 16, STRIPES_MAX].map(prime_near);
        assert_eq!(near, [1, 2, 3, 5, 7, 7, 7, 17, 251]);
    }
}
