//! `forebay volume`: create, list, show, resize, delete and format volumes (docs/decisions/0048). Below: copies of them
//! ([`copying`]), block devices ([`block`]) and exports ([`export`]).

mod block;
mod copying;
mod devices;
mod export;
mod file;
mod place;
mod shown;
mod store;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_client::{Pool, VolumePlaces};
use forebay_types::limits::{TARGETS_MAX, VOLUME_GRAIN_BYTES, VOLUME_STRIPE_BYTES_MAX};
use forebay_types::{node_of, Code, Error, Result, Volume};
use serde_json::{json, Value};

use self::devices::Devices;
use self::shown::{bar, each, failed, not_made};
use super::ls::put_name;
use super::nodes::Nodes;
use crate::arguments::{VolumeCreate, VolumeFormat, VolumeNames, VolumeResize, VolumeVerb};
use crate::table::{self, Facts};
use crate::{failure, pool};

/// Bytes that `format` sets in one step.
const FORMAT_BYTES: usize = 4 << 20;

pub(super) fn volume(named: Option<PathBuf>, verb: &VolumeVerb) -> Result<ExitCode> {
    if let VolumeVerb::Detach(a) = verb {
        if block::needs_no_pool(a) {
            return block::detach(None, a);
        }
    }
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    match verb {
        VolumeVerb::Create(a) => create(pool, &Nodes::of(dir), a),
        VolumeVerb::List(a) => list(pool, &dir, a.json),
        VolumeVerb::Show(a) => show(pool, &dir, a),
        VolumeVerb::Resize(a) => resize(pool, a),
        VolumeVerb::Delete(a) => delete(pool, a),
        VolumeVerb::Format(a) => format(pool, a),
        VolumeVerb::Copy(a) => copying::copy(pool, &dir, a),
        VolumeVerb::Flush(a) => copying::flush(pool, &dir, a),
        VolumeVerb::Attach(a) => block::attach(pool, &dir, a),
        VolumeVerb::Detach(a) => block::detach(Some((pool, &dir)), a),
        VolumeVerb::Export(a) => export::export(pool, &dir, a),
        VolumeVerb::Load(a) => copying::load(pool, &dir, a),
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(VOLUME_GRAIN_BYTES).unwrap_or(bytes)
}

fn create(pool: &'static Pool, nodes: &Nodes, arguments: &VolumeCreate) -> Result<ExitCode> {
    let (name, bytes) = (arguments.name.as_os_str(), rounded(arguments.size));
    if arguments.on.len() > TARGETS_MAX {
        return Err(Error::new(Code::Invalid, format!("cannot create volume {}", name.display()))
            .why(format!("it would have {} pieces, and {TARGETS_MAX} are possible", arguments.on.len())));
    }
    let stripe = arguments.stripe_size;
    if !(1..=VOLUME_STRIPE_BYTES_MAX).contains(&stripe) || rounded(stripe) != stripe {
        let most = table::bytes(VOLUME_STRIPE_BYTES_MAX);
        return Err(Error::new(Code::Invalid, format!("cannot create volume {}", name.display()))
            .why(format!("a stripe is one or more pages of 4 KiB, up to {most}"))
            .cure("for example: --stripe-size 64KiB"));
    }
    let targets = arguments.on.iter().map(|word| nodes.target(word)).collect::<Result<_>>()?;
    let places = VolumePlaces { targets, stripe_bytes: arguments.stripe_size, is_thin: arguments.thin };
    let bar = bar("reserving", bytes, !arguments.no_progress && !arguments.json);
    let made = pool.volume_create(name.as_bytes(), arguments.mode, bytes, &places, &mut |done| {
        bar.set_position(done);
        true
    });
    bar.finish_and_clear();
    let volume = made.map_err(|failure| not_made(pool, failure, "create", name, bytes))?;
    said(name, &volume, "has", arguments.json)
}

fn resize(pool: &'static Pool, arguments: &VolumeResize) -> Result<ExitCode> {
    let (name, bytes) = (arguments.name.as_os_str(), rounded(arguments.size));
    let bar = bar("reserving", bytes, !arguments.no_progress && !arguments.json);
    let resized = pool.volume_resize(name.as_bytes(), bytes, &mut |done| {
        bar.set_position(done);
        true
    });
    bar.finish_and_clear();
    let volume = resized.map_err(|failure| not_made(pool, failure, "resize", name, bytes))?;
    said(name, &volume, "has now", arguments.json)
}

/// Prints the result of a change.
fn said(name: &OsStr, volume: &Volume, verb: &str, json: bool) -> Result<ExitCode> {
    match json {
        true => failure::print_json(&value(name.as_bytes(), volume)),
        false => failure::put(format!(
            "volume {} {verb} {}\n",
            table::printable(name.as_bytes()),
            table::bytes(volume.bytes())
        )),
    }
    Ok(ExitCode::SUCCESS)
}

/// A volume as JSON.
fn value(name: &[u8], volume: &Volume) -> Value {
    let segments: Vec<Value> = volume
        .usable()
        .iter()
        .map(|segment| {
            let pieces: Vec<Value> = segment
                .targets
                .as_slice()
                .iter()
                .enumerate()
                .map(|(i, target)| {
                    let bytes = segment.piece_bytes(i as u16);
                    json!({ "node": node_of(*target).0, "target": target & 0xffff, "bytes": bytes })
                })
                .collect();
            json!({ "bytes": segment.bytes, "stripe_bytes": segment.stripe_bytes, "pieces": pieces })
        })
        .collect();
    let mut object = json!({
        "number": volume.ino.0,
        "thin": volume.is_thin(),
        "bytes": volume.bytes(),
        "uid": volume.uid,
        "gid": volume.gid,
        "mode": format!("{:04o}", volume.mode),
        "created": volume.created_seconds,
        "growing": volume.maker != 0,
        "segments": segments,
    });
    put_name(&mut object, "name", name);
    object
}

fn list(pool: &'static Pool, dir: &Path, json: bool) -> Result<ExitCode> {
    let all =
        pool.volumes().map_err(|code| Error::new(code, "cannot list volumes").why(pool::words(code)))?;
    let devices = Devices::look(dir)?;
    if json {
        let one = |(name, volume): &(Vec<u8>, Volume)| {
            let mut object = value(name, volume);
            object["device"] = json!(devices.path_with(pool, volume));
            object["allocated_bytes"] = json!(allocated(pool, name, volume));
            object
        };
        failure::print_json(&Value::Array(all.iter().map(one).collect()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = String::new();
    for (name, volume) in &all {
        // The mode of a regular file, without its type.
        let mode = table::mode(0o100_000 | volume.mode);
        text.push_str(&format!(
            "{} {:<8} {:<8} {:>10}  {}{}\n",
            mode.trim_start_matches('-'),
            table::user(volume.uid),
            table::group(volume.gid),
            table::bytes(volume.bytes()),
            table::printable(name),
            allocated(pool, name, volume)
                .map_or_else(String::new, |bytes| format!("  (thin, {} allocated)", table::bytes(bytes)))
                + &devices
                    .path_with(pool, volume)
                    .map_or_else(String::new, |path| format!("  {}", path.display()))
        ));
    }
    failure::put(text);
    Ok(ExitCode::SUCCESS)
}

/// The bytes that a thin volume takes; none for another, and for a user who may not read it.
fn allocated(pool: &'static Pool, name: &[u8], volume: &Volume) -> Option<u64> {
    if !volume.is_thin() {
        return None;
    }
    pool.volume_open(name, false).ok()?.allocated().ok()
}

fn show(pool: &'static Pool, dir: &Path, arguments: &VolumeNames) -> Result<ExitCode> {
    let devices = Devices::look(dir)?;
    each(&arguments.names, arguments.json, |name| {
        let volume = pool.volume(name.as_bytes()).map_err(|code| failed(pool, code, "show", name, 1))?;
        let mut facts = Facts::default();
        facts.add("volume", table::printable(name.as_bytes()));
        facts.add("size", table::bytes(volume.bytes()));
        // Who may not read it does not see its file.
        let opened = pool.volume_open(name.as_bytes(), false);
        let file = opened.ok().and_then(|opened| opened.file_size().ok().flatten());
        if let Some(allocated) = allocated(pool, name.as_bytes(), &volume) {
            facts.add("allocated", format!("{} (thin)", table::bytes(allocated)));
        }
        facts.add("file", file.map_or_else(|| "none".into(), table::bytes));
        facts.add("owner", format!("{}:{}", table::user(volume.uid), table::group(volume.gid)));
        facts.add("mode", format!("{:04o}", volume.mode));
        facts.add("created", table::local_time(volume.created_seconds as i64));
        for (i, segment) in volume.usable().iter().enumerate() {
            let places: Vec<String> = segment
                .targets
                .as_slice()
                .iter()
                .map(|target| format!("{}:{}", node_of(*target).0, target & 0xffff))
                .collect();
            let places = places.join(", ");
            facts.add(&format!("segment {i}"), format!("{} on {places}", table::bytes(segment.bytes)));
        }
        let device = devices.path_with(pool, &volume);
        if let Some(device) = &device {
            facts.add("device", device.display().to_string());
        }
        let mut object = value(name.as_bytes(), &volume);
        object["device"] = json!(device);
        object["file_bytes"] = json!(file);
        object["allocated_bytes"] = json!(allocated(pool, name.as_bytes(), &volume));
        Ok((object, facts.text()))
    })
}

fn delete(pool: &'static Pool, arguments: &VolumeNames) -> Result<ExitCode> {
    each(&arguments.names, arguments.json, |name| {
        pool.volume_delete(name.as_bytes()).map_err(|code| failed(pool, code, "delete", name, 1))?;
        let mut object = json!({ "deleted": true });
        put_name(&mut object, "name", name.as_bytes());
        Ok((object, format!("volume {} is deleted\n", table::printable(name.as_bytes()))))
    })
}

fn format(pool: &'static Pool, arguments: &VolumeFormat) -> Result<ExitCode> {
    let zeros = vec![0u8; FORMAT_BYTES];
    each(&arguments.names, arguments.json, |name| {
        let volume = pool.volume_open(name.as_bytes(), true)?;
        let bytes = volume.bytes();
        let bar = bar("formatting", bytes, !arguments.no_progress && !arguments.json);
        let mut at = 0;
        // A thin volume gives its space back at once.
        if !arguments.zero {
            match volume.discard(0, bytes) {
                Ok(()) => at = bytes,
                Err(Code::NotSupported) => {}
                Err(code) => return Err(failed(pool, code, "format", name, bytes)),
            }
        }
        while at < bytes {
            let n = (FORMAT_BYTES as u64).min(bytes - at);
            // SAFETY: the zeros are readable, and at least `n`.
            let put = unsafe { volume.put(at, zeros.as_ptr(), n as usize) };
            put.map_err(|code| failed(pool, code, "format", name, bytes))?;
            at += n;
            bar.set_position(at);
        }
        bar.finish_and_clear();
        let done = volume.reset_file().and_then(|()| volume.flush());
        done.map_err(|code| failed(pool, code, "format", name, 1))?;
        let mut object = json!({ "bytes": bytes });
        put_name(&mut object, "name", name.as_bytes());
        let text =
            format!("volume {}: {} are zero\n", table::printable(name.as_bytes()), table::bytes(bytes));
        Ok((object, text))
    })
}
