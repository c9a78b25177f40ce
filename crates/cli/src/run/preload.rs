//! The library that shows a program the pool: finds it, puts it into the environment, and keeps this command itself
//! free of it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use forebay_server::TOKEN_VARIABLE;
use forebay_types::{Code, Error, Result};

use super::enter::Entered;
use super::{agent, params};

const LIBRARY: &str = "libforebay_preload.so";
/// The library for MPI programs; it does not exist if Forebay was built without an MPI.
const MPI_LIBRARY: &str = "libforebay_mpi.so";
const PRELOAD: &str = "LD_PRELOAD";
/// The preload list that this command was started with, while it runs without it.
const KEPT: &str = "FOREBAY_KEPT_PRELOAD";
/// How many runs this one is nested in.
pub(super) const LEVEL: &str = "FOREBAY_LEVEL";

/// Restarts this program without the library if it was started with it, as within `forebay run -- bash`: a tool must
/// not see files of the pool as its own files.
pub(crate) fn shed() {
    let Some(list) = std::env::var_os(PRELOAD) else { return };
    if !entries(&list).iter().any(|e| is_ours(e)) {
        return;
    }
    let Ok(me) = std::env::current_exe() else { return };
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "forebay".into());
    let e =
        std::process::Command::new(me).arg0(name).args(arguments).env_remove(PRELOAD).env(KEPT, list).exec();
    note!("forebay: cannot start again without {LIBRARY}: {e}");
    std::process::exit(1);
}

/// Entries of a preload list, separated by blanks and colons.
fn entries(list: &OsStr) -> Vec<OsString> {
    list.as_bytes()
        .split(|b| matches!(b, b' ' | b':'))
        .filter(|e| !e.is_empty())
        .map(|e| OsString::from_vec(e.to_vec()))
        .collect()
}

fn is_ours(entry: &OsStr) -> bool {
    let name = Path::new(entry).file_name();
    name == Some(OsStr::new(LIBRARY)) || name == Some(OsStr::new(MPI_LIBRARY))
}

/// Finds the library beside this program or in the `lib` next to its directory.
pub(super) fn library() -> Result<PathBuf> {
    let what = || format!("cannot find {LIBRARY}");
    let me = std::env::current_exe().map_err(|e| Error::io(what(), &e))?;
    let dir = me.parent().unwrap_or(Path::new("/"));
    let places = [dir.to_owned(), dir.join("../lib/forebay"), dir.join("../lib"), dir.join("../lib64")];
    let found = places.iter().map(|p| p.join(LIBRARY)).find(|p| p.is_file()).ok_or_else(|| {
        let looked: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        Error::new(Code::NotFound, what())
            .why(format!("it is in none of {}", looked.join(", ")))
            .cure("install Forebay as a whole: `make install PREFIX=DIR`")
    })?;
    let found = found.canonicalize().map_err(|e| Error::io(what(), &e))?;
    if found.as_os_str().as_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        return Err(Error::new(Code::Invalid, format!("cannot preload {}", found.display()))
            .why("the loader takes blanks and colons in its path for separators")
            .cure("install Forebay into a directory without them"));
    }
    Ok(found)
}

/// The preload list for the program: the user's entries, then Forebay's. Calls that are not for the pool go from
/// Forebay's library directly to the kernel, so a tracer or sanitizer that wants to see them must come first.
fn list(library: &Path, users: Option<OsString>) -> OsString {
    let mut list = OsString::new();
    for entry in entries(&users.unwrap_or_default()) {
        if !is_ours(&entry) {
            list.push(entry);
            list.push(":");
        }
    }
    let mpi = library.with_file_name(MPI_LIBRARY);
    if mpi.is_file() {
        list.push(mpi);
        list.push(":");
    }
    list.push(library);
    list
}

/// A warning for launchers of MPI programs where Forebay was built without MPI-IO. If only the driver of one MPI is
/// missing, the library itself warns (`mpi/src/chooser.c`), since it also sees programs that scripts start.
pub(super) fn without_mpi(library: &Path, program: &Path) -> Option<String> {
    let name = program.file_name()?.to_str()?;
    // Debian's launchers are mpirun.openmpi and mpiexec.hydra.
    let is_launcher = params::LAUNCHERS.contains(&name.split('.').next()?);
    if !is_launcher || library.with_file_name(MPI_LIBRARY).is_file() {
        return None;
    }
    let dir = library.parent()?.display();
    Some(format!(
        "there is no {MPI_LIBRARY} in {dir}: MPI programs use their MPI library's own MPI-IO \
         (`make build` makes it on x86-64)"
    ))
}

/// Changes to this process's environment for the program; `None` removes a variable.
pub(super) fn environment(
    library: &Path,
    entered: &Entered,
    prefix: &Path,
    program: &Path,
) -> Vec<(OsString, Option<OsString>)> {
    let users = std::env::var_os(KEPT).or_else(|| std::env::var_os(PRELOAD));
    let level = level() + 1;
    // Programs on other nodes get Forebay's entries alone: the libraries that the user preloads may not exist there.
    let elsewhere = [
        (PRELOAD, list(library, None)),
        ("FOREBAY_POOL", entered.dir.clone().into()),
        ("FOREBAY_PREFIX", prefix.into()),
        (LEVEL, level.to_string().into()),
    ];
    let has_others = !entered.embedded && forebay_server::directory::has_met_others(&entered.dir);
    let agent = agent::variable(has_others.then_some(elsewhere.as_slice()), program);
    let own = [
        (PRELOAD.into(), Some(list(library, users))),
        (KEPT.into(), None),
        ("FOREBAY_POOL".into(), Some(entered.dir.clone().into())),
        ("FOREBAY_PREFIX".into(), Some(prefix.into())),
        (TOKEN_VARIABLE.into(), Some(entered.membership.token().into())),
        (LEVEL.into(), Some(level.to_string().into())),
    ];
    own.into_iter().chain(agent).collect()
}

/// How many runs this one is nested in; 0 for an outermost.
pub(super) fn level() -> u32 {
    std::env::var(LEVEL).ok().and_then(|v| v.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_mpi_is_said_of_launchers_alone() {
        let ours = Path::new("/nowhere/lib/libforebay_preload.so");
        for launcher in ["/usr/bin/mpirun", "/usr/bin/mpirun.openmpi", "mpiexec.hydra", "orterun"] {
            let said = without_mpi(ours, Path::new(launcher)).unwrap();
            assert!(said.contains("no libforebay_mpi.so in /nowhere/lib:"), "{said}");
        }
        for other in ["/usr/bin/sh", "/usr/bin/mpirunner", "/home/u/run.mpirun", "/"] {
            assert_eq!(without_mpi(ours, Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn list_puts_ours_last_once_and_keeps_the_users() {
        let ours = Path::new("/opt/lib/libforebay_preload.so");
        assert_eq!(list(ours, None), "/opt/lib/libforebay_preload.so");
        assert_eq!(
            list(ours, Some("/a.so /old/libforebay_mpi.so:/old/libforebay_preload.so:/b.so:".into())),
            "/a.so:/b.so:/opt/lib/libforebay_preload.so"
        );
    }
}
