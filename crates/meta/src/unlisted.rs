//! Names of unlisted directories: a directory whose names were not all imported yet is asked for one name at a time.
//!
//! The shard *knows* a name of an unlisted directory if it has an entry, a place or a pending place of that name: its
//! view of the name holds then, as in a listed directory. It knows too that the store lacks a name of which the mover
//! has reported so. A request for any other name is refused with [`Code::NotListed`] until the mover has asked the store
//! for it.
//!
//! What the store lacks is remembered in memory (`absences.rs`). So that an absence is never believed after the name came
//! by the pool's own doing, a name is remembered only while the shard does not know it otherwise, and forgotten when a
//! place is recorded under it and when its directory is listed or is to be listed again. A journal that is applied again
//! passes this check: requests in it have passed it. Tests: `tests/backing_store`.

use forebay_types::{Code, Ino, FLAG_UNLISTED};

use crate::batch::{Answer, Batch};

impl Batch<'_> {
    /// Refuses a name of an unlisted directory of which only the store can say whether it exists.
    #[cold]
    pub(crate) fn check_known(&mut self, slot: usize, name: &[u8]) -> Answer<()> {
        let directory = self.state.directories.get(slot).attr.ino;
        let is_known = self.applies_again()
            || self.state.absences.has(directory, name)
            || self.is_of_pool(slot, name)?;
        match is_known {
            true => Ok(()),
            false => {
                self.met_unlisted = Some((directory, Some(name.to_vec())));
                Err(Code::NotListed)
            }
        }
    }

    /// True for a name of which the pool's view holds.
    fn is_of_pool(&self, slot: usize, name: &[u8]) -> Answer<bool> {
        let directory = self.state.directories.get(slot).attr.ino;
        Ok(self.find_entry(slot, name)?.is_some()
            || self.placed(directory, name)?.is_some()
            || self.is_pending(directory, name)?)
    }

    /// The store of an unlisted directory lacks a name.
    pub fn note_absent(&mut self, directory: Ino, name: &[u8]) -> std::result::Result<(), Code> {
        let slot = self.directory(directory)?;
        let is_unlisted = self.state.directories.get(slot).attr.flags & FLAG_UNLISTED != 0;
        if is_unlisted && !self.is_of_pool(slot, name)? {
            self.state.absences.add(directory, name);
        }
        Ok(())
    }
}
