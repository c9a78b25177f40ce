//! Messages that a FUSE server writes without a request: the notifications of `linux/fuse.h`.
//!
//! A notification has the header of a reply, with `unique` 0 and the notification's number as `error`.

/// Bytes of `struct fuse_out_header`.
pub const OUT_HEADER_BYTES: usize = 16;

const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;
const DELETE: i32 = 6;
const INC_EPOCH: i32 = 8;

/// `struct fuse_out_header` of a message of `bytes` bytes, including the header. `error` is 0 or a negative errno.
pub fn out_header(bytes: usize, unique: u64, error: i32) -> [u8; OUT_HEADER_BYTES] {
    let mut header = [0; OUT_HEADER_BYTES];
    header[..4].copy_from_slice(&(bytes as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

fn notification(number: i32, parts: &[&[u8]]) -> Vec<u8> {
    let bytes = OUT_HEADER_BYTES + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut message = Vec::with_capacity(bytes);
    message.extend_from_slice(&out_header(bytes, 0, number));
    for part in parts {
        message.extend_from_slice(part);
    }
    message
}

fn length(name: &[u8]) -> [u8; 4] {
    (name.len() as u32).to_ne_bytes()
}

/// `FUSE_NOTIFY_INVAL_INODE`: the kernel drops its cached attributes of an inode, and keeps the inode's pages.
pub fn invalidate_attributes(node: u64) -> Vec<u8> {
    // A negative offset means that no pages are dropped.
    notification(INVAL_INODE, &[&node.to_ne_bytes(), &(-1i64).to_ne_bytes(), &0i64.to_ne_bytes()])
}

/// `FUSE_NOTIFY_INVAL_ENTRY`: the kernel drops its cached entry for a name.
pub fn invalidate_entry(parent: u64, name: &[u8]) -> Vec<u8> {
    notification(INVAL_ENTRY, &[&parent.to_ne_bytes(), &length(name), &[0; 4], name, &[0]])
}

/// `FUSE_NOTIFY_DELETE`: a name that led to `child` was removed; watchers of the directory get their event.
pub fn entry_deleted(parent: u64, child: u64, name: &[u8]) -> Vec<u8> {
    notification(DELETE, &[&parent.to_ne_bytes(), &child.to_ne_bytes(), &length(name), &[0; 4], name, &[0]])
}

/// `FUSE_NOTIFY_INC_EPOCH`: the kernel looks all names up again.
pub fn new_epoch() -> [u8; OUT_HEADER_BYTES] {
    out_header(OUT_HEADER_BYTES, 0, INC_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn header_has_length_error_and_unique_in_this_order() {
        let header = out_header(20, 7, -2);
        assert_eq!(header[..], words(&[&20u32.to_ne_bytes(), &(-2i32).to_ne_bytes(), &7u64.to_ne_bytes()]));
    }

    #[test]
    fn notifications_have_the_layout_of_the_kernels_header() {
        let (five, six) = (5u64.to_ne_bytes(), 6u64.to_ne_bytes());
        assert_eq!(invalidate_attributes(5), words(&[&out_header(40, 0, 2), &five, &[0xff; 8], &[0; 8]]));
        let named = [&3u32.to_ne_bytes()[..], &[0; 4], b"abc\0"].concat();
        assert_eq!(invalidate_entry(5, b"abc"), words(&[&out_header(36, 0, 3), &five, &named]));
        assert_eq!(entry_deleted(5, 6, b"abc"), words(&[&out_header(44, 0, 6), &five, &six, &named]));
        assert_eq!(new_epoch(), out_header(16, 0, 8));
    }
}
