//! The mount table: `/proc/.../mountinfo`; see proc_pid_mountinfo(5).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A line of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// The mount's number.
    pub id: u64,
    /// The number of the mount beneath it: another one on the same directory if there are several.
    pub parent_id: u64,
    /// Device number of the file system, as `st_dev` shows it: major and minor.
    pub device: (u32, u32),
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// `tmpfs`, `ext4`, `fuse.sshfs`, ....
    pub fs_type: String,
    /// The source that was given to mount: a device, a server, any text.
    pub source: String,
    /// Options of the file system: `rw`, `size=...`, `huge=...`.
    pub options: Vec<String>,
}

impl Mount {
    /// The value of option `key`; empty for a flag.
    pub fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find_map(|option| match option.split_once('=') {
            Some((name, value)) if name == key => Some(value),
            None if option == key => Some(""),
            _ => None,
        })
    }
}

/// The mounts that this thread sees. Their order does not show which lies over which.
pub fn own() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/thread-self/mountinfo")?))
}

/// The mounts in a table, in its order. Lines that cannot be parsed are left out. Paths may have bytes that are not
/// UTF-8.
pub fn parse(bytes: &[u8]) -> Vec<Mount> {
    bytes.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    // Blanks within a field are escaped, so a field `-` ends the optional fields.
    let mut fields = line.split(|&b| b == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent_id) = (number()?, number()?);
    let device = std::str::from_utf8(fields.next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
    fields.by_ref().find(|&field| field == b"-")?;
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let (fs_type, source) = (text(fields.next()?), unescape(fields.next()?));
    let options = text(fields.next().unwrap_or_default()).split(',').map(str::to_owned).collect();
    Some(Mount {
        id,
        parent_id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: root.into(),
        point: point.into(),
        fs_type,
        source: source.to_string_lossy().into_owned(),
        options,
    })
}

/// Decodes octal escapes such as `\040`: of blanks, tabs, newlines and backslashes.
fn unescape(bytes: &[u8]) -> OsString {
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\').and_then(|digits| {
            digits
                .iter()
                .try_fold(0u32, |value, d| matches!(d, b'0'..=b'7').then(|| value * 8 + (d - b'0') as u32))
        });
        match octal.and_then(|value| u8::try_from(value).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_escapes_optional_fields_and_flags_are_understood() {
        let text = "30 25 0:27 / /mnt/a\\040b\\134c rw,nosuid shared:9 master:1 - tmpfs forebay rw,size=4k,inode64\n\
                    nonsense\n\
                    31 23 8:1 /sub / rw,relatime - ext4 /dev/sda1 rw\n\
                    61 28 0:47 / /mnt/a\\040b rw,nosuid shared:1 - fuse.forebay /tmp/p\\134q rw,user_id=0\n";
        let mounts = parse(text.as_bytes());
        assert_eq!(mounts.len(), 3);
        assert_eq!((mounts[0].id, mounts[0].parent_id), (30, 25));
        assert_eq!(mounts[0].point, PathBuf::from("/mnt/a b\\c"));
        assert_eq!((mounts[0].device, mounts[0].fs_type.as_str()), ((0, 27), "tmpfs"));
        assert_eq!(mounts[0].source, "forebay");
        assert_eq!(mounts[0].option("size"), Some("4k"));
        assert_eq!(mounts[0].option("inode64"), Some(""));
        assert_eq!(mounts[0].option("huge"), None);
        assert_eq!(mounts[1].root, PathBuf::from("/sub"));
        assert_eq!((mounts[2].fs_type.as_str(), mounts[2].source.as_str()), ("fuse.forebay", "/tmp/p\\q"));
        assert_eq!((mounts[2].point.as_path(), mounts[2].device), ("/mnt/a b".as_ref(), (0, 47)));
    }

    #[test]
    fn parse_paths_that_are_not_utf_8_keep_their_bytes() {
        let mounts =
            parse(b"30 25 0:27 / /mnt/p\xffq rw - tmpfs forebay rw\n31 23 8:1 / / rw - ext4 /dev/sda1 rw\n");
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].point.as_os_str().as_encoded_bytes(), b"/mnt/p\xffq");
    }

    #[test]
    fn parse_own_mountinfo_has_a_root() {
        let text = std::fs::read("/proc/thread-self/mountinfo").unwrap();
        let mounts = parse(&text);
        assert_eq!(mounts.len(), text.iter().filter(|&&b| b == b'\n').count());
        assert!(mounts.iter().any(|m| m.point == std::path::Path::new("/")));
        assert_eq!(own().unwrap().len(), mounts.len());
    }
}
