//! Which volumes have block devices. The kernel knows them (`forebay-device`).

use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_client::Pool;
use forebay_device::{joined_number, Found, Kind};
use forebay_sys::process::Stat;
use forebay_types::name_hash;
use forebay_types::{Error, Result, Volume};

/// The devices of this node's volumes, of all pools.
#[derive(Debug)]
pub(super) struct Devices {
    all: Vec<Found>,
    /// The life of the pool, if it is needed.
    life: Option<u64>,
}

/// What distinguishes this life of the pool in `dir` from its others, and from other pools.
pub(super) fn life(dir: &Path) -> Result<u64> {
    let supervisor = forebay_server::control::status(dir)?.pids.supervisor;
    let what = || format!("cannot look at the pool in {}", dir.display());
    let of = || Ok((std::fs::canonicalize(dir)?, Stat::of(supervisor)?.start_ticks));
    let (place, started) = of().map_err(|e: io::Error| Error::io(what(), &e))?;
    let numbers = [u64::from(supervisor).to_ne_bytes(), started.to_ne_bytes()].concat();
    Ok(name_hash(&[place.as_os_str().as_bytes(), &numbers].concat()))
}

impl Devices {
    /// Looks at the kernel's devices. Without the right to open them none are found.
    pub(super) fn look(dir: &Path) -> Result<Devices> {
        let all = forebay_device::all().unwrap_or_default();
        let is_served = |one: &Found| one.kind != Kind::Memory;
        let life = all.iter().any(is_served).then(|| life(dir)).transpose()?;
        Ok(Devices { all, life })
    }

    /// The device of a volume.
    pub(super) fn of(&self, pool: &Pool, volume: &Volume) -> Option<&Found> {
        let serves = |one: &&Found| self.life.is_some_and(|life| one.serves(life, volume.ino.0));
        if let Some(served) = self.all.iter().find(serves) {
            return Some(served);
        }
        if !self.all.iter().any(|one| one.kind == Kind::Memory) {
            return None;
        }
        // A volume that grew has the device that it had before, on its first piece.
        let pieces = pool.volume_pieces_here(volume).unwrap_or_default();
        let is_its =
            |one: &&Found| pieces.iter().any(|piece| one.is_on(piece.as_fd()).is_ok_and(|is_it| is_it));
        self.all.iter().find(is_its)
    }

    /// The device of joined volumes, in this order.
    pub(super) fn of_joined(&self, volumes: &[Volume]) -> Option<&Found> {
        let number = joined_number(volumes.iter().map(|volume| volume.ino));
        let is_it = |one: &&Found| self.life.is_some_and(|life| one.serves(life, number));
        let kept = self.all.iter().filter(is_it).find(|one| one.is_kept());
        kept.or_else(|| self.all.iter().find(is_it))
    }

    /// A device of joined volumes of which a volume may be one: its keeper, which knows them, was killed.
    pub(super) fn without_keeper(&self, volume: &Volume) -> Option<&Found> {
        self.all.iter().find(|one| self.life.is_some_and(|life| one.may_have_joined(life, volume.ino.0)))
    }

    /// The device of joined volumes of which a volume is one.
    pub(super) fn with(&self, pool: &Pool, volume: &Volume) -> Option<&Found> {
        let is_it = |name: &Vec<u8>| pool.volume(name).is_ok_and(|one| one.ino == volume.ino);
        self.all.iter().find(|one| self.life.is_some_and(|life| one.joined(life).iter().any(is_it)))
    }

    /// The path of the device that has a volume's bytes, alone or with those of others.
    pub(super) fn path_with(&self, pool: &Pool, volume: &Volume) -> Option<PathBuf> {
        self.of(pool, volume).or_else(|| self.with(pool, volume)).map(|found| found.path.clone())
    }
}
