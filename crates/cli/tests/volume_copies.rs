//! Copies between volumes, files and stores (`forebay volume copy`, `flush`, `load`), whole and killed.

mod common;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use common::{eventually, kill, Place};
use forebay_client::{Pool, Role};

const MIB: usize = 1 << 20;
const VOLUME_BYTES: usize = 24 * MIB;

/// A pool with a volume, or none where its daemon may not resize a tmpfs.
fn pool(place: &Place) -> Option<&'static Pool> {
    if !common::is_root() {
        return None;
    }
    let up = place.json(["up", "--capacity", "160MiB", "--json"]);
    place.ok(["volume", "create", "v", "--size", "24MiB"]);
    Some(Pool::attach_as(Path::new(up["pool"].as_str().unwrap()), Role::Tool).unwrap())
}

/// Bytes that differ at all offsets that copies could confuse.
fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    let word = |i: u32| i.wrapping_mul(0x9e37_79b1).wrapping_add(seed).to_le_bytes();
    (0..bytes.div_ceil(4) as u32).flat_map(word).take(bytes).collect()
}

fn put(pool: &'static Pool, name: &str, offset: usize, bytes: &[u8]) {
    pool.volume_open(name.as_bytes(), true).unwrap().put_bytes(offset as u64, bytes).unwrap();
}

fn bytes_of(pool: &'static Pool, name: &str) -> Vec<u8> {
    let volume = pool.volume_open(name.as_bytes(), false).unwrap();
    let mut bytes = vec![0; volume.bytes() as usize];
    volume.get_bytes(0, &mut bytes).unwrap();
    bytes
}

fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "the first byte that differs");
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn volume_goes_to_a_file_and_back_and_its_zeros_are_holes() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let data = pattern(3 * MIB + 5, 1);
    put(pool, "v", 4 * MIB - 3, &data);
    let whole = bytes_of(pool, "v");
    let path = place.join("saved");
    let copied = place.json(["volume", "copy", "v", text(&path), "--json"]);
    assert_eq!(copied["bytes"], VOLUME_BYTES);
    assert_same(&std::fs::read(&path).unwrap(), &whole);
    let found = path.metadata().unwrap();
    assert!(found.blocks() * 512 < 5 * MIB as u64, "zeros are holes: {} blocks", found.blocks());
    assert_eq!(found.mode() & 0o777, 0o600, "the mode of the volume");
    // Back, into a volume full of other bytes: holes are zeros again.
    place.ok(["volume", "create", "w", "--size", "24MiB"]);
    put(pool, "w", 0, &pattern(VOLUME_BYTES, 2));
    place.ok(["volume", "copy", text(&path), "w"]);
    assert_same(&bytes_of(pool, "w"), &whole);
}

#[test]
fn ranges_go_where_they_are_to_and_change_nothing_else() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    place.ok(["volume", "create", "w", "--size", "24MiB"]);
    let (one, two) = (pattern(VOLUME_BYTES, 1), pattern(VOLUME_BYTES, 2));
    put(pool, "v", 0, &one);
    put(pool, "w", 0, &two);
    let range = ["--from-offset", "1000", "--to-offset", "5000001", "--bytes", "9MiB"];
    place.ok(["volume", "copy", "v", "w"].iter().chain(&range));
    let mut expected = two.clone();
    expected[5_000_001..5_000_001 + 9 * MIB].copy_from_slice(&one[1000..1000 + 9 * MIB]);
    assert_same(&bytes_of(pool, "w"), &expected);
    // In a file, in place: what is around it stays, and zeros are written.
    let path = place.write("file", &two);
    let inode = path.metadata().unwrap().ino();
    put(pool, "v", 2000, &vec![0; MIB]);
    let mut expected = two.clone();
    expected[5_000_001..5_000_001 + 9 * MIB].copy_from_slice(&bytes_of(pool, "v")[1000..1000 + 9 * MIB]);
    place.ok(["volume", "copy", "v", text(&path)].iter().chain(&range));
    assert_same(&std::fs::read(&path).unwrap(), &expected);
    assert_eq!(path.metadata().unwrap().ino(), inode);
    // Out of the file.
    place.ok(["volume", "copy", text(&path), "w", "--from-offset", "20MiB", "--to-offset", "3"]);
    assert_same(&bytes_of(pool, "w")[3..3 + 4 * MIB], &expected[20 * MIB..]);
}

#[test]
fn overlapping_ranges_of_one_volume_are_moved() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    for (from, to) in [(0, 3 * MIB + 1), (3 * MIB + 1, 0)] {
        let mut expected = pattern(VOLUME_BYTES, 3);
        put(pool, "v", 0, &expected);
        let (from_text, to_text) = (from.to_string(), to.to_string());
        let options = ["--from-offset", &from_text, "--to-offset", &to_text, "--bytes", "20MiB"];
        place.ok(["volume", "copy", "v", "v"].iter().chain(&options));
        expected.copy_within(from..from + 20 * MIB, to);
        assert_same(&bytes_of(pool, "v"), &expected);
    }
}

#[test]
fn flush_replaces_the_file_and_load_sets_the_rest_to_zero() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let data = pattern(VOLUME_BYTES, 4);
    put(pool, "v", 0, &data);
    let path = place.write("files/file", b"before");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let link = place.join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    place.ok(["volume", "flush", "v", text(&link)]);
    assert_same(&std::fs::read(&path).unwrap(), &data);
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o640, "the mode of the file before");
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert_eq!(names(&place.join("files")), ["file"]);
    let short = place.write("short", &data[..5000]);
    assert!(place.ok(["volume", "load", "v", text(&short)]).out.contains("loaded"));
    let mut expected = vec![0; VOLUME_BYTES];
    expected[..5000].copy_from_slice(&data[..5000]);
    assert_same(&bytes_of(pool, "v"), &expected);
    let long = place.join("long");
    File::create(&long).unwrap().set_len(VOLUME_BYTES as u64 + 1).unwrap();
    place.run(["volume", "load", "v", text(&long)]).assert_refused(1, &["too few", "volume resize"]);
    assert_same(&bytes_of(pool, "v"), &expected);
}

#[test]
fn file_of_a_volume_ends_where_what_was_copied_into_it_ends() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let size = |name: &str| pool.volume_open(name.as_bytes(), false).unwrap().file_size().unwrap().unwrap();
    place.ok(["volume", "create", "w", "--size", "24MiB"]);
    let long = place.write("long", pattern(3 * MIB + 7, 1));
    place.ok(["volume", "load", "v", text(&long)]);
    assert_eq!(size("v"), 3 * MIB as u64 + 7);
    let short = place.write("short", pattern(5000, 2));
    place.ok(["volume", "copy", text(&short), "v"]);
    assert_eq!(size("v"), 3 * MIB as u64 + 7, "a copy into it does not shorten it");
    place.ok(["volume", "copy", text(&short), "v", "--to-offset", "4MiB"]);
    assert_eq!(size("v"), 4 * MIB as u64 + 5000);
    // A volume with a file, whole and in part.
    place.ok(["volume", "copy", "v", "w", "--from-offset", "1MiB", "--bytes", "1MiB"]);
    assert_eq!(size("w"), MIB as u64);
    place.ok(["volume", "copy", "v", "w"]);
    assert_eq!(size("w"), 4 * MIB as u64 + 5000);
    place.ok(["volume", "load", "w", text(&short)]);
    assert_eq!(size("w"), 5000);
    // By the mover.
    let url = |path: &Path| format!("file://{}", text(path));
    place.ok(["volume", "copy", &url(&long), "w", "--to-offset", "10"]);
    assert_eq!(size("w"), 3 * MIB as u64 + 17);
    place.ok(["volume", "load", "w", &url(&short)]);
    assert_eq!(size("w"), 5000);
    // One that no MPI program used as a file, and whose bytes were only put.
    place.ok(["volume", "format", "v"]);
    put(pool, "v", MIB, &[7]);
    place.ok(["volume", "copy", "v", "w"]);
    assert_eq!(size("w"), VOLUME_BYTES as u64);
}

#[test]
fn bad_sides_are_refused_in_words() {
    let place = Place::new();
    let Some(_pool) = pool(&place) else { return };
    let file = place.write("file", b"before");
    let directory = place.join("");
    let refused = |arguments: &[&str], words: &[&str]| {
        place.run(["volume"].iter().chain(arguments)).assert_refused(1, words);
    };
    refused(&["copy", text(&file), "./other"], &["neither is a volume"]);
    refused(&["copy", "none", text(&file)], &["there is no volume"]);
    refused(&["copy", "v", text(&directory)], &["is a directory"]);
    refused(&["copy", "v", "/no/such/directory/file"], &["No such file"]);
    refused(&["copy", "v", "v", "--to-offset", "1"], &["too few", "--bytes"]);
    refused(&["copy", "v", text(&file), "--from-offset", "25MiB"], &["has 25165824 bytes"]);
    refused(&["copy", "v", "/dev/null"], &["neither a regular file nor a block device"]);
    refused(&["copy", "/dev/zero", "v"], &["neither a regular file nor a block device"]);
    refused(&["flush", "v", "w"], &["neither a file nor an object", "./FILE"]);
    refused(&["flush", text(&file), "./x"], &["is no volume"]);
    refused(&["copy", "v", "ftp://host/x"], &["no kind of store"]);
    refused(&["copy", "v", "s3://bucket"], &["names no object"]);
    refused(&["copy", "v", "file:///tmp/x", "--to-offset", "5"], &["replaced whole"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"before");
}

/// Where the bytes of a copy go so slowly that it can be killed midway: a directory as a store, with a limit of its rate.
fn slow(directory: &Path, name: &str, rate: &str) -> String {
    format!("file://{}/{name}?rate={rate}", text(directory))
}

#[test]
fn volume_goes_to_a_store_and_back_with_its_holes_and_ranges() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let store = place.join("store");
    std::fs::create_dir(&store).unwrap();
    put(pool, "v", 7 * MIB - 1, &pattern(2 * MIB, 5));
    let whole = bytes_of(pool, "v");
    let url = format!("file://{}/object", text(&store));
    let flushed = place.json(["volume", "flush", "v", &url, "--json"]);
    assert_eq!(flushed["bytes"], VOLUME_BYTES);
    let path = store.join("object");
    assert_same(&std::fs::read(&path).unwrap(), &whole);
    let found = path.metadata().unwrap();
    assert!(found.blocks() * 512 < 4 * MIB as u64, "zeros are holes: {} blocks", found.blocks());
    assert_eq!(found.mode() & 0o777, 0o600, "the mode of the volume");
    // A range replaces it whole.
    place.ok(["volume", "copy", "v", &url, "--from-offset", "7MiB", "--bytes", "1MiB"]);
    assert_same(&std::fs::read(&path).unwrap(), &whole[7 * MIB..8 * MIB]);
    assert_eq!(names(&store), ["object"]);
    // And back.
    put(pool, "v", 0, &pattern(VOLUME_BYTES, 6));
    let mut expected = bytes_of(pool, "v");
    expected[1000..1000 + MIB - 10].copy_from_slice(&whole[7 * MIB + 10..8 * MIB]);
    place.ok(["volume", "copy", &url, "v", "--from-offset", "10", "--to-offset", "1000"]);
    assert_same(&bytes_of(pool, "v"), &expected);
    place.ok(["volume", "load", "v", &url]);
    let mut expected = vec![0; VOLUME_BYTES];
    expected[..MIB].copy_from_slice(&whole[7 * MIB..8 * MIB]);
    assert_same(&bytes_of(pool, "v"), &expected);
    place.run(["volume", "load", "v", &format!("{url}-none")]).assert_refused(1, &["no such object"]);
}

/// The temporary files in a directory, with their sizes.
fn temporaries(directory: &Path, name: &str) -> Vec<(PathBuf, u64)> {
    let others =
        names(directory).into_iter().filter(|other| other != name).map(|other| directory.join(other));
    others.filter_map(|path| path.metadata().ok().map(|found| (path, found.len()))).collect()
}

#[test]
fn flush_to_a_store_that_is_killed_or_stopped_leaves_the_old_object_whole() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let store = place.join("store");
    std::fs::create_dir(&store).unwrap();
    let path = store.join("object");
    let (old, new) = (pattern(5 * MIB, 7), pattern(VOLUME_BYTES, 8));
    std::fs::write(&path, &old).unwrap();
    put(pool, "v", 0, &new);
    let slow = slow(&store, "object", "4MB/s");
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let mut flush = place.command(["volume", "flush", "v", &slow]).stderr(Stdio::null()).spawn().unwrap();
        eventually("a part of it is copied", || {
            temporaries(&store, "object").iter().any(|(_, bytes)| *bytes > 0)
        });
        kill(flush.id() as i32, signal);
        assert!(!flush.wait().unwrap().success());
        // The mover's program notices the end of the command, and discards what it had begun.
        eventually("nothing is left of it", || temporaries(&store, "object").is_empty());
        assert_same(&std::fs::read(&path).unwrap(), &old);
    }
    place.ok(["volume", "flush", "v", &format!("file://{}", text(&path))]);
    assert_same(&std::fs::read(&path).unwrap(), &new);
    assert_eq!(names(&store), ["object"]);
}

#[test]
fn flush_to_a_file_that_is_killed_leaves_the_old_file_whole_and_its_rest_to_the_next() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let directory = place.join("files");
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("file");
    let (old, new) = (pattern(5 * MIB, 9), pattern(VOLUME_BYTES, 10));
    std::fs::write(&path, &old).unwrap();
    put(pool, "v", 0, &new);
    // It is killed as soon as it has copied a part; a copy that was done first is repeated.
    let mut killed = false;
    for _ in 0..200 {
        let mut flush = place
            .command(["volume", "flush", "v", text(&path)])
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let temporary = directory.join(".file.forebay-new");
        while flush.try_wait().unwrap().is_none() {
            if temporary.metadata().is_ok_and(|found| found.len() > 0) {
                kill(flush.id() as i32, libc::SIGKILL);
                break;
            }
        }
        let status = flush.wait().unwrap();
        if !status.success() && temporary.exists() {
            killed = true;
            break;
        }
        std::fs::write(&path, &old).unwrap();
    }
    assert!(killed, "no copy was killed midway");
    assert_same(&std::fs::read(&path).unwrap(), &old);
    // The next one uses what it left; at the same time there is only one.
    let held = File::open(directory.join(".file.forebay-new")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    place.run(["volume", "flush", "v", text(&path)]).assert_refused(1, &["another copy to this file"]);
    drop(held);
    place.ok(["volume", "flush", "v", text(&path)]);
    assert_same(&std::fs::read(&path).unwrap(), &new);
    assert_eq!(names(&directory), ["file"]);
}

#[test]
fn flush_every_so_often_copies_again_until_a_signal_or_the_end_of_the_pool() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let path = place.join("file");
    let start = || {
        place
            .command(["volume", "flush", "v", text(&path), "--every", "1s"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let has = |byte: u8| {
        let mut first = [0];
        File::open(&path).is_ok_and(|file| file.read_exact_at(&mut first, 0).is_ok() && first == [byte])
    };
    let mut flush = start();
    for byte in [1, 2] {
        put(pool, "v", 0, &[byte]);
        eventually("it is copied", || has(byte));
    }
    kill(flush.id() as i32, libc::SIGTERM);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&flush.wait().unwrap()), Some(libc::SIGTERM));
    let mut flush = start();
    put(pool, "v", 0, &[3]);
    eventually("it is copied", || has(3));
    place.ok(["down", "--force"]);
    assert_eq!(flush.wait().unwrap().code(), Some(1));
    assert!(has(3));
}

#[test]
fn flush_every_so_often_goes_on_after_a_failure_of_the_place_and_ends_when_the_volume_is_gone() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let (directory, away) = (place.join("files"), place.join("away"));
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("file");
    let log = place.join("log");
    let mut flush = place
        .command(["volume", "flush", "v", text(&path), "--every", "1s"])
        .stdout(Stdio::null())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let has = |byte: u8| {
        let mut first = [0];
        File::open(&path).is_ok_and(|file| file.read_exact_at(&mut first, 0).is_ok() && first == [byte])
    };
    put(pool, "v", 0, &[1]);
    eventually("it is copied", || has(1));
    let said = || std::fs::read_to_string(&log).unwrap();
    std::fs::rename(&directory, &away).unwrap();
    eventually("it says so", || said().contains("it is tried again in 1 s"));
    assert!(said().contains("forebay: cannot create") && said().contains("/files/"), "{}", said());
    std::fs::rename(&away, &directory).unwrap();
    put(pool, "v", 0, &[2]);
    eventually("it is copied again", || has(2));
    eventually("the volume is free", || place.run(["volume", "delete", "v"]).code == Some(0));
    assert_eq!(flush.wait().unwrap().code(), Some(1), "{}", said());
    assert!(said().contains("there is no volume `v`"), "{}", said());
    // At once, a failure is an error.
    place.run(["volume", "flush", "w", text(&path), "--every", "1s"]).assert_refused(1, &["no volume `w`"]);
}

#[test]
fn volumes_that_share_bytes_at_other_offsets_are_not_copied_onto_each_other() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    place.ok(["volume", "create", "w", "--size", "24MiB"]);
    let (v, w) = (pattern(VOLUME_BYTES, 1), pattern(VOLUME_BYTES, 2));
    put(pool, "v", 0, &v);
    put(pool, "w", 0, &w);
    for (from, to) in [("v+w", "w+v"), ("v", "v+w"), ("w", "v+w"), ("v+w", "v"), ("v+v", "v+v")] {
        let copied = place.run(["volume", "copy", from, to, "--bytes", "4MiB"]);
        copied.assert_refused(1, &["a volume in common", "copy to a file first"]);
    }
    assert_same(&bytes_of(pool, "v"), &v);
    assert_same(&bytes_of(pool, "w"), &w);
    // As the same part it is moved, in either direction.
    for (from, to) in [(MIB, 3 * MIB), (3 * MIB, MIB)] {
        let joined = bytes_of(pool, "v+w");
        let words = [from, to].map(|at| at.to_string());
        let options = ["--from-offset", &words[0], "--to-offset", &words[1], "--bytes", "9MiB"];
        place.ok(["volume", "copy", "v+w", "v+w"].into_iter().chain(options));
        let mut moved = joined.clone();
        moved[to..to + 9 * MIB].copy_from_slice(&joined[from..from + 9 * MIB]);
        assert_same(&bytes_of(pool, "v+w"), &moved);
    }
}
