//! What the kernel and the board believe: absences are forgotten, and imported names shown.

use super::*;

/// The FUSE notification that invalidates all cached names (fuse.h: FUSE_NOTIFY_INC_EPOCH).
const INC_EPOCH: i32 = 8;

/// How many of these notifications the kernel got.
fn epochs_moved(told: &mut std::fs::File) -> usize {
    use std::io::Read;
    let mut messages = [0; 4096];
    let n = match told.read(&mut messages) {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => 0,
        read => read.unwrap(),
    };
    let (mut at, mut moved) = (0, 0);
    while at < n {
        let word = |i: usize| u32::from_ne_bytes(messages[at + 4 * i..][..4].try_into().unwrap());
        moved += usize::from(word(1) as i32 == INC_EPOCH);
        at += word(0) as usize;
    }
    moved
}

/// A kernel with a mount of the node, whose worker was started again: what it is told.
fn kernel_of_a_new_worker(s: &mut Scene) -> std::fs::File {
    let (told, kernel) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let mut told = std::fs::File::from(told);
    s.kernel = Some(kernel);
    s.crash();
    assert_eq!(epochs_moved(&mut told), 1, "what the last worker told is not known");
    told
}

#[test]
fn kernel_forgets_what_it_believes_absent_when_a_directory_becomes_wide_and_after_a_crash() {
    let mut s = Scene::new("widened");
    let d = s.make_directory(Ino::ROOT, b"d");
    let mut told = kernel_of_a_new_worker(&mut s);
    let tx = TxId::new(NodeId(2), 1);
    let parts = Parts::new(d, &[Ino::part(NODE, 77), Ino::part(NodeId(2), 9)]).unwrap();
    let widen = Part::Widen { ino: d, parts: Some(parts) };
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Prepare { tx, index: 0, part: widen });
    assert_eq!(epochs_moved(&mut told), 0, "nothing is decided yet");
    s.ask(2, DAEMON | 1, 2, &Request::Finish { tx, commit: true });
    s.pass(SOON);
    assert_eq!(epochs_moved(&mut told), 1);
    // Other changes of the directory cause single notifications.
    let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    let change = Part::Change { ino: d, change: Change { set, layout: None } };
    let tx = TxId::new(NodeId(2), 2);
    s.ask_and_wait(2, DAEMON | 1, 3, &Request::Prepare { tx, index: 0, part: change });
    s.ask(2, DAEMON | 1, 4, &Request::Finish { tx, commit: true });
    s.pass(SOON);
    assert_eq!(epochs_moved(&mut told), 0);
}

/// An object of a store, with a name.
pub(super) fn object(name: &[u8], kind: Kind) -> StoreObject<'_> {
    let version = StoreVersion { bytes: 5, ..StoreVersion::default() };
    let mode = if kind == Kind::Directory { 0o750 } else { 0o640 };
    let atime = timestamp();
    StoreObject {
        name,
        kind,
        mode,
        uid: 7,
        gid: 8,
        rdev: 0,
        atime,
        version,
        target: b"",
        nlink: 1,
        file_system: 0,
    }
}

pub(super) fn objects(list: &[StoreObject<'_>]) -> Vec<u8> {
    let mut bytes = vec![0; 64 * 1024];
    let mut w = Writer::new(&mut bytes);
    list.iter().for_each(|object| object.encode(&mut w).unwrap());
    let n = w.len();
    bytes.truncate(n);
    bytes
}

/// Another program may make names in the store that the kernel and the board have cached as absent. They are imported
/// later without an invalidation each.
#[test]
fn kernel_and_board_forget_absent_names_when_a_directory_becomes_unlisted() {
    let mut s = Scene::new("unlisted");
    let d = s.make_directory(Ino::ROOT, b"d");
    let mut told = kernel_of_a_new_worker(&mut s);
    // The new worker's board has no names of the directory, so it keeps an absence as such.
    let (f, g) = (&b"f"[..], &b"g"[..]);
    let mut sequence = 0;
    let mut ask = |s: &mut Scene, request: &Request<'_>| {
        sequence += 1;
        s.ask_and_wait(2, DAEMON | 1, sequence, request);
    };
    for name in [f, g] {
        ask(&mut s, &Request::MakeDirectory { parent: d, name, mode: 0o755 });
    }
    s.crash();
    for name in [f, g] {
        ask(&mut s, &Request::RemoveDirectory { parent: d, name });
    }
    let lookup = |s: &Scene, name: &[u8]| s.board().lookup(d, name);
    assert_eq!(lookup(&s, f), Lookup::Absent);
    assert!(epochs_moved(&mut told) > 0);
    ask(&mut s, &Request::Attach { ino: d, listed: true, settings: b"s" });
    assert_eq!(epochs_moved(&mut told), 1);
    assert_eq!((lookup(&s, f), lookup(&s, g)), (Lookup::Unknown, Lookup::Unknown));
    ask(&mut s, &Request::Import { ino: d, objects: &objects(&[object(f, Kind::File)]) });
    assert_eq!(epochs_moved(&mut told), 0, "no cache has that it is absent");
    ask(&mut s, &Request::Listed { ino: d, epoch: 0, objects: b"" });
    assert_eq!(epochs_moved(&mut told), 0);
    // Now an absence may be cached again.
    ask(&mut s, &Request::Forget { parent: d, name: f, relist: true, discard: false });
    assert_eq!(epochs_moved(&mut told), 1);
    assert_eq!((lookup(&s, f), lookup(&s, g)), (Lookup::Unknown, Lookup::Unknown));
}

#[test]
fn board_shows_imported_names_with_their_inodes_and_the_permissions_of_directories() {
    let mut s = Scene::new("imported");
    let d = s.make_directory(Ino::ROOT, b"d");
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Attach { ino: d, listed: true, settings: b"s" });
    let list = objects(&[object(b"f", Kind::File), object(b"sub", Kind::Directory)]);
    s.ask_and_wait(2, DAEMON | 1, 2, &Request::Import { ino: d, objects: &list });
    let board = s.board();
    let Lookup::Hit(file) = board.lookup(d, b"f") else { panic!("the board has no file") };
    assert_eq!(file.kind, Kind::File);
    let attr = board.inode(file.ino).unwrap().attr;
    assert_eq!((attr.size, attr.mode & 0o7777, attr.uid, attr.gid), (5, 0o640, 7, 8));
    let Lookup::Hit(directory) = board.lookup(d, b"sub") else { panic!("the board has no directory") };
    let mode = Kind::Directory.mode_bits() | 0o750;
    assert_eq!((directory.kind, directory.permissions), (Kind::Directory, (mode, 7, 8)));
    assert_eq!(board.permissions(directory.ino), Some((mode, 7, 8)));
    assert_eq!(board.lookup(d, b"other"), Lookup::Unknown);
    assert_eq!(board.lookup(directory.ino, b"other"), Lookup::Unknown, "its names are in the store");
}

#[test]
fn found_names_displace_nothing_on_a_board_that_is_full() {
    let mut s = Scene::new("found");
    let d = s.make_directory(Ino::ROOT, b"d");
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Attach { ino: d, listed: true, settings: b"s" });
    let evicted = |s: &Scene| s.node.as_ref().unwrap().evicted();
    let (ring, _) = s.process(5);
    let mut made = 0;
    while evicted(&s) == 0 {
        for _ in 0..64 {
            make_file(&mut s, &ring, format!("m{made}").as_bytes());
            made += 1;
        }
    }
    let before = evicted(&s);
    let names: Vec<_> = (0..500).map(|i| format!("n{i}").into_bytes()).collect();
    let list: Vec<_> = names.iter().map(|name| object(name, Kind::File)).collect();
    s.ask_and_wait(2, DAEMON | 1, 2, &Request::Import { ino: d, objects: &objects(&list) });
    // The attributes of the directory itself are a change.
    assert!(evicted(&s) <= before + 1, "{} instead of {before}", evicted(&s));
    let shown = names.iter().filter(|name| matches!(s.board().lookup(d, name), Lookup::Hit(_))).count();
    assert!(shown < names.len(), "the board has room for all");
}
