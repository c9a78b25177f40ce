//! How the library gets to ranks that Open MPI's mpirun starts on other nodes by ssh, which hands on no environment.
//!
//! mpirun starts a daemon there, by the words in the parameter `orte_launch_agent`, `orted` unless set; the daemon's ranks have
//! its environment. The parameter is given here as a variable, `env NAME=VALUE ... orted`: words on mpirun's command line go
//! first, and so does what the user has set. Its list of variables (`mca_base_env_list`) would make `mpirun -x` fail. Hydra and
//! srun hand their whole environment on, and need nothing.
//!
//! Test: tests/conformance/tests/cluster/remote.rs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

/// Open MPI 4's.
pub(super) const VARIABLE: &str = "OMPI_MCA_orte_launch_agent";
const PARAMETER: &str = "orte_launch_agent";
const DAEMON: &str = "orted";
/// What every one of ours sets.
const MARK: &str = " FOREBAY_POOL=";
/// What users set for the libraries in programs; all else is of this node.
const FOR_PROGRAMS: [&str; 3] = ["FOREBAY_DISABLE", "FOREBAY_MPI_DEBUG", "FOREBAY_TMPDIR"];

/// What the variable is to be: a value, nothing as it was before, or, inside, none where an outer run's is there, which names
/// another pool.
pub(super) fn variable(wanted: Option<&[(&str, OsString)]>) -> Option<(OsString, Option<OsString>)> {
    let get = |name: &str| std::env::var_os(name);
    let own = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .filter(|(name, _)| FOR_PROGRAMS.contains(&name.as_str()))
        .collect();
    let is_in_file = get("HOME")
        .and_then(|home| std::fs::read_to_string(Path::new(&home).join(".openmpi/mca-params.conf")).ok())
        .is_some_and(|text| text.lines().any(|line| line.trim_start().starts_with(PARAMETER)));
    let there = get(VARIABLE).map(|value| value.to_string_lossy().into_owned());
    let value = value(wanted, own, there.as_deref(), is_in_file)?;
    Some((VARIABLE.into(), value.map(Into::into)))
}

/// The words of a launch agent; none leaves all as it is. `own` is what of [`FOR_PROGRAMS`] is set here.
#[allow(clippy::option_option)] // to set, to take away, to leave
fn value(
    wanted: Option<&[(&str, OsString)]>,
    own: BTreeMap<String, String>,
    there: Option<&str>,
    is_in_file: bool,
) -> Option<Option<String>> {
    let is_ours = there.is_some_and(|value| value.starts_with("env ") && value.contains(MARK));
    if there.is_some_and(|value| !value.is_empty()) && !is_ours || is_in_file {
        return None;
    }
    let words = wanted.and_then(|wanted| {
        let mut all: BTreeMap<&str, &str> =
            own.iter().filter(|(_, v)| is_plain(v)).map(|(k, v)| (k.as_str(), v.as_str())).collect();
        for (name, value) in wanted {
            all.insert(name, value.to_str().filter(|value| is_plain(value))?);
        }
        let words: Vec<String> = all.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Some(format!("env {} {DAEMON}", words.join(" ")))
    });
    match words {
        None if !is_ours => None,
        words => Some(words),
    }
}

/// No shell on the way makes anything else of it, whichever it is.
fn is_plain(value: &str) -> bool {
    !value.is_empty() && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-+:,=@%".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Vec<(&'static str, OsString)> {
        vec![("LD_PRELOAD", "/l/a.so:/l/b.so".into()), ("FOREBAY_POOL", "/dev/shm/p".into())]
    }

    fn own(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    const OURS: &str = "env FOREBAY_MPI_DEBUG=1 FOREBAY_POOL=/dev/shm/p LD_PRELOAD=/l/a.so:/l/b.so orted";

    #[test]
    fn agent_names_what_the_library_needs_and_what_the_user_set_of_ours() {
        let set = own(&[("FOREBAY_MPI_DEBUG", "1"), ("FOREBAY_TMPDIR", "/a b")]);
        assert_eq!(value(Some(&wanted()), set, None, false), Some(Some(OURS.to_owned())));
    }

    #[test]
    fn users_own_agent_stays() {
        assert_eq!(value(Some(&wanted()), own(&[]), Some("/opt/bin/orted"), false), None);
        assert_eq!(value(Some(&wanted()), own(&[]), Some("env A=1 orted"), false), None);
        assert_eq!(value(Some(&wanted()), own(&[]), None, true), None);
    }

    #[test]
    fn outer_runs_agent_is_replaced_or_taken_away() {
        let set = || own(&[("FOREBAY_MPI_DEBUG", "1")]);
        let outer = "env FOREBAY_POOL=/q LD_PRELOAD=/l/b.so orted";
        assert!(outer.contains(MARK));
        assert_eq!(value(Some(&wanted()), set(), Some(outer), false), Some(Some(OURS.to_owned())));
        assert_eq!(value(None, set(), Some(outer), false), Some(None));
        assert_eq!(value(None, set(), None, false), None);
    }

    #[test]
    fn value_that_a_shell_would_take_apart_makes_no_agent() {
        for odd in ["/a b", "/a;b", "/$HOME", "", "/a'b", "/a*"] {
            let wanted = [("FOREBAY_POOL", OsString::from(odd))];
            assert_eq!(value(Some(&wanted), own(&[]), None, false), None, "{odd}");
        }
    }
}
