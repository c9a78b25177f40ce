//! Names, paths and symbolic links within paths.

use crate::case::{case, equal, holds, refused, Case};
use crate::door::{Ability, Door, Verdict};

pub(super) const CASES: &[Case] = &[
    case!(name_of_255_bytes_is_kept_and_256_refused;
        "A name has 1 to 255 bytes, any except `/` and NUL; a longer one fails with ENAMETOOLONG."),
    case!(name_of_any_byte_is_kept;
        "A name has 1 to 255 bytes, any except `/` and NUL; a longer one fails with ENAMETOOLONG."),
    case!(path_of_4095_bytes_is_walked_and_4096_refused [OneDoor];
        "A path of 4096 bytes or more, counted with its final NUL, fails with ENAMETOOLONG."),
    case!(path_that_is_empty_fails; "An empty path fails with ENOENT."),
    case!(path_with_dots_and_slashes_is_walked;
        "`.`, `..` and repeated slashes within a path have the same meaning as on any Linux file system."),
    case!(path_through_a_missing_or_wrong_component_fails;
        "A path whose middle component is missing fails with ENOENT, and one whose middle component is not a directory with ENOTDIR."),
    case!(path_that_ends_in_a_slash_demands_a_directory;
        "A path that ends in a slash names a directory: on anything else it fails with ENOTDIR."),
    case!(names_that_differ_in_case_or_composition_are_two;
        "Names are compared byte by byte: no case folding, no Unicode normalisation."),
    case!(parent_of_the_root_is_outside [Outside, OneDoor];
        "`..` of the pool's root leads out of the pool, as it leads out of a mounted file system."),
    case!(symlink_gives_back_its_target;
        "readlink returns a link's target byte for byte, cut to the buffer; the link's size is the length of the target."),
    case!(symlink_target_length_is_bounded;
        "A target has 1 to 4095 bytes: an empty one fails with ENOENT and a longer one with ENAMETOOLONG."),
    case!(symlink_in_the_middle_is_followed_and_the_last_as_asked;
        "Links in the middle of a path are always followed; the call determines whether the last one is."),
    case!(symlinks_beyond_forty_fail;
        "A look-up follows at most 40 links, and fails with ELOOP at the next."),
    case!(symlink_with_an_absolute_target_leads_back_in;
        "A target that begins with a slash is resolved from the program's root directory, into the pool, out of it, and back."),
    case!(symlink_out_of_the_pool_is_followed [Outside];
        "A target that begins with a slash is resolved from the program's root directory, into the pool, out of it, and back."),
    case!(read_link_of_anything_else_fails;
        "readlink of anything except a symbolic link fails with EINVAL."),
];

fn name_of_255_bytes_is_kept_and_256_refused(door: &dyn Door) -> Verdict {
    let (fits, over) = (vec![b'n'; 255], vec![b'n'; 256]);
    door.put(&fits, b"long")?;
    equal(door.names(".")?, vec![fits.clone()])?;
    equal(door.get(&fits)?, b"long".to_vec())?;
    refused(door.create(&over), libc::ENAMETOOLONG)?;
    refused(door.stat(&over), libc::ENAMETOOLONG)?;
    refused(door.make_directory(&over), libc::ENAMETOOLONG)?;
    refused(door.symlink("x", &over), libc::ENAMETOOLONG)?;
    refused(door.rename(&fits, &over), libc::ENAMETOOLONG)?;
    refused(door.link(&fits, &over), libc::ENAMETOOLONG)?;
    refused(door.unlink(&over), libc::ENAMETOOLONG)
}

fn name_of_any_byte_is_kept(door: &dyn Door) -> Verdict {
    let mut made = Vec::new();
    for byte in (1..=255_u8).filter(|b| *b != b'/') {
        let name = vec![b'a', byte];
        door.put(&name, &[byte])?;
        made.push(name);
    }
    equal(door.names(".")?, made.clone())?;
    for name in &made {
        equal(door.get(name)?, vec![name[1]])?;
        door.unlink(name)?;
    }
    equal(door.names(".")?, vec![])
}

fn path_of_4095_bytes_is_walked_and_4096_refused(door: &dyn Door) -> Verdict {
    door.put("f", b"far")?;
    let whole = door.absolute(b"");
    for (length, fits) in [(4095, true), (4096, false), (5000, false)] {
        let mut path = whole.clone();
        path.extend(std::iter::repeat_n(b"./", 4096).flatten().take(length - 1 - whole.len()));
        if path.ends_with(b".") {
            path.pop();
            path.push(b'/');
        }
        path.push(b'f');
        if fits {
            equal(door.get(&path)?, b"far".to_vec())?;
        } else {
            refused(door.get(&path), libc::ENAMETOOLONG)?;
            refused(door.stat(&path), libc::ENAMETOOLONG)?;
        }
    }
    Ok(())
}

fn path_that_is_empty_fails(door: &dyn Door) -> Verdict {
    refused(door.stat(""), libc::ENOENT)?;
    refused(door.open("", libc::O_RDONLY, 0), libc::ENOENT)?;
    refused(door.open("", libc::O_RDWR | libc::O_CREAT, 0o644), libc::ENOENT)?;
    refused(door.make_directory(""), libc::ENOENT)?;
    refused(door.unlink(""), libc::ENOENT)?;
    refused(door.chmod("", 0o600), libc::ENOENT)?;
    refused(door.truncate(b"", 0), libc::ENOENT)
}

fn path_with_dots_and_slashes_is_walked(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.make_directory("d/e")?;
    door.put("d/e/f", b"x")?;
    let f = door.stat("d/e/f")?;
    for path in ["d//e///f", "./d/./e/./f", "d/../d/e/../e/f", "d/e/../../d/e/f", "d/e/./../e//f"] {
        equal(door.stat(path)?, f)?;
    }
    equal(door.stat("d/e/..")?.ino, door.stat("d")?.ino)?;
    equal(door.stat("d/.")?.ino, door.stat("d")?.ino)?;
    equal(door.stat("d/../.")?.ino, door.stat(".")?.ino)?;
    // `..` is looked up, not removed from the text: the component before it must be a directory.
    refused(door.stat("d/e/f/.."), libc::ENOTDIR)?;
    refused(door.stat("d/e/f/."), libc::ENOTDIR)?;
    refused(door.stat("d/none/.."), libc::ENOENT)?;
    door.symlink("d/e", "s")?;
    equal(door.stat("s/..")?.ino, door.stat("d")?.ino)
}

fn path_through_a_missing_or_wrong_component_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    for (path, errno) in [("none/x", libc::ENOENT), ("f/x", libc::ENOTDIR), ("f/x/y", libc::ENOTDIR)] {
        refused(door.stat(path), errno)?;
        refused(door.open(path, libc::O_RDWR | libc::O_CREAT, 0o644), errno)?;
        refused(door.make_directory(path), errno)?;
        refused(door.unlink(path), errno)?;
        refused(door.remove_directory(path), errno)?;
        refused(door.rename(path, "to"), errno)?;
        refused(door.rename("f", path), errno)?;
        refused(door.link("f", path), errno)?;
        refused(door.symlink("t", path), errno)?;
        refused(door.chmod(path, 0o600), errno)?;
        refused(door.truncate(path.as_bytes(), 0), errno)?;
        refused(door.items(path), errno)?;
    }
    refused(door.stat("none"), libc::ENOENT)
}

fn path_that_ends_in_a_slash_demands_a_directory(door: &dyn Door) -> Verdict {
    door.put("f", b"x")?;
    door.make_directory("d")?;
    door.symlink("d", "to-d")?;
    door.symlink("f", "to-f")?;
    refused(door.stat("f/"), libc::ENOTDIR)?;
    refused(door.open("f/", libc::O_RDONLY, 0), libc::ENOTDIR)?;
    refused(door.unlink("f/"), libc::ENOTDIR)?;
    refused(door.rename("f/", "g"), libc::ENOTDIR)?;
    refused(door.rename("f", "g/"), libc::ENOTDIR)?;
    refused(door.stat("to-f/"), libc::ENOTDIR)?;
    refused(door.link("f", "g/"), libc::ENOENT)?;
    equal(door.stat("d/")?.ino, door.stat("d")?.ino)?;
    // A trailing slash follows a link to a directory, even for lstat.
    equal(door.lstat("to-d/")?.ino, door.stat("d")?.ino)?;
    door.make_directory("new/")?;
    door.rename("new/", "newer/")?;
    door.remove_directory("newer/")?;
    equal(door.names(".")?, vec![b"d".to_vec(), b"f".to_vec(), b"to-d".to_vec(), b"to-f".to_vec()])
}

fn names_that_differ_in_case_or_composition_are_two(door: &dyn Door) -> Verdict {
    let names = ["File".as_bytes(), b"file", "\u{e9}".as_bytes(), "e\u{301}".as_bytes(), b"\xff\xfe"];
    for name in names {
        door.put(name, name)?;
    }
    for name in names {
        equal(door.get(name)?, name.to_vec())?;
    }
    equal(door.names(".")?.len(), names.len())
}

fn parent_of_the_root_is_outside(door: &dyn Door) -> Verdict {
    let root = door.absolute(b"..");
    let mut parts: Vec<&[u8]> = root.split(|b| *b == b'/').collect();
    // .../<root>/<case>/.. : without the last two it is the root, without the last three its parent.
    parts.truncate(parts.len() - 3);
    let parent = if parts.len() == 1 { b"/".to_vec() } else { parts.join(&b'/') };
    let outside = door.stat(&parent)?;
    equal(door.stat("../..")?.ino, outside.ino)?;
    equal(door.stat("../..")?.dev, outside.dev)?;
    let mut back = b"../../".to_vec();
    back.extend_from_slice(root.split(|b| *b == b'/').rev().nth(2).unwrap_or_default());
    equal(door.stat(&back)?.ino, door.stat("..")?.ino)
}

fn symlink_gives_back_its_target(door: &dyn Door) -> Verdict {
    let long = vec![b'y'; 2000];
    for (name, target) in [("a", b"no/such//place/../".as_slice()), ("b", b"\x01\xff \n"), ("c", &long)] {
        door.symlink(target, name)?;
        equal(door.read_link(name)?, target.to_vec())?;
        let stat = door.lstat(name)?;
        equal(stat.size, target.len() as i64)?;
        equal(stat.kind(), libc::S_IFLNK)?;
        equal(stat.permissions(), 0o777)?;
        let mut small = [0; 2];
        equal(door.read_link_at(name.into(), &mut small)?, 2)?;
        equal(&small[..], &target[..2])?;
    }
    refused(door.symlink("x", "a"), libc::EEXIST)
}

fn symlink_target_length_is_bounded(door: &dyn Door) -> Verdict {
    refused(door.symlink("", "empty"), libc::ENOENT)?;
    let fits = vec![b't'; 4095];
    door.symlink(&fits, "fits")?;
    equal(door.read_link("fits")?, fits)?;
    refused(door.symlink(vec![b't'; 4096], "over"), libc::ENAMETOOLONG)
}

fn symlink_in_the_middle_is_followed_and_the_last_as_asked(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("d/f", b"data")?;
    door.symlink("d", "to-d")?;
    door.symlink("f", "d/to-f")?;
    equal(door.get("to-d/to-f")?, b"data".to_vec())?;
    equal(door.stat("to-d/to-f")?.ino, door.stat("d/f")?.ino)?;
    equal(door.lstat("to-d/to-f")?.kind(), libc::S_IFLNK)?;
    door.chmod("to-d/to-f", 0o604)?;
    equal(door.stat("d/f")?.permissions(), 0o604)?;
    door.unlink("to-d/to-f")?;
    equal(door.names("d")?, vec![b"f".to_vec()])?;
    door.symlink("none", "dangling")?;
    refused(door.stat("dangling"), libc::ENOENT)?;
    refused(door.get("dangling"), libc::ENOENT)?;
    door.rename("dangling", "moved")?;
    equal(door.read_link("moved")?, b"none".to_vec())?;
    refused(door.remove_directory("to-d"), libc::ENOTDIR)
}

fn symlinks_beyond_forty_fail(door: &dyn Door) -> Verdict {
    door.put("l0", b"end")?;
    for i in 1..=41 {
        door.symlink(format!("l{}", i - 1), format!("l{i}"))?;
    }
    equal(door.get("l40")?, b"end".to_vec())?;
    refused(door.get("l41"), libc::ELOOP)?;
    refused(door.stat("l41"), libc::ELOOP)?;
    door.symlink("self", "self")?;
    refused(door.stat("self"), libc::ELOOP)?;
    refused(door.stat("self/x"), libc::ELOOP)?;
    equal(door.lstat("self")?.kind(), libc::S_IFLNK)
}

fn symlink_with_an_absolute_target_leads_back_in(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("d/f", b"inside")?;
    door.symlink(door.absolute(b"d"), "abs")?;
    equal(door.get("abs/f")?, b"inside".to_vec())?;
    equal(door.stat("abs/../d/f")?.ino, door.stat("d/f")?.ino)?;
    door.put("abs/g", b"made")?;
    equal(door.get("d/g")?, b"made".to_vec())
}

fn symlink_out_of_the_pool_is_followed(door: &dyn Door) -> Verdict {
    let outside = std::env::temp_dir().join(format!("forebay-outside-{}", std::process::id()));
    let text = outside.to_str().unwrap_or_default().to_owned();
    let verdict = (|| {
        std::fs::create_dir_all(&outside).ok();
        std::fs::write(outside.join("f"), b"outside").ok();
        door.symlink(&text, "out")?;
        equal(door.get("out/f")?, b"outside".to_vec())?;
        equal(door.names("out")?, vec![b"f".to_vec()])?;
        door.put("out/g", b"written")?;
        holds(std::fs::read(outside.join("g")).is_ok_and(|b| b == b"written"), "the file is outside")?;
        // A path that leaves the pool and enters it again.
        door.put("here", b"back")?;
        door.symlink(door.absolute(b""), "out/in")?;
        equal(door.get("out/in/here")?, b"back".to_vec())?;
        refused(door.rename("here", "out/here"), libc::EXDEV).or_else(|failure| {
            // If `out` is on the same file system, nothing is crossed.
            if door.can(Ability::OwnSpace) {
                Err(failure)
            } else {
                Ok(())
            }
        })
    })();
    std::fs::remove_dir_all(&outside).ok();
    verdict
}

fn read_link_of_anything_else_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    refused(door.read_link("f"), libc::EINVAL)?;
    refused(door.read_link("."), libc::EINVAL)?;
    refused(door.read_link("none"), libc::ENOENT)
}
