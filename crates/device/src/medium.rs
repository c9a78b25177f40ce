//! The bytes of a volume, for the server of its device.

use forebay_block::{Medium, Served};
use forebay_client::Pool;
use forebay_types::Code;
use forebay_volume::Striped;

/// Requests that are served at the same time if pieces are on other nodes: each mostly waits.
const FAR_THREADS: usize = 16;
/// The same if all pieces are here, at most: each mostly copies.
const NEAR_THREADS_MAX: usize = 8;
/// One more for a flush.
const SPARE_THREADS: usize = 1;
/// A transfer of so many bytes needs a buffer that is shared with the daemon.
const WARMING_BYTES: usize = 64 << 10;
/// Where a piece of another node is looked for.
const WARMING_STEP: u64 = 4096;
const WARMING_STEPS: u64 = 16 << 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct VolumeMedium {
    volume: Striped,
    pool: &'static Pool,
    /// The session with the daemon in which pieces on other nodes were opened. In a later one, which may be with another
    /// pool of the same directory, their numbers may be those of other pieces.
    session: Option<u64>,
}

impl VolumeMedium {
    pub(crate) fn new(pool: &'static Pool, volume: Striped) -> VolumeMedium {
        let session = pool.session();
        VolumeMedium { volume, pool, session }
    }

    /// The number of the volume.
    pub(crate) fn number(&self) -> u64 {
        self.volume.numbers().next().map_or(0, |ino| ino.0)
    }

    /// Has the pieces on this node stay in memory, with the tables that map them. Returns the first error.
    pub(crate) fn lock(&self) -> std::io::Result<()> {
        let mut at = 0;
        while at < self.volume.bytes() {
            let Ok((place, run)) = self.volume.map(at) else {
                at += WARMING_STEP;
                continue;
            };
            // SAFETY: `run` bytes are mapped there.
            if unsafe { libc::mlock(place.cast(), run as usize) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            at += run;
        }
        Ok(())
    }

    /// Transfers some bytes of another node, if there are any: what the first transfer needs is there then.
    pub(crate) fn warm(&self) -> Result<(), Code> {
        let mut memory = vec![0; WARMING_BYTES];
        let is_far = |at: &u64| self.volume.map(*at) == Err(Code::NotSupported);
        let places = (0..WARMING_STEPS).map(|step| step * WARMING_STEP);
        let Some(at) = places.take_while(|at| *at < self.volume.bytes()).find(is_far) else { return Ok(()) };
        let n = (self.volume.bytes() - at).min(WARMING_BYTES as u64) as usize;
        self.volume.get_bytes(at, &mut memory[..n])
    }

    /// Fails unless the pool is the one in which the volume was opened.
    fn check(&self) -> Served {
        match self.volume.far_pieces() == 0 || self.pool.session() == self.session {
            true => Ok(()),
            false => Err(libc::EIO),
        }
    }

    /// The errno of a request, which the log explains.
    fn served(&self, what: &str, offset: u64, done: Result<(), Code>) -> Served {
        done.map_err(|code| {
            let why = self.volume.reason().unwrap_or_else(|| code.to_string());
            tracing::error!("cannot {what} the volume at {offset}: {why}");
            match code {
                Code::BadDescriptor => libc::EROFS,
                Code::Range => libc::EINVAL,
                _ => libc::EIO,
            }
        })
    }
}

impl Medium for VolumeMedium {
    fn bytes(&self) -> u64 {
        self.volume.bytes()
    }

    fn inode(&self) -> u64 {
        self.number()
    }

    fn threads(&self) -> usize {
        let near = || std::thread::available_parallelism().map_or(1, usize::from).min(NEAR_THREADS_MAX);
        SPARE_THREADS + if self.volume.far_pieces() > 0 { FAR_THREADS } else { near() }
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Served {
        self.check()?;
        self.served("read", offset, self.volume.get_bytes(offset, to))
    }

    fn write(&self, offset: u64, from: &[u8]) -> Served {
        self.check()?;
        self.served("write", offset, self.volume.put_bytes(offset, from))
    }

    fn flush(&self) -> Served {
        self.check()?;
        self.served("flush", 0, self.volume.flush())
    }

    /// The space of a volume is reserved, so nothing is discarded.
    fn zero(&self, offset: u64, bytes: u64, discards: bool) -> Served {
        if discards {
            return Err(libc::EOPNOTSUPP);
        }
        self.check()?;
        self.served("set zeros in", offset, self.volume.zero(offset, bytes))
    }
}
