//! Whether a logout would clear a directory.
//!
//! systemd-logind removes a user's files and directories in `/dev/shm` when the user's last session ends (RemoveIPC, on
//! by default), and unmounts `/run/user/UID`. A pool there would vanish under a job that outlives the login that
//! started it. System users and users with lingering are exempt. Settings are read as logind.conf(5) describes: the
//! first `logind.conf` found, then the drop-ins of all directories in the order of their names. A drop-in in `/etc`
//! hides those of the same name in other directories. The last assignment counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::host::Host;

/// Where systemd looks for settings. For each name, the first directory that has it counts.
const CONFIG_DIRECTORIES: &[&str] =
    &["/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd"];
/// Users with smaller numbers are system users (systemd's SYSTEM_UID_MAX).
const FIRST_USER: u32 = 1000;

/// The reason why a logout of user `uid` would clear `path` (absolute, without symbolic links), as text for the user.
/// None if it would not.
pub fn logout_clears(host: &Host, path: &Path, uid: u32) -> Option<String> {
    // logind makes this directory when it starts.
    if uid < FIRST_USER || !host.has("/run/systemd/users") || lingers(host, uid) {
        return None;
    }
    let cure = "loginctl enable-linger prevents it";
    let place = path.display();
    if path.starts_with(format!("/run/user/{uid}")) {
        return Some(format!("logging out unmounts /run/user/{uid} and with it {place}; {cure}"));
    }
    if path.starts_with("/dev/shm") && removes_ipc(host) {
        return Some(format!(
            "systemd-logind clears your files in /dev/shm, and with them {place}, when your last session ends (RemoveIPC \
             in logind.conf); {cure}"
        ));
    }
    None
}

fn lingers(host: &Host, uid: u32) -> bool {
    // The marker file has the user's name.
    let passwd = host.read("/etc/passwd").unwrap_or_default();
    let uid = uid.to_string();
    let names = passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, number) = (fields.next()?, fields.next()?, fields.next()?);
        (number == uid).then_some(name)
    });
    names
        .into_iter()
        .any(|name| !name.is_empty() && host.has(Path::new("/var/lib/systemd/linger").join(name)))
}

fn removes_ipc(host: &Host) -> bool {
    let main =
        CONFIG_DIRECTORIES.iter().find_map(|place| host.read(Path::new(place).join("logind.conf")).ok());
    let mut setting = main.as_deref().and_then(remove_ipc_in);
    for path in drop_ins(host).into_values() {
        let found = std::fs::read(path).ok().and_then(|text| remove_ipc_in(&String::from_utf8_lossy(&text)));
        setting = found.or(setting);
    }
    setting.unwrap_or(true)
}

/// The drop-ins that count, by name.
fn drop_ins(host: &Host) -> BTreeMap<OsString, PathBuf> {
    let mut found = BTreeMap::new();
    for place in CONFIG_DIRECTORIES {
        let Ok(entries) = std::fs::read_dir(host.path(Path::new(place).join("logind.conf.d"))) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if Path::new(&name).extension().is_some_and(|e| e == "conf") {
                found.entry(name).or_insert_with(|| entry.path());
            }
        }
    }
    found
}

/// The last valid RemoveIPC= of the section [Login].
fn remove_ipc_in(text: &str) -> Option<bool> {
    let (mut in_login, mut setting) = (false, None);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            in_login = section == "Login]";
        } else if let (true, Some((key, value))) = (in_login, line.split_once('=')) {
            if key.trim_end() == "RemoveIPC" {
                setting = boolean(value.trim()).or(setting);
            }
        }
    }
    setting
}

fn boolean(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "yes" | "y" | "true" | "t" | "on" => Some(true),
        "0" | "no" | "n" | "false" | "f" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const RUNS: (&str, &str) = ("run/systemd/users/.made", "");

    fn clears(files: &[(&str, &str)], path: &str, uid: u32) -> Option<String> {
        let scratch = Scratch::with(files);
        logout_clears(&Host::at(scratch.path()), Path::new(path), uid)
    }

    #[test]
    fn logout_clears_shm_of_a_user_by_default() {
        let reason = clears(&[RUNS], "/dev/shm/pool", 1000).unwrap();
        assert!(reason.contains("RemoveIPC") && reason.contains("/dev/shm/pool"), "{reason}");
        let reason = clears(&[RUNS], "/run/user/1000/pool", 1000).unwrap();
        assert!(reason.contains("linger"), "{reason}");
    }

    #[test]
    fn logout_clears_nothing_where_it_does_not_apply() {
        assert_eq!(clears(&[], "/dev/shm/pool", 1000), None, "logind does not run");
        assert_eq!(clears(&[RUNS], "/dev/shm/pool", 999), None, "a system user");
        assert_eq!(clears(&[RUNS], "/dev/shm/pool", 0), None, "root");
        assert_eq!(clears(&[RUNS], "/tmp/pool", 1000), None, "another place");
        assert_eq!(clears(&[RUNS], "/dev/shmem", 1000), None, "another name");
        assert_eq!(clears(&[RUNS], "/run/user/1001/pool", 1000), None, "another user's");
    }

    #[test]
    fn logout_clears_nothing_of_a_user_who_lingers() {
        let passwd = ("etc/passwd", "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n");
        let marker = ("var/lib/systemd/linger/ann", "");
        assert_eq!(clears(&[RUNS, passwd, marker], "/dev/shm/p", 1000), None);
        assert!(clears(&[RUNS, passwd, marker], "/dev/shm/p", 1001).is_some());
        assert!(clears(&[RUNS, passwd], "/dev/shm/p", 1000).is_some());
    }

    #[test]
    fn logout_clears_follows_the_settings_as_systemd_reads_them() {
        let main_no =
            ("etc/systemd/logind.conf", "# RemoveIPC=yes\n[Login]\nKillUserProcesses=yes\nRemoveIPC = no\n");
        let shm = |files: &[(&str, &str)]| clears(&[files, &[RUNS]].concat(), "/dev/shm/p", 1000).is_some();
        assert!(!shm(&[main_no]));
        let vendor_yes = ("usr/lib/systemd/logind.conf", "[Login]\nRemoveIPC=yes\n");
        assert!(!shm(&[main_no, vendor_yes]), "the first logind.conf counts");
        let late = ("usr/lib/systemd/logind.conf.d/90-site.conf", "[Login]\nRemoveIPC=on\n");
        assert!(shm(&[main_no, late]), "a drop-in beats logind.conf");
        let hidden = ("etc/systemd/logind.conf.d/90-site.conf", "");
        assert!(!shm(&[main_no, late, hidden]), "a namesake in /etc hides it");
        let early = ("etc/systemd/logind.conf.d/10-a.conf", "[Login]\nRemoveIPC=0\n");
        assert!(shm(&[early, late]), "the last name counts, wherever it is");
        let other =
            ("etc/systemd/logind.conf.d/95.conf", "[Other]\nRemoveIPC=no\n[Login]\nRemoveIPC=maybe\n");
        assert!(shm(&[late, other]), "another section and a bad value count for nothing");
        let not_conf = ("etc/systemd/logind.conf.d/99.bak", "[Login]\nRemoveIPC=no\n");
        assert!(shm(&[not_conf]));
    }
}
