//! Accesses of a volume's file to ranges of which some are on other nodes: short ones are gathered in a buffer, so that
//! their requests go out together, and not one after the other.

use forebay_types::Code;

use crate::striped::Striped;

/// A range of at least so many bytes is moved from and to the caller's memory itself.
const ALONE_BYTES: usize = 128 << 10;
/// Bytes of the buffer.
const BUFFER_BYTES: usize = 4 << 20;

/// Ranges that are put together.
#[derive(Debug)]
pub(crate) struct Puts<'a> {
    volume: &'a Striped,
    ranges: Vec<(u64, u64)>,
    buffer: Vec<u8>,
}

impl<'a> Puts<'a> {
    pub(crate) fn new(volume: &'a Striped) -> Puts<'a> {
        Puts { volume, ranges: Vec::new(), buffer: Vec::new() }
    }

    /// Puts a range, perhaps at the next [`Puts::flush`]. The order of ranges that overlap is kept.
    ///
    /// # Errors
    /// As [`Striped::put`].
    ///
    /// # Safety
    /// `from` is readable for `bytes` bytes.
    pub(crate) unsafe fn put(&mut self, offset: u64, from: *const u8, bytes: usize) -> Result<(), Code> {
        if bytes >= ALONE_BYTES {
            self.flush()?;
            // SAFETY: the caller's promise.
            return unsafe { self.volume.put(offset, from, bytes) };
        }
        if self.buffer.len() + bytes > BUFFER_BYTES {
            self.flush()?;
        }
        self.buffer.reserve(bytes);
        let end = self.buffer.len();
        // SAFETY: the caller's promise; the room was reserved, and is set. Others may change the memory meanwhile, so no
        // reference to it is made.
        unsafe {
            std::ptr::copy_nonoverlapping(from, self.buffer.as_mut_ptr().add(end), bytes);
            self.buffer.set_len(end + bytes);
        }
        self.ranges.push((offset, bytes as u64));
        Ok(())
    }

    /// Puts what is in the buffer.
    pub(crate) fn flush(&mut self) -> Result<(), Code> {
        let (from, bytes) = (self.buffer.as_ptr(), self.buffer.len());
        // SAFETY: the buffer is readable.
        let put = unsafe { self.volume.put_runs(&self.ranges, from, bytes) };
        self.ranges.clear();
        self.buffer.clear();
        put
    }
}

/// Ranges that are got together.
#[derive(Debug)]
pub(crate) struct Gets<'a> {
    volume: &'a Striped,
    ranges: Vec<(u64, u64)>,
    to: Vec<*mut u8>,
    bytes: usize,
    buffer: Vec<u8>,
}

impl<'a> Gets<'a> {
    pub(crate) fn new(volume: &'a Striped) -> Gets<'a> {
        Gets { volume, ranges: Vec::new(), to: Vec::new(), bytes: 0, buffer: Vec::new() }
    }

    /// Gets a range, perhaps at the next [`Gets::flush`].
    ///
    /// # Errors
    /// As [`Striped::get`].
    ///
    /// # Safety
    /// `to` is writable for `bytes` bytes, until that flush.
    pub(crate) unsafe fn get(&mut self, offset: u64, to: *mut u8, bytes: usize) -> Result<(), Code> {
        if bytes >= ALONE_BYTES {
            // SAFETY: the caller's promise.
            return unsafe { self.volume.get(offset, to, bytes) };
        }
        if self.bytes + bytes > BUFFER_BYTES {
            // SAFETY: the caller's promise.
            unsafe { self.flush() }?;
        }
        self.ranges.push((offset, bytes as u64));
        self.to.push(to);
        self.bytes += bytes;
        Ok(())
    }

    /// Gets what was put off.
    ///
    /// # Safety
    /// The memory of all ranges is writable.
    pub(crate) unsafe fn flush(&mut self) -> Result<(), Code> {
        self.buffer.resize(self.bytes, 0);
        // SAFETY: the buffer is writable.
        let got = unsafe { self.volume.get_runs(&self.ranges, self.buffer.as_mut_ptr(), self.bytes) };
        let mut from = &self.buffer[..];
        for ((_, bytes), to) in self.ranges.drain(..).zip(self.to.drain(..)) {
            let (this, rest) = from.split_at(bytes as usize);
            if got.is_ok() {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(this.as_ptr(), to, this.len()) };
            }
            from = rest;
        }
        self.bytes = 0;
        got
    }
}
