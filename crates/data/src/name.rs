//! Names of backing files and anchors, relative to their target's directory.
//!
//! A backing file is `data/<low byte of the inode number>/<inode number>`, both in lower-case hex, if its number and
//! its stripe are 0. This short name is that of the one backing file of a single-stripe layout. Backing files of other
//! layouts append `.<number>.<stripe>` in decimal. The number is the component's index plus one
//! (`Layout::file_number`). An anchor is an empty directory that is removed at once and stands for a directory of the
//! pool in a descriptor, or a symbolic link that stands for one. Its name is
//! `anchors/<inode number>.<process>.<number>`. Numbers have exactly one spelling: names with leading zeros or capitals
//! are not accepted.
//!
//! Clients make and parse these names in signal handlers and after fork, so no code here allocates, locks or panics.

use std::ffi::CStr;
use std::fmt;

use forebay_types::Ino;

/// Directory of a target that holds the backing files, in 256 subdirectories.
pub const DATA_DIRECTORY: &CStr = c"data";
/// Directory of a target that holds anchors.
pub const ANCHORS_DIRECTORY: &CStr = c"anchors";
/// Directory of a node's first target that holds the shard.
pub const SHARD_DIRECTORY: &CStr = c"shard";

/// The suffix of an unlinked file's name in `/proc/self/fd` and `/proc/self/maps`.
const DELETED: &[u8] = b" (deleted)";
const HEX: &[u8; 16] = b"0123456789abcdef";
const INO_DIGITS: usize = 16;

/// The longest name: `anchors/` or `data/xx/`, 16 digits, twice a dot and 20 digits, and the NUL.
const NAME_BYTES: usize = 72;

/// A NUL-terminated relative path on the stack.
#[derive(Clone, Copy)]
struct Name {
    bytes: [u8; NAME_BYTES],
    len: u8,
}

impl Name {
    const fn empty() -> Name {
        Name { bytes: [0; NAME_BYTES], len: 0 }
    }

    #[inline]
    fn push(&mut self, text: &[u8]) {
        let at = self.len as usize;
        self.bytes[at..at + text.len()].copy_from_slice(text);
        self.len += text.len() as u8;
    }

    #[inline]
    fn push_ino(&mut self, ino: Ino) {
        let at = self.len as usize;
        for (i, byte) in ino.0.to_be_bytes().iter().enumerate() {
            self.bytes[at + 2 * i] = HEX[(byte >> 4) as usize];
            self.bytes[at + 2 * i + 1] = HEX[(byte & 15) as usize];
        }
        self.len += INO_DIGITS as u8;
    }

    #[inline]
    fn push_decimal(&mut self, mut value: u64) {
        let mut digits = [0; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                break;
            }
        }
        self.push(&digits[first..]);
    }

    #[inline]
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }

    #[inline]
    fn as_c_str(&self) -> &CStr {
        let with_nul = &self.bytes[..=self.len as usize];
        // SAFETY: the pushes write no NUL and stop before the last byte. The byte after them is still zero from
        // `empty`, so the slice ends with its only NUL.
        unsafe { CStr::from_bytes_with_nul_unchecked(with_nul) }
    }
}

/// The path of a backing file, relative to its target's directory.
///
/// ```
/// use forebay_data::BackingName;
/// use forebay_types::Ino;
/// assert_eq!(BackingName::new(Ino(0x1_0000_0000_00ab), 0, 0).as_bytes(), b"data/ab/00010000000000ab");
/// assert_eq!(BackingName::new(Ino(0xab), 1, 12).as_bytes(), b"data/ab/00000000000000ab.1.12");
/// ```
#[derive(Clone, Copy)]
pub struct BackingName(Name);

impl BackingName {
    /// The path of stripe `stripe` of component `component` of the file `ino`.
    #[inline]
    pub fn new(ino: Ino, component: usize, stripe: u16) -> BackingName {
        let mut name = Name::empty();
        let low = ino.0 as u8;
        name.push(b"data/");
        name.push(&[HEX[(low >> 4) as usize], HEX[(low & 15) as usize], b'/']);
        name.push_ino(ino);
        if (component, stripe) != (0, 0) {
            name.push(b".");
            name.push_decimal(component as u64);
            name.push(b".");
            name.push_decimal(stripe as u64);
        }
        BackingName(name)
    }

    /// The path, for a system call relative to the target's descriptor.
    #[inline]
    pub fn as_c_str(&self) -> &CStr {
        self.0.as_c_str()
    }

    /// The path without its NUL.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The inode number, component and stripe in the last part of `path`, which may have the suffix ` (deleted)` of
    /// `/proc/self/fd`. None if it is not the name of a backing file. Directories before it, if any, must end in
    /// `data/<low byte>`. Only the file's device number shows whether the file belongs to this pool.
    pub fn parse(path: &[u8]) -> Option<(Ino, usize, u16)> {
        let path = path.strip_suffix(DELETED).unwrap_or(path);
        let (directory, name) = split(path);
        let (ino, rest) = parse_ino(name)?;
        if let Some(directory) = directory {
            let low = ino.0 as u8;
            let (above, last) = split(directory);
            if last != [HEX[(low >> 4) as usize], HEX[(low & 15) as usize]] || split(above?).1 != b"data" {
                return None;
            }
        }
        if rest.is_empty() {
            return Some((ino, 0, 0));
        }
        let (component, stripe) = parse_pair(rest)?;
        let (component, stripe) = (usize::try_from(component).ok()?, u16::try_from(stripe).ok()?);
        if (component, stripe) == (0, 0) {
            return None;
        }
        Some((ino, component, stripe))
    }
}

impl fmt::Debug for BackingName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackingName({})", String::from_utf8_lossy(self.as_bytes()))
    }
}

/// The path of an anchor, relative to its target's directory.
///
/// ```
/// use forebay_data::AnchorName;
/// use forebay_types::Ino;
/// assert_eq!(AnchorName::new(Ino(0xab), 4711, 3).as_bytes(), b"anchors/00000000000000ab.4711.3");
/// assert_eq!(AnchorName::parse(b"00000000000000ab.4711.3"), Some(Ino(0xab)));
/// ```
#[derive(Clone, Copy)]
pub struct AnchorName(Name);

impl AnchorName {
    /// The path of the `number`-th anchor that process `pid` makes for the file `ino`.
    #[inline]
    pub fn new(ino: Ino, pid: u32, number: u64) -> AnchorName {
        let mut name = Name::empty();
        name.push(b"anchors/");
        name.push_ino(ino);
        name.push(b".");
        name.push_decimal(pid as u64);
        name.push(b".");
        name.push_decimal(number);
        AnchorName(name)
    }

    /// The path, for a system call relative to the target's descriptor.
    #[inline]
    pub fn as_c_str(&self) -> &CStr {
        self.0.as_c_str()
    }

    /// The path without its NUL.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The inode number in the last part of `path`, which may have the suffix ` (deleted)`. None if it is not the name
    /// of an anchor. Directories before it, if any, must end in `anchors`.
    pub fn parse(path: &[u8]) -> Option<Ino> {
        AnchorName::parse_all(path).map(|(ino, ..)| ino)
    }

    /// As [`AnchorName::parse`], with the process that made the anchor and the anchor's number there.
    pub fn parse_all(path: &[u8]) -> Option<(Ino, u32, u64)> {
        let path = path.strip_suffix(DELETED).unwrap_or(path);
        let (directory, name) = split(path);
        if directory.is_some_and(|d| split(d).1 != b"anchors") {
            return None;
        }
        let (ino, rest) = parse_ino(name)?;
        let (pid, number) = parse_pair(rest)?;
        Some((ino, u32::try_from(pid).ok()?, number))
    }
}

impl fmt::Debug for AnchorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnchorName({})", String::from_utf8_lossy(self.as_bytes()))
    }
}

/// The bytes before the last slash, if there is one, and those after it.
fn split(path: &[u8]) -> (Option<&[u8]>, &[u8]) {
    match path.iter().rposition(|&b| b == b'/') {
        Some(at) => (Some(&path[..at]), &path[at + 1..]),
        None => (None, path),
    }
}

fn parse_ino(name: &[u8]) -> Option<(Ino, &[u8])> {
    let (digits, rest) = name.split_at_checked(INO_DIGITS)?;
    let mut value = 0;
    for &digit in digits {
        let nibble = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        value = value << 4 | nibble as u64;
    }
    Some((Ino(value), rest))
}

/// The two numbers of `.<number>.<number>`.
fn parse_pair(text: &[u8]) -> Option<(u64, u64)> {
    let text = text.strip_prefix(b".")?;
    let dot = text.iter().position(|&b| b == b'.')?;
    Some((parse_decimal(&text[..dot])?, parse_decimal(&text[dot + 1..])?))
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits[0] == b'0' && digits.len() > 1 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| {
        if !digit.is_ascii_digit() {
            return None;
        }
        value.checked_mul(10)?.checked_add((digit - b'0') as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn new_longest_numbers_fit_and_end_with_nul() {
        let name = BackingName::new(Ino(u64::MAX), usize::MAX, u16::MAX);
        assert_eq!(name.as_c_str().to_bytes(), b"data/ff/ffffffffffffffff.18446744073709551615.65535");
        let anchor = AnchorName::new(Ino(u64::MAX), u32::MAX, u64::MAX);
        assert_eq!(anchor.as_c_str().to_bytes(), b"anchors/ffffffffffffffff.4294967295.18446744073709551615");
    }

    #[test]
    fn new_stripe_zero_of_a_later_component_has_a_suffix() {
        assert_eq!(BackingName::new(Ino(1), 1, 0).as_bytes(), b"data/01/0000000000000001.1.0");
        assert_eq!(BackingName::new(Ino(1), 0, 1).as_bytes(), b"data/01/0000000000000001.0.1");
    }

    #[test]
    fn parse_paths_of_proc_are_understood() {
        let want = Some((Ino(0xab), 0, 0));
        for path in [
            "00000000000000ab",
            "00000000000000ab (deleted)",
            "data/ab/00000000000000ab",
            "/data/ab/00000000000000ab",
            "/dev/shm/pool/data/ab/00000000000000ab (deleted)",
        ] {
            assert_eq!(BackingName::parse(path.as_bytes()), want, "{path}");
        }
        assert_eq!(
            AnchorName::parse_all(b"/pool/anchors/00000000000000ab.7.9 (deleted)"),
            Some((Ino(0xab), 7, 9))
        );
    }

    #[test]
    fn parse_what_is_not_spelled_as_we_do_is_refused() {
        for path in [
            "",
            "00000000000000a",
            "00000000000000AB",
            "00000000000000abc",
            "00000000000000ab.",
            "00000000000000ab.0",
            "00000000000000ab.0.0",
            "00000000000000ab.0.01",
            "00000000000000ab.+1.1",
            "00000000000000ab.0.65536",
            "00000000000000ab.0.1.2",
            "00000000000000ab.99999999999999999999.1",
            "00000000000000ab (deleted) (deleted)",
            "/data/ac/00000000000000ab",
            "/date/ab/00000000000000ab",
            "ab/00000000000000ab",
            "/00000000000000ab",
            "data/ab/",
        ] {
            assert_eq!(BackingName::parse(path.as_bytes()), None, "{path}");
        }
        for path in [
            "00000000000000ab",
            "00000000000000ab.1",
            "data/00000000000000ab.1.1",
            "00000000000000ab.4294967296.1",
        ] {
            assert_eq!(AnchorName::parse(path.as_bytes()), None, "{path}");
        }
    }

    proptest! {
        #[test]
        fn parse_of_new_gives_the_numbers_back(ino: u64, component: usize, stripe: u16, pid: u32, number: u64) {
            let name = BackingName::new(Ino(ino), component, stripe);
            prop_assert_eq!(BackingName::parse(name.as_bytes()), Some((Ino(ino), component, stripe)));
            prop_assert_eq!(name.as_c_str().to_bytes(), name.as_bytes());
            let format = format!("data/{:02x}/{:016x}", ino as u8, ino);
            prop_assert!(name.as_bytes().starts_with(format.as_bytes()));
            let anchor = AnchorName::new(Ino(ino), pid, number);
            prop_assert_eq!(AnchorName::parse_all(anchor.as_bytes()), Some((Ino(ino), pid, number)));
            prop_assert_eq!(BackingName::parse(anchor.as_bytes()), None);
        }

        #[test]
        fn parse_of_any_bytes_gives_only_what_new_would_make(tail in "[0-9a-f]{14,18}([.][0-9]{0,3}){0,3}") {
            if let Some((ino, component, stripe)) = BackingName::parse(tail.as_bytes()) {
                let name = BackingName::new(ino, component, stripe);
                prop_assert!(name.as_bytes().ends_with(tail.as_bytes()));
            }
        }
    }
}
