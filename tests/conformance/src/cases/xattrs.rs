//! Extended attributes.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Door, Verdict};
use libc::{O_RDWR, XATTR_CREATE, XATTR_REPLACE};
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(xattr_is_set_read_listed_and_removed [Xattrs];
        "Attributes named `user.` can be set, read, listed and removed on files and directories, by path and by descriptor."),
    case!(xattr_value_may_be_empty [Xattrs];
        "A value may have up to 65,536 bytes, and may be empty; a longer one fails with E2BIG."),
    case!(xattr_value_may_be_large [LargeXattrs];
        "A value may have up to 65,536 bytes, and may be empty; a longer one fails with E2BIG."),
    case!(xattr_create_and_replace_are_held_to [Xattrs];
        "XATTR_CREATE fails with EEXIST on an existing attribute, and XATTR_REPLACE with ENODATA on an absent one."),
    case!(xattr_absent_or_short_buffer_is_told [Xattrs];
        "An absent attribute fails with ENODATA and a buffer that is too small with ERANGE; with an empty buffer the call returns the size."),
    case!(xattr_on_a_symlink_fails [Xattrs];
        "A `user.` attribute on a symbolic link fails with EPERM."),
    case!(xattr_of_a_bad_name_fails [Xattrs];
        "An attribute's name of more than 255 bytes fails with ERANGE, and one of an unknown kind with EOPNOTSUPP."),
];

fn xattr_is_set_read_listed_and_removed(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.make_directory("d")?;
    let mut buffer = [0; 500];
    for path in [b"f", b"d"] {
        door.set_xattr(path, true, b"user.one", b"1", 0)?;
        door.set_xattr(path, true, b"user.two", b"\0\xff", 0)?;
        door.set_xattr(path, true, b"user.one", b"first", 0)?;
        let n = door.get_xattr(path, true, b"user.one", &mut buffer)?;
        equal(&buffer[..n], b"first")?;
        let n = door.get_xattr(path, true, b"user.two", &mut buffer)?;
        equal(&buffer[..n], b"\0\xff")?;
        let n = door.list_xattr(path, true, &mut buffer)?;
        let mut names: Vec<_> =
            buffer[..n].split(|b| *b == 0).filter(|name| name.starts_with(b"user.")).collect();
        names.sort();
        equal(names, vec![b"user.one".as_slice(), b"user.two"])?;
        door.remove_xattr(path, true, b"user.one")?;
        refused(door.get_xattr(path, true, b"user.one", &mut buffer), libc::ENODATA)?;
    }
    let fd = door.open("f", O_RDWR, 0)?;
    let fd = fd.as_raw_fd();
    door.set_xattr_handle(fd, b"user.three", b"3", 0)?;
    let n = door.get_xattr_handle(fd, b"user.three", &mut buffer)?;
    equal(&buffer[..n], b"3")?;
    let n = door.list_xattr_handle(fd, &mut buffer)?;
    holds(buffer[..n].windows(11).any(|w| w == b"user.three\0"), "the list names it")?;
    // All names of one inode see it, and a rename keeps it.
    door.link("f", "g")?;
    door.rename("f", "h")?;
    equal(door.get_xattr(b"g", true, b"user.three", &mut buffer)?, 1)?;
    equal(door.get_xattr(b"h", true, b"user.three", &mut buffer)?, 1)?;
    door.remove_xattr_handle(fd, b"user.three")?;
    refused(door.get_xattr(b"h", true, b"user.three", &mut buffer), libc::ENODATA)
}

fn xattr_value_may_be_empty(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.set_xattr(b"f", true, b"user.empty", b"", 0)?;
    equal(door.get_xattr(b"f", true, b"user.empty", &mut [0; 8])?, 0)?;
    refused(door.set_xattr(b"f", true, b"user.over", &[0; 65_537], 0), libc::E2BIG)
}

fn xattr_value_may_be_large(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    let value: Vec<u8> = (0..65_536).map(|i| (i * 7) as u8).collect();
    door.set_xattr(b"f", true, b"user.large", &value, 0)?;
    let mut back = vec![0; 65_536];
    equal(door.get_xattr(b"f", true, b"user.large", &mut back)?, 65_536)?;
    holds(back == value, "the value is what was set")
}

fn xattr_create_and_replace_are_held_to(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    refused(door.set_xattr(b"f", true, b"user.a", b"1", XATTR_REPLACE), libc::ENODATA)?;
    door.set_xattr(b"f", true, b"user.a", b"1", XATTR_CREATE)?;
    refused(door.set_xattr(b"f", true, b"user.a", b"2", XATTR_CREATE), libc::EEXIST)?;
    door.set_xattr(b"f", true, b"user.a", b"3", XATTR_REPLACE)?;
    let mut one = [0];
    door.get_xattr(b"f", true, b"user.a", &mut one)?;
    equal(&one, b"3")
}

fn xattr_absent_or_short_buffer_is_told(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    refused(door.get_xattr(b"f", true, b"user.none", &mut [0; 8]), libc::ENODATA)?;
    refused(door.remove_xattr(b"f", true, b"user.none"), libc::ENODATA)?;
    door.set_xattr(b"f", true, b"user.a", b"12345678", 0)?;
    equal(door.get_xattr(b"f", true, b"user.a", &mut [])?, 8)?;
    refused(door.get_xattr(b"f", true, b"user.a", &mut [0; 7]), libc::ERANGE)?;
    let size = door.list_xattr(b"f", true, &mut [])?;
    holds(size >= 7, "the size of the list counts the name and its NUL")?;
    refused(door.list_xattr(b"f", true, &mut [0; 3]), libc::ERANGE)?;
    refused(door.get_xattr(b"none", true, b"user.a", &mut [0; 8]), libc::ENOENT)
}

fn xattr_on_a_symlink_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.symlink("f", "s")?;
    refused(door.set_xattr(b"s", false, b"user.a", b"1", 0), libc::EPERM)?;
    door.set_xattr(b"s", true, b"user.a", b"1", 0)?;
    equal(door.get_xattr(b"f", true, b"user.a", &mut [0; 8])?, 1)
}

fn xattr_of_a_bad_name_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    let fits = [b"user.".as_slice(), &[b'n'; 250]].concat();
    let over = [b"user.".as_slice(), &[b'n'; 251]].concat();
    door.set_xattr(b"f", true, &fits, b"1", 0)?;
    equal(door.get_xattr(b"f", true, &fits, &mut [0; 8])?, 1)?;
    refused(door.set_xattr(b"f", true, &over, b"1", 0), libc::ERANGE)?;
    refused(door.get_xattr(b"f", true, &over, &mut [0; 8]), libc::ERANGE)?;
    refused(door.set_xattr(b"f", true, b"", b"1", 0), libc::ERANGE)?;
    refused(door.set_xattr(b"f", true, b"nonsense.a", b"1", 0), libc::EOPNOTSUPP)?;
    refused(door.get_xattr(b"f", true, b"nonsense.a", &mut [0; 8]), libc::EOPNOTSUPP)
}
