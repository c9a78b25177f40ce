//! The driver: what runs on each system, the same program with the same calls. Prints one line of JSON.

use crate::gate::Gate;
use std::ffi::CString;

/// What a driver is told.
#[derive(Clone, Debug)]
pub(crate) struct Orders {
    /// The directory to work in; it exists and is empty.
    pub(crate) root: String,
    /// Processes.
    pub(crate) processes: usize,
    /// All processes in one directory or file, or each in its own.
    pub(crate) shared: bool,
    /// Files of each process.
    pub(crate) files: usize,
    /// Bytes of all processes together.
    pub(crate) bytes: usize,
    /// Bytes of one read or write.
    pub(crate) block: usize,
    /// Blocks in a random order.
    pub(crate) random: bool,
}

impl Orders {
    /// As arguments of `forebay-bench drive`.
    pub(crate) fn arguments(&self, what: &str) -> Vec<String> {
        let mut all = vec!["drive".into(), what.into(), "--root".into(), self.root.clone()];
        let numbers = [
            ("--processes", self.processes),
            ("--shared", self.shared as usize),
            ("--files", self.files),
            ("--bytes", self.bytes),
            ("--block", self.block),
            ("--random", self.random as usize),
        ];
        for (name, value) in numbers {
            all.extend([name.to_owned(), value.to_string()]);
        }
        all
    }

    fn parse(arguments: &[String]) -> Result<Orders, String> {
        let mut orders = Orders {
            root: String::new(),
            processes: 1,
            shared: true,
            files: 0,
            bytes: 0,
            block: 1 << 20,
            random: false,
        };
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
            let number = || value.parse::<usize>().map_err(|_| format!("{name} {value}: not a number"));
            match name.as_str() {
                "--root" => orders.root = value.clone(),
                "--processes" => orders.processes = number()?,
                "--shared" => orders.shared = number()? != 0,
                "--files" => orders.files = number()?,
                "--bytes" => orders.bytes = number()?,
                "--block" => orders.block = number()?,
                "--random" => orders.random = number()? != 0,
                other => return Err(format!("there is no option {other}")),
            }
        }
        if orders.root.is_empty() {
            return Err("--root is needed".into());
        }
        Ok(orders)
    }
}

pub(crate) fn main(arguments: &[String]) -> Result<(), String> {
    let (what, rest) = arguments
        .split_first()
        .ok_or("drive meta, data, calls, names, mapped, transfers, tree, far, raw, times or age?")?;
    if let ("times", [count, command @ ..]) = (what.as_str(), rest) {
        println!("{}", crate::cost::drive_times(count, command)?);
        return Ok(());
    }
    match (what.as_str(), rest) {
        ("raw", [kind, verb, host]) if verb == "serve" => return crate::nodes::drive_raw_serve(kind, host),
        ("raw", [kind, verb, words @ ..]) if verb == "ask" => {
            println!("{}", crate::nodes::drive_raw_ask(kind, words)?);
            return Ok(());
        }
        _ => {}
    }
    let orders = Orders::parse(rest)?;
    let named =
        |rates: Vec<(&str, f64)>| rates.into_iter().map(|(name, rate)| (name.to_owned(), rate)).collect();
    let rates: Vec<(String, f64)> = match what.as_str() {
        "meta" => named(crate::meta::drive(&orders)?),
        "data" => named(crate::data::drive(&orders)?),
        "age" => named(age(&orders)?),
        "calls" => crate::cost::drive(&orders)?,
        "names" => named(crate::mount::drive_names(&orders)?),
        "transfers" => named(crate::mount::drive_transfers(&orders)?),
        "tree" => crate::nodes::drive(&orders)?,
        "far-make" => named(crate::nodes::drive_far_make(&orders)?),
        "far" => named(crate::nodes::drive_far(&orders)?),
        "mapped" => named(crate::mount::drive_mapped(&orders)?),
        other => return Err(format!("there is no drive {other}")),
    };
    let object: serde_json::Map<String, serde_json::Value> =
        rates.into_iter().map(|(name, rate)| (name, rate.into())).collect();
    println!("{}", serde_json::Value::Object(object));
    Ok(())
}

/// Fills a file system and frees it again: memory is touched, trees have split and merged.
fn age(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let path = |i: usize| c_path(&orders.root, &format!("age{i}"));
    let seconds = Gate::run(1, |gate| {
        gate.timed(|| {
            let block = vec![0x5a_u8; 1 << 20];
            let fd = create(&path(0))?;
            for _ in 0..orders.bytes >> 20 {
                write_all(fd, &block)?;
            }
            close(fd);
            for i in 1..orders.files {
                close(create(&path(i))?);
            }
            (0..orders.files).try_for_each(|i| {
                // SAFETY: the string ends in NUL.
                check(unsafe { libc::unlink(path(i).as_ptr()) }, "unlink", &path(i))
            })
        })
    })?;
    Ok(vec![("seconds", seconds[0])])
}

/// A path for a call.
pub(crate) fn c_path(directory: &str, name: &str) -> CString {
    CString::new(format!("{directory}/{name}")).unwrap_or_default()
}

/// Fails with errno's words unless the call succeeded.
pub(crate) fn check(result: i32, call: &str, path: &CString) -> Result<(), String> {
    if result >= 0 {
        return Ok(());
    }
    Err(format!("{call} {}: {}", path.to_string_lossy(), std::io::Error::last_os_error()))
}

/// A new file.
pub(crate) fn create(path: &CString) -> Result<i32, String> {
    // SAFETY: the string ends in NUL.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o644) };
    check(fd, "create", path).map(|()| fd)
}

/// close(2).
pub(crate) fn close(fd: i32) {
    // SAFETY: the descriptor is the driver's own.
    unsafe { libc::close(fd) };
}

/// Writes all of it at the offset of the descriptor.
pub(crate) fn write_all(fd: i32, mut bytes: &[u8]) -> Result<(), String> {
    while !bytes.is_empty() {
        // SAFETY: the bytes are ours and of the length given.
        let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        if n <= 0 {
            return Err(format!("write: {}", std::io::Error::last_os_error()));
        }
        bytes = &bytes[n as usize..];
    }
    Ok(())
}
