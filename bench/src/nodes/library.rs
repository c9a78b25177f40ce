//! libforebay.so, loaded with dlopen as by a program that is not linked with it.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::Path;

type Attach = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type Mkdir = unsafe extern "C" fn(*mut c_void, *const c_char, libc::mode_t) -> c_int;
type Open = unsafe extern "C" fn(
    *mut c_void,
    *const c_char,
    c_int,
    libc::mode_t,
    u32,
    u32,
    *mut *mut c_void,
) -> c_int;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type Read = unsafe extern "C" fn(*const c_void, *mut c_void, usize, i64) -> i64;
type Advise = unsafe extern "C" fn(*const c_void, c_int) -> c_int;
type Write = unsafe extern "C" fn(*const c_void, *const c_void, usize, i64) -> i64;

/// The library, attached to a pool.
pub(super) struct Library {
    pool: *mut c_void,
    mkdir: Mkdir,
    open: Open,
    close: Close,
    read: Read,
    write: Write,
    advise: Advise,
}

/// An open file of the pool.
pub(super) struct File<'a> {
    library: &'a Library,
    file: *mut c_void,
}

/// Converts a negative errno to an error with its text.
fn checked(result: i64, call: &str) -> Result<usize, String> {
    usize::try_from(result)
        .map_err(|_| format!("{call}: {}", std::io::Error::from_raw_os_error(result.unsigned_abs() as i32)))
}

impl Library {
    /// Loads the library, and attaches to the pool in a directory.
    pub(super) fn attach(library: &Path, pool: &Path) -> Result<Library, String> {
        let text = |path: &Path| {
            CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| format!("{path:?}: holds a NUL"))
        };
        let name = text(library)?;
        // SAFETY: the library's constructors do nothing that a program of one thread minds.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!("{}: cannot be loaded", library.display()));
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is open for good, the name ends in NUL.
            let at = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if at.is_null() {
                Err(format!("{}: has no {name:?}", library.display()))
            } else {
                Ok(at)
            }
        };
        // SAFETY: the functions have these types in forebay.h.
        let (attach, mut made) = unsafe {
            let attach = std::mem::transmute::<*mut c_void, Attach>(symbol(c"forebay_attach")?);
            let made = Library {
                pool: std::ptr::null_mut(),
                mkdir: std::mem::transmute::<*mut c_void, Mkdir>(symbol(c"forebay_mkdir")?),
                open: std::mem::transmute::<*mut c_void, Open>(symbol(c"forebay_file_open")?),
                close: std::mem::transmute::<*mut c_void, Close>(symbol(c"forebay_file_close")?),
                read: std::mem::transmute::<*mut c_void, Read>(symbol(c"forebay_file_pread")?),
                write: std::mem::transmute::<*mut c_void, Write>(symbol(c"forebay_file_pwrite")?),
                advise: std::mem::transmute::<*mut c_void, Advise>(symbol(c"forebay_file_advise")?),
            };
            (attach, made)
        };
        let pool = text(pool)?;
        // SAFETY: the path ends in NUL, the result is ours.
        checked(unsafe { attach(pool.as_ptr(), &mut made.pool) }.into(), "forebay_attach")?;
        Ok(made)
    }

    pub(super) fn mkdir(&self, path: &CStr) -> Result<(), String> {
        // SAFETY: the pool is attached, the path ends in NUL.
        checked(unsafe { (self.mkdir)(self.pool, path.as_ptr(), 0o755) }.into(), "forebay_mkdir").map(drop)
    }

    /// Opens a file; a new file has one backing file, on this node.
    pub(super) fn open(&self, path: &CStr, flags: i32) -> Result<File<'_>, String> {
        let mut file = std::ptr::null_mut();
        // SAFETY: the pool is attached, the path ends in NUL, the result is ours.
        let opened = unsafe { (self.open)(self.pool, path.as_ptr(), flags, 0o644, 1, 0, &mut file) };
        checked(opened.into(), "forebay_file_open")?;
        Ok(File { library: self, file })
    }
}

impl File<'_> {
    /// Advises that the file is read sequentially.
    pub(super) fn read_in_order(&self) -> Result<(), String> {
        // SAFETY: the file is open.
        let advised = unsafe { (self.library.advise)(self.file, libc::POSIX_FADV_SEQUENTIAL) };
        checked(advised.into(), "forebay_file_advise").map(drop)
    }

    /// Reads the whole buffer at an offset.
    pub(super) fn read(&self, buffer: &mut [u8], offset: usize) -> Result<(), String> {
        // SAFETY: the file is open, the buffer ours.
        let n = unsafe {
            (self.library.read)(self.file, buffer.as_mut_ptr().cast(), buffer.len(), offset as i64)
        };
        whole(checked(n, "forebay_file_pread")?, buffer.len())
    }

    /// Writes the whole buffer at an offset.
    pub(super) fn write(&self, buffer: &[u8], offset: usize) -> Result<(), String> {
        // SAFETY: the file is open, the buffer ours.
        let n =
            unsafe { (self.library.write)(self.file, buffer.as_ptr().cast(), buffer.len(), offset as i64) };
        whole(checked(n, "forebay_file_pwrite")?, buffer.len())
    }
}

fn whole(done: usize, asked: usize) -> Result<(), String> {
    if done == asked {
        Ok(())
    } else {
        Err(format!("{done} of {asked} bytes"))
    }
}

impl Drop for File<'_> {
    fn drop(&mut self) {
        // SAFETY: the file is open, and this is the last that is done with it.
        unsafe { (self.library.close)(self.file) };
    }
}
