//! The settings of a site: `/etc/forebay/slurm.toml`, or the file that `FOREBAY_SLURM_CONF` names.

use std::path::{Path, PathBuf};

use forebay_types::{Error, Result};
use serde::Deserialize;

use crate::{failure, hosts};

/// Names another file of settings.
pub(crate) const VARIABLE: &str = "FOREBAY_SLURM_CONF";
const DEFAULT: &str = "/etc/forebay/slurm.toml";

/// The settings of a site.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    /// A directory that controller and nodes share; SlurmUser owns it.
    pub(crate) registry: PathBuf,
    /// The directory for pools on each node, best on a tmpfs.
    #[serde(default = "node_dir")]
    pub(crate) node_dir: PathBuf,
    /// The nodes that give space, as a list of hosts.
    pub(crate) nodes: String,
    /// How much each of them gives.
    capacity: String,
    /// The directory for data that could not be staged out. Everybody may create names in it, as in /tmp.
    pub(crate) keep_dir: PathBuf,
    /// How often a stage-out is tried.
    #[serde(default = "tries")]
    pub(crate) stage_out_tries: u32,
    /// The pause before the second try, in seconds; it doubles each time.
    #[serde(default = "pause")]
    pub(crate) stage_out_pause_s: u64,
    /// After so many seconds without a sign of the node that stages out, another node of the job does it.
    #[serde(default = "silence")]
    pub(crate) silence_s: u64,
    /// How long a job that starts again waits after the end of its last run, in seconds: longer than Slurm's credentials
    /// live, as slurmd before 23.02 may not run the prolog of a job that it still knows.
    #[serde(default = "restart_pause")]
    pub(crate) restart_pause_s: u64,
    /// The first of the ports of pools of several nodes.
    #[serde(default = "port")]
    pub(crate) first_port: u16,
    /// The number of those ports.
    #[serde(default = "ports")]
    pub(crate) ports: u16,
    /// Whether pools are mounted too.
    #[serde(default)]
    pub(crate) mount: bool,
    /// Stores whose stage-ins and stage-outs take turns.
    #[serde(default)]
    pub(crate) store: Vec<Store>,
}

/// A store, and how many transfers share it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Store {
    pub(crate) path: PathBuf,
    #[serde(default)]
    pub(crate) at_once: AtOnce,
}

/// How many jobs' transfers run at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "toml::Value")]
pub(crate) enum AtOnce {
    /// As many as make the store's total rate grow.
    #[default]
    Measured,
    /// So many; 0: all.
    Number(usize),
}

impl TryFrom<toml::Value> for AtOnce {
    type Error = String;

    fn try_from(value: toml::Value) -> std::result::Result<AtOnce, String> {
        match &value {
            toml::Value::String(word) if word == "measured" => Ok(AtOnce::Measured),
            toml::Value::Integer(number) if *number >= 0 => {
                Ok(AtOnce::Number(usize::try_from(*number).unwrap_or(usize::MAX)))
            }
            other => Err(format!("at_once = {other}: write \"measured\", or a number; 0 means all")),
        }
    }
}

fn node_dir() -> PathBuf {
    "/dev/shm/forebay-slurm".into()
}
fn tries() -> u32 {
    3
}
fn pause() -> u64 {
    10
}
fn silence() -> u64 {
    60
}
fn restart_pause() -> u64 {
    150
}
fn port() -> u16 {
    21000
}
fn ports() -> u16 {
    8000
}

impl Config {
    /// The settings of this site.
    ///
    /// # Errors
    /// A file that is missing, or that has a wrong word.
    pub(crate) fn read() -> Result<Config> {
        let path = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
        Config::of(&path.unwrap_or_else(|| DEFAULT.into()))
    }

    fn of(path: &Path) -> Result<Config> {
        let what = || format!("cannot read the settings for Slurm in {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::io(what(), &e)
                .cure(format!("write it as docs/slurm.md says, or name another by {VARIABLE}"))
        })?;
        let wrong = |why: String| failure::invalid(what(), why, "docs/slurm.md lists the settings");
        let config: Config = toml::from_str(&text).map_err(|e| wrong(e.message().to_owned()))?;
        for dir in [&config.registry, &config.node_dir, &config.keep_dir] {
            if !dir.is_absolute() {
                return Err(wrong(format!("{} does not begin with a slash", dir.display())));
            }
        }
        forebay_server::parse_size(&config.capacity).map_err(|e| wrong(format!("capacity: {e}")))?;
        hosts::expand(&config.nodes)?;
        if config.ports == 0 || config.first_port.checked_add(config.ports).is_none() {
            return Err(wrong("first_port and ports give no port".to_owned()));
        }
        Ok(config)
    }

    /// What a node gives to all its pools.
    pub(crate) fn node_bytes(&self) -> u64 {
        forebay_server::parse_size(&self.capacity).unwrap_or(0)
    }

    /// What all nodes give.
    pub(crate) fn total_bytes(&self) -> u64 {
        let nodes = hosts::expand(&self.nodes).map_or(0, |nodes| nodes.len() as u64);
        self.node_bytes().saturating_mul(nodes)
    }

    /// The directory of a user's pools on a node.
    pub(crate) fn user_dir(&self, uid: u32) -> PathBuf {
        self.node_dir.join(uid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Config> {
        let path = std::env::temp_dir().join(format!("forebay-slurm-{}-{}", std::process::id(), text.len()));
        std::fs::write(&path, text).unwrap();
        let config = Config::of(&path);
        std::fs::remove_file(&path).unwrap();
        config
    }

    const LEAST: &str = "registry = '/r'\nnodes = 'n[1-4]'\ncapacity = '2GiB'\nkeep_dir = '/k'\n";

    #[test]
    fn config_needs_four_settings_and_sums_up_the_space() {
        let config = of(LEAST).unwrap();
        assert_eq!((config.node_bytes(), config.total_bytes()), (2 << 30, 8 << 30));
        assert_eq!(config.user_dir(7), Path::new("/dev/shm/forebay-slurm/7"));
    }

    #[test]
    fn config_with_a_wrong_word_names_it() {
        let error = of(&format!("{LEAST}capasity = '1GiB'\n")).unwrap_err().to_string();
        assert!(error.contains("capasity") && error.contains("docs/slurm.md"), "{error}");
        let error = of(&LEAST.replace("2GiB", "much")).unwrap_err().to_string();
        assert!(error.contains("capacity"), "{error}");
        let store = |at_once: &str| of(&format!("{LEAST}[[store]]\npath = '/l'\n{at_once}\n"));
        assert_eq!(store("").unwrap().store[0].at_once, AtOnce::Measured);
        assert_eq!(store("at_once = 'measured'").unwrap().store[0].at_once, AtOnce::Measured);
        assert_eq!(store("at_once = 2").unwrap().store[0].at_once, AtOnce::Number(2));
        let error = store("at_once = 'few'").unwrap_err().to_string();
        assert!(error.contains("few") && error.contains("measured"), "{error}");
        let error = of(&LEAST.replace("'/r'", "'r'")).unwrap_err().to_string();
        assert!(error.contains("slash"), "{error}");
    }
}
