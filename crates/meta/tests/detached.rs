//! A shard on a mount without a path: opened through /proc/self/fd, as in the daemon.

mod place;

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use forebay_meta::Shard;
use forebay_types::{Ino, Request};
use place::{at, Driver, OPTIONS};
use rustix::fs::{mkdirat, openat, Mode, OFlags};
use rustix::mount::{
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, FsMountFlags, FsOpenFlags, MountAttrFlags,
};

#[test]
fn shard_on_a_mount_without_a_path_is_made_and_opened_again() {
    let make = || -> rustix::io::Result<rustix::fd::OwnedFd> {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "size", "64m")?;
        fsconfig_create(&context)?;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        openat(&mount, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    let Ok(root) = make() else {
        println!("not permitted to mount");
        return;
    };
    mkdirat(&root, "shard", Mode::RWXU).unwrap();
    let dir = PathBuf::from(format!("/proc/self/fd/{}/shard", root.as_raw_fd()));
    let shard = Shard::create(&dir, &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let ino = driver.file(&mut batch, Ino::ROOT, b"f").unwrap();
    batch.commit().unwrap();
    drop(shard);
    let shard = Shard::open(&dir).unwrap();
    let mut batch = shard.begin().unwrap();
    assert_eq!(
        driver.entry(&mut batch, Request::Lookup { parent: Ino::ROOT, name: b"f" }).unwrap().attr.ino,
        ino
    );
}
