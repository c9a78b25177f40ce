//! What the permission bits allow.

use crate::case::{case, equal, refused, Case};
use crate::door::{Door, Verdict};
use libc::{EACCES, F_OK, O_CREAT, O_RDONLY, O_RDWR, O_WRONLY, R_OK, W_OK, X_OK};

pub(super) const CASES: &[Case] = &[
    case!(access_for_root_refuses_only_execution [Root];
        "access evaluates the permission bits; for root it refuses only execution of a file without any execute bit."),
    case!(access_for_a_user_follows_the_bits [NotRoot];
        "access evaluates the permission bits; for root it refuses only execution of a file without any execute bit."),
    case!(user_is_refused_what_the_bits_refuse [NotRoot];
        "The permission bits are enforced for users other than root: for reading and writing files, and for listing, searching and changing directories."),
    case!(chown_by_a_user_to_another_fails [NotRoot]; "Only root may change the owner of a file to another user."),
];

fn access_for_root_refuses_only_execution(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    door.make_directory("d")?;
    door.chmod("f", 0)?;
    door.chmod("d", 0)?;
    door.access("f", F_OK)?;
    door.access("f", R_OK | W_OK)?;
    refused(door.access("f", X_OK), EACCES)?;
    door.access("d", R_OK | W_OK | X_OK)?;
    door.chmod("f", 0o010)?;
    door.access("f", X_OK)?;
    refused(door.access("none", F_OK), libc::ENOENT)?;
    refused(door.access("f/x", F_OK), libc::ENOTDIR)
}

fn access_for_a_user_follows_the_bits(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    for mode in 0..8_i32 {
        door.chmod("f", (mode as u32) << 6)?;
        for ask in 1..8 {
            // R_OK, W_OK and X_OK have the values of the permission bits.
            if ask & !mode == 0 {
                door.access("f", ask)?;
            } else {
                refused(door.access("f", ask), EACCES)?;
            }
        }
        door.access("f", F_OK)?;
    }
    // The owner's bits apply to the owner, even if others have more permissions.
    door.chmod("f", 0o077)?;
    refused(door.access("f", R_OK), EACCES)
}

fn user_is_refused_what_the_bits_refuse(door: &dyn Door) -> Verdict {
    door.make_directory("d")?;
    door.put("d/f", b"x")?;
    door.chmod("d/f", 0o200)?;
    refused(door.open("d/f", O_RDONLY, 0), EACCES)?;
    refused(door.open("d/f", O_RDWR, 0), EACCES)?;
    door.open("d/f", O_WRONLY, 0)?;
    door.chmod("d/f", 0o400)?;
    refused(door.open("d/f", O_WRONLY, 0), EACCES)?;
    refused(door.truncate(b"d/f", 0), EACCES)?;
    equal(door.get("d/f")?, b"x".to_vec())?;
    door.chmod("d", 0o500)?;
    refused(door.open("d/new", O_WRONLY | O_CREAT, 0o644), EACCES)?;
    refused(door.make_directory("d/new"), EACCES)?;
    refused(door.symlink("x", "d/new"), EACCES)?;
    refused(door.link("d/f", "d/new"), EACCES)?;
    refused(door.unlink("d/f"), EACCES)?;
    refused(door.rename("d/f", "f"), EACCES)?;
    equal(door.names("d")?, vec![b"f".to_vec()])?;
    door.chmod("d", 0o600)?;
    refused(door.stat("d/f"), EACCES)?;
    refused(door.open("d/f", O_RDONLY, 0), EACCES)?;
    refused(door.unlink("d/f"), EACCES)?;
    door.chmod("d", 0o300)?;
    refused(door.items("d"), EACCES)?;
    door.stat("d/f")?;
    door.chmod("d", 0o700)?;
    door.unlink("d/f")?;
    Ok(())
}

fn chown_by_a_user_to_another_fails(door: &dyn Door) -> Verdict {
    door.put("f", b"")?;
    let stat = door.stat("f")?;
    refused(door.chown_at("f".into(), Some(stat.uid + 1), None, true), libc::EPERM)?;
    refused(door.chown_at("f".into(), Some(0), None, true), libc::EPERM)?;
    door.chown_at("f".into(), Some(stat.uid), Some(stat.gid), true)?;
    equal(door.stat("f")?.uid, stat.uid)
}
