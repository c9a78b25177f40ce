//! Where a pool is mounted, as the mount's process tells the other interfaces: a symbolic link in the pool's directory.

/// The link's name. What it holds is no path: it is read, not followed.
pub const MOUNT_LINK: &str = "mounted";

/// What the link of a mount holds: the device number that its files show, and where it is mounted.
///
/// ```
/// use forebay_types::{mount_link, mount_of_link};
/// let link = mount_link(47, b"/mnt/pool");
/// assert_eq!(link, b"47:/mnt/pool");
/// assert_eq!(mount_of_link(&link), Some((47, b"/mnt/pool".as_slice())));
/// ```
pub fn mount_link(device: u64, at: &[u8]) -> Vec<u8> {
    [format!("{device}:").as_bytes(), at].concat()
}

/// Device number and mount point of a link; none when it is no such link.
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
