//! The file of a volume whose first piece, with the end of the file, is on another node.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_types::{target_of, AtomicOp, BackingId, Code, Ino, NodeId, PieceWord, Segment, Targets, Volume};
use forebay_volume::{Far, FarRange, FileFlags, Life, Mapped, Striped, VolumeFile};
use proptest::prelude::*;

const BYTES: u64 = 1 << 20;
const STRIPE: u64 = 4096;

/// Another node: its pieces, and the end of the file beside the first.
#[derive(Debug, Default)]
struct Node {
    pieces: Mutex<BTreeMap<u16, Vec<u8>>>,
    end: AtomicU64,
    /// Calls for data, and the bytes of them.
    calls: AtomicUsize,
    bytes: AtomicUsize,
    /// What was freed: piece, offset, bytes.
    freed: Mutex<Vec<(u16, u64, u64)>>,
    is_gone: std::sync::atomic::AtomicBool,
}

impl Node {
    fn each(&self, ranges: &[FarRange], mut f: impl FnMut(&mut [u8], usize)) -> Result<(), Code> {
        if self.is_gone.load(Ordering::SeqCst) {
            return Err(Code::Io);
        }
        self.calls.fetch_add(1, Ordering::SeqCst);
        let mut pieces = self.pieces.lock().unwrap();
        for range in ranges {
            let index = range.piece.piece().unwrap().index;
            self.bytes.fetch_add(range.bytes, Ordering::SeqCst);
            let piece = pieces.entry(index).or_insert_with(|| vec![0; 2 * BYTES as usize]);
            f(&mut piece[range.offset as usize..][..range.bytes], range.at);
        }
        Ok(())
    }
}

impl Far for Node {
    unsafe fn get(&self, ranges: &[FarRange], to: *mut u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        self.each(ranges, |piece, at| unsafe {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), to.add(at), piece.len());
        })
    }

    unsafe fn put(&self, ranges: &[FarRange], from: *const u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        self.each(ranges, |piece, at| unsafe {
            std::ptr::copy_nonoverlapping(from.add(at), piece.as_mut_ptr(), piece.len());
        })
    }

    fn discard(&self, piece: BackingId, offset: u64, bytes: u64) -> Result<(), Code> {
        self.freed.lock().unwrap().push((piece.piece().unwrap().index, offset, bytes));
        Ok(())
    }

    fn allocated(&self, _: BackingId) -> Result<u64, Code> {
        unreachable!("no piece is thin")
    }

    fn atomic(&self, piece: BackingId, word: PieceWord, op: AtomicOp) -> Result<u64, Code> {
        if self.is_gone.load(Ordering::SeqCst) {
            return Err(Code::Io);
        }
        assert_eq!((piece.piece().unwrap().index, word), (0, PieceWord::End));
        Ok(op.apply(&self.end))
    }

    fn check(&self) -> Result<(), Code> {
        Ok(())
    }

    fn reason(&self) -> Option<String> {
        None
    }
}

fn memfd(bytes: u64) -> OwnedFd {
    // SAFETY: plain system calls; the descriptor is new and ours.
    unsafe {
        let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0 && libc::ftruncate(fd, bytes as i64) == 0);
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// Its pieces are there, here, there.
fn volume(node: &Arc<Node>, here: &OwnedFd, is_writable: bool) -> Striped {
    let targets = [2, 1, 2].map(|node| target_of(NodeId(node), 0));
    let segment = Segment::new(BYTES, STRIPE, Targets::new(&targets).unwrap()).unwrap();
    of_segment(node, here, is_writable, segment)
}

/// Its pieces on node 1 are here.
fn of_segment(node: &Arc<Node>, here: &OwnedFd, is_writable: bool, segment: Segment) -> Striped {
    Striped::new(vec![mapped(node, here, is_writable, segment)]).unwrap()
}

fn mapped(node: &Arc<Node>, here: &OwnedFd, is_writable: bool, segment: Segment) -> Mapped {
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
        segments: vec![segment],
    };
    let life = memfd(4096);
    // SAFETY: the memory lives over the call.
    assert_eq!(unsafe { libc::pwrite(life.as_raw_fd(), [7u8, 0, 0, 0].as_ptr().cast(), 4, 0) }, 4);
    let far: Arc<dyn Far> = node.clone();
    let its = (Some(Life::map(life.as_fd()).unwrap()), Some(far));
    let piece = |_, target| Ok((target == target_of(NodeId(1), 0)).then(|| here.try_clone().unwrap()));
    Mapped::new(&volume, is_writable, its, piece).unwrap()
}

const ALL: FileFlags =
    FileFlags { reads: true, writes: true, creates: true, is_exclusive: false, truncates: false };

fn part(memory: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }
}

fn write(file: &VolumeFile, runs: &[(u64, u64)], data: &mut [u8]) -> Result<u64, Code> {
    let (a, b) = data.split_at_mut(data.len() / 3);
    // SAFETY: the parts are in the slice.
    unsafe { file.write_runs(&[part(a), part(b)], runs.iter().copied()) }
}

fn read(file: &VolumeFile, runs: &[(u64, u64)]) -> Result<Vec<u8>, Code> {
    let mut out = vec![0xee; runs.iter().map(|(_, bytes)| *bytes as usize).sum()];
    // SAFETY: the part is the vector.
    let n = unsafe { file.read_runs(&[part(&mut out)], runs.iter().copied()) }?;
    out.truncate(n as usize);
    Ok(out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn it_is_a_file(steps in prop::collection::vec((prop::collection::vec((0u64..300_000, 0u64..200_000), 0..4), any::<u8>(), 0u64..600_000), 1..12)) {
        let (node, here) = (Arc::new(Node::default()), memfd(BYTES));
        let file = VolumeFile::open(volume(&node, &here, true), ALL).unwrap();
        let mut model: Vec<u8> = Vec::new();
        for (runs, byte, size) in steps {
            let total: u64 = runs.iter().map(|(_, bytes)| bytes).sum();
            let mut data: Vec<u8> = (0..total).map(|i| byte.wrapping_add(i as u8)).collect();
            prop_assert_eq!(write(&file, &runs, &mut data), Ok(total));
            let mut from = 0;
            for (at, n) in runs.iter().map(|(at, n)| (*at as usize, *n as usize)).filter(|(_, n)| *n > 0) {
                model.resize(model.len().max(at + n), 0);
                model[at..at + n].copy_from_slice(&data[from..from + n]);
                from += n;
            }
            prop_assert!(read(&file, &[(0, 700_000)]) == Ok(model.clone()));
            if byte % 3 == 0 {
                prop_assert_eq!(file.truncate(size), Ok(()));
                model.resize(size as usize, 0);
            }
            let mut expected = Vec::new();
            for (at, n) in runs.iter().map(|(at, n)| (*at as usize, *n as usize)) {
                let there = &model[at.min(model.len())..model.len().min(at + n)];
                expected.extend_from_slice(there);
                if there.len() < n {
                    break;
                }
            }
            prop_assert!(read(&file, &runs) == Ok(expected));
            prop_assert_eq!(file.size(), Ok(model.len() as u64));
        }
    }
}

#[test]
fn short_ranges_are_moved_together() {
    let (node, here) = (Arc::new(Node::default()), memfd(BYTES));
    let file = VolumeFile::open(volume(&node, &here, true), ALL).unwrap();
    let runs: Vec<(u64, u64)> = (0..200).map(|i| (i * 2500, 100)).collect();
    let mut data: Vec<u8> = (0..20_000).map(|i| i as u8 | 1).collect();
    write(&file, &runs, &mut data).unwrap();
    assert_eq!(node.calls.load(Ordering::SeqCst), 1);
    assert!(read(&file, &runs).unwrap() == data);
    assert_eq!(node.calls.load(Ordering::SeqCst), 2);
}

#[test]
fn end_is_that_of_the_other_node() {
    let (node, here) = (Arc::new(Node::default()), memfd(BYTES));
    let open = |flags| VolumeFile::open(volume(&node, &here, true), flags).map(|file| file.size().unwrap());
    let exclusive = FileFlags { is_exclusive: true, ..ALL };
    assert_eq!((open(exclusive), open(exclusive), open(ALL)), (Ok(0), Err(Code::Exists), Ok(0)));
    let whole = volume(&node, &here, true);
    assert_eq!(
        (whole.extend_file(500), whole.extend_file(400), whole.file_size()),
        (Ok(()), Ok(()), Ok(Some(500)))
    );
    assert_eq!((open(ALL), whole.end_file(3), open(ALL)), (Ok(500), Ok(()), Ok(3)));
    assert_eq!((whole.trim_file(), whole.remove_file(), whole.file_size()), (Ok(()), Ok(()), Ok(None)));
    assert_eq!(whole.remove_file(), Err(Code::NotFound));
    assert_eq!((whole.reset_file(), open(exclusive)), (Ok(()), Ok(0)));
    // Who may only read moves nothing.
    let reader = volume(&node, &here, false);
    assert_eq!((reader.extend_file(9), reader.file_size()), (Err(Code::BadDescriptor), Ok(Some(0))));
    node.is_gone.store(true, Ordering::SeqCst);
    assert_eq!((whole.file_size(), whole.extend_file(9)), (Err(Code::Io), Err(Code::Io)));
}

#[test]
fn zeros_behind_a_thick_part_on_another_node_are_not_put_into_a_thin_one() {
    const MIB: u64 = 1 << 20;
    let (node, here) = (Arc::new(Node::default()), memfd(BYTES));
    let targets = Targets::new(&[target_of(NodeId(2), 0)]).unwrap();
    let segment = |is_thin| Segment::new(4 * MIB, MIB, targets).unwrap().thin(is_thin);
    let volumes = [false, true].map(|is_thin| mapped(&node, &here, true, segment(is_thin)));
    let joined = Striped::new(volumes.into()).unwrap();
    // Half a stripe of the first, one of the second, and half of the first again.
    joined.zero(MIB / 2, 2 * MIB).unwrap();
    assert_eq!(node.bytes.load(Ordering::SeqCst), MIB as usize);
    assert_eq!(*node.freed.lock().unwrap(), [(0, 0, MIB)]);
}

#[test]
fn thin_pieces_are_freed_in_ranges_of_a_bounded_length_however_short_the_stripes() {
    const MIB: u64 = 1 << 20;
    let (node, here) = (Arc::new(Node::default()), memfd(BYTES));
    let targets = Targets::new(&[2, 3].map(|node| target_of(NodeId(node), 0))).unwrap();
    let segment = Segment::new(5 << 30, MIB, targets).unwrap().thin(true);
    let volume = of_segment(&node, &here, true, segment);
    let freed = |offset, bytes| {
        volume.discard(offset, bytes).unwrap();
        let mut freed = std::mem::take(&mut *node.freed.lock().unwrap());
        freed.sort_unstable();
        freed
    };
    assert_eq!(freed(0, 0), []);
    assert_eq!(freed(MIB - 5, 10), [(0, MIB - 5, 5), (1, 0, 5)]);
    assert_eq!(freed(MIB - 5, 4 * MIB), [(0, MIB - 5, 2 * MIB), (1, 0, 2 * MIB)]);
    let piece = |index| [(0, 1024), (1024, 1024), (2048, 512)].map(|(at, n)| (index, at * MIB, n * MIB));
    assert_eq!(freed(0, 5 << 30), [piece(0), piece(1)].concat());
}
