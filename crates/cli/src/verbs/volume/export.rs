//! `forebay volume export`: a volume over NBD, by nbdkit with our plugin (`nbd/plugin.c`). Any user may do that.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use forebay_client::Pool;
use forebay_types::{Code, Error, Result};

use crate::arguments::VolumeExport;
use crate::{failure, table};

const NBDKIT: &str = "nbdkit";
const PLUGIN: &str = "nbdkit-forebay-plugin.so";

/// The plugin, beside this program or where `make install` puts it.
fn plugin(what: &str) -> Result<PathBuf> {
    let me = std::env::current_exe().map_err(|e| Error::io(what, &e))?;
    let dir = me.parent().unwrap_or(Path::new("/"));
    let places = [dir.to_owned(), dir.join("../lib/nbdkit/plugins")];
    places.iter().map(|place| place.join(PLUGIN)).find(|path| path.is_file()).ok_or_else(|| {
        Error::new(Code::NotFound, what)
            .why(format!("Forebay was built without {PLUGIN}"))
            .cure("install nbdkit's header (Debian: nbdkit-plugin-dev), and build Forebay again")
    })
}

/// Whether there is a program of this name.
fn is_program(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).is_file()))
}

/// Removes the socket of an export that was killed.
fn remove_stale(socket: &Path) {
    let is_socket = std::fs::symlink_metadata(socket).is_ok_and(|found| found.file_type().is_socket());
    let is_dead =
        || UnixStream::connect(socket).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused);
    if is_socket && is_dead() {
        let _ = std::fs::remove_file(socket);
    }
}

/// A path in a URI.
fn encoded(path: &Path) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let bytes = path.as_os_str().as_bytes().iter();
    bytes.map(|&b| if is_plain(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}

/// Becomes nbdkit.
pub(super) fn export(pool: &'static Pool, dir: &Path, arguments: &VolumeExport) -> Result<ExitCode> {
    let name = arguments.name.as_bytes();
    let what = format!("cannot export volume {}", table::printable(name));
    let plugin = plugin(&what)?;
    let no_nbdkit = |error: Error| error.why("there is no nbdkit").cure("install it (Debian: nbdkit)");
    // The URI must not be printed where nothing serves it.
    if !is_program(NBDKIT) {
        return Err(no_nbdkit(Error::new(Code::NotFound, what)));
    }
    // The words of its errors are better than those of nbdkit.
    drop(pool.volume_open(name, false)?);
    let argument = |key: &str, value: &[u8]| {
        let mut text = std::ffi::OsString::from(format!("{key}="));
        text.push(std::ffi::OsStr::from_bytes(value));
        text
    };
    let mut command = Command::new(NBDKIT);
    command.arg("--foreground").args(arguments.read_only.then_some("--readonly"));
    let uri = match (&arguments.socket, arguments.port) {
        (Some(socket), _) => {
            let socket = std::path::absolute(socket).map_err(|e| Error::io(&*what, &e))?;
            remove_stale(&socket);
            command.arg("--unix").arg(&socket);
            format!("nbd+unix:///?socket={}", encoded(&socket))
        }
        (None, port) => {
            let port = port.unwrap_or_default().to_string();
            command.args(["--ipaddr", &arguments.address, "--port", &port]);
            match arguments.address.contains(':') {
                true => format!("nbd://[{}]:{port}", arguments.address),
                false => format!("nbd://{}:{port}", arguments.address),
            }
        }
    };
    command.arg(plugin).arg(argument("pool", dir.as_os_str().as_bytes())).arg(argument("volume", name));
    command.env_remove("LD_PRELOAD");
    failure::put(format!("{uri}\n"));
    let e = command.exec();
    let error = Error::io(what, &e);
    Err(match e.kind() {
        std::io::ErrorKind::NotFound => no_nbdkit(error),
        _ => error,
    })
}
