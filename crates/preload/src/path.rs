//! Paths as bytes: an uninitialized buffer on the stack, and helpers for C strings.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::raw::c_char;

use crate::abi::PATH_BYTES;

/// Room for a path and its NUL. Only the code that filled it knows which bytes are initialized.
pub(crate) struct Buffer(MaybeUninit<[u8; PATH_BYTES]>);

impl Buffer {
    /// An uninitialized buffer.
    #[inline(always)]
    pub(crate) fn new() -> Buffer {
        Buffer(MaybeUninit::uninit())
    }

    /// Its first byte, writable.
    pub(crate) fn first(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// Its first byte, readable.
    pub(crate) fn as_c(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }

    /// Stores the parts in sequence, and a NUL. False when they do not fit. Parts must not be in the buffer.
    pub(crate) fn set(&mut self, parts: &[&[u8]]) -> bool {
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        if bytes >= PATH_BYTES {
            return false;
        }
        let mut out = self.first();
        for part in parts {
            // SAFETY: all parts and the NUL fit.
            unsafe {
                out.copy_from_nonoverlapping(part.as_ptr(), part.len());
                out = out.add(part.len());
            }
        }
        // SAFETY: as above.
        unsafe { out.write(0) };
        true
    }
}

/// True for a pointer to where no program has memory: null, the first page, and the kernel's half. The kernel returns
/// EFAULT for it. Only an access shows whether other memory is readable.
#[inline(always)]
pub(crate) fn is_wild<T>(pointer: *const T) -> bool {
    const PAGE_BYTES: usize = 4096;
    // On x86 addresses in the kernel's half are negative numbers. Elsewhere programs may keep tags in the highest bits.
    if cfg!(target_arch = "x86_64") {
        (pointer as isize) < PAGE_BYTES as isize
    } else {
        (pointer as usize) < PAGE_BYTES
    }
}

/// A C string's bytes.
///
/// # Safety
/// `path` is a C string that lives as long as the result.
#[inline]
pub(crate) unsafe fn bytes<'a>(path: *const c_char) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(path) }.to_bytes()
}

/// True when `haystack` contains `needle`.
pub(crate) fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len().max(1)).any(|w| w == needle)
}

/// True when `component` is one of the path's components.
pub(crate) fn has_component(path: &[u8], component: &[u8]) -> bool {
    path.split(|b| *b == b'/').any(|name| name == component)
}

/// The rest of `path` behind `prefix`, when it is at or under the prefix: empty, or starting with a slash.
pub(crate) fn below<'a>(path: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    let rest = path.strip_prefix(prefix)?;
    matches!(rest.first(), None | Some(b'/')).then_some(rest)
}

/// The decimal digits of a number that is not negative.
pub(crate) fn digits(number: i32, out: &mut [u8; 12]) -> &[u8] {
    let (mut at, mut rest) = (out.len(), number.unsigned_abs());
    loop {
        at -= 1;
        out[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            return &out[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_component_requires_a_whole_one() {
        for (path, expected) in [
            ("/forebay", true),
            ("forebay", true),
            ("/a/forebay/b", true),
            ("//forebay//", true),
            ("/forebays/x/forebay", true),
            ("/x-forebay/forebay-y/forebayforebay", false),
            ("/a/b", false),
            ("", false),
        ] {
            assert_eq!(has_component(path.as_bytes(), b"forebay"), expected, "{path}");
        }
    }

    #[test]
    fn below_of_a_longer_name_is_none() {
        assert_eq!(below(b"/forebay", b"/forebay"), Some(b"".as_slice()));
        assert_eq!(below(b"/forebay/a", b"/forebay"), Some(b"/a".as_slice()));
        assert_eq!(below(b"/forebays", b"/forebay"), None);
        assert_eq!(below(b"/fore", b"/forebay"), None);
    }

    #[test]
    fn set_of_parts_that_do_not_fit_is_refused() {
        let mut buffer = Buffer::new();
        assert!(buffer.set(&[b"/a", b"/b"]));
        // SAFETY: just set.
        assert_eq!(unsafe { bytes(buffer.as_c()) }, b"/a/b");
        assert!(buffer.set(&[&[b'x'; PATH_BYTES - 1]]));
        assert!(!buffer.set(&[&[b'x'; PATH_BYTES - 1], b"y"]));
    }
}
