//! Which directory and which store an inode belongs to.

use std::collections::HashMap;

use forebay_client::Pool;
use forebay_tasks::{Policy, StoreSettings};
use forebay_types::limits::XATTR_VALUE_MAX;
use forebay_types::{
    Code, Ino, Kind, PendingPlace, Reply, Request, StorePlace, Wanted, FLAG_ATTACHED, FLAG_STORE,
};

use super::path_of;

/// The extended attribute with a store's settings.
pub(super) const SETTINGS: &[u8] = b"trusted.forebay.store";
/// Bound on a walk to the root.
const DEPTH_MAX: usize = 1 << 16;

/// The settings of the store that is attached at a directory; none if they cannot be read.
pub(crate) fn settings_of(pool: &Pool, root: Ino) -> Option<StoreSettings> {
    let mut value = vec![0; XATTR_VALUE_MAX];
    let n = pool.get_xattr_inode(root, SETTINGS, &mut value).ok()?;
    serde_json::from_slice(&value[..n]).ok()
}

/// Where the store has an inode; [`Code::NotFound`] if it does not have it.
pub(crate) fn place_of(pool: &Pool, ino: Ino) -> Result<StorePlace, Code> {
    pool.request(&Request::StorePlace { ino }, |reply| match reply {
        Reply::Bytes(bytes) => StorePlace::decode(bytes),
        _ => Err(Code::Malformed),
    })
}

/// The directory with the store to whose tree a directory belongs. A directory that is gone from the pool is followed in
/// the store.
pub(crate) fn store_of(pool: &Pool, mut directory: Ino) -> Option<Ino> {
    for _ in 0..DEPTH_MAX {
        match pool.get_attr(directory) {
            Ok(entry) if entry.attr.flags & FLAG_STORE != 0 => return Some(directory),
            Ok(entry) if entry.attr.flags & FLAG_ATTACHED != 0 && entry.attr.parent != directory => {
                directory = entry.attr.parent;
            }
            Err(Code::NotFound) => {
                return place_of(pool, directory).ok().filter(|place| place.is_root).map(|place| place.top)
            }
            _ => return None,
        }
    }
    None
}

/// Answers about directories, each found once.
pub(crate) struct Trees {
    pool: &'static Pool,
    stores: HashMap<Ino, Option<Ino>>,
    settings: HashMap<Ino, Option<StoreSettings>>,
    below: HashMap<(Ino, Ino), bool>,
}

impl Trees {
    /// Nothing is known yet.
    pub(crate) fn new(pool: &'static Pool) -> Trees {
        Trees { pool, stores: HashMap::new(), settings: HashMap::new(), below: HashMap::new() }
    }

    /// See [`store_of`].
    pub(crate) fn store_of(&mut self, directory: Ino) -> Option<Ino> {
        *self.stores.entry(directory).or_insert_with(|| store_of(self.pool, directory))
    }

    /// The settings of the store to whose tree a directory belongs.
    pub(crate) fn settings(&mut self, directory: Ino) -> Option<StoreSettings> {
        let root = self.store_of(directory)?;
        self.settings.entry(root).or_insert_with(|| settings_of(self.pool, root)).clone()
    }

    /// The policy of what is, or was, at a name.
    pub(crate) fn policy(&mut self, place: &PendingPlace) -> Option<Policy> {
        let root = self.store_of(place.parent)?;
        let settings = self.settings(root)?;
        let is_directory = match (&place.wanted, &place.placed) {
            (Some(Wanted::Here(entry, _)), _) => entry.attr.is_directory(),
            (Some(Wanted::Elsewhere(_, kind)), _) => *kind == Kind::Directory,
            (None, placed) => placed.is_some_and(|placed| placed.kind == Kind::Directory),
        };
        if is_directory || settings.rules.is_empty() {
            return Some(if is_directory { settings.policy_of_directories() } else { settings.drain });
        }
        let above = path_of(self.pool, place.parent);
        let top = path_of(self.pool, root);
        let below = above.strip_prefix(top.trim_end_matches('/')).unwrap_or_default().trim_matches('/');
        let mut path = below.as_bytes().to_vec();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&place.name);
        Some(settings.policy_of(&path))
    }

    /// True if a directory is `top` or below it. A directory that is gone counts if its store is at `top` or below it.
    pub(crate) fn is_below(&mut self, directory: Ino, top: Ino) -> bool {
        if let Some(known) = self.below.get(&(directory, top)) {
            return *known;
        }
        let is_below = self.walk_up(directory, top);
        self.below.insert((directory, top), is_below);
        is_below
    }

    fn walk_up(&mut self, mut directory: Ino, top: Ino) -> bool {
        for _ in 0..DEPTH_MAX {
            if directory == top {
                return true;
            }
            directory = match self.pool.get_attr(directory) {
                Ok(entry) if entry.attr.is_directory() && directory != Ino::ROOT => entry.attr.parent,
                Err(Code::NotFound) => match self.store_of(directory) {
                    Some(root) if root != directory => root,
                    _ => return false,
                },
                _ => return false,
            };
        }
        false
    }
}
