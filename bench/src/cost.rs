//! The preload library's cost for programs that use files outside the pool: each call compared with libc's own, and
//! whole programs with and without the library.

use crate::calls::{c_path, check, close, create, write_all};
use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::systems::{said, System};
use std::ffi::{c_char, c_int, c_void, CStr, CString, OsStr};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Approximate nanoseconds of one batch of calls.
const BATCH_NS: u64 = 4_000_000;
/// Pairs of batches; each sample is their median.
const BATCHES: usize = 25;
/// Program starts for one sample.
const STARTS: usize = 200;
/// Bytes of the small files.
const SMALL_BYTES: usize = 4096;

/// libc's functions: those that the program is linked with, which the preload library replaces if it is loaded, or
/// libc's own.
struct Calls {
    open: unsafe extern "C" fn(*const c_char, c_int, ...) -> c_int,
    stat: unsafe extern "C" fn(*const c_char, *mut libc::stat) -> c_int,
    fstat: unsafe extern "C" fn(c_int, *mut libc::stat) -> c_int,
    fstatat: unsafe extern "C" fn(c_int, *const c_char, *mut libc::stat, c_int) -> c_int,
    access: unsafe extern "C" fn(*const c_char, c_int) -> c_int,
    readlink: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize,
    unlink: unsafe extern "C" fn(*const c_char) -> c_int,
    mkdir: unsafe extern "C" fn(*const c_char, libc::mode_t) -> c_int,
    rmdir: unsafe extern "C" fn(*const c_char) -> c_int,
    rename: unsafe extern "C" fn(*const c_char, *const c_char) -> c_int,
    opendir: unsafe extern "C" fn(*const c_char) -> *mut libc::DIR,
    readdir: unsafe extern "C" fn(*mut libc::DIR) -> *mut libc::dirent,
    closedir: unsafe extern "C" fn(*mut libc::DIR) -> c_int,
}

impl Calls {
    fn linked() -> Calls {
        // Found as the loader finds them for the program, so the preloaded library comes first.
        Calls::found_in(libc::RTLD_DEFAULT).unwrap_or_else(|name| panic!("the program is linked with {name}"))
    }

    fn of_libc() -> Result<Calls, String> {
        // SAFETY: a C string; libc is loaded already and stays.
        let libc = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY) };
        if libc.is_null() {
            return Err("libc.so.6 cannot be opened".into());
        }
        Calls::found_in(libc)
    }

    fn found_in(library: *mut c_void) -> Result<Calls, String> {
        /// # Safety
        /// `F` is the type of the function of this name.
        unsafe fn find<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F, String> {
            // SAFETY: a library's handle and a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() {
                return Err(name.to_string_lossy().into_owned());
            }
            assert!(size_of::<F>() == size_of::<*mut c_void>());
            // SAFETY: a pointer to a function, of which the caller promises the type.
            Ok(unsafe { std::mem::transmute_copy(&found) })
        }
        // SAFETY: libc's functions of these names have these types.
        unsafe {
            Ok(Calls {
                open: find(library, c"open")?,
                stat: find(library, c"stat")?,
                fstat: find(library, c"fstat")?,
                fstatat: find(library, c"fstatat")?,
                access: find(library, c"access")?,
                readlink: find(library, c"readlink")?,
                unlink: find(library, c"unlink")?,
                mkdir: find(library, c"mkdir")?,
                rmdir: find(library, c"rmdir")?,
                rename: find(library, c"rename")?,
                opendir: find(library, c"opendir")?,
                readdir: find(library, c"readdir")?,
                closedir: find(library, c"closedir")?,
            })
        }
    }
}

/// Arguments of the calls: existing files, names and descriptors.
struct Place {
    file: CString,
    link: CString,
    directory: CString,
    absent: CString,
    new: CString,
    renamed: CString,
    opened: c_int,
    opened_directory: c_int,
}

/// # Safety
/// The functions are libc's or stand for them.
type Measured = unsafe fn(&Calls, &Place);

/// The calls and their labels. The one on an absent name comes last.
const CALLS: [(&str, Measured); 12] = [
    ("stat", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut stat = std::mem::MaybeUninit::uninit();
            (c.stat)(p.file.as_ptr(), stat.as_mut_ptr());
        }
    }),
    ("fstat", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut stat = std::mem::MaybeUninit::uninit();
            (c.fstat)(p.opened, stat.as_mut_ptr());
        }
    }),
    ("fstatat in a directory", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut stat = std::mem::MaybeUninit::uninit();
            (c.fstatat)(p.opened_directory, c"file".as_ptr(), stat.as_mut_ptr(), 0);
        }
    }),
    ("access", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            (c.access)(p.file.as_ptr(), libc::R_OK);
        }
    }),
    ("readlink", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut text = [0; 256];
            (c.readlink)(p.link.as_ptr(), text.as_mut_ptr(), text.len());
        }
    }),
    ("open and close", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            libc::close((c.open)(p.file.as_ptr(), libc::O_RDONLY));
        }
    }),
    ("open, read 4 KiB, close", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut bytes = [0u8; SMALL_BYTES];
            let fd = (c.open)(p.file.as_ptr(), libc::O_RDONLY);
            libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len());
            libc::close(fd);
        }
    }),
    ("create, write 4 KiB, close, unlink", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let bytes = [0u8; SMALL_BYTES];
            let fd = (c.open)(p.new.as_ptr(), libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL, 0o600);
            libc::write(fd, bytes.as_ptr().cast(), bytes.len());
            libc::close(fd);
            (c.unlink)(p.new.as_ptr());
        }
    }),
    ("rename there and back", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            (c.rename)(p.file.as_ptr(), p.renamed.as_ptr());
            (c.rename)(p.renamed.as_ptr(), p.file.as_ptr());
        }
    }),
    ("mkdir and rmdir", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            (c.mkdir)(p.new.as_ptr(), 0o700);
            (c.rmdir)(p.new.as_ptr());
        }
    }),
    ("opendir, read 5 entries, closedir", |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let stream = (c.opendir)(p.directory.as_ptr());
            if !stream.is_null() {
                while !(c.readdir)(stream).is_null() {}
                (c.closedir)(stream);
            }
        }
    }),
    (ABSENT, |c, p| {
        // SAFETY: C strings, buffers of the length that is given, descriptors of ours.
        unsafe {
            let mut stat = std::mem::MaybeUninit::uninit();
            (c.stat)(p.absent.as_ptr(), stat.as_mut_ptr());
        }
    }),
];
/// It has no target: an absent path may lead through a link into the pool, so the library examines it with additional
/// calls.
const ABSENT: &str = "stat of a name that is not there";

/// Nanoseconds of each call, with the functions that the program is linked with and with libc's own: `NAME, linked` and
/// `NAME, libc's own`. Batches of the two alternate in this one process.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let at = |name| c_path(&orders.root, name);
    let place = Place {
        file: at("file"),
        link: at("link"),
        directory: CString::new(orders.root.as_str()).unwrap_or_default(),
        absent: at("absent"),
        new: at("new"),
        renamed: at("renamed"),
        opened: create(&at("file"))?,
        // SAFETY: a C string.
        opened_directory: unsafe { libc::open(at(".").as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY) },
    };
    write_all(place.opened, &[0x5a; SMALL_BYTES])?;
    check(place.opened_directory, "open", &place.directory)?;
    // SAFETY: C strings.
    check(unsafe { libc::symlink(c"file".as_ptr(), place.link.as_ptr()) }, "symlink", &place.link)?;
    for name in ["a", "b"] {
        close(create(&at(name))?);
    }
    let sides = [Calls::linked(), Calls::of_libc()?];
    let mut rates = Vec::new();
    for (name, call) in CALLS {
        let batch = |calls: &Calls, count: u64| {
            let start = Instant::now();
            for _ in 0..count {
                // SAFETY: the functions are libc's or stand for them, and what is in the place is as they want it.
                unsafe { call(calls, &place) };
            }
            start.elapsed().as_nanos() as f64 / count as f64
        };
        let each = batch(&sides[1], 2000).max(1.0);
        let count = (BATCH_NS / each as u64).max(10);
        let mut samples = [Vec::new(), Vec::new()];
        for i in 0..2 * BATCHES {
            // The sides alternate, and so does the side that begins a pair.
            let side = (i + i / 2) % 2;
            samples[side].push(batch(&sides[side], count));
        }
        for (side, label) in samples.iter().zip(["linked", "libc's own"]) {
            rates.push((format!("{name}, {label}"), crate::report::median(side).unwrap_or(f64::NAN)));
        }
    }
    close(place.opened);
    close(place.opened_directory);
    for path in ["file", "link", "a", "b"].map(at) {
        // SAFETY: a C string.
        check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", &path)?;
    }
    Ok(rates)
}

/// Mean milliseconds of a command from start to end, over `count` runs.
pub(crate) fn drive_times(count: &str, command: &[String]) -> Result<f64, String> {
    let count: u32 = count.parse().map_err(|_| format!("{count}: not a number"))?;
    let (program, arguments) = command.split_first().ok_or("a command is needed")?;
    let start = Instant::now();
    for _ in 0..count {
        let status = Command::new(program).args(arguments).status().map_err(|e| format!("{program}: {e}"))?;
        if !status.success() {
            return Err(format!("{program} failed: {status}"));
        }
    }
    Ok(start.elapsed().as_secs_f64() * 1e3 / f64::from(count))
}

/// The tables: calls, then programs. The first two of `systems` are Forebay and tmpfs.
pub(crate) fn measure(systems: &[System<'_>], repetitions: usize) -> Result<Vec<Table>, String> {
    let [forebay, tmpfs, ..] = systems else { return Err("Forebay and tmpfs are needed".into()) };
    Ok(vec![calls(forebay, tmpfs, repetitions)?, programs(forebay, tmpfs, repetitions)?])
}

const WITH: &str = "with Forebay";
const WITHOUT: &str = "without";

fn calls(forebay: &System<'_>, tmpfs: &System<'_>, repetitions: usize) -> Result<Table, String> {
    let mut table = Table {
        title: "(d) calls on files outside the pool, with the preload library and without, by turns in one process".into(),
        unit: "ns",
        more_is_better: false,
        columns: [WITH, WITHOUT].map(String::from).to_vec(),
        rows: Vec::new(),
    };
    for _ in 0..repetitions {
        // The library is loaded, and the files are on tmpfs.
        let times = forebay.drive_in(&tmpfs.root, "calls", &Orders::default())?;
        for (name, _) in CALLS {
            let target = Target::Ratio { against: WITHOUT.into(), at_least: 0.98 };
            for (column, label) in ["linked", "libc's own"].into_iter().enumerate() {
                let Some((_, ns)) = times.iter().find(|(n, _)| *n == format!("{name}, {label}")) else {
                    continue;
                };
                let target = if name == ABSENT { Vec::new() } else { vec![target.clone()] };
                table.add(name, column, *ns, || target);
            }
        }
    }
    Ok(table)
}

fn programs(forebay: &System<'_>, tmpfs: &System<'_>, repetitions: usize) -> Result<Table, String> {
    let mut table = Table {
        title: "(d) whole programs, with the preload library and without".into(),
        unit: "ms",
        more_is_better: false,
        columns: [WITH, WITHOUT].map(String::from).to_vec(),
        rows: Vec::new(),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("configure");
    let ratio = |at_least| Target::Ratio { against: WITHOUT.into(), at_least };
    for repetition in 0..repetitions {
        for side in [0, 1] {
            let column = (side + repetition) % 2;
            let system = [forebay, tmpfs][column];
            let target = Target::Difference { against: WITHOUT.into(), at_most: 1.0 };
            let ms = times(system, STARTS, &["/bin/true".as_ref()])?;
            table.add("exec of /bin/true", column, ms, || vec![target]);
            let small = system.root.join("file");
            said(system.command("sh").args(["-c", "echo >\"$1\"", "sh"]).arg(&small))?;
            let ms = times(system, STARTS, &["/bin/cat".as_ref(), small.as_os_str()])?;
            table.add("cat of a small file, in the pool or on tmpfs", column, ms, Vec::new);
            for (label, root, is_outside) in [
                ("configure outside the pool", &tmpfs.root, true),
                ("configure in the pool, or on tmpfs", &system.root, false),
            ] {
                let directory = root.join("configure");
                said(system.command("mkdir").arg(&directory))?;
                // The shell itself changes directory, as the directory may be in the pool.
                let change = "cd \"$1\" && exec sh \"$2\"";
                let words = ["sh", "-c", change, "sh"].map(OsStr::new);
                let command = [&words[..], &[directory.as_os_str(), script.as_os_str()]].concat();
                let ms = times(system, 1, &command)?;
                said(system.command("rm").arg("-r").arg(&directory))?;
                let target = if is_outside { vec![ratio(1.0 / 1.15)] } else { Vec::new() };
                table.add(label, column, ms, || target);
            }
        }
    }
    Ok(table)
}

/// Milliseconds of a command on a system, excluding the start of `forebay run`.
fn times(system: &System<'_>, count: usize, command: &[&OsStr]) -> Result<f64, String> {
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let text = said(system.command(this).args(["drive", "times", &count.to_string()]).args(command))?;
    let last = text.lines().last().unwrap_or_default();
    last.trim().parse().map_err(|_| format!("the driver said {text:?}"))
}
