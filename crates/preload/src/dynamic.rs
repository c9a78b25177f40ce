//! dlopen of shared objects in the pool.
//!
//! The dynamic loader opens files itself, so it gets a name under which the kernel knows the backing file: a path below
//! the target's descriptor, with the inode number in it. The loader identifies objects by name first. No other object
//! has that name, so the loader never mistakes one object for another.
//!
//! Where an object's list of directories (DT_RUNPATH or DT_RPATH) leads into the pool, the objects that it needs are
//! searched here and loaded before it, as the loader would take `$ORIGIN` for the target's directory. The loader then
//! finds them by their sonames. Wheels of Python that contain libraries have this layout.

use std::os::raw::{c_char, c_int, c_void};

use crate::classify::may_lead_to_pool;
use crate::open::open_any;
use crate::path::{self, Buffer};
use crate::{descriptor, real};

/// Levels of objects that need objects.
const DEPTH_MAX: u32 = 32;
/// Objects that one object needs.
const NEEDED_MAX: usize = 64;
/// Bytes of a soname or a list of directories.
const TEXT_BYTES: usize = 2048;

type Handle = *mut c_void;
type Open = unsafe extern "C-unwind" fn(*const c_char, c_int) -> Handle;

/// What dlopen continues with: this library's own code for a path that leads into the pool, otherwise libc's.
unsafe extern "C" fn choose(file: *const c_char) -> *const c_void {
    // SAFETY: libc's contract: null or a C string.
    let ours = !file.is_null()
        && unsafe { path::bytes(file).contains(&b'/') && may_lead_to_pool(libc::AT_FDCWD, file) };
    if ours {
        return open_object as Open as *const c_void;
    }
    real::libc_own::dlopen::address()
}

/// dlopen(3). The loader examines its caller (for its directories and namespace), so this jumps to libc's own dlopen
/// instead of calling it.
///
/// # Safety
/// As libc's.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), no_mangle)]
#[allow(unreachable_pub, dead_code)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn dlopen(_file: *const c_char, _mode: c_int) -> Handle {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        choose = sym choose,
    )
}

/// dlopen(3). The loader examines its caller (for its directories and namespace), so this jumps to libc's own dlopen
/// instead of calling it.
///
/// # Safety
/// As libc's.
#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), no_mangle)]
#[allow(unreachable_pub, dead_code)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn dlopen(_file: *const c_char, _mode: c_int) -> Handle {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {choose}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        choose = sym choose,
    )
}

/// dlopen of a path that leads into the pool.
unsafe extern "C-unwind" fn open_object(file: *const c_char, mode: c_int) -> Handle {
    // SAFETY: libc's contract.
    unsafe { open_with_needed(file, mode, 0) }
}

/// # Safety
/// `file` is a C string.
unsafe fn open_with_needed(file: *const c_char, mode: c_int, depth: u32) -> Handle {
    // SAFETY: the caller's promise; names are C strings in their buffers.
    unsafe {
        let fd = open_any(libc::AT_FDCWD, file, libc::O_RDONLY | libc::O_CLOEXEC, 0) as c_int;
        let mut name = Buffer::new();
        if fd < 0 || !name_of(fd, &mut name) {
            if fd >= 0 {
                real::close(fd);
            }
            // The loader finds nothing there, and its error message says so.
            return real::libc_own::dlopen(file, mode);
        }
        let mut opened = [std::ptr::null_mut(); NEEDED_MAX];
        if depth < DEPTH_MAX {
            open_needed(fd, path::bytes(file), depth, &mut opened);
        }
        real::close(fd);
        let handle = real::libc_own::dlopen(name.as_c(), mode);
        // The object has its own references to the objects that it needs.
        for needed in opened.into_iter().filter(|handle| !handle.is_null()) {
            libc::dlclose(needed);
        }
        handle
    }
}

/// A name under which the kernel knows the file behind `fd`, in the pool or outside.
fn name_of(fd: c_int, name: &mut Buffer) -> bool {
    if let Some((pool, ino)) = descriptor::inode_of(fd) {
        // SAFETY: the handle is attached, the buffer has room for a path.
        let bytes = unsafe { pool.backing_path(ino, name.first()) };
        return bytes > 0;
    }
    let mut number = [0; 12];
    let mut link = Buffer::new();
    if !link.set(&[b"/proc/self/fd/", path::digits(fd, &mut number)]) {
        return false;
    }
    // SAFETY: a C string, and a buffer with room for a path.
    unsafe {
        let bytes = real::readlinkat(libc::AT_FDCWD, link.as_c(), name.first(), crate::abi::PATH_BYTES - 1);
        if bytes <= 0 {
            return false;
        }
        name.first().add(bytes as usize).write(0);
    }
    true
}

/// Loads the objects in directories of the pool that the object behind `fd` needs. Programs know that object as
/// `shown`.
///
/// # Safety
/// `opened` holds nulls.
unsafe fn open_needed(fd: c_int, shown: &[u8], depth: u32, opened: &mut [Handle; NEEDED_MAX]) {
    let Some(dynamic) = Dynamic::read(fd) else { return };
    let mut text = [0; TEXT_BYTES];
    let Some(directories) = dynamic.directories.and_then(|at| dynamic.text(fd, at, &mut text)) else {
        return;
    };
    let origin = match shown.iter().rposition(|b| *b == b'/') {
        Some(0) => b"/".as_slice(),
        Some(at) => &shown[..at],
        None => b".",
    };
    for (at, slot) in dynamic.needed.iter().flatten().zip(opened) {
        let mut soname = [0; TEXT_BYTES];
        let Some(name) = dynamic.text(fd, *at, &mut soname) else { continue };
        if name.contains(&b'/') || is_loaded(name) {
            continue;
        }
        for directory in directories.split(|b| *b == b':').filter(|d| !d.is_empty()) {
            let mut candidate = Buffer::new();
            if !expand(directory, origin, name, &mut candidate) {
                continue;
            }
            // SAFETY: the candidate is a C string.
            unsafe {
                let there = may_lead_to_pool(libc::AT_FDCWD, candidate.as_c())
                    && crate::stat::access(candidate.as_c(), libc::R_OK) == 0;
                if there {
                    *slot = open_with_needed(candidate.as_c(), libc::RTLD_LAZY, depth + 1);
                    break;
                }
            }
        }
    }
}

/// True when the loader knows an object of this soname already.
fn is_loaded(soname: &[u8]) -> bool {
    let mut name = Buffer::new();
    if !name.set(&[soname]) {
        return false;
    }
    // SAFETY: a C string.
    unsafe {
        let handle = real::libc_own::dlopen(name.as_c(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        !handle.is_null() && libc::dlclose(handle) == 0
    }
}

/// `name` in `directory`, in which `$ORIGIN` stands for `origin`. False when it does not fit.
fn expand(directory: &[u8], origin: &[u8], name: &[u8], out: &mut Buffer) -> bool {
    for token in [b"${ORIGIN}".as_slice(), b"$ORIGIN"] {
        if let Some(at) = directory.windows(token.len()).position(|w| w == token) {
            return out.set(&[&directory[..at], origin, &directory[at + token.len()..], b"/", name]);
        }
    }
    out.set(&[directory, b"/", name])
}

/// The dynamic section of a 64-bit ELF file of this machine's byte order.
struct Dynamic {
    /// The offset of the strings in the file.
    strings: u64,
    /// Sonames, as offsets in the strings.
    needed: [Option<u64>; NEEDED_MAX],
    /// The list of directories, as an offset in the strings.
    directories: Option<u64>,
}

/// Reads fields of a file by offset, and none beyond its end.
struct Elf {
    fd: c_int,
}

impl Elf {
    fn bytes<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let at = i64::try_from(at).ok()?;
        (real::pread(self.fd, &mut bytes, at) == N as isize).then_some(bytes)
    }

    fn u16(&self, at: u64) -> Option<u64> {
        self.bytes(at).map(|b| u64::from(u16::from_ne_bytes(b)))
    }

    fn u32(&self, at: u64) -> Option<u64> {
        self.bytes(at).map(|b| u64::from(u32::from_ne_bytes(b)))
    }

    fn u64(&self, at: u64) -> Option<u64> {
        self.bytes(at).map(u64::from_ne_bytes)
    }
}

impl Dynamic {
    fn read(fd: c_int) -> Option<Dynamic> {
        const CLASS_64: u8 = 2;
        const PT_LOAD: u64 = 1;
        const PT_DYNAMIC: u64 = 2;
        const DT_NEEDED: u64 = 1;
        const DT_STRTAB: u64 = 5;
        const DT_RPATH: u64 = 15;
        const DT_RUNPATH: u64 = 29;
        let elf = Elf { fd };
        let head = elf.bytes::<5>(0)?;
        if head[..4] != *b"\x7fELF" || head[4] != CLASS_64 {
            return None;
        }
        let (headers, bytes, count) = (elf.u64(32)?, elf.u16(54)?, elf.u16(56)?);
        let header = |i: u64| headers.checked_add(i * bytes);
        let of_type =
            |kind: u64| (0..count).filter_map(header).filter(move |at| Elf { fd }.u32(*at) == Some(kind));
        let dynamic = of_type(PT_DYNAMIC).next()?;
        let (start, end) = (elf.u64(dynamic + 8)?, elf.u64(dynamic + 32)?);
        let mut found = Dynamic { strings: 0, needed: [None; NEEDED_MAX], directories: None };
        let (mut strings, mut runpath, mut rpath, mut n) = (None, None, None, 0);
        for i in 0..(end / 16).min(4096) {
            let (tag, value) = (elf.u64(start + 16 * i)?, elf.u64(start + 16 * i + 8)?);
            match tag {
                0 => break,
                DT_NEEDED if n < NEEDED_MAX => {
                    found.needed[n] = Some(value);
                    n += 1;
                }
                DT_STRTAB => strings = Some(value),
                DT_RPATH => rpath = Some(value),
                DT_RUNPATH => runpath = Some(value),
                _ => {}
            }
        }
        found.directories = runpath.or(rpath);
        let strings = strings?;
        // The offset in the file of an address in memory, by the segment that is loaded there.
        found.strings = of_type(PT_LOAD).find_map(|at| {
            let (offset, address, bytes) = (elf.u64(at + 8)?, elf.u64(at + 16)?, elf.u64(at + 32)?);
            let within = strings.checked_sub(address)?;
            (within < bytes).then(|| offset.checked_add(within))?
        })?;
        Some(found)
    }

    /// The string at an offset, if it ends within [`TEXT_BYTES`].
    fn text<'t>(&self, fd: c_int, at: u64, out: &'t mut [u8; TEXT_BYTES]) -> Option<&'t [u8]> {
        let at = i64::try_from(self.strings.checked_add(at)?).ok()?;
        let bytes = usize::try_from(real::pread(fd, out, at)).ok()?;
        let end = out[..bytes].iter().position(|b| *b == 0)?;
        Some(&out[..end])
    }
}
