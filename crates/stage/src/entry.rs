//! A name that is staged, in its source directory and at the destination.

use crate::branch::Branch;
use crate::tree::Tree;

/// A name to stage.
pub(crate) struct Entry<S: Tree, D: Tree> {
    pub(crate) at: Branch<S, D>,
    pub(crate) name: Box<[u8]>,
    /// The name at the destination if it differs.
    pub(crate) renamed: Option<Box<[u8]>>,
    /// Follow the name if it is a link: true only for names that the user gave.
    pub(crate) follow: bool,
}

impl<S: Tree, D: Tree> Clone for Entry<S, D> {
    fn clone(&self) -> Self {
        Entry {
            at: self.at.clone(),
            name: self.name.clone(),
            renamed: self.renamed.clone(),
            follow: self.follow,
        }
    }
}

impl<S: Tree, D: Tree> Entry<S, D> {
    /// The name at the destination.
    pub(crate) fn to(&self) -> &[u8] {
        self.renamed.as_deref().unwrap_or(&self.name)
    }

    pub(crate) fn source_path(&self) -> Vec<u8> {
        self.at.source_path(&self.name)
    }

    pub(crate) fn destination_path(&self) -> Vec<u8> {
        self.at.destination_path(self.to())
    }
}
