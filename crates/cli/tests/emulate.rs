//! Emulated block devices (`forebay emulate`): any file system on them, statistics, damage that is found, and ends of all
//! kinds. Needs root, FUSE and loop devices, and says so where it skips. Nothing here is timed.

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::devices::Mounted;
use common::{eventually, is_root, Place, Ran};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn can_emulate() -> bool {
    let loops = OpenOptions::new().write(true).open("/dev/loop-control").is_ok();
    let can = is_root() && loops && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: needs root, /dev/loop-control and /dev/fuse");
    }
    can
}

/// A device, which ends with the test.
struct Device<'a> {
    place: &'a Place,
    name: String,
    path: PathBuf,
    /// Its number in the order of all disks: numbers of loop devices are used again.
    sequence: String,
}

impl<'a> Device<'a> {
    fn up(place: &'a Place, profile: &str, size: &str, options: &[&str]) -> Device<'a> {
        let name = place.path.file_name().unwrap().to_string_lossy().into_owned();
        let words = ["emulate", "up", "--json", "--profile", profile, "--size", size, "--name", &name];
        let made = Device::parse(place.ok(words.iter().chain(options)));
        let path: PathBuf = made["device"].as_str().unwrap().into();
        let sequence = Device::attribute(&path, "diskseq").unwrap();
        Device { place, path, name, sequence }
    }

    fn parse(ran: Ran) -> Value {
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
    }

    fn stat(&self) -> Value {
        self.place.json(["emulate", "stat", &self.name, "--json"])
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.stat()["log"].as_str().unwrap()).unwrap()
    }

    /// Opens it so that each request reaches it.
    fn open(&self) -> File {
        let direct = libc::O_DIRECT;
        OpenOptions::new().read(true).write(true).custom_flags(direct).open(&self.path).unwrap()
    }

    fn attribute(path: &Path, name: &str) -> std::io::Result<String> {
        std::fs::read_to_string(Path::new("/sys/block").join(path.file_name().unwrap()).join(name))
    }

    /// True while the kernel has the device.
    fn exists(&self) -> bool {
        Device::attribute(&self.path, "loop/backing_file").is_ok()
            && Device::attribute(&self.path, "diskseq").is_ok_and(|now| now == self.sequence)
    }

    fn is_listed(&self) -> bool {
        let all = self.place.json(["emulate", "list", "--json"]);
        all.as_array().unwrap().iter().any(|one| one["name"] == self.name.as_str())
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        let _ = self.place.run(["emulate", "down", &self.name, "--force"]);
    }
}

/// A block of memory that direct I/O can use.
#[repr(align(4096))]
struct Block([u8; 4096]);

fn done(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}"));
    if !output.status.success() {
        eprintln!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    output.status.success()
}

#[test]
fn file_system_on_a_device_keeps_its_files_and_is_clean() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "optane", "64MiB", &["--checksum", "--verify-writes", "--write-protect"]);
    let (path, at) = (device.path.to_str().unwrap(), place.join("mnt"));
    assert!(done("mkfs.ext4", &["-q", path]));
    std::fs::create_dir(&at).unwrap();
    let data: Vec<u8> = (0..8 * MIB).map(|i| (i / 11 % 253) as u8).collect();
    for round in 0..2 {
        let mounted = Mounted::new("ext4", path, &at);
        if round == 0 {
            std::fs::write(at.join("file"), &data).unwrap();
            for i in 0..100 {
                std::fs::write(at.join(format!("small{i}")), i.to_string()).unwrap();
            }
            let busy = place.run(["emulate", "down", &device.name]);
            assert!(busy.code != Some(0) && busy.err.contains("mounted"), "{busy:?}");
        } else {
            assert!(std::fs::read(at.join("file")).unwrap() == data);
            assert_eq!(std::fs::read_to_string(at.join("small99")).unwrap(), "99");
        }
        drop(mounted);
    }
    assert!(done("fsck.ext4", &["-fn", path]));
    let stat = device.stat();
    assert!(stat["medium"]["targets"][0]["writes"]["bytes"].as_u64().unwrap() >= data.len() as u64, "{stat}");
    assert!(stat["faults"]["syncs"].as_u64().unwrap() > 0, "{stat}");
    for fault in ["checksum_errors", "verify_errors", "refused"] {
        assert_eq!(stat["faults"][fault], 0, "{stat}");
    }
    let text = place.ok(["emulate", "stat", &device.name]).out;
    assert!(text.contains("optane") && text.contains("latency of writes"), "{text}");
    place.ok(["emulate", "down", &device.name]);
    assert!(!device.is_listed());
}

#[test]
fn requests_are_counted_and_their_data_kept() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "pcram", "1MiB", &[]);
    let file = device.open();
    let before = device.stat();
    for i in 0..16u64 {
        file.write_all_at(&Block([i as u8 + 1; 4096]).0, i * 4096).unwrap();
    }
    let mut back = Block([0; 4096]);
    for i in 0..16u64 {
        file.read_exact_at(&mut back.0, i * 4096).unwrap();
        assert_eq!(back.0, [i as u8 + 1; 4096]);
    }
    let after = device.stat();
    let grown = |direction: &str, key: &str| {
        let of = |stat: &Value| stat["medium"]["targets"][0][direction][key].as_u64().unwrap();
        of(&after) - of(&before)
    };
    assert_eq!((grown("writes", "requests"), grown("writes", "bytes")), (16, 16 * 4096), "{after}");
    assert!(grown("reads", "requests") >= 16 && grown("reads", "bytes") >= 16 * 4096, "{after}");
    // The path through the kernel takes longer than this medium.
    for direction in ["read", "write"] {
        assert!(after["way_ns"][direction]["small_ns"].as_u64().unwrap() > 0, "{after}");
    }
    drop(file);
    let probed = place.json(["emulate", "probe", &device.name, "--json"]);
    for direction in ["read", "write"] {
        let of = |key: &str| probed[direction][key].as_u64().unwrap_or_else(|| panic!("{probed}"));
        assert!(of("small_ns") > 0 && of("bytes_per_s") > 0, "{probed}");
        // The profile's latency and 4 KiB of its bandwidth; and that bandwidth, rounded.
        let configured = (of("small_configured_ns"), of("configured_bytes_per_s"));
        let expected = if direction == "read" { (10_303, 399_980_774) } else { (14_565, 282_986_099) };
        assert_eq!(configured, expected, "{probed}");
    }
    let file = device.open();
    file.read_exact_at(&mut back.0, 4096).unwrap();
    assert_eq!(back.0, [2; 4096], "the probe left the data as they were");
}

#[test]
fn flipped_bits_are_an_io_error_and_a_line_in_the_log() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "dram", "1MiB", &["--checksum"]);
    let file = device.open();
    let mut block = Block([7; 4096]);
    file.write_all_at(&block.0, 8192).unwrap();
    place.ok(["emulate", "corrupt", &device.name, "--flip", "8200"]);
    let failed = file.read_exact_at(&mut block.0, 8192).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    assert!(device.stat()["faults"]["checksum_errors"].as_u64().unwrap() >= 1);
    assert!(device.log().contains("block 2 does not have its checksum"), "{}", device.log());
    file.read_exact_at(&mut block.0, 4096).unwrap();
    file.write_all_at(&Block([1; 4096]).0, 8192).unwrap();
    file.read_exact_at(&mut block.0, 8192).unwrap();
}

#[test]
fn without_checksums_a_flipped_bit_is_not_found() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "dram", "1MiB", &[]);
    let file = device.open();
    place.ok(["emulate", "corrupt", &device.name, "--flip", "4096"]);
    let mut block = Block([7; 4096]);
    file.read_exact_at(&mut block.0, 4096).unwrap();
    assert_eq!(block.0[0], 1, "the injected flip is real");
}

#[test]
fn verified_writes_find_a_write_that_went_wrong() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "dram", "1MiB", &["--verify-writes"]);
    let file = device.open();
    place.ok(["emulate", "corrupt", &device.name, "--spoil-write"]);
    let failed = file.write_all_at(&Block([9; 4096]).0, 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    assert!(device.log().contains("does not read back"), "{}", device.log());
    file.write_all_at(&Block([9; 4096]).0, 0).unwrap();
}

#[test]
fn stray_write_ends_a_protected_device_with_io_errors() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "dram", "1MiB", &["--write-protect"]);
    let (file, log) = (device.open(), device.stat()["log"].as_str().unwrap().to_owned());
    // The log goes with the device.
    let mut log = File::open(log).unwrap();
    place.ok(["emulate", "corrupt", &device.name, "--stray", "5000"]);
    let mut block = Block([7; 4096]);
    let failed = file.read_exact_at(&mut block.0, 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    drop(file);
    eventually("its keeper has ended", || !device.is_listed());
    let mut text = String::new();
    std::io::Read::read_to_string(&mut log, &mut text).unwrap();
    assert!(text.contains("stray write"), "{text}");
}

/// The number of a process of a device.
fn pid_of(device: &Device<'_>, which: &str) -> i32 {
    let dir = Path::new(&device.stat()["log"].as_str().unwrap().to_owned()).with_file_name("device.json");
    let text: Value = serde_json::from_slice(&std::fs::read(dir).unwrap()).unwrap();
    text[which]["pid"].as_i64().unwrap() as i32
}

fn kill(pid: i32) {
    // SAFETY: a process that the test started.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
}

#[test]
fn killed_server_or_keeper_leaves_io_errors_and_no_device() {
    if !can_emulate() {
        return;
    }
    for which in ["server", "keeper"] {
        let place = Place::new();
        let device = Device::up(&place, "optane", "64MiB", &[]);
        let (path, at) = (device.path.to_str().unwrap(), place.join("mnt"));
        std::fs::create_dir(&at).unwrap();
        assert!(done("mkfs.ext4", &["-q", path]));
        let mounted = Mounted::new("ext4", path, &at);
        std::fs::write(at.join("file"), vec![1; MIB as usize]).unwrap();
        kill(pid_of(&device, which));
        assert!(device.exists());
        // The end of the keeper is that of the server, some time later. A call that would wait for the device for ever
        // would not return.
        eventually("an I/O error", || {
            let file = File::options().write(true).create(true).truncate(true).open(at.join("other"));
            let written = file.and_then(|file| {
                file.write_all_at(&[2; 4096], 0)?;
                file.sync_all()
            });
            written.is_err()
        });
        drop(mounted);
        eventually("nothing is listed", || !device.is_listed());
        eventually("the loop device is gone", || !device.exists());
    }
}

#[test]
fn command_that_is_killed_leaves_no_device_and_no_file() {
    if !can_emulate() {
        return;
    }
    let place = Place::new();
    let name = place.path.file_name().unwrap().to_str().unwrap();
    let words = ["emulate", "up", "--profile", "dram", "--size", "256MiB", "--name", name];
    let mut command = place.command(words);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let command = common::start(command);
    let directory = Path::new("/run/forebay-emulate").join(name);
    eventually("the keeper has begun", || directory.exists());
    drop(command); // with SIGKILL
    eventually("no device is left", || {
        let list = place.json(["emulate", "list", "--json"]);
        let is_up = list.as_array().unwrap().iter().any(|one| one["name"] == name);
        if is_up {
            // It was killed too late, or its keeper is just ending it.
            place.run(["emulate", "down", name]);
        }
        !is_up && !directory.exists()
    });
    let left = std::fs::read_dir("/run").unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|file| file.to_string_lossy().contains(name)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn more_data_than_the_memory_of_their_cgroup_reach_the_device_and_are_verified() {
    if !can_emulate() || Command::new("fio").arg("--version").output().is_err() {
        eprintln!("skipped: needs fio");
        return;
    }
    let place = Place::new();
    let device = Device::up(&place, "optane", "256MiB", &["--checksum"]);
    let (path, at) = (device.path.to_str().unwrap(), place.join("mnt"));
    assert!(done("mkfs.ext4", &["-q", path]));
    std::fs::create_dir(&at).unwrap();
    let mounted = Mounted::new("ext4", path, &at);
    let directory = format!("--directory={}", at.display());
    let ran = place.run([
        "emulate",
        "run",
        "--memory",
        "48MiB",
        "--",
        "fio",
        "--name=v",
        &directory,
        "--rw=randwrite",
        "--bs=64k",
        "--size=128m",
        "--verify=crc32c",
        "--do_verify=1",
        "--ioengine=psync",
        "--end_fsync=1",
        "--output-format=terse",
        "--verify_state_save=0",
    ]);
    if ran.err.contains("cannot limit") {
        eprintln!("skipped: {}", ran.err);
        return;
    }
    assert_eq!(ran.code, Some(0), "{ran:?}");
    drop(mounted);
    assert!(done("fsck.ext4", &["-fn", path]));
    let stat = device.stat();
    assert!(stat["medium"]["targets"][0]["reads"]["bytes"].as_u64().unwrap() >= 100 * MIB, "{stat}");
    assert_eq!(stat["faults"]["checksum_errors"], 0, "{stat}");
}

#[test]
fn run_has_as_much_memory_as_its_cgroup_and_leaves_none() {
    let place = Place::new();
    let ran = place.run([
        "emulate",
        "run",
        "--memory",
        "64MiB",
        "--",
        "bash",
        "-c",
        "cat /proc/self/cgroup; exit 7",
    ]);
    if ran.code == Some(1) && ran.err.contains("cannot limit") {
        // What a user without permission reads.
        assert!(ran.err.contains("hint:"), "{ran:?}");
        eprintln!("skipped: {}", ran.err);
        return;
    }
    assert_eq!(ran.code, Some(7), "{ran:?}");
    assert!(ran.out.contains("forebay-run-"), "{ran:?}");
    // More page cache than the limit: the kernel reclaims, and the peak stays below.
    let script = format!(
        "dd if=/dev/zero of={0} bs=1M count=128 2>/dev/null && cat {0} > /dev/null",
        place.join("f").display()
    );
    let ran = place.ok(["emulate", "run", "--memory", "64MiB", "--", "bash", "-c", &script]);
    assert!(ran.err.contains("of 64 MiB"), "{ran:?}");
    // A child that outlives the program does not keep the cgroup.
    let script = "cat /proc/self/cgroup; setsid sleep 600 & exit 0";
    let ran = place.ok(["emulate", "run", "--memory", "64MiB", "--", "bash", "-c", script]);
    let name = ran.out.lines().find_map(|line| Some(line.split_once("forebay-run-")?.1.trim())).unwrap();
    let left =
        Command::new("find").args(["/sys/fs/cgroup", "-name", &format!("forebay-run-{name}")]).output();
    assert_eq!(String::from_utf8_lossy(&left.unwrap().stdout), "");
    let ran = place.run(["emulate", "run", "--memory", "1MiB", "--", "true"]);
    assert!(ran.code != Some(0) && ran.err.contains("at least 4 MiB"), "{ran:?}");
}

#[test]
fn devices_that_cannot_be_are_refused_with_a_reason() {
    let place = Place::new();
    let refused = |words: &[&str], why: &str| {
        let ran = place.run(["emulate"].iter().chain(words));
        assert!(ran.code != Some(0) && ran.err.contains(why), "{words:?}: {ran:?}");
    };
    refused(&["up", "--profile", "floppy", "--size", "1MiB"], "pcram");
    refused(&["stat", "no-such-device"], "no emulated device");
    if !can_emulate() {
        return;
    }
    refused(&["up", "--profile", "dram", "--size", "1000TiB", "--name", "large"], "memory are available");
    refused(&["up", "--profile", "dram", "--size", "1MiB", "--name", "a/b"], "names have");
    refused(&["up", "--profile", "none", "--size", "1MiB"], "no profile");
    let device = Device::up(&place, "dram", "1MiB", &[]);
    refused(&["up", "--profile", "dram", "--size", "1MiB", "--name", &device.name], "with that name");
}
