//! Several ranges of a backing file by one request of another node.
//!
//! A read also reads short gaps between its ranges, and drops their bytes, where that takes less time than another access to
//! the medium. A write never touches a gap: others may write there meanwhile. On a medium that is paced each access takes
//! its own time.

use std::os::fd::OwnedFd;

use forebay_data::{Medium, NodeTargets, Target};
use forebay_types::limits::{GAP_BYTES_MAX_ELSEWHERE, GAP_BYTES_MAX_MEMORY, SIEVE_BUFFER_BYTES};
use forebay_types::{BackingId, BackingRuns, Code};

use super::file_io::{read, write};
use super::paced::Paced;

/// An access to the medium: it has the ranges with an index from `first` to `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stretch {
    first: usize,
    end: usize,
    offset: u64,
    bytes: usize,
}

/// Cuts ranges into stretches without gaps that are longer than `gap`. None but a single range is longer than the buffer.
fn stretches(runs: &[(u64, usize)], gap: usize) -> Vec<Stretch> {
    let mut all: Vec<Stretch> = Vec::new();
    for (i, (offset, bytes)) in runs.iter().copied().enumerate() {
        if let Some(last) = all.last_mut() {
            let between = offset.checked_sub(last.offset + last.bytes as u64);
            let whole = between.map(|between| between + (last.bytes + bytes) as u64);
            if between.is_some_and(|n| n <= gap as u64)
                && whole.is_some_and(|n| n <= SIEVE_BUFFER_BYTES as u64)
            {
                (last.bytes, last.end) = ((offset - last.offset) as usize + bytes, i + 1);
                continue;
            }
        }
        all.push(Stretch { first: i, end: i + 1, offset, bytes });
    }
    all
}

/// The longest gap that takes less time to read than another access.
fn gap_limit(targets: &NodeTargets, id: &BackingId, target: &Target) -> usize {
    if let Some(pacer) = targets.pacer(id.target) {
        let medium = pacer.medium();
        let access_ns = u128::from(medium.read.latency_ns.saturating_add(medium.seek_ns));
        let bytes = access_ns * u128::from(medium.read.bytes_per_s) / 1_000_000_000;
        return usize::try_from(bytes).unwrap_or(usize::MAX).min(GAP_BYTES_MAX_ELSEWHERE);
    }
    match target.medium() {
        Medium::Dram => GAP_BYTES_MAX_MEMORY,
        _ => GAP_BYTES_MAX_ELSEWHERE,
    }
}

/// Reads ranges to the begin of `room`, one after the other, up to the first byte behind the file's end. Returns the
/// number of bytes.
pub(super) fn read_runs(
    (targets, id, target): (&NodeTargets, &BackingId, &Target),
    file: &OwnedFd,
    runs: BackingRuns<'_>,
    room: &mut [u8],
) -> Result<usize, Code> {
    let runs: Vec<(u64, usize)> = runs.iter().collect();
    let (mut done, mut buffer) = (0, Vec::new());
    for Stretch { first, end, offset, bytes } in stretches(&runs, gap_limit(targets, id, target)) {
        let runs = &runs[first..end];
        let wanted: usize = runs.iter().map(|(_, bytes)| bytes).sum();
        let to = room.get_mut(done..done + wanted).ok_or(Code::TooBig)?;
        let paced = Paced::begin(targets, id);
        let (got, there) = if wanted == bytes {
            let got = read(file, to, offset)?;
            (got, got)
        } else {
            buffer.resize(bytes, 0);
            let got = read(file, &mut buffer, offset)?;
            (got, hand_out(&buffer[..got], runs, offset, to))
        };
        if let Some(paced) = paced {
            paced.complete(true, id, offset, got);
        }
        done += there;
        if there < wanted {
            break;
        }
    }
    Ok(done)
}

/// Copies ranges out of what was read from `offset` on. Returns the bytes up to the first that was not read.
fn hand_out(read: &[u8], runs: &[(u64, usize)], offset: u64, to: &mut [u8]) -> usize {
    let mut done = 0;
    for (at, bytes) in runs {
        let rest = read.get((at - offset) as usize..).unwrap_or_default();
        let there = rest.len().min(*bytes);
        to[done..done + there].copy_from_slice(&rest[..there]);
        done += there;
        if there < *bytes {
            break;
        }
    }
    done
}

/// Writes ranges.
pub(super) fn write_runs(
    (targets, id): (&NodeTargets, &BackingId),
    file: &OwnedFd,
    runs: BackingRuns<'_>,
    mut bytes: &[u8],
) -> Result<usize, Code> {
    let all = bytes.len();
    for (offset, length) in runs.iter() {
        let (some, rest) = bytes.split_at_checked(length).ok_or(Code::Malformed)?;
        let paced = Paced::begin(targets, id);
        write(file, some, offset)?;
        if let Some(paced) = paced {
            paced.complete(false, id, offset, length);
        }
        bytes = rest;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_gaps_are_read_and_longer_ones_not() {
        let of = |runs: &[(u64, usize)], gap| {
            stretches(runs, gap).iter().map(|s| (s.offset, s.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[(0, 10), (10, 5), (20, 5)], 0), [(0, 15), (20, 5)]);
        assert_eq!(of(&[(0, 10), (10, 5), (20, 5)], 5), [(0, 25)]);
        assert_eq!(of(&[(20, 5), (0, 10), (5, 5)], 100), [(20, 5), (0, 10), (5, 5)], "backward, and across");
        let long = SIEVE_BUFFER_BYTES;
        assert_eq!(
            of(&[(0, 1), (long as u64 - 1, 1), (long as u64, 1)], long),
            [(0, long), (long as u64, 1)]
        );
        assert_eq!(of(&[(u64::MAX - 1, 1), (0, 1)], long), [(u64::MAX - 1, 1), (0, 1)]);
    }

    proptest! {
        #[test]
        fn ranges_are_what_the_file_has_whatever_the_gaps(
            runs in proptest::collection::vec((0u64..400, 1usize..50), 1..40),
            size in 1usize..450,
            gap in 0usize..60,
        ) {
            let file: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            let of = |offset: usize, bytes: usize| &file[offset.min(size)..(offset + bytes).min(size)];
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            for (offset, bytes) in &runs {
                let there = of(*offset as usize, *bytes);
                expected.extend_from_slice(there);
                if there.len() < *bytes {
                    break;
                }
            }
            for Stretch { first, end, offset, bytes } in stretches(&runs, gap) {
                let runs = &runs[first..end];
                let wanted: usize = runs.iter().map(|(_, bytes)| bytes).sum();
                let mut to = vec![0; wanted];
                let there = hand_out(of(offset as usize, bytes), runs, offset, &mut to);
                found.extend_from_slice(&to[..there]);
                if there < wanted {
                    break;
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
