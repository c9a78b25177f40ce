//! Ranges of a backing file that are read or written by one request.

use crate::error::Code;
use crate::limits::{BACKING_BYTES_MAX, FILE_BYTES_MAX};

/// Ranges of a backing file. With their data they have at most [`BACKING_BYTES_MAX`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingRuns<'a> {
    /// Of each its offset, then its length.
    pub(crate) list: &'a [u8],
}

impl<'a> BackingRuns<'a> {
    /// Bytes that each range has in the list.
    pub const EACH_BYTES: usize = 12;

    /// Adds a range to a list.
    pub fn add(list: &mut Vec<u8>, offset: u64, bytes: u32) {
        list.extend(offset.to_le_bytes());
        list.extend(bytes.to_le_bytes());
    }

    /// The ranges of a list.
    ///
    /// # Errors
    /// [`Code::Malformed`] for a list that is cut; [`Code::Invalid`] for an empty list or range; [`Code::FileTooLarge`] for one beyond the longest file;
    /// [`Code::TooBig`] for too many bytes.
    pub fn of(list: &'a [u8]) -> Result<BackingRuns<'a>, Code> {
        if !list.len().is_multiple_of(Self::EACH_BYTES) {
            return Err(Code::Malformed);
        }
        let runs = BackingRuns { list };
        let mut all = list.len();
        for (offset, bytes) in runs.iter() {
            within(offset, bytes as u64)?;
            all = all.saturating_add(bytes);
            if bytes == 0 {
                return Err(Code::Invalid);
            }
        }
        match all {
            0 => Err(Code::Invalid),
            _ if all > BACKING_BYTES_MAX => Err(Code::TooBig),
            _ => Ok(runs),
        }
    }

    /// Offset and length of each.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, usize)> + 'a {
        self.list.chunks_exact(Self::EACH_BYTES).map(|run| {
            let (mut offset, mut bytes) = ([0; 8], [0; 4]);
            offset.copy_from_slice(&run[..8]);
            bytes.copy_from_slice(&run[8..]);
            (u64::from_le_bytes(offset), u32::from_le_bytes(bytes) as usize)
        })
    }

    /// Bytes of all ranges.
    pub fn bytes(&self) -> usize {
        self.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Checks that a range is within the longest file.
pub(crate) fn within(offset: u64, bytes: u64) -> Result<(), Code> {
    match offset.checked_add(bytes) {
        Some(end) if end <= FILE_BYTES_MAX => Ok(()),
        _ => Err(Code::FileTooLarge),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(runs: &[(u64, u32)]) -> Vec<u8> {
        let mut list = Vec::new();
        runs.iter().for_each(|(offset, bytes)| BackingRuns::add(&mut list, *offset, *bytes));
        list
    }

    #[test]
    fn ranges_that_no_file_has_or_that_are_too_many_are_refused() {
        let most = BACKING_BYTES_MAX - 2 * BackingRuns::EACH_BYTES;
        let runs = [(5, most as u32 - 1), (0, 1)];
        assert_eq!(BackingRuns::of(&list(&runs)).map(|runs| runs.bytes()), Ok(most));
        for (runs, code) in [
            (&[][..], Code::Invalid),
            (&[(5, 0)], Code::Invalid),
            (&[(5, most as u32), (0, 1)], Code::TooBig),
            (&[(5, u32::MAX), (0, u32::MAX)], Code::TooBig),
            (&[(0, 1), (FILE_BYTES_MAX, 1)], Code::FileTooLarge),
            (&[(u64::MAX, 1)], Code::FileTooLarge),
        ] {
            assert_eq!(BackingRuns::of(&list(runs)), Err(code), "{runs:?}");
        }
        assert_eq!(BackingRuns::of(&list(&runs)[1..]), Err(Code::Malformed));
    }
}
