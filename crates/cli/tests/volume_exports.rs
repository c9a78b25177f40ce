//! Volumes over NBD (`forebay volume export`, and nbdkit with our plugin). Needs nbdkit, its header when Forebay was
//! built, and nbdinfo and nbdcopy, and says so where it skips.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::devices::{done, run};
use common::{eventually, kill, start, Guarded, Place, Ran};
use forebay_client::{Pool, Role};
use serde_json::Value;

const MIB: usize = 1 << 20;

fn plugin() -> PathBuf {
    common::forebay().with_file_name("nbdkit-forebay-plugin.so")
}

fn can_export() -> bool {
    for program in ["nbdkit", "nbdinfo", "nbdcopy"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: needs {program}");
            return false;
        }
    }
    if !plugin().is_file() {
        eprintln!(
            "skipped: the plugin is not built: make -C nbd OUT={}",
            plugin().parent().unwrap().display()
        );
        return false;
    }
    true
}

/// A volume of two pieces, so that no call is one copy. Returns the pool's directory.
fn pool(place: &Place) -> PathBuf {
    let up = place.json(["up", "--capacity", "160MiB", "--json"]);
    place.ok(["volume", "create", "v", "--size", "16MiB"]);
    place.ok(["volume", "resize", "v", "--size", "32MiB"]);
    PathBuf::from(up["pool"].as_str().unwrap())
}

/// Waits until an export answers. Its URI is returned.
fn answers(socket: &Path) -> String {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    eventually("the export answers", || run("nbdinfo", &["--size", &uri]).0);
    uri
}

fn export(place: &Place, options: &[&str]) -> (Guarded, String) {
    export_of(place, "v", options)
}

fn export_of(place: &Place, volume: &str, options: &[&str]) -> (Guarded, String) {
    let socket = place.join("socket");
    let words = ["volume", "export", volume, "--socket", socket.to_str().unwrap()];
    let mut command = place.command(words.iter().chain(options));
    command.stdout(Stdio::null());
    let child = start(command);
    (child, answers(&socket))
}

fn data() -> Vec<u8> {
    (0..32 * MIB as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn export_has_the_bytes_of_the_volume_over_several_connections() {
    if !can_export() {
        return;
    }
    let place = Place::new();
    let dir = pool(&place);
    let (mut child, uri) = export(&place, &[]);
    let info: Value = serde_json::from_str(&done("nbdinfo", &["--json", &uri])).unwrap();
    let info = &info["exports"][0];
    assert_eq!(info["export-size"], 32 * MIB, "{info}");
    let can = |what: &str| info[what].as_bool().unwrap_or_else(|| panic!("{what}: {info}"));
    assert!(can("can_flush") && can("can_multi_conn") && can("can_zero") && can("can_fua"), "{info}");
    assert!(!can("can_trim") && !can("is_read_only"), "{info}");
    let (file, back) = (place.write("data", data()), place.join("back"));
    let (file, back) = (file.to_str().unwrap(), back.to_str().unwrap());
    done("nbdcopy", &["--connections=4", "--flush", file, &uri]);
    let volume = Pool::attach_as(&dir, Role::Tool).unwrap().volume_open(b"v", true).unwrap();
    let mut found = vec![0; 32 * MIB];
    volume.get_bytes(0, &mut found).unwrap();
    assert!(found == data(), "the volume has other bytes than were copied to it");
    volume.put_bytes(20 * MIB as u64, b"put").unwrap();
    done("nbdcopy", &["--connections=4", &uri, back]);
    let read = std::fs::read(back).unwrap();
    assert_eq!(&read[20 * MIB..][..3], b"put");
    assert!(read[..20 * MIB] == found[..20 * MIB] && read[20 * MIB + 3..] == found[20 * MIB + 3..]);
    // A sparse source: zeros are requests for zeros.
    let sparse = place.join("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(32 * MIB as u64).unwrap();
    done("nbdcopy", &[sparse.to_str().unwrap(), &uri]);
    volume.get_bytes(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "zeros are not written");
    drop(volume);
    // No client is connected, and it is in use all the same.
    place.run(["volume", "delete", "v"]).assert_refused(1, &["a program has it open"]);
    kill(child.pid(), libc::SIGTERM);
    assert!(child.wait().success());
    place.ok(["volume", "delete", "v"]);
}

#[test]
fn export_of_joined_volumes_is_striped_over_them() {
    if !can_export() {
        return;
    }
    let place = Place::new();
    let dir = pool(&place);
    place.ok(["volume", "create", "w", "--size", "17MiB"]);
    let (mut child, uri) = export_of(&place, "w+1:v", &[]);
    assert_eq!(done("nbdinfo", &["--size", &uri]).trim(), (34 * MIB).to_string());
    let data: Vec<u8> = [data(), vec![5; 2 * MIB]].concat();
    let file = place.write("data", &data);
    done("nbdcopy", &["--flush", file.to_str().unwrap(), &uri]);
    let pool = Pool::attach_as(&dir, Role::Tool).unwrap();
    for (index, name) in ["w", "v"].into_iter().enumerate() {
        let mut found = vec![0; 17 * MIB];
        pool.volume_open(name.as_bytes(), false).unwrap().get_bytes(0, &mut found).unwrap();
        let stripes: Vec<u8> = data.chunks(MIB).skip(index).step_by(2).flatten().copied().collect();
        assert!(found == stripes, "stripes of {name}");
    }
    kill(child.pid(), libc::SIGTERM);
    assert!(child.wait().success());
    let socket = place.join("socket");
    for (volume, why) in
        [("v+none", "specifier 2: there is no volume `none`"), ("v+1.1:w", "a node has one link")]
    {
        let words = ["volume", "export", volume, "--socket", socket.to_str().unwrap()];
        place.run(words).assert_refused(1, &[why]);
    }
}

#[test]
fn export_of_a_thin_volume_frees_what_is_trimmed() {
    if !can_export() {
        return;
    }
    let place = Place::new();
    let dir = pool(&place);
    place.ok(["volume", "delete", "v"]);
    place.ok(["volume", "create", "v", "--size", "32MiB", "--thin"]);
    let (mut child, uri) = export(&place, &[]);
    let info: Value = serde_json::from_str(&done("nbdinfo", &["--json", &uri])).unwrap();
    assert_eq!(info["exports"][0]["can_trim"], true, "{info}");
    let file = place.write("data", data());
    done("nbdcopy", &["--flush", file.to_str().unwrap(), &uri]);
    let volume = Pool::attach_as(&dir, Role::Tool).unwrap().volume_open(b"v", true).unwrap();
    assert_eq!(volume.allocated(), Ok(32 * MIB as u64));
    let sparse = place.join("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(32 * MIB as u64).unwrap();
    done("nbdcopy", &[sparse.to_str().unwrap(), &uri]);
    assert_eq!(volume.allocated(), Ok(0));
    kill(child.pid(), libc::SIGTERM);
    assert!(child.wait().success());
}

#[test]
fn export_that_is_read_only_or_killed_or_of_a_dead_pool() {
    if !can_export() {
        return;
    }
    let place = Place::new();
    let dir = pool(&place);
    let (mut child, uri) = export(&place, &["--read-only"]);
    let info = done("nbdinfo", &["--json", &uri]);
    assert!(info.contains("\"is_read_only\": true"), "{info}");
    let file = place.write("data", data());
    assert!(!run("nbdcopy", &[file.to_str().unwrap(), &uri]).0);
    // One that was killed leaves its socket, which does not keep the next from it.
    kill(child.pid(), libc::SIGKILL);
    child.wait();
    let (mut child, uri) = export(&place, &[]);
    done("nbdcopy", &[file.to_str().unwrap(), &uri]);
    kill(common::lock_holder(&dir).unwrap(), libc::SIGKILL);
    let back = place.join("back");
    eventually("an I/O error", || !run("nbdcopy", &[&uri, back.to_str().unwrap()]).0);
    kill(child.pid(), libc::SIGTERM);
    assert!(child.wait().code().is_some(), "it does not end");
}

#[test]
fn exports_that_cannot_be_are_refused_in_words() {
    let place = Place::new();
    pool(&place);
    place.run(["volume", "export", "v"]).assert_refused(2, &["--socket"]);
    if !can_export() {
        return;
    }
    let socket = place.join("socket");
    let socket = socket.to_str().unwrap();
    place.run(["volume", "export", "none", "--socket", socket]).assert_refused(1, &["no volume `none`"]);
    let mut without = place.command(["volume", "export", "v", "--socket", socket]);
    let ran = Ran::of(without.env("PATH", "/nowhere").output().unwrap());
    ran.assert_refused(1, &["there is no nbdkit"]);
    assert_eq!(ran.out, "", "a URI that nothing serves");
    let nbdkit = |words: &[&str]| {
        let mut command = Command::new("nbdkit");
        Ran::of(command.args(["--foreground", "--unix", socket]).arg(plugin()).args(words).output().unwrap())
    };
    let pool = format!("pool={}", place.join("nowhere").display());
    for (words, why) in [
        (&[][..], "no volume is named"),
        (&["v", "size=1"][..], "there is no parameter 'size'"),
        (&["v", &pool][..], "cannot attach"),
    ] {
        let ran = nbdkit(words);
        assert!(ran.code != Some(0) && ran.err.contains(why), "{words:?}: {ran:?}");
    }
}

#[test]
fn user_without_privilege_exports_a_volume_by_nbdkits_own_command() {
    if !can_export() || !common::can_be_nobody() {
        return;
    }
    let place = Place::new();
    common::give_to_nobody(&place.path);
    let run_as = |words: &[&str]| Ran::of(common::as_nobody(&place, words).output().unwrap());
    assert_eq!(run_as(&["up", "--capacity", "128MiB"]).code, Some(0));
    if run_as(&["volume", "create", "v", "--size", "8MiB"]).code != Some(0) {
        eprintln!("skipped: this user can have no volumes here");
        return;
    }
    let dir = place.pools().pop().unwrap();
    // In the background, as nbdkit does without options.
    let (socket, pid) = (place.join("socket"), place.join("pid"));
    let id = common::NOBODY.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--", "nbdkit", "--unix"]).arg(&socket);
    command.arg("--pidfile").arg(&pid).arg(plugin()).arg("v").arg(format!("pool={}", dir.display()));
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    eventually("it is in the background", || {
        std::fs::read_to_string(&pid).is_ok_and(|text| !text.is_empty())
    });
    let number = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let uri = answers(&socket);
    let file = place.write("data", vec![6; 8 * MIB]);
    let copied = run("nbdcopy", &[file.to_str().unwrap(), &uri]);
    kill(number, libc::SIGTERM);
    eventually("it has ended", || !common::is_alive(number));
    assert!(copied.0, "{}", copied.1);
    let back = place.join("back");
    assert_eq!(run_as(&["volume", "copy", "v", back.to_str().unwrap()]).code, Some(0));
    assert!(std::fs::read(&back).unwrap() == vec![6; 8 * MIB]);
    assert_eq!(run_as(&["down"]).code, Some(0));
}

#[test]
fn build_without_nbdkits_header_has_no_plugin_and_says_so() {
    let make = Command::new("make")
        .args(["--dry-run", "-C", concat!(env!("CARGO_MANIFEST_DIR"), "/../../nbd"), "CC=cc -nostdinc"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&make.stdout);
    assert!(make.status.success(), "{make:?}");
    assert!(said.contains("there is no nbdkit-plugin.h") && !said.contains("-shared"), "{said}");
}
