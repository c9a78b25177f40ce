//! The library: loaded once, kept until the process ends.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::OnceLock;

use crate::bindings::{fi_fabric_attr, fi_info, fid_fabric};

/// The oldest libfabric that is accepted: 1.15.
pub const FI_VERSION_LEAST: u32 = 1 << 16 | 15;
/// The interface version that calls request, also from newer libraries, which then behave like 1.15.
pub const FI_VERSION_ASKED: u32 = FI_VERSION_LEAST;

type GetInfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;

/// The functions that libfabric exports.
pub struct Library {
    version: u32,
    getinfo: GetInfo,
    freeinfo: unsafe extern "C" fn(*mut fi_info),
    dupinfo: unsafe extern "C" fn(*const fi_info) -> *mut fi_info,
    fabric: unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
}

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();

fn last_error() -> String {
    // SAFETY: dlerror gives null or a C string that lives until this thread's next dl call.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "no reason given".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

/// The address of `name` in the ABI `version`.
fn symbol(handle: *mut c_void, name: &CStr, version: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the handle is open and both names are C strings.
    let address = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    if address.is_null() {
        Err(format!("libfabric has no {} of {}", name.to_string_lossy(), version.to_string_lossy()))
    } else {
        Ok(address)
    }
}

impl Library {
    /// The library, loaded at the first call and never unloaded: providers have threads and hooks of their own.
    ///
    /// # Errors
    /// The reason as text: libfabric is not installed, or too old.
    pub fn get() -> Result<&'static Library, &'static str> {
        LIBRARY.get_or_init(Library::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Library, String> {
        let handlers = Handlers::current();
        // SAFETY: a constant name; constructors of libfabric may run on any thread.
        let handle = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        drop(handlers);
        if handle.is_null() {
            return Err(last_error());
        }
        let fi_version = symbol(handle, c"fi_version", c"FABRIC_1.0")?;
        // SAFETY: fi_version of FABRIC_1.0 is `uint32_t fi_version(void)`.
        let version =
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u32>(fi_version)() };
        if version < FI_VERSION_LEAST {
            return Err(format!(
                "libfabric is {}.{}; 1.15 or later is needed",
                version >> 16,
                version & 0xffff
            ));
        }
        // The versions below belong to the struct fi_info of crates/fabric-sys/src/bindings.rs.
        let getinfo = symbol(handle, c"fi_getinfo", c"FABRIC_1.3")?;
        let freeinfo = symbol(handle, c"fi_freeinfo", c"FABRIC_1.3")?;
        let dupinfo = symbol(handle, c"fi_dupinfo", c"FABRIC_1.3")?;
        let fabric = symbol(handle, c"fi_fabric", c"FABRIC_1.1")?;
        let strerror = symbol(handle, c"fi_strerror", c"FABRIC_1.0")?;
        // SAFETY: each is the function of that name in that version of the ABI, whose signature is the field's type.
        unsafe {
            Ok(Library {
                version,
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(getinfo),
                freeinfo: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut fi_info)>(freeinfo),
                dupinfo: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const fi_info) -> *mut fi_info,
                >(dupinfo),
                fabric: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int,
                >(fabric),
                strerror: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> *const c_char>(
                    strerror,
                ),
            })
        }
    }

    /// Major and minor version of the loaded library.
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    /// # Safety
    /// As `fi_getinfo(3)` of [`FI_VERSION_ASKED`].
    pub unsafe fn fi_getinfo(
        &self,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const fi_info,
        info: *mut *mut fi_info,
    ) -> c_int {
        // Providers that are plug-ins are loaded here.
        let _handlers = Handlers::current();
        // SAFETY: the caller's promise.
        unsafe { (self.getinfo)(FI_VERSION_ASKED, node, service, flags, hints, info) }
    }

    /// # Safety
    /// `info` came from `fi_getinfo`, `fi_dupinfo` or `fi_allocinfo` and is not used again.
    pub unsafe fn fi_freeinfo(&self, info: *mut fi_info) {
        // SAFETY: the caller's promise.
        unsafe { (self.freeinfo)(info) }
    }

    /// # Safety
    /// `info` is null, for an empty one, or points to a sound `fi_info`.
    pub unsafe fn fi_dupinfo(&self, info: *const fi_info) -> *mut fi_info {
        // SAFETY: the caller's promise.
        unsafe { (self.dupinfo)(info) }
    }

    /// An empty `fi_info`, or null when there is no memory.
    pub fn fi_allocinfo(&self) -> *mut fi_info {
        // SAFETY: null requests an empty one.
        unsafe { (self.dupinfo)(std::ptr::null()) }
    }

    /// # Safety
    /// As `fi_fabric(3)`: `attr` is from an `fi_info` that `fi_getinfo` returned.
    pub unsafe fn fi_fabric(
        &self,
        attr: *mut fi_fabric_attr,
        fabric: *mut *mut fid_fabric,
        context: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { (self.fabric)(attr, fabric, context) }
    }

    /// The text for an error number of libfabric, positive or negative.
    pub fn strerror(&self, error: i64) -> String {
        let error = c_int::try_from(error.unsigned_abs()).unwrap_or(0);
        // SAFETY: for any number the function returns a constant C string.
        unsafe { CStr::from_ptr((self.strerror)(error)) }.to_string_lossy().into_owned()
    }
}

/// The process's actions at fatal signals, restored when this is dropped. Libraries of some providers (PSM) handle
/// these signals once they are loaded. They then end the process by `exit`, seconds later, but it must end at once.
struct Handlers(Vec<(c_int, libc::sigaction)>);

impl Handlers {
    const SIGNALS: [c_int; 8] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGABRT,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
    ];

    fn current() -> Handlers {
        let current = |signal: c_int| {
            // SAFETY: an action of zeros is valid, and the call fills it.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: null changes nothing.
            let told = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
            (told == 0).then_some((signal, action))
        };
        Handlers(Self::SIGNALS.into_iter().filter_map(current).collect())
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for (signal, action) in &self.0 {
            // SAFETY: the action was in effect before.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.version();
        write!(f, "libfabric {major}.{minor}")
    }
}
