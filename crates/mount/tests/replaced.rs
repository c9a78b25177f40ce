//! Files that other programs replace while a program looks at them by name.

mod common;

use common::Place;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A preloaded program that replaces a file again and again, each time by one of 1 to 64 KiB.
fn replacer(place: &Place) -> Child {
    let script = "import os\n\
                  for i in range(10**9):\n \
                  open('/forebay/new', 'wb').write(b'x' * (1 + i % 65536))\n \
                  os.rename('/forebay/new', '/forebay/file')\n";
    let mut command = place.command(&["run", "--quiet", "--", "python3", "-c", script]);
    command.stdin(Stdio::null()).spawn().unwrap()
}

/// Whatever a stat by name finds, old or new, has all its bytes.
#[test]
fn stat_of_a_file_that_is_replaced_shows_the_old_or_the_new_and_never_an_empty_one() {
    for mount in [&[][..], &["--no-passthrough"]] {
        let Some(place) = Place::mounted_as(&["--capacity", "128MiB"], mount) else { return };
        let path = place.file("file");
        fs::write(&path, "first").unwrap();
        let mut child = replacer(&place);
        let end = Instant::now() + Duration::from_secs(5);
        let (mut looks, mut stale, mut empty, mut inodes) = (0, 0, 0, std::collections::HashSet::new());
        while Instant::now() < end {
            looks += 1;
            match fs::metadata(&path) {
                Ok(found) => {
                    inodes.insert(found.ino());
                    empty += u32::from(found.len() == 0 || found.mtime() == 0);
                }
                Err(e) if e.kind() == ErrorKind::StaleNetworkFileHandle => stale += 1,
                Err(e) => panic!("{e}"),
            }
        }
        // It leads a group of its own only under a shell: the run ends its program.
        child.kill().unwrap();
        child.wait().unwrap();
        println!("{mount:?}: {looks} looks, {} inodes, {stale} ESTALE, {empty} empty", inodes.len());
        assert!(inodes.len() > 100, "nothing was replaced");
        assert_eq!(empty, 0, "of {looks}");
        assert!(stale * 1000 <= looks, "{stale} of {looks} looks failed with ESTALE");
    }
}
