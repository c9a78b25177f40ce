//! `forebay emulate`: block devices that are as slow as a medium (docs/emulation.md), and runs with little page cache.

mod limited;
mod probe;

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

use forebay_emulate::{Description, Faults, Options};
use forebay_server::media_profile::MediaProfile;
use forebay_sys::loop_device::is_in_use;
use forebay_types::{Code, Error, Result};
use rustix::fs::{AtFlags, MemfdFlags, CWD};
use serde_json::{json, Value};

use super::status::emulated::{self, time};
use crate::arguments::{EmulateCorrupt, EmulateStat, EmulateUp, EmulateVerb};
use crate::failure;
use crate::table::{self, Facts};

/// Granularity of a device's size.
const GRAIN_BYTES: u64 = 4096;

pub(super) fn emulate(verb: &EmulateVerb) -> Result<ExitCode> {
    match verb {
        EmulateVerb::Up(a) => up(a),
        EmulateVerb::List(a) => list(a.json),
        EmulateVerb::Stat(a) => stat(a),
        EmulateVerb::Probe(a) => probe::probe(a),
        EmulateVerb::Run(a) => limited::run(a),
        EmulateVerb::Down(a) => {
            let device = forebay_emulate::find(a.name.as_deref())?;
            device.down(a.force)?;
            failure::put(format!("device {} has ended\n", device.options.name));
            Ok(ExitCode::SUCCESS)
        }
        EmulateVerb::Corrupt(a) => corrupt(a),
    }
}

fn up(arguments: &EmulateUp) -> Result<ExitCode> {
    let what = "cannot make an emulated device";
    let MediaProfile(Some(profile)) = &arguments.profile else {
        return Err(failure::invalid(what, "no profile is named", "name one: --profile pcram"));
    };
    let name = arguments.name.clone().unwrap_or_else(|| profile.name.clone());
    if !forebay_emulate::is_name(&name) {
        let why = format!("`{name}` is no name: names have 1 to 32 letters, digits, `-`, `_` and `.`");
        return Err(failure::invalid(what, why, "give another --name"));
    }
    let options = Options {
        name,
        profile: profile.to_string(),
        bytes: arguments.size.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(arguments.size),
        write_protect: arguments.write_protect,
        checksum: arguments.checksum,
        verify_writes: arguments.verify_writes,
    };
    if !rustix::process::geteuid().is_root() {
        return Err(Error::new(Code::AccessDenied, what)
            .why("only root may make block devices")
            .cure("emulate a medium for a pool instead: forebay up --media-profile NAME"));
    }
    let description = start(&options)?;
    if arguments.json {
        failure::print_json(&as_json(&description));
    } else {
        failure::put(format!("{}\n", description.device.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts the processes of a device, and waits until it is there.
fn start(options: &Options) -> Result<Description> {
    let what = format!("cannot make device {}", options.name);
    let io = |e: std::io::Error| Error::io(&*what, &e);
    let text = serde_json::to_string(options).map_err(|e| Error::new(Code::Invalid, &*what).why(e))?;
    let log = nameless_log().map_err(io)?;
    let errors = log.try_clone().map_err(io)?;
    let logged = || {
        let mut words = String::new();
        let _ = (&log).rewind().and_then(|()| (&log).read_to_string(&mut words));
        words
    };
    let description = forebay_block::start::<Description>(&what, "forebay-emulate", &text, errors, logged)?;
    let (from, follow) = (forebay_sys::descriptor::path(&log.as_fd()), AtFlags::SYMLINK_FOLLOW);
    // The device is up: it serves without a log too.
    let _ = rustix::fs::linkat(CWD, &from, CWD, description.log(), follow);
    Ok(description)
}

/// The log of a device that is being made. It gets its name when the device is up, so that a command that is killed
/// before leaves none.
fn nameless_log() -> std::io::Result<File> {
    let all = forebay_emulate::directory();
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    let nameless =
        options.clone().custom_flags(libc::O_TMPFILE | libc::O_APPEND).open(all.parent().unwrap_or(&all));
    // Where a file system has no files without a name, the log is what the command can read.
    nameless.or_else(|_| Ok(File::from(rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC)?)))
}

fn options_of(options: &Options) -> Vec<&'static str> {
    let all = [
        (options.write_protect, "write protection"),
        (options.checksum, "checksums"),
        (options.verify_writes, "verified writes"),
    ];
    all.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
}

fn as_json(one: &Description) -> Value {
    let Options { name, profile: _, bytes, write_protect, checksum, verify_writes } = &one.options;
    json!({
        "name": name,
        "device": one.device,
        "profile": one.profile().map(|profile| profile.name),
        "bytes": bytes,
        "write_protect": write_protect,
        "checksum": checksum,
        "verify_writes": verify_writes,
        "in_use": is_in_use(&one.device),
        "log": one.log(),
    })
}

fn list(as_json_too: bool) -> Result<ExitCode> {
    let all = forebay_emulate::all();
    if as_json_too {
        failure::print_json(&Value::Array(all.iter().map(as_json).collect()));
        return Ok(ExitCode::SUCCESS);
    }
    for one in &all {
        let options = &one.options;
        let guards = options_of(options).join(", ");
        let guards = if guards.is_empty() { guards } else { format!(", {guards}") };
        let profile = one.profile().map_or_else(String::new, |profile| profile.name);
        let use_word = if is_in_use(&one.device) { ", in use" } else { "" };
        failure::put(format!(
            "{}  {}  {profile}, {}{guards}{use_word}\n",
            options.name,
            one.device.display(),
            table::bytes(options.bytes)
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// The medium and what was counted, in the form of `status`.
fn counted(one: &Description) -> Result<(Value, Faults)> {
    let (reads, writes, faults) = one.statistics()?;
    let profile = one
        .profile()
        .unwrap_or(forebay_pacing::Profile { name: String::new(), medium: forebay_pacing::PROFILES[0].1 });
    let target = json!({
        "reads": forebay_server::pacing::as_json(&reads),
        "writes": forebay_server::pacing::as_json(&writes),
    });
    Ok((forebay_server::pacing::medium_as_json(&profile, vec![target]), faults))
}

fn stat(arguments: &EmulateStat) -> Result<ExitCode> {
    let one = forebay_emulate::find(arguments.name.as_deref())?;
    let (medium, faults) = counted(&one)?;
    let merges = one.merges();
    if arguments.json {
        let mut object = as_json(&one);
        object["medium"] = medium;
        let [read, write] = one.ways()?;
        object["way_ns"] = json!({ "read": read, "write": write });
        object["merged_reads"] = json!(merges.map(|(reads, _)| reads));
        object["merged_writes"] = json!(merges.map(|(_, writes)| writes));
        object["faults"] = json!(faults);
        failure::print_json(&object);
        return Ok(ExitCode::SUCCESS);
    }
    let mut facts = Facts::default();
    facts.add("device", format!("{}, {}", one.device.display(), table::bytes(one.options.bytes)));
    let mut name = "emulates";
    for line in emulated::lines(&medium) {
        facts.add(std::mem::take(&mut name), line);
    }
    if let Some((reads, writes)) = merges {
        facts.add("merged", format!("{reads} reads, {writes} writes, by the kernel's block layer"));
    }
    facts.add("flushes", faults.syncs.to_string());
    facts.add("discarded", table::bytes(faults.discarded_bytes));
    let errors = format!(
        "{} checksums, {} verified writes, {} requests refused",
        faults.checksum_errors, faults.verify_errors, faults.refused
    );
    facts.add("errors", errors);
    let mut text = facts.text();
    for direction in ["reads", "writes"] {
        text.push_str(&histogram(direction, &medium["targets"][0][direction]));
    }
    failure::put(text);
    Ok(ExitCode::SUCCESS)
}

/// The latencies of one direction, a line for each power of two.
fn histogram(direction: &str, counted: &Value) -> String {
    let counts: Vec<u64> = counted["histogram_log2_ns"]
        .as_array()
        .map(|list| list.iter().map(|count| count.as_u64().unwrap_or(0)).collect())
        .unwrap_or_default();
    let (all, most) = (counts.iter().sum::<u64>(), counts.iter().copied().max().unwrap_or(0));
    if all == 0 {
        return String::new();
    }
    let mut text = format!("latency of {direction}\n");
    let first = counts.iter().position(|count| *count > 0).unwrap_or(0);
    let last = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
    for (bucket, count) in counts.iter().enumerate().take(last + 1).skip(first) {
        let bar = "#".repeat((count * 40).div_ceil(most) as usize);
        text.push_str(&format!("  < {:>9}  {count:>9}  {bar}\n", time(2 << bucket)));
    }
    text
}

fn corrupt(arguments: &EmulateCorrupt) -> Result<ExitCode> {
    let one = forebay_emulate::find(arguments.name.as_deref())?;
    if let Some(byte) = arguments.flip {
        one.flip(byte)?;
    }
    if let Some(byte) = arguments.stray {
        one.order_stray_store(byte)?;
    }
    if arguments.spoil_write {
        one.spoil_a_write()?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_has_a_line_for_each_power_of_two_between_the_extremes() {
        let text = histogram("reads", &json!({ "histogram_log2_ns": [0, 4, 0, 8] }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[1].contains("4 ns") && lines[1].ends_with(&"#".repeat(20)), "{text}");
        assert!(lines[3].contains("16 ns") && lines[3].ends_with(&"#".repeat(40)), "{text}");
        assert_eq!(histogram("reads", &json!({ "histogram_log2_ns": [0, 0] })), "");
    }
}
