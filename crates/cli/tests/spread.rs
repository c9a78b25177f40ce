//! Files of several backing files, and their conversion to one: the data stay intact whatever happens meanwhile.

mod common;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Place, Ran};
use forebay_client::{Fail, File, PathBuffer, Place as At, Pool, Striping};
use forebay_data::BackingName;
use forebay_types::limits::CALL_TIMEOUT_MS;
use forebay_types::{Code, Ino};
use rustix::fs::{FlockOperation, Mode, OFlags};

const STRIPE: u32 = 4096;

fn at(path: &str) -> At<'_> {
    At { dir: Ino::ROOT, path: path.as_bytes() }
}

fn attach(dir: &Path) -> &'static Pool {
    let pool = Pool::attach(dir).unwrap();
    pool.set_prefix(b"/forebay");
    pool
}

fn open_striped(pool: &Pool, path: &str, flags: i32, stripe_count: u16) -> Result<File, Fail> {
    let striping = Striping {
        stripe_count: stripe_count.max(1),
        stripe_bytes: STRIPE,
        directory_takes_precedence: stripe_count == 0,
    };
    pool.open_striped(at(path), flags, 0o644, striping, &mut PathBuffer::new())
}

fn spread(pool: &Pool, path: &str) -> File {
    let file = open_striped(pool, path, libc::O_RDWR | libc::O_CREAT, 3).unwrap();
    assert_eq!(file.fd(), None, "{path} has several backing files");
    file
}

/// Opens as the preload library does.
fn open(pool: &Pool, path: &str, flags: i32) -> Result<OwnedFd, Fail> {
    let fd = pool.open(at(path), flags | libc::O_CLOEXEC, 0o644, &mut PathBuffer::new())?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn read_all(fd: &OwnedFd) -> Vec<u8> {
    use std::io::Read;
    let mut data = Vec::new();
    std::fs::File::from(fd.try_clone().unwrap()).read_to_end(&mut data).unwrap();
    data
}

fn stat(pool: &Pool, path: &str) -> libc::stat {
    pool.stat(at(path), true, &mut PathBuffer::new()).unwrap()
}

/// Bytes that differ by offset.
fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|i| ((i * 31 + i / 251 + seed * 7) % 255 + 1) as u8).collect()
}

fn is_busy<T>(result: Result<T, Fail>) -> bool {
    matches!(result, Err(Fail::Code(Code::Busy)))
}

#[test]
fn open_for_a_descriptor_gives_the_file_one_backing_file_and_nothing_else_changes() {
    let place = Place::new();
    let dir = place.up("p");
    let pool = attach(&dir);
    for (i, bytes) in [0, 1, 4095, 4096, 12_288, 100_000, 3_000_001].into_iter().enumerate() {
        let path = format!("f{i}");
        let data = pattern(bytes, i);
        let file = spread(pool, &path);
        file.write_at(&data, 0).unwrap();
        // A hole, with data behind it.
        let mut whole = data.clone();
        whole.resize(bytes + 5_000_000, 0);
        whole.extend(b"the end");
        file.write_at(b"the end", bytes as u64 + 5_000_000).unwrap();
        drop(file);
        let before = stat(pool, &path);
        assert_eq!(before.st_size as usize, whole.len());
        let fd = open(pool, &path, libc::O_RDONLY).unwrap();
        assert!(read_all(&fd) == whole, "{path} has the same bytes");
        let after = stat(pool, &path);
        let facts =
            |s: &libc::stat| (s.st_ino, s.st_size, s.st_mode, s.st_nlink, s.st_mtime, s.st_mtime_nsec);
        assert_eq!(facts(&after), facts(&before));
        assert!(after.st_blocks * 512 < 4_000_000 + bytes as i64, "the hole stays one: {}", after.st_blocks);
        // An open for a handle then gives the same single backing file.
        let again = open_striped(pool, &path, libc::O_RDWR, 0).unwrap();
        assert!(again.fd().is_some());
        again.write_at(b"new", 1).unwrap();
        whole[1..4].copy_from_slice(b"new");
        let fresh = open(pool, &path, libc::O_RDONLY).unwrap();
        assert!(read_all(&fresh) == whole);
    }
    let file = spread(pool, "cut");
    file.write_at(&pattern(50_000, 3), 0).unwrap();
    drop(file);
    drop(open(pool, "cut", libc::O_WRONLY | libc::O_TRUNC).unwrap());
    assert_eq!(stat(pool, "cut").st_size, 0);
    place.ok(["fsck", "--pool", dir.to_str().unwrap()]);
}

#[test]
fn file_that_somebody_has_open_stays_as_it_is_and_the_other_open_is_busy() {
    let place = Place::new();
    let dir = place.up("p");
    let pool = attach(&dir);
    let data = pattern(40_000, 1);
    let file = spread(pool, "f");
    file.write_at(&data, 0).unwrap();
    for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_RDWR | libc::O_TRUNC, libc::O_RDWR | libc::O_CREAT] {
        assert!(is_busy(open(pool, "f", flags)));
    }
    let ran = Ran::of(
        place.command(["layout", "migrate", "--pool", dir.to_str().unwrap(), "/f"]).output().unwrap(),
    );
    assert!(ran.code == Some(1) && ran.err.contains("a program has it open"), "{ran:?}");
    let mut back = vec![0; data.len() + 10];
    assert_eq!(file.read_at(&mut back, 0), Ok(data.len()));
    assert!(back[..data.len()] == data[..]);
    drop(file);
    let reader = open_striped(pool, "f", libc::O_RDONLY, 0).unwrap();
    assert!(
        is_busy(open(pool, "f", libc::O_RDONLY)),
        "a reader would go on reading what is no more the file"
    );
    drop(reader);
    assert!(read_all(&open(pool, "f", libc::O_RDONLY).unwrap()) == data);
    place.ok(["fsck", "--pool", dir.to_str().unwrap()]);
}

#[test]
fn conversion_waits_for_another_one_but_not_for_ever() {
    let place = Place::new();
    let dir = place.up("p");
    let pool = attach(&dir);
    let data = pattern(40_000, 5);
    spread(pool, "f").write_at(&data, 0).unwrap();
    let name = BackingName::new(Ino(stat(pool, "f").st_ino), 0, 0);
    let bucket = std::str::from_utf8(&name.as_bytes()[..7]).unwrap();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let other = rustix::fs::openat(pool.target_directories()[0], bucket, flags, Mode::empty()).unwrap();
    // A process that is stopped while it converts a file has this lock.
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    let begun = Instant::now();
    assert!(is_busy(open(pool, "f", libc::O_RDONLY)));
    assert!(begun.elapsed() < 2 * Duration::from_millis(CALL_TIMEOUT_MS));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| open(pool, "f", libc::O_RDONLY));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waits.is_finished());
        rustix::fs::flock(&other, FlockOperation::Unlock).unwrap();
        assert!(read_all(&waits.join().unwrap().unwrap()) == data);
    });
}

/// Writers, opens for a descriptor and stats of the same files at once: each write that returned is in the file, and no
/// stat gives a size that the file never had.
#[test]
fn writes_stay_whoever_opens_the_file_meanwhile() {
    const ROUNDS: usize = 60;
    const PIECE: usize = 10_000;
    let place = Place::new();
    let dir = place.up("p");
    let pool = attach(&dir);
    let mut migrated = 0;
    for round in 0..ROUNDS {
        let path = format!("r{round}");
        spread(pool, &path).truncate(4 * PIECE as u64).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2)
                .map(|writer| {
                    let path = &path;
                    scope.spawn(move || {
                        for piece in [writer, writer + 2] {
                            // An open during the migration waits for its end, or succeeds before it begins.
                            let file = open_striped(pool, path, libc::O_RDWR, 0).unwrap();
                            let data = pattern(PIECE, piece + round);
                            file.write_at(&data, (piece * PIECE) as u64).unwrap();
                            drop(file);
                            std::thread::sleep(Duration::from_micros(200));
                        }
                    })
                })
                .collect();
            let opener = scope.spawn(|| {
                let mut done = false;
                while !done && !stop.load(Ordering::Relaxed) {
                    match open(pool, &path, libc::O_RDONLY) {
                        Ok(_) => done = true,
                        result => assert!(is_busy(result)),
                    }
                }
                done
            });
            let watcher = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(stat(pool, &path).st_size as usize, 4 * PIECE);
                }
            });
            for writer in writers {
                writer.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            migrated += usize::from(opener.join().unwrap());
            watcher.join().unwrap();
        });
        let fd = open(pool, &path, libc::O_RDONLY).unwrap();
        let expected: Vec<u8> = (0..4).flat_map(|piece| pattern(PIECE, piece + round)).collect();
        assert!(read_all(&fd) == expected, "round {round}");
    }
    assert!(migrated > 0, "no file was moved while it was written: nothing was tried");
    place.ok(["fsck", "--pool", dir.to_str().unwrap()]);
}

/// The command killed at any moment, and the worker too: the file keeps its bytes, and all space is free again after it
/// is removed.
#[test]
fn kill_during_a_migration_leaves_the_file_whole() {
    let place = Place::new();
    let dir = place.up("p");
    let pool = attach(&dir);
    let name = dir.to_str().unwrap();
    let free = |pool: &Pool| pool.statfs().unwrap().f_bfree;
    let before = free(pool);
    let data = pattern(20_000_000, 5);
    let (mut moved, mut not_moved) = (0, 0);
    for round in 0..24u64 {
        let file = spread(pool, "f");
        file.write_at(&data, 0).unwrap();
        drop(file);
        let mut child = place
            .command(["layout", "migrate", "--pool", name, "/f"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 1500));
        let _ = child.kill();
        child.wait().unwrap();
        let whole = open_striped(pool, "f", libc::O_RDONLY, 0).unwrap();
        *(if whole.fd().is_some() { &mut moved } else { &mut not_moved }) += 1;
        let mut back = vec![0; data.len() + 1];
        assert_eq!(whole.read_at(&mut back, 0), Ok(data.len()));
        assert!(back[..data.len()] == data[..], "round {round}");
        drop(whole);
        let fd = open(pool, "f", libc::O_RDONLY).unwrap();
        assert!(fd.as_raw_fd() >= 0 && read_all(&fd) == data, "round {round}");
        drop(fd);
        pool.unlink(at("f"), &mut PathBuffer::new()).unwrap();
    }
    println!("{moved} were moved, {not_moved} were not");
    assert!(not_moved > 0, "nothing was killed in time");
    // The worker unlinks the leftovers of a killed command.
    let timeout = std::time::Instant::now();
    while before.saturating_sub(free(pool)) >= 1000 {
        assert!(timeout.elapsed() < common::TIMEOUT, "{} pages are lost", before - free(pool));
        std::thread::sleep(Duration::from_millis(10));
    }
    place.ok(["fsck", "--pool", name]);
}

/// The single backing file that a file of several may get.
fn copy_of(dir: &Path, file: &File) -> std::path::PathBuf {
    let ino = file.ino().0;
    dir.join(format!("target/data/{:02x}/{ino:016x}", ino as u8))
}

/// The state of the target after a command was killed between naming its copy and the daemon's change of layout.
#[test]
fn fsck_finds_the_copy_that_a_killed_migration_left_and_migrate_removes_it() {
    let place = Place::new();
    let dir = place.up("p");
    let (pool, name) = (attach(&dir), dir.to_str().unwrap());
    let file = spread(pool, "f");
    let data = pattern(100_000, 3);
    file.write_at(&data, 0).unwrap();
    place.ok(["fsck", "--pool", name]);
    std::fs::write(copy_of(&dir, &file), &data[..5000]).unwrap();
    drop(file);
    let ran = place.run(["fsck", "--pool", name]);
    assert!(ran.code == Some(4) && ran.out.contains("left by an interrupted copy"), "{ran:?}");
    place.ok(["layout", "migrate", "--pool", name, "/f"]);
    assert!(place.ok(["fsck", "--pool", name]).out.contains("is clean"));
    assert!(read_all(&open(pool, "f", libc::O_RDONLY).unwrap()) == data);
    // Removing the file removes the copy too.
    let file = spread(pool, "g");
    std::fs::write(copy_of(&dir, &file), b"left").unwrap();
    drop(file);
    assert_eq!(place.run(["fsck", "--pool", name]).code, Some(4));
    pool.unlink(at("g"), &mut PathBuffer::new()).unwrap();
    assert!(place.ok(["fsck", "--pool", name]).out.contains("is clean"));
}
