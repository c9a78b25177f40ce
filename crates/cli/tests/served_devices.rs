//! Block devices of volumes that a process serves: those of several pieces (`forebay volume attach`). Needs root, FUSE and
//! loop devices, and says so where it skips. Nothing here is timed.

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::devices::{
    self, attribute, done, has, keeper_and_server, marked, processes, run, Device, Mounted, MARK,
};
use common::{eventually, kill, start, Place, Ran};
use forebay_client::{Pool, Role};

const MIB: usize = 1 << 20;

fn can_serve() -> bool {
    let loops = OpenOptions::new().write(true).open("/dev/loop-control").is_ok();
    let can = common::is_root() && loops && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: needs root, /dev/loop-control and /dev/fuse");
    }
    can
}

/// A pool with a volume of two pieces, which have `mib` MiB together. Returns its directory.
fn pool(place: &Place, mib: usize) -> Option<PathBuf> {
    if !can_serve() {
        return None;
    }
    let up = place.json(["up", "--capacity", &format!("{}MiB", mib + 96), "--json"]);
    grown(place, mib);
    Some(PathBuf::from(up["pool"].as_str().unwrap()))
}

fn grown(place: &Place, mib: usize) {
    place.ok(["volume", "create", "v", "--size", &format!("{}MiB", mib / 2)]);
    place.ok(["volume", "resize", "v", "--size", &format!("{mib}MiB")]);
}

fn attached(dir: &Path) -> &'static Pool {
    Pool::attach_as(dir, Role::Tool).unwrap()
}

#[test]
fn served_device_has_the_bytes_of_the_volume_and_keeps_it_open() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let volume = attached(&dir).volume_open(b"v", true).unwrap();
    // Over the border of the two pieces.
    let border = 16 * MIB as u64 - 2;
    volume.put_bytes(border, b"put").unwrap();
    let device = Device::attach(&place, "v", &[]);
    assert_eq!(attribute(&device.path, "size").trim(), (32 * MIB / 512).to_string());
    let file = OpenOptions::new().read(true).write(true).open(&device.path).unwrap();
    let mut three = [0; 3];
    file.read_exact_at(&mut three, border).unwrap();
    assert_eq!(&three, b"put");
    let data: Vec<u8> = (0..3 * MIB as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    file.write_all_at(&data, 15 * MIB as u64 + 512).unwrap();
    file.sync_all().unwrap();
    let mut back = vec![0; data.len()];
    volume.get_bytes(15 * MIB as u64 + 512, &mut back).unwrap();
    assert!(back == data);
    drop((file, volume));
    // Commands see it.
    let listed = place.json(["volume", "list", "--json"]);
    assert_eq!(listed[0]["device"], device.name(), "{listed}");
    assert!(place.ok(["volume", "list"]).out.trim_end().ends_with(device.name()));
    assert!(place.ok(["volume", "show", "v"]).out.contains(device.name()));
    place.run(["volume", "attach", "v"]).assert_refused(1, &["already", device.name()]);
    place.run(["volume", "delete", "v"]).assert_refused(1, &["a program has it open"]);
    assert!(place.ok(["volume", "detach", "v"]).out.contains(device.name()));
    device.assert_detached();
    assert_eq!(processes(&dir), Vec::<i32>::new());
    place.run(["volume", "detach", "v"]).assert_refused(1, &["is not attached"]);
    assert_eq!(place.json(["volume", "show", "v", "--json"])[0]["device"], serde_json::Value::Null);
    // Attached read-only, detached by its own name, and with the bytes of before.
    let device = Device::attach(&place, "v", &["--read-only"]);
    let file = File::open(&device.path).unwrap();
    file.read_exact_at(&mut back, 15 * MIB as u64 + 512).unwrap();
    assert!(back == data);
    let written = OpenOptions::new().write(true).open(&device.path).and_then(|file| {
        file.write_all_at(&[0; 4096], 0)?;
        file.sync_all()
    });
    assert!(written.is_err(), "a device that is read-only was written");
    drop(file);
    let ended = place.json(["volume", "detach", device.name(), "--json"]);
    assert_eq!((&ended[0]["detached"], &ended[0]["written"]), (&true.into(), &true.into()), "{ended}");
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn joined_volumes_are_one_device_that_is_striped_over_them() {
    let place = Place::new();
    if !can_serve() {
        return;
    }
    let up = place.json(["up", "--capacity", "160MiB", "--json"]);
    let dir = PathBuf::from(up["pool"].as_str().unwrap());
    for (name, size) in [("a", "16MiB"), ("b", "20MiB"), ("c", "8MiB")] {
        place.ok(["volume", "create", name, "--size", size]);
    }
    // One has two pieces, which do not end at a stripe.
    place.ok(["volume", "resize", "c", "--size", "13MiB"]);
    place.ok(["volume", "resize", "b", "--size", "21000KiB"]);
    let device = Device::attach(&place, "a+b+1:c", &[]);
    let bytes = 3 * 13 * MIB;
    assert_eq!(attribute(&device.path, "size").trim(), (bytes / 512).to_string());
    let file = OpenOptions::new().read(true).write(true).open(&device.path).unwrap();
    let data: Vec<u8> = (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    file.write_all_at(&data, 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let pool = attached(&dir);
    for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
        let mut found = vec![0; 13 * MIB];
        pool.volume_open(name.as_bytes(), false).unwrap().get_bytes(0, &mut found).unwrap();
        let stripes: Vec<u8> = data.chunks(MIB).skip(index).step_by(3).flatten().copied().collect();
        assert!(found == stripes, "stripes of {name}");
    }
    // The bytes of one volume are in one device.
    let listed = place.json(["volume", "list", "--json"]);
    assert!((0..3).all(|i| listed[i]["device"] == device.name()), "{listed}");
    let part = format!("is part of {}", device.name());
    for (name, why) in [
        ("b", &*part),
        ("b+a", "volume b is part of"),
        ("a+b+c", "volume a is part of"),
        ("a+a", "joins volume a with itself"),
        ("a+none", "specifier 2: there is no volume `none`"),
        ("a+", "specifier 2"),
        ("a+7:b", "specifier 2: volume `b` is not on node `7`"),
        ("a+1.5:b", "a node has one link"),
        ("7:a", "is not on node `7`"),
    ] {
        place.run(["volume", "attach", name]).assert_refused(1, &[why]);
    }
    place.run(["volume", "delete", "b"]).assert_refused(1, &["a program has it open"]);
    place.run(["volume", "detach", "b"]).assert_refused(1, &["not attached alone", device.name()]);
    place.run(["volume", "detach", "b+a"]).assert_refused(1, &["not attached alone", device.name()]);
    place.run(["volume", "detach", "a+none"]).assert_refused(1, &["no such volume"]);
    assert!(place.ok(["volume", "detach", "a+b+c"]).out.contains(device.name()));
    device.assert_detached();
    assert_eq!(processes(&dir), Vec::<i32>::new());
    // The same bytes again; a specifier of one volume is that volume.
    let device = Device::attach(&place, "a+b+c", &["--read-only"]);
    let mut back = vec![0; bytes];
    File::open(&device.path).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert!(back == data);
    place.ok(["volume", "detach", device.name()]);
    device.assert_detached();
    let device = Device::attach(&place, "1:a", &[]);
    place.run(["volume", "attach", "c+a"]).assert_refused(1, &["volume a is", device.name()]);
    place.ok(["volume", "detach", "a"]);
    device.assert_detached();
    place.ok(["volume", "delete", "a", "b", "c"]);
}

#[test]
fn joined_volumes_of_a_killed_keeper_are_in_no_second_device_while_the_first_is_mounted() {
    let place = Place::new();
    if !can_serve() || !has("mkfs.ext4") {
        return;
    }
    let up = place.json(["up", "--capacity", "160MiB", "--json"]);
    let dir = PathBuf::from(up["pool"].as_str().unwrap());
    for name in ["a", "b"] {
        place.ok(["volume", "create", name, "--size", "16MiB"]);
    }
    let device = Device::attach(&place, "a+b", &[]);
    place.run(["volume", "attach", "a+b"]).assert_refused(1, &["is part of", device.name(), "already"]);
    done("mkfs.ext4", &["-q", "-F", device.name()]);
    let at = place.join("mounted");
    let mounted = Mounted::new("ext4", device.name(), &at);
    let (keeper, _) = keeper_and_server(&dir);
    kill(keeper, libc::SIGKILL);
    eventually("its processes have ended", || processes(&dir).is_empty());
    // The kernel has the device as long as it is mounted.
    place.run(["volume", "attach", "a+b"]).assert_refused(1, &["it is", device.name(), "already"]);
    for name in ["a", "b", "b+a"] {
        let why = ["may be part of", device.name(), "keeper was killed"];
        place.run(["volume", "attach", name]).assert_refused(1, &why);
    }
    place.run(["volume", "detach", "a+b"]).assert_refused(1, &["it is mounted"]);
    drop(mounted);
    device.assert_detached();
    let device = Device::attach(&place, "a", &[]);
    place.ok(["volume", "detach", "a"]);
    device.assert_detached();
    place.ok(["volume", "delete", "a", "b"]);
}

#[test]
fn volume_that_grows_while_its_memory_is_a_device_gets_no_second_one() {
    let place = Place::new();
    if !can_serve() {
        return;
    }
    place.ok(["up", "--capacity", "128MiB"]);
    place.ok(["volume", "create", "v", "--size", "8MiB"]);
    let device = Device::attach(&place, "v", &[]);
    place.ok(["volume", "resize", "v", "--size", "16MiB"]);
    place.run(["volume", "attach", "v"]).assert_refused(1, &["already", device.name()]);
    place.ok(["volume", "detach", "v"]);
    device.assert_detached();
    let device = Device::attach(&place, "v", &[]);
    assert_eq!(attribute(&device.path, "size").trim(), (16 * MIB / 512).to_string());
    place.ok(["volume", "detach", "v"]);
}

#[test]
fn served_device_refuses_discards_and_sets_zeros() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let volume = attached(&dir).volume_open(b"v", true).unwrap();
    volume.put_bytes(0, &[7; MIB]).unwrap();
    let device = Device::attach(&place, "v", &[]);
    assert!(!run("blkdiscard", &[device.name()]).0);
    assert!(!run("fallocate", &["--punch-hole", "--offset", "0", "--length", "1048576", device.name()]).0);
    let mut first = [0];
    volume.get_bytes(0, &mut first).unwrap();
    assert_eq!(first, [7]);
    done("blkdiscard", &["--zeroout", device.name()]);
    volume.get_bytes(MIB as u64 - 1, &mut first).unwrap();
    assert_eq!(first, [0]);
    drop(volume);
    place.ok(["volume", "detach", "v"]);
}

/// Fills a file system on a device of two pieces, whose processes end with it.
fn fill(kind: &str, make: &[&str], check: &[&str], mib: usize) {
    let place = Place::new();
    if let Some(dir) = pool(&place, mib) {
        devices::fill(&place, kind, make, check, mib);
        assert_eq!(processes(&dir), Vec::<i32>::new());
    }
}

#[test]
fn ext4_that_is_filled_with_less_memory_than_it_has_is_clean_and_has_its_files() {
    fill("ext4", &["mkfs.ext4", "-q", "-F"], &["fsck.ext4", "-f", "-n"], 128);
}

#[test]
fn xfs_that_is_filled_with_less_memory_than_it_has_is_clean_and_has_its_files() {
    // The least size of an XFS.
    fill("xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"], 320);
}

#[test]
fn fio_verifies_what_it_wrote_at_random_places_of_the_device() {
    let place = Place::new();
    if pool(&place, 64).is_some() {
        devices::verify_by_fio(&place);
    }
}

#[test]
fn killed_server_or_keeper_leaves_io_errors_and_no_device() {
    for which in ["server", "keeper"] {
        let place = Place::new();
        let (Some(dir), true) = (pool(&place, 64), has("mkfs.ext4")) else { return };
        let device = Device::attach(&place, "v", &[]);
        done("mkfs.ext4", &["-q", "-F", device.name()]);
        let at = place.join("mounted");
        let mounted = Mounted::new("ext4", device.name(), &at);
        // A program that writes all the time.
        let script = "trap '' PIPE; while dd if=/dev/zero of=$0/file bs=64k count=64 conv=fsync 2>/dev/null; do echo; done";
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(&at).stdout(Stdio::piped());
        let mut writer = start(command);
        // It has written once.
        let mut line = [0];
        std::io::Read::read_exact(writer.0.stdout.as_mut().unwrap(), &mut line).unwrap();
        let (keeper, server) = keeper_and_server(&dir);
        kill(if which == "server" { server } else { keeper }, libc::SIGKILL);
        drop(writer.0.stdout.take());
        // It gets an error, and no process waits for ever.
        assert!(writer.wait().code().is_some());
        drop(mounted);
        device.assert_detached();
        eventually("its processes have ended", || processes(&dir).is_empty());
        let device = Device::attach(&place, "v", &[]);
        done("mkfs.ext4", &["-q", "-F", device.name()]);
        place.ok(["volume", "detach", "v"]);
        place.ok(["volume", "delete", "v"]);
    }
}

/// A process that was writing or reading past the page cache gets an error and ends: none waits in the kernel.
#[test]
fn killed_server_or_keeper_ends_direct_io_of_every_process_with_an_error() {
    const WRITERS: usize = 3;
    const FAILED: i32 = 3;
    for which in ["server", "keeper"] {
        let place = Place::new();
        let (Some(dir), true) = (pool(&place, 64), has("fio")) else { return };
        let device = Device::attach(&place, "v", &[]);
        // Each shell holds the device open, so that no other test's device gets its name before the shell ends.
        let script = |line: &str| {
            let mut command = Command::new("bash");
            command.args(["-c", &format!("trap '' PIPE; exec 3<>$0; {line}; exit {FAILED}"), device.name()]);
            command.env(MARK, &place.path).stdout(Stdio::piped());
            start(command)
        };
        let mut all: Vec<_> = (0..WRITERS)
            .map(|i| {
                let seek = i * 100;
                script(&format!(
                    "while dd if=/dev/zero of=$0 bs=64k count=100 seek={seek} oflag=direct conv=notrunc 2>/dev/null; \
                     do echo 2>/dev/null; done"
                ))
            })
            .collect();
        let reads =
            || attribute(&device.path, "stat").split_whitespace().next().unwrap().parse::<u64>().unwrap();
        let before = reads();
        all.push(script(
            "! fio --name=direct --filename=$0 --offset=32m --size=32m --ioengine=libaio --direct=1 --iodepth=16 \
             --rw=randrw --bs=4k --numjobs=2 --time_based --runtime=300 --output-format=terse > /dev/null 2>&1 || exit 0",
        ));
        // Each is in the middle of its work.
        for writer in &mut all[..WRITERS] {
            let mut line = [0];
            std::io::Read::read_exact(writer.0.stdout.as_mut().unwrap(), &mut line).unwrap();
        }
        eventually("fio reads", || reads() > before + 500);
        let running = marked(&place);
        assert!(running.len() >= 2 * WRITERS, "{running:?}");
        let (keeper, server) = keeper_and_server(&dir);
        kill(if which == "server" { server } else { keeper }, libc::SIGKILL);
        for process in &mut all {
            drop(process.0.stdout.take());
        }
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !marked(&place).is_empty() {
            assert!(std::time::Instant::now() < end, "{which}: processes wait: {:?}", marked(&place));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        for process in &mut all {
            assert_eq!(process.wait().code(), Some(FAILED), "{which}: it ended without an error");
        }
        device.assert_detached();
        eventually("its processes have ended", || processes(&dir).is_empty());
        let device = Device::attach(&place, "v", &[]);
        done("dd", &["if=/dev/zero", &format!("of={}", device.name()), "bs=1M", "count=64", "oflag=direct"]);
        place.ok(["volume", "detach", "v"]);
        place.ok(["volume", "delete", "v"]);
    }
}

#[test]
fn device_of_a_dead_pool_has_io_errors_and_can_be_detached_and_made_anew() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let device = Device::attach(&place, "v", &[]);
    let file = OpenOptions::new().read(true).write(true).open(&device.path).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_all().unwrap();
    kill(common::lock_holder(&dir).unwrap(), libc::SIGKILL);
    eventually("an I/O error", || {
        file.write_all_at(&[2; 4096], 4096).and_then(|()| file.sync_all()).is_err()
    });
    let mut block = [0; 4096];
    assert!(file.read_exact_at(&mut block, 20 * MIB as u64).is_err(), "a read from a dead pool");
    drop(file);
    // Another pool in its place: its volume has the same number, and another device.
    place.ok(["down", "--force", "--discard"]);
    place.ok(["up", "--capacity", "128MiB"]);
    grown(&place, 32);
    assert_eq!(place.json(["volume", "list", "--json"])[0]["device"], serde_json::Value::Null);
    place.run(["volume", "detach", "v"]).assert_refused(1, &["is not attached"]);
    let other = Device::attach(&place, "v", &[]);
    assert_ne!(other.path, device.path);
    let ended = place.json(["volume", "detach", device.name(), "--json"]);
    assert_eq!((&ended[0]["detached"], &ended[0]["written"]), (&true.into(), &false.into()), "{ended}");
    device.assert_detached();
    let file = OpenOptions::new().read(true).write(true).open(&other.path).unwrap();
    file.write_all_at(&[3; 4096], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    place.ok(["volume", "detach", "v"]);
    other.assert_detached();
    eventually("its processes have ended", || processes(&dir).is_empty());
}

#[test]
fn device_that_a_program_has_open_is_served_until_it_closes_it() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let device = Device::attach(&place, "v", &[]);
    let open = OpenOptions::new().read(true).write(true).open(&device.path).unwrap();
    assert!(place.ok(["volume", "detach", "v"]).out.contains("when the program closes it"));
    assert!(device.is_attached());
    // However often it is asked to end.
    assert!(place.ok(["volume", "detach", device.name()]).out.contains("when the program closes it"));
    kill(keeper_and_server(&dir).0, libc::SIGHUP);
    open.write_all_at(&[5; 4096], 20 * MIB as u64).unwrap();
    open.sync_all().unwrap();
    drop(open);
    device.assert_detached();
    eventually("its processes have ended", || processes(&dir).is_empty());
    let mut one = [0];
    attached(&dir).volume_open(b"v", false).unwrap().get_bytes(20 * MIB as u64, &mut one).unwrap();
    assert_eq!(one, [5]);
}

#[test]
fn keeper_that_gets_a_signal_writes_what_the_page_cache_has() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let device = Device::attach(&place, "v", &[]);
    let file = OpenOptions::new().write(true).open(&device.path).unwrap();
    file.write_all_at(&[6; 4096], 20 * MIB as u64).unwrap();
    // Not the last close: the keeper has it open.
    drop(file);
    kill(keeper_and_server(&dir).0, libc::SIGTERM);
    device.assert_detached();
    eventually("its processes have ended", || processes(&dir).is_empty());
    let mut one = [0];
    attached(&dir).volume_open(b"v", false).unwrap().get_bytes(20 * MIB as u64, &mut one).unwrap();
    assert_eq!(one, [6]);
}

#[test]
fn log_of_a_pool_that_is_a_fifo_keeps_no_attach_waiting() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    let log = dir.join("log");
    std::fs::rename(&log, place.join("log")).unwrap();
    done("mkfifo", &[log.to_str().unwrap()]);
    let device = Device::attach(&place, "v", &[]);
    place.ok(["volume", "detach", "v"]);
    device.assert_detached();
    std::fs::remove_file(&log).unwrap();
    std::fs::rename(place.join("log"), &log).unwrap();
}

#[test]
fn attach_that_is_killed_at_any_instant_leaves_a_device_that_can_be_detached_or_nothing() {
    let place = Place::new();
    let Some(dir) = pool(&place, 32) else { return };
    for delay_ms in [0u64, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96] {
        let mut command = place.command(["volume", "attach", "v"]);
        let mut child = start(std::mem::replace(command.stdout(Stdio::null()), Command::new("true")));
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        kill(child.pid(), libc::SIGKILL);
        child.wait();
        // It is there, or goes: a keeper that cannot report ends its device.
        eventually("it is detached", || {
            place.run(["volume", "detach", "v"]);
            processes(&dir).is_empty()
        });
        assert_eq!(place.json(["volume", "list", "--json"])[0]["device"], serde_json::Value::Null);
    }
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn root_attaches_the_volume_of_another_user_who_may_not() {
    if !common::can_be_nobody() || !can_serve() {
        return;
    }
    let place = Place::new();
    common::give_to_nobody(&place.path);
    let dir = place.join("pool");
    let as_nobody = |words: &[&str]| {
        let mut command = common::as_nobody(&place, words);
        Ran::of(command.arg("--pool").arg(&dir).output().unwrap())
    };
    let mut up = common::as_nobody(&place, ["up", "--capacity", "128MiB", "--path"]);
    assert_eq!(Ran::of(up.arg(&dir).output().unwrap()).code, Some(0));
    if as_nobody(&["volume", "create", "v", "--size", "8MiB"]).code != Some(0) {
        eprintln!("skipped: this user can have no volumes here");
        return;
    }
    as_nobody(&["volume", "resize", "v", "--size", "16MiB"]);
    as_nobody(&["volume", "attach", "v"]).assert_refused(1, &["loop devices are for root"]);
    let pool = dir.to_str().unwrap();
    let device = Device::attach(&place, "v", &["--pool", pool]);
    let file = OpenOptions::new().write(true).open(&device.path).unwrap();
    file.write_all_at(&[9; 4096], 12 * MIB as u64).unwrap();
    file.sync_all().unwrap();
    drop(file);
    place.ok(["volume", "detach", "v", "--pool", pool]);
    let back = place.join("back");
    assert_eq!(as_nobody(&["volume", "copy", "v", back.to_str().unwrap()]).code, Some(0));
    assert_eq!(std::fs::read(&back).unwrap()[12 * MIB..][..4096], [9; 4096]);
}
