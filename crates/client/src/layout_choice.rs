//! Where the data of new files goes: to the node of who makes them, unless the directory's layout or the maker says
//! otherwise. Targets that nobody named the daemon chooses, who knows which have room (`Request::Place`): for each file
//! anew, also where this node has no target.
//!
//! A maker whose directory is on another node does not know that directory's layout, and does not ask for it: it says
//! where it would put the file, and the directory's node makes nothing but answers with the directory where that has a
//! layout ([`Layout::unless_set`]). So a directory without one costs nobody a request.

use forebay_types::limits::{STRIPES_MAX, TARGETS_MAX};
use forebay_types::{
    node_of, target_of, BackingId, Code, Component, Entry, Ino, Layout, Reply, Request, Targets,
};

use crate::file::Striping;
use crate::pool::Pool;

/// The targets that a component's stripes go round, in their order, or the one on which all are; none where they are
/// chosen for each file.
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

/// The largest prime that is at most one more than `count`, if that is more than 2. What processes write to a file at
/// the same time mostly is a power of two of stripes apart, and with such a number of backing files they would meet on
/// one again and again (docs/decisions/0021).
fn prime_near(count: u16) -> u16 {
    let is_prime = |n: &u16| (2..*n).take_while(|i| i * i <= *n).all(|i| !n.is_multiple_of(i));
    (2..=(count + 1).min(STRIPES_MAX)).rev().find(is_prime).filter(|_| count > 2).unwrap_or(count)
}

impl Pool {
    /// What a request to make a file says of its layout when the maker has no wish; none in a pool with one target,
    /// where only who asks for several backing files gets them.
    pub(crate) fn layout_unless_set(&self) -> Result<Option<Layout>, Code> {
        let attached = self.attached()?;
        Ok(match attached.reply.nodes > 1 || attached.target_count() > 1 {
            true => Some(Layout::unless_set(self.target_for_new()?)),
            false => None,
        })
    }

    /// The target for a new file that nobody named one for: this node's, as long as one has room, else one that the
    /// daemon knows to have some.
    fn target_for_new(&self) -> Result<u32, Code> {
        let attached = self.attached()?;
        if attached.reply.nodes > 1 && attached.takes_files() && attached.is_full() {
            // Where nothing is known of the others this node's own is tried.
            if let Ok(target) = self.chosen_target() {
                return Ok(target);
            }
        }
        self.own_target()
    }

    /// One target, as the daemon chooses it.
    fn chosen_target(&self) -> Result<u32, Code> {
        self.place(1)?.as_slice().first().copied().ok_or(Code::NoDevice)
    }

    /// True when a request that makes a file wishes it on another node.
    pub(crate) fn wishes_elsewhere(&self, layout: Option<&Layout>) -> bool {
        let wish = layout.and_then(Layout::wish);
        wish.is_some_and(|target| {
            self.attached().is_ok_and(|attached| node_of(target) != attached.reply.node)
        })
    }

    /// One backing file of this node, whatever the directory says; of another where this one has no target.
    pub(crate) fn layout_here(&self) -> Result<Layout, Code> {
        let own = self.own_target()?;
        Ok(Layout::single(node_of(own), own as u16))
    }

    /// The target on which this node's programs make their files: the first of this node's that has room. One of
    /// another node where this one has none.
    pub(crate) fn own_target(&self) -> Result<u32, Code> {
        let attached = self.attached()?;
        if !attached.takes_files() {
            return self.chosen_target();
        }
        Ok(target_of(attached.reply.node, attached.roomy_target()))
    }

    /// The layout of a file that is made in a directory with a layout of its own, for who wants a descriptor of it. On
    /// one node several backing files are for those who ask for them: a descriptor is of one.
    pub(crate) fn layout_to_open(&self, directory: &Entry) -> Result<Layout, Code> {
        if !self.spans_nodes() && Striping::of(&directory.layout).stripe_count > 1 {
            return self.layout_here();
        }
        self.layout_as_set(directory)
    }

    /// The layout of a file that is made in a directory with a layout of its own.
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

    /// A layout of so many stripes, on targets that the daemon chooses; of about so many where the number is only
    /// proposed and they are all on one target.
    pub(crate) fn layout_of(&self, mut striping: Striping) -> Result<Layout, Code> {
        let targets = self.place(striping.stripe_count)?;
        if striping.yields && targets.as_slice().len() == 1 {
            striping.stripe_count = prime_near(striping.stripe_count);
        }
        self.layout_on(striping, targets.as_slice())
    }

    /// The same on targets that are given.
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

    /// Sets how files that are made in a directory are to lie; without targets they are chosen for each. One stripe and
    /// no targets: as where nothing is set.
    ///
    /// # Errors
    /// [`Code::NotDirectory`]; [`Code::Invalid`] for stripes that no layout has; [`Code::NoDevice`] for a target that is not there.
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

    /// Whether there is a target of a node that has some, which the directory's node may not know: a node knows its
    /// own. What cannot be asked now is taken to be there.
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
