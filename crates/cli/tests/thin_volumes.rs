//! Thin volumes: they take the space of what is written to them, a write for which there is none fails in words, and what
//! is discarded is free again, also by block devices and exports (docs/decisions/0048).

mod common;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use common::devices::{done, run, Device};
use common::{eventually, kill, Place};
use forebay_client::{Pool, Role};
use forebay_types::Code;

const MIB: u64 = 1 << 20;

/// A pool of 128 MiB with a thin volume of 1 GiB, or none where its daemon may not resize a tmpfs.
fn pool(place: &Place) -> Option<PathBuf> {
    if !common::is_root() {
        return None;
    }
    let up = place.json(["up", "--capacity", "128MiB", "--json"]);
    place.ok(["volume", "create", "t", "--size", "1GiB", "--thin"]);
    Some(PathBuf::from(up["pool"].as_str().unwrap()))
}

fn attach(dir: &Path) -> &'static Pool {
    Pool::attach_as(dir, Role::Tool).unwrap()
}

fn free(place: &Place) -> u64 {
    place.json(["status", "--json"])["free_bytes"].as_u64().unwrap()
}

fn allocated(place: &Place) -> u64 {
    place.json(["volume", "show", "t", "--json"])[0]["allocated_bytes"].as_u64().unwrap()
}

#[test]
fn thin_volume_takes_what_is_written_and_gives_back_what_is_discarded() {
    let place = Place::new();
    let Some(dir) = pool(&place) else { return };
    let before = free(&place);
    assert!(before > 100 * MIB, "nothing is reserved: {before}");
    let list = place.json(["volume", "list", "--json"]);
    assert_eq!((list[0]["bytes"].as_u64(), list[0]["thin"].as_bool()), (Some(1 << 30), Some(true)));
    let volume = attach(&dir).volume_open(b"t", true).unwrap();
    let data = vec![7; 8 * MIB as usize];
    volume.put_bytes(512 * MIB, &data).unwrap();
    let mut seen = vec![1; 16 * MIB as usize];
    volume.get_bytes(508 * MIB, &mut seen).unwrap();
    let (hole, rest) = seen.split_at(4 * MIB as usize);
    assert!(rest[..data.len()] == data && hole.iter().chain(&rest[data.len()..]).all(|byte| *byte == 0));
    assert_eq!(allocated(&place), 8 * MIB, "to read a hole takes nothing");
    assert_eq!(before - free(&place), 8 * MIB, "it is counted");
    assert_eq!(place.json(["status", "--json"])["volume_bytes"].as_u64(), Some(8 * MIB));
    assert!(place.ok(["volume", "list"]).out.contains("t  (thin, 8 MiB allocated)"));
    assert!(place.ok(["volume", "show", "t"]).out.contains("8 MiB (thin)"));
    volume.discard(514 * MIB, 4 * MIB).unwrap();
    assert_eq!((allocated(&place), before - free(&place)), (4 * MIB, 4 * MIB));
    volume.get_bytes(508 * MIB, &mut seen).unwrap();
    assert!(seen[6 << 20..10 << 20].iter().all(|byte| *byte == 0) && seen[10 << 20] == 7);
    // It has grown and shrunk, and keeps what it has over the death of the worker.
    place.ok(["volume", "resize", "t", "--size", "2GiB"]);
    let larger = attach(&dir).volume_open(b"t", true).unwrap();
    larger.put_bytes(1536 * MIB, &data).unwrap();
    assert_eq!((larger.bytes(), allocated(&place)), (2 << 30, 12 * MIB));
    drop((larger, volume));
    let pid = place.json(["status", "--json"])["pids"]["worker"].as_i64().unwrap() as i32;
    kill(pid, libc::SIGKILL);
    eventually("another worker serves", || {
        let status = place.json(["status", "--json"]);
        status["state"] == "up" && status["pids"]["worker"].as_i64() != Some(i64::from(pid))
    });
    let volume = attach(&dir).volume_open(b"t", true).unwrap();
    volume.get_bytes(1536 * MIB, &mut seen[..data.len()]).unwrap();
    assert!(seen[..data.len()] == data);
    drop(volume);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
    place.ok(["volume", "resize", "t", "--size", "1GiB"]);
    eventually("the space of the dropped segment is free", || before - free(&place) == 4 * MIB);
    place.ok(["volume", "format", "t"]);
    assert_eq!((allocated(&place), free(&place)), (0, before));
    place.run(["volume", "format", "t", "--zero"]).assert_refused(1, &["cannot format volume t", "free"]);
    place.ok(["volume", "delete", "t"]);
    eventually("all space is free", || free(&place) >= before);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

#[test]
fn copy_into_a_thin_volume_takes_no_space_for_zeros() {
    let place = Place::new();
    let Some(dir) = pool(&place) else { return };
    let volume = attach(&dir).volume_open(b"t", true).unwrap();
    let small = place.write("small", b"small");
    let sparse = place.join("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&sparse).unwrap(),
        b"end",
        (1 << 30) - 3,
    )
    .unwrap();
    for url in ["", "file://"] {
        let [small, sparse] = [&small, &sparse].map(|path| format!("{url}{}", path.display()));
        // What was there before is gone, and its space is free.
        volume.put_bytes(900 * MIB, &[1; 1 << 20]).unwrap();
        place.ok(["volume", "load", "t", &small]);
        let mut seen = [1; 6];
        volume.get_bytes(0, &mut seen).unwrap();
        assert_eq!(&seen, b"small\0", "{url}");
        volume.get_bytes(900 * MIB, &mut seen).unwrap();
        assert_eq!(seen, [0; 6], "{url}");
        assert!(allocated(&place) <= 2 * MIB, "{url}: {}", allocated(&place));
        place.ok(["volume", "load", "t", &sparse]);
        volume.get_bytes((1 << 30) - 6, &mut seen).unwrap();
        assert_eq!(&seen, b"\0\0\0end", "{url}");
        assert!(allocated(&place) <= 2 * MIB, "{url}: {}", allocated(&place));
    }
    // From a volume whose memory is reserved.
    place.ok(["volume", "create", "v", "--size", "8MiB"]);
    attach(&dir).volume_open(b"v", true).unwrap().put_bytes(4 * MIB + 5, b"x").unwrap();
    place.ok(["volume", "format", "t"]);
    volume.put_bytes(MIB, &[1; 1 << 20]).unwrap();
    place.ok(["volume", "copy", "v", "t"]);
    let mut seen = vec![1; 8 << 20];
    volume.get_bytes(0, &mut seen).unwrap();
    assert!(seen.iter().enumerate().all(|(i, byte)| *byte == if i == (4 << 20) + 5 { b'x' } else { 0 }));
    assert!(allocated(&place) <= 2 * MIB, "{}", allocated(&place));
}

#[test]
fn put_for_which_there_is_no_space_fails_and_files_and_volumes_share_the_capacity() {
    let place = Place::new();
    let Some(dir) = pool(&place) else { return };
    let volume = attach(&dir).volume_open(b"t", true).unwrap();
    let step = vec![5; MIB as usize];
    let mut end = 0;
    let failed = loop {
        match volume.put_bytes(end, &step) {
            Ok(()) => end += MIB,
            Err(code) => break code,
        }
    };
    assert_eq!((failed, failed.errno()), (Code::NoSpace, libc::ENOSPC));
    assert!((100 * MIB..128 * MIB).contains(&end), "{end}");
    // What is there can be changed, what is not there is read, and others get no space either.
    volume.put_bytes(end - MIB, &step).unwrap();
    let mut byte = [1];
    volume.get_bytes(900 * MIB, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    place.run(["volume", "create", "x", "--size", "8MiB"]).assert_refused(1, &["free"]);
    let file = place.write("file", vec![9; 8 << 20]);
    place
        .run(["volume", "copy", file.to_str().unwrap(), "t", "--to-offset", "512MiB"])
        .assert_refused(1, &["space"]);
    volume.discard(0, 32 * MIB).unwrap();
    place.ok(["volume", "create", "x", "--size", "8MiB"]);
    place.ok(["volume", "copy", file.to_str().unwrap(), "t", "--to-offset", "512MiB"]);
    volume.get_bytes(520 * MIB - 1, &mut byte).unwrap();
    assert_eq!(byte, [9]);
    assert_eq!(place.json(["fsck", "--json"])["clean"], true);
}

/// A device of a thin volume of one piece, which the kernel serves, and of two, which a process serves.
#[test]
fn device_of_a_thin_volume_frees_what_is_discarded_and_reports_that_there_is_no_space() {
    for pieces in [1, 2] {
        let place = Place::new();
        if OpenOptions::new().write(true).open("/dev/loop-control").is_err() {
            eprintln!("skipped: needs loop devices");
            return;
        }
        let Some(_dir) = pool(&place) else { return };
        if pieces == 2 {
            place.ok(["volume", "resize", "t", "--size", "1100MiB"]);
        }
        let device = Device::attach(&place, "t", &[]);
        let name = device.name();
        let write = |seek: &str, count: &str| {
            let (to, seek, count) = (format!("of={name}"), format!("seek={seek}"), format!("count={count}"));
            run("dd", &["if=/dev/urandom", &to, "bs=1M", &seek, &count, "conv=fsync,notrunc"])
        };
        assert!(write("600", "16").0);
        assert_eq!(allocated(&place), 16 * MIB, "{pieces}");
        let (succeeded, said) = run("blkdiscard", &["--offset", "608MiB", "--length", "8MiB", name]);
        assert!(succeeded, "{pieces}: {said}");
        assert_eq!(allocated(&place), 8 * MIB, "{pieces}");
        assert!(!write("0", "200").0, "{pieces}: there is no space for it");
        assert!(run("blkdiscard", &[name]).0, "{pieces}");
        assert_eq!(allocated(&place), 0, "{pieces}");
        done("mkfs.ext4", &["-q", "-F", name]);
        let small = allocated(&place);
        assert!(small < 64 * MIB, "{pieces}: {small} bytes for an empty file system");
        place.ok(["volume", "detach", "t"]);
        device.assert_detached();
        place.ok(["volume", "delete", "t"]);
    }
}
