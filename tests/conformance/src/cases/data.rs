//! Reading, writing, holes, truncation.

use crate::case::{case, equal, fail, holds, refused, Case};
use crate::door::{count, Door, Verdict};
use libc::{O_APPEND, O_RDONLY, O_RDWR, O_WRONLY};
use std::os::fd::AsRawFd;

pub(super) const CASES: &[Case] = &[
    case!(read_by_another_descriptor_sees_the_write;
        "Data written through one descriptor can be read at once through every other descriptor of the file, in every process."),
    case!(read_at_the_end_gives_nothing;
        "A read at or beyond the end of a file returns 0 bytes, and a read across the end returns the bytes before it."),
    case!(write_beyond_the_end_leaves_a_hole;
        "A write beyond the end leaves a hole that reads as zeros and takes no space."),
    case!(positioned_calls_leave_the_offset; "pread and pwrite do not change the descriptor's offset."),
    case!(vectored_calls_move_all_their_buffers;
        "readv, writev, preadv and pwritev move the bytes of all their buffers, in order."),
    case!(append_writes_at_the_end;
        "With O_APPEND each write lands whole at the end of the file, also when several processes append at the same time."),
    case!(truncate_cuts_and_extends_by_path_and_descriptor;
        "truncate shortens a file, or extends it with zeros, by path and by descriptor."),
    case!(truncate_then_grow_reads_zeros;
        "A truncated file that grows again reads zeros where its old bytes were."),
    case!(truncate_of_what_cannot_be_cut_fails;
        "truncate of a directory fails with EISDIR, and ftruncate of a descriptor that is open for reading only with EINVAL."),
    case!(seek_finds_places_data_and_holes [OwnData];
        "lseek works from start, offset and end, finds data and holes, and fails with EINVAL where the result would be negative."),
    case!(allocate_reserves_extends_and_punches;
        "fallocate reserves space, extends a file unless FALLOC_FL_KEEP_SIZE is set, and punches holes."),
    case!(sync_succeeds; "fsync and fdatasync succeed; they make data more durable only in directories attached with `--durable`."),
    case!(file_of_five_gigabytes_is_addressed; "A file may be larger than 4 GiB."),
    case!(copies_in_the_kernel_move_the_bytes [OneDoor]; "copy_file_range and sendfile copy between files of the pool."),
];

/// Bytes that depend on their position and a seed.
fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

fn read_by_another_descriptor_sees_the_write(door: &dyn Door) -> Verdict {
    let writer = door.create("f")?;
    let reader = door.open("f", O_RDONLY, 0)?;
    let mut all = Vec::new();
    for (i, length) in [1, 10, 4095, 4096, 4097, 70_000, 1 << 20].into_iter().enumerate() {
        let bytes = pattern(i as u8, length);
        equal(door.write(&writer, &bytes)?, length)?;
        equal(door.drain(&reader)?, bytes.clone())?;
        all.extend(bytes);
        equal(door.stat("f")?.size, all.len() as i64)?;
    }
    holds(door.get("f")? == all, "the whole file is what was written")?;
    equal(door.write(&writer, b"")?, 0)
}

fn read_at_the_end_gives_nothing(door: &dyn Door) -> Verdict {
    door.put("f", b"12345")?;
    let fd = door.open("f", O_RDONLY, 0)?;
    let mut buffer = [0; 10];
    equal(door.read_at(&fd, &mut buffer, 5)?, 0)?;
    equal(door.read_at(&fd, &mut buffer, 1 << 40)?, 0)?;
    equal(door.read_at(&fd, &mut buffer, 3)?, 2)?;
    equal(&buffer[..2], b"45")?;
    equal(door.read(&fd, &mut buffer)?, 5)?;
    equal(door.read(&fd, &mut buffer)?, 0)
}

fn write_beyond_the_end_leaves_a_hole(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.write_at(&fd, b"end", 64 << 20)?;
    let stat = door.stat("f")?;
    equal(stat.size, (64 << 20) + 3)?;
    holds(stat.blocks * 512 <= 4 << 20, "64 MiB of hole take no more than one huge page and some")?;
    let mut buffer = vec![1; 4096];
    equal(door.read_at(&fd, &mut buffer, 32 << 20)?, 4096)?;
    holds(buffer.iter().all(|b| *b == 0), "the hole reads as zeros")?;
    let mut end = [1; 8];
    equal(door.read_at(&fd, &mut end, (64 << 20) - 2)?, 5)?;
    equal(&end[..5], b"\0\0end")
}

fn positioned_calls_leave_the_offset(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.write(&fd, b"0123456789")?;
    door.seek(&fd, 4, libc::SEEK_SET)?;
    door.write_at(&fd, b"x", 0)?;
    let mut one = [0];
    door.read_at(&fd, &mut one, 9)?;
    equal(&one, b"9")?;
    equal(door.seek(&fd, 0, libc::SEEK_CUR)?, 4)?;
    equal(door.drain(&fd)?, b"456789".to_vec())
}

fn vectored_calls_move_all_their_buffers(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    let parts: [&[u8]; 3] = [b"one", b"", b"three"];
    let out = parts.map(|p| libc::iovec { iov_base: p.as_ptr() as *mut _, iov_len: p.len() });
    // SAFETY: the vectors name bytes of ours that the kernel only reads.
    equal(count(unsafe { libc::writev(fd.as_raw_fd(), out.as_ptr(), 3) })?, 8)?;
    // SAFETY: as above.
    equal(count(unsafe { libc::pwritev(fd.as_raw_fd(), out.as_ptr(), 3, 20) })?, 8)?;
    let (mut a, mut b) = ([0_u8; 2], [0_u8; 30]);
    let into = [
        libc::iovec { iov_base: a.as_mut_ptr().cast(), iov_len: a.len() },
        libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() },
    ];
    door.seek(&fd, 0, libc::SEEK_SET)?;
    // SAFETY: the vectors name buffers of ours.
    equal(count(unsafe { libc::readv(fd.as_raw_fd(), into.as_ptr(), 2) })?, 28)?;
    equal((&a, &b[..6]), (b"on", b"ethree".as_slice()))?;
    // SAFETY: as above.
    equal(count(unsafe { libc::preadv(fd.as_raw_fd(), into.as_ptr(), 2, 20) })?, 8)?;
    equal((&a, &b[..6]), (b"on", b"ethree".as_slice()))
}

fn append_writes_at_the_end(door: &dyn Door) -> Verdict {
    door.put("f", b"0")?;
    let one = door.open("f", O_WRONLY | O_APPEND, 0)?;
    let two = door.open("f", O_RDWR | O_APPEND, 0)?;
    for _ in 0..3 {
        door.write(&one, b"1")?;
        door.write(&two, b"2")?;
    }
    door.seek(&one, 0, libc::SEEK_SET)?;
    door.write(&one, b"!")?;
    equal(door.get("f")?, b"0121212!".to_vec())
}

fn truncate_cuts_and_extends_by_path_and_descriptor(door: &dyn Door) -> Verdict {
    door.put("f", &pattern(1, 10_000))?;
    let fd = door.open("f", O_RDWR, 0)?;
    door.truncate(b"f", 5000)?;
    equal(door.get("f")?, pattern(1, 10_000)[..5000].to_vec())?;
    door.truncate_handle(&fd, 3)?;
    equal(door.stat("f")?.size, 3)?;
    door.truncate(b"f", 6)?;
    equal(door.get("f")?, [&pattern(1, 3)[..], &[0, 0, 0]].concat())?;
    door.truncate_handle(&fd, 1 << 20)?;
    equal(door.stat_handle(fd.as_raw_fd())?.size, 1 << 20)?;
    door.truncate(b"f", 0)?;
    equal(door.stat("f")?.blocks, 0)?;
    refused(door.truncate(b"f", -1), libc::EINVAL)?;
    refused(door.truncate_handle(&fd, -1), libc::EINVAL)?;
    refused(door.truncate(b"none", 0), libc::ENOENT)
}

fn truncate_then_grow_reads_zeros(door: &dyn Door) -> Verdict {
    door.put("f", &[9; 20_000])?;
    for cut in [10_001, 4096, 1] {
        door.truncate(b"f", cut)?;
        door.truncate(b"f", 20_000)?;
        let bytes = door.get("f")?;
        holds(bytes[..cut as usize].iter().all(|b| *b == 9), "what was before the cut stays")?;
        holds(bytes[cut as usize..].iter().all(|b| *b == 0), "what was behind the cut is zero")?;
    }
    Ok(())
}

fn truncate_of_what_cannot_be_cut_fails(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("f", b"abc")?;
    refused(door.truncate(b"d", 0), libc::EISDIR)?;
    let reader = door.open("f", O_RDONLY, 0)?;
    refused(door.truncate_handle(&reader, 0), libc::EINVAL)?;
    equal(door.get("f")?, b"abc".to_vec())
}

fn seek_finds_places_data_and_holes(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    let mib = 1 << 20;
    door.write_at(&fd, &[1; 4096], 8 * mib)?;
    equal(door.seek(&fd, 10, libc::SEEK_SET)?, 10)?;
    equal(door.seek(&fd, 5, libc::SEEK_CUR)?, 15)?;
    equal(door.seek(&fd, -96, libc::SEEK_END)?, 8 * mib + 4000)?;
    refused(door.seek(&fd, -1, libc::SEEK_SET), libc::EINVAL)?;
    refused(door.seek(&fd, -(9 * mib), libc::SEEK_END), libc::EINVAL)?;
    let data = door.seek(&fd, 0, libc::SEEK_DATA)?;
    holds(data <= 8 * mib && data > 0, "data is found at its place or the start of its page")?;
    equal(door.seek(&fd, 0, libc::SEEK_HOLE)?, 0)?;
    holds(door.seek(&fd, 8 * mib, libc::SEEK_HOLE)? >= 8 * mib + 4096, "the next hole is behind the data")?;
    refused(door.seek(&fd, 9 * mib, libc::SEEK_DATA), libc::ENXIO)
}

fn allocate_reserves_extends_and_punches(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    let kib = 1024;
    door.allocate(&fd, 0, 0, 256 * kib)?;
    let stat = door.stat("f")?;
    equal(stat.size, 256 * kib)?;
    holds(stat.blocks * 512 >= 256 * kib, "the space is reserved")?;
    door.allocate(&fd, libc::FALLOC_FL_KEEP_SIZE, 256 * kib, 256 * kib)?;
    equal(door.stat("f")?.size, 256 * kib)?;
    door.write_at(&fd, &[5; 128 * 1024], 0)?;
    door.allocate(&fd, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 32 * kib, 64 * kib)?;
    let bytes = door.get("f")?;
    holds(bytes[32 * 1024..96 * 1024].iter().all(|b| *b == 0), "the punched range is zero")?;
    holds(bytes[..32 * 1024].iter().chain(&bytes[96 * 1024..128 * 1024]).all(|b| *b == 5), "the rest stays")?;
    refused(door.allocate(&fd, 0, 0, 0), libc::EINVAL)
}

fn sync_succeeds(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    door.write(&fd, b"x")?;
    door.sync(&fd, false)?;
    door.sync(&fd, true)?;
    door.make_directory("d")?;
    let dir = door.open("d", O_RDONLY | libc::O_DIRECTORY, 0)?;
    door.sync(&dir, false)?;
    Ok(())
}

fn file_of_five_gigabytes_is_addressed(door: &dyn Door) -> Verdict {
    let fd = door.create("f")?;
    let far = 5 << 30;
    door.truncate_handle(&fd, far)?;
    door.write_at(&fd, b"tail", far - 4)?;
    door.write_at(&fd, b"over", far)?;
    equal(door.stat("f")?.size, far + 4)?;
    equal(door.seek(&fd, -8, libc::SEEK_END)?, far - 4)?;
    equal(door.drain(&fd)?, b"tailover".to_vec())
}

fn copies_in_the_kernel_move_the_bytes(door: &dyn Door) -> Verdict {
    let bytes = pattern(3, 300_000);
    door.put("from", &bytes)?;
    let from = door.open("from", O_RDONLY, 0)?;
    let mut rest = bytes.len();
    let to = door.create("ranged")?;
    while rest > 0 {
        let null = std::ptr::null_mut();
        // SAFETY: no offsets are passed, so the descriptors' own are used.
        let call = unsafe { libc::copy_file_range(from.as_raw_fd(), null, to.as_raw_fd(), null, rest, 0) };
        match count(call)? {
            0 => return fail("copy_file_range stopped before the end".into()),
            n => rest -= n,
        }
    }
    holds(door.get("ranged")? == bytes, "copy_file_range copied the bytes")?;
    let to = door.create("sent")?;
    let (mut offset, mut rest) = (0, bytes.len());
    while rest > 0 {
        // SAFETY: the offset is ours.
        match count(unsafe { libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), &mut offset, rest) })? {
            0 => return fail("sendfile stopped before the end".into()),
            n => rest -= n,
        }
    }
    holds(door.get("sent")? == bytes, "sendfile copied the bytes")
}
