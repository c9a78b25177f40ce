//! `forebay volume attach` and `detach`: block devices of volumes.
//!
//! A volume of one piece on this node is a loop device on its memory, which the kernel copies to and from: no process
//! serves it, and it has the volume open. There is no record of it: the kernel knows which memory a device has.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use forebay_client::Pool;
use forebay_types::{Code, Error, Result};
use serde_json::json;

use super::loop_device::{locked_control, LoopDevice};
use super::shown::{each, failed};
use crate::arguments::{VolumeAttach, VolumeNames};
use crate::verbs::ls::put_name;
use crate::{failure, table};

const DEVICES: &[u8] = b"/dev/";

/// A failure of the kernel's part.
fn refused(verb: &str, name: &OsStr, e: &io::Error) -> Error {
    let error = Error::io(format!("cannot {verb} {}", table::printable(name.as_bytes())), e);
    match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::new(Code::NotSupported, error.what)
            .why("there are no loop devices here")
            .cure("load the kernel's module (modprobe loop); a container needs /dev/loop-control and /dev/loop*"),
        Some(libc::EACCES | libc::EPERM) => Error::new(Code::AccessDenied, error.what)
            .why("loop devices are for root")
            .cure("run this as root, or use `forebay volume copy`"),
        Some(libc::EBUSY) => Error::new(Code::Busy, error.what)
            .why("it is mounted, or a program uses it exclusively")
            .cure("unmount it first"),
        _ => error,
    }
}

pub(super) fn attach(pool: &Pool, arguments: &VolumeAttach) -> Result<ExitCode> {
    let name = arguments.name.as_os_str();
    let cannot = |e: io::Error| refused("attach volume", name, &e);
    let memory = pool.volume_memory(name.as_bytes(), !arguments.read_only).map_err(|code| match code {
        Code::NotSupported => {
            Error::new(code, format!("cannot attach volume {}", table::printable(name.as_bytes())))
                .why("it has several pieces, or is on another node; a block device is one piece of this node")
                .cure("make another one of the full size, and `forebay volume copy` to it")
        }
        code => failed(pool, code, "attach", name, 1),
    })?;
    // Two commands do not attach one volume.
    let control = locked_control().map_err(cannot)?;
    if let Some(device) = LoopDevice::of(&memory).map_err(cannot)? {
        let what = format!("cannot attach volume {}", table::printable(name.as_bytes()));
        return Err(Error::new(Code::Exists, what).why(format!("it is {} already", device.path.display())));
    }
    let device = LoopDevice::attach(&memory, name.as_bytes(), arguments.read_only).map_err(cannot)?;
    drop(control);
    match arguments.json {
        true => {
            let mut object = json!({ "device": device.path });
            put_name(&mut object, "name", name.as_bytes());
            failure::print_json(&object);
        }
        false => failure::put(format!("{}\n", device.path.display())),
    }
    Ok(ExitCode::SUCCESS)
}

/// Devices of this node can be detached after their pool is gone.
pub(super) fn needs_no_pool(arguments: &VolumeNames) -> bool {
    arguments.names.iter().all(|name| name.as_bytes().starts_with(DEVICES))
}

pub(super) fn detach(pool: Option<&Pool>, arguments: &VolumeNames) -> Result<ExitCode> {
    each(&arguments.names, arguments.json, |name| {
        let (device, is_gone) = detach_one(pool, name)?;
        let shown = match name == OsStr::new(&device) {
            true => device.clone(),
            false => format!("volume {}, {device},", table::printable(name.as_bytes())),
        };
        let text = match is_gone {
            true => format!("{shown} is detached\n"),
            false => format!("{shown} is detached when the program closes it that has it open\n"),
        };
        let mut object = json!({ "device": device, "detached": is_gone });
        put_name(&mut object, "name", name.as_bytes());
        Ok((object, text))
    })
}

/// The device, and whether it is gone.
fn detach_one(pool: Option<&Pool>, name: &OsStr) -> Result<(String, bool)> {
    let what = || format!("cannot detach {}", table::printable(name.as_bytes()));
    let cannot = |e: io::Error| refused("detach", name, &e);
    let path = match pool.filter(|_| !name.as_bytes().starts_with(DEVICES)) {
        None => Path::new(name).to_owned(),
        Some(pool) => {
            let memory = pool.volume_memory(name.as_bytes(), false).map_err(|code| match code {
                Code::NotSupported => Error::new(code, what()).why("it is not attached"),
                code => failed(pool, code, "detach", name, 1),
            })?;
            let device = LoopDevice::of(&memory).map_err(cannot)?;
            device.ok_or_else(|| Error::new(Code::NotFound, what()).why("it is not attached"))?.path
        }
    };
    let device = LoopDevice::exclusive(&path).map_err(cannot)?;
    if !device.is_marked() {
        return Err(Error::new(Code::Invalid, what()).why("it is no device of a volume"));
    }
    Ok((path.display().to_string(), device.clear().map_err(cannot)?))
}
