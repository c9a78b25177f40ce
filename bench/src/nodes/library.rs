//! libforebay.so, loaded with dlopen as by a program that is not linked with it.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::Path;
use std::time::Instant;

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
type VolumeOpen = unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut *mut c_void) -> c_int;
type Put = unsafe extern "C" fn(*const c_void, *const c_void, usize, i64) -> c_int;
type Get = unsafe extern "C" fn(*const c_void, *mut c_void, usize, i64) -> c_int;
type FetchAdd = unsafe extern "C" fn(*const c_void, i64, u64, *mut u64) -> c_int;
type Alloc = unsafe extern "C" fn(*mut c_void, usize, *mut *mut c_void) -> c_int;
type Register = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;
type QueueCreate = unsafe extern "C" fn(c_int, *mut *mut c_void) -> c_int;
type QueueWait = unsafe extern "C" fn(*const c_void, *mut Completion, c_int, c_int) -> c_int;
type PutStart =
    unsafe extern "C" fn(*const c_void, *const c_void, usize, i64, *mut c_void, *mut c_void) -> c_int;
type GetStart =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, i64, *mut c_void, *mut c_void) -> c_int;

/// `struct forebay_completion`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Completion {
    state: *mut c_void,
    result: i64,
    was: u64,
}

/// The library, attached to a pool.
pub(super) struct Library {
    pool: *mut c_void,
    mkdir: Mkdir,
    open: Open,
    close: Close,
    read: Read,
    write: Write,
    advise: Advise,
    volume_open: VolumeOpen,
    volume_close: Close,
    put: Put,
    get: Get,
    fetch_add: FetchAdd,
    queue_create: QueueCreate,
    queue_close: Close,
    queue_wait: QueueWait,
    put_start: PutStart,
    get_start: GetStart,
    alloc: Alloc,
    free: Close,
    register: Register,
}

/// Memory that the library allocated.
pub(super) struct Allocated<'a> {
    library: &'a Library,
    memory: *mut c_void,
    bytes: usize,
}

/// An open volume.
pub(super) struct Volume<'a> {
    library: &'a Library,
    volume: *mut c_void,
}

/// A queue of completions.
pub(super) struct Queue<'a> {
    library: &'a Library,
    queue: *mut c_void,
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
                volume_open: std::mem::transmute::<*mut c_void, VolumeOpen>(symbol(c"forebay_volume_open")?),
                volume_close: std::mem::transmute::<*mut c_void, Close>(symbol(c"forebay_volume_close")?),
                put: std::mem::transmute::<*mut c_void, Put>(symbol(c"forebay_volume_put")?),
                get: std::mem::transmute::<*mut c_void, Get>(symbol(c"forebay_volume_get")?),
                fetch_add: std::mem::transmute::<*mut c_void, FetchAdd>(symbol(c"forebay_volume_fetch_add")?),
                queue_create: std::mem::transmute::<*mut c_void, QueueCreate>(symbol(
                    c"forebay_queue_create",
                )?),
                queue_close: std::mem::transmute::<*mut c_void, Close>(symbol(c"forebay_queue_close")?),
                queue_wait: std::mem::transmute::<*mut c_void, QueueWait>(symbol(c"forebay_queue_wait")?),
                put_start: std::mem::transmute::<*mut c_void, PutStart>(symbol(c"forebay_volume_put_start")?),
                get_start: std::mem::transmute::<*mut c_void, GetStart>(symbol(c"forebay_volume_get_start")?),
                alloc: std::mem::transmute::<*mut c_void, Alloc>(symbol(c"forebay_alloc")?),
                free: std::mem::transmute::<*mut c_void, Close>(symbol(c"forebay_free")?),
                register: std::mem::transmute::<*mut c_void, Register>(symbol(c"forebay_register")?),
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

impl Library {
    /// Opens a volume for reading and writing.
    pub(super) fn volume(&self, specifier: &CStr) -> Result<Volume<'_>, String> {
        let mut volume = std::ptr::null_mut();
        // SAFETY: the pool is attached, the specifier ends in NUL, the result is ours.
        let opened = unsafe { (self.volume_open)(self.pool, specifier.as_ptr(), libc::O_RDWR, &mut volume) };
        checked(opened.into(), "forebay_volume_open")?;
        Ok(Volume { library: self, volume })
    }
}

impl Library {
    /// Allocates memory for transfers.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Allocated<'_>, String> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: the pool is attached, the result is ours.
        checked(unsafe { (self.alloc)(self.pool, bytes, &mut memory) }.into(), "forebay_alloc")?;
        Ok(Allocated { library: self, memory, bytes })
    }

    /// Registers memory of this program until it ends.
    pub(super) fn register(&self, memory: &mut [u8]) -> Result<(), String> {
        // SAFETY: the pool is attached, the memory is ours.
        let done = unsafe { (self.register)(self.pool, memory.as_mut_ptr().cast(), memory.len()) };
        checked(done.into(), "forebay_register").map(drop)
    }
}

impl Allocated<'_> {
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: as many bytes are there until it is dropped; no call is in progress.
        unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), self.bytes) }
    }
}

impl Drop for Allocated<'_> {
    fn drop(&mut self) {
        // SAFETY: it is not used again.
        unsafe { (self.library.free)(self.memory) };
    }
}

impl Volume<'_> {
    #[inline]
    pub(super) fn put(&self, from: &[u8], offset: usize) -> Result<(), String> {
        // SAFETY: the volume is open, the bytes are ours.
        match unsafe { (self.library.put)(self.volume, from.as_ptr().cast(), from.len(), offset as i64) } {
            0 => Ok(()),
            failed => checked(failed.into(), "forebay_volume_put").map(drop),
        }
    }

    #[inline]
    pub(super) fn get(&self, to: &mut [u8], offset: usize) -> Result<(), String> {
        // SAFETY: the volume is open, the buffer is ours.
        match unsafe { (self.library.get)(self.volume, to.as_mut_ptr().cast(), to.len(), offset as i64) } {
            0 => Ok(()),
            failed => checked(failed.into(), "forebay_volume_get").map(drop),
        }
    }

    #[inline]
    pub(super) fn fetch_add(&self, offset: usize, by: u64) -> Result<u64, String> {
        let mut was = 0;
        // SAFETY: the volume is open, the result is ours.
        match unsafe { (self.library.fetch_add)(self.volume, offset as i64, by, &mut was) } {
            0 => Ok(was),
            failed => checked(failed.into(), "forebay_volume_fetch_add").map(|_| was),
        }
    }

    /// Gets, or puts, blocks of `block` bytes for `seconds`, as many at a time as `memory` has: each block at its offset in
    /// the memory, the next one when it has ended. Returns nanoseconds for each.
    pub(super) fn keep_busy(
        &self,
        queue: &Queue<'_>,
        memory: &mut [u8],
        block: usize,
        puts: bool,
        seconds: f64,
    ) -> Result<f64, String> {
        let (library, depth) = (self.library, memory.len() / block);
        let memory = memory.as_mut_ptr();
        let start = |slot: usize| {
            let (at, offset, state) = (slot * block, (slot * block) as i64, slot as *mut c_void);
            // SAFETY: volume and queue are open. The memory of a block is not used until its call has ended, and all have
            // ended when this function returns.
            let done = unsafe {
                let at = memory.add(at).cast();
                match puts {
                    true => (library.put_start)(self.volume, at, block, offset, queue.queue, state),
                    false => (library.get_start)(self.volume, at, block, offset, queue.queue, state),
                }
            };
            checked(done.into(), "starting a call")
        };
        let (started, mut outcome, mut running, mut ended) = (Instant::now(), Ok(()), 0, 0);
        let start_at = |slot: usize, outcome: &mut Result<(), String>| match start(slot) {
            Ok(_) => 1,
            Err(e) => {
                *outcome = Err(e);
                0
            }
        };
        for slot in 0..depth {
            running += start_at(slot, &mut outcome);
        }
        let mut completions = [Completion { state: std::ptr::null_mut(), result: 0, was: 0 }; 16];
        while running > 0 {
            // SAFETY: the queue is open, and there is room for as many completions.
            let n = unsafe { (library.queue_wait)(queue.queue, completions.as_mut_ptr(), 16, -1) };
            let n = checked(n.into(), "forebay_queue_wait").unwrap_or_else(|e| {
                // Calls that are in progress write to the memory, and nothing says when they have ended.
                eprintln!("forebay-bench: {e}");
                std::process::abort()
            });
            ended += n;
            running -= n;
            for completion in &completions[..n] {
                if let Err(e) = checked(completion.result, "an asynchronous call") {
                    outcome = Err(e);
                }
                if outcome.is_ok() && started.elapsed().as_secs_f64() < seconds {
                    running += start_at(completion.state as usize, &mut outcome);
                }
            }
        }
        outcome.map(|()| started.elapsed().as_nanos() as f64 / ended.max(1) as f64)
    }
}

impl Library {
    /// Makes a queue of completions.
    pub(super) fn queue(&self) -> Result<Queue<'_>, String> {
        let mut queue = std::ptr::null_mut();
        // SAFETY: the result is ours.
        checked(unsafe { (self.queue_create)(0, &mut queue) }.into(), "forebay_queue_create")?;
        Ok(Queue { library: self, queue })
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // SAFETY: it is not used again.
        unsafe { (self.library.queue_close)(self.queue) };
    }
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        // SAFETY: the volume is open, and this is the last that is done with it.
        unsafe { (self.library.volume_close)(self.volume) };
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
