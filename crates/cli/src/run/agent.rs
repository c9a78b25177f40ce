//! Passes the library to ranks that Open MPI's mpirun starts on other nodes by ssh, which does not forward the
//! environment.
//!
//! mpirun starts a daemon there with the command in the parameter `orte_launch_agent`, by default `orted`; the daemon's
//! ranks inherit its environment. This module sets the parameter as a variable, `env NAME=VALUE ... orted`, with the
//! user's or the site's command in place of `orted`. A variable takes precedence over the files that set parameters
//! ([`params`]), and options on mpirun's command line take precedence over a variable. Open MPI's list of variables
//! (`mca_base_env_list`) would make `mpirun -x` fail. Hydra and srun forward their whole environment and need nothing.
//!
//! Test: tests/conformance/tests/cluster/remote.rs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use super::params;

/// Open MPI 4's variable for the parameter.
pub(super) const VARIABLE: &str = "OMPI_MCA_orte_launch_agent";
const PARAMETER: &str = "orte_launch_agent";
const DAEMON: &str = "orted";
/// Every launch agent made by this module contains it.
const MARK: &str = " FOREBAY_POOL=";
/// Variables that users set for the libraries in programs; all other variables of Forebay concern this node alone.
const FOR_PROGRAMS: [&str; 6] = [
    "FOREBAY_DISABLE",
    "FOREBAY_MODEL",
    "FOREBAY_MPI_DEBUG",
    "FOREBAY_MPI_PREFIX",
    "FOREBAY_RECALL",
    "FOREBAY_TMPDIR",
];

/// The launch agent's variable for this program: its value, or `None` inside to remove it. No result means that it
/// stays as it is. An outer run's agent, which names another pool, is replaced or removed.
pub(super) fn variable(
    wanted: Option<&[(&str, OsString)]>,
    program: &Path,
) -> Option<(OsString, Option<OsString>)> {
    let own = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .filter(|(name, _)| FOR_PROGRAMS.contains(&name.as_str()))
        .collect();
    let there = std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
    let in_files = || params::of_files(PARAMETER, program);
    let value = value(wanted, own, there.as_deref().filter(|value| !value.is_empty()), in_files)?;
    Some((VARIABLE.into(), value.map(Into::into)))
}

/// The value of the launch agent; `None` leaves the variable as it is. `own` holds those of [`FOR_PROGRAMS`] that are
/// set here.
#[allow(clippy::option_option)] // set, remove, leave
fn value(
    wanted: Option<&[(&str, OsString)]>,
    own: BTreeMap<String, String>,
    there: Option<&str>,
    in_files: impl FnOnce() -> Option<String>,
) -> Option<Option<String>> {
    let outer = there.and_then(|value| users_of(value));
    let words = wanted.and_then(|wanted| {
        let mut all: BTreeMap<&str, &str> =
            own.iter().filter(|(_, v)| is_plain(v)).map(|(k, v)| (k.as_str(), v.as_str())).collect();
        for (name, value) in wanted {
            all.insert(name, value.to_str().filter(|value| is_plain(value))?);
        }
        let words: Vec<String> = all.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let users = outer.or(there).map(str::to_owned).or_else(in_files);
        Some(format!("env {} {}", words.join(" "), users.as_deref().unwrap_or(DAEMON)))
    });
    match (words, outer) {
        (None, None) => None,
        (None, Some(users)) => Some((users != DAEMON).then(|| users.to_owned())),
        (words, _) => Some(words),
    }
}

/// The part of an agent made by a run that follows the run's own words.
fn users_of(value: &str) -> Option<&str> {
    let mut rest = value.strip_prefix("env ").filter(|_| value.contains(MARK))?;
    while let Some((word, after)) = rest.split_once(' ') {
        if !(word.starts_with("FOREBAY_") || word.starts_with("LD_PRELOAD=")) {
            break;
        }
        rest = after;
    }
    Some(rest)
}

/// True if no shell on the way, of any kind, would change the value.
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

    const OURS: &str = "env FOREBAY_MPI_DEBUG=1 FOREBAY_POOL=/dev/shm/p LD_PRELOAD=/l/a.so:/l/b.so";
    const NOTHING: fn() -> Option<String> = || None;

    fn ours(users: &str) -> Option<Option<String>> {
        Some(Some(format!("{OURS} {users}")))
    }

    #[test]
    fn agent_names_what_the_library_needs_and_what_the_user_set_of_ours() {
        let set = own(&[("FOREBAY_MPI_DEBUG", "1"), ("FOREBAY_TMPDIR", "/a b")]);
        assert_eq!(value(Some(&wanted()), set, None, NOTHING), ours("orted"));
    }

    #[test]
    fn users_own_agent_is_what_is_started() {
        let set = || own(&[("FOREBAY_MPI_DEBUG", "1")]);
        for agent in ["/opt/bin/orted", "env A=1 orted", "A=1 orted"] {
            assert_eq!(value(Some(&wanted()), set(), Some(agent), NOTHING), ours(agent));
            assert_eq!(value(Some(&wanted()), set(), None, || Some(agent.to_owned())), ours(agent));
            assert_eq!(value(None, set(), Some(agent), NOTHING), None);
        }
        let other = || Some("of a file".to_owned());
        assert_eq!(value(Some(&wanted()), set(), Some("/opt/bin/orted"), other), ours("/opt/bin/orted"));
        assert_eq!(value(None, set(), None, other), None);
    }

    #[test]
    fn outer_runs_agent_is_replaced_or_taken_away_and_what_it_started_stays() {
        let set = || own(&[("FOREBAY_MPI_DEBUG", "1")]);
        for users in ["/opt/bin/orted -v", "env A=1 orted", "orted"] {
            let outer = format!("env FOREBAY_LEVEL=1 FOREBAY_POOL=/q LD_PRELOAD=/l/b.so {users}");
            assert_eq!(value(Some(&wanted()), set(), Some(&outer), NOTHING), ours(users));
            let before = Some((users != "orted").then(|| users.to_owned()));
            assert_eq!(value(None, set(), Some(&outer), NOTHING), before);
        }
        assert_eq!(value(None, set(), None, NOTHING), None);
    }

    #[test]
    fn value_that_a_shell_would_take_apart_makes_no_agent() {
        for odd in ["/a b", "/a;b", "/$HOME", "", "/a'b", "/a*"] {
            let wanted = [("FOREBAY_POOL", OsString::from(odd))];
            assert_eq!(value(Some(&wanted), own(&[]), None, NOTHING), None, "{odd}");
        }
    }
}
