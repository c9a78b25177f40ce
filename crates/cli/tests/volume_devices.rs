//! Block devices of volumes that are one piece on this node (`forebay volume attach`, `detach`).

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::devices::{self, have_own_mounts, run, Device};
use common::{Place, Ran};
use forebay_client::{Pool, Role};

const MIB: usize = 1 << 20;

/// A pool with a volume of 32 MiB, or none where there are no loop devices or the daemon may not resize a tmpfs.
fn pool(place: &Place) -> Option<&'static Pool> {
    pool_of(place, 32)
}

/// The same, with a volume of `mib` MiB.
fn pool_of(place: &Place, mib: usize) -> Option<&'static Pool> {
    if !common::is_root() || OpenOptions::new().write(true).open("/dev/loop-control").is_err() {
        eprintln!("skipped: needs root and loop devices");
        return None;
    }
    let up = place.json(["up", "--capacity", &format!("{}MiB", mib + 128), "--json"]);
    place.ok(["volume", "create", "v", "--size", &format!("{mib}MiB")]);
    Some(Pool::attach_as(Path::new(up["pool"].as_str().unwrap()), Role::Tool).unwrap())
}

#[test]
fn device_has_the_bytes_of_the_volume_and_keeps_it_open() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let volume = pool.volume_open(b"v", true).unwrap();
    volume.put_bytes(12345, b"put").unwrap();
    let device = Device::attach(&place, "v", &[]);
    let file = OpenOptions::new().read(true).write(true).open(&device.path).unwrap();
    let mut three = [0; 3];
    file.read_exact_at(&mut three, 12345).unwrap();
    assert_eq!(&three, b"put");
    file.write_all_at(b"written", 20 * MIB as u64).unwrap();
    file.sync_all().unwrap();
    let mut seven = [0; 7];
    volume.get_bytes(20 * MIB as u64, &mut seven).unwrap();
    assert_eq!(&seven, b"written");
    drop((file, volume));
    // One device at a time; the volume stays while it is there.
    place.run(["volume", "attach", "v"]).assert_refused(1, &["already", device.name()]);
    place.run(["volume", "delete", "v"]).assert_refused(1, &["a program has it open"]);
    assert!(place.ok(["volume", "detach", "v"]).out.contains(device.name()));
    device.assert_detached();
    place.run(["volume", "detach", "v"]).assert_refused(1, &["is not attached"]);
    // Attached read-only, by its own name, and with the bytes of before.
    let device = Device::attach(&place, "v", &["--read-only"]);
    let file = File::open(&device.path).unwrap();
    file.read_exact_at(&mut seven, 20 * MIB as u64).unwrap();
    assert_eq!(&seven, b"written");
    let written = OpenOptions::new().write(true).open(&device.path).and_then(|file| {
        file.write_all_at(&[0; 4096], 0)?;
        file.sync_all()
    });
    assert!(written.is_err(), "a device that is read-only was written");
    drop(file);
    place.ok(["volume", "detach", device.name()]);
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn discard_is_refused_and_the_space_stays_reserved() {
    let place = Place::new();
    let Some(pool) = pool(&place) else { return };
    let volume = pool.volume_open(b"v", true).unwrap();
    volume.put_bytes(0, &[7; MIB]).unwrap();
    let memory = File::from(pool.volume_memory(b"v", true).unwrap());
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&memory.metadata().unwrap());
    let before = blocks();
    assert_eq!(before, 32 * MIB as u64 / 512);
    let device = Device::attach(&place, "v", &[]);
    // What frees memory is refused, and what sets zeros writes them.
    assert!(!run("blkdiscard", &[device.name()]).0);
    assert!(!run("fallocate", &["--punch-hole", "--offset", "0", "--length", "1048576", device.name()]).0);
    let mut first = [0];
    volume.get_bytes(0, &mut first).unwrap();
    assert_eq!(first, [7]);
    assert!(run("blkdiscard", &["--zeroout", device.name()]).0);
    volume.get_bytes(0, &mut first).unwrap();
    assert_eq!((first, blocks()), ([0], before));
}

#[test]
fn file_system_on_a_volume_is_whole_after_it_was_attached_again() {
    let place = Place::new();
    let Some(_pool) = pool(&place) else { return };
    if Command::new("mkfs.ext4").arg("-V").output().is_err() {
        eprintln!("skipped: needs mkfs.ext4");
        return;
    }
    let device = Device::attach(&place, "v", &[]);
    let mounted = place.join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let (made, text) = run("mkfs.ext4", &["-q", "-F", device.name()]);
    assert!(made, "{text}");
    have_own_mounts();
    let mount = |device: &Device<'_>| {
        let (done, text) = run("mount", &["-t", "ext4", device.name(), mounted.to_str().unwrap()]);
        if !done {
            eprintln!("skipped: ext4 cannot be mounted here: {text}");
        }
        done
    };
    let unmount = || {
        let (done, text) = run("umount", &[mounted.to_str().unwrap()]);
        assert!(done, "{text}");
    };
    if !mount(&device) {
        return;
    }
    let data: Vec<u8> = (0..5 * MIB as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(mounted.join("file"), &data).unwrap();
    let refused = place.run(["volume", "detach", "v"]);
    let trimmed = run("fstrim", &[mounted.to_str().unwrap()]).0;
    // Filled up: the file system says so, and nothing hangs.
    let full = std::fs::write(mounted.join("too much"), vec![1; 40 * MIB]).map_err(|e| e.raw_os_error());
    unmount();
    refused.assert_refused(1, &["it is mounted", "unmount"]);
    assert!(!trimmed, "a discard was not refused");
    assert_eq!(full, Err(Some(libc::ENOSPC)));
    place.ok(["volume", "detach", "v"]);
    let again = Device::attach(&place, "v", &[]);
    let (clean, text) = run("fsck.ext4", &["-f", "-n", again.name()]);
    assert!(clean, "{text}");
    assert!(mount(&again));
    let found = std::fs::read(mounted.join("file")).unwrap();
    unmount();
    assert!(found == data);
    place.ok(["volume", "detach", "v"]);
}

#[test]
fn ext4_that_is_filled_with_less_memory_than_it_has_is_clean_and_has_its_files() {
    let place = Place::new();
    if pool_of(&place, 128).is_some() {
        devices::fill(&place, "ext4", &["mkfs.ext4", "-q", "-F"], &["fsck.ext4", "-f", "-n"], 128);
    }
}

#[test]
fn xfs_that_is_filled_with_less_memory_than_it_has_is_clean_and_has_its_files() {
    let place = Place::new();
    // The least size of an XFS.
    if pool_of(&place, 320).is_some() {
        devices::fill(&place, "xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"], 320);
    }
}

#[test]
fn fio_verifies_what_it_wrote_at_random_places_of_the_device() {
    let place = Place::new();
    if pool_of(&place, 64).is_some() {
        devices::verify_by_fio(&place);
    }
}

#[test]
fn device_that_outlives_its_pool_is_detached_by_its_own_name() {
    let place = Place::new();
    let Some(_pool) = pool(&place) else { return };
    let device = Device::attach(&place, "v", &[]);
    place.ok(["down", "--force"]);
    place.ok(["volume", "detach", device.name()]);
    device.assert_detached();
    place.assert_nothing_left();
}

#[test]
fn device_that_a_program_has_open_ends_when_it_closes_it() {
    let place = Place::new();
    let Some(_pool) = pool(&place) else { return };
    let device = Device::attach(&place, "v", &[]);
    let open = File::open(&device.path).unwrap();
    assert!(place.ok(["volume", "detach", "v"]).out.contains("when the program closes it"));
    assert!(device.is_attached());
    drop(open);
    device.assert_detached();
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn volumes_that_are_no_device_are_refused_in_words() {
    let place = Place::new();
    let Some(_pool) = pool(&place) else { return };
    place.run(["volume", "attach", "none"]).assert_refused(1, &["no such volume"]);
    place.run(["volume", "detach", "none"]).assert_refused(1, &["no such volume"]);
    place.run(["volume", "detach", "/dev/null"]).assert_refused(1, &["no device of a volume"]);
}

#[test]
fn user_without_privilege_is_told_what_a_device_needs() {
    if !common::can_be_nobody() {
        return;
    }
    let place = Place::new();
    common::give_to_nobody(&place.path);
    let run = |words: &[&str]| Ran::of(common::as_nobody(&place, words).output().unwrap());
    assert_eq!(run(&["up", "--capacity", "128MiB"]).code, Some(0));
    if run(&["volume", "create", "v", "--size", "16MiB"]).code == Some(0) {
        let why = match Path::new("/dev/loop-control").exists() {
            true => "loop devices are for root",
            false => "there are no loop devices here",
        };
        run(&["volume", "attach", "v"]).assert_refused(1, &[why]);
        run(&["volume", "detach", "v"]).assert_refused(1, &["not attached"]);
    }
    assert_eq!(run(&["down"]).code, Some(0));
}
