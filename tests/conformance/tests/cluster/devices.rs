//! Block devices of volumes with pieces on several nodes (`forebay volume attach`).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::nodes::{bytes, plain, said, until, Cluster};
use crate::volumes::{succeeds, volume};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

fn can_serve() -> bool {
    let loops = OpenOptions::new().write(true).open("/dev/loop-control").is_ok();
    let can = loops && Path::new("/dev/fuse").exists();
    if !can {
        println!("skipped: needs root, /dev/loop-control and /dev/fuse");
    }
    can
}

/// A device, which is detached at the end even of a test that failed.
struct Device<'a> {
    c: &'a Cluster,
    node: usize,
    path: PathBuf,
}

impl Device<'_> {
    fn attach(c: &Cluster, node: usize) -> Device<'_> {
        let path = PathBuf::from(succeeds(volume(c, node, &["attach", "v"])).trim());
        Device { c, node, path }
    }

    fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// Opens it so that each request reaches it.
    fn direct(&self) -> File {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&self.path).unwrap()
    }

    fn detach(self) -> String {
        // A mount namespace that another program has just made holds a copy of a mount that is gone here.
        let is_held = |output: &Output| said(output).contains("it is mounted");
        let ended = until("it is detached", || {
            let output = self.c.forebay(self.node, &["volume", "detach", self.name()]);
            (!is_held(&output)).then_some(output)
        });
        let said = succeeds(ended);
        assert!(said.contains("is detached"), "{said}");
        std::mem::forget(self);
        said
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        self.c.forebay(self.node, &["volume", "detach", self.name()]);
    }
}

/// A mount, unmounted with the test.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &Device<'_>, at: PathBuf) -> Mounted {
        let _ = std::fs::create_dir(&at);
        does("mount", &["-t", "ext4", device.name(), at.to_str().unwrap()]);
        Mounted(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        until("it is unmounted", || {
            plain("umount", &[self.0.to_str().unwrap()]).status.success().then_some(())
        });
    }
}

fn does(program: &str, words: &[&str]) -> String {
    let output = plain(program, words);
    assert!(output.status.success(), "{program} {words:?}: {}", said(&output));
    said(&output)
}

/// A block of memory that direct I/O can use.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

#[test]
fn device_over_nodes_has_the_bytes_of_the_volume_and_a_file_system_that_other_nodes_attach() {
    if !can_serve() {
        return;
    }
    let c = Cluster::up("device", 3);
    succeeds(volume(
        &c,
        1,
        &["create", "v", "--size", "48MiB", "--on", "n1,n2,n3", "--stripe-size", "64KiB"],
    ));
    let (data, copy) = (c.file().with_file_name("data"), c.file().with_file_name("copy"));
    let content = bytes(48 * MIB, 5);
    std::fs::write(&data, &content).unwrap();
    // All of it is of other nodes, or some.
    let device = Device::attach(&c, 2);
    does(
        "dd",
        &[&format!("if={}", data.display()), &format!("of={}", device.name()), "bs=768K", "conv=fsync"],
    );
    succeeds(volume(&c, 3, &["copy", "v", copy.to_str().unwrap()]));
    assert!(std::fs::read(&copy).unwrap() == content);
    // Workers come and go: the device's own, and those of pieces.
    c.kill_worker(1);
    c.kill_worker(2);
    let mut block = Block([0; BLOCK]);
    for at in [0, 64 << 10, 128 << 10, 47 * MIB] {
        device.direct().read_exact_at(&mut block.0, at as u64).unwrap();
        assert!(block.0 == content[at..][..BLOCK], "{at}");
        device.direct().write_all_at(&block.0, at as u64).unwrap();
    }
    // Filled by programs with less memory than the device has. The daemons are not among them.
    does("mkfs.ext4", &["-q", "-F", device.name()]);
    let at = c.file().with_file_name("mounted");
    let mounted = Mounted::new(&device, at.clone());
    let script = format!(
        "dd if={} of={1}/file bs=1M count=20 conv=fsync && dd if=/dev/zero of={1}/rest bs=1M; sync",
        data.display(),
        at.display()
    );
    let filled = c.forebay(2, &["emulate", "run", "--memory", "16MiB", "--", "bash", "-c", &script]);
    match said(&filled) {
        words if words.contains("cannot limit") => println!("without a memory cgroup: {words}"),
        words => assert!(words.contains("No space left"), "{words}"),
    }
    let is_there = at.join("file").exists();
    drop(mounted);
    does("fsck.ext4", &["-f", "-n", device.name()]);
    device.detach();
    let device = Device::attach(&c, 3);
    does("fsck.ext4", &["-f", "-n", device.name()]);
    let mounted = Mounted::new(&device, at.clone());
    if is_there {
        assert!(std::fs::read(at.join("file")).unwrap() == content[..20 * MIB]);
    }
    drop(mounted);
    device.detach();
    succeeds(volume(&c, 1, &["delete", "v"]));
    c.check();
}

#[test]
fn node_that_dies_takes_its_ranges_of_the_device_alone() {
    if !can_serve() {
        return;
    }
    let c = Cluster::up("device-death", 3);
    succeeds(volume(&c, 1, &["create", "v", "--size", "12MiB", "--on", "n1,n2,n3"]));
    let device = Device::attach(&c, 1);
    let file = device.direct();
    for stripe in 0..3u8 {
        file.write_all_at(&Block([stripe + 1; BLOCK]).0, u64::from(stripe) * MIB as u64).unwrap();
    }
    file.sync_all().unwrap();
    c.kill(3);
    let mut block = Block([0; BLOCK]);
    let error = |done: std::io::Result<()>| done.err().and_then(|e| e.raw_os_error());
    assert_eq!(error(file.read_exact_at(&mut block.0, 2 * MIB as u64)), Some(libc::EIO));
    assert_eq!(error(file.write_all_at(&block.0, 2 * MIB as u64)), Some(libc::EIO));
    for stripe in 0..2u8 {
        file.read_exact_at(&mut block.0, u64::from(stripe) * MIB as u64).unwrap();
        assert_eq!(block.0, [stripe + 1; BLOCK]);
        file.write_all_at(&Block([stripe + 7; BLOCK]).0, u64::from(stripe) * MIB as u64).unwrap();
    }
    // What was written to the dead node is lost, and flushes say so.
    assert_eq!(error(file.sync_all()), Some(libc::EIO));
    file.read_exact_at(&mut block.0, MIB as u64).unwrap();
    assert_eq!(block.0, [8; BLOCK]);
    drop(file);
    assert!(device.detach().contains("is lost"));
}
