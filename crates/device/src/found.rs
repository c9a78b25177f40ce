//! The devices of volumes that the kernel has.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;

use forebay_block::Process;
use forebay_sys::loop_device::{Info, LoopDevice, NAME_BYTES_MAX};
use forebay_types::{name_hash, Ino};

use crate::options::Options;

/// What the names of devices on the memory of a piece begin with; the volume's name follows. `losetup` does not make such
/// names.
pub const MEMORY_MARK: &[u8] = b"forebay:";
/// What the names of served devices begin with.
const SERVED_MARK: &str = "forebay-device:";

/// How a device gets its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// From the memory of a piece.
    Memory,
    /// From a process.
    Served {
        /// The life of the pool.
        pool: u64,
        /// The keeper.
        keeper: Process,
        /// Which volumes may be joined in it; none in the device of one volume.
        joined: Joined,
    },
}

/// A set of volumes that may have others than were put in: the name of a device has room for a bit of each. The kernel has
/// it when the keeper, which knows the volumes, was killed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Joined(u32);

/// Bits of [`Joined`].
const JOINED_BITS: u64 = 24;

impl Joined {
    /// The set of joined volumes; the empty one for a single volume.
    pub(crate) fn of(volumes: &[u64]) -> Joined {
        match volumes {
            [] | [_] => Joined(0),
            several => Joined(several.iter().fold(0, |bits, number| bits | Joined::bit(*number))),
        }
    }

    fn bit(volume: u64) -> u32 {
        1 << (name_hash(&volume.to_le_bytes()) % JOINED_BITS)
    }

    fn may_have(self, volume: u64) -> bool {
        self.0 & Joined::bit(volume) != 0
    }
}

impl Kind {
    /// The name of the loop device of a served one.
    pub(crate) fn served_name(pool: u64, keeper: Process, joined: Joined) -> String {
        let name = format!("{SERVED_MARK}{pool:x}:{}:{:x}", keeper.pid, keeper.started);
        if joined == Joined::default() {
            name
        } else {
            format!("{name}:{:x}", joined.0)
        }
    }

    /// The kind of a device with this name. None if it is not a device of a volume.
    fn of(name: &[u8]) -> Option<Kind> {
        if name.starts_with(MEMORY_MARK) {
            return Some(Kind::Memory);
        }
        let mut fields = std::str::from_utf8(name).ok()?.strip_prefix(SERVED_MARK)?.split(':');
        let mut hex = || u64::from_str_radix(fields.next()?, 16).ok();
        let pool = hex()?;
        let pid = fields.next()?.parse().ok()?;
        let started = u64::from_str_radix(fields.next()?, 16).ok()?;
        let joined = fields.next().map_or(Ok(0), |bits| u32::from_str_radix(bits, 16)).ok()?;
        Some(Kind::Served { pool, keeper: Process { pid, started }, joined: Joined(joined) })
    }
}

// The longest name: two numbers of 64 bits, a process number, and the bits of joined volumes.
const _: () =
    assert!(SERVED_MARK.len() + 16 + 1 + 7 + 1 + 16 + 1 + JOINED_BITS as usize / 4 <= NAME_BYTES_MAX);

/// A device of a volume.
#[derive(Debug)]
pub struct Found {
    /// Its path in /dev.
    pub path: PathBuf,
    /// What the kernel says about it.
    pub info: Info,
    /// How it gets its bytes.
    pub kind: Kind,
}

impl Found {
    /// What a device is. None if it is not a device of a volume.
    pub fn of(device: &LoopDevice) -> Option<Found> {
        let info = device.info().ok()?;
        let kind = Kind::of(&info.name)?;
        Some(Found { path: device.path.clone(), info, kind })
    }

    /// True if it is the device on this memory.
    pub fn is_on(&self, memory: BorrowedFd<'_>) -> io::Result<bool> {
        // SAFETY: an all-zero stat is valid and writable for the call.
        let stat = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(memory.as_raw_fd(), &mut stat) != 0 {
                return Err(io::Error::last_os_error());
            }
            stat
        };
        Ok(self.kind == Kind::Memory && (self.info.device, self.info.inode) == (stat.st_dev, stat.st_ino))
    }

    /// The names of the volumes that are joined in a served device of this life of a pool; none for a device of one volume,
    /// or of another life or pool.
    pub fn joined(&self, pool: u64) -> Vec<Vec<u8>> {
        let Kind::Served { pool: its, keeper, .. } = self.kind else { return Vec::new() };
        if its != pool {
            return Vec::new();
        }
        let arguments = std::fs::read(format!("/proc/{}/cmdline", keeper.pid)).unwrap_or_default();
        // Another process may have the number since.
        if !keeper.lives() {
            return Vec::new();
        }
        let mut options =
            arguments.split(|byte| *byte == 0).filter_map(|one| serde_json::from_slice(one).ok());
        let names = options.next().map_or_else(Vec::new, |options: Options| options.names());
        if names.len() > 1 {
            names
        } else {
            Vec::new()
        }
    }

    /// True if volumes of this life of a pool are joined in it, perhaps the one with this number, and its keeper was killed:
    /// a program has it open still, or it is mounted.
    pub fn may_have_joined(&self, pool: u64, volume: u64) -> bool {
        match self.kind {
            Kind::Served { pool: its, keeper, joined } => {
                its == pool && joined.may_have(volume) && !keeper.lives()
            }
            Kind::Memory => false,
        }
    }

    /// False for a served device whose keeper was killed.
    pub fn is_kept(&self) -> bool {
        match self.kind {
            Kind::Served { keeper, .. } => keeper.lives(),
            Kind::Memory => true,
        }
    }

    /// True if it is the device of the volume with this number, of this life of a pool, which a process serves.
    pub fn serves(&self, pool: u64, volume: u64) -> bool {
        matches!(self.kind, Kind::Served { pool: its, .. } if its == pool) && self.info.inode == volume
    }
}

/// The inode number of a device's file. With one volume, it is the volume's number.
pub fn joined_number(volumes: impl Iterator<Item = Ino>) -> u64 {
    let numbers: Vec<u64> = volumes.map(|ino| ino.0).collect();
    match numbers.as_slice() {
        [] => 0,
        [only] => *only,
        several => name_hash(&several.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>()),
    }
}

/// All devices of volumes that this process may open.
pub fn all() -> io::Result<Vec<Found>> {
    Ok(LoopDevice::all()?.iter().filter_map(Found::of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_served_device_says_pool_and_keeper() {
        let all: Vec<u64> = (0..1000).collect();
        for (pool, pid, started) in [(1, 2, 3), (u64::MAX, 4_194_304, u64::MAX)] {
            for joined in [Joined::of(&[7]), Joined::of(&[7, 8]), Joined::of(&all)] {
                let keeper = Process { pid, started };
                let name = Kind::served_name(pool, keeper, joined);
                assert!(name.len() <= NAME_BYTES_MAX, "{name}");
                assert_eq!(Kind::of(name.as_bytes()), Some(Kind::Served { pool, keeper, joined }));
            }
        }
    }

    #[test]
    fn device_of_a_killed_keeper_says_which_volumes_may_be_in_it() {
        let found = |pid, volumes: &[u64]| {
            let (keeper, joined) = (Process { pid, started: u64::MAX }, Joined::of(volumes));
            let info = Info { device: 0, inode: 0, name: Vec::new() };
            Found { path: PathBuf::new(), info, kind: Kind::Served { pool: 5, keeper, joined } }
        };
        let (single, several) = (found(1, &[7]), found(1, &[7, 8]));
        assert!(!several.is_kept(), "another process has the number");
        assert!((0..100).all(|volume| !single.may_have_joined(5, volume)));
        assert!([7, 8].iter().all(|volume| several.may_have_joined(5, *volume)));
        assert!(!several.may_have_joined(6, 7), "another pool");
        assert!((0..100).filter(|volume| several.may_have_joined(5, *volume)).count() < 20);
        let own = Process::of(std::process::id()).unwrap();
        let kind = Kind::Served { pool: 5, keeper: own, joined: Joined::of(&[7, 8]) };
        assert!(!Found { kind, ..several }.may_have_joined(5, 7), "its keeper says it");
    }

    #[test]
    fn joined_volumes_have_a_number_of_their_own_and_of_their_order() {
        let number = |all: &[u64]| joined_number(all.iter().map(|one| Ino(*one)));
        assert_eq!((number(&[7]), number(&[])), (7, 0));
        assert_ne!(number(&[7, 8]), number(&[8, 7]));
        assert!(![7, 8].contains(&number(&[7, 8])));
    }

    #[test]
    fn devices_of_others_are_no_volumes() {
        for name in ["", "/tmp/image", "forebay-emulate:x", "forebay-device:", "forebay-device:1:x:2"] {
            assert_eq!(Kind::of(name.as_bytes()), None, "{name}");
        }
        assert_eq!(Kind::of(b"forebay:v"), Some(Kind::Memory));
    }
}
