//! Many ranges of a file in one call, with as few system calls as the backing files allow.
//!
//! Ranges and memory are cut into pieces that lie in one backing file each, and the pieces of one backing file are
//! moved together. A read includes short gaps between its ranges and discards their bytes. A write never touches a gap,
//! so that other processes may write there meanwhile. If several ranks write interleaved ranges of a view, each rank
//! starts with another backing file than its neighbours, so that they do not wait for one inode's lock
//! ([`File::write_runs`]).
//!
//! Not for signal handlers: these calls allocate. Tests: `crates/capi/tests/interface.c`, `mpi/tests/views.c`.

use std::os::fd::{AsRawFd, RawFd};

use forebay_types::limits::{
    GAP_BYTES_MAX, GAP_BYTES_MAX_ELSEWHERE, GAP_BYTES_MAX_NETWORK, RUN_PIECES_MAX, SIEVE_BUFFER_BYTES,
    SIEVE_PIECES_MIN,
};
use forebay_types::Code;

use crate::errno;
use crate::far_parts::Memory;
use crate::file::{File, Stripe};
use crate::gaps::Gaps;
use crate::paced::{self, Paced};
use crate::remote_data;
use crate::scatter::Spot;
use crate::sieve::Sieve;

/// Most elements of an iovec in one system call (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;

/// A range of a file; `struct forebay_run` of forebay.h.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Run {
    /// Its first byte.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A part of a range that lies in one backing file and in one piece of memory.
#[derive(Clone, Copy)]
struct Piece {
    stripe: usize,
    /// Offset in the backing file.
    at: u64,
    memory: *mut u8,
    bytes: usize,
    /// Offset in the file.
    offset: u64,
    /// Bytes of all pieces before it.
    before: u64,
}

/// Ranges and memory, as pieces.
struct Pieces<'a> {
    file: &'a File,
    parts: &'a [libc::iovec],
    runs: &'a [Run],
    part: usize,
    within_part: usize,
    run: usize,
    within_run: u64,
    before: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        while self.runs.get(self.run)?.bytes == self.within_run {
            (self.run, self.within_run) = (self.run + 1, 0);
        }
        while self.parts.get(self.part)?.iov_len == self.within_part {
            (self.part, self.within_part) = (self.part + 1, 0);
        }
        let (run, part) = (self.runs[self.run], self.parts[self.part]);
        let left = (run.bytes - self.within_run).min((part.iov_len - self.within_part) as u64);
        let offset = run.offset + self.within_run;
        let extent = self.file.layout().locate(offset, left);
        // SAFETY: within the part, which the caller of read_runs and write_runs promises to be one piece of memory.
        let memory = unsafe { part.iov_base.cast::<u8>().add(self.within_part) };
        let piece = Piece {
            stripe: self.file.index_of(extent.component, extent.stripe),
            at: extent.offset,
            memory,
            bytes: extent.len as usize,
            offset,
            before: self.before,
        };
        self.within_run += extent.len;
        self.within_part += extent.len as usize;
        self.before += extent.len;
        Some(piece)
    }
}

/// Total bytes of all ranges. Fails if the memory has another length, or if a range exceeds the longest file.
fn total(parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Code> {
    let mut bytes = 0u64;
    for run in runs {
        let end = run.offset.checked_add(run.bytes).ok_or(Code::Invalid)?;
        if end > forebay_types::limits::FILE_BYTES_MAX {
            return Err(Code::FileTooLarge);
        }
        bytes = bytes.checked_add(run.bytes).ok_or(Code::Invalid)?;
    }
    let memory = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.iov_len as u64));
    if memory == Some(bytes) {
        Ok(bytes)
    } else {
        Err(Code::Invalid)
    }
}

/// Moves all of `parts` from or to offset `at` of the backing file with an index, and changes `parts`. The count is short
/// only at a file's end.
fn move_parts(
    (file, index, fd): (&File, usize, RawFd),
    mut parts: &mut [libc::iovec],
    mut at: u64,
    writes: bool,
) -> Result<u64, Code> {
    let mut done = 0;
    while !parts.is_empty() {
        let count = parts.len().min(PARTS_MAX) as i32;
        let paced = Paced::begin(file, index);
        // SAFETY: each part is the caller's memory, of the given length, and writable if this reads.
        let n = unsafe {
            if writes {
                libc::pwritev(fd, parts.as_ptr(), count, at as i64)
            } else {
                libc::preadv(fd, parts.as_ptr(), count, at as i64)
            }
        };
        paced::complete(paced, writes, at, n);
        let mut n = match usize::try_from(n) {
            // The medium wrote nothing and returned no error.
            Ok(0) if writes => return Err(Code::Io),
            Ok(0) => break,
            Ok(n) => n,
            Err(_) => match errno::last() {
                Code::Interrupted => continue,
                code => return Err(code),
            },
        };
        done += n as u64;
        at += n as u64;
        while let Some(first) = parts.first_mut() {
            if n < first.iov_len {
                // SAFETY: within the part.
                first.iov_base = unsafe { first.iov_base.cast::<u8>().add(n) }.cast();
                first.iov_len -= n;
                break;
            }
            n -= first.iov_len;
            parts = &mut parts[1..];
        }
    }
    Ok(done)
}

/// The first pieces that one read of the backing file covers, and its bytes. Gaps between them are at most `gap` long,
/// all are of one stripe, and they fit the buffer unless there is only one.
fn stretch(pieces: &[Piece], gap: usize) -> (&[Piece], usize) {
    let first = &pieces[0];
    let (mut bytes, mut count) = (first.bytes, 1);
    for piece in &pieces[1..] {
        let Some(start) = piece.at.checked_sub(first.at).map(|start| start as usize) else { break };
        let between = start.wrapping_sub(bytes);
        let is_of_stripe = piece.offset.wrapping_sub(first.offset) == start as u64;
        if between > gap || start + piece.bytes > SIEVE_BUFFER_BYTES || !is_of_stripe {
            break;
        }
        (bytes, count) = (start + piece.bytes, count + 1);
    }
    (&pieces[..count], bytes)
}

fn are_small(near: &[Piece], bytes: usize) -> bool {
    near.iter().map(|piece| piece.bytes).sum::<usize>() <= near.len() * bytes
}

/// Copies a piece out of the data that were read; the piece starts at `start` there. Returns the number of its bytes
/// that were read.
fn hand_out(read: &[u8], piece: &Piece, start: u64) -> usize {
    let there = read.get(start as usize..).map_or(0, |rest| rest.len().min(piece.bytes));
    if there > 0 {
        // SAFETY: the caller of `read_runs` promises that the piece is writable memory which nothing else uses.
        unsafe { std::ptr::copy_nonoverlapping(read[start as usize..].as_ptr(), piece.memory, there) };
    }
    there
}

/// Reads until the buffer is full or the file ends.
fn read_whole(from: (&File, usize, RawFd), buffer: &mut [u8], at: u64) -> Result<usize, Code> {
    let mut part = [part_of(buffer.as_mut_ptr(), buffer.len())];
    move_parts(from, &mut part, at, false).map(|n| n as usize)
}

fn part_of(memory: *mut u8, bytes: usize) -> libc::iovec {
    libc::iovec { iov_base: memory.cast(), iov_len: bytes }
}

/// The file's end, as far as a read has found it.
struct End {
    size: Option<u64>,
    /// Bytes of data, in order, before the first byte beyond the file's end.
    whole: u64,
}

impl End {
    /// Completes a piece of which the backing file had only `got` bytes. The file may continue in another backing file,
    /// and bytes written since must not read as zeros.
    fn fill(&mut self, file: &File, piece: &Piece, got: usize) -> Result<(), Code> {
        if got >= piece.bytes {
            return Ok(());
        }
        let at = piece.offset + got as u64;
        let size = match self.size {
            Some(size) => size,
            None => *self.size.insert(file.size()?),
        };
        let mut there = got;
        if at < size {
            // SAFETY: within the piece, which is writable memory that nothing else uses.
            let rest = unsafe { std::slice::from_raw_parts_mut(piece.memory.add(got), piece.bytes - got) };
            there += file.read_at(rest, at)?;
        }
        self.reached(piece, there);
        Ok(())
    }

    /// Records that `there` bytes of a piece lie before the file's end.
    fn reached(&mut self, piece: &Piece, there: usize) {
        if there < piece.bytes {
            self.whole = self.whole.min(piece.before + there as u64);
        }
    }
}

impl File {
    fn pieces<'a>(&'a self, parts: &'a [libc::iovec], runs: &'a [Run]) -> Pieces<'a> {
        Pieces { file: self, parts, runs, part: 0, within_part: 0, run: 0, within_run: 0, before: 0 }
    }

    /// Reads ranges into memory, both in order. Returns the number of bytes before the first byte beyond the file's
    /// end.
    ///
    /// # Errors
    /// [`Code::Invalid`] if ranges and memory differ in length.
    ///
    /// # Safety
    /// Each of `parts` is writable memory that nothing else uses during the call.
    pub unsafe fn read_runs(&self, parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Code> {
        let mut end = End { size: None, whole: total(parts, runs)? };
        if let ([part], [run], true) = (parts, runs, self.read_ahead.is_asked() && end.whole > 0) {
            // SAFETY: the caller's promise.
            let into = unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast::<u8>(), part.iov_len) };
            return self.read_at(into, run.offset).map(|n| n as u64);
        }
        let mut pieces = self.pieces(parts, runs);
        let (mut some, mut alone) = (Vec::new(), Vec::new());
        loop {
            some.clear();
            some.extend(pieces.by_ref().take(RUN_PIECES_MAX));
            if some.is_empty() {
                return Ok(end.whole);
            }
            some.sort_by_key(|piece| piece.stripe);
            for group in some.chunk_by(|a, b| a.stripe == b.stripe) {
                match self.stripe_at(group[0].stripe) {
                    Stripe::Local(fd) => self.read_group(fd.as_raw_fd(), group, &mut end)?,
                    Stripe::Remote(_) => self.read_group_elsewhere(group, &mut end, &mut alone)?,
                }
            }
            self.read_alone(&mut alone, parts, &mut end)?;
        }
    }

    /// Reads pieces of one backing file, neighbouring ones together.
    fn read_group(&self, fd: RawFd, group: &[Piece], end: &mut End) -> Result<(), Code> {
        let mut gap = [const { std::mem::MaybeUninit::<u8>::uninit() }; GAP_BYTES_MAX];
        let mut parts = Vec::with_capacity((2 * group.len()).min(PARTS_MAX));
        let mut rest = group;
        let longest = match self.is_in_memory() && !self.is_paced() {
            true => Gaps::in_memory(fd, group[0].at),
            false => Gaps::LONGEST,
        };
        while let Some(first) = rest.first() {
            let (near, bytes) = stretch(rest, longest.gap);
            if near.len() >= SIEVE_PIECES_MIN && are_small(near, longest.sieve) {
                if let Some(mut sieve) = Sieve::take() {
                    let buffer = sieve.room(first.at, bytes);
                    let got = read_whole((self, first.stripe, fd), buffer, first.at)?;
                    for piece in near {
                        let there = hand_out(&buffer[..got], piece, piece.at - first.at);
                        end.fill(self, piece, there)?;
                    }
                    rest = &rest[near.len()..];
                    continue;
                }
            }
            parts.clear();
            let (mut at, mut count) = (first.at, 0);
            for piece in rest {
                let between = piece.at.wrapping_sub(at);
                if between > longest.gap as u64 || parts.len() + 2 > PARTS_MAX {
                    break;
                }
                if between > 0 {
                    parts.push(part_of(gap.as_mut_ptr().cast(), between as usize));
                }
                parts.push(part_of(piece.memory, piece.bytes));
                at = piece.at + piece.bytes as u64;
                count += 1;
            }
            let got = first.at + move_parts((self, first.stripe, fd), &mut parts, first.at, false)?;
            for piece in &rest[..count] {
                end.fill(self, piece, got.saturating_sub(piece.at).min(piece.bytes as u64) as usize)?;
            }
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Reads pieces of a backing file on another node, neighbouring ones by one request, together with gaps that are not
    /// longer than the pieces: large transfers are faster than lists of ranges by more than the gaps take. Pieces without
    /// neighbours are added to `alone`.
    fn read_group_elsewhere(
        &self,
        group: &[Piece],
        end: &mut End,
        alone: &mut Vec<Piece>,
    ) -> Result<(), Code> {
        let mut rest = group;
        let average = group.iter().map(|piece| piece.bytes).sum::<usize>() / group.len().max(1);
        let gap = (average + average / 8).clamp(GAP_BYTES_MAX_NETWORK, GAP_BYTES_MAX_ELSEWHERE);
        while let Some(first) = rest.first() {
            let (near, bytes) = stretch(rest, gap);
            let sieve = (near.len() > 1).then(Sieve::take).flatten();
            let count = if let Some(mut sieve) = sieve {
                let buffer = sieve.room(first.offset, bytes);
                let got = self.read_at(buffer, first.offset)?;
                for piece in near {
                    let there = hand_out(&buffer[..got], piece, piece.offset - first.offset);
                    end.reached(piece, there);
                }
                near.len()
            } else {
                alone.push(*first);
                1
            };
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Reads pieces on other nodes, and clears the list.
    fn read_alone(&self, alone: &mut Vec<Piece>, parts: &[libc::iovec], end: &mut End) -> Result<(), Code> {
        let whole = self.move_together(alone, parts, Memory::Into)?;
        for piece in alone.drain(..).filter(|_| !whole) {
            // Read one by one, to find the file's end.
            // SAFETY: the caller of `read_runs` promises that the memory is writable and nothing else uses it.
            let to = unsafe { std::slice::from_raw_parts_mut(piece.memory, piece.bytes) };
            end.reached(&piece, self.read_at(to, piece.offset)?);
        }
        Ok(())
    }

    /// Moves pieces on other nodes, with many requests in progress at the same time. True if all bytes were moved. Does
    /// nothing unless the pieces' memory is a single part.
    fn move_together(
        &self,
        pieces: &mut [Piece],
        parts: &[libc::iovec],
        memory: impl FnOnce(*mut u8) -> Memory,
    ) -> Result<bool, Code> {
        let ([part], true) = (parts, pieces.len() > 1) else { return Ok(pieces.is_empty()) };
        pieces.sort_by_key(|piece| piece.before);
        let mut far = pieces.iter().flat_map(|piece| {
            let id = match self.stripe_at(piece.stripe) {
                Stripe::Remote(remote) => Some(remote.id),
                Stripe::Local(_) => None,
            };
            id.into_iter().flat_map(|id| remote_data::parts(id, piece.at, piece.before as usize, piece.bytes))
        });
        // SAFETY: one part of memory, which the caller of `read_runs` or `write_runs` promises to be valid, and each
        // piece starts at its `before` in it.
        let moved =
            unsafe { self.pool.move_far(&mut far, part.iov_len, memory(part.iov_base.cast()), false)? };
        match moved.failed {
            Some(code) => Err(code),
            None => Ok(moved.end == part.iov_len),
        }
    }

    /// Writes memory to ranges, both in order and completely. After an error, any of the bytes may have been written.
    ///
    /// # Errors
    /// [`Code::Invalid`] if ranges and memory differ in length.
    ///
    /// # Safety
    /// Each of `parts` is memory that does not change during the call.
    pub unsafe fn write_runs(&self, parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Code> {
        // SAFETY: the caller's promise.
        let written = unsafe { self.write_runs_now(parts, runs) };
        self.read_ahead.forget();
        written
    }

    /// # Safety
    /// As [`File::write_runs`]'s.
    unsafe fn write_runs_now(&self, parts: &[libc::iovec], runs: &[Run]) -> Result<u64, Code> {
        let all = total(parts, runs)?;
        let step = usize::try_from(all).unwrap_or(usize::MAX) / runs.len().max(1);
        let mut pieces = self.pieces(parts, runs);
        let (mut some, mut elsewhere) = (Vec::new(), Vec::new());
        loop {
            some.clear();
            some.extend(pieces.by_ref().take(RUN_PIECES_MAX));
            let Some(first) = some.first() else { return Ok(all) };
            // In an interleaved view, the offsets of neighbouring ranks differ by the length of their first range.
            let turn = (first.offset / first.bytes as u64) as usize;
            some.sort_by_key(|piece| piece.stripe);
            let groups: Vec<_> = some.chunk_by(|a, b| a.stripe == b.stripe).collect();
            for i in 0..groups.len() {
                let group = groups[(i + turn) % groups.len()];
                match self.stripe_at(group[0].stripe) {
                    Stripe::Local(fd) => self.write_group(fd.as_raw_fd(), group, step)?,
                    Stripe::Remote(_) => elsewhere.extend_from_slice(group),
                }
            }
            let whole = self.move_together(&mut elsewhere, parts, |first| Memory::From(first))?;
            for piece in elsewhere.drain(..).filter(|_| !whole) {
                // SAFETY: the caller's promise.
                let from = unsafe { std::slice::from_raw_parts(piece.memory, piece.bytes) };
                self.write_whole(from, piece.offset)?;
            }
        }
    }

    /// Writes pieces of one backing file, adjacent ones together. The ranges of the call have `step` bytes on average.
    fn write_group(&self, fd: RawFd, group: &[Piece], step: usize) -> Result<(), Code> {
        let bytes = group.iter().map(|piece| piece.bytes).sum::<usize>();
        let (first, last) = (&group[0], &group[group.len() - 1]);
        let range = first.at..(last.at + last.bytes as u64).max(first.at);
        self.take_ahead(first.stripe, fd, range, bytes, step);
        let done = self.scatter(first.stripe, fd, group)?;
        let mut parts = Vec::with_capacity(group.len().min(PARTS_MAX));
        let mut rest = &group[done..];
        while let Some(first) = rest.first() {
            parts.clear();
            let mut at = first.at;
            for piece in rest {
                if piece.at != at || parts.len() == PARTS_MAX {
                    break;
                }
                parts.push(part_of(piece.memory, piece.bytes));
                at += piece.bytes as u64;
            }
            rest = &rest[parts.len()..];
            move_parts((self, first.stripe, fd), &mut parts, first.at, true)?;
        }
        Ok(())
    }

    /// Writes many small pieces together. Returns the number of pieces written, from the first on.
    fn scatter(&self, stripe: usize, fd: RawFd, group: &[Piece]) -> Result<usize, Code> {
        let spots: Vec<_> = group
            .iter()
            .map(|piece| Spot { at: piece.at, memory: piece.memory, bytes: piece.bytes })
            .collect();
        let mut result = Ok(0);
        let last = &group[group.len() - 1];
        let done = self.scattered().write((stripe, self.stripe_count()), fd, &spots, || {
            let to = (self, stripe, fd);
            result = move_parts(to, &mut [part_of(last.memory, last.bytes)], last.at, true);
            result.is_ok()
        });
        result.map(|_| done)
    }

    fn write_whole(&self, from: &[u8], offset: u64) -> Result<(), Code> {
        let mut done = 0;
        while done < from.len() {
            done += self.write_at(&from[done..], offset + done as u64)?;
        }
        Ok(())
    }
}
