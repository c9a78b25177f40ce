//! `forebay ls`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{PathBuffer, Pool};
use forebay_types::{Code, Error, Ino, Kind, Result};
use serde_json::{json, Value};

use crate::arguments::Ls;
use crate::{failure, pool, table};

/// An entry to show.
struct Shown {
    name: Vec<u8>,
    ino: Ino,
    kind: Kind,
    stat: Option<libc::stat>,
    link: Option<Vec<u8>>,
}

pub(super) fn ls(named: Option<PathBuf>, arguments: &Ls) -> Result<ExitCode> {
    let pool = pool::attach(&pool::directory(named)?)?;
    let mut listing = Listing { pool, arguments, json: Vec::new(), blocks: 0 };
    let mut failed = false;
    let several = arguments.paths.len() > 1 || arguments.recursive;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        if let Err(e) = listing.list(&path, several) {
            failure::say(&e);
            listing.json.push(failed_path(&path, &e));
            failed = true;
        }
    }
    if arguments.json {
        failure::print_json(&Value::Array(std::mem::take(&mut listing.json)));
    }
    Ok(if failed { ExitCode::from(failure::FAILED) } else { ExitCode::SUCCESS })
}

struct Listing<'a> {
    pool: &'static Pool,
    arguments: &'a Ls,
    json: Vec<Value>,
    /// Directories printed so far: an empty line separates them.
    blocks: u64,
}

impl Listing<'_> {
    fn list(&mut self, path: &[u8], headed: bool) -> Result<()> {
        let mut escape = PathBuffer::new();
        // Follows a link, as ls does, unless -l shows the link itself.
        let follow = !self.arguments.long || path.ends_with(b"/");
        let found = self.pool.resolve(pool::place(path), follow, &mut escape);
        let entry = pool::worded(found, "list", path)?;
        if !entry.attr.is_directory() {
            let shown = self.shown(path.to_vec(), path, entry.attr.ino, entry.attr.kind())?;
            self.print(path, vec![shown], false);
            return Ok(());
        }
        self.directory(entry.attr.ino, path, headed)
    }

    fn directory(&mut self, ino: Ino, path: &[u8], headed: bool) -> Result<()> {
        let base = trimmed(path);
        let mut entries = Vec::new();
        let mut cursor = self.pool.read_directory(ino);
        loop {
            let next = cursor.next(self.pool).map_err(|code| {
                Error::new(code, format!("cannot list {}", table::printable(path))).why(pool::words(code))
            })?;
            let Some(entry) = next else { break };
            if entry.name.starts_with(b".") && !self.arguments.all {
                continue;
            }
            entries.push((entry.name.to_vec(), entry.ino, entry.kind));
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        let below: Vec<(Vec<u8>, Ino)> = entries
            .iter()
            .filter(|(_, _, kind)| self.arguments.recursive && *kind == Kind::Directory)
            .map(|(name, ino, _)| ([&base[..], b"/", name].concat(), *ino))
            .collect();
        let mut shown = Vec::with_capacity(entries.len());
        for (name, ino, kind) in entries {
            let full = [&base[..], b"/", &name].concat();
            match self.shown(name, &full, ino, kind) {
                Ok(one) => shown.push(one),
                Err(e) if e.code == Code::NotFound => {} // removed meanwhile
                Err(e) => return Err(e),
            }
        }
        self.print(path, shown, headed);
        for (path, ino) in below {
            self.directory(ino, &path, true)?;
        }
        Ok(())
    }

    fn shown(&self, name: Vec<u8>, path: &[u8], ino: Ino, kind: Kind) -> Result<Shown> {
        if !self.arguments.long && !self.arguments.json {
            return Ok(Shown { name, ino, kind, stat: None, link: None });
        }
        let stat = self.pool.stat_inode(ino).map_err(|code| {
            Error::new(code, format!("cannot look at {}", table::printable(path))).why(pool::words(code))
        })?;
        let link = if kind == Kind::Symlink { link_target(self.pool, path) } else { None };
        Ok(Shown { name, ino, kind, stat: Some(stat), link })
    }

    fn print(&mut self, dir: &[u8], entries: Vec<Shown>, headed: bool) {
        if self.arguments.json {
            let base = trimmed(dir);
            self.json.extend(entries.iter().map(|e| e.json(&base)));
            return;
        }
        let mut text = Vec::new();
        if headed {
            let gap = if self.blocks > 0 { "\n" } else { "" };
            text.extend_from_slice(format!("{gap}{}:\n", table::printable(dir)).as_bytes());
        }
        self.blocks += 1;
        if self.arguments.long {
            text.extend_from_slice(long(&entries).as_bytes());
        } else {
            for e in &entries {
                // The bytes are not escaped: programs that read a pipe need the exact name.
                text.extend_from_slice(&e.name);
                text.push(b'\n');
            }
        }
        failure::put(text);
    }
}

fn trimmed(path: &[u8]) -> Vec<u8> {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |i| i + 1);
    path[..end].to_vec()
}

/// The target of a symbolic link.
pub(super) fn link_target(pool: &Pool, path: &[u8]) -> Option<Vec<u8>> {
    let mut buffer = vec![0; forebay_types::limits::PATH_MAX];
    let n = pool.read_link(pool::place(path), &mut buffer, &mut PathBuffer::new()).ok()?;
    buffer.truncate(n);
    Some(buffer)
}

/// A kind's name in JSON and in words.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Symlink => "symlink",
        Kind::Fifo => "fifo",
        Kind::CharDevice => "character device",
        Kind::BlockDevice => "block device",
        Kind::Socket => "socket",
    }
}

/// Stores a name in JSON: as text, and, when it is not UTF-8, its bytes in hexadecimal too.
pub(super) fn put_name(object: &mut Value, key: &str, name: &[u8]) {
    object[key] = json!(String::from_utf8_lossy(name));
    if std::str::from_utf8(name).is_err() {
        let hex: String = name.iter().map(|b| format!("{b:02x}")).collect();
        object[format!("{key}_hex")] = json!(hex);
    }
}

/// A path for which a verb failed, as JSON: in the list that it prints it is in place of what was asked for.
pub(super) fn failed_path(path: &[u8], e: &Error) -> Value {
    let mut object = json!({ "error": failure::value(e) });
    put_name(&mut object, "path", path);
    object
}

impl Shown {
    fn json(&self, base: &[u8]) -> Value {
        let mut object = json!({ "ino": self.ino.0, "kind": kind_name(self.kind) });
        let name = self.name.rsplit(|&b| b == b'/').next().unwrap_or(&self.name);
        put_name(&mut object, "name", name);
        let path = if self.name.starts_with(b"/") { self.name.clone() } else { [base, b"/", name].concat() };
        put_name(&mut object, "path", &path);
        if let Some(stat) = &self.stat {
            object["mode"] = json!(format!("{:04o}", stat.st_mode & 0o7777));
            object["nlink"] = json!(stat.st_nlink);
            object["uid"] = json!(stat.st_uid);
            object["gid"] = json!(stat.st_gid);
            object["size"] = json!(stat.st_size);
            object["allocated_bytes"] = json!(stat.st_blocks * 512);
            object["mtime"] = json!(stat.st_mtime as f64 + stat.st_mtime_nsec as f64 / 1e9);
        }
        if let Some(link) = &self.link {
            put_name(&mut object, "target", link);
        }
        object
    }
}

fn long(entries: &[Shown]) -> String {
    let rows: Vec<[String; 6]> = entries
        .iter()
        .filter_map(|e| e.stat.as_ref())
        .map(|s| {
            let size = match s.st_mode & libc::S_IFMT {
                libc::S_IFCHR | libc::S_IFBLK => {
                    format!("{}, {}", libc::major(s.st_rdev), libc::minor(s.st_rdev))
                }
                _ => s.st_size.to_string(),
            };
            [
                table::mode(s.st_mode),
                s.st_nlink.to_string(),
                table::user(s.st_uid),
                table::group(s.st_gid),
                size,
                table::local_time(s.st_mtime),
            ]
        })
        .collect();
    let width = |i: usize| rows.iter().map(|r| r[i].len()).max().unwrap_or(0);
    let (w_links, w_user, w_group, w_size) = (width(1), width(2), width(3), width(4));
    let mut text = String::new();
    for (row, e) in rows.iter().zip(entries) {
        let [mode, links, user, group, size, time] = row;
        let link = e.link.as_ref().map_or(String::new(), |l| format!(" -> {}", table::printable(l)));
        let name = table::printable(&e.name);
        text.push_str(&format!(
            "{mode} {links:>w_links$} {user:w_user$} {group:w_group$} {size:>w_size$} {time} {name}{link}\n"
        ));
    }
    text
}
