//! Transfers that go before what a pool drains by its policies. They belong to other pools, and say so by files.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::policy::matches_name;

/// Who claims a store touches a file. One that was not touched for so long belongs to a process that was killed, and does
/// not count.
pub const CLAIM_AGE: Duration = Duration::from_secs(20);
/// How long a change gives way at most, beyond the time of its policy.
pub const YIELD: Duration = Duration::from_secs(300);

/// Files that claim a store: those of a directory whose names match. As text the directory and the pattern: `/dir/*@a@*`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct YieldTo {
    dir: PathBuf,
    names: String,
}

impl YieldTo {
    /// Whether one of them was touched lately. A directory that cannot be read has none.
    pub fn is_claimed(&self) -> bool {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut named =
            entries.filter(|entry| matches_name(self.names.as_bytes(), entry.file_name().as_encoded_bytes()));
        named.any(|entry| {
            let touched = entry.metadata().and_then(|stat| stat.modified());
            // One of the future: another node's clock is ahead.
            touched.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < CLAIM_AGE)
        })
    }
}

impl fmt::Display for YieldTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dir.join(&self.names).display())
    }
}

impl From<YieldTo> for String {
    fn from(yield_to: YieldTo) -> String {
        yield_to.to_string()
    }
}

impl TryFrom<String> for YieldTo {
    type Error = String;

    fn try_from(text: String) -> Result<YieldTo, String> {
        text.parse()
    }
}

impl std::str::FromStr for YieldTo {
    type Err = String;

    fn from_str(text: &str) -> Result<YieldTo, String> {
        match text.rsplit_once('/') {
            Some((dir, names)) if text.starts_with('/') && !names.is_empty() => {
                Ok(YieldTo { dir: format!("{dir}/").into(), names: names.to_owned() })
            }
            _ => Err("it is no absolute path of files".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_is_claimed_as_long_as_a_file_that_matches_is_touched() {
        let dir = std::env::temp_dir().join(format!("forebay-claims-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let text = format!("{}/*@!a@*", dir.display());
        let yield_to: YieldTo = text.parse().unwrap();
        assert_eq!(yield_to.to_string(), text);
        assert!(!yield_to.is_claimed(), "there is no such directory");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("1@9.0@!a!b@in"), "").unwrap();
        assert!(!yield_to.is_claimed(), "it is another store's");
        let claim = dir.join("1@9.0@!a@in");
        std::fs::write(&claim, "").unwrap();
        assert!(yield_to.is_claimed());
        let file = std::fs::File::options().write(true).open(&claim).unwrap();
        file.set_modified(SystemTime::now() - CLAIM_AGE).unwrap();
        assert!(!yield_to.is_claimed(), "its process was killed");
        std::fs::remove_dir_all(&dir).unwrap();
        for text in ["", "names", "dir/names", "/dir/"] {
            assert!(text.parse::<YieldTo>().is_err(), "{text}");
        }
        assert_eq!("/names".parse::<YieldTo>().unwrap().to_string(), "/names");
    }
}
