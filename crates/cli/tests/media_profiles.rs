//! Pools whose targets emulate a medium: what each interface reads and writes passes the pacer, which counts it, and is
//! what it is without one. Nothing here is timed.

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{is_root, Place};
use forebay_client::{File, PathBuffer, Place as At, Pool, Role, Striping};
use forebay_types::Ino;
use serde_json::Value;

const MIB: usize = 1 << 20;

/// A pool that emulates a medium, which is fast enough for a test.
fn up(place: &Place, more: &[&str]) -> PathBuf {
    up_as(place, "optane", more)
}

fn up_as(place: &Place, profile: &str, more: &[&str]) -> PathBuf {
    let dir = place.join("pool");
    let mut words =
        vec!["up", "--capacity", "256MiB", "--media-profile", profile, "--path", dir.to_str().unwrap()];
    words.extend(more);
    place.ok(words);
    dir
}

/// Requests and bytes that the pacers of all targets counted: reads, then writes.
fn counted(place: &Place, pool: &Path) -> [(u64, u64); 2] {
    let status = place.json(["--pool", pool.to_str().unwrap(), "status", "--json"]);
    let targets = status["media_profile"]["targets"].as_array().unwrap_or_else(|| panic!("{status}")).clone();
    ["reads", "writes"].map(|direction| {
        let sum = |key: &str| targets.iter().map(|target| target[direction][key].as_u64().unwrap()).sum();
        (sum("requests"), sum("bytes"))
    })
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i / 7 % 251) as u8).collect()
}

/// True where pools can be mounted.
fn can_mount() -> bool {
    let can = is_root() && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: needs root and /dev/fuse");
    }
    can
}

#[test]
fn client_library_is_paced_whatever_the_layout() {
    let place = Place::new();
    let dir = up(&place, &[]);
    let pool = Pool::attach_as(&dir, Role::Tool).unwrap();
    let data = pattern(3 * MIB + 5);
    let mut before = counted(&place, &dir);
    for count in [1, 4] {
        let name = format!("f{count}");
        let striping =
            Striping { stripe_count: count, stripe_bytes: 64 << 10, directory_takes_precedence: false };
        let file = open(pool, &name, striping);
        assert_eq!(file.fd(), None, "what is done with it would take no time of the medium's");
        assert_eq!(file.write_at(&data, 0), Ok(data.len()));
        let mut back = vec![0; data.len() + 10];
        assert_eq!(file.read_at(&mut back, 0), Ok(data.len()));
        assert!(back[..data.len()] == data[..]);
        let after = counted(&place, &dir);
        for (direction, (before, after)) in before.iter().zip(&after).enumerate() {
            assert!(
                after.1 - before.1 >= data.len() as u64,
                "{name}, direction {direction}: {before:?} {after:?}"
            );
            assert!(after.0 > before.0);
        }
        before = after;
    }
}

#[test]
fn file_on_a_medium_that_seeks_has_one_backing_file_unless_more_are_asked_for() {
    for (profile, proposed) in [("optane", 5), ("hdd", 1)] {
        let place = Place::new();
        let pool = Pool::attach_as(&up_as(&place, profile, &[]), Role::Tool).unwrap();
        for (directory_takes_precedence, wanted) in [(true, proposed), (false, 4)] {
            let striping = Striping { stripe_count: 4, stripe_bytes: 1 << 20, directory_takes_precedence };
            let file = open(pool, &format!("f{wanted}"), striping);
            let entry = pool.get_attr(file.ino()).unwrap();
            let count: u16 = entry.layout.components().iter().map(|c| c.stripe_count).sum();
            assert_eq!(count, wanted, "{profile}");
        }
    }
}

fn open(pool: &Pool, path: &str, striping: Striping) -> File {
    let place = At { dir: Ino::ROOT, path: path.as_bytes() };
    let flags = libc::O_RDWR | libc::O_CREAT;
    pool.open_striped(place, flags, 0o600, striping, &mut PathBuffer::new()).unwrap()
}

#[test]
fn mount_serves_each_read_and_write_by_requests() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let at = place.join("mnt");
    std::fs::create_dir(&at).unwrap();
    let dir = up(&place, &["--mount", at.to_str().unwrap()]);
    let status = place.json(["--pool", dir.to_str().unwrap(), "status", "--json"]);
    assert_eq!(status["mounts"][0]["data"], "requests", "{status}");
    let data = pattern(2 * MIB + 3);
    std::fs::write(at.join("f"), &data).unwrap();
    let after_write = counted(&place, &dir);
    assert_eq!(after_write[1].1, data.len() as u64, "each byte was written once");
    assert!(std::fs::read(at.join("f")).unwrap() == data);
    let after_read = counted(&place, &dir);
    assert_eq!(after_read[0].1 - after_write[0].1, data.len() as u64, "and read once");
    // Nothing is cached: another read is paced, too.
    assert!(std::fs::read(at.join("f")).unwrap() == data);
    assert_eq!(counted(&place, &dir)[0].1 - after_read[0].1, data.len() as u64);
    // A mapping reads pages, and writes them back.
    let file = std::fs::File::options().read(true).write(true).open(at.join("f")).unwrap();
    let before = counted(&place, &dir);
    // SAFETY: a fresh mapping at an address of the kernel's choice, used within its length and unmapped.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped =
            libc::mmap(std::ptr::null_mut(), 8192, protection, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if mapped == libc::MAP_FAILED {
            let e = std::io::Error::last_os_error();
            // Linux before 6.6 has no shared mapping of a file without cached pages.
            assert_eq!(e.raw_os_error(), Some(libc::ENODEV), "{e}");
            return eprintln!("skipped: this kernel does not map such files");
        }
        std::ptr::copy_nonoverlapping(b"changed".as_ptr(), mapped.cast::<u8>().add(4096), 7);
        assert_eq!((libc::msync(mapped, 8192, libc::MS_SYNC), libc::munmap(mapped, 8192)), (0, 0));
    }
    let after = counted(&place, &dir);
    assert!(
        (0..2).all(|way| after[way].1 > before[way].1),
        "a page was read and written: {before:?} {after:?}"
    );
    let mut some = [0; 7];
    file.read_exact_at(&mut some, 4096).unwrap();
    assert_eq!(&some, b"changed");
}

#[test]
fn programs_under_the_preload_library_are_paced_with_stdio_and_copies() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let dir = up(&place, &[]);
    let plain = place.write("plain", pattern(MIB));
    let script = format!(
        "cp {0} /forebay/copy && cat /forebay/copy | cmp - {0} && echo more >> /forebay/copy && \
         awk 'END {{ print NR }}' /forebay/copy > /forebay/lines && wc -c < /forebay/copy",
        plain.display()
    );
    let before = counted(&place, &dir);
    let ran = place.ok(["--pool", dir.to_str().unwrap(), "run", "--quiet", "--", "bash", "-c", &script]);
    assert_eq!(ran.out.trim(), (MIB + 5).to_string(), "{ran:?}");
    let after = counted(&place, &dir);
    assert!(after[1].1 - before[1].1 >= MIB as u64 + 5, "{before:?} {after:?}");
    assert!(after[0].1 - before[0].1 >= 2 * MIB as u64, "cat and awk read it: {before:?} {after:?}");
    place.ok(["--pool", dir.to_str().unwrap(), "down"]);
    assert!(!dir.join("mnt").exists(), "the mount of `forebay run` ended with the pool");
}

/// Small files, a large one that all threads copy, one with several backing files, and their verification.
#[test]
fn staging_moves_each_byte_at_the_speed_of_the_medium() {
    let place = Place::new();
    let dir = up(&place, &[]);
    let pool = dir.to_str().unwrap();
    let source = place.join("source");
    std::fs::create_dir(&source).unwrap();
    let sizes = [("small", 5000), ("other", MIB + 1), ("large", 65 * MIB)];
    let all: u64 = sizes.iter().map(|(_, bytes)| *bytes as u64).sum();
    for (name, bytes) in sizes {
        std::fs::write(source.join(name), pattern(bytes)).unwrap();
    }
    let staged = |words: &[&str]| {
        let before = counted(&place, &dir);
        place.ok([&["--pool", pool][..], words].concat());
        let after = counted(&place, &dir);
        [0, 1].map(|way| after[way].1 - before[way].1)
    };
    let from = source.to_str().unwrap();
    assert_eq!(staged(&["stage-in", &format!("{from}:/in")]), [0, all]);
    assert_eq!(staged(&["stage-in", "--verify", &format!("{from}:/verified")]), [all, all], "and read again");
    let to = place.join("results");
    assert_eq!(staged(&["stage-out", &format!("/in:{}", to.display())]), [all, 0]);
    for (name, bytes) in sizes {
        assert!(std::fs::read(to.join(name)).unwrap() == pattern(bytes), "{name}");
    }
}

#[test]
fn run_starts_a_pool_that_emulates_a_medium_and_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let ran = place.ok([
        "run",
        "--media-profile",
        "pcram",
        "--quiet",
        "--",
        "bash",
        "-c",
        "echo text > /forebay/f && cat /forebay/f",
    ]);
    assert_eq!(ran.out, "text\n");
    place.assert_nothing_left();
}

#[test]
fn profile_survives_the_worker_and_the_pool_and_can_be_ended() {
    let place = Place::new();
    let dir = up(&place, &[]);
    let pool = dir.to_str().unwrap();
    let profile = |status: &Value| status["media_profile"]["profile"].as_str().map(str::to_owned);
    let status = place.json(["--pool", pool, "status", "--json"]);
    assert_eq!(profile(&status).as_deref(), Some("optane"));
    let text = place.ok(["--pool", pool, "status"]).out;
    assert!(text.contains("optane: read 305 ns and 6600 MB/s"), "{text}");
    let client = Pool::attach_as(&dir, Role::Tool).unwrap();
    let striping = Striping::OF_DIRECTORY;
    open(client, "f", striping).write_at(&pattern(MIB), 0).unwrap();
    let before = counted(&place, &dir);
    let worker = status["pids"]["worker"].as_u64().unwrap().to_string();
    assert!(Command::new("kill").args(["-9", &worker]).status().unwrap().success());
    common::eventually("the next worker serves", || {
        let status = place.json(["--pool", pool, "status", "--json"]);
        status["pids"]["worker"].as_u64().is_some_and(|pid| pid.to_string() != worker)
            && profile(&status).is_some()
    });
    assert_eq!(counted(&place, &dir), before, "the supervisor kept the pacers");
    let kept = place.run(["--pool", pool, "down", "--keep"]);
    if kept.code != Some(0) {
        return eprintln!("skipped: the memory of a pool cannot stay mounted here");
    }
    place.ok(["up", "--path", pool]);
    assert_eq!(profile(&place.json(["--pool", pool, "status", "--json"])).as_deref(), Some("optane"));
    place.ok(["--pool", pool, "down", "--keep"]);
    place.ok(["up", "--path", pool, "--media-profile", "none"]);
    assert_eq!(profile(&place.json(["--pool", pool, "status", "--json"])), None);
}

#[test]
fn profile_with_an_error_is_refused_with_line_and_key() {
    let place = Place::new();
    let file = place.write("mine.toml", "read_latency = \"1ms\"\nwrite_latency = \"soon\"\n");
    let ran = place.run(["up", "--media-profile", file.to_str().unwrap()]);
    assert_ne!(ran.code, Some(0));
    assert!(ran.err.contains("mine.toml:2") && ran.err.contains("write_latency"), "{ran:?}");
    let ran = place.run(["up", "--media-profile", "floppy"]);
    assert!(ran.code != Some(0) && ran.err.contains("pcram"), "{ran:?}");
    place.assert_nothing_left();
}
