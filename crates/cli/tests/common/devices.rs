//! Block devices of volumes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{eventually, Place, Ran};

/// A device of a volume, which is detached at the end even of a test that failed.
pub struct Device<'a> {
    place: &'a Place,
    pub path: PathBuf,
    /// The kernel's number of this use of the device: another test may get a device of the same name.
    sequence: String,
}

impl Device<'_> {
    pub fn attach<'a>(place: &'a Place, volume: &str, options: &[&str]) -> Device<'a> {
        let attached = place.json(["volume", "attach", volume, "--json"].iter().chain(options));
        let path = PathBuf::from(attached["device"].as_str().unwrap());
        Device { place, sequence: attribute(&path, "diskseq"), path }
    }

    pub fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// A detached device goes at its last close: programs that look for a free loop device open each for a moment.
    pub fn assert_detached(&self) {
        eventually("it is detached", || !self.is_attached());
    }

    pub fn is_attached(&self) -> bool {
        let is_any = !attribute(&self.path, "loop/backing_file").is_empty();
        is_any && attribute(&self.path, "diskseq") == self.sequence
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        if self.is_attached() {
            let _ = self.place.run(["volume", "detach", self.name()]);
        }
    }
}

/// What the kernel says about a device; empty if it says nothing.
pub fn attribute(device: &Path, name: &str) -> String {
    let directory = Path::new("/sys/block").join(device.file_name().unwrap());
    std::fs::read_to_string(directory.join(name)).unwrap_or_default()
}

/// Runs a program: whether it succeeded, and what it said.
pub fn run(program: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// Runs a program that has to succeed.
pub fn done(program: &str, arguments: &[&str]) -> String {
    let (succeeded, text) = run(program, arguments);
    assert!(succeeded, "{program} {arguments:?}: {text}");
    text
}

/// Gives the calling thread, and what it starts from now on, mounts of its own. Otherwise a process that another test
/// gives mounts of its own has a copy of what this one mounts, and keeps the device in use after it is unmounted here.
pub fn have_own_mounts() {
    thread_local! {
        static HAS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    if HAS.replace(true) {
        return;
    }
    // SAFETY: plain system calls; the strings are constants.
    unsafe {
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            return; // the mount that follows says what is missing
        }
        let flags = libc::MS_REC | libc::MS_PRIVATE;
        libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null());
    }
    // And keeps no copy of what other tests have mounted.
    let temporary = std::env::temp_dir();
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    for at in mounts.lines().rev().filter_map(|line| line.split(' ').nth(4)) {
        if Path::new(at).starts_with(&temporary) && Path::new(at) != temporary {
            let at = std::ffi::CString::new(at).unwrap();
            // SAFETY: the string is NUL-terminated and lives over the call.
            unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// A mount, unmounted with the test.
pub struct Mounted(pub PathBuf);

impl Mounted {
    pub fn new(kind: &str, device: &str, at: &Path) -> Mounted {
        std::fs::create_dir_all(at).unwrap();
        have_own_mounts();
        done("mount", &["-t", kind, device, at.to_str().unwrap()]);
        Mounted(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that another thread has just started may have a file of it open until it runs its program.
        for _ in 0..100 {
            if Command::new("umount").arg(&self.0).status().is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// The processes that serve a device of a volume of a pool: keeper and server.
pub fn processes(pool: &Path) -> Vec<i32> {
    let serves = |pid: &i32| {
        let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return false };
        let mut words = line.split(|byte| *byte == 0);
        let program = words.next().unwrap_or_default();
        let options = serde_json::from_slice::<serde_json::Value>(words.next().unwrap_or_default());
        let place = options.ok().and_then(|options| {
            let bytes = options["pool"].as_array()?.iter().map(|byte| byte.as_u64().unwrap_or(0) as u8);
            Some(bytes.collect::<Vec<u8>>())
        });
        program.ends_with(b"forebay-device")
            && place.as_deref() == Some(std::os::unix::ffi::OsStrExt::as_bytes(pool.as_os_str()))
            && super::is_alive(*pid)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(serves).collect()
}

/// Keeper and server of the only served device of a pool.
pub fn keeper_and_server(pool: &Path) -> (i32, i32) {
    let all = processes(pool);
    assert_eq!(all.len(), 2, "{all:?}");
    let parent = |pid: i32| forebay_sys::process::Stat::of(pid as u32).unwrap().parent as i32;
    match parent(all[0]) == all[1] {
        true => (all[1], all[0]),
        false => (all[0], all[1]),
    }
}

/// True if a program is installed. Otherwise prints that a test is skipped.
pub fn has(program: &str) -> bool {
    let has = Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !has {
        eprintln!("skipped: needs {program}");
    }
    has
}

/// Runs a script in a memory cgroup of 48 MiB. None where there is none.
fn limited(place: &Place, script: &str) -> Option<Ran> {
    let ran = place.run(["emulate", "run", "--memory", "48MiB", "--", "bash", "-c", script]);
    match ran.err.contains("cannot limit") {
        true => {
            eprintln!("skipped: {}", ran.err);
            None
        }
        false => Some(ran),
    }
}

/// Fills a file system on volume `v`, of `mib` MiB, by programs with less memory than the device has, checks it, attaches
/// the volume anew and reads.
pub fn fill(place: &Place, kind: &str, make: &[&str], check: &[&str], mib: usize) {
    if !has(make[0]) || !has("fio") {
        return;
    }
    let at = place.join("mounted");
    let device = Device::attach(place, "v", &[]);
    done(make[0], &[&make[1..], &[device.name()]].concat());
    let mounted = Mounted::new(kind, device.name(), &at);
    let verified = format!(
        "cd {} && fio --name=f --rw=randwrite --bs=64k --size={}m --verify=crc32c --ioengine=psync --end_fsync=1 \
         --verify_state_save=0 --output-format=terse",
        at.display(),
        mib / 2
    );
    let Some(ran) = limited(place, &verified) else { return };
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // To the end: the file system says that it is full.
    let full = limited(place, &format!("dd if=/dev/zero of={}/rest bs=1M; sync", at.display())).unwrap();
    assert!(full.err.contains("No space left"), "{full:?}");
    if kind == "ext4" && has("sqlite3") {
        std::fs::remove_file(at.join("rest")).unwrap();
        let sql = "pragma synchronous=full; create table t(i integer primary key, s text); with recursive \
                   n(i) as (select 1 union all select i+1 from n where i<20000) insert into t select i, \
                   printf('%064d', i) from n; create index s on t(s); delete from t where i%3=0;";
        done("sqlite3", &[at.join("db").to_str().unwrap(), sql]);
    }
    let sum = done("sha256sum", &[at.join("f.0.0").to_str().unwrap()]);
    place.run(["volume", "detach", "v"]).assert_refused(1, &["it is mounted", "unmount"]);
    drop(mounted);
    done(check[0], &[&check[1..], &[device.name()]].concat());
    place.ok(["volume", "detach", "v"]);
    device.assert_detached();
    let device = Device::attach(place, "v", &[]);
    done(check[0], &[&check[1..], &[device.name()]].concat());
    let mounted = Mounted::new(kind, device.name(), &at);
    assert_eq!(done("sha256sum", &[at.join("f.0.0").to_str().unwrap()]), sum);
    if at.join("db").exists() {
        let sql = "pragma integrity_check; select count(*) from t;";
        assert_eq!(done("sqlite3", &[at.join("db").to_str().unwrap(), sql]), "ok\n13334\n");
    }
    drop(mounted);
    place.ok(["volume", "detach", "v"]);
}

/// fio writes volume `v`, of 64 MiB, at random places and verifies it; for minutes with FOREBAY_SOAK.
pub fn verify_by_fio(place: &Place) {
    if !has("fio") {
        return;
    }
    let device = Device::attach(place, "v", &[]);
    let loops = if std::env::var_os("FOREBAY_SOAK").is_some() { 400 } else { 4 };
    let job = |name: &str, block: &str, offset: &str| {
        let name = [format!("--name={name}"), format!("--filename={}", device.name())];
        let sizes = [format!("--bs={block}"), format!("--offset={offset}"), format!("--loops={loops}")];
        [&name[..], &sizes].concat()
    };
    let common = [
        "--ioengine=libaio --direct=1 --iodepth=16 --rw=randwrite --size=32m --verify=crc32c --do_verify=1",
        "--verify_fatal=1 --verify_state_save=0 --output-format=terse",
    ];
    let common = common.iter().flat_map(|part| part.split(' ')).map(str::to_owned);
    let words: Vec<String> = job("small", "4k", "0").into_iter().chain(common.clone()).collect();
    let words = [words, job("large", "512k", "32m"), common.collect()].concat();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    done("fio", &words);
    place.ok(["volume", "detach", "v"]);
}

/// The variable that marks the processes of a test, with the test's directory.
pub const MARK: &str = "FOREBAY_TEST_MARK";

/// Processes that [`MARK`] marks, with their children: pid, name and state (D for a wait that no signal ends).
pub fn marked(place: &Place) -> Vec<(i32, String, char)> {
    let mark = format!("{MARK}={}", place.path.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let variables = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let Some((before, after)) = stat.rsplit_once(") ") else { continue };
        if variables.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            let name = before.split_once('(').map(|(_, name)| name.to_owned());
            found.push((pid, name.unwrap_or_default(), after.chars().next().unwrap_or('?')));
        }
    }
    found
}
