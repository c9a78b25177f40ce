//! Trees for tests: created with all odd objects, and read into snapshots that can be compared. All access is by open
//! directories and names, because the trees may be deeper than the longest path.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test binary uses a part of it")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Timespec, Timestamps, XattrFlags, CWD};
use rustix::io::Errno;

/// A directory in memory that is removed with its contents when it is dropped.
#[derive(Debug)]
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        let shm = Path::new("/dev/shm");
        let base = if std::fs::write(shm.join(format!("forebay-test-{}", std::process::id())), b"").is_ok() {
            let _ = std::fs::remove_file(shm.join(format!("forebay-test-{}", std::process::id())));
            shm.to_path_buf()
        } else {
            std::env::temp_dir()
        };
        Scratch::within(&base)
    }

    pub fn within(base: &Path) -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("forebay-stage-test-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Ok(top) = rustix::fs::open(&self.0, DIRECTORY, Mode::empty()) {
            clear(&top);
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOATIME);

pub fn open_directory(at: impl AsFd, name: &[u8]) -> OwnedFd {
    rustix::fs::openat(at, name, DIRECTORY, Mode::empty()).unwrap()
}

/// The names in a directory, sorted.
pub fn names(at: &OwnedFd) -> Vec<Vec<u8>> {
    // An open file description of its own, because listing moves the offset.
    let own = open_directory(at, b".");
    let mut names: Vec<Vec<u8>> = Dir::new(own)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_bytes().to_vec())
        .filter(|name| name != b"." && name != b"..")
        .collect();
    names.sort();
    names
}

/// Removes all entries of a directory of any depth.
pub fn clear(top: &OwnedFd) {
    let mut stack = vec![(top.try_clone().unwrap(), None)];
    while let Some((at, from)) = stack.pop() {
        let mut deeper = None;
        for name in names(&at) {
            if rustix::fs::unlinkat(&at, &name, AtFlags::empty()).is_err() {
                let _ = rustix::fs::chmodat(&at, &name, Mode::RWXU, AtFlags::empty());
                if rustix::fs::unlinkat(&at, &name, AtFlags::REMOVEDIR).is_err() {
                    deeper = Some(name);
                    break;
                }
            }
        }
        if let Some(name) = deeper {
            let inner = open_directory(&at, &name);
            // A descriptor per level would be too many for deep trees: the way back is `..`.
            if stack.len() > 200 {
                stack.remove(0);
            }
            stack.push((at, from));
            stack.push((inner, Some(name)));
        }
    }
    if !names(top).is_empty() {
        clear(top);
    }
}

/// The compared properties of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    pub kind: u32,
    pub mode: u32,
    pub owner: (u32, u32),
    pub size: u64,
    pub mtime: (i64, i64),
    /// Not for symbolic links, because reading them changes it.
    pub atime: (i64, i64),
    pub rdev: u64,
    /// The target of a link, or the content of a file.
    pub content: Vec<u8>,
    /// Ranges that are not holes.
    pub data: Vec<(u64, u64)>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path of this inode, if it has several.
    pub linked_to: Option<Vec<u8>>,
}

/// The objects of a tree by their path from its top.
pub type Snapshot = BTreeMap<Vec<u8>, Item>;

/// Reads a whole tree. The path of its top is empty.
pub fn snapshot(path: &Path) -> Snapshot {
    let mut all = Snapshot::new();
    let mut first = HashMap::new();
    let top = rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty()).unwrap();
    // The number of descriptors is bounded: a deep directory is opened again by its path in pieces.
    let mut stack = vec![Vec::<Vec<u8>>::new()];
    while let Some(parts) = stack.pop() {
        let mut at = top.try_clone().unwrap();
        for part in &parts {
            at = open_directory(&at, part);
        }
        let prefix = parts.join(&b'/');
        all.insert(prefix.clone(), item_of_directory(&at));
        for name in names(&at).into_iter().rev() {
            let stat = rustix::fs::statat(&at, &name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                let mut deeper = parts.clone();
                deeper.push(name);
                stack.push(deeper);
                continue;
            }
            let path = if prefix.is_empty() { name.clone() } else { [&prefix[..], b"/", &name].concat() };
            let mut item = item(&at, &name, &stat);
            if stat.st_nlink > 1 {
                item.linked_to = Some(path.clone());
                first.entry((stat.st_dev, stat.st_ino)).or_insert_with(Vec::new).push(path.clone());
            }
            all.insert(path, item);
        }
    }
    for mut paths in first.into_values() {
        paths.sort();
        for path in &paths {
            all.get_mut(path).unwrap().linked_to = Some(paths[0].clone());
        }
    }
    all
}

fn base(stat: &rustix::fs::Stat) -> Item {
    Item {
        kind: stat.st_mode & 0o170_000,
        mode: stat.st_mode & 0o7777,
        owner: (stat.st_uid, stat.st_gid),
        size: stat.st_size as u64,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as i64),
        atime: (stat.st_atime, stat.st_atime_nsec as i64),
        rdev: stat.st_rdev,
        content: Vec::new(),
        data: Vec::new(),
        xattrs: BTreeMap::new(),
        linked_to: None,
    }
}

fn item_of_directory(at: &OwnedFd) -> Item {
    let mut item = base(&rustix::fs::fstat(at).unwrap());
    item.size = 0;
    item.xattrs = xattrs(at);
    item
}

fn item(at: &OwnedFd, name: &[u8], stat: &rustix::fs::Stat) -> Item {
    let mut item = base(stat);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
            let file = rustix::fs::openat(at, name, flags, Mode::empty()).unwrap();
            item.xattrs = xattrs(&file);
            item.data = data(&file, item.size);
            item.content = sum(&file, &item.data);
        }
        FileType::Symlink => {
            item.content = rustix::fs::readlinkat(at, name, Vec::new()).unwrap().into_bytes();
            item.atime = (0, 0);
        }
        _ => {}
    }
    item
}

fn data(file: &OwnedFd, size: u64) -> Vec<(u64, u64)> {
    let (mut at, mut all) = (0, Vec::new());
    while at < size {
        let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) else { break };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap();
        all.push((start, end));
        at = end;
    }
    all
}

/// Content up to 1 MiB unchanged, longer content as a hash.
fn sum(file: &OwnedFd, data: &[(u64, u64)]) -> Vec<u8> {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut small = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    for &(start, end) in data {
        let mut at = start;
        while at < end {
            let most = buffer.len().min((end - at) as usize);
            let n = rustix::io::pread(file, &mut buffer[..most], at).unwrap();
            assert!(n > 0, "the file ends before its data does");
            hash.update(&buffer[..n]);
            if small.len() < 1 << 20 {
                small.extend_from_slice(&buffer[..n]);
            }
            at += n as u64;
        }
    }
    small.truncate(4096);
    [hash.digest128().to_le_bytes().to_vec(), small].concat()
}

fn xattrs(file: &OwnedFd) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let n = match rustix::fs::flistxattr(file, &mut names[..]) {
        Ok(n) => n,
        Err(Errno::NOTSUP) => 0,
        Err(e) => panic!("cannot list extended attributes: {e}"),
    };
    let mut value = vec![0; 65_536];
    names[..n]
        .split(|&b| b == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let n = rustix::fs::fgetxattr(file, name, &mut value[..]).unwrap();
            (name.to_vec(), value[..n].to_vec())
        })
        .collect()
}

/// The differences of two snapshots as text; empty if there are none.
pub fn differences(a: &Snapshot, b: &Snapshot) -> String {
    let mut text = String::new();
    for path in a.keys().chain(b.keys().filter(|path| !a.contains_key(*path))) {
        let name = path.escape_ascii().to_string();
        let name = if name.len() > 80 { format!("...{}", &name[name.len() - 80..]) } else { name };
        match (a.get(path), b.get(path)) {
            (Some(x), Some(y)) if x != y => {
                let short = |item: &Item| Item {
                    content: item.content[..item.content.len().min(16)].to_vec(),
                    ..item.clone()
                };
                let _ = writeln!(text, "{name}:\n  {:?}\n  {:?}", short(x), short(y));
            }
            (Some(_), None) => {
                let _ = writeln!(text, "{name}: only in the first");
            }
            (None, Some(_)) => {
                let _ = writeln!(text, "{name}: only in the second");
            }
            _ => {}
        }
    }
    text
}

/// Fails with the differences of two snapshots.
#[track_caller]
pub fn assert_same(a: &Snapshot, b: &Snapshot) {
    let text = differences(a, b);
    assert!(text.is_empty(), "the trees differ:\n{text}");
}

/// Fails if any name in the tree is a temporary of staging.
#[track_caller]
pub fn assert_no_temporaries(path: &Path) {
    for name in snapshot(path).keys() {
        // A hash follows the prefix.
        let ours =
            name.windows(12).any(|w| w.starts_with(b".forebay-") && w[9..].iter().all(u8::is_ascii_hexdigit));
        assert!(!ours, "left behind: {}", name.escape_ascii());
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Seconds of a directory's access time that reading the directory does not change (relatime: it is later than now).
/// Other programs, such as tests that look for leftovers, may list what these tests compare.
pub const UNREAD: i64 = 4_102_444_800;

pub fn set_times(at: impl AsFd, name: &[u8], atime: (i64, i64), mtime: (i64, i64)) {
    let time = |(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec };
    let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
    rustix::fs::utimensat(at, name, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

pub fn write(at: &OwnedFd, name: &[u8], mode: u32, pieces: &[(u64, &[u8])], size: u64) -> OwnedFd {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR).unwrap();
    for (offset, bytes) in pieces {
        let mut done = 0;
        while done < bytes.len() {
            done += rustix::io::pwrite(&file, &bytes[done..], offset + done as u64).unwrap();
        }
    }
    rustix::fs::ftruncate(&file, size).unwrap();
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).unwrap();
    file
}

/// Bytes without a pattern that would hide a wrong offset.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub fn make_directory(at: impl AsFd, name: &[u8]) -> OwnedFd {
    rustix::fs::mkdirat(&at, name, Mode::RWXU).unwrap();
    open_directory(at, name)
}

/// Creates a tree with all odd objects in an existing parent directory.
pub fn make_odd(path: &Path) {
    std::fs::create_dir(path).unwrap();
    let top = rustix::fs::open(path, DIRECTORY, Mode::empty()).unwrap();
    let page = 4096u64;

    // Special sizes, sizes next to them, and modes.
    for (i, size) in [0usize, 1, 4095, 4096, 4097, 65_536, 1 << 20, (1 << 20) + 7, (2 << 20) + 1, 5 << 20]
        .into_iter()
        .enumerate()
    {
        let modes = [0o644, 0o600, 0o755, 0o444, 0o4755, 0o2755, 0o6711, 0o000, 0o640, 0o777];
        let mode = modes[i] | if is_root() { 0 } else { 0o400 };
        write(&top, format!("size-{size}").as_bytes(), mode, &[(0, &noise(size, i as u64))], size as u64);
    }

    // Holes: alone, at the start, in the middle, at the end, huge, scattered.
    let holes = make_directory(&top, b"holes");
    let block = noise(page as usize, 99);
    write(&holes, b"only", 0o644, &[], 10 * page);
    write(&holes, b"start", 0o644, &[(5 * page, &block)], 6 * page);
    write(&holes, b"middle", 0o644, &[(0, &block), (7 * page, &block)], 8 * page);
    write(&holes, b"end", 0o644, &[(0, &block)], 9 * page + 17);
    write(&holes, b"huge", 0o644, &[(1 << 30, &block), (3 << 30, &block)], 5 << 30);
    let scattered: Vec<(u64, &[u8])> = (0..300).map(|i| (i * 5 * page, &block[..])).collect();
    write(&holes, b"scattered", 0o644, &scattered, 2000 * page);
    let large = noise(9 << 20, 5);
    write(&holes, b"large", 0o644, &[(0, &large), (40 << 20, &large), (90 << 20, &large)], 130 << 20);
    write(&holes, b"zeros-but-no-hole", 0o644, &[(0, &vec![0; 3 * page as usize])], 3 * page);

    // Hard links, within a directory and between directories.
    let links = make_directory(&top, b"links");
    write(&links, b"first", 0o644, &[(0, b"linked")], 6);
    for name in ["second", "third"] {
        rustix::fs::linkat(&links, "first", &links, name, AtFlags::empty()).unwrap();
    }
    rustix::fs::linkat(&links, "first", &top, "a-link-before-its-directory", AtFlags::empty()).unwrap();
    rustix::fs::linkat(&links, "first", &holes, "z-link", AtFlags::empty()).unwrap();

    // Symbolic links: dangling, to itself, in circles, absolute, up, long.
    let symlinks = make_directory(&top, b"symlinks");
    for (target, name) in [
        ("nowhere", "dangling"),
        ("itself", "itself"),
        ("b", "a"),
        ("a", "b"),
        ("/etc/passwd", "absolute"),
        ("../..", "up"),
        ("../links", "to-directory"),
    ] {
        rustix::fs::symlinkat(target, &symlinks, name).unwrap();
    }
    rustix::fs::symlinkat("x".repeat(4000), &symlinks, "long").unwrap();
    rustix::fs::symlinkat(&b"\xff\n\x01"[..], &symlinks, "bytes").unwrap();
    rustix::fs::linkat(&symlinks, "dangling", &symlinks, "dangling-too", AtFlags::empty()).unwrap();

    // Names with every byte, of 255 bytes, and similar to temporaries.
    let odd = make_directory(&top, b"names");
    for b in 1..=255u8 {
        if b != b'/' {
            write(&odd, &[b'n', b], 0o644, &[(0, &[b])], 1);
        }
    }
    write(&odd, &[b'x'; 255], 0o644, &[(0, b"long")], 4);
    write(&odd, &[0xff; 255], 0o644, &[(0, b"long")], 4);
    write(&odd, b".forebay-not-quite.part", 0o644, &[], 0);
    for name in ["-rf", "...", " ", "* ?", "\"'`$(x)"] {
        write(&odd, name.as_bytes(), 0o644, &[], 0);
    }
    make_directory(&odd, &[b'd'; 255]);

    // FIFOs, sockets, device nodes.
    let special = make_directory(&top, b"special");
    for (name, file_type) in [("fifo", FileType::Fifo), ("socket", FileType::Socket)] {
        rustix::fs::mknodat(&special, name, file_type, Mode::from_raw_mode(0o640), 0).unwrap();
    }
    if is_root() {
        for (name, file_type) in [("char", FileType::CharacterDevice), ("block", FileType::BlockDevice)] {
            let device = rustix::fs::makedev(1, 3);
            rustix::fs::mknodat(&special, name, file_type, Mode::from_raw_mode(0o600), device).unwrap();
        }
    }
    rustix::fs::linkat(&special, "fifo", &special, "fifo-too", AtFlags::empty()).unwrap();

    // Extended attributes, on files and directories.
    let file = write(&top, b"with-attributes", 0o644, &[(0, b"x")], 1);
    set_xattr(&file, "user.empty", b"");
    set_xattr(&file, "user.bytes", &[0, 255, 10, 0]);
    set_xattr(&file, "user.long", &noise(2000, 3));
    let directory = make_directory(&top, b"directory-with-attributes");
    set_xattr(&directory, "user.of-directory", b"yes");
    if is_root() {
        let _ = rustix::fs::fsetxattr(&file, "trusted.forebay-test", b"t", XattrFlags::empty());
    }

    // Empty directories, directories without permissions, and owners.
    let modes = make_directory(&top, b"modes");
    for (name, mode) in [("sticky", 0o1777), ("setgid", 0o2755), ("read-only", 0o555), ("closed", 0o700)] {
        let inner = make_directory(&modes, name.as_bytes());
        write(&inner, b"within", 0o400, &[(0, b"w")], 1);
        rustix::fs::fchmod(&inner, Mode::from_raw_mode(mode)).unwrap();
    }
    make_directory(&modes, b"empty");
    if is_root() {
        let other = write(&modes, b"of-another", 0o4750, &[(0, b"o")], 1);
        let (uid, gid) = (rustix::fs::Uid::from_raw(12_345), rustix::fs::Gid::from_raw(54_321));
        rustix::fs::fchown(&other, Some(uid), Some(gid)).unwrap();
        rustix::fs::fchmod(&other, Mode::from_raw_mode(0o4750)).unwrap();
    }

    // A chain of directories deeper than the longest path.
    let mut deep = make_directory(&top, b"deep");
    for i in 0..60 {
        deep = make_directory(&deep, format!("{i:0>100}").as_bytes());
    }
    write(&deep, b"bottom", 0o644, &[(0, b"deep")], 4);

    // Times are set last: to the nanosecond, before 1970, far in the future; also those of all directories.
    set_times(&top, b"size-1", (1_000_000_000, 1), (1_000_000_000, 999_999_999));
    set_times(&top, b"size-4095", (-5, 123_456_789), (-1_000_000_000, 5));
    set_times(&top, b"size-4096", (0, 0), (0, 0));
    set_times(&top, b"size-4097", (4_000_000_000, 7), (4_000_000_000, 8));
    set_times(&symlinks, b"dangling", (77, 77), (-77, 77));
    set_times(&special, b"fifo", (88, 1), (99, 2));
    for (i, name) in
        ["holes", "links", "symlinks", "names", "special", "modes", "deep"].into_iter().enumerate()
    {
        set_times(&top, name.as_bytes(), (UNREAD, 11), (1_400_000_000 + i as i64, 22));
    }
    set_times(&modes, b"read-only", (UNREAD, 4), (5, 6));
    set_times(
        CWD,
        CString::new(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str())).unwrap().as_bytes(),
        (UNREAD, 8),
        (7, 6),
    );
}

fn set_xattr(file: &OwnedFd, name: &str, value: &[u8]) {
    match rustix::fs::fsetxattr(file, name, value, XattrFlags::empty()) {
        // tmpfs supports user attributes since Linux 6.6.
        Ok(()) | Err(Errno::NOTSUP) => {}
        Err(e) => panic!("cannot set {name} on descriptor {}: {e}", file.as_raw_fd()),
    }
}
