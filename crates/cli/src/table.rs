//! Formats facts for users: sizes, times, modes, aligned columns.

use std::ffi::CStr;

use forebay_server::format_size;

/// Lines of name and value, with the values aligned.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    lines: Vec<(String, String)>,
}

impl Facts {
    /// Adds a line. An empty name continues the line before.
    pub(crate) fn add(&mut self, name: &str, value: impl Into<String>) {
        self.lines.push((name.to_owned(), value.into()));
    }

    /// The lines, each with a newline.
    pub(crate) fn text(&self) -> String {
        let width = self.lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        self.lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
    }
}

/// Seconds in readable form: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..60 => format!("{seconds:.0} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// Bytes in readable form.
pub(crate) fn bytes(n: u64) -> String {
    format_size(n)
}

/// A count with its noun: `1 file`, `3 files`.
pub(crate) fn count(n: u64, one: &str) -> String {
    match n {
        1 => format!("1 {one}"),
        _ if one.ends_with('y') => format!("{n} {}ies", &one[..one.len() - 1]),
        _ if one.ends_with("ss") => format!("{n} {one}es"),
        _ => format!("{n} {one}s"),
    }
}

/// A mode as `ls -l` writes it.
pub(crate) fn mode(mode: u32) -> String {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFDIR => 'd',
        libc::S_IFLNK => 'l',
        libc::S_IFIFO => 'p',
        libc::S_IFCHR => 'c',
        libc::S_IFBLK => 'b',
        libc::S_IFSOCK => 's',
        _ => '-',
    };
    let mut text = String::from(kind);
    for (shift, special, set, unset) in [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')]
    {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => set,
            (true, false) => unset,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// A point in time in the local time zone, to the second: `2026-11-21 21:59:14`.
pub(crate) fn local_time(seconds: i64) -> String {
    let mut tm = std::mem::MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both point to live memory; a null result leaves the zeroed value unused.
    let tm = unsafe {
        if libc::localtime_r(&seconds, tm.as_mut_ptr()).is_null() {
            return format!("@{seconds}");
        }
        tm.assume_init()
    };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        i64::from(tm.tm_year) + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}

/// A user's name, or the number.
pub(crate) fn user(uid: u32) -> String {
    // SAFETY: only one thread of this program calls it; the entry is read before the next call.
    unsafe {
        let entry = libc::getpwuid(uid);
        if entry.is_null() {
            uid.to_string()
        } else {
            text(CStr::from_ptr((*entry).pw_name))
        }
    }
}

/// A group's name, or the number.
pub(crate) fn group(gid: u32) -> String {
    // SAFETY: as in `user`.
    unsafe {
        let entry = libc::getgrgid(gid);
        if entry.is_null() {
            gid.to_string()
        } else {
            text(CStr::from_ptr((*entry).gr_name))
        }
    }
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// A name for a terminal: UTF-8 as it is, other bytes and control characters as `\xNN`.
pub(crate) fn printable(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() {
                c.to_string().bytes().for_each(|b| out.push_str(&format!("\\x{b:02x}")));
            } else {
                out.push(c);
            }
        }
        chunk.invalid().iter().for_each(|b| out.push_str(&format!("\\x{b:02x}")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_is_written_as_ls_does() {
        for (bits, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o104_755, "-rwsr-xr-x"),
            (0o102_644, "-rw-r-Sr--"),
            (0o041_777, "drwxrwxrwt"),
            (0o120_777, "lrwxrwxrwx"),
            (0o010_600, "prw-------"),
        ] {
            assert_eq!(mode(bits), text);
        }
    }

    #[test]
    fn duration_and_count_read_well() {
        assert_eq!(
            [0.04, 9.99, 59.0, 185.0, 7800.0, 273_600.0].map(duration),
            ["0.0 s", "10 s", "59 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"]
        );
        assert_eq!(
            [count(1, "file"), count(2, "directory"), count(0, "process")],
            ["1 file", "2 directories", "0 processes"]
        );
    }

    #[test]
    fn facts_are_aligned() {
        let mut f = Facts::default();
        f.add("a", "1");
        f.add("long", "2");
        assert_eq!(f.text(), "a     1\nlong  2\n");
    }

    #[test]
    fn printable_escapes_what_a_terminal_would_take() {
        assert_eq!(printable(b"a\x1b[31m\xffb"), "a\\x1b[31m\\xffb");
    }
}
