//! Compares two trees through the C library: names, kinds, modes, owners, sizes, times of files, data, links, devices,
//! `user.` attributes, and which names are links to one file.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Everything that is compared of a name.
#[derive(PartialEq, Eq, Debug)]
struct Described {
    kind: &'static str,
    mode: u32,
    owner: (u32, u32),
    /// Of a file: size, modification time, and the first of its names.
    file: Option<(u64, (i64, i64), PathBuf)>,
    target: Option<PathBuf>,
    device: u64,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    data: Option<u64>,
}

/// The differences between the trees at `a` and `b`, one each. Sockets are left out.
pub fn differences(a: &Path, b: &Path) -> std::io::Result<Vec<String>> {
    let (in_a, in_b) = (describe(a)?, describe(b)?);
    let mut all = Vec::new();
    for name in in_a.keys().chain(in_b.keys().filter(|name| !in_a.contains_key(*name))) {
        match (in_a.get(name), in_b.get(name)) {
            (Some(one), Some(other)) if one == other => {}
            (Some(one), Some(other)) => {
                all.push(format!("{}:\n  {one:?}\n  {other:?}", name.display()));
            }
            (Some(one), None) => all.push(format!("{}: only in {}: {one:?}", name.display(), a.display())),
            (None, other) => all.push(format!("{}: only in {}: {other:?}", name.display(), b.display())),
        }
    }
    Ok(all)
}

fn describe(top: &Path) -> std::io::Result<BTreeMap<PathBuf, Described>> {
    let (mut all, mut firsts) = (BTreeMap::new(), BTreeMap::new());
    let mut directories = vec![top.to_owned()];
    while let Some(directory) = directories.pop() {
        let mut entries = std::fs::read_dir(&directory)?.collect::<Result<Vec<_>, _>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let found = std::fs::symlink_metadata(&path)?;
            let kind = found.file_type();
            // A socket is a meeting point of running programs: no store keeps it.
            if kind.is_socket() {
                continue;
            }
            if kind.is_dir() {
                directories.push(path.clone());
            }
            let name = path.strip_prefix(top).unwrap_or(&path).to_owned();
            let first = firsts.entry(found.ino()).or_insert_with(|| name.clone()).clone();
            let described = Described {
                kind: match () {
                    () if kind.is_file() => "file",
                    () if kind.is_dir() => "directory",
                    () if kind.is_symlink() => "link",
                    () => "node",
                },
                mode: if kind.is_symlink() { 0o777 } else { found.mode() },
                owner: (found.uid(), found.gid()),
                file: kind.is_file().then(|| (found.size(), (found.mtime(), found.mtime_nsec()), first)),
                target: if kind.is_symlink() { Some(std::fs::read_link(&path)?) } else { None },
                device: if kind.is_char_device() || kind.is_block_device() { found.rdev() } else { 0 },
                xattrs: if kind.is_file() || kind.is_dir() { xattrs(&path)? } else { BTreeMap::new() },
                data: if kind.is_file() { Some(digest(&path)?) } else { None },
            };
            all.insert(name, described);
        }
    }
    Ok(all)
}

/// FNV-1a of a file's bytes.
fn digest(path: &Path) -> std::io::Result<u64> {
    let (mut file, mut buffer, mut sum) =
        (std::fs::File::open(path)?, vec![0; 1 << 16], 0xcbf2_9ce4_8422_2325_u64);
    loop {
        match std::io::Read::read(&mut file, &mut buffer)? {
            0 => return Ok(sum),
            n => {
                sum =
                    buffer[..n].iter().fold(sum, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
            }
        }
    }
}

fn xattrs(path: &Path) -> std::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let c_path = CString::new(path.as_os_str().as_bytes())?;
    let mut names = vec![0_u8; 1 << 16];
    // SAFETY: the string ends in NUL; the buffer is as long as said.
    let n = unsafe { libc::llistxattr(c_path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    if n < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut all = BTreeMap::new();
    for name in names[..n as usize].split(|b| *b == 0).filter(|name| name.starts_with(b"user.")) {
        let c_name = CString::new(name)?;
        let mut value = vec![0_u8; 1 << 16];
        // SAFETY: as above.
        let n = unsafe {
            libc::lgetxattr(c_path.as_ptr(), c_name.as_ptr(), value.as_mut_ptr().cast(), value.len())
        };
        if n < 0 {
            return Err(std::io::Error::last_os_error());
        }
        value.truncate(n as usize);
        all.insert(name.to_vec(), value);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Scratch;

    #[test]
    fn every_difference_is_found() {
        let scratch = Scratch::on_disk();
        let (a, b) = (scratch.path().join("a"), scratch.path().join("b"));
        for top in [&a, &b] {
            std::fs::create_dir_all(top.join("d")).unwrap();
            std::fs::write(top.join("d/f"), "one").unwrap();
            std::os::unix::fs::symlink("f", top.join("d/l")).unwrap();
            let file = std::fs::File::options().write(true).open(top.join("d/f")).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        assert_eq!(differences(&a, &b).unwrap(), Vec::<String>::new());
        std::fs::write(b.join("d/f"), "two").unwrap();
        std::fs::write(a.join("only"), "").unwrap();
        std::fs::create_dir(b.join("also")).unwrap();
        let found = differences(&a, &b).unwrap();
        assert_eq!(found.len(), 3, "{found:?}");
    }
}
