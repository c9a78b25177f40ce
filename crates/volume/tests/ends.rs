//! The end of a volume's file while several extend it, each with mappings of its own as processes have them.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Barrier;

use forebay_types::{target_of, Ino, NodeId, Segment, Targets, Volume};
use forebay_volume::{FileFlags, Life, Mapped, Striped, VolumeFile};

const BYTES: u64 = 1 << 20;

fn memfd(bytes: u64) -> OwnedFd {
    // SAFETY: plain system calls; the descriptor is new and ours.
    unsafe {
        let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0 && libc::ftruncate(fd, bytes as i64) == 0);
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// Opens the file whose piece, head and word of life these are.
fn open(piece: &OwnedFd, head: &OwnedFd, life: &OwnedFd) -> VolumeFile {
    let targets = Targets::new(&[target_of(NodeId(1), 0)]).unwrap();
    let volume = Volume {
        ino: Ino(9),
        uid: 0,
        gid: 0,
        mode: 0o600,
        created_seconds: 0,
        maker: 0,
        complete: 1,
        numbers: vec![0],
        next_number: 1,
        segments: vec![Segment::new(BYTES, BYTES, targets).unwrap()],
    };
    let life = Life::map(life.as_fd()).unwrap();
    let mapped =
        Mapped::new(&volume, true, (Some(life), None), |_, _| Ok(Some(piece.try_clone().unwrap()))).unwrap();
    let volume = Striped::new(vec![mapped.with_head(head.as_fd()).unwrap()]).unwrap();
    VolumeFile::open(volume, FileFlags { reads: true, writes: true, creates: true, ..FileFlags::default() })
        .unwrap()
}

/// Each writes the bytes of its turns. After each of its writes the end is behind it; at last all bytes are there.
#[test]
fn end_never_goes_back_while_several_extend_the_file() {
    const WRITERS: u64 = 4;
    const ROUNDS: u64 = 24;
    const TURNS: u64 = 50_000;
    let (piece, head, life) = (memfd(BYTES), memfd(4096), memfd(4096));
    // SAFETY: the word lives over the call.
    let n = unsafe { libc::pwrite(life.as_raw_fd(), [1u32].as_ptr().cast(), 4, 0) };
    assert_eq!(n, 4);
    for round in 0..ROUNDS {
        let all = open(&piece, &head, &life);
        all.truncate(0).unwrap();
        let start = Barrier::new(WRITERS as usize);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let file = open(&piece, &head, &life);
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    for turn in 0..TURNS {
                        let (at, mut byte) = (turn * WRITERS + writer, writer as u8 + 1);
                        let part = [libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
                        // SAFETY: the part is one byte of this thread.
                        let done = unsafe { file.write_runs(&part, std::iter::once((at, 1))) };
                        assert_eq!(done, Ok(1));
                        assert!(file.size().unwrap() > at);
                    }
                });
            }
        });
        assert_eq!(all.size(), Ok(WRITERS * TURNS), "round {round}");
        let mut data = vec![0u8; (WRITERS * TURNS) as usize];
        let part = [libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() }];
        // SAFETY: the part is the vector.
        let read = unsafe { all.read_runs(&part, std::iter::once((0, WRITERS * TURNS))) };
        assert_eq!(read, Ok(WRITERS * TURNS));
        assert!(data.iter().enumerate().all(|(i, byte)| u64::from(*byte) == i as u64 % WRITERS + 1));
    }
}
