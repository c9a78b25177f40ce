//! The record of a pending place: a place at which a backing store may differ from the pool.

use forebay_types::{Code, Reader, StoreVersion, Timestamp, Writer, STORE_VERSION_BYTES};

use crate::record::RECORD_VERSION;

type Answer<T> = std::result::Result<T, Code>;

/// Bytes of a record, at most.
pub(crate) const PENDING_BYTES: usize = 1 + 8 + 12 + 1 + STORE_VERSION_BYTES;

/// A pending place, as it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PendingRecord {
    /// Changes since it became pending.
    pub(crate) changes: u64,
    /// When it became pending.
    pub(crate) since: Timestamp,
    /// The store had a version that the pool did not know.
    pub(crate) conflict: bool,
    /// The version that a mover was about to publish.
    pub(crate) intent: Option<StoreVersion>,
}

impl PendingRecord {
    /// One in which no mover has begun anything, and which is in no conflict.
    pub(crate) fn plain(changes: u64, since: Timestamp) -> PendingRecord {
        PendingRecord { changes, since, ..PendingRecord::default() }
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.intent.is_none() && !self.conflict
    }

    pub(crate) fn encode(&self, buffer: &mut [u8; PENDING_BYTES]) -> Answer<usize> {
        let mut w = Writer::new(buffer);
        w.u8(RECORD_VERSION)?;
        w.u64(self.changes)?;
        w.u64(self.since.sec as u64)?;
        w.u32(self.since.nsec)?;
        w.u8(u8::from(self.conflict) | u8::from(self.intent.is_some()) << 1)?;
        if let Some(intent) = &self.intent {
            intent.encode(&mut w)?;
        }
        Ok(w.len())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Answer<PendingRecord> {
        let read = |r: &mut Reader<'_>| {
            if r.u8()? != RECORD_VERSION {
                return Err(Code::Corrupt);
            }
            let changes = r.u64()?;
            let since = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
            let bits = r.u8()?;
            let intent = if bits & 2 != 0 { Some(StoreVersion::decode(r)?) } else { None };
            Ok(PendingRecord { changes, since, conflict: bits & 1 != 0, intent })
        };
        read(&mut Reader::new(bytes)).map_err(|_| Code::Corrupt)
    }
}
