//! The symbolic link in the pool's directory that records where the pool is mounted. The mount's process writes it; the
//! other interfaces read it.

/// The link's name. Its contents are not a path: the link is read, not followed.
pub const MOUNT_LINK: &str = "mounted";

/// The contents of the link: the device number of the mount's files, and the mount point.
pub fn mount_link(device: u64, at: &[u8]) -> Vec<u8> {
    [format!("{device}:").as_bytes(), at].concat()
}

/// Device number and mount point in a link's contents; none for contents that are not of this form.
pub fn mount_of_link(link: &[u8]) -> Option<(u64, &[u8])> {
    let colon = link.iter().position(|b| *b == b':')?;
    let (device, at) = (link.get(..colon)?, link.get(colon + 1..)?);
    let device = std::str::from_utf8(device).ok()?.parse().ok().filter(|device| *device != 0)?;
    (at.first() == Some(&b'/')).then_some((device, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_of_something_else_is_no_mount() {
        for link in [
            "",
            "/mnt",
            "47",
            "47:",
            "47:mnt",
            ":/mnt",
            "-1:/mnt",
            "0:/mnt",
            "4x:/mnt",
            "99999999999999999999:/m",
        ] {
            assert_eq!(mount_of_link(link.as_bytes()), None, "{link}");
        }
        assert_eq!(mount_of_link(b"3:/a:b"), Some((3, b"/a:b".as_slice())));
    }
}
