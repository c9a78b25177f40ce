//! Reports and questions of a mover about many files, in one request ([`Request::StoreReports`],
//! [`Request::StorePlaces`]).
//!
//! A list of reports has the requests as they would be sent alone, without their headers. Each has an outcome of its own.

use crate::backing_store::StorePlace;
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::Ino;
use crate::limits::PATH_MAX;
use crate::reply::Entry;

use super::Request;

/// Reports in one request, at most: their outcomes fit a reply that is kept.
pub const REPORTS_MAX: usize = 64;
/// Encoded bytes of an outcome.
pub const OUTCOME_BYTES: usize = 10;

/// What became of a report: for `BeginDrain` and `Restored` the epoch of the file's data, else 0.
pub type ReportOutcome = Result<u64, Code>;

impl<'a> Request<'a> {
    /// The report that a file's data are in its backing files: those of the entry's layout, with the entry's times.
    pub fn restored(entry: &Entry) -> Request<'a> {
        let Entry { attr, layout } = entry;
        Request::Restored {
            ino: attr.ino,
            epoch: attr.epoch(),
            atime: attr.atime,
            mtime: attr.mtime,
            layout: *layout,
        }
    }

    /// True for a request that a list of reports may have.
    pub const fn is_listed_report(&self) -> bool {
        matches!(
            self,
            Request::BeginDrain { .. }
                | Request::Intend { .. }
                | Request::Published { .. }
                | Request::Restored { .. }
        )
    }

    /// Appends the request to a list of reports.
    pub fn append_to_reports(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(self.number())?;
        self.put(w)
    }

    /// Reads and checks a list of reports.
    pub fn decode_reports(bytes: &'a [u8]) -> Result<Vec<Request<'a>>, Code> {
        let (mut r, mut reports) = (Reader::new(bytes), Vec::new());
        while !r.rest().is_empty() {
            let number = r.u8()?;
            let report = Request::get(number, &mut r)?;
            if !report.is_listed_report() {
                return Err(Code::Malformed);
            }
            reports.push(report);
        }
        match reports.len() {
            0..=REPORTS_MAX => Ok(reports),
            _ => Err(Code::TooBig),
        }
    }
}

/// Appends an outcome.
pub fn encode_outcome(outcome: ReportOutcome, w: &mut Writer<'_>) -> Result<(), Code> {
    w.u16(outcome.err().map_or(0, |code| code as u16))?;
    w.u64(outcome.unwrap_or(0))
}

/// Reads outcomes to the end.
pub fn decode_outcomes(bytes: &[u8]) -> Result<Vec<ReportOutcome>, Code> {
    let (mut r, mut outcomes) = (Reader::new(bytes), Vec::new());
    while !r.rest().is_empty() {
        let (code, epoch) = (r.u16()?, r.u64()?);
        outcomes.push(match code {
            0 => Ok(epoch),
            code => Err(Code::from_u16(code)),
        });
    }
    Ok(outcomes)
}

/// Reads and checks the inodes of [`Request::StorePlaces`].
pub fn decode_inos(bytes: &[u8]) -> Result<Vec<Ino>, Code> {
    let (mut r, mut inos) = (Reader::new(bytes), Vec::new());
    while !r.rest().is_empty() {
        inos.push(Ino(r.u64()?));
    }
    match inos.len() {
        0..=REPORTS_MAX => Ok(inos),
        _ => Err(Code::TooBig),
    }
}

/// Appends one answer to [`Request::StorePlaces`].
pub fn encode_store_place(place: &Result<StorePlace, Code>, w: &mut Writer<'_>) -> Result<(), Code> {
    let place = match place {
        Ok(place) => place,
        Err(code) => {
            w.u16(*code as u16)?;
            return w.short_bytes(&[]);
        }
    };
    let mut buffer = [0; PATH_MAX + 256];
    let mut encoded = Writer::new(&mut buffer);
    place.encode(&mut encoded)?;
    let n = encoded.len();
    w.u16(0)?;
    w.short_bytes(&buffer[..n])
}

/// Reads the answers to [`Request::StorePlaces`] to the end.
pub fn decode_store_places(bytes: &[u8]) -> Result<Vec<Result<StorePlace, Code>>, Code> {
    let (mut r, mut places) = (Reader::new(bytes), Vec::new());
    while !r.rest().is_empty() {
        let (code, place) = (r.u16()?, r.short_bytes()?);
        places.push(match code {
            0 => Ok(StorePlace::decode(place)?),
            code => Err(Code::from_u16(code)),
        });
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ino, Layout, NodeId, StoreVersion, Timestamp};

    #[test]
    fn reports_and_outcomes_round_trip() {
        let time = Timestamp { sec: -5, nsec: 7 };
        let reports = [
            Request::BeginDrain { ino: Ino(7) },
            Request::Restored {
                ino: Ino(7),
                epoch: 4,
                atime: time,
                mtime: time,
                layout: Layout::single(NodeId(1), 0),
            },
            Request::Intend { parent: Ino(5), name: b"a", version: StoreVersion::A_DIRECTORY },
            Request::Published {
                parent: Ino(5),
                name: b"b",
                ino: Ino(7),
                epoch: 3,
                seen: 9,
                version: StoreVersion::NOTHING,
            },
        ];
        let mut buffer = [0; 512];
        let mut w = Writer::new(&mut buffer);
        reports.iter().for_each(|report| report.append_to_reports(&mut w).unwrap());
        let n = w.len();
        assert_eq!(Request::decode_reports(&buffer[..n]).unwrap(), reports);
        assert_eq!(Request::decode_reports(&buffer[..n - 1]), Err(Code::Malformed));
        let outcomes = [Ok(3), Err(Code::Busy), Ok(0)];
        let mut w = Writer::new(&mut buffer);
        outcomes.iter().for_each(|outcome| encode_outcome(*outcome, &mut w).unwrap());
        let n = w.len();
        assert_eq!((n, decode_outcomes(&buffer[..n]).unwrap()), (3 * OUTCOME_BYTES, outcomes.to_vec()));
    }

    #[test]
    fn places_round_trip() {
        let place = StorePlace {
            top: Ino(1),
            is_root: true,
            parent: Ino(5),
            placed: None,
            epoch: 3,
            path: vec![b'p'; PATH_MAX],
        };
        let places = [Err(Code::NotFound), Ok(place)];
        let mut buffer = vec![0; 2 * PATH_MAX];
        let mut w = Writer::new(&mut buffer);
        places.iter().for_each(|place| encode_store_place(place, &mut w).unwrap());
        let n = w.len();
        assert_eq!(encode_store_place(&places[1], &mut w), Err(Code::TooBig), "a third one does not fit");
        assert_eq!(decode_store_places(&buffer[..n]).unwrap(), places);
        assert_eq!(decode_store_places(&buffer[..n - 1]), Err(Code::Malformed));
    }

    #[test]
    fn other_requests_and_too_many_are_refused() {
        let list = |request: Request<'_>, count: usize| {
            let mut buffer = [0; 4096];
            let mut w = Writer::new(&mut buffer);
            (0..count).for_each(|_| request.append_to_reports(&mut w).unwrap());
            let n = w.len();
            Request::decode_reports(&buffer[..n]).map(|reports| reports.len())
        };
        let begin = Request::BeginDrain { ino: Ino(7) };
        assert_eq!(list(begin, REPORTS_MAX), Ok(REPORTS_MAX));
        assert_eq!(list(begin, REPORTS_MAX + 1), Err(Code::TooBig));
        assert_eq!(list(Request::Unlink { parent: Ino(5), name: b"a" }, 1), Err(Code::Malformed));
        let nested = Request::StoreReports { node: crate::NodeId(0), reports: b"" };
        assert_eq!(list(nested, 1), Err(Code::Malformed));
    }
}
