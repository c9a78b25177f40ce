//! Bounded little-endian reading and writing over byte slices: no allocation, no panic on short input.

use crate::error::Code;

/// Reads fixed-size values from the front of a slice. Every method fails with [`Code::Malformed`] when too few bytes
/// are left.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// The next `n` bytes.
    #[inline]
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Code> {
        if n > self.rest.len() {
            return Err(Code::Malformed);
        }
        let (head, tail) = self.rest.split_at(n);
        self.rest = tail;
        Ok(head)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Code> {
        let (head, tail) = self.rest.split_first_chunk().ok_or(Code::Malformed)?;
        self.rest = tail;
        Ok(head)
    }

    /// The next byte.
    #[inline]
    pub fn u8(&mut self) -> Result<u8, Code> {
        self.array().map(|[byte]| *byte)
    }

    /// The next two bytes.
    #[inline]
    pub fn u16(&mut self) -> Result<u16, Code> {
        self.array().map(|bytes| u16::from_le_bytes(*bytes))
    }

    /// The next four bytes.
    #[inline]
    pub fn u32(&mut self) -> Result<u32, Code> {
        self.array().map(|bytes| u32::from_le_bytes(*bytes))
    }

    /// The next eight bytes.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, Code> {
        self.array().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// A 16-bit length, then that many bytes.
    #[inline]
    pub fn short_bytes(&mut self) -> Result<&'a [u8], Code> {
        let n = self.u16()? as usize;
        self.take(n)
    }

    /// A 32-bit length, then that many bytes.
    #[inline]
    pub fn long_bytes(&mut self) -> Result<&'a [u8], Code> {
        let n = self.u32()? as usize;
        self.take(n)
    }

    /// The bytes that have not been read.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

/// Writes fixed-size values to the front of a slice. Every method fails with [`Code::TooBig`] when they do not fit.
#[derive(Debug)]
pub struct Writer<'a> {
    buffer: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    /// Writes from the start of `buffer`.
    pub fn new(buffer: &'a mut [u8]) -> Self {
        Writer { buffer, len: 0 }
    }

    /// Bytes written so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first write.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that still fit.
    pub fn room(&self) -> usize {
        self.buffer.len() - self.len
    }

    /// Appends `bytes` without a length.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Code> {
        let end = self.len + bytes.len();
        let place = self.buffer.get_mut(self.len..end).ok_or(Code::TooBig)?;
        place.copy_from_slice(bytes);
        self.len = end;
        Ok(())
    }

    /// Appends one byte.
    #[inline]
    pub fn u8(&mut self, v: u8) -> Result<(), Code> {
        self.put(&[v])
    }

    /// Appends two bytes.
    #[inline]
    pub fn u16(&mut self, v: u16) -> Result<(), Code> {
        self.put(&v.to_le_bytes())
    }

    /// Appends four bytes.
    #[inline]
    pub fn u32(&mut self, v: u32) -> Result<(), Code> {
        self.put(&v.to_le_bytes())
    }

    /// Appends eight bytes.
    #[inline]
    pub fn u64(&mut self, v: u64) -> Result<(), Code> {
        self.put(&v.to_le_bytes())
    }

    /// Appends a 16-bit length and the bytes.
    #[inline]
    pub fn short_bytes(&mut self, bytes: &[u8]) -> Result<(), Code> {
        let n = u16::try_from(bytes.len()).map_err(|_| Code::TooBig)?;
        self.u16(n)?;
        self.put(bytes)
    }

    /// Appends a 32-bit length and the bytes.
    #[inline]
    pub fn long_bytes(&mut self, bytes: &[u8]) -> Result<(), Code> {
        let n = u32::try_from(bytes.len()).map_err(|_| Code::TooBig)?;
        self.u32(n)?;
        self.put(bytes)
    }
}
