//! Parameters of Open MPI as set in files by the user or the site: `~/.openmpi/mca-params.conf` before the site's
//! `openmpi-mca-params.conf`, or the files that `OMPI_MCA_mca_base_param_files` names.
//!
//! Open MPI's configuration determines the path of the site's file. `ompi_info` prints it but takes 0.1 s, so the file
//! is searched for in the usual places: relative to the launcher, and by the variables that relocate an installation.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::program;

const USERS: &str = ".openmpi/mca-params.conf";
const SITES: &str = "openmpi-mca-params.conf";
/// Variables that list the files: the parameter's name and its old name.
const LISTS: [&str; 2] = ["OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_param_files"];
pub(super) const LAUNCHERS: [&str; 3] = ["mpirun", "orterun", "mpiexec"];
/// For installations in /usr: Debian's and Red Hat's.
const ETC: [&str; 2] = ["/etc/openmpi", "/etc/openmpi-x86_64"];

/// The value of a parameter in files, for a launcher `program` or one that it starts.
pub(super) fn of_files(name: &str, program: &Path) -> Option<String> {
    let find = |launcher| program::find(OsStr::new(launcher)).ok();
    let is_launcher = LAUNCHERS
        .iter()
        .any(|launcher| program.file_name().is_some_and(|file| file.to_string_lossy().starts_with(launcher)));
    let launchers = is_launcher.then(|| program.to_owned()).into_iter();
    files(|name| std::env::var_os(name), launchers.chain(LAUNCHERS.into_iter().filter_map(find)))
        .iter()
        .find_map(|file| value(&std::fs::read_to_string(file).ok()?, name))
}

/// The files, in order of precedence.
fn files(get: impl Fn(&str) -> Option<OsString>, launchers: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    if let Some(list) = LISTS.iter().find_map(|name| get(name)) {
        let list = list.to_string_lossy().into_owned();
        return list.split([',', ':']).filter(|file| !file.is_empty()).map(PathBuf::from).collect();
    }
    let moved = get("OPAL_SYSCONFDIR").map(PathBuf::from);
    let moved = moved.or_else(|| Some(PathBuf::from(get("OPAL_PREFIX")?).join("etc")));
    // Links lead from /usr/bin/mpirun to the installed MPI's launcher.
    let by_launcher = launchers.filter_map(|path| path.canonicalize().ok()).flat_map(|path| {
        let prefix = path.parent().and_then(Path::parent).map(Path::to_owned).unwrap_or_default();
        let own = ["etc", "etc/openmpi"].map(|etc| prefix.join(etc));
        own.into_iter().chain(ETC.map(PathBuf::from).into_iter().filter(move |_| prefix.starts_with("/usr")))
    });
    let site = moved.into_iter().chain(by_launcher).map(|etc| etc.join(SITES)).find(|file| file.is_file());
    get("HOME").map(|home| Path::new(&home).join(USERS)).into_iter().chain(site).collect()
}

/// The value of a parameter in a file: its last line counts.
fn value(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().filter_map(|line| line.split_once('='));
    let value = lines.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).next_back()?;
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_that_of_the_last_line_with_the_name() {
        let text = "# orte_launch_agent = no\norte_launch_agents = no\n orte_launch_agent=/a/orted  -v \n\
                    plm_rsh_agent = rsh\norte_launch_agent\n";
        assert_eq!(value(text, "orte_launch_agent").as_deref(), Some("/a/orted  -v"));
        assert_eq!(value(text, "plm_rsh_agent").as_deref(), Some("rsh"));
        assert_eq!(value("a = 1\na = 2\n", "a").as_deref(), Some("2"));
        assert_eq!(value("a = \n", "a"), None);
    }

    #[test]
    fn files_are_the_users_and_then_the_sites_unless_they_are_listed() {
        let place = std::env::temp_dir().join(format!("forebay-params-{}", std::process::id()));
        let opt = place.join("opt");
        let (bin, etc) = (opt.join("bin"), opt.join("etc"));
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(&etc).unwrap();
        std::fs::write(bin.join("orterun"), "").unwrap();
        std::fs::write(etc.join(SITES), "").unwrap();
        std::os::unix::fs::symlink(bin.join("orterun"), place.join("mpirun")).unwrap();
        let found = |set: &[(&str, &str)]| {
            let get = |name: &str| set.iter().find(|(k, _)| *k == name).map(|(_, v)| OsString::from(v));
            files(get, [place.join("none"), place.join("mpirun")].into_iter())
        };
        let users = PathBuf::from("/home/u/.openmpi/mca-params.conf");
        assert_eq!(found(&[("HOME", "/home/u")]), [users.clone(), etc.canonicalize().unwrap().join(SITES)]);
        let moved = [("HOME", "/home/u"), ("OPAL_PREFIX", opt.to_str().unwrap())];
        assert_eq!(found(&moved), [users, etc.join(SITES)]);
        let listed = [("HOME", "/home/u"), ("OMPI_MCA_mca_base_param_files", "/a,/b")];
        assert_eq!(found(&listed), [PathBuf::from("/a"), PathBuf::from("/b")]);
        std::fs::remove_dir_all(&place).unwrap();
    }
}
